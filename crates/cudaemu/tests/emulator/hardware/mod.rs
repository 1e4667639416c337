//! What a real GPU does that an ideal one does not: unusable devices, launches that never end, shared connections, allocations
//! that synchronise, compilation times, corrupted copies, calls that fail. Each is off by default.
#![allow(unsafe_code, reason = "the driver's C functions are unsafe")]

mod allocations;
mod connections;
mod copies;
mod failing_calls;
mod faults;
mod hangs;

use crate::driver::support::{get_function, handle, load_kernels, ok};
use cudarc::driver::sys;

/// The kernel `scale` in the current context.
fn scale() -> sys::CUfunction {
    get_function(load_kernels(), "scale")
}

/// A stream of the current context that does not synchronise with the default stream.
fn stream() -> sys::CUstream {
    // SAFETY: the out parameter points to a variable of its type.
    handle(|s| unsafe { sys::cuStreamCreate(s, 1) })
}

/// Copies a word to the host.
fn read_word(address: u64) -> u32 {
    let mut word = 0u32;
    // SAFETY: the variable has the size of the copy.
    ok(unsafe { sys::cuMemcpyDtoH_v2(std::ptr::from_mut(&mut word).cast(), address, 4) });
    word
}
