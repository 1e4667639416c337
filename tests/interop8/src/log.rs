//! llama.cpp's log, on stderr.

use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use llama_cpp_sys_4 as sys;

/// The lowest level that is printed.
static MIN_LEVEL: AtomicU32 = AtomicU32::new(sys::GGML_LOG_LEVEL_WARN);
/// Whether the last message was printed. A continuation is printed if the message before it was.
static PRINTED: AtomicBool = AtomicBool::new(false);

/// Sends llama.cpp's and ggml's log to stderr: warnings and errors, with `verbose` also information, for example the device of
/// each buffer. Every program calls it before anything else of this crate.
pub fn init_log(verbose: bool) {
    let level = if verbose { sys::GGML_LOG_LEVEL_INFO } else { sys::GGML_LOG_LEVEL_WARN };
    MIN_LEVEL.store(level, Ordering::Relaxed);
    // SAFETY: `print` has the required signature and uses no user data.
    unsafe { sys::llama_log_set(Some(print), ptr::null_mut()) };
}

extern "C" fn print(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    let printed = if level == sys::GGML_LOG_LEVEL_CONT {
        PRINTED.load(Ordering::Relaxed)
    } else {
        level >= MIN_LEVEL.load(Ordering::Relaxed)
    };
    PRINTED.store(printed, Ordering::Relaxed);
    if printed && !text.is_null() {
        // SAFETY: ggml passes a NUL-terminated text that lives until the callback returns.
        let text = unsafe { CStr::from_ptr(text) };
        // A closed stderr must not end a test client.
        let _ = std::io::stderr().write_all(text.to_bytes());
    }
}
