//! The operands of one instruction, bound to slots.

use super::Slot;

/// Where an address operand starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Base {
    /// No address operand, or an absolute address (all in [`Args::offset`]).
    #[default]
    None,
    /// A register (B64), or a variable's address in a constant slot.
    Wide(Slot),
    /// A register (B32), for shared, local and const memory.
    Narrow(Slot),
    /// A variable of the function's frame (local memory, or a `.param` of a function): relative to the frame.
    Frame,
    /// A parameter of the kernel: relative to the parameter block.
    Param,
}

/// Operands of an instruction, bound to slots.
#[derive(Clone, Debug, Default)]
pub struct Args {
    /// The first five, vectors flattened, destinations first as in the text. Unused ones are [`Slot::NONE`].
    pub s: [Slot; 5],
    /// All of them, if they are more than five (a matrix product has fourteen); else empty.
    pub all: Box<[Slot]>,
    /// The address operand's base, if there is one. It takes no place in `s`.
    pub base: Base,
    /// The address operand's constant offset.
    pub offset: i64,
    /// Immediates of operands that must be immediates ([`crate::isa::Operand::Imm`]), in order.
    pub imm: [i64; 2],
    /// The row's own constant ([`crate::isa::Row::k`]).
    pub k: u32,
    /// Bytes of a load's data that the program does not use, one bit each from the lowest address (`.pragma
    /// "used_bytes_mask"`).
    pub padding: u32,
    /// How many vector elements the first vector operand has; 0 without one.
    pub vector: u8,
}
