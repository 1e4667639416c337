//! Bytecode instructions ([`Inst`]): the operation, its operands and its guard.

use crate::exec_context::{ExecContext, Registers};
use crate::fault::Fault;
use crate::operands::{Args, Slot};

/// An operation on registers alone; it cannot fail. The mask holds the active lanes whose guard is true. The function may
/// compute every lane, but writes only the lanes of the mask.
pub type ComputeFn = fn(&mut Registers, &Args, u32);

/// An operation that accesses memory, other lanes or the state of the machine; it may report a fault.
pub type AccessFn = fn(&mut ExecContext<'_>, &Args, u32) -> Result<(), Box<Fault>>;

/// The operation of an instruction.
#[derive(Clone, Debug)]
pub enum Action {
    /// Reads and writes registers only.
    Compute(ComputeFn),
    /// Accesses memory, other lanes or the state of the machine.
    Access(AccessFn),
    /// Control flow: the warp's interpreter loop executes it.
    Control(Control),
}

/// Control flow. Targets are indices into [`super::DecodedModule::insts`].
#[derive(Clone, Debug)]
pub enum Control {
    /// `bra`
    Branch(u32),
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
    /// `nanosleep`, `yield`: gives other warps a turn.
    Yield,
}

/// A block barrier. Operands in the order of the text: for `sync` and `arrive` the barrier's number (B32) and, if `counted`,
/// the thread count (B32); for a reduction the destination (B32 or a predicate), number, count if `counted`, source predicate.
/// Without a number (`s[0]` is [`Slot::NONE`]) it is the cluster barrier: a separate barrier for all threads of the block,
/// whose `sync` only waits, because `barrier.cluster.arrive` has counted the arrival already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier {
    /// The operation on the barrier.
    pub kind: BarrierKind,
    /// All threads of a warp execute it together (`bar`, `barrier….aligned`).
    pub aligned: bool,
    /// A thread count is given.
    pub counted: bool,
}

/// Kinds of block barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierKind {
    /// Arrives and waits.
    Sync,
    /// Arrives without waiting.
    Arrive,
    /// Waits, then returns to each thread the number of threads whose predicate was true.
    RedPopc,
    /// Waits, then returns whether the predicate was true in all threads.
    RedAnd,
    /// Waits, then returns whether the predicate was true in any thread.
    RedOr,
}

/// A call: the callee, and the caller's locations of arguments and results.
#[derive(Clone, Debug)]
pub struct CallSite {
    /// The function to call.
    pub callee: Callee,
    /// Locations of the arguments in the caller, in order.
    pub args: Box<[ArgLocation]>,
    /// Locations of the results in the caller, in order.
    pub returns: Box<[ArgLocation]>,
}

/// The target of a call.
#[derive(Clone, Copy, Debug)]
pub enum Callee {
    /// Index into [`super::DecodedModule::functions`].
    Function(u32),
    /// `__assertfail(message, file, line, function, char size)`
    AssertFail,
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
    /// Each lane alone.
    #[default]
    None,
    /// The lanes of the mask in this operand (B32): `shfl.sync`, `vote.sync`, `bar.warp.sync`, …
    Mask(Slot),
    /// All lanes that have not exited: `.aligned` instructions, `bar`.
    All,
}

impl Convergence {
    /// The convergence that an opcode's canonical name requires: `.aligned` means all lanes; the last operand of a `.sync` is
    /// the mask.
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
    /// The operation.
    pub action: Action,
    /// The operands.
    pub args: Args,
    /// Guard predicate (with [`Slot::negated`]), or [`Slot::NONE`].
    pub guard: Slot,
    /// Lanes that must execute it together.
    pub convergence: Convergence,
    /// Line of the PTX text.
    pub line: u32,
    /// Index of the instruction's row in the instruction table.
    pub row: u32,
}
