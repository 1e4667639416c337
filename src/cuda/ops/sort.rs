//! Launches of ARGSORT and TOP_K: kernels/sort.cu. Sorts tiles in shared memory, then merges sorted runs in scratch memory.

use super::{
    Access, Grid, KernelArguments, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, blocks,
    saturating_product,
};
use crate::ops::sort::Sort;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// Keys per tile, which is sorted in shared memory: 32 KiB.
const TILE: u32 = 4096;
/// Limit of k for the selection path of TOP_K: each tile keeps its first k keys, and the kept keys are sorted again. Each pass
/// leaves at most a quarter of the keys.
const MAX_SELECTED: u32 = TILE / 4;
/// Keys per piece of scratch memory. A batch of rows uses two pieces in turn (double buffering).
const BATCH_KEYS: u32 = 1 << 22;
/// Minimum threads per block; several short rows share a block.
const MIN_THREADS: u32 = 128;

/// `struct SortTileArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SortTileArgs {
    x: Shape,
    y: Shape,
    from_step: u64,
    to_step: u64,
    first: u32,
    rows: u32,
    count: u32,
    tiles: u32,
    size: u32,
    keep: u32,
    descending: u32,
    from_x: u32,
    to_y: u32,
    padding: u32,
}

impl KernelArguments for SortTileArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        if self.from_x != 0 && saturating_product(&self.x.ne[1..]) < u64::from(self.first) + u64::from(self.rows) {
            return Err("rows beyond the end");
        }
        let keys =
            |pointer, step: u64, kept: u64| Access::bytes(pointer, kept.saturating_mul(8)).along(self.rows, 8 * step);
        let kept = keys_kept(self.count, self.size, self.keep);
        let (from_x, to_y) = (self.from_x != 0, self.to_y != 0);
        Ok(vec![
            self.x.access(0).only_if(from_x),
            keys(1, self.from_step, u64::from(self.count)).only_if(!from_x),
            keys(2, self.to_step, u64::from(kept)).only_if(!to_y),
            self.y.access(3).only_if(to_y),
        ])
    }
}

/// `struct SortMergeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SortMergeArgs {
    y: Shape,
    first: u32,
    rows: u32,
    count: u32,
    keep: u32,
    run: u64,
    to_y: u32,
    padding: u32,
}

impl KernelArguments for SortMergeArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let keys = |pointer| Access::bytes(pointer, saturating_product(&[8, self.rows, self.count]));
        let to_y = self.to_y != 0;
        Ok(vec![keys(0), keys(1).only_if(!to_y), self.y.access(2).only_if(to_y)])
    }
}

pub(super) fn select(op: Sort, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let rows = i32::try_from(y.rows()).map_err(|_| on.unsupported("2^31 or more rows"))? as u32;
    let descending = op != Sort::Argsort { descending: false };
    let sorter = Sorter { on, x: on.shape(x)?, y: on.shape(y)?, descending };
    if sorter.x.ne[0] <= TILE {
        return Ok(NodeLaunches::one(sorter.sort_tiles(
            &SortInput::elements(&sorter, 0, rows),
            ScratchPiece::None,
            true,
        )?));
    }
    let per_batch = (BATCH_KEYS / sorter.x.ne[0]).max(1);
    let piece = 8 * u64::from(per_batch.min(rows)) * u64::from(sorter.x.ne[0]);
    let mut kernel = NodeLaunches::new(Vec::new(), 2 * piece);
    let pieces = [ScratchPiece::At(0), ScratchPiece::At(piece)];
    for first in (0..rows).step_by(per_batch as usize) {
        let all = SortInput::elements(&sorter, first, per_batch.min(rows - first));
        let launches = &mut kernel.launches;
        if sorter.y.ne[0] <= MAX_SELECTED {
            sorter.select_first(launches, all, pieces)?
        } else {
            sorter.merge_sort(launches, all, pieces)?
        }
    }
    Ok(kernel)
}

/// A piece of the scratch memory, by its byte offset, or none.
#[derive(Clone, Copy)]
enum ScratchPiece {
    None,
    At(u64),
}

impl ScratchPiece {
    fn pointer(self) -> Ptr {
        match self {
            ScratchPiece::None => Ptr::Null,
            ScratchPiece::At(offset) => Ptr::Scratch(offset),
        }
    }
}

