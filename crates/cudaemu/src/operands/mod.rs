//! Operands of instructions: [`Slot`] is a place in a warp's register file, [`Args`] the bound operands of an instruction.
//!
//! This layer is below registers and memories ([`crate::exec_context`]), which are read and written by slot.

mod args;
mod slot;

pub use args::{Args, Base};
pub use slot::{Class, RegisterCounts, Slot};
