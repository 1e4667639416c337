//! What the emulator says, and what kernels print. Neither may end the program: it may have closed stdout or stderr, for which
//! `print!` and `eprintln!` panic.

use std::fmt::Display;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exec::PrintSink;

/// Says it on stderr, after the emulator's name.
pub fn log_stderr(message: impl Display) {
    // In one write, so that what the program says meanwhile does not come in between. Nobody can be told that stderr is closed.
    let _ = std::io::stderr().write_all(format!("cudaemu: {message}\n").as_bytes());
}

/// The device's `printf` in one launch: goes to stdout.
#[derive(Debug, Default)]
pub struct Printer {
    printed: Arc<AtomicBool>,
}

impl Printer {
    /// What takes the text. A write that fails loses it, as in C programs that do not look.
    pub fn sink(&self) -> PrintSink {
        let printed = self.printed.clone();
        Arc::new(move |text| {
            printed.store(true, Ordering::Relaxed);
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
        })
    }

    /// The launch is over. Nothing flushes a library's stdout when the process ends, so it is done now.
    pub fn finish(&self) {
        if self.printed.load(Ordering::Relaxed) {
            let _ = std::io::stdout().lock().flush();
        }
    }
}
