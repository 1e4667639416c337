//! Macros for instruction rows that map registers to registers, lane by lane.

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

/// A kernel compiled for the best available instruction set: `kernel!(|r, a, m| r.map1(a, m, |x: u32| !x))`. The body must be
/// inlined completely; see [`crate::isa::vector`].
macro_rules! kernel {
    (|$r:ident, $a:ident, $m:ident| $body:expr) => {{
        struct Loop;
        impl $crate::isa::vector::Kernel for Loop {
            #[inline(always)]
            fn run($r: &mut $crate::exec_context::Registers, $a: &$crate::operands::Args, $m: u32) {
                $body
            }
        }
        $crate::isa::vector::Host::detect().compute::<Loop>()
    }};
}

/// As `kernel!`, for a function on a [`crate::exec_context::ExecContext`].
macro_rules! work {
    ($function:path) => {{
        struct Function;
        impl $crate::isa::vector::Work for Function {
            #[inline(always)]
            fn run(
                cx: &mut $crate::exec_context::ExecContext<'_>,
                a: &$crate::operands::Args,
                m: u32,
            ) -> Result<(), Box<$crate::fault::Fault>> {
                $function(cx, a, m)
            }
        }
        $crate::isa::vector::Host::detect().access::<Function>()
    }};
}

/// Adds a row that computes a destination from one to three sources: `map!(rows, Integer, "mul.wide.u16", u16, u16 => u32,
/// |x, y| u32::from(x) * u32::from(y))`.
macro_rules! map {
    ($rows:ident, $category:ident, $name:expr, $($source:ident),+ => $d:ident, $f:expr) => {
        $rows.push($crate::isa::row(
            $name,
            &[$crate::isa::Operand::Out(value!($d)), $($crate::isa::Operand::In(value!($source))),+],
            $crate::isa::Category::$category,
            0,
            $crate::bytecode::Action::Compute(map!(@ $($source),+ => $d, $f)),
        ))
    };
    (@ $a:ident => $d:ident, $f:expr) => {
        kernel!(|r, a, m| r.map1::<lane_type!($a), lane_type!($d)>(a, m, $f))
    };
    (@ $a:ident, $b:ident => $d:ident, $f:expr) => {
        kernel!(|r, a, m| r.map2::<lane_type!($a), lane_type!($b), lane_type!($d)>(a, m, $f))
    };
    (@ $a:ident, $b:ident, $c:ident => $d:ident, $f:expr) => {
        kernel!(|r, a, m| r.map3::<lane_type!($a), lane_type!($b), lane_type!($c), lane_type!($d)>(a, m, $f))
    };
}

/// Adds a row per type, with all operands of that type: `map_each!(rows, Integer, "add", [u16 s16], (2) |x, y|
/// x.wrapping_add(y))`.
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
