//! Bytecode: a decoded module. Functions, what they want of registers and memory, and their instructions ([`Inst`]).
//!
//! An instruction holds the function that executes it ([`Action`]) and its operands. The decoder makes it once per module; from
//! then on nothing is looked up by name.

mod inst;

pub use inst::{
    AccessFn, Action, ArgLocation, Barrier, BarrierKind, CallSite, Callee, ComputeFn, Control, Convergence, Inst,
    Prototype,
};

use crate::operands::{RegisterCounts, Slot};
use std::sync::Arc;

/// Address of function 0; function `i` is at `FUNCTION_ADDRESS + i`. No memory lies there.
pub const FUNCTION_ADDRESS: u64 = 0x0008_0000_0000_0000;

/// A decoded module: code of all its functions in one array, and what it wants of memory.
#[derive(Clone, Debug, Default)]
pub struct DecodedModule {
    /// Instructions of all functions, one after another.
    pub insts: Vec<Inst>,
    /// Functions and kernels.
    pub functions: Vec<Function>,
    /// Variables in global and constant memory, to be allocated when the module is loaded.
    pub globals: Vec<Global>,
    /// The source's lines, for reports.
    pub lines: Vec<Arc<str>>,
    /// Target of the file: 80 for sm_80.
    pub target: u32,
}

/// A function or kernel.
#[derive(Clone, Debug, Default)]
pub struct Function {
    /// Its name.
    pub name: Arc<str>,
    /// It can be launched.
    pub entry: bool,
    /// First instruction; the last one is always a `ret` or `exit`.
    pub start: u32,
    /// One past the last instruction.
    pub end: u32,
    /// Parameters of a kernel: offset and bytes in the parameter block. Of a function: in its frame.
    pub params: Vec<Param>,
    /// Results of a function, in its frame or in registers.
    pub returns: Vec<Param>,
    /// Bytes of a kernel's parameter block.
    pub param_bytes: u32,
    /// Bytes of its frame in local memory: `.local` and `.param` variables. Multiple of 16.
    pub frame_bytes: u32,
    /// Bytes of its frame and those of all functions that it may reach, each once: what a thread needs without recursion.
    pub stack_bytes: u64,
    /// Statically allocated shared memory of the kernel, with that of all functions of the module that it may call.
    pub shared_bytes: u32,
    /// Alignment that dynamic shared memory (`.extern .shared`) asks for; it starts at `shared_bytes` rounded up to it.
    pub dynamic_shared_align: u32,
    /// Of a kernel: registers of each class that it needs with all functions it may reach, the lengths of the register file.
    pub registers: RegisterCounts,
    /// Of a kernel: what constant slots hold when a warp starts, its own and those of all it may reach.
    pub constants: Vec<(Slot, Constant)>,
    /// The registers that belong to this function alone, by class: saved and restored around recursion.
    pub own_registers: Vec<Slot>,
    /// It may be active more than once in a thread: calls save `own` first.
    pub recursive: bool,
    /// It is no kernel, and something holds its address: calls by address may reach it, and no other function.
    pub address_taken: bool,
    /// `.maxntid`, or `.reqntid`.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`: blocks must be exactly that.
    pub required_threads: bool,
    /// Registers a thread is reported to use: the most 32-bit registers live at once, at least; see the decoder.
    pub reported_registers: u32,
}

/// A parameter or result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// In a register of the function, if declared `.reg`.
    pub register: Option<Slot>,
    /// Else its offset.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
    /// Alignment.
    pub align: u32,
}

/// What a constant slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    /// These bits, in every lane.
    Bits(u64),
    /// The address of a global (index into [`Code::globals`]) plus an offset.
    Global(u32, i64),
    /// Offset into dynamic shared memory: its start plus this.
    DynamicShared(i64),
    /// A special register that does not change while a warp runs.
    Special(SpecialRegister),
}

/// Special registers that are constant for a thread.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialRegister {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NwarpId,
    SmId,
    NsmId,
    GridId,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
    DynamicSmemSize,
    TotalSmemSize,
    AggrSmemSize,
    ClusterId(u8),
    NclusterId(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterCtarank,
    ClusterNctarank,
    IsExplicitCluster,
    Envreg(u8),
}

/// A variable of the module in global or constant memory.
#[derive(Clone, Debug)]
pub struct Global {
    /// Its name.
    pub name: Arc<str>,
    /// In constant memory: kernels may not write it.
    pub constant: bool,
    /// Bytes.
    pub bytes: u64,
    /// Alignment.
    pub align: u32,
    /// Initial bytes; shorter than `bytes` means zeros after; `None`: the text gives no initialiser. (CUDA zeroes it then too.)
    pub init: Option<Vec<u8>>,
    /// Addresses to write into the initial bytes: (offset, bytes to write, byte mask or 0, global or function, added).
    pub relocations: Vec<Relocation>,
}

/// An address inside an initialiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Where, in the variable.
    pub at: u64,
    /// Bytes written there: 8, 4 or 1.
    pub bytes: u32,
    /// Which byte of the address (0 = lowest) if `bytes` is 1.
    pub byte: u32,
    /// Whose address.
    pub of: Symbol,
    /// Bytes added to it.
    pub offset: i64,
}

/// What an address can be of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symbol {
    /// Index into [`Code::globals`].
    Global(u32),
    /// Index into [`Code::functions`].
    Function(u32),
}
