//! ARGSORT and TOP_K: kernels/sort.cu.

use super::{Grid, Kernel, Launch, On, Ptr, Shape, Unsupported, blocks};
use crate::ops::sort::Sort;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// The most keys that are ordered in shared memory: 32 KiB.
const TILE: u32 = 4096;
/// Of so few largest ones, each tile keeps what it has, and a tile of those follows: a quarter of the keys at most.
const FEW: u32 = TILE / 4;
/// Keys of a piece of scratch memory; a batch of rows has two such pieces.
const BATCH: u32 = 1 << 22;
/// Threads of a block where rows are short.
const SHORT: u32 = 128;

/// `struct Tile` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Tile {
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

/// `struct Merge` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Merge {
    y: Shape,
    first: u32,
    rows: u32,
    count: u32,
    keep: u32,
    run: u64,
    to_y: u32,
    padding: u32,
}

pub(super) fn select(op: Sort, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 {
        return Err(on.types());
    }
    let rows = i32::try_from(y.rows()).map_err(|_| on.unsupported("2^31 or more rows"))? as u32;
    let descending = op != Sort::Argsort { descending: false };
    let sorter = Sorter { on, x: on.shape(x)?, y: on.shape(y)?, descending };
    if sorter.x.ne[0] <= TILE {
        return Ok(Kernel::one(sorter.tile(&Keys::elements(&sorter, 0, rows), Piece::None, true)?));
    }
    let per_batch = (BATCH / sorter.x.ne[0]).max(1);
    let piece = 8 * u64::from(per_batch.min(rows)) * u64::from(sorter.x.ne[0]);
    let mut kernel = Kernel { launches: Vec::new(), scratch: 2 * piece };
    let pieces = [Piece::At(0), Piece::At(piece)];
    for first in (0..rows).step_by(per_batch as usize) {
        let all = Keys::elements(&sorter, first, per_batch.min(rows - first));
        let launches = &mut kernel.launches;
        if sorter.y.ne[0] <= FEW { sorter.few(launches, all, pieces)? } else { sorter.merge(launches, all, pieces)? }
    }
    Ok(kernel)
}

/// A part of the scratch memory, by its first byte.
#[derive(Clone, Copy)]
enum Piece {
    None,
    At(u64),
}

impl Piece {
    fn pointer(self) -> Ptr {
        match self {
            Piece::None => Ptr::Null,
            Piece::At(offset) => Ptr::Scratch(offset),
        }
    }
}

/// What a launch reads: `count` keys of each of `rows` rows.
struct Keys {
    /// Scratch memory, or the elements of x.
    at: Piece,
    first: u32,
    rows: u32,
    count: u32,
}

impl Keys {
    fn elements(sorter: &Sorter<'_>, first: u32, rows: u32) -> Keys {
        Keys { at: Piece::None, first, rows, count: sorter.x.ne[0] }
    }
}

struct Sorter<'a> {
    on: &'a On<'a>,
    x: Shape,
    y: Shape,
    descending: bool,
}

impl Sorter<'_> {
    /// Tiles in order; as many of the first keys of each as there are in y, or all of it, go to `to`, or to y as indices.
    fn tile(&self, keys: &Keys, to: Piece, few: bool) -> Result<Launch, Unsupported> {
        let size = keys.count.next_power_of_two().clamp(2, TILE);
        let tiles = keys.count.div_ceil(size);
        let keep = if few { self.y.ne[0].min(size) } else { size };
        let (from_x, to_y) = (matches!(keys.at, Piece::None), matches!(to, Piece::None));
        let numbers = Tile {
            x: self.x,
            y: self.y,
            from_step: u64::from(keys.count),
            to_step: u64::from(kept(keys.count, size, keep)),
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
        let side_by_side = (SHORT / threads).max(1);
        let units = u64::from(keys.rows) * u64::from(tiles);
        let grid = Grid::line(units.div_ceil(u64::from(side_by_side)), threads);
        let grid = Grid { threads: [threads, side_by_side, 1], ..grid }.with_shared(8 * size * side_by_side);
        let pointers = [Ptr::Src(0), keys.at.pointer(), to.pointer(), Ptr::Dst];
        self.on.launch(("sort", "sort_tile"), grid, &pointers, &numbers)
    }

    /// The first keys of each tile, and of those again, until they are one tile.
    fn few(
        &self,
        launches: &mut Vec<Launch>,
        mut keys: Keys,
        [mut to, mut other]: [Piece; 2],
    ) -> Result<(), Unsupported> {
        while keys.count > TILE {
            launches.push(self.tile(&keys, to, true)?);
            keys = Keys { at: to, count: kept(keys.count, TILE, self.y.ne[0]), ..keys };
            (to, other) = (other, to);
        }
        launches.push(self.tile(&keys, Piece::None, true)?);
        Ok(())
    }

    /// Tiles in order, then runs of twice the length until there is one; the last merge writes y.
    fn merge(&self, launches: &mut Vec<Launch>, keys: Keys, [mut from, mut to]: [Piece; 2]) -> Result<(), Unsupported> {
        launches.push(self.tile(&keys, from, false)?);
        let mut run = u64::from(TILE);
        while run < u64::from(keys.count) {
            let last = 2 * run >= u64::from(keys.count);
            let numbers = Merge {
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
            launches.push(self.on.launch(("sort", "sort_merge"), grid, &pointers, &numbers)?);
            (from, to) = (to, from);
            run *= 2;
        }
        Ok(())
    }
}

/// Keys that are left of `count` when each tile of `size` keeps its first `keep`.
fn kept(count: u32, size: u32, keep: u32) -> u32 {
    count / size * keep + (count % size).min(keep)
}
