//! Functions that exist only in the emulator, for tests: change settings, read reports and counts.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ffi_guard::{Buffer, Text, api};
use crate::config::failing_calls;
use crate::counts::fail_calls;
use crate::driver::{configure, driver, reset};

// SAFETY of the symbol names: they start with `cudaemu_`, which no other library uses.
api! {
    // Changes the settings. Writes the text of the error, or an empty text, to `message`: as much as fits into `room` bytes.
    fn cudaemu_configure(settings: Text, message: Buffer, room: usize) {
        let result = configure(&settings.read()?);
        if message.is_given() {
            message.write(result.as_ref().err().map_or("", String::as_str), room)?;
        }
        result.map_err(|_| crate::error::Error::InvalidValue)
    }

    fn cudaemu_reset() {
        reset();
        Ok(())
    }

    // Ends all hung launches with CUDA_ERROR_LAUNCH_TIMEOUT. From then on, no launch hangs.
    fn cudaemu_end_hung_launches() {
        driver()?.end_hung_launches();
        Ok(())
    }

    // Executes all operations that can execute, so that the counts include them. If `restart` is not 0, simulated time is
    // measured from their end.
    fn cudaemu_settle_simulated_time(restart: u32) {
        driver()?.settle_simulated_time(restart != 0);
        Ok(())
    }
}

/// Replaces the calls that are to fail, in the format of `CUDAEMU_FAIL_CALL`, counted from the next call on. Returns how many of those
/// before have not failed, or `usize::MAX` for an invalid text.
// SAFETY: the symbol name starts with `cudaemu_`, which no other library uses.
#[unsafe(no_mangle)]
extern "C" fn cudaemu_fail_calls(text: Text) -> usize {
    let failing = text.read().ok().and_then(|text| failing_calls(&text).ok());
    failing.map_or(usize::MAX, fail_calls)
}

/// Copies the reports so far, separated by the record separator 0x1e, to `text`: as much as fits into `room` bytes with a
/// terminating zero. Returns the number of bytes of the whole text, zero included.
// SAFETY: the symbol name starts with `cudaemu_`, which no other library uses.
#[unsafe(no_mangle)]
extern "C" fn cudaemu_reports(text: Buffer, room: usize) -> usize {
    fill(text, room, || driver().map_or_else(|_| String::new(), |driver| driver.lock().reports.join("\u{1e}")))
}

/// Copies the counts so far as JSON to `text`. Buffer size and return value as for `cudaemu_reports`.
// SAFETY: the symbol name starts with `cudaemu_`, which no other library uses.
#[unsafe(no_mangle)]
extern "C" fn cudaemu_counts_json(text: Buffer, room: usize) -> usize {
    fill(text, room, || driver().map_or_else(|_| String::new(), |driver| driver.counts_json(&driver.lock())))
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

/// Registers the printing of the counts' summary at process exit.
pub(super) fn at_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function takes no arguments and does not unwind. The library stays loaded until exit: a program that
        // called `cuInit` keeps it open.
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
