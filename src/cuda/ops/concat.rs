//! Launches of CONCAT and REPEAT: kernels/concat.cu. Both copy dense runs of bytes into a loop nest of the destination.

use super::elementwise::{LoopDim, block_counts, block_shape, broadcast_dims, merge_dims};
use super::{Access, Grid, KernelArguments, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Unsupported};
use crate::ops::concat::Concat;
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Limit of loops besides the run and its repeats.
const MAX_DIMS: usize = 7;

/// Limit of repeats of a run per block. More blocks read the source again, which costs at most 1/32 of the destination's
/// traffic.
const MAX_REPEATS_PER_BLOCK: u64 = 32;

/// `struct ConcatArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConcatArgs {
    dst_at: u64,
    bytes: u64,
    repeat: u64,
    from: [u64; MAX_DIMS],
    to: [u64; MAX_DIMS],
    count: [u32; MAX_DIMS],
    dims: u32,
    rows: u32,
    repeats: u32,
    parts: u32,
    part: u32,
    tiles: u32,
    tile: u32,
    unit: u32,
    align: u32,
}

impl KernelArguments for ConcatArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let along = |access: Access, strides: &[u64; MAX_DIMS]| {
            let loops = self.count.iter().zip(strides).take(self.dims as usize);
            loops.fold(access, |access, (&count, &stride)| access.along(count, stride))
        };
        let repeats = Access::bytes(1, self.bytes).at(self.dst_at).along(self.repeats, self.repeat);
        let source = if self.unit == 0 { Access::bytes(0, self.bytes) } else { Access::one(0) };
        Ok(vec![along(source, &self.from), along(repeats, &self.to)])
    }
}

pub(super) fn select(op: Concat, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (dst, first) = (on.dst(), on.src(0)?);
    let Concat::Concat { dim } = op else {
        return Ok(NodeLaunches::new(repeat_launch(on, 0, block_counts(dst), 0)?.into_iter().collect(), 0));
    };
    let d = usize::from(dim);
    if d >= DIMS {
        return Err(on.unsupported(format!("dimension {dim}")));
    }
    let behind = block_counts(first)[d].saturating_mul(dst.nb()[d] as u64);
    let mut launches = Vec::new();
    for (i, at) in [(0, 0), (1, behind)] {
        launches.extend(repeat_launch(on, i, block_counts(on.src(usize::from(i))?), at)?);
    }
    Ok(NodeLaunches::new(launches, 0))
}

/// The launch that fills `counts` blocks of dst from byte `at` on with source `i`, repeated as necessary. `None` if a count is
/// 0.
pub(super) fn repeat_launch(
    on: &NodeOnGpu<'_>,
    i: u8,
    counts: [u64; DIMS],
    at: u64,
) -> Result<Option<KernelLaunch>, Unsupported> {
    let (dst, src) = (on.dst(), on.src(usize::from(i))?);
    if counts.contains(&0) {
        return Ok(None);
    }
    let to_u32 = |n: u64| u32::try_from(n).map_err(|_| on.unsupported("2^32 or more pieces that are not contiguous"));
    let mut dims = copy_loops(src, dst, counts);
    let size = src.dtype().block_bytes() as u64;
    let (bytes, unit) = match dims.first() {
        Some(&LoopDim { count, step }) if step == [size, size] => (count * size, 0),
        Some(&LoopDim { count, step }) if step == [0, size] && matches!(size, 1 | 2 | 4 | 8) => (count * size, size),
        _ => (size, 0),
    };
    if bytes > size {
        dims.remove(0);
    }
    let repeat = dims.iter().enumerate().filter(|(_, dim)| dim.step[0] == 0).max_by_key(|(_, dim)| dim.count);
    let repeat = match repeat.map(|(k, _)| k) {
        Some(k) => dims.remove(k),
        None => LoopDim { count: 1, step: [0; 2] },
    };
    if dims.len() > MAX_DIMS {
        return Err(on.unsupported("more dimensions than a tensor has"));
    }
    let rows = dims.iter().try_fold(1u64, |n, dim| n.checked_mul(dim.count));
    let rows = to_u32(rows.unwrap_or(u64::MAX))?;
    let aligned = |n: u64| (n | 16) & (n | 16).wrapping_neg();
    let from = dims.iter().map(|dim| dim.step[0]).filter(|_| unit == 0);
    let align = from.chain(dims.iter().map(|dim| dim.step[1])).chain([repeat.step[1]]).map(aligned).min();
    // A thread copies 16 bytes of a run that is shorter than a block of threads, and up to 64 bytes of a longer one.
    let pieces = bytes.div_ceil(16);
    let (threads, _) = block_shape(pieces.min(256), u64::from(rows));
    let tile = 64 * u64::from(threads[0]);
    let tiles = bytes.div_ceil(tile);
    let others = tiles.saturating_mul(u64::from(rows).div_ceil(u64::from(threads[1])));
    let part = repeat.count.min(MAX_REPEATS_PER_BLOCK);
    let parts = repeat.count.div_ceil(part);
    let mut args = ConcatArgs {
        dst_at: at,
        bytes,
        repeat: repeat.step[1],
        dims: dims.len() as u32,
        rows,
        repeats: to_u32(repeat.count)?,
        parts: to_u32(parts)?,
        part: to_u32(part)?,
        tiles: to_u32(tiles)?,
        tile: to_u32(tile)?,
        unit: unit as u32,
        align: align.unwrap_or(16) as u32,
        ..ConcatArgs::zeroed()
    };
    for (k, dim) in dims.iter().enumerate() {
        (args.from[k], args.to[k], args.count[k]) = (dim.step[0], dim.step[1], to_u32(dim.count)?);
    }
    let grid = Grid { blocks: [others.saturating_mul(parts), 1, 1], threads, shared: 0 };
    on.launch(("concat", "concat_runs"), grid, &[Ptr::Src(i), Ptr::Dst], &args).map(Some)
}

/// The merged loops over the blocks, with the strides of source and destination; the destination's smallest stride first.
fn copy_loops(src: &TensorDesc, dst: &TensorDesc, counts: [u64; DIMS]) -> Vec<LoopDim<2>> {
    let own = block_counts(src);
    let dims = (0..DIMS).flat_map(|k| broadcast_dims(counts[k], own[k], [src, dst].map(|t| t.nb()[k] as u64), 0));
    let mut dims: Vec<_> = dims.filter(|dim| dim.count > 1).collect();
    dims.sort_by_key(|dim| dim.step[1]);
    merge_dims(dims)
}