/// Input of a launch: `count` keys of each of `rows` rows, from row `first` on.
struct SortInput {
    /// Piece of scratch memory; `None` for the elements of x.
    at: ScratchPiece,
    first: u32,
    rows: u32,
    count: u32,
}

impl SortInput {
    fn elements(sorter: &Sorter<'_>, first: u32, rows: u32) -> SortInput {
        SortInput { at: ScratchPiece::None, first, rows, count: sorter.x.ne[0] }
    }
}

struct Sorter<'a> {
    on: &'a NodeOnGpu<'a>,
    x: Shape,
    y: Shape,
    descending: bool,
}

impl Sorter<'_> {
    /// Sorts tiles. Writes keys to `to`, or indices to y if `to` is `None`: all keys of a tile, or with `only_first` at most as
    /// many as y needs.
    fn sort_tiles(&self, keys: &SortInput, to: ScratchPiece, only_first: bool) -> Result<KernelLaunch, Unsupported> {
        let size = keys.count.next_power_of_two().clamp(2, TILE);
        let tiles = keys.count.div_ceil(size);
        let keep = if only_first { self.y.ne[0].min(size) } else { size };
        let (from_x, to_y) = (matches!(keys.at, ScratchPiece::None), matches!(to, ScratchPiece::None));
        let args = SortTileArgs {
            x: self.x,
            y: self.y,
            from_step: u64::from(keys.count),
            to_step: u64::from(keys_kept(keys.count, size, keep)),
            first: keys.first,
            rows: keys.rows,
            count: keys.count,
            tiles,
            size,
            keep,
            descending: u32::from(self.descending),
            from_x: u32::from(from_x),
            to_y: u32::from(to_y),
            padding: 0,
        };
        let threads = (size / 2).min(512);
        let side_by_side = (MIN_THREADS / threads).max(1);
        let units = u64::from(keys.rows) * u64::from(tiles);
        let grid = Grid::line(units.div_ceil(u64::from(side_by_side)), threads);
        let grid = Grid { threads: [threads, side_by_side, 1], ..grid }.with_shared(8 * size * side_by_side);
        let pointers = [Ptr::Src(0), keys.at.pointer(), to.pointer(), Ptr::Dst];
        self.on.launch(("sort", "sort_tile"), grid, &pointers, &args)
    }

    /// Selection (TOP_K of few): keeps the first keys of each tile, and repeats until one tile is left.
    fn select_first(
        &self,
        launches: &mut Vec<KernelLaunch>,
        mut keys: SortInput,
        [mut to, mut other]: [ScratchPiece; 2],
    ) -> Result<(), Unsupported> {
        while keys.count > TILE {
            launches.push(self.sort_tiles(&keys, to, true)?);
            keys = SortInput { at: to, count: keys_kept(keys.count, TILE, self.y.ne[0]), ..keys };
            (to, other) = (other, to);
        }
        launches.push(self.sort_tiles(&keys, ScratchPiece::None, true)?);
        Ok(())
    }

    /// Merge sort: sorts tiles, then merges pairs of runs until one run is left; the last merge writes y.
    fn merge_sort(
        &self,
        launches: &mut Vec<KernelLaunch>,
        keys: SortInput,
        [mut from, mut to]: [ScratchPiece; 2],
    ) -> Result<(), Unsupported> {
        launches.push(self.sort_tiles(&keys, from, false)?);
        let mut run = u64::from(TILE);
        while run < u64::from(keys.count) {
            let last = 2 * run >= u64::from(keys.count);
            let args = SortMergeArgs {
                y: self.y,
                first: keys.first,
                rows: keys.rows,
                count: keys.count,
                keep: self.y.ne[0],
                run,
                to_y: u32::from(last),
                padding: 0,
            };
            let pointers = [from.pointer(), if last { Ptr::Null } else { to.pointer() }, Ptr::Dst];
            let per_row = blocks(keys.count as usize, super::THREADS, 1);
            let grid = Grid::of([per_row, u64::from(keys.rows.min(65535)), 1], super::THREADS);
            launches.push(self.on.launch(("sort", "sort_merge"), grid, &pointers, &args)?);
            (from, to) = (to, from);
            run *= 2;
        }
        Ok(())
    }
}

/// Number of keys left of `count` if each tile of `size` keeps its first `keep`.
fn keys_kept(count: u32, size: u32, keep: u32) -> u32 {
    count / size * keep + (count % size).min(keep)
}
