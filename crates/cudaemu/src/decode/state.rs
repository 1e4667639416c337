//! State of the decoder: the module, and each function before the linker places it.

use std::collections::{BTreeSet, HashMap};

use super::layout::ParamSize;
use super::names::Entity;
use crate::bytecode::{Constant, Global, Inst, Param};
use crate::isa::InstructionTable;
use crate::operands::{RegisterCounts, Slot};
use crate::ptx::ast::Name;

/// A static shared variable. It has no offset before the linker computes which kernels reach it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedVariable {
    pub(super) bytes: u32,
    pub(super) align: u32,
}

/// Parameters and results of a function with a body.
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
    /// Names in module scope.
    pub(super) names: HashMap<Name, Entity>,
    pub(super) globals: Vec<Global>,
    pub(super) shared: Vec<SharedVariable>,
    /// Signatures by function index.
    pub(super) signatures: Vec<Signature>,
    /// The largest alignment of any frame variable, at least 16 bytes.
    pub(super) frame_align: u32,
}

/// A constant before the layout of shared memory is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum UnlinkedConstant {
    Known(Constant),
    /// Address of a static shared variable (its index) plus an offset in bytes.
    Shared(usize, i64),
}

/// A decoded function before linking: slots, shared offsets and targets are relative to the function.
#[derive(Debug, Default)]
pub(super) struct UnlinkedFunction {
    pub(super) insts: Vec<Inst>,
    /// Per instruction, a bit set of the flattened operands that are destinations.
    pub(super) dests: Vec<u64>,
    pub(super) counts: RegisterCounts,
    /// Slots of registers, without constants.
    pub(super) own: Vec<Slot>,
    pub(super) constants: Vec<(Slot, UnlinkedConstant)>,
    /// Static shared variables that the function names.
    pub(super) shared: BTreeSet<usize>,
    /// (instruction, variable): instructions whose address is relative to a static shared variable; the linker adds its offset.
    pub(super) shared_addresses: Vec<(usize, usize)>,
    /// Largest alignment of the dynamic shared variables that the function names; 0 if there are none.
    pub(super) dynamic_align: u32,
    /// Functions that it calls by name.
    pub(super) calls: BTreeSet<u32>,
    pub(super) params: Vec<Param>,
    pub(super) returns: Vec<Param>,
    pub(super) param_bytes: u32,
    pub(super) frame_bytes: u32,
    /// Whether it has a `griddepcontrol.wait`.
    pub(super) waits_for_grids: bool,
}
