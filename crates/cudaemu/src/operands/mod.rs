//! What an instruction names: places in a warp's register file ([`Slot`]) and an instruction's operands ([`Args`]).
//!
//! They lie below registers and memories ([`crate::exec_context`]), which are read and written by slot.

mod args;
mod slot;

pub use args::{Args, Base};
pub use slot::{Class, RegisterCounts, Slot};
