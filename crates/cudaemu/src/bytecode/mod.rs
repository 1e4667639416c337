//! Bytecode: a decoded module. It holds the functions, their needs of registers and memory, and their instructions ([`Inst`]).
//!
//! An instruction holds the function pointer that executes it ([`Action`]) and its operands. The decoder builds it once per
//! module, so execution looks up nothing by name.

mod inst;

pub use inst::{
    AccessFn, Action, ArgLocation, Barrier, BarrierKind, CallSite, Callee, ComputeFn, Control, Convergence, Inst,
};

use crate::operands::{RegisterCounts, Slot};
use std::sync::Arc;

/// A decoded module: the code of all its functions in one array, and the variables to allocate.
#[derive(Clone, Debug, Default)]
pub struct DecodedModule {
    /// Instructions of all functions, one after another.
    pub insts: Vec<Inst>,
    /// Functions and kernels.
    pub functions: Vec<Function>,
    /// Variables in global and constant memory, to be allocated when the module is loaded.
    pub globals: Vec<Global>,
    /// Lines of the PTX text, quoted in reports.
    pub lines: Vec<Arc<str>>,
    /// The `.target` of the module: 80 for sm_80.
    pub target: u32,
}

/// A function or kernel.
#[derive(Clone, Debug, Default)]
pub struct Function {
    /// The name in the PTX text.
    pub name: Arc<str>,
    /// Whether it is a kernel, which the host can launch.
    pub entry: bool,
    /// Index of the first instruction. The last one is always a `ret` or `exit`.
    pub start: u32,
    /// Index after the last instruction.
    pub end: u32,
    /// Parameters. Offsets count from the start of a kernel's parameter block, or of a function's frame.
    pub params: Vec<Param>,
    /// Results of a function, in its frame or in registers.
    pub returns: Vec<Param>,
    /// Bytes of a kernel's parameter block.
    pub param_bytes: u32,
    /// Bytes of its frame in local memory: `.local` and `.param` variables. A multiple of 16.
    pub frame_bytes: u32,
    /// Bytes of its own frame and the frames of all functions that it may reach, each counted once: the stack of a thread
    /// without recursion.
    pub stack_bytes: u64,
    /// Bytes of the kernel's static shared memory, including the variables of all functions that it may reach.
    pub shared_bytes: u32,
    /// Alignment in bytes of dynamic shared memory (`.extern .shared`), which starts at `shared_bytes` rounded up to it.
    pub dynamic_shared_align: u32,
    /// For a kernel: the size of the register file per class, for itself and all functions that it may reach.
    pub registers: RegisterCounts,
    /// For a kernel: initial values of constant slots, for itself and all functions that it may reach.
    pub constants: Vec<(Slot, Constant)>,
    /// Registers of this function alone, by class: a recursive call saves and restores them.
    pub own_registers: Vec<Slot>,
    /// It may be active more than once in a thread, so calls save `own_registers` first.
    pub recursive: bool,
    /// Threads of a block by `.maxntid` or `.reqntid`, in x, y, z.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid` was given: a launch must use exactly these block extents.
    pub required_threads: bool,
    /// It, or a function that it may reach, has a `griddepcontrol.wait`.
    pub waits_for_grids: bool,
    /// Registers per thread in `CU_FUNC_ATTRIBUTE_NUM_REGS`: the maximum of 32-bit registers live at once, which is a lower
    /// bound of ptxas's number. See the decoder's `liveness`.
    pub reported_registers: u32,
}

/// A parameter or result of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its register, if it is declared `.reg`.
    pub register: Option<Slot>,
    /// Its offset in bytes otherwise.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// The initial value of a constant slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    /// The same bits in every lane.
    Bits(u64),
    /// The address of a global variable (index into [`DecodedModule::globals`]) plus an offset in bytes.
    Global(u32, i64),
    /// An address in dynamic shared memory: its start plus this offset in bytes.
    DynamicShared(i64),
    /// A special register that stays constant while a warp runs.
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
}

/// A variable of the module in global or constant memory.
#[derive(Clone, Debug)]
pub struct Global {
    /// The name in the PTX text.
    pub name: Arc<str>,
    /// It is in constant memory, which kernels cannot write.
    pub constant: bool,
    /// Size in bytes.
    pub bytes: u64,
    /// Alignment in bytes.
    pub align: u32,
    /// Initial bytes; the rest up to `bytes` is zero. `None` without an initialiser (CUDA zeroes the variable then as well).
    pub init: Option<Vec<u8>>,
}
