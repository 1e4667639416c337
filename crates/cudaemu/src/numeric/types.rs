//! Modes and types that several numeric modules share.

/// Rounding of a floating-point result (PTX ISA, "Floating-Point Rounding Modifiers").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// `.rn`: to nearest, ties to even.
    Rn,
    /// `.rna`: to nearest, ties away from zero (only in `cvt` to `.tf32`).
    Rna,
    /// `.rz`: towards zero.
    Rz,
    /// `.rm`: towards negative infinity.
    Rm,
    /// `.rp`: towards positive infinity.
    Rp,
}

/// Rounding to an integer (PTX ISA, "Integer Rounding Modifiers").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntRounding {
    /// `.rni`: to nearest, ties to even.
    Rni,
    /// `.rzi`: towards zero.
    Rzi,
    /// `.rmi`: towards negative infinity.
    Rmi,
    /// `.rpi`: towards positive infinity.
    Rpi,
}

impl IntRounding {
    /// `x` rounded to an integral value; zeros keep the sign of `x`, NaN and infinities pass through.
    #[inline(always)]
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Self::Rni => x.round_ties_even(),
            Self::Rzi => x.trunc(),
            Self::Rmi => x.floor(),
            Self::Rpi => x.ceil(),
        }
    }
}

/// Modifiers of `.f32` arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mode {
    /// Rounding of the result.
    pub round: Rounding,
    /// `.ftz`: subnormal inputs and results become zeros of the same sign.
    pub ftz: bool,
    /// `.sat`: the result is clamped to [0.0, 1.0]; NaN becomes +0.0.
    pub sat: bool,
}

impl Mode {
    /// Round to nearest even without other modifiers: the mode of plain `add.f32`.
    pub const RN: Self = Self { round: Rounding::Rn, ftz: false, sat: false };
    /// Round to nearest even with `.ftz`.
    pub const RN_FTZ: Self = Self { round: Rounding::Rn, ftz: true, sat: false };
}

/// Modifiers of floating-point `min` and `max`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MinMax {
    /// `.NaN`: the result is NaN if either input is NaN. Without it, a NaN input is ignored: the result is the other
    /// input.
    pub nan: bool,
    /// `.xorsign.abs`: compare magnitudes; the result's sign is the XOR of the inputs' signs. Ignored on a NaN result.
    pub xorsign_abs: bool,
    /// `.ftz`: subnormal inputs become zeros of the same sign.
    pub ftz: bool,
}

impl MinMax {
    /// No modifier.
    pub const PLAIN: Self = Self { nan: false, xorsign_abs: false, ftz: false };
}

/// Property that `testp` tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Testp {
    /// Neither infinite nor NaN.
    Finite,
    /// Positive or negative infinity.
    Infinite,
    /// Not NaN (infinities are numbers).
    Number,
    /// NaN.
    NotANumber,
    /// Neither infinite, NaN nor subnormal. PTX counts zeros as normal.
    Normal,
    /// Subnormal; zeros are not.
    Subnormal,
}

/// Integer type of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntType {
    /// `.u8`
    U8,
    /// `.s8`
    S8,
    /// `.u16`
    U16,
    /// `.s16`
    S16,
    /// `.u32`
    U32,
    /// `.s32`
    S32,
    /// `.u64`
    U64,
    /// `.s64`
    S64,
}

impl IntType {
    /// Width in bits.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        match self {
            Self::U8 | Self::S8 => 8,
            Self::U16 | Self::S16 => 16,
            Self::U32 | Self::S32 => 32,
            Self::U64 | Self::S64 => 64,
        }
    }

    /// Whether the type is signed.
    #[inline(always)]
    pub const fn signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    /// The low bits of `raw`, as many as the type has, sign- or zero-extended to 64 bits; higher bits of `raw` are ignored.
    #[inline(always)]
    pub const fn extend(self, raw: u64) -> u64 {
        let unused = 64 - self.bits();
        if self.signed() { ((raw << unused) as i64 >> unused) as u64 } else { raw << unused >> unused }
    }

    /// Smallest value.
    #[inline(always)]
    pub const fn min(self) -> i128 {
        if self.signed() { -(1i128 << (self.bits() - 1)) } else { 0 }
    }

    /// Largest value.
    #[inline(always)]
    pub const fn max(self) -> i128 {
        (1i128 << (self.bits() - self.signed() as u32)) - 1
    }
}

/// Floating-point type of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// `.f16`: IEEE binary16.
    F16,
    /// `.bf16`: the upper half of a binary32.
    Bf16,
    /// `.tf32`: a binary32 whose lower 13 bits are zero.
    Tf32,
    /// `.f32`: IEEE binary32.
    F32,
    /// `.f64`: IEEE binary64.
    F64,
}

/// Comparison operator of `set` and `setp`. The unsigned operators `lo`, `ls`, `hi` and `hs` are `Lt`, `Le`, `Gt` and
/// `Ge` of an unsigned type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// `.eq`: false if an operand is NaN, as for the five that follow.
    Eq,
    /// `.ne`
    Ne,
    /// `.lt`
    Lt,
    /// `.le`
    Le,
    /// `.gt`
    Gt,
    /// `.ge`
    Ge,
    /// `.equ`: true if an operand is NaN, as for the five that follow.
    Equ,
    /// `.neu`
    Neu,
    /// `.ltu`
    Ltu,
    /// `.leu`
    Leu,
    /// `.gtu`
    Gtu,
    /// `.geu`
    Geu,
    /// `.num`: neither operand is NaN.
    Num,
    /// `.nan`: an operand is NaN.
    Nan,
}

/// The comparison of `setp` and `set`, for integers and floats alike. For `.ftz`, flush the operands first; `.f16` and `.bf16`
/// compare as the `f32` they convert to.
#[inline(always)]
pub fn compare<T: PartialOrd + Copy>(op: Comparison, a: T, b: T) -> bool {
    let ordered = a <= b || a > b;
    match op {
        Comparison::Eq => a == b,
        Comparison::Ne => a != b && ordered,
        Comparison::Lt => a < b,
        Comparison::Le => a <= b,
        Comparison::Gt => a > b,
        Comparison::Ge => a >= b,
        Comparison::Equ => a == b || !ordered,
        Comparison::Neu => a != b,
        Comparison::Ltu => a < b || !ordered,
        Comparison::Leu => a <= b || !ordered,
        Comparison::Gtu => a > b || !ordered,
        Comparison::Geu => a >= b || !ordered,
        Comparison::Num => ordered,
        Comparison::Nan => !ordered,
    }
}
