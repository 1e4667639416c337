//! Console output: log messages of the emulator.

use std::fmt::Display;
use std::io::Write;

/// Logs a message to stderr, prefixed with `cudaemu: `. A write error must never end the process: the program may have closed
/// stderr, where `eprintln!` panics.
pub fn log_stderr(message: impl Display) {
    // One write call, so that output of other threads does not split the line. An error is ignored: a closed stderr cannot be
    // reported.
    let _ = std::io::stderr().write_all(format!("cudaemu: {message}\n").as_bytes());
}
