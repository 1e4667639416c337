//! Operands of an instruction, bound to register slots.

use super::Slot;

/// Base of an address operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Base {
    /// No address operand, or an absolute address (entirely in [`Args::offset`]).
    #[default]
    None,
    /// A 64-bit base: a register, or a variable's address in a constant slot.
    Wide(Slot),
    /// A 32-bit base: a register, for shared, local and constant memory.
    Narrow(Slot),
    /// A variable of the function's frame (local memory, or a `.param` of a function), relative to the frame.
    Frame,
    /// A parameter of the kernel, relative to the parameter block.
    Param,
}

/// Operands of an instruction, bound to slots.
#[derive(Clone, Debug, Default)]
pub struct Args {
    /// The first five slots: vectors flattened, destinations first as in the text. Unused ones are [`Slot::NONE`].
    pub s: [Slot; 5],
    /// All slots if there are more than five (a matrix product has fourteen); otherwise empty.
    pub all: Box<[Slot]>,
    /// The address operand's base. It takes no slot in `s`.
    pub base: Base,
    /// The address operand's constant offset.
    pub offset: i64,
    /// Values of the operands that must be immediates ([`crate::isa::Operand::Imm`]), in order.
    pub imm: [i64; 2],
    /// The row's constant ([`crate::isa::Row::k`]).
    pub k: u32,
    /// Mask of the bytes of a load's data that the program does not use, from the lowest address (`.pragma "used_bytes_mask"`).
    pub padding: u32,
    /// Number of elements of the first vector operand; 0 without one.
    pub vector: u8,
}
