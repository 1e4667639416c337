//! Specification of a matrix instruction (element types, shape) and its encoding in a row's constant.

use crate::isa::{Operand, Value};

/// Rows of A, C and D.
pub(crate) const M: usize = 16;
/// Columns of B, C and D.
pub(crate) const N: usize = 8;

/// Type of the elements of A or B.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
}

impl Element {
    pub(super) const ALL: [Self; 5] = [Self::F16, Self::Bf16, Self::Tf32, Self::S8, Self::U8];

    /// The name in opcodes.
    pub(crate) fn name(self) -> &'static str {
        ["f16", "bf16", "tf32", "s8", "u8"][self as usize]
    }

    /// Bits per element in a register.
    pub(crate) fn bits(self) -> usize {
        [16, 16, 32, 8, 8][self as usize]
    }

    /// Elements per register.
    pub(crate) fn packed(self) -> usize {
        32 / self.bits()
    }
}

/// Type of C and D.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulator {
    F16,
    F32,
    S32,
}

impl Accumulator {
    pub(super) const ALL: [Self; 3] = [Self::F16, Self::F32, Self::S32];

    /// The name in opcodes.
    pub(crate) fn name(self) -> &'static str {
        ["f16", "f32", "s32"][self as usize]
    }

    /// Elements per register.
    pub(crate) fn packed(self) -> usize {
        if self == Self::F16 { 2 } else { 1 }
    }

    /// Type of the registers that hold the elements.
    pub(crate) fn value(self) -> Value {
        if self == Self::F32 { Value::F32 } else { Value::B32 }
    }
}

/// The specification of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixSpec {
    /// Element type of A.
    pub(crate) a: Element,
    /// Element type of B.
    pub(crate) b: Element,
    /// Element type of C and D.
    pub(crate) d: Accumulator,
    /// Columns of A, rows of B: 4 to 32.
    pub(crate) k: usize,
}

impl MatrixSpec {
    /// Encodes the specification in a row's constant: four bits for each element type, two for the accumulator type, and k.
    pub(crate) fn pack(self) -> u32 {
        self.a as u32 | (self.b as u32) << 4 | (self.d as u32) << 8 | (self.k as u32) << 10
    }

    /// Decodes the result of [`MatrixSpec::pack`].
    pub(crate) fn unpack(k: u32) -> Self {
        let element = |at: u32| Element::ALL[(k >> at & 15) as usize % Element::ALL.len()];
        let d = Accumulator::ALL[(k >> 8 & 3) as usize % Accumulator::ALL.len()];
        Self { a: element(0), b: element(4), d, k: (k >> 10) as usize }
    }

    /// Registers per lane of D, A, B and C.
    pub(crate) fn registers(self) -> [usize; 4] {
        let count = |elements: usize, packed: usize| elements / 32 / packed;
        let result = count(M * N, self.d.packed());
        [result, count(M * self.k, self.a.packed()), count(self.k * N, self.b.packed()), result]
    }

    /// Operands D, A, B, C.
    pub(crate) fn operands(self) -> Vec<Operand> {
        let [d, a, b, c] = self.registers().map(|count| count as u8);
        vec![
            Operand::OutVector(d, self.d.value()),
            Operand::InVector(a, Value::B32),
            Operand::InVector(b, Value::B32),
            Operand::InVector(c, self.d.value()),
        ]
    }
}
