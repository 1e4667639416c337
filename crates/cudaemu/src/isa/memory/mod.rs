//! Memory instructions: loads and stores (`access`); conversion between state spaces, prefetches, cache policies and fences
//! (`address`).

pub(super) mod access;
pub(super) mod address;

use crate::exec_context::StateSpace;
use crate::isa::{Operand, Value};
use crate::operands::{Args, Base};

/// Modifiers for the memory order and the scope of an access. They have no effect, because every access is visible to all
/// threads immediately.
pub(super) const ORDERING_HINTS: [&str; 12] = [
    "weak",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "volatile",
    "mmio",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "L2::cache_hint",
];

/// Cache operators, eviction priorities and prefetch sizes: without effect, because there is no cache.
pub(super) const CACHE_HINTS: [&str; 18] = [
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

/// The optional cache policy operand, which `.L2::cache_hint` requires.
pub(super) const CACHE_POLICY: Operand = Operand::OptIn(Value::B64);

/// State spaces as written in opcodes, and their windows. A function's `.param` space is its frame; if the address operand is a
/// name, its base says so ([`window`]).
pub(super) const SPACES: [(&str, StateSpace); 10] = [
    ("", StateSpace::Generic),
    (".global", StateSpace::Global),
    (".const", StateSpace::Const),
    (".shared", StateSpace::Shared),
    (".shared::cta", StateSpace::Shared),
    (".shared::cluster", StateSpace::Shared),
    (".local", StateSpace::Local),
    (".param", StateSpace::Param),
    (".param::entry", StateSpace::Param),
    (".param::func", StateSpace::Local),
];

/// Encodes the window in a row's constant; the handler uses the bits above [`WINDOW_MASK`].
pub(super) fn encode(window: StateSpace) -> u32 {
    match window {
        StateSpace::Generic => 0,
        StateSpace::Global => 1,
        StateSpace::Shared => 2,
        StateSpace::Local => 3,
        StateSpace::Param => 4,
        StateSpace::Const => 5,
    }
}

/// Bits of a row's constant that hold the window.
pub(super) const WINDOW_MASK: u32 = 7;

/// The window that an instruction accesses. A frame variable is in local memory and a kernel's parameter in the parameter
/// block, whatever space the opcode names.
#[inline]
pub(super) fn window(args: &Args) -> StateSpace {
    match (args.base, args.k & WINDOW_MASK) {
        (Base::Frame, _) | (_, 3) => StateSpace::Local,
        (Base::Param, _) | (_, 4) => StateSpace::Param,
        (_, 1) => StateSpace::Global,
        (_, 2) => StateSpace::Shared,
        (_, 5) => StateSpace::Const,
        _ => StateSpace::Generic,
    }
}

#[cfg(test)]
mod tests;
