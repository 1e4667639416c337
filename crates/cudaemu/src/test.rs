//! Test support: loads the emulator's driver library, before any other code opens "libcuda.so", and gives each test a fresh
//! driver.
#![allow(unsafe_code, reason = "one of the places the crate allows it in: dlopen and dlsym")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The loaded emulator library.
#[derive(Clone, Copy, Debug)]
pub struct Emulator {
    configure: extern "C" fn(*const c_char, *mut c_char, usize) -> u32,
    reset: extern "C" fn() -> u32,
    settle_simulated_time: extern "C" fn(u32) -> u32,
    end_hung_launches: extern "C" fn() -> u32,
    fail_calls: extern "C" fn(*const c_char) -> usize,
    reports: TextFunction,
    counts: TextFunction,
}

type TextFunction = extern "C" fn(*mut c_char, usize) -> usize;

/// Simulated time and waits since the start of the driver, or since the last [`Emulator::restart_simulated_time`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimulatedTime {
    /// Microseconds until the end of all work; 0 unless a rate is set.
    pub makespan_us: f64,
    /// For each device, microseconds of its kernels, and of its copies and fills within the device, summed.
    pub busy_us: Vec<f64>,
    /// Number of times that a thread of the program waited for the device: calls that block until operations have ended
    /// (synchronisation, synchronous copies, copies to pageable memory, freeing of memory), and, if a rate is set, series of
    /// queries that had to wait for simulated time to pass.
    pub host_waits: u64,
}

/// Exclusive use of the emulator by one test, with its own settings.
#[derive(Debug)]
pub struct Session {
    emulator: Emulator,
    _alone: MutexGuard<'static, ()>,
}

/// Loads the library (built by cargo next to this executable) so that later `dlopen("libcuda.so")` calls of the process get it.
/// Loads it once per process; later calls return the same library.
pub fn load() -> Result<Emulator, String> {
    static LOADED: OnceLock<Result<Emulator, String>> = OnceLock::new();
    LOADED.get_or_init(load_library).clone()
}

