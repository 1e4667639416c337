//! Locks, condition variables, atomics, threads and time of the concurrent core: those of std.
//!
//! The files of the core name no other ones (tests/layout checks it). crates/orders compiles the same files with another module
//! of this name, whose threads run one at a time in orders that a seed determines.

pub(crate) use crate::poison::{Unpoisoned, lock};
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, Weak, atomic};
pub(crate) use std::thread;
pub(crate) use std::time::Instant;

/// Atomics in statics, which outlive the order in which they were made.
pub(crate) use std::sync::atomic as static_atomic;

/// The time.
pub(crate) fn now() -> Instant {
    Instant::now()
}
