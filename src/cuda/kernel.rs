//! Kernels: the embedded PTX, and kernel launches. `modules` loads the PTX.
//!
//! Every kernel entry takes one struct by value: first its pointers, then its scalar arguments. [`KernelLaunch::new`] builds
//! this struct for a node. It compares the size of the struct with the size of the entry's parameter in the PTX, so that a
//! mismatch of the Rust and the CUDA definition is found when the node is selected, not when it runs.
#![allow(unsafe_code)]

use super::access::{Access, KernelArguments};
use super::context::DeviceContext;
use super::driver::Gpu;
use super::driver_api;
use super::events::Stream;
use super::layout::PackedSpan;
use super::modules::Function;
use crate::device::{DeviceError, Unsupported};
use crate::ops::{MAX_SRC, OpCode};
use crate::tensor::DType;
use cudarc::driver::sys;
use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Limit of the argument bytes of an entry.
const MAX_ARGUMENT_BYTES: usize = 768;

/// A PTX file embedded in this build by `build.rs`.
pub(super) struct PtxImage {
    pub(super) stem: &'static str,
    /// Lowest compute capability that runs it, times ten.
    pub(super) target: u32,
    /// The text, compressed by zlib.
    pub(super) packed: &'static [u8],
    /// Names of the entries and the sizes of their arguments in bytes.
    pub(super) entries: &'static [(&'static str, u32)],
}

/// A kernel entry, and the image that contains it.
#[derive(Clone, Copy)]
pub(super) struct KernelEntry {
    pub(super) image: &'static PtxImage,
    pub(super) name: &'static str,
    arguments: u32,
}

/// Finds an entry in the image with the highest target that a device of this capability supports.
pub(super) fn find_entry(capability: u32, stem: &str, name: &str) -> Option<KernelEntry> {
    let fitting = IMAGES.iter().filter(|image| image.stem == stem && image.target <= capability);
    let entries = fitting
        .flat_map(|image| image.entries.iter().map(move |&(name, arguments)| KernelEntry { image, name, arguments }));
    entries.filter(|entry| entry.name == name).max_by_key(|entry| entry.image.target)
}

/// Targets of the images that a device of this capability uses: for each file, the highest supported one.
pub(super) fn targets(capability: u32) -> BTreeSet<u32> {
    let mut highest: HashMap<&str, u32> = HashMap::new();
    for image in IMAGES.iter().filter(|image| image.target <= capability) {
        let known = highest.entry(image.stem).or_default();
        *known = image.target.max(*known);
    }
    highest.into_values().collect()
}

/// The referent of a kernel's pointer argument. Resolved to an address when the kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ptr {
    /// Null, for an absent operand.
    Null,
    /// First byte of the destination.
    Dst,
    /// A byte offset in the destination.
    DstAt(u64),
    /// First byte of a source; null if the node has no such source.
    Src(u8),
    /// A byte offset in the scratch memory of the queue.
    Scratch(u64),
    /// The converted columns that the launch reads, or whose only purpose it is to write them: see [`ColumnConversion`].
    Columns,
    /// The launch's result as quantised columns: see [`NodeLaunches::quantizing`].
    ResultColumns,
    /// [`COUNTER_BYTES`] bytes of zeros in front of the scratch memory, by which the blocks of a launch count. The launch leaves zeros.
    Counters,
    /// The queue's error word. A kernel that meets an index outside its table stores 1 + the op's number in it.
    ErrorWord,
}

/// Bytes of dynamic shared memory that every launch may have; for more, a function has to opt in, and not all GPUs have them.
pub(super) const DEFAULT_SHARED: u32 = 48 << 10;

/// Bytes at [`Ptr::Counters`].
pub(super) const COUNTER_BYTES: u64 = 16 << 10;