/// Loads the library, waits for exclusive use, and starts a fresh driver with these settings (lines `NAME=value`). The test
/// must release its contexts before it drops the session. Dropping the session ends launches that hang (`CUDAEMU_HANG_AT`).
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
    /// Waits until every retained primary context is released: threads of the program may release theirs after the test that
    /// started them has ended. Returns false if `limit` passes first.
    #[must_use]
    pub fn wait_contexts_released(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while self.driver_count("primary_contexts") > 0 {
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
    /// Replaces the settings (lines `NAME=value`, which take precedence over the environment) and resets the driver.
    pub fn configure(&self, settings: &str) -> Result<(), String> {
        let settings = CString::new(settings).map_err(|error| error.to_string())?;
        let mut message = vec![0; 4096];
        match (self.configure)(settings.as_ptr(), message.as_mut_ptr(), message.len()) {
            0 => Ok(()),
            _ => Err(text_until_nul(&message)),
        }
    }

    /// Resets the driver: all earlier handles become invalid.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// Reports of the checker since the start, oldest first.
    pub fn reports(&self) -> Vec<String> {
        let all = fetch_text(self.reports);
        all.split('\u{1e}').filter(|report| !report.is_empty()).map(str::to_owned).collect()
    }

    /// Number of calls of a driver function since the start.
    pub fn calls(&self, function: &str) -> u64 {
        let counts = self.counts_json();
        let calls = counts.rsplit_once("\"calls\": ").map_or("", |(_, calls)| calls);
        let count = calls.split_once(&format!("\"{function}\": ")).map_or("", |(_, count)| count);
        count.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
    }

    /// Number of calls since the start that allocate or free device memory, or pinned memory, in a way that synchronises on a
    /// GPU: `cuMemAlloc`, `cuMemAllocManaged`, `cuMemFree`, `cuMemHostAlloc` and `cuMemFreeHost`, but not
    /// `cuMemAllocAsync` and `cuMemFreeAsync`.
    pub fn alloc_syncs(&self) -> u64 {
        self.driver_count("alloc_syncs")
    }

    /// Number of compilations since the start: loads of modules.
    pub fn compilations(&self) -> u64 {
        self.driver_count("compilations")
    }

    /// Number of launches that hang now (`CUDAEMU_HANG_AT`).
    pub fn hung_launches(&self) -> u64 {
        self.driver_count("hung_launches")
    }

    /// Number of kernels since the start that graphs have launched through a programmatic edge.
    pub fn programmatic_launches(&self) -> u64 {
        self.driver_count("programmatic_launches")
    }

    /// Number of kernels since the start that were loaded by their first launch or graph node (`CUDAEMU_FUNCTION_BYTES`).
    pub fn lazy_loads(&self) -> u64 {
        self.driver_count("lazy_loads")
    }

    /// Replaces the calls that are to fail, in the format of `CUDAEMU_FAIL_CALL`, counted from the next call on; an empty text ends all.
    /// Returns how many of those before have not failed, because the program has not made these calls.
    ///
    /// # Errors
    /// The text is invalid.
    pub fn fail_calls(&self, calls: &str) -> Result<usize, String> {
        let text = CString::new(calls).map_err(|error| error.to_string())?;
        match (self.fail_calls)(text.as_ptr()) {
            usize::MAX => Err(format!("{calls:?} is no list of FUNCTION:NUMBER:CODE")),
            left => Ok(left),
        }
    }

    /// Ends all launches that hang, with CUDA_ERROR_LAUNCH_TIMEOUT for their contexts: calls that wait for them return. From
    /// then on, no launch hangs.
    pub fn end_hung_launches(&self) {
        (self.end_hung_launches)();
    }

    fn driver_count(&self, name: &str) -> u64 {
        let counts = self.counts_json();
        let (_, rest) = counts.rsplit_once(&format!("\"{name}\": ")).unwrap_or_default();
        rest.split(',').next().and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Counts of all kernels since the start, as JSON. Only operations that the emulator has executed are included.
    pub fn counts_json(&self) -> String {
        fetch_text(self.counts)
    }

    /// Executes all submitted operations, and returns their simulated time. Operations that wait for a value which the program has
    /// yet to write stay pending and do not count.
    pub fn simulated_time(&self) -> SimulatedTime {
        (self.settle_simulated_time)(0);
        let counts = self.counts_json();
        let value = |name: &str, end: char| {
            let (_, rest) = counts.rsplit_once(&format!("\"{name}\": ")).unwrap_or_default();
            rest.split(end).next().unwrap_or_default().to_owned()
        };
        let busy = value("simulated_busy_us", ']');
        SimulatedTime {
            makespan_us: value("simulated_us", '}').parse().unwrap_or_default(),
            busy_us: busy.trim_start_matches('[').split(", ").filter_map(|busy| busy.parse().ok()).collect(),
            host_waits: value("host_waits", ',').parse().unwrap_or_default(),
        }
    }

    /// Executes all submitted operations as [`Emulator::simulated_time`] does, and begins a new measurement: what any thread
    /// submits from now on starts at their end or later, and the numbers of [`SimulatedTime`] start at 0.
    pub fn restart_simulated_time(&self) {
        (self.settle_simulated_time)(1);
    }
}

fn fetch_text(function: TextFunction) -> String {
    // Room for most texts, each of which a call makes anew.
    let mut buffer = vec![0; 64 << 10];
    loop {
        let needed = function(buffer.as_mut_ptr(), buffer.len());
        if needed <= buffer.len() {
            return text_until_nul(&buffer);
        }
        // Spare room for text that other threads append meanwhile.
        buffer.resize(needed + 1024, 0);
    }
}

fn text_until_nul(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The newest library among the places where cargo builds it, relative to a test, a benchmark, an example or a program.
fn find_library() -> Result<PathBuf, String> {
    let exe = std::env::current_exe().map_err(|error| format!("this program's path is not known: {error}"))?;
    let folder = exe.parent().ok_or("this program has no folder")?;
    let places = [".", "..", "deps", "../deps"].map(|place| folder.join(place).join("libcudaemu.so"));
    let modified = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    let newest = places.iter().filter(|path| path.exists()).max_by_key(|path| modified(path));
    newest
        .cloned()
        .ok_or_else(|| format!("libcudaemu.so is not next to {}: build the crate cudaemu first", exe.display()))
}

fn load_library() -> Result<Emulator, String> {
    let path = find_library()?;
    let name = CString::new(path.to_string_lossy().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the name is a C string. The library is this crate's own; loading it only runs Rust's harmless initialisation.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: after a failure the result is a C string or null, valid until this thread's next call.
        let reason = unsafe {
            let reason = libc::dlerror();
            if reason.is_null() { String::new() } else { CStr::from_ptr(reason).to_string_lossy().into_owned() }
        };
        return Err(format!("{} cannot be loaded: {reason}", path.display()));
    }
    let symbol = |name: &CStr| {
        // SAFETY: the library was opened above and is never closed.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        match symbol.is_null() {
            true => Err(format!("{} has no {name:?}: it is of another version", path.display())),
            false => Ok(symbol),
        }
    };
    let [configure, reset] = [symbol(c"cudaemu_configure")?, symbol(c"cudaemu_reset")?];
    let settle_simulated_time = symbol(c"cudaemu_settle_simulated_time")?;
    let [end_hung_launches, fail_calls] = [symbol(c"cudaemu_end_hung_launches")?, symbol(c"cudaemu_fail_calls")?];
    let [reports, counts] = [symbol(c"cudaemu_reports")?, symbol(c"cudaemu_counts_json")?];
    // SAFETY: these are the functions of `extension`; the types here repeat their C signatures.
    unsafe {
        Ok(Emulator {
            configure: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, *mut c_char, usize) -> u32>(
                configure,
            ),
            reset: std::mem::transmute::<*mut c_void, extern "C" fn() -> u32>(reset),
            settle_simulated_time: std::mem::transmute::<*mut c_void, extern "C" fn(u32) -> u32>(settle_simulated_time),
            end_hung_launches: std::mem::transmute::<*mut c_void, extern "C" fn() -> u32>(end_hung_launches),
            fail_calls: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> usize>(fail_calls),
            reports: std::mem::transmute::<*mut c_void, TextFunction>(reports),
            counts: std::mem::transmute::<*mut c_void, TextFunction>(counts),
        })
    }
}
