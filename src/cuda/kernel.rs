//! Kernels: the embedded PTX, the modules made of it, and the one place that launches.
//!
//! Every entry takes one struct by value: first its pointers, then its numbers. [`Launch::new`] is where a node becomes such
//! a struct; it compares the struct's size with the entry's in the PTX, so that the two sides cannot drift apart unseen.
#![allow(unsafe_code)]

use super::core::{Core, lock};
use super::driver::Gpu;
use super::events::Stream;
use crate::device::{DeviceError, Unsupported};
use crate::ops::{MAX_SRC, NodeView};
use bytemuck::NoUninit;
use cudarc::driver::{CudaContext, result, sys};
use flate2::read::ZlibDecoder;
use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, c_void};
use std::io::Read;
use std::sync::{Arc, Mutex};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Most bytes of an entry's arguments.
const MOST_ARGUMENTS: usize = 768;

/// A PTX file of this build.
pub(super) struct Image {
    stem: &'static str,
    /// The least compute capability it runs on.
    target: u32,
    packed: &'static [u8],
    /// Names of its entries, and the bytes of their arguments.
    entries: &'static [(&'static str, u32)],
}

/// A kernel for a device: an entry of the image with the highest target that the device has.
#[derive(Clone, Copy)]
struct Entry {
    image: &'static Image,
    name: &'static str,
    arguments: u32,
}

fn find(capability: u32, stem: &str, name: &str) -> Option<Entry> {
    let fitting = IMAGES.iter().filter(|image| image.stem == stem && image.target <= capability);
    let entries =
        fitting.flat_map(|image| image.entries.iter().map(move |&(name, arguments)| Entry { image, name, arguments }));
    entries.filter(|entry| entry.name == name).max_by_key(|entry| entry.image.target)
}

/// The targets of the images that a device of this capability runs: of each file the highest.
pub(super) fn targets(capability: u32) -> BTreeSet<u32> {
    let mut highest: HashMap<&str, u32> = HashMap::new();
    for image in IMAGES.iter().filter(|image| image.target <= capability) {
        let known = highest.entry(image.stem).or_default();
        *known = image.target.max(*known);
    }
    highest.into_values().collect()
}

/// What one of a kernel's pointers points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ptr {
    /// Nothing: an absent source.
    Null,
    /// The destination's first byte.
    Dst,
    /// A source's first byte; null where there is no such source.
    Src(u8),
    /// Byte `n` of the queue's scratch memory.
    Scratch(u64),
    /// The word in which a kernel says that an index is outside its table: it stores 1 and the op's number there.
    Verdict,
}

/// How many blocks of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Blocks in x, y and z: at most 2³¹ - 1 in x and 65535 in the others.
    pub(super) blocks: [u64; 3],
    /// Threads of a block in x, y and z: at most 1024 together.
    pub(super) threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block; at most 48 KiB.
    pub(super) shared: u32,
}

impl Grid {
    /// `blocks` blocks of `threads` threads in a row.
    pub(super) fn line(blocks: u64, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }

    /// Blocks in three dimensions.
    pub(super) fn of(blocks: [u64; 3], threads: u32) -> Grid {
        Grid { blocks, threads: [threads, 1, 1], shared: 0 }
    }

    pub(super) fn with_shared(mut self, bytes: u32) -> Grid {
        self.shared = bytes;
        self
    }
}

/// A kernel with its grid and arguments, whose pointers are not known yet.
pub(super) struct Launch {
    entry: Entry,
    blocks: [u32; 3],
    threads: [u32; 3],
    shared: u32,
    pub(super) pointers: Box<[Ptr]>,
    /// What follows the pointers.
    numbers: Box<[u8]>,
}

impl Launch {
    /// The entry `name` of the file kernels/`stem`, with its pointers and the numbers that follow them in its struct.
    ///
    /// # Errors
    /// [`Unsupported`] when this build has no such kernel for the device, or the grid is beyond what a launch can have.
    pub(super) fn new(
        node: &NodeView<'_>,
        gpu: &Gpu,
        (stem, name): (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        numbers: &impl NoUninit,
    ) -> Result<Launch, Unsupported> {
        let no = |reason: String| Unsupported { op: node.op.code(), reason };
        let entry = find(gpu.capability, stem, name)
            .ok_or_else(|| no(format!("no kernel {stem}/{name} for capability {}", gpu.capability)))?;
        let numbers = bytemuck::bytes_of(numbers);
        let bytes = 8 * pointers.len() + numbers.len();
        if bytes != entry.arguments as usize || bytes > MOST_ARGUMENTS {
            let reason = format!("bug: {stem}/{name} takes {} bytes of arguments, not {bytes}", entry.arguments);
            log::error!("{reason}");
            return Err(no(reason));
        }
        let [x, y, z] = grid.blocks;
        if x > i32::MAX as u64 || y > 65535 || z > 65535 {
            return Err(no(format!("a grid of {x} x {y} x {z} blocks")));
        }
        Ok(Launch {
            entry,
            blocks: grid.blocks.map(|n| n as u32),
            threads: grid.threads,
            shared: grid.shared,
            pointers: pointers.into(),
            numbers: numbers.into(),
        })
    }

    /// Whether there is anything to do.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }

    /// Loads what it launches.
    pub(super) fn load(self, core: &Core) -> Result<Ready, DeviceError> {
        let function = core.modules.function(core, self.entry)?;
        Ok(Ready { function, launch: self })
    }
}

/// What a node becomes: launches in order, and the scratch memory they share.
#[derive(Default)]
pub(super) struct Kernel {
    pub(super) launches: Vec<Launch>,
    /// Bytes of scratch memory from [`Ptr::Scratch`] 0 on.
    pub(super) scratch: u64,
}

impl Kernel {
    pub(super) fn one(launch: Launch) -> Kernel {
        Kernel { launches: vec![launch], scratch: 0 }
    }
}

/// A launch whose kernel is loaded.
pub(super) struct Ready {
    function: Function,
    pub(super) launch: Launch,
}

/// Where the pointers of a launch point in one run.
pub(super) struct Addresses<'a> {
    pub(super) dst: u64,
    pub(super) srcs: &'a [u64; MAX_SRC],
    pub(super) scratch: u64,
    pub(super) verdict: u64,
}

