//! Standard error for the log, written by a thread: a pipe that is full and that nobody reads then stops neither the
//! supervisor, which must restart workers, nor a session that logs.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Limit of the lines that wait. Further lines are left out and counted.
const MAX_LINES: usize = 1024;

/// How long [`flush`] waits for a stream that nobody reads.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The writer of this process.
static WRITER: OnceLock<LogWriter> = OnceLock::new();

/// The writer of this process, which takes log lines and never blocks. They wait until [`start`].
pub(crate) fn writer() -> LogWriter {
    WRITER.get_or_init(LogWriter::default).clone()
}

/// Starts the thread that writes to standard error, if it does not run. In a process that enters a sandbox, it must do so first:
/// a thread that runs before stays outside.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn start() -> io::Result<()> {
    writer().write_to(io::stderr())
}

/// Waits until all lines are written: before the program ends, and before a line that does not pass through the log.
pub(crate) fn flush() {
    if start().is_ok() {
        writer().wait_until_written(FLUSH_TIMEOUT);
    }
}

/// Passes lines to the thread, one per call of `write`.
#[derive(Clone, Default)]
pub(crate) struct LogWriter {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    lines: Mutex<Lines>,
    /// Notified when a line is added, and when all are written.
    changed: Condvar,
}

#[derive(Default)]
struct Lines {
    waiting: VecDeque<Vec<u8>>,
    /// Lines that found no room since the last one that did.
    left_out: u64,
    /// Whether the thread is writing a line.
    writing: bool,
    /// Whether the thread runs.
    started: bool,
}

impl Lines {
    fn is_written(&self) -> bool {
        self.waiting.is_empty() && self.left_out == 0 && !self.writing
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        // No code that can panic runs while the fields disagree.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the lines as they come. A stream that fails discards them.
    fn write_lines(&self, mut stream: impl Write) {
        let mut lines = self.lock();
        loop {
            lines.writing = false;
            if lines.is_written() {
                self.changed.notify_all();
                lines =
                    self.changed.wait_while(lines, |lines| lines.is_written()).unwrap_or_else(PoisonError::into_inner);
            }
            let line = lines.waiting.pop_front().unwrap_or_else(|| {
                let count = mem::take(&mut lines.left_out);
                format!("{count} log lines were left out: standard error was not read in time\n").into_bytes()
            });
            lines.writing = true;
            drop(lines);
            let _ = stream.write_all(&line).and_then(|()| stream.flush());
            lines = self.lock();
        }
    }
}

impl LogWriter {
    fn write_to(&self, stream: impl Write + Send + 'static) -> io::Result<()> {
        let mut lines = self.shared.lock();
        if !lines.started {
            let shared = Arc::clone(&self.shared);
            std::thread::Builder::new().name("log".to_owned()).spawn(move || shared.write_lines(stream))?;
            lines.started = true;
        }
        Ok(())
    }

    fn wait_until_written(&self, timeout: Duration) {
        let lines = self.shared.lock();
        drop(self.shared.changed.wait_timeout_while(lines, timeout, |lines| !lines.is_written()));
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lines = self.shared.lock();
        // Once a line is left out, so are the next ones until the thread has reported it: the report then stands in its place.
        if lines.left_out > 0 || lines.waiting.len() >= MAX_LINES {
            lines.left_out += 1;
        } else {
            lines.waiting.push_back(line.to_vec());
        }
        self.shared.changed.notify_all();
        Ok(line.len())
    }

    /// Does not wait: [`flush`] does.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A stream that takes a line each time the test allows it.
    struct GatedStream {
        gate: mpsc::Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for GatedStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // After the gate was dropped, the stream takes everything.
            let _ = self.gate.recv();
            self.written.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_do_not_wait_for_the_stream_and_those_left_out_are_counted() {
        const MORE: usize = 10;
        let (gate, receiver) = mpsc::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let mut writer = LogWriter::default();
        writer.write_to(GatedStream { gate: receiver, written: Arc::clone(&written) }).expect("a thread");
        let count = MAX_LINES + MORE;
        for number in 0..count {
            writer.write_all(format!("line {number}\n").as_bytes()).expect("taken");
        }
        writer.wait_until_written(Duration::ZERO);
        assert!(written.lock().expect("no panic").is_empty());
        drop(gate);
        writer.wait_until_written(Duration::from_secs(60));
        let text = String::from_utf8(written.lock().expect("no panic").clone()).expect("text");
        let lines: Vec<_> = text.lines().collect();
        // The thread may have taken the first line before the others came.
        let shown = lines.len() - 1;
        assert!(shown == MAX_LINES || shown == MAX_LINES + 1, "{shown}");
        assert!(lines[..shown].iter().enumerate().all(|(number, line)| *line == format!("line {number}")));
        let report = format!("{} log lines were left out: standard error was not read in time", count - shown);
        assert_eq!(lines[shown], report);
    }
}
