//! Launches of FLASH_ATTN_EXT, with split-K over the KV positions for decoding (as in flash-decoding). On tensor cores,
//! kernels/flash_attn_latent.cu is for V that is a view of K, kernels/flash_attn_prompt.cu for many queries, kernels/flash_attn_mma.cu and
//! kernels/flash_attn_blocks.cu (block types) for few; kernels/flash_attn.cu is for GPUs without tensor cores and for other types and sizes.

mod blocks;
mod latent;
mod prompt;

use super::mul_mat::{QUANTIZED_GROUPS, quantized_column_bytes};
use super::{
    Access, Grid, KernelArguments, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product,
    suffix,
};
use crate::cuda::kernel::{COUNTER_BYTES, QuantizingLaunch};
use crate::ops::flash_attn::FlashAttn;
use crate::ops::softmax::Alibi;
use crate::tensor::{Capability, DType, TensorDesc};
use blocks::BlockTypes;
use bytemuck::{Pod, Zeroable};
use latent::Latent;
use prompt::{Prompt, Rows};

/// Limit of octets (groups of 8 channels) of v per block. With the smallest tile, four queries, each thread then has one octet.
const MAX_OCTETS: u32 = 128;

/// Minimum number of positions per part. Merging shorter parts costs more than the parallelism gains.
const MIN_PART: u32 = 128;
/// Limit of parts, as in flash_attn_merge.
const MAX_PARTS: u64 = 256;

/// Positions per inner step of the kernel without tensor cores, as in the file.
const POSITIONS: u32 = 64;

/// Kernels for tensor cores: positions and queries per warp, octets of v per block, and warps per block at most, as in the file.
const MMA_TILE: u32 = 16;
const MMA_QUERIES: u32 = 8;
const MMA_OCTETS: u32 = 16;
const MMA_WARPS: u32 = 4;
/// Kernels for tensor cores: bytes of shared memory for each channel of k and tile of queries, and for the sums of a warp; the limit of
/// the former for which a block takes more than one tile.
const MMA_QUERY_BYTES: u32 = 32;
const MMA_SUM_BYTES: u32 = 4096;
const MAX_MMA_QUERY_BYTES: u32 = 16 << 10;
/// Kernels for tensor cores: rows of k and v are multiples of so many channels, those of k up to a limit, which shared memory sets.
const MMA_CHANNELS: usize = 64;
const MAX_MMA_KEY_CHANNELS: usize = 960;
/// Kernels for tensor cores: fewest positions per part.
const MMA_MIN_PART: u32 = 32;

/// `struct FlashAttnArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FlashAttnArgs {
    qb: [u64; 3],
    kb: [u64; 3],
    vb: [u64; 3],
    mb: [u64; 3],
    dk: u32,
    dv: u32,
    tokens: u32,
    heads: u32,
    batches: u32,
    positions: u32,
    per_k: u32,
    per_v: u32,
    group: u32,
    mask_heads: u32,
    mask_batches: u32,
    log_quads: u32,
    tiles: u32,
    spans: u32,
    octets: u32,
    part: u32,
    /// Of k and v; F16 if they are converted.
    types: [u32; 2],
    slope_steps: u32,
    slope_bases: [f32; 2],
    scale: f32,
    cap: f32,
    /// Of the tiles of k and v in shared memory: flash_attn_blocks.cu.
    stages: u32,
}

impl KernelArguments for FlashAttnArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let &FlashAttnArgs { qb, kb, vb, mb, dk, dv, tokens, heads, batches, positions, .. } = self;
        let along = |access: Access, counts: [u32; 3], nb: [u64; 3]| {
            counts.into_iter().zip(nb).fold(access, |access, (count, stride)| access.along(count, stride))
        };
        let heads_of = |per: u32| heads.checked_div(per).ok_or("heads without queries");
        let rows = saturating_product(&[tokens, heads, batches]);
        let parts = rows.saturating_mul(grid.blocks[1]);
        Ok(vec![
            along(Access::run(0, &[dk]), [tokens, heads, batches], qb),
            along(Access::run(1, &[dk]).of_type(self.types[0]), [positions, heads_of(self.per_k)?, batches], kb),
            along(Access::run(2, &[dv]).of_type(self.types[1]), [positions, heads_of(self.per_v)?, batches], vb),
            along(Access::run(3, &[positions]), [tokens, self.mask_heads, self.mask_batches], mb),
            Access::run(4, &[heads]),
            Access::elements(5, rows.saturating_mul(dv.into())),
            Access::bytes(6, parts.saturating_mul(4 * u64::from(dv.next_multiple_of(8)))),
            Access::bytes(7, parts.saturating_mul(8)),
        ])
    }
}

