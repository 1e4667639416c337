//! What the decoder knows of a module, and of a function before its place in the register file is decided.

use std::collections::{BTreeSet, HashMap};

use super::layout::ParamSize;
use super::names::Entity;
use crate::bytecode::{Constant, Global, Inst, Param};
use crate::isa::InstructionTable;
use crate::operands::{RegisterCounts, Slot};
use crate::ptx::ast::Name;

/// A static shared variable; its place is decided when it is known which kernels reach it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedVariable {
    pub(super) bytes: u32,
    pub(super) align: u32,
}

/// Parameters and results of a function that has a body.
#[derive(Clone, Debug)]
pub(super) struct Signature {
    pub(super) returns: Vec<ParamSize>,
    pub(super) params: Vec<ParamSize>,
    pub(super) entry: bool,
}

/// The module while its functions are decoded.
#[derive(Debug)]
pub(super) struct ModuleState<'a> {
    pub(super) table: &'a InstructionTable,
    /// `.version`
    pub(super) version: (u32, u32),
    /// `.target`
    pub(super) target: u32,
    /// Names at module scope.
    pub(super) names: HashMap<Name, Entity>,
    pub(super) globals: Vec<Global>,
    pub(super) shared: Vec<SharedVariable>,
    /// By index of the function.
    pub(super) signatures: Vec<Signature>,
    /// Functions that an indirect call may reach.
    pub(super) address_taken: BTreeSet<u32>,
    /// The largest alignment that a variable of a frame asks for, at least 16.
    pub(super) frame_align: u32,
}

/// A constant before shared memory is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum UnlinkedConstant {
    Known(Constant),
    /// Offset of a static shared variable plus this.
    Shared(usize, i64),
}

/// A decoded function before it is linked: slots, shared offsets and targets count from its own start.
#[derive(Debug, Default)]
pub(super) struct UnlinkedFunction {
    pub(super) insts: Vec<Inst>,
    /// Which of an instruction's flattened operands are destinations, one bit each.
    pub(super) dests: Vec<u64>,
    pub(super) counts: RegisterCounts,
    /// Registers without constants.
    pub(super) own: Vec<Slot>,
    pub(super) constants: Vec<(Slot, UnlinkedConstant)>,
    /// Static shared variables it names.
    pub(super) shared: BTreeSet<usize>,
    /// Instructions whose address operand is a static shared variable: its offset is still to be added.
    pub(super) shared_addresses: Vec<(usize, usize)>,
    /// Largest alignment asked for by dynamic shared memory it names; 0: it names none.
    pub(super) dynamic_align: u32,
    /// Functions it calls by name.
    pub(super) calls: BTreeSet<u32>,
    /// It calls by address.
    pub(super) indirect: bool,
    pub(super) params: Vec<Param>,
    pub(super) returns: Vec<Param>,
    pub(super) param_bytes: u32,
    pub(super) frame_bytes: u32,
}