/// An entry's arguments as the driver reads them.
#[repr(C, align(16))]
struct Arguments([u8; MOST_ARGUMENTS]);

impl Ready {
    /// The entry's name.
    pub(super) fn name(&self) -> &'static str {
        self.launch.entry.name
    }

    /// Launches on a stream (or into a capture of it).
    pub(super) fn launch(&self, core: &Core, stream: &Stream, at: &Addresses<'_>) -> Result<(), DeviceError> {
        let Launch { blocks, threads, shared, pointers, numbers, .. } = &self.launch;
        let mut arguments = Arguments([0; MOST_ARGUMENTS]);
        let (head, tail) = arguments.0.split_at_mut(8 * pointers.len());
        for (to, pointer) in head.as_chunks_mut::<8>().0.iter_mut().zip(pointers) {
            let address = match *pointer {
                Ptr::Null => 0,
                Ptr::Dst => at.dst,
                Ptr::Src(i) => at.srcs.get(usize::from(i)).copied().unwrap_or(0),
                Ptr::Scratch(offset) => at.scratch + offset,
                Ptr::Verdict => at.verdict,
            };
            *to = address.to_le_bytes();
        }
        tail[..numbers.len()].copy_from_slice(numbers);
        let mut list = [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the function is alive (its module is owned by `function`), and takes one struct whose size `Launch::new` has
        // compared; the driver copies it before it returns. That the kernel stays within the memory behind the pointers is what
        // graph validation (extents, overlaps), the families' choice of grid, and the checker of the emulated GPU establish; the
        // queue keeps that memory until the work is done.
        unsafe {
            result::launch_kernel(
                self.function.raw,
                (blocks[0], blocks[1], blocks[2]),
                (threads[0], threads[1], threads[2]),
                *shared,
                stream.raw(),
                &mut list,
            )
        }
        .map_err(|e| match core.failed("cuLaunchKernel", e) {
            DeviceError::Driver { device, call, reason } => {
                DeviceError::Driver { device, call, reason: format!("{reason} for {}", self.name()) }
            }
            e => e,
        })
    }
}

/// A loaded kernel; its module lives as long.
#[derive(Clone)]
struct Function {
    raw: sys::CUfunction,
    _module: Arc<Module>,
}

// SAFETY: a function's handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Module {
    raw: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a module's handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: unloaded once, when no function of it is left.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

/// The modules of a device that were needed so far. Drivers compile PTX when it is loaded.
#[derive(Default)]
pub(super) struct Modules {
    loaded: Mutex<HashMap<(&'static str, u32), Arc<Module>>>,
}

impl Modules {
    fn function(&self, core: &Core, entry: Entry) -> Result<Function, DeviceError> {
        core.bind()?;
        let mut loaded = lock(&self.loaded);
        let key = (entry.image.stem, entry.image.target);
        let module = match loaded.get(&key) {
            Some(module) => Arc::clone(module),
            None => {
                let module = Arc::new(load(core, entry.image)?);
                loaded.insert(key, Arc::clone(&module));
                module
            }
        };
        drop(loaded);
        let name = CString::new(entry.name).map_err(|e| DeviceError::Bug(e.to_string()))?;
        // SAFETY: the module is alive.
        let raw = unsafe { result::module::get_function(module.raw, name) };
        Ok(Function { raw: raw.map_err(|e| core.failed("cuModuleGetFunction", e))?, _module: module })
    }
}

fn load(core: &Core, image: &Image) -> Result<Module, DeviceError> {
    let mut text = Vec::new();
    let unpacked = ZlibDecoder::new(image.packed).read_to_end(&mut text);
    unpacked.map_err(|e| DeviceError::Bug(format!("the PTX of {} cannot be unpacked: {e}", image.stem)))?;
    text.push(0);
    let mut log = vec![0u8; 4096];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(log.len())];
    let mut raw = std::ptr::null_mut();
    // SAFETY: the text ends with a zero byte, as the driver expects of PTX. The options are a buffer for its messages and that
    // buffer's size, which the driver reads as a number.
    let loaded = unsafe {
        sys::cuModuleLoadDataEx(&raw mut raw, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    loaded.result().map_err(|e| match core.failed("cuModuleLoadData", e) {
        DeviceError::Driver { device, call, reason } => {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let said = String::from_utf8_lossy(&log[..end]);
            let reason = format!("{reason} for {}.sm_{}.ptx: {}", image.stem, image.target, said.trim());
            DeviceError::Driver { device, call, reason }
        }
        e => e,
    })?;
    log::debug!("{}: loaded {}.sm_{}", core.name, image.stem, image.target);
    Ok(Module { raw, context: Arc::clone(core.context()) })
}