/// `struct FlashAttnMergeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FlashAttnMergeArgs {
    dv: u32,
    pitch: u32,
    heads: u32,
    parts: u32,
    stride: u64,
    group: u32,
    padding: u32,
}

impl KernelArguments for FlashAttnMergeArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let rows = grid.blocks[0];
        let parts = rows.saturating_mul(self.parts.into());
        Ok(vec![
            Access::bytes(0, parts.saturating_mul(4 * u64::from(self.pitch))),
            Access::bytes(1, parts.saturating_mul(8)),
            Access::run(2, &[self.heads]),
            Access::elements(3, rows.saturating_mul(self.dv.into())),
            Access::bytes(4, self.stride.saturating_mul(rows / u64::from(self.heads.max(1)))),
        ])
    }
}

pub(super) fn select(op: FlashAttn, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (q, k, v) = (on.src(0)?, on.src(1)?, on.src(2)?);
    let mask = on.node.srcs.get(3);
    if k.is_empty() {
        return Err(on.unsupported("no positions"));
    }
    let convert = [k, v].iter().all(|t| t.dtype().can(Capability::Cuda));
    let floats = q.dtype() == DType::F32 && on.dst().dtype() == DType::F32;
    if !convert || !floats || mask.is_some_and(|mask| mask.dtype() != DType::F16) {
        return Err(on.unsupported_types());
    }
    if on.node.srcs.get(4).is_some_and(|sinks| !sinks.is_contiguous()) {
        return Err(on.unsupported("sinks that are not contiguous"));
    }
    let (qs, ks, vs) = (on.shape(q)?, on.shape(k)?, on.shape(v)?);
    let ([dk, tokens, heads, batches], positions, dv) = (qs.ne, ks.ne[1], vs.ne[0]);
    let (per_k, per_v) = (heads / ks.ne[2].max(1), heads / vs.ne[2].max(1));
    let group = common_divisor(per_k, per_v).max(1);
    let queries = tokens.checked_mul(group).filter(|&n| n <= i32::MAX as u32);
    let queries = queries.ok_or_else(|| on.unsupported("2^31 or more queries of a head"))?;

    // Blocks of a tile of queries and a span of channels.
    let groups = u64::from(heads / group) * u64::from(batches);
    let prompt = Prompt::of(&op, [k, v], mask, [tokens, queries], on.gpu.capability);
    let latent = Latent::of(&op, [k, v], queries, on);
    let kernel = latent.map(Kernel::Latent).or_else(|| prompt.map(Kernel::Prompt));
    let kernel = kernel.unwrap_or_else(|| Kernel::of(k, v, on));
    let Blocks { log_quads, octets, threads, shared, step, min_part, at_once } = match kernel {
        Kernel::Latent(latent) => latent.blocks(),
        Kernel::Prompt(prompt) => prompt.blocks(),
        Kernel::Mma => Blocks::mma(queries, dk, dv, positions, groups, on.gpu.multiprocessors),
        Kernel::BlockTypes(types) => types.blocks(queries, [positions, dv], groups, on.gpu),
        Kernel::OfType | Kernel::AnyType => Blocks::without_mma(queries, dv),
    };
    let all_octets = dv.div_ceil(8);
    let spans = all_octets.div_ceil(octets);
    let tiles = queries.div_ceil(4 << log_quads);
    let columns = u64::from(tiles) * u64::from(spans) * groups;
    let room = at_once * u64::from(on.gpu.multiprocessors);
    let (parts, part) = split_positions(columns, room, positions, min_part, step);

    let pitch = all_octets * 8;
    let rows = u64::from(batches) * u64::from(tokens) * u64::from(heads);
    let (sums, stats) = if parts == 1 { (0, 0) } else { (rows * parts * u64::from(pitch) * 4, rows * parts * 8) };
    let at = if parts == 1 { [Ptr::Null; 2] } else { [Ptr::Scratch(0), Ptr::Scratch(sums)] };
    let mut scratch = sums + stats;
    let k_rows = Rows::of(k, 1, prompt, on, &mut scratch)?;
    let v_rows = Rows::of(v, 2, prompt, on, &mut scratch)?;

    let strides = |t: &TensorDesc| [1, 2, 3].map(|i| t.nb()[i] as u64);
    let (mask_heads, mask_batches) = mask.map_or((1, 1), |mask| (mask.ne()[2] as u32, mask.ne()[3] as u32));
    let alibi = Alibi::new(op.max_bias, heads as usize);
    let args = FlashAttnArgs {
        qb: strides(q),
        kb: k_rows.nb,
        vb: v_rows.nb,
        mb: mask.map_or([0; 3], strides),
        dk,
        dv,
        tokens,
        heads,
        batches,
        positions,
        per_k,
        per_v,
        group,
        mask_heads,
        mask_batches,
        log_quads,
        tiles,
        spans,
        octets,
        part,
        types: [&k_rows, &v_rows].map(|rows| rows.dtype.to_wire()),
        slope_steps: alibi.map_or(0, |alibi| alibi.n_head_log2 as u32),
        slope_bases: alibi.map_or([1.0; 2], |alibi| alibi.bases),
        // With a softcap, the kernel computes cap * tanh(score * scale / cap).
        scale: if op.softcap == 0.0 { op.scale } else { op.scale / op.softcap },
        cap: op.softcap,
        stages: if let Kernel::BlockTypes(types) = kernel { types.stages } else { 0 },
    };
    let pointers = [Ptr::Src(0), k_rows.at, v_rows.at, Ptr::Src(3), Ptr::Src(4), Ptr::Dst, at[0], at[1]];
    let grid = Grid::of([columns, parts, 1], threads).with_shared(shared);
    let name = suffix(k.dtype());
    let (stem, name) = match kernel {
        Kernel::Latent(latent) => (latent.entry(), latent.entry()),
        Kernel::Prompt(prompt) => (prompt.entry(), prompt.entry()),
        Kernel::Mma | Kernel::BlockTypes(_) => (format!("flash_attn_{name}"), format!("flash_attn_mma_{name}")),
        Kernel::OfType => (format!("flash_attn_{name}"), format!("flash_attn_{name}")),
        Kernel::AnyType => ("flash_attn".to_owned(), "flash_attn_any".to_owned()),
    };
    let mut kernel = on.single_launch((&stem, &name), grid, &pointers, &args)?;
    if parts > 1 {
        // One warp per two parts, eight warps at most.
        let threads = 32 * (parts as u32).div_ceil(2).min(8);
        let grid = Grid::of([rows, u64::from(dv.div_ceil(128)), 1], threads);
        let merge = |quantized: [Ptr; 2], stride, group: usize| {
            let args =
                FlashAttnMergeArgs { dv, pitch, heads, parts: parts as u32, stride, group: group as u32, padding: 0 };
            let pointers = [at[0], at[1], Ptr::Src(4), Ptr::Dst, quantized[0], quantized[1]];
            on.launch(("flash_attn", "flash_attn_merge"), grid, &pointers, &args)
        };
        kernel.launches.push(merge([Ptr::Null; 2], 0, 0)?);
        // The heads of a token are a column of a product.
        let k = dv as usize * heads as usize;
        for group in QUANTIZED_GROUPS.into_iter().filter(|&group| can_quantize(k, dv, rows, group)) {
            let launch = merge([Ptr::ResultColumns, Ptr::Counters], quantized_column_bytes(k, group), group)?;
            kernel.quantizing.push(QuantizingLaunch { launch, k, group });
        }
    }
    kernel.launches.splice(0..0, [k_rows.conversion, v_rows.conversion].into_iter().flatten());
    kernel.scratch = scratch;
    Ok(kernel)
}

