//! Messages to the host's log. Only the host's own threads call it: Python's callback, for one, ends a foreign thread while the
//! interpreter ends. What threads of the plug-in and of fanout say waits for the next callback.

use crate::guard::lock;
use crate::host;
use std::cell::Cell;
use std::ffi::{CString, c_int};
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Levels of the host's log.
#[derive(Clone, Copy)]
pub(crate) enum LogLevel {
    Debug = 1,
    Info = 2,
    Warn = 3,
    Error = 4,
}

/// Limit of the messages that wait. Further ones are dropped.
const MAX_WAITING: usize = 64;

static WAITING: Mutex<Vec<(LogLevel, String)>> = Mutex::new(Vec::new());
/// Whether any message waits.
static ANY_WAITING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// How many callbacks run on this thread.
    static CALLBACKS: Cell<usize> = const { Cell::new(0) };
}

/// A callback on a thread of the host, from its start to its end.
pub(crate) struct Callback(());

impl Callback {
    /// Begins a callback.
    pub(crate) fn begin() -> Callback {
        if CALLBACKS.replace(CALLBACKS.get() + 1) == 0 {
            write_waiting();
        }
        Callback(())
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        CALLBACKS.set(CALLBACKS.get() - 1);
        if CALLBACKS.get() == 0 {
            write_waiting();
        }
    }
}

/// Logs the messages that wait. The caller holds no lock: the host's log may wait for one of the host's.
fn write_waiting() {
    if ANY_WAITING.swap(false, Ordering::Relaxed) {
        let waiting = std::mem::take(&mut *lock(&WAITING));
        waiting.into_iter().for_each(|(level, text)| write(level, &text));
    }
}

/// Writes a line to the host's log; to the standard error stream if there is no host.
pub(crate) fn log(level: LogLevel, text: &str) {
    if CALLBACKS.get() > 0 || host::found().is_none() {
        return write(level, text);
    }
    log_later(level, text);
}

/// Logs an error on a thread of the host, without a lock, once in this process.
pub(crate) fn log_once(text: &str) {
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !LOGGED.swap(true, Ordering::Relaxed) {
        write(LogLevel::Error, text);
    }
}

fn log_later(level: LogLevel, text: &str) {
    let mut waiting = lock(&WAITING);
    if waiting.len() < MAX_WAITING {
        waiting.push((level, text.to_owned()));
        ANY_WAITING.store(true, Ordering::Relaxed);
    }
}

fn write(level: LogLevel, text: &str) {
    let Some(host) = host::found() else {
        _ = writeln!(std::io::stderr(), "fanout: {text}");
        return;
    };
    let line = CString::new(format!("fanout: {text}\n").replace('\0', " ")).unwrap_or_default();
    host.log(level as c_int, &line);
}

/// Forwards fanout's own messages to the host's log.
struct HostLog;

impl log::Log for HostLog {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let level = match record.level() {
            log::Level::Error => LogLevel::Error,
            log::Level::Warn => LogLevel::Warn,
            log::Level::Info => LogLevel::Info,
            log::Level::Debug | log::Level::Trace => LogLevel::Debug,
        };
        // fanout's locks may be held here.
        log_later(level, &record.args().to_string());
    }

    fn flush(&self) {}
}

/// Forwards fanout's warnings and errors to the host's log from now on.
pub(crate) fn forward_log() {
    // Only the first call sets it.
    if log::set_logger(&HostLog).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}
