//! Functions of the emulator's own, for tests: settings, reports, counts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use super::ffi_guard::{Buffer, Text, api};
use crate::counts::call_counts;
use crate::driver::{Driver, configure, driver, reset};

// SAFETY of the names: they begin with the emulator's own.
api! {
    fn cudaemu_configure(settings: Text, message: Buffer, room: usize) {
        let wrong = configure(&settings.read()?);
        if message.is_given() {
            message.write(wrong.as_ref().err().map_or("", String::as_str), room)?;
        }
        wrong.map_err(|_| crate::error::Error::InvalidValue)
    }

    fn cudaemu_reset() {
        reset();
        Ok(())
    }
}

/// Reports so far, separated by the record separator 0x1e: writes as much as fits into `room` bytes with a zero, and answers how many
/// bytes all of it needs, zero included.
// SAFETY: the name begins with the emulator's own.
#[unsafe(no_mangle)]
extern "C" fn cudaemu_reports(text: Buffer, room: usize) -> usize {
    fill(text, room, || driver().map_or_else(|_| String::new(), |driver| driver.lock().reports.join("\u{1e}")))
}

/// Counts so far as JSON; buffer and answer as with `cudaemu_reports`.
// SAFETY: the name begins with the emulator's own.
#[unsafe(no_mangle)]
extern "C" fn cudaemu_counts_json(text: Buffer, room: usize) -> usize {
    fill(text, room, || {
        let json = |driver: Arc<Driver>| {
            let state = driver.lock();
            state.counts.json(&call_counts(), state.streams.time.end())
        };
        driver().map_or_else(|_| String::new(), json)
    })
}

fn fill(buffer: Buffer, room: usize, text: impl FnOnce() -> String) -> usize {
    let mut needed = 0;
    super::ffi_guard::guard_call("a function of the emulator", || {
        let text = text();
        needed = text.len() + 1;
        if buffer.is_given() && room > 0 { buffer.write(&text, room) } else { Ok(()) }
    });
    needed
}

/// Has the summary printed when the process ends.
pub(super) fn at_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function takes nothing and does not unwind; the library is never unloaded once `cuInit` was called with it, as
        // its users keep it open.
        unsafe { libc::atexit(summary) };
    });
}

extern "C" fn summary() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        super::ffi_guard::guard_call("the summary", || {
            driver()?.summary();
            Ok(())
        });
    }
}