/// Whether flash_attn_merge can quantise `rows` rows of `dv` channels as columns of `k` elements. The two blocks that share a group of 256
/// elements count by a counter.
fn can_quantize(k: usize, dv: u32, rows: u64, group: usize) -> bool {
    let counters = (rows * u64::from(dv)).div_ceil(256);
    dv.is_multiple_of(128) && k.is_multiple_of(group) && (group == 32 || counters <= COUNTER_BYTES / 4)
}

/// The kernels that compute attention.
#[derive(Clone, Copy, PartialEq)]
enum Kernel {
    /// `flash_attn_latent_<type>_<channels>_<queries>`, on tensor cores, where v is a view of k.
    Latent(Latent),
    /// `flash_attn_prompt_<type>_<channels>`, on tensor cores, for many queries.
    Prompt(Prompt),
    /// `flash_attn_mma_<type>`, on tensor cores.
    Mma,
    /// The same for block types.
    BlockTypes(BlockTypes),
    /// `flash_attn_<type>`.
    OfType,
    /// `flash_attn_any`.
    AnyType,
}

impl Kernel {
    fn of(k: &TensorDesc, v: &TensorDesc, on: &NodeOnGpu<'_>) -> Kernel {
        let (dtype, [dk, ..], [dv, ..]) = (k.dtype(), k.ne(), v.ne());
        if dtype != v.dtype() || !dtype.can(Capability::Cache) {
            return Kernel::AnyType;
        }
        let are_whole = [dk, dv].iter().all(|n| n.is_multiple_of(MMA_CHANNELS)) && dk <= MAX_MMA_KEY_CHANNELS;
        // The kernels take the strides of positions as 32 bits.
        let are_near = [k, v].iter().all(|t| u32::try_from(t.nb()[1]).is_ok());
        if !are_whole || !are_near || on.gpu.capability < MIN_MMA_CAPABILITY {
            return Kernel::OfType;
        }
        match dtype {
            DType::F16 | DType::BF16 => Kernel::Mma,
            DType::Q8_0 | DType::Q4_0 => BlockTypes::of(k, v).map_or(Kernel::OfType, Kernel::BlockTypes),
            _ => Kernel::OfType,
        }
    }
}