/// Grid and block dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Blocks in x, y and z: at most 2³¹ - 1 in x and 65535 in y and z.
    pub(super) blocks: [u64; 3],
    /// Threads of a block in x, y and z: at most 1024 in total.
    pub(super) threads: [u32; 3],
    /// Bytes of dynamic shared memory per block. Beyond [`DEFAULT_SHARED`], all launches of an entry need the same number.
    pub(super) shared: u32,
}

impl Grid {
    /// A one-dimensional grid of `blocks` blocks with `threads` threads each.
    pub(super) fn line(blocks: u64, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }

    /// A three-dimensional grid of one-dimensional blocks.
    pub(super) fn of(blocks: [u64; 3], threads: u32) -> Grid {
        Grid { blocks, threads: [threads, 1, 1], shared: 0 }
    }

    pub(super) fn with_shared(mut self, bytes: u32) -> Grid {
        self.shared = bytes;
        self
    }
}

/// A kernel launch: the entry, the grid and the arguments. The pointers are symbolic until the launch.
#[derive(Clone)]
pub(super) struct KernelLaunch {
    entry: KernelEntry,
    blocks: [u32; 3],
    threads: [u32; 3],
    shared: u32,
    pub(super) pointers: Box<[Ptr]>,
    /// The preconditions, until `access::check` has compared them with the operands.
    pub(super) accesses: Vec<Access>,
    /// Bytes of the scalar arguments, which follow the pointers.
    scalars: Box<[u8]>,
}

impl KernelLaunch {
    /// A launch of the entry `name` of `kernels/<stem>.cu` with these pointers, and the scalar arguments that follow them in
    /// its struct.
    ///
    /// # Errors
    /// [`Unsupported`] if this build has no such kernel for the device, or the grid exceeds the limits of a launch.
    pub(super) fn new(
        op: OpCode,
        gpu: &Gpu,
        (stem, name): (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        arguments: &impl KernelArguments,
    ) -> Result<KernelLaunch, Unsupported> {
        let no = |reason: String| Unsupported { op, reason };
        let entry = find_entry(gpu.capability, stem, name)
            .ok_or_else(|| no(format!("no kernel {stem}/{name} for capability {}", gpu.capability)))?;
        let scalars = bytemuck::bytes_of(arguments);
        let bytes = 8 * pointers.len() + scalars.len();
        if bytes != entry.arguments as usize || bytes > MAX_ARGUMENT_BYTES {
            let reason = format!("bug: {stem}/{name} takes {} bytes of arguments, not {bytes}", entry.arguments);
            log::error!("{reason}");
            return Err(no(reason));
        }
        let [x, y, z] = grid.blocks;
        if x > i32::MAX as u64 || y > 65535 || z > 65535 {
            return Err(no(format!("a grid of {x} x {y} x {z} blocks")));
        }
        if grid.shared > DEFAULT_SHARED.max(gpu.shared_per_block) {
            return Err(no(format!("{} bytes of shared memory per block", grid.shared)));
        }
        let accesses = arguments.accesses(&grid).map_err(|rule| no(format!("{name} would access {rule}")))?;
        Ok(KernelLaunch {
            entry,
            accesses,
            blocks: grid.blocks.map(|n| n as u32),
            threads: grid.threads,
            shared: grid.shared,
            pointers: pointers.into(),
            scalars: scalars.into(),
        })
    }

    /// Adds accesses that depend on the entry, not on the arguments.
    pub(super) fn with_accesses(mut self, more: impl IntoIterator<Item = Access>) -> KernelLaunch {
        self.accesses.extend(more);
        self
    }

    /// Sets the type of the elements behind a pointer.
    pub(super) fn with_type(mut self, pointer: usize, dtype: DType) -> KernelLaunch {
        let of = std::mem::take(&mut self.accesses).into_iter();
        self.accesses = of.map(|access| access.with_type_behind(pointer, dtype)).collect();
        self
    }

    /// Whether the grid has no blocks.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }

    /// Whether both launch the same kernel with the same arguments, apart from addresses.
    pub(super) fn is_same(&self, other: &KernelLaunch) -> bool {
        let shape = |of: &KernelLaunch| (of.entry.image.target, of.entry.name, of.blocks, of.threads, of.shared);
        shape(self) == shape(other) && self.pointers == other.pointers && self.scalars == other.scalars
    }

    /// Number of blocks of the grid.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.iter().fold(1, |all, &n| all.saturating_mul(u64::from(n)))
    }

