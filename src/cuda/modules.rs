//! Modules: the code of one PTX file, compiled by the driver (JIT) and loaded into the context of a device.
//!
//! Compiling a file takes 40 to 600 ms, unless the driver's cache on disk has its code. So each module has a cell with a lock of
//! its own: the users of one module wait for its one compilation, and users of other modules do not. [`load_all`] compiles the
//! modules of a program in parallel, and `precompile` those that a device is likely to need.
#![allow(unsafe_code)]

use super::context::{DeviceContext, PrimaryContext};
use super::driver_api;
use super::kernel::{DEFAULT_SHARED, IMAGES, KernelEntry, KernelLaunch, LoadedLaunch, PtxImage, find_entry};
use super::programmatic::with_grid_waits;
use crate::device::{DeviceError, ModuleLoad, Reservation};
use crate::poison::lock;
use cudarc::driver::sys;
use flate2::read::ZlibDecoder;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{CString, c_void};
use std::io::Read;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Limit of the threads that compile the modules of a program, its caller included.
const MAX_COMPILING_THREADS: usize = 8;

/// First driver that may return a function which is not loaded, and has a call that loads it: CUDA 12.4. Otherwise the first launch
/// would load it, synchronise and perhaps fail. Drivers of CUDA 12.2 and 12.3 load a function when it is requested (CUDA C++ Programming
/// Guide 12.2, "Lazy Loading"), older ones with its module. Setting CUDA_MODULE_LOADING to EAGER instead would load all kernels of a
/// module, and a library must not set environment variables, which other threads may be reading.
const FUNC_LOAD_DRIVER: u32 = 12040;

/// A loaded kernel, which keeps its module loaded.
#[derive(Clone)]
pub(super) struct Function {
    raw: sys::CUfunction,
    _module: Arc<Module>,
}

// SAFETY: the driver allows the use of a function handle from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The driver's handle, valid while this function is alive.
    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }
}

struct Module {
    raw: sys::CUmodule,
    context: Arc<PrimaryContext>,
    /// The estimate of the module's memory, in the device's budget.
    _memory: Reservation,
}

// SAFETY: the driver allows the use of a module handle from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the module is unloaded once, after the last `Function` of it was dropped.
            let _ = unsafe { driver_api::cuModuleUnload(self.raw) };
        }
    }
}

/// A module once it is loaded. The thread that loads it holds the lock meanwhile; threads that need it wait.
#[derive(Default)]
struct ModuleCell(Mutex<Option<Arc<Module>>>);

/// The modules of a device, by file stem and target. A module is loaded on first use; a failure is not kept, so the next use
/// tries again.
#[derive(Default)]
pub(super) struct Modules {
    /// The lock is held only to find a cell.
    cells: Mutex<HashMap<(&'static str, u32), Arc<ModuleCell>>>,
}

impl Modules {
    fn cell(&self, image: &PtxImage) -> Arc<ModuleCell> {
        Arc::clone(lock(&self.cells).entry((image.stem, image.target)).or_default())
    }

    /// Whether the module is loaded.
    fn has(&self, image: &PtxImage) -> bool {
        // A module that is being loaded counts as missing: a thread that needs it has to wait.
        self.cell(image).0.try_lock().is_ok_and(|module| module.is_some())
    }

    /// The module, loaded by this call or an earlier one.
    fn load(&self, context: &DeviceContext, image: &'static PtxImage) -> Result<Arc<Module>, DeviceError> {
        let cell = self.cell(image);
        let mut module = lock(&cell.0);
        if let Some(module) = &*module {
            return Ok(Arc::clone(module));
        }
        context.primary().check_lost()?;
        context.bind()?;
        Ok(Arc::clone(module.insert(Arc::new(load_module(context, image)?))))
    }

    /// Loads a module, unless it is loaded.
    pub(super) fn prepare(&self, context: &DeviceContext, image: &'static PtxImage) -> Result<(), DeviceError> {
        self.load(context, image).map(drop)
    }