/// The shape of a kernel's blocks.
struct Blocks {
    /// Queries per block: 4 << `log_quads`.
    log_quads: u32,
    /// Octets of v per block.
    octets: u32,
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared: u32,
    /// Positions per inner step; parts are multiples of it.
    step: u32,
    /// Fewest positions of a part.
    min_part: u32,
    /// Blocks that a multiprocessor executes at once. Positions are split while the grid has fewer.
    at_once: u64,
}

impl Blocks {
    fn without_mma(queries: u32, dv: u32) -> Blocks {
        let all_octets = dv.div_ceil(8);
        let octets = all_octets.div_ceil(all_octets.div_ceil(MAX_OCTETS));
        // The largest tile whose accumulators fit a block's registers, but not larger than the number of queries.
        let log_quads = (0..3).find(|&n| 4 << n >= queries || octets << (n + 1) > MAX_OCTETS).unwrap_or(3);
        Blocks { log_quads, octets, threads: 128, shared: 0, step: POSITIONS, min_part: MIN_PART, at_once: 4 }
    }

    /// `groups`: blocks of the grid for a tile of queries and a span of channels, without a split.
    fn mma(queries: u32, dk: u32, dv: u32, positions: u32, groups: u64, multiprocessors: u32) -> Blocks {
        let query_bytes = MMA_QUERY_BYTES * dk;
        let log_tiles = log_tiles(queries, MMA_WARPS, |n| query_bytes << n <= MAX_MMA_QUERY_BYTES);
        let tiles = queries.div_ceil(MMA_QUERIES << log_tiles);
        let columns = u64::from(tiles) * u64::from(dv.div_ceil(8 * MMA_OCTETS)) * groups;
        let step = |warps: u32| (MMA_TILE * warps) >> log_tiles;
        // Blocks of half the size if whole ones would leave half of the GPU idle.
        let blocks = u64::from(positions.div_ceil(step(MMA_WARPS))) * columns;
        let is_small = 2 * blocks <= u64::from(multiprocessors) && log_tiles < 2;
        let warps = if is_small { MMA_WARPS / 2 } else { MMA_WARPS };
        Blocks {
            log_quads: log_tiles + 1,
            octets: MMA_OCTETS,
            threads: 32 * warps,
            shared: (query_bytes << log_tiles) + warps * MMA_SUM_BYTES,
            step: step(warps),
            min_part: step(warps).max(MMA_MIN_PART),
            at_once: 2,
        }
    }
}

/// Tiles of queries per block, as a power of two: at most one per warp, and as many as fit.
fn log_tiles(queries: u32, warps: u32, fits: impl Fn(u32) -> bool) -> u32 {
    (1..).take_while(|&n| 1 << n <= warps && MMA_QUERIES << (n - 1) < queries && fits(n)).last().unwrap_or(0)
}

/// Split-K: the number of parts of the positions, and the positions per part, for a grid of `columns` blocks without a split on a
/// GPU with room for `room` blocks.
fn split_positions(columns: u64, room: u64, positions: u32, min_part: u32, step: u32) -> (u64, u32) {
    let worth = u64::from(positions / min_part);
    let parts = (room / columns.max(1)).min(worth).clamp(1, MAX_PARTS) as u32;
    let part = positions.div_ceil(parts).next_multiple_of(step).max(step);
    (u64::from(positions.div_ceil(part).max(1)), part)
}

fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [("POSITIONS", POSITIONS.into()), ("PARTS", MAX_PARTS)];
        assert_constants(include_str!("../../../kernels/flash_attn.cu"), &expected);
        let expected = [
            ("ROWS", MMA_QUERIES.into()),
            ("MAX_WARPS", MMA_WARPS.into()),
            ("TILE", MMA_TILE.into()),
            ("SPAN", u64::from(8 * MMA_OCTETS)),
        ];
        assert_constants(include_str!("../../../kernels/flash_attn_warps.cuh"), &expected);
    }
}
