//! Short forms for rows that map registers to registers, lane by lane.

/// The Rust type of a PTX type.
macro_rules! lane_type {
    (u16) => {
        u16
    };
    (s16) => {
        i16
    };
    (b16) => {
        u16
    };
    (u32) => {
        u32
    };
    (s32) => {
        i32
    };
    (b32) => {
        u32
    };
    (f32) => {
        f32
    };
    (u64) => {
        u64
    };
    (s64) => {
        i64
    };
    (b64) => {
        u64
    };
    (f64) => {
        f64
    };
}

/// The [`super::Value`] of a PTX type.
macro_rules! value {
    (u16) => {
        $crate::isa::Value::B16
    };
    (s16) => {
        $crate::isa::Value::B16
    };
    (b16) => {
        $crate::isa::Value::B16
    };
    (u32) => {
        $crate::isa::Value::B32
    };
    (s32) => {
        $crate::isa::Value::B32
    };
    (b32) => {
        $crate::isa::Value::B32
    };
    (f32) => {
        $crate::isa::Value::F32
    };
    (u64) => {
        $crate::isa::Value::B64
    };
    (s64) => {
        $crate::isa::Value::B64
    };
    (b64) => {
        $crate::isa::Value::B64
    };
    (f64) => {
        $crate::isa::Value::F64
    };
}

/// Adds a row that computes a destination from one to three sources: `map!(rows, Integer, "mul.wide.u16", u16, u16 => u32,
/// |x, y| u32::from(x) * u32::from(y))`.
macro_rules! map {
    ($rows:ident, $category:ident, $name:expr, $a:ident => $d:ident, $f:expr) => {
        $rows.push($crate::isa::row(
            $name,
            &[$crate::isa::Operand::Out(value!($d)), $crate::isa::Operand::In(value!($a))],
            $crate::isa::Category::$category,
            0,
            $crate::code::Action::Compute(|r, a, m| r.map1::<lane_type!($a), lane_type!($d)>(a, m, $f)),
        ))
    };
    ($rows:ident, $category:ident, $name:expr, $a:ident, $b:ident => $d:ident, $f:expr) => {
        $rows.push($crate::isa::row(
            $name,
            &[
                $crate::isa::Operand::Out(value!($d)),
                $crate::isa::Operand::In(value!($a)),
                $crate::isa::Operand::In(value!($b)),
            ],
            $crate::isa::Category::$category,
            0,
            $crate::code::Action::Compute(|r, a, m| r.map2::<lane_type!($a), lane_type!($b), lane_type!($d)>(a, m, $f)),
        ))
    };
    ($rows:ident, $category:ident, $name:expr, $a:ident, $b:ident, $c:ident => $d:ident, $f:expr) => {
        $rows.push($crate::isa::row(
            $name,
            &[
                $crate::isa::Operand::Out(value!($d)),
                $crate::isa::Operand::In(value!($a)),
                $crate::isa::Operand::In(value!($b)),
                $crate::isa::Operand::In(value!($c)),
            ],
            $crate::isa::Category::$category,
            0,
            $crate::code::Action::Compute(|r, a, m| {
                r.map3::<lane_type!($a), lane_type!($b), lane_type!($c), lane_type!($d)>(a, m, $f)
            }),
        ))
    };
}

/// Adds a row a type, all operands being of that type: `map_each!(rows, Integer, "add", [u16 s16], (2) |x, y| x.wrapping_add(y))`.
macro_rules! map_each {
    ($rows:ident, $category:ident, $name:literal, [$($t:ident)*], (1) $f:expr) => {
        $(map!($rows, $category, concat!($name, ".", stringify!($t)), $t => $t, $f);)*
    };
    ($rows:ident, $category:ident, $name:literal, [$($t:ident)*], (2) $f:expr) => {
        $(map!($rows, $category, concat!($name, ".", stringify!($t)), $t, $t => $t, $f);)*
    };
    ($rows:ident, $category:ident, $name:literal, [$($t:ident)*], (3) $f:expr) => {
        $(map!($rows, $category, concat!($name, ".", stringify!($t)), $t, $t, $t => $t, $f);)*
    };
}
