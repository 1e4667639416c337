//! CONCAT and REPEAT: kernels/concat.cu.

use super::zip::{Dim, block_counts, merge, repeated, threads};
use super::{Grid, Kernel, Launch, On, Ptr, Unsupported};
use crate::ops::concat::Concat;
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Most dimensions besides a run and its repeats.
const MOST_DIMS: usize = 7;

/// Most repeats of a run by one block: the source is then read as often as 1/32 of the destination is long.
const PART: u64 = 32;

/// `struct Args` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    dst_at: u64,
    bytes: u64,
    repeat: u64,
    from: [u64; MOST_DIMS],
    to: [u64; MOST_DIMS],
    count: [u32; MOST_DIMS],
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

pub(super) fn select(op: Concat, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (dst, first) = (on.dst(), on.src(0)?);
    let Concat::Concat { dim } = op else {
        return Ok(Kernel { launches: place(on, 0, block_counts(dst), 0)?.into_iter().collect(), scratch: 0 });
    };
    let d = usize::from(dim);
    if d >= DIMS {
        return Err(on.unsupported(format!("dimension {dim}")));
    }
    let behind = block_counts(first)[d].saturating_mul(dst.nb()[d] as u64);
    let mut launches = Vec::new();
    for (i, at) in [(0, 0), (1, behind)] {
        launches.extend(place(on, i, block_counts(on.src(usize::from(i))?), at)?);
    }
    Ok(Kernel { launches, scratch: 0 })
}

/// The launch that fills `counts` blocks of dst, from byte `at` on, with source `i` repeated; `None` where there is nothing.
fn place(on: &On<'_>, i: u8, counts: [u64; DIMS], at: u64) -> Result<Option<Launch>, Unsupported> {
    let (dst, src) = (on.dst(), on.src(usize::from(i))?);
    if counts.contains(&0) {
        return Ok(None);
    }
    let small = |n: u64| u32::try_from(n).map_err(|_| on.unsupported("2^32 or more pieces that do not lie dense"));
    let mut dims = loops(src, dst, counts);
    let size = src.dtype().block_bytes() as u64;
    let (bytes, unit) = match dims.first() {
        Some(&Dim { count, step }) if step == [size, size] => (count * size, 0),
        Some(&Dim { count, step }) if step == [0, size] && matches!(size, 1 | 2 | 4 | 8) => (count * size, size),
        _ => (size, 0),
    };
    if bytes > size {
        dims.remove(0);
    }
    let repeat = dims.iter().enumerate().filter(|(_, dim)| dim.step[0] == 0).max_by_key(|(_, dim)| dim.count);
    let repeat = match repeat.map(|(k, _)| k) {
        Some(k) => dims.remove(k),
        None => Dim { count: 1, step: [0; 2] },
    };
    if dims.len() > MOST_DIMS {
        return Err(on.unsupported("more dimensions than a tensor has"));
    }
    let rows = dims.iter().try_fold(1u64, |n, dim| n.checked_mul(dim.count));
    let rows = small(rows.unwrap_or(u64::MAX))?;
    let aligned = |n: u64| (n | 16) & (n | 16).wrapping_neg();
    let from = dims.iter().map(|dim| dim.step[0]).filter(|_| unit == 0);
    let align = from.chain(dims.iter().map(|dim| dim.step[1])).chain([repeat.step[1]]).map(aligned).min();
    // 16 bytes a thread where a run is shorter than a block of threads, and up to 64 where it is longer.
    let pieces = bytes.div_ceil(16);
    let (threads, _) = threads(pieces.min(256), u64::from(rows));
    let tile = 64 * u64::from(threads[0]);
    let tiles = bytes.div_ceil(tile);
    let others = tiles.saturating_mul(u64::from(rows).div_ceil(u64::from(threads[1])));
    let part = repeat.count.min(PART);
    let parts = repeat.count.div_ceil(part);
    let mut args = Args {
        dst_at: at,
        bytes,
        repeat: repeat.step[1],
        dims: dims.len() as u32,
        rows,
        repeats: small(repeat.count)?,
        parts: small(parts)?,
        part: small(part)?,
        tiles: small(tiles)?,
        tile: small(tile)?,
        unit: unit as u32,
        align: align.unwrap_or(16) as u32,
        ..Args::zeroed()
    };
    for (k, dim) in dims.iter().enumerate() {
        (args.from[k], args.to[k], args.count[k]) = (dim.step[0], dim.step[1], small(dim.count)?);
    }
    let grid = Grid { blocks: [others.saturating_mul(parts), 1, 1], threads, shared: 0 };
    on.launch(("concat", "concat_runs"), grid, &[Ptr::Src(i), Ptr::Dst], &args).map(Some)
}

/// The loops over the blocks, with the steps of source and destination, the destination's smallest step first.
fn loops(src: &TensorDesc, dst: &TensorDesc, counts: [u64; DIMS]) -> Vec<Dim<2>> {
    let own = block_counts(src);
    let dims = (0..DIMS).flat_map(|k| repeated(counts[k], own[k], [src, dst].map(|t| t.nb()[k] as u64), 0));
    let mut dims: Vec<_> = dims.filter(|dim| dim.count > 1).collect();
    dims.sort_by_key(|dim| dim.step[1]);
    merge(dims)
}
