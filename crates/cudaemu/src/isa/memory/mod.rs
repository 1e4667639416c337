//! Loads, stores, and what else concerns addresses: conversion between state spaces, prefetches, cache policies, fences.

pub(super) mod access;
pub(super) mod address;

use crate::exec_context::Window;
use crate::isa::{Operand, Value};
use crate::operands::{Args, Base};

/// Modifiers of memory instructions that change nothing here. Every access is at once visible to all, so memory semantics
/// and scopes are always kept; there is no cache, so cache operators and eviction priorities have nothing to act on.
pub(super) const SEMANTICS: [&str; 12] = [
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

/// The same for eviction priorities and prefetch sizes.
pub(super) const CACHE: [&str; 18] = [
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

/// The cache policy of `.L2::cache_hint`, which is one of the hints.
pub(super) const POLICY: Operand = Operand::OptIn(Value::B64);

/// State spaces as instructions spell them, and the window each one is. `param` of a function lies in its frame, which the
/// address operand's base says where it is a name ([`window`]).
pub(super) const SPACES: [(&str, Window); 10] = [
    ("", Window::Generic),
    (".global", Window::Global),
    (".const", Window::Const),
    (".shared", Window::Shared),
    (".shared::cta", Window::Shared),
    (".shared::cluster", Window::Shared),
    (".local", Window::Local),
    (".param", Window::Param),
    (".param::entry", Window::Param),
    (".param::func", Window::Local),
];

/// The window as a row's constant; the bits above [`WINDOW`] are the handler's own.
pub(super) fn encode(window: Window) -> u32 {
    match window {
        Window::Generic => 0,
        Window::Global => 1,
        Window::Shared => 2,
        Window::Local => 3,
        Window::Param => 4,
        Window::Const => 5,
    }
}

/// Bits of a row's constant that hold the window.
pub(super) const WINDOW: u32 = 7;

/// The window an instruction goes to. A variable of the frame is in local memory and a kernel's parameter in the parameter
/// block, whatever the instruction says.
#[inline]
pub(super) fn window(args: &Args) -> Window {
    match (args.base, args.k & WINDOW) {
        (Base::Frame, _) | (_, 3) => Window::Local,
        (Base::Param, _) | (_, 4) => Window::Param,
        (_, 1) => Window::Global,
        (_, 2) => Window::Shared,
        (_, 5) => Window::Const,
        _ => Window::Generic,
    }
}

#[cfg(test)]
mod tests;
