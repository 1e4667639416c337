//! Loading the driver library from tests, before anything else asks for "libcuda.so".
#![allow(unsafe_code, reason = "one of the places the crate allows it in: dlopen and dlsym")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The emulator as a loaded library.
#[derive(Clone, Copy, Debug)]
pub struct Emulator {
    configure: extern "C" fn(*const c_char, *mut c_char, usize) -> u32,
    reset: extern "C" fn() -> u32,
    reports: TextFunction,
    counts: TextFunction,
}

type TextFunction = extern "C" fn(*mut c_char, usize) -> usize;

/// A stretch of a test that has the emulator for itself, with settings of its own.
#[derive(Debug)]
pub struct Session {
    emulator: Emulator,
    _alone: MutexGuard<'static, ()>,
}

/// Loads the library (built by cargo next to this executable) so that whoever loads "libcuda.so" later gets it. Once per process; later
/// calls give the same.
pub fn load() -> Result<Emulator, String> {
    static LOADED: OnceLock<Result<Emulator, String>> = OnceLock::new();
    LOADED.get_or_init(open).clone()
}

/// Loads the library, and gives one test at a time the emulator, new and with these settings (lines `NAME=value`). What the test made of
/// contexts must be gone before the session is.
pub fn start(settings: &str) -> Result<Session, String> {
    static ALONE: Mutex<()> = Mutex::new(());
    let emulator = load()?;
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    emulator.configure(settings)?;
    Ok(Session { emulator, _alone: alone })
}

impl Drop for Session {
    fn drop(&mut self) {
        self.emulator.reset();
    }
}

impl Session {
    /// Waits until every primary context that was retained is released, which a program's own threads may do later than the test
    /// that started them ends. False when `limit` passes first.
    #[must_use]
    pub fn wait_contexts_released(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while self.calls("cuDevicePrimaryCtxRelease_v2") < self.calls("cuDevicePrimaryCtxRetain") {
            if Instant::now() > until {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

impl std::ops::Deref for Session {
    type Target = Emulator;
    fn deref(&self) -> &Emulator {
        &self.emulator
    }
}

impl Emulator {
    /// Replaces the settings (lines `NAME=value`, over those of the environment) and starts afresh.
    pub fn configure(&self, settings: &str) -> Result<(), String> {
        let settings = CString::new(settings).map_err(|error| error.to_string())?;
        let mut message = vec![0; 4096];
        match (self.configure)(settings.as_ptr(), message.as_mut_ptr(), message.len()) {
            0 => Ok(()),
            _ => Err(text(&message)),
        }
    }

    /// Starts afresh: all handles of before stand for nothing.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// What the checker found since the start, oldest first.
    pub fn reports(&self) -> Vec<String> {
        let all = fetch(self.reports);
        all.split('\u{1e}').filter(|report| !report.is_empty()).map(str::to_owned).collect()
    }

    /// How often a function of the driver was called since the start.
    pub fn calls(&self, function: &str) -> u64 {
        let counts = self.counts_json();
        let calls = counts.rsplit_once("\"calls\": ").map_or("", |(_, calls)| calls);
        let count = calls.split_once(&format!("\"{function}\": ")).map_or("", |(_, count)| count);
        count.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
    }

    /// Counts of all kernels since the start, as JSON.
    pub fn counts_json(&self) -> String {
        fetch(self.counts)
    }
}

fn fetch(function: TextFunction) -> String {
    let mut buffer = Vec::new();
    loop {
        let needed = function(buffer.as_mut_ptr(), buffer.len());
        if needed <= buffer.len() {
            return text(&buffer);
        }
        // With room for what other threads add meanwhile.
        buffer.resize(needed + 1024, 0);
    }
}

fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The newest of the places where cargo puts the library, seen from a test, a benchmark, an example or a program.
fn find() -> Result<PathBuf, String> {
    let exe = std::env::current_exe().map_err(|error| format!("this program's path is not known: {error}"))?;
    let folder = exe.parent().ok_or("this program has no folder")?;
    let places = [".", "..", "deps", "../deps"].map(|place| folder.join(place).join("libcudaemu.so"));
    let modified = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    let newest = places.iter().filter(|path| path.exists()).max_by_key(|path| modified(path));
    newest
        .cloned()
        .ok_or_else(|| format!("libcudaemu.so is not next to {}: build the crate cudaemu first", exe.display()))
}

fn open() -> Result<Emulator, String> {
    let path = find()?;
    let name = CString::new(path.to_string_lossy().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the name is a C string. The library is this crate's own; what it runs when it is loaded is Rust's start, which is harmless.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: after a failure the result is a C string, or null, until the next call of this thread.
        let reason = unsafe {
            let reason = libc::dlerror();
            if reason.is_null() { String::new() } else { CStr::from_ptr(reason).to_string_lossy().into_owned() }
        };
        return Err(format!("{} cannot be loaded: {reason}", path.display()));
    }
    let symbol = |name: &CStr| {
        // SAFETY: the library was just opened, and is never closed.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        match symbol.is_null() {
            true => Err(format!("{} has no {name:?}: it is of another version", path.display())),
            false => Ok(symbol),
        }
    };
    let [configure, reset] = [symbol(c"cudaemu_configure")?, symbol(c"cudaemu_reset")?];
    let [reports, counts] = [symbol(c"cudaemu_reports")?, symbol(c"cudaemu_counts_json")?];
    // SAFETY: these are the functions of `extension`, whose C signatures the types here repeat.
    unsafe {
        Ok(Emulator {
            configure: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, *mut c_char, usize) -> u32>(
                configure,
            ),
            reset: std::mem::transmute::<*mut c_void, extern "C" fn() -> u32>(reset),
            reports: std::mem::transmute::<*mut c_void, TextFunction>(reports),
            counts: std::mem::transmute::<*mut c_void, TextFunction>(counts),
        })
    }
}
