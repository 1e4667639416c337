//! Compilation in the background ([`CudaOptions::precompile`](super::CudaOptions)): threads of a device that load the modules
//! which its clients are likely to need, so that the first token compiles nothing.
//!
//! It begins with the first allocation, since a device that nobody uses needs no modules. First come the modules that do not
//! depend on a type of weights, in the order in which a decoder uses them. Each type of a tensor that is allocated or uploaded
//! adds its own, in front of them: matrix products take the longest to compile and are used first. A program that needs a
//! module earlier compiles it itself, or waits for the thread that does.

use super::context::DeviceContext;
use super::kernel::PtxImage;
use super::ops::{MIN_MMA_CAPABILITY, can_pack, uses_gemm};
use crate::poison::lock;
use crate::tensor::DType;
use std::collections::{HashSet, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, Mutex};
use std::thread;

/// The files of `kernels/` that do not depend on a type of weights, and those of F16, the usual type of caches, in the order in which a decoder
/// uses them first.
const UNTYPED: &[&str] = &[
    "rows",
    "norm",
    "mul_mat",
    "mul_mat_f16",
    "mul_mat_half_f16",
    "rope",
    "flash_attn",
    "flash_attn_f16",
    "flash_attn_prompt_f16_128",
    "flash_attn_prompt_f16_64",
    "mul_mat_gemm_f16",
    "binary",
    "glu",
    "unary",
    "copy",
    "softmax",
    "concat",
    "sort",
    "moe",
    "reduce",
    "ssm",
    "gated_delta_net",
    "gated_delta_net_by_key",
    "wkv7",
    "wkv6",
    "gated_linear_attn",
    "pad",
    "assign",
    "diag",
    "sequence",
    "im2col",
    "conv",
    "conv_patches",
    "pool",
    "upscale",
    "solve_tri",
    "topk_mask",
    "dsv4",
    "out_prod",
    "backward",
];

/// Types of caches that are used most. No tensor of a cache is announced.
const CACHE_TYPES: [DType; 2] = [DType::Q8_0, DType::Q4_0];

/// The files of `kernels/` for a type of a cache, which may also be that of weights.
const OF_CACHE: [&str; 6] = ["copy_to", "flash_attn", "copy_from", "mul_mat", "mul_mat_packed", "mul_mat_mma"];

/// Limit of the threads of one device. Half of the cores at most: the others prepare and upload the weights meanwhile.
const MAX_THREADS: usize = 4;

/// The modules that a device compiles in the background.
#[derive(Default)]
pub(super) struct Precompiler {
    state: Mutex<PendingModules>,
}

/// The modules that are not compiled yet, in order, and the threads that compile them.
#[derive(Default)]
struct PendingModules {
    waiting: VecDeque<&'static PtxImage>,
    /// Whether the first allocation has come.
    started: bool,
    /// The types whose modules were added.
    types: HashSet<DType>,
    /// Number of threads that compile.
    threads: usize,
    /// Whether the device was dropped, or no thread can be started.
    ended: bool,
}

/// The stem of the PTX of a file for a type.
fn stem_of(file: &str, dtype: DType) -> String {
    format!("{file}_{}", dtype.name().to_ascii_lowercase())
}

/// The file of the GEMM, if weights of the type use it.
fn gemm_file(dtype: DType, capability: u32) -> Option<&'static str> {
    uses_gemm(dtype, capability).then_some("mul_mat_gemm")
}

impl Precompiler {
    /// Begins to compile, at the first allocation of a device.
    pub(super) fn start(&self, context: &Arc<DeviceContext>) {
        if !context.options.precompile {
            return;
        }
        let mut state = lock(&self.state);
        if !std::mem::replace(&mut state.started, true) {
            let of_caches = CACHE_TYPES.iter().flat_map(|&dtype| {
                let files = OF_CACHE.into_iter().chain(gemm_file(dtype, context.gpu.capability));
                files.map(move |file| stem_of(file, dtype))
            });
            let stems = UNTYPED.iter().map(|stem| (*stem).to_owned()).chain(of_caches);
            state
                .waiting
                .extend(stems.flat_map(|stem| PtxImage::of_file(context.gpu.capability, &stem).collect::<Vec<_>>()));
            start_threads(&mut state, context);
        }
    }

    /// Adds the modules for a type of weights, once.
    pub(super) fn add_type(&self, context: &Arc<DeviceContext>, dtype: DType) {
        if !context.options.precompile {
            return;
        }
        let mut state = lock(&self.state);
        if state.types.insert(dtype) {
            let images =
                |file: &str| PtxImage::of_file(context.gpu.capability, &stem_of(file, dtype)).collect::<Vec<_>>();
            // The kernels for packed weights come first: the first product of a weight packs it. `mul_mat` multiplies weights that
            // cannot be packed.
            let wide = if context.gpu.capability < MIN_MMA_CAPABILITY { "mul_mat_packed_wide" } else { "mul_mat_mma" };
            let packs = can_pack(dtype);
            let products = if packs { [wide, "mul_mat_packed"] } else { ["mul_mat_half", "mul_mat"] };
            // The last one becomes the first. Products are used before the conversion: models have one, in the look-up of embeddings.
            let first = ["copy_from"].into_iter().chain(gemm_file(dtype, context.gpu.capability)).chain(products);
            first.flat_map(images).for_each(|image| state.waiting.push_front(image));
            // A cache of this type is rare.
            let later = packs.then_some("mul_mat").into_iter().chain(["flash_attn", "copy_to"]);
            state.waiting.extend(later.flat_map(images));
            start_threads(&mut state, context);
        }
    }

    /// Ends the threads, each after the module that it compiles: the device was dropped.
    pub(super) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.waiting.clear();
    }

    /// The next module to compile. `None` ends the calling thread.
    fn next(&self) -> Option<&'static PtxImage> {
        let mut state = lock(&self.state);
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.threads -= 1;
        }
        next
    }

    /// Number of modules that are not compiled yet.
    pub(super) fn pending(&self) -> usize {
        let state = lock(&self.state);
        state.waiting.len() + state.threads
    }
}

/// Starts as many threads as there are modules, up to the limit. Does nothing before the first allocation.
fn start_threads(state: &mut PendingModules, context: &Arc<DeviceContext>) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let limit = (cores / 2).clamp(1, MAX_THREADS);
    while state.started && !state.ended && state.threads < limit.min(state.waiting.len()) {
        let weak = Arc::downgrade(context);
        let compile = move || {
            // The context is held only while a module compiles, so that a device can be dropped meanwhile.
            while let Some(context) = weak.upgrade()
                && let Some(image) = context.precompiler.next()
            {
                if let Err(error) = context.modules.prepare(&context, image) {
                    log::debug!("{}: {} is not compiled ahead: {error}", context.primary().name, image.name());
                    // The first use of each module reports its error.
                    lock(&context.precompiler.state).waiting.clear();
                }
            }
        };
        match thread::Builder::new().name("precompile".to_owned()).spawn(compile) {
            Ok(_) => state.threads += 1,
            Err(error) => {
                log::debug!("{}: modules are compiled at their first use: {error}", context.primary().name);
                state.ended = true;
            }
        }
    }
}