    /// The kernel's entry.
    pub(super) fn entry(&self) -> KernelEntry {
        self.entry
    }

    /// Loads the kernel into the device's context.
    pub(super) fn load(self, context: &DeviceContext) -> Result<LoadedLaunch, DeviceError> {
        let function = context.modules.load_function(context, self.entry, self.shared)?;
        Ok(LoadedLaunch { function, launch: self })
    }
}

/// The launches of a node, in order, and the scratch memory that they share.
#[derive(Default)]
pub(super) struct NodeLaunches {
    pub(super) launches: Vec<KernelLaunch>,
    /// Bytes of scratch memory, addressed by [`Ptr::Scratch`].
    pub(super) scratch: u64,
    /// What the launches need of source 1, at [`Ptr::Columns`].
    pub(super) columns: Option<ColumnConversion>,
    /// Replacements of the last launch, or that for packed weights, that also write the result as quantised columns.
    pub(super) quantizing: Vec<QuantizingLaunch>,
    /// What is launched instead while weights are packed.
    pub(super) packed: Option<PackedLaunches>,
    /// The loops of its threads, if these are long for the bytes that the node reads and writes.
    pub(super) loops: Loops,
    /// Whether blocks read source 1 while others already store the result. If that overlaps the source, fused nodes run one by one.
    pub(super) forbids_dst_on_source1: bool,
}

/// Loops of a kernel's threads, for the estimate of its time.
#[derive(Clone, Copy, Default)]
pub(super) struct Loops {
    /// Instructions of all threads together.
    pub(super) instructions: u64,
    /// Passes of one thread, each of which waits for the one before.
    pub(super) chain: u64,
}

/// A launch that also writes its contiguous result as quantised columns, to [`Ptr::ResultColumns`].
pub(super) struct QuantizingLaunch {
    pub(super) launch: KernelLaunch,
    /// Elements per column.
    pub(super) k: usize,
    /// Elements per scale.
    pub(super) group: usize,
}

/// A launch that converts source 1 of a product to [`Ptr::Columns`]. Products of the same columns share it.
pub(super) struct ColumnConversion {
    pub(super) launch: KernelLaunch,
    /// What gathers the columns.
    pub(super) table: Option<ColumnTable>,
    /// Bytes of the result.
    pub(super) bytes: u64,
    /// Bytes of a converted column; 0 if columns are interleaved in tiles.
    pub(super) column: u64,
    /// Elements per scale of quantised columns.
    pub(super) group: Option<usize>,
}

/// A launch before a [`ColumnConversion`] that writes a table behind the columns, by which they are gathered.
pub(super) struct ColumnTable {
    pub(super) launch: KernelLaunch,
    /// The number of the source from which the table is made.
    pub(super) source: usize,
}

/// The launches of a node whose weights are packed (see `layout`), in the scratch memory of [`NodeLaunches::scratch`]. If the launches run
/// several nodes, the nodes run one by one while not all weights are packed.
pub(super) struct PackedLaunches {
    pub(super) launches: Vec<KernelLaunch>,
    /// As of [`NodeLaunches`].
    pub(super) columns: Option<ColumnConversion>,
    /// The packed sources, each with its span from its byte 0 on.
    pub(super) weights: Vec<(usize, PackedSpan)>,
    /// Whether the node is a reason to pack: a product. Others read what is packed.
    pub(super) packs: bool,
}

impl NodeLaunches {
    pub(super) fn one(launch: KernelLaunch) -> NodeLaunches {
        NodeLaunches::new(vec![launch], 0)
    }

