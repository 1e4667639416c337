//! fanout's devices as a backend that programs with ggml load: `GGML_BACKEND_PATH=/path/libggml_fanout.so llama-server …`.
//!
//! A host (llama.cpp, whisper.cpp, …) opens the library, calls [`ggml_backend_score`] to learn whether it fits, and gets a registry
//! of devices from [`ggml_backend_init`]: the GPUs of this machine, and the devices of servers that variables of the environment
//! name. docs/ggml-plugin.md is the manual.
//!
//! ```text
//! registry ──► device ──► buffer ──► fanout's memory
//!                 │
//!                 └─────► stream ──► program_cache ──► fanout's queue and programs
//! ```
//! `abi` has ggml's structs, `host` finds ggml's functions in the process, `numbers` maps its ops and types to fanout's. `server`
//! recovers a lost server, `uploads` loads weights again, and `validity` follows which bytes are lost.
//!
//! # Failures
//! The interface has no errors in most of its calls. No panic crosses it (`guard`). A graph with outputs returns after it has run and
//! they are in the host's memory, so that reading them cannot fail. What a failed write leaves counts as lost, and a graph that
//! needs it fails. Any other failed read delivers NaN, and the next graph of the device fails.
//!
//! # Safety
//! The callbacks trust the host: pointers are valid as ggml's own backends need them to be. Everything else goes through fanout's
//! checked interface.

mod abi;
mod buffer;
mod buffer_calls;
mod config;
mod device;
mod graph;
mod guard;
mod host;
mod host_log;
mod lost_ranges;
mod numbers;
mod outputs;
mod program_cache;
mod registry;
mod reservation;
mod server;
mod stream;
mod support;
mod uploads;
mod validity;

use host_log::{LogLevel, log};
use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

/// How well the library fits the host: 0 if it does not, with a line that tells why.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    guard::guarded(0, || match host::find() {
        Ok(_) => 1,
        Err(reason) => {
            log(LogLevel::Error, &format!("not loaded: {reason}"));
            0
        }
    })
}

/// Why the library does not fit the host; null if it does. For `rpc-server doctor --ggml`.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_fanout_refusal() -> *const c_char {
    static REASON: OnceLock<Option<CString>> = OnceLock::new();
    guard::guarded(std::ptr::null(), || {
        let reason = REASON.get_or_init(|| host::find().err().map(|reason| CString::new(reason).unwrap_or_default()));
        reason.as_ref().map_or(std::ptr::null(), |reason| reason.as_ptr())
    })
}

/// The registry of the plug-in's devices; null if the library does not fit the host.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut abi::Registry {
    guard::guarded(std::ptr::null_mut(), || match host::find() {
        Ok(_) => registry::own(),
        Err(_) => std::ptr::null_mut(),
    })
}
