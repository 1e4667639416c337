//! Specification of a matrix instruction (element types, shape, options) and its encoding in a row's constant.

use crate::isa::{Operand, Value};

/// Type of the elements of A or B.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
    S4,
    U4,
    B1,
    F64,
}

impl Element {
    const ALL: [Self; 11] = [
        Self::F16,
        Self::Bf16,
        Self::Tf32,
        Self::E4m3,
        Self::E5m2,
        Self::S8,
        Self::U8,
        Self::S4,
        Self::U4,
        Self::B1,
        Self::F64,
    ];

    /// The name in opcodes.
    pub(crate) fn name(self) -> &'static str {
        ["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1", "f64"][self as usize]
    }

    /// Bits per element in a register.
    pub(crate) fn bits(self) -> usize {
        [16, 16, 32, 8, 8, 8, 8, 4, 4, 1, 64][self as usize]
    }

    /// Elements per register.
    pub(crate) fn packed(self) -> usize {
        (32 / self.bits()).max(1)
    }

    /// Type of the registers that hold the elements.
    pub(crate) fn value(self) -> Value {
        if self == Self::F64 { Value::F64 } else { Value::B32 }
    }
}

/// Type of C or D.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulator {
    F16,
    F32,
    S32,
    F64,
}

impl Accumulator {
    const ALL: [Self; 4] = [Self::F16, Self::F32, Self::S32, Self::F64];

    /// The name in opcodes.
    pub(crate) fn name(self) -> &'static str {
        ["f16", "f32", "s32", "f64"][self as usize]
    }

    /// Elements per register.
    pub(crate) fn packed(self) -> usize {
        if self == Self::F16 { 2 } else { 1 }
    }

    /// Type of the registers that hold the elements.
    pub(crate) fn value(self) -> Value {
        [Value::B32, Value::F32, Value::B32, Value::F64][self as usize]
    }
}

/// The specification of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixSpec {
    /// Element type of A.
    pub(crate) a: Element,
    /// Element type of B.
    pub(crate) b: Element,
    /// Element type of D.
    pub(crate) d: Accumulator,
    /// Element type of C.
    pub(crate) c: Accumulator,
    /// Rows of A, C and D: 8, 16 or 32.
    pub(crate) m: usize,
    /// Columns of B, C and D: 8, 16 or 32.
    pub(crate) n: usize,
    /// Columns of A, rows of B: 4 to 256.
    pub(crate) k: usize,
    /// Variant: `.satfinite` for integers, `.and` (instead of `.xor`) for bits, ordered metadata for sparse products.
    pub(crate) flag: bool,
    /// For layouts: `.col` of A, `.row` of B; for `.f64` the rounding mode.
    pub(crate) option: u32,
}

impl MatrixSpec {
    /// Encodes the specification in a row's constant: four bits for each element type, two for each accumulator type and each
    /// extent of the result, three for k, one for the flag, two for the option.
    pub(crate) fn pack(self) -> u32 {
        let side = |extent: usize| extent.trailing_zeros() - 3;
        self.a as u32
            | (self.b as u32) << 4
            | (self.d as u32) << 8
            | (self.c as u32) << 10
            | side(self.m) << 12
            | side(self.n) << 14
            | (self.k.trailing_zeros() - 2) << 16
            | u32::from(self.flag) << 19
            | self.option << 20
    }

    /// Decodes the result of [`MatrixSpec::pack`].
    pub(crate) fn unpack(k: u32) -> Self {
        let element = |at: u32| Element::ALL[(k >> at & 15) as usize % Element::ALL.len()];
        let accumulator = |at: u32| Accumulator::ALL[(k >> at & 3) as usize];
        Self {
            a: element(0),
            b: element(4),
            d: accumulator(8),
            c: accumulator(10),
            m: 8 << (k >> 12 & 3),
            n: 8 << (k >> 14 & 3),
            k: 4 << (k >> 16 & 7),
            flag: k >> 19 & 1 != 0,
            option: k >> 20 & 3,
        }
    }

    /// Registers per lane of D, A, B and C.
    pub(crate) fn registers(self) -> [usize; 4] {
        let count = |elements: usize, packed: usize| (elements / 32 / packed).max(1);
        [
            count(self.m * self.n, self.d.packed()),
            count(self.m * self.k, self.a.packed()),
            count(self.k * self.n, self.b.packed()),
            count(self.m * self.n, self.c.packed()),
        ]
    }

    /// Operands D, A, B, C.
    pub(crate) fn operands(self) -> Vec<Operand> {
        let [d, a, b, c] = self.registers().map(|count| count as u8);
        vec![
            Operand::OutVector(d, self.d.value()),
            Operand::InVector(a, self.a.value()),
            Operand::InVector(b, self.b.value()),
            Operand::InVector(c, self.c.value()),
        ]
    }
}
