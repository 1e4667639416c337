//! Console output: log messages of the emulator and `printf` of kernels. A write error must never end the process: the program
//! may have closed stdout or stderr, where `print!` and `eprintln!` panic.

use std::fmt::Display;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exec::PrintSink;

/// Logs a message to stderr, prefixed with `cudaemu: `.
pub fn log_stderr(message: impl Display) {
    // One write call, so that output of other threads does not split the line. An error is ignored: a closed stderr cannot be
    // reported.
    let _ = std::io::stderr().write_all(format!("cudaemu: {message}\n").as_bytes());
}

/// Collects the device's `printf` output of one launch for stdout.
#[derive(Debug, Default)]
pub struct Printer {
    printed: Arc<AtomicBool>,
}

impl Printer {
    /// The sink for the text. A failed write loses the text, as in a C program that ignores the result of `printf`.
    pub fn sink(&self) -> PrintSink {
        let printed = self.printed.clone();
        Arc::new(move |text| {
            printed.store(true, Ordering::Relaxed);
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
        })
    }

    /// Flushes stdout at the end of a launch: no exit handler flushes this library's Rust stdout buffer.
    pub fn finish(&self) {
        if self.printed.load(Ordering::Relaxed) {
            let _ = std::io::stdout().lock().flush();
        }
    }
}
