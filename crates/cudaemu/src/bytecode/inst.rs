//! Instructions: what each does, and to which operands.

use super::{Function, Param};
use crate::exec_context::{ExecContext, Registers};
use crate::fault::Fault;
use crate::operands::{Args, Slot};

/// Work on registers alone; it cannot fail. The mask holds the lanes whose result counts (active and not predicated
/// off): every lane may be computed, only those may be written.
pub type ComputeFn = fn(&mut Registers, &Args, u32);

/// Work that touches memory, other lanes or the machine.
pub type AccessFn = fn(&mut ExecContext<'_>, &Args, u32) -> Result<(), Box<Fault>>;

/// What an instruction does.
#[derive(Clone, Debug)]
pub enum Action {
    /// Registers only.
    Compute(ComputeFn),
    /// Memory, other lanes, the machine.
    Access(AccessFn),
    /// Changes what is executed next; the warp's loop does it.
    Control(Control),
}

/// Control flow. Targets are indices into [`super::Code::insts`].
#[derive(Clone, Debug)]
pub enum Control {
    /// `bra`
    Branch(u32),
    /// `brx.idx`: the index is in `s[0]` (B32).
    BranchIndexed(Box<[u32]>),
    /// `call`
    Call(Box<CallSite>),
    /// `ret`; in a kernel the same as `exit`.
    Return,
    /// `exit`
    Exit,
    /// `bar.*` and `barrier.*` of the block.
    Barrier(Barrier),
    /// `bar.warp.sync`: the mask is in `s[0]` (B32).
    WarpSync,
    /// Lets other warps run: `nanosleep`, `yield`.
    Yield,
}

/// A block barrier. Operands in the order of the text: for `sync` and `arrive` the barrier's number (B32) and, if `counted`, the
/// thread count (B32); for a reduction the destination (B32 or a predicate), number, count if `counted`, source predicate.
/// Without a number (`s[0]` is [`Slot::NONE`]) it is the cluster's barrier, one of its own for all threads of the block, where
/// `sync` only waits: the arrival came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier {
    /// What it does.
    pub kind: BarrierKind,
    /// All threads of a warp execute it together (`bar`, `barrier….aligned`).
    pub aligned: bool,
    /// A thread count is given.
    pub counted: bool,
}

/// Kinds of block barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierKind {
    /// Waits.
    Sync,
    /// Counts as arrived, goes on.
    Arrive,
    /// Waits, then gives each thread the number of threads whose predicate held.
    RedPopc,
    /// Waits, then tells whether it held for all.
    RedAnd,
    /// Waits, then tells whether it held for any.
    RedOr,
}

/// A call: who, with what.
#[derive(Clone, Debug)]
pub struct CallSite {
    /// Whom.
    pub callee: Callee,
    /// Arguments, in order: where the caller has them.
    pub args: Box<[ArgLocation]>,
    /// Results, in order: where the caller wants them.
    pub returns: Box<[ArgLocation]>,
    /// Of a call by address: what the callee must take and give.
    pub prototype: Option<Prototype>,
}

/// Sizes of the parameters and results that a `.callprototype` (or the functions of a `.calltargets`) has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prototype {
    /// Bytes of each parameter.
    pub params: Box<[u32]>,
    /// Bytes of each result.
    pub returns: Box<[u32]>,
}

impl Prototype {
    /// Whether a function takes and gives just that.
    pub fn fits(&self, function: &Function) -> bool {
        let same = |bytes: &[u32], params: &[Param]| bytes.iter().eq(params.iter().map(|param| &param.bytes));
        same(&self.params, &function.params) && same(&self.returns, &function.returns)
    }
}

/// Whom a call calls.
#[derive(Clone, Debug)]
pub enum Callee {
    /// Index into [`super::Code::functions`].
    Function(u32),
    /// The address (B64; its value is [`super::FUNCTION_ADDRESS`] + index) is in this slot.
    Indirect(Slot),
    /// `vprintf(format, arguments)`
    Printf,
    /// `__assertfail(message, file, line, function, char size)`
    AssertFail,
    /// `malloc(size)` on the device's heap.
    Malloc,
    /// `free(pointer)` on the device's heap.
    Free,
}

/// One argument or result at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgLocation {
    /// In a register.
    Register(Slot),
    /// In the caller's `.param` variable, at this offset of its frame.
    Param {
        /// Offset in the caller's frame.
        offset: u32,
        /// Bytes.
        bytes: u32,
    },
}

/// Which lanes must execute an instruction together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Convergence {
    /// Each lane for itself.
    #[default]
    None,
    /// The lanes that this operand names (B32): `shfl.sync`, `vote.sync`, `bar.warp.sync`, …
    Mask(Slot),
    /// All lanes that have not exited: `.aligned` instructions, `bar`.
    All,
}

impl Convergence {
    /// Who must be there, by the opcode's canonical name: `.aligned` means all, else the last operand of a `.sync` names them.
    pub(crate) fn of(name: &str, action: &Action, args: &Args) -> Self {
        let aligned = matches!(action, Action::Control(Control::Barrier(Barrier { aligned: true, .. })));
        if aligned || name.contains(".aligned") {
            return Self::All;
        }
        let named = name.contains(".sync") && !matches!(action, Action::Control(Control::Barrier(_)));
        if !named {
            return Self::None;
        }
        let flat = if args.all.is_empty() { &args.s[..] } else { &args.all[..] };
        flat.iter().rev().find(|slot| !slot.is_none()).map_or(Self::None, |&slot| Self::Mask(slot))
    }
}

/// One instruction.
#[derive(Clone, Debug)]
pub struct Inst {
    /// What it does.
    pub action: Action,
    /// With what.
    pub args: Args,
    /// Guard predicate (with [`Slot::negated`]), or [`Slot::NONE`].
    pub guard: Slot,
    /// Lanes that must execute it together.
    pub convergence: Convergence,
    /// Line of the PTX text.
    pub line: u32,
    /// Index of its row in the instruction table.
    pub row: u32,
}