    /// The function of an entry, whose module is loaded if it is not, for launches with `shared` bytes of dynamic shared memory.
    pub(super) fn load_function(
        &self,
        context: &DeviceContext,
        entry: KernelEntry,
        shared: u32,
    ) -> Result<Function, DeviceError> {
        let module = self.load(context, entry.image)?;
        context.bind()?;
        let name = CString::new(entry.name).map_err(|e| DeviceError::Bug(e.to_string()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive; the function writes one handle.
        unsafe { driver_api::cuModuleGetFunction(&raw mut raw, module.raw, name.as_ptr()) }
            .map_err(|e| context.driver_error("cuModuleGetFunction", e))?;
        if context.gpu.driver >= FUNC_LOAD_DRIVER {
            // SAFETY: as above.
            unsafe { driver_api::cuFuncLoad(raw) }.map_err(|e| context.driver_error("cuFuncLoad", e))?;
        }
        if shared > DEFAULT_SHARED {
            // The attribute belongs to the function, not to a launch. An entry that needs it is always launched with the same number, so that no
            // program lowers it for another.
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: as above.
            unsafe { driver_api::cuFuncSetAttribute(raw, attribute, shared as i32) }
                .map_err(|e| context.driver_error("cuFuncSetAttribute", e))?;
        }
        Ok(Function { raw, _module: module })
    }
}

/// Loads the kernels of launches. Their modules are compiled in parallel, in the order of their first launches.
///
/// # Errors
/// The driver's error, or [`DeviceError::OutOfMemory`], of the first launch whose module cannot be loaded.
pub(super) fn load_all(context: &DeviceContext, launches: Vec<KernelLaunch>) -> Result<Vec<LoadedLaunch>, DeviceError> {
    let mut seen = HashSet::new();
    let images = launches.iter().map(|launch| launch.entry().image);
    let missing: Vec<_> = images
        .filter(|image| seen.insert((image.stem, image.target)))
        .filter(|image| !context.modules.has(image))
        .collect();
    compile_in_parallel(context, &missing);
    // Finds the modules loaded, and returns the error of one that was not.
    launches.into_iter().map(|launch| launch.load(context)).collect()
}

/// Compiles modules on several threads, in order. Errors are left to the next use of the module, which compiles it again.
fn compile_in_parallel(context: &DeviceContext, images: &[&'static PtxImage]) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let next = AtomicUsize::new(0);
    let compile = || {
        while let Some(image) = images.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = context.modules.prepare(context, image) {
                log::debug!("{}: {} is not compiled: {error}", context.primary().name, image.name());
                // The others fail for the same reason, or have to wait for the one that fails.
                next.store(images.len(), Ordering::Relaxed);
            }
        }
    };
    let helpers = images.len().min(cores).min(MAX_COMPILING_THREADS).saturating_sub(1);
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no thread can be started, fewer compile.
            let _ = thread::Builder::new().name("compile".to_owned()).spawn_scoped(scope, compile);
        }
        compile();
    });
}

/// Loads every module for this device, one after the other, and returns the times of those that were not loaded.
pub(super) fn measure_loads(context: &DeviceContext) -> Result<Vec<ModuleLoad>, DeviceError> {
    let mut loads = Vec::new();
    for image in PtxImage::all(context.gpu.capability).filter(|image| !context.modules.has(image)) {
        let start = Instant::now();
        context.modules.prepare(context, image)?;
        loads.push(ModuleLoad { name: image.name(), time: start.elapsed() });
    }
    Ok(loads)
}

impl PtxImage {
    /// The PTX.
    pub(super) fn text(&self) -> Result<String, DeviceError> {
        let mut text = String::new();
        let unpacked = ZlibDecoder::new(self.packed).read_to_string(&mut text);
        unpacked.map_err(|e| DeviceError::Bug(format!("the PTX of {} cannot be unpacked: {e}", self.stem)))?;
        Ok(text)
    }

    /// Name of the PTX file.
    pub(super) fn name(&self) -> String {
        format!("{}.sm_{}", self.stem, self.target)
    }

    /// The images of a file that a device of this capability uses: those that have an entry which no image with a higher target
    /// has. A file for tensor cores has only the entries that use them.
    pub(super) fn of_file(capability: u32, stem: &str) -> impl Iterator<Item = &'static PtxImage> {
        let is_used = move |image: &PtxImage| {
            let mut entries = image.entries.iter().filter_map(|(name, _)| find_entry(capability, image.stem, name));
            entries.any(|found| found.image.target == image.target)
        };
        IMAGES.iter().filter(move |image| image.stem == stem && is_used(image))
    }

    /// The images that a device of this capability uses.
    fn all(capability: u32) -> impl Iterator<Item = &'static PtxImage> {
        let stems: BTreeSet<_> = IMAGES.iter().map(|image| image.stem).collect();
        stems.into_iter().flat_map(move |stem| PtxImage::of_file(capability, stem))
    }
}

fn load_module(context: &DeviceContext, image: &PtxImage) -> Result<Module, DeviceError> {
    let mut text = image.text()?;
    if context.programmatic.kernels_wait() {
        // Takes 0.2 ms for the largest file.
        text = with_grid_waits(&text);
    }
    text.push('\0');
    // The driver does not report the size of a module's code. The text is several times as long as the instructions.
    let memory = context.budget.reserve(text.len() as u64)?;
    let mut log = vec![0u8; 4096];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(log.len())];
    let mut raw = std::ptr::null_mut();
    // SAFETY: the text ends with a zero byte, as the driver requires for PTX. The options are a log buffer and its size, which
    // the driver reads as a number.
    let loaded = unsafe {
        driver_api::cuModuleLoadDataEx(&raw mut raw, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    loaded.map_err(|e| match context.driver_error("cuModuleLoadData", e) {
        DeviceError::Driver { device, call, reason } => {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let message = String::from_utf8_lossy(&log[..end]);
            let reason = format!("{reason} for {}.ptx: {}", image.name(), message.trim());
            DeviceError::Driver { device, call, reason }
        }
        e => e,
    })?;
    log::debug!("{}: loaded {}", context.primary().name, image.name());
    Ok(Module { raw, context: Arc::clone(context.primary()), _memory: memory })
}
