//! Locks, condition variables, atomics, threads and time of the concurrent core: those of std.
//!
//! Files of the core use locks, threads and time only through this module (tests/layout checks it). crates/orders compiles the
//! same files with another module of this name, whose threads run one at a time in orders that a seed determines.

pub(crate) use crate::poison::{Unpoisoned, lock};
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{
    Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, Weak, atomic,
};
pub(crate) use std::thread;
pub(crate) use std::time::Instant;

/// Atomics for statics. A static lives through all executions of crates/orders, and an atomic of its scheduler belongs to one.
pub(crate) use std::sync::atomic as static_atomic;

/// The time.
pub(crate) fn now() -> Instant {
    Instant::now()
}
