//! Launches of FLASH_ATTN_EXT: kernels/flash_attn.cu, with split-K over the KV positions for decoding (as in flash-decoding).

use super::{Grid, NodeLaunches, NodeOnGpu, Ptr, Unsupported, suffix};
use crate::ops::flash_attn::FlashAttn;
use crate::ops::softmax::Alibi;
use crate::tensor::{Capability, DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Threads per block, as in the file.
const THREADS: u32 = 128;

/// Limit of octets (groups of 8 channels) of v per block. With the smallest tile, four queries, each thread then has one octet.
const MAX_OCTETS: u32 = 128;

/// Split-K: positions are split into parts while the grid has fewer blocks than this per multiprocessor; as many run there at
/// once.
const BLOCKS_AT_ONCE: u64 = 4;
/// Minimum number of positions per part. Merging shorter parts costs more than the parallelism gains.
const MIN_PART: u32 = 128;
/// Limit of parts, as in flash_attn_merge.
const MAX_PARTS: u64 = 256;

/// Positions per inner step of the kernel, as in the file.
const POSITIONS: u32 = 64;

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
    types: [u32; 2],
    slope_steps: u32,
    slope_bases: [f32; 2],
    scale: f32,
    cap: f32,
    padding: u32,
}

/// `struct FlashAttnMergeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FlashAttnMergeArgs {
    dv: u32,
    pitch: u32,
    heads: u32,
    parts: u32,
}

pub(super) fn select(op: FlashAttn, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (q, k, v) = (on.src(0)?, on.src(1)?, on.src(2)?);
    let mask = on.node.srcs.get(3);
    let convert = [k, v].iter().all(|t| t.dtype().can(Capability::Cuda));
    let floats = q.dtype() == DType::F32 && on.dst().dtype() == DType::F32;
    if !convert || !floats || mask.is_some_and(|mask| mask.dtype() != DType::F16) {
        return Err(on.unsupported_types());
    }
    let (qs, ks, vs) = (on.shape(q)?, on.shape(k)?, on.shape(v)?);
    let ([dk, tokens, heads, batches], positions, dv) = (qs.ne, ks.ne[1], vs.ne[0]);
    let (per_k, per_v) = (heads / ks.ne[2].max(1), heads / vs.ne[2].max(1));
    let group = common_divisor(per_k, per_v).max(1);
    let queries = tokens.checked_mul(group).filter(|&n| n <= i32::MAX as u32);
    let queries = queries.ok_or_else(|| on.unsupported("2^31 or more queries of a head"))?;

    let all_octets = dv.div_ceil(8);
    let spans = all_octets.div_ceil(MAX_OCTETS);
    let octets = all_octets.div_ceil(spans);
    // The largest tile whose accumulators fit a block's registers, but not larger than the number of queries.
    let log_quads = (0..3).find(|&n| 4 << n >= queries || octets << (n + 1) > MAX_OCTETS).unwrap_or(3);
    let tiles = queries.div_ceil(4 << log_quads);
    let columns = u64::from(tiles) * u64::from(spans) * u64::from(heads / group) * u64::from(batches);
    let (parts, part) = split_positions(columns, positions, on.gpu.multiprocessors);

    let strides = |t: &TensorDesc| [1, 2, 3].map(|i| t.nb()[i] as u64);
    let (mask_heads, mask_batches) = mask.map_or((1, 1), |mask| (mask.ne()[2] as u32, mask.ne()[3] as u32));
    let alibi = Alibi::new(op.max_bias, heads as usize);
    let args = FlashAttnArgs {
        qb: strides(q),
        kb: strides(k),
        vb: strides(v),
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
        types: [k, v].map(|t| t.dtype().to_wire()),
        slope_steps: alibi.map_or(0, |alibi| alibi.n_head_log2 as u32),
        slope_bases: alibi.map_or([1.0; 2], |alibi| alibi.bases),
        // With a softcap, the kernel computes cap * tanh(score * scale / cap).
        scale: if op.softcap == 0.0 { op.scale } else { op.scale / op.softcap },
        cap: op.softcap,
        padding: 0,
    };
    let pitch = all_octets * 8;
    let rows = u64::from(batches) * u64::from(tokens) * u64::from(heads);
    let (sums, stats) = if parts == 1 { (0, 0) } else { (rows * parts * u64::from(pitch) * 4, rows * parts * 8) };
    let at = if parts == 1 { [Ptr::Null; 2] } else { [Ptr::Scratch(0), Ptr::Scratch(sums)] };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Src(3), Ptr::Src(4), Ptr::Dst, at[0], at[1]];
    let grid = Grid::of([columns, parts, 1], THREADS);
    let name = format!("flash_attn_{}", suffix(k.dtype()));
    let entry = if k.dtype() == v.dtype() && k.dtype().can(Capability::Cache) {
        (name.as_str(), name.as_str())
    } else {
        ("flash_attn", "flash_attn_any")
    };
    let mut kernel = on.single_launch(entry, grid, &pointers, &args)?;
    if parts > 1 {
        let merge = FlashAttnMergeArgs { dv, pitch, heads, parts: parts as u32 };
        // One warp per two parts, eight warps at most.
        let threads = 32 * (parts as u32).div_ceil(2).min(8);
        let grid = Grid::of([rows, u64::from(dv.div_ceil(128)), 1], threads);
        let pointers = [at[0], at[1], Ptr::Src(4), Ptr::Dst];
        kernel.launches.push(on.launch(("flash_attn", "flash_attn_merge"), grid, &pointers, &merge)?);
        kernel.scratch = sums + stats;
    }
    Ok(kernel)
}

/// Split-K: the number of parts of the positions, and the positions per part, for a grid of `columns` blocks without a split.
fn split_positions(columns: u64, positions: u32, multiprocessors: u32) -> (u64, u32) {
    let room = BLOCKS_AT_ONCE * u64::from(multiprocessors);
    let worth = u64::from(positions / MIN_PART);
    let parts = (room / columns.max(1)).min(worth).clamp(1, MAX_PARTS) as u32;
    let part = positions.div_ceil(parts).next_multiple_of(POSITIONS).max(POSITIONS);
    (u64::from(positions.div_ceil(part).max(1)), part)
}

fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