    /// Launches with `scratch` bytes of scratch memory.
    pub(super) fn new(launches: Vec<KernelLaunch>, scratch: u64) -> NodeLaunches {
        NodeLaunches { launches, scratch, ..NodeLaunches::default() }
    }
}

/// A launch whose kernel is loaded.
pub(super) struct LoadedLaunch {
    function: Function,
    pub(super) launch: KernelLaunch,
}

/// Addresses for the symbolic pointers of a launch in one run.
#[derive(Default)]
pub(super) struct LaunchAddresses {
    pub(super) dst: u64,
    pub(super) srcs: [u64; MAX_SRC],
    pub(super) scratch: u64,
    pub(super) columns: u64,
    pub(super) result_columns: u64,
    pub(super) error_word: u64,
}

/// The argument struct of a launch, as the driver reads it.
#[repr(C, align(16))]
pub(super) struct ArgumentBuffer([u8; MAX_ARGUMENT_BYTES]);

impl LoadedLaunch {
    /// Name of the entry.
    pub(super) fn name(&self) -> &'static str {
        self.launch.entry.name
    }

    /// Blocks, threads of a block, and bytes of dynamic shared memory.
    pub(super) fn shape(&self) -> ([u32; 3], [u32; 3], u32) {
        (self.launch.blocks, self.launch.threads, self.launch.shared)
    }

    /// The kernel, alive as long as this value.
    pub(super) fn function(&self) -> sys::CUfunction {
        self.function.raw()
    }

    /// The argument struct for a launch at these addresses.
    pub(super) fn arguments(&self, at: &LaunchAddresses) -> ArgumentBuffer {
        let KernelLaunch { pointers, scalars, .. } = &self.launch;
        let mut arguments = ArgumentBuffer([0; MAX_ARGUMENT_BYTES]);
        let (head, tail) = arguments.0.split_at_mut(8 * pointers.len());
        for (to, pointer) in head.as_chunks_mut::<8>().0.iter_mut().zip(pointers) {
            let address = match *pointer {
                Ptr::Null => 0,
                Ptr::Dst => at.dst,
                Ptr::DstAt(offset) => at.dst + offset,
                Ptr::Src(i) => at.srcs.get(usize::from(i)).copied().unwrap_or(0),
                Ptr::Scratch(offset) => at.scratch + offset,
                Ptr::Columns => at.columns,
                Ptr::ResultColumns => at.result_columns,
                Ptr::Counters => at.scratch.saturating_sub(COUNTER_BYTES),
                Ptr::ErrorWord => at.error_word,
            };
            *to = address.to_le_bytes();
        }
        tail[..scalars.len()].copy_from_slice(scalars);
        arguments
    }

    /// Launches the kernel on a stream.
    pub(super) fn launch(
        &self,
        context: &DeviceContext,
        stream: &Stream,
        at: &LaunchAddresses,
    ) -> Result<(), DeviceError> {
        let ([x, y, z], [tx, ty, tz], shared) = self.shape();
        let mut arguments = self.arguments(at);
        let mut list = [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the function is alive, because `function` keeps its module loaded. It takes one struct, whose size
        // `KernelLaunch::new` has compared; the driver copies the struct before it returns. The kernel stays within the memory
        // behind the pointers: graph validation (extents, overlaps) and the op family's choice of the grid establish this, and
        // the emulator checks it in tests. The queue retains that memory until the work is done.
        unsafe {
            driver_api::cuLaunchKernel(
                self.function.raw(),
                x,
                y,
                z,
                tx,
                ty,
                tz,
                shared,
                stream.raw(),
                list.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|e| match context.driver_error("cuLaunchKernel", e) {
            DeviceError::Driver { device, call, reason } => {
                DeviceError::Driver { device, call, reason: format!("{reason} for {}", self.name()) }
            }
            e => e,
        })
    }
}
