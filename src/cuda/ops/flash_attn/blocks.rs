//! kernels/flash_attn_blocks.cu: attention of few queries on tensor cores for block types, whose tiles warps copy to shared memory.

use super::{Blocks, MMA_OCTETS, MMA_QUERIES, MMA_WARPS, log_tiles};
use crate::cuda::driver::Gpu;
use crate::tensor::TensorDesc;

/// Positions of a tile.
const POSITIONS: u32 = 32;
/// Shared memory of a warp besides its tiles: scales, and the sums of its queries, which replace the tiles.
const SCALE_BYTES: u32 = 16 * (POSITIONS + 8) + 8 * POSITIONS;
const SUM_BYTES: u32 = 4 * MMA_QUERIES * (8 * MMA_OCTETS + 4);
/// Bytes of a query per channel of k and tile of queries.
const QUERY_BYTES: u32 = 16;
/// Limit of a block's dynamic shared memory in bytes, which leaves room for the block's other variables.
const MAX_SHARED: u32 = (48 << 10) - 256;
/// Shared memory of a block that the driver takes, in bytes.
const RESERVED: u32 = 1 << 10;
/// Blocks of a multiprocessor that its registers allow, with all warps.
const AT_ONCE: u32 = 2;

/// The kernel for a node's k and v.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct BlockTypes {
    /// Bytes of the queries per tile, and of a warp's tiles, sums and scales.
    query_bytes: u32,
    warp_bytes: u32,
    /// Tiles of k and v that a warp has room for: 2, or 1 if rows are wide. With one, its copies wait for its products.
    pub(super) stages: u32,
}

impl BlockTypes {
    /// The kernel, if a warp's tiles fit into shared memory.
    pub(super) fn of(k: &TensorDesc, v: &TensorDesc) -> Option<BlockTypes> {
        let span = v.ne()[0].min(8 * MMA_OCTETS as usize);
        let pitches = row_pitch(k, k.ne()[0]) + row_pitch(v, span);
        let with_stages = |stages: u32| {
            let warp_bytes = (stages * POSITIONS * pitches).max(SUM_BYTES) + SCALE_BYTES;
            BlockTypes { query_bytes: QUERY_BYTES * k.ne()[0] as u32, warp_bytes, stages }
        };
        [2, 1].into_iter().map(with_stages).find(|types| types.shared(0, 1) <= MAX_SHARED)
    }

    fn shared(self, log_tiles: u32, warps: u32) -> u32 {
        (self.query_bytes << log_tiles) + warps * self.warp_bytes
    }

    /// `groups`: blocks of the grid for a tile of queries and a span of channels, without a split.
    pub(super) fn blocks(self, queries: u32, [positions, dv]: [u32; 2], groups: u64, gpu: &Gpu) -> Blocks {
        let fits = |log_tiles, warps| self.shared(log_tiles, warps) <= MAX_SHARED;
        let most = [MMA_WARPS, 2, 1].into_iter().find(|&warps| fits(0, warps)).unwrap_or(1);
        let log_tiles = log_tiles(queries, most, |n| fits(n, most));
        let spans = u64::from(dv.div_ceil(8 * MMA_OCTETS));
        let columns = u64::from(queries.div_ceil(MMA_QUERIES << log_tiles)) * spans * groups;
        let step = |warps: u32| (POSITIONS * warps) >> log_tiles;
        // Blocks of half the size if whole ones would leave half of the GPU idle.
        let blocks = u64::from(positions.div_ceil(step(most))) * columns;
        let is_small = 2 * blocks <= u64::from(gpu.multiprocessors) && most >> log_tiles > 1;
        let warps = if is_small { most / 2 } else { most };
        let shared = self.shared(log_tiles, warps);
        let fitting = (gpu.shared_per_block + RESERVED) / (shared + RESERVED);
        Blocks {
            log_quads: log_tiles + 1,
            octets: MMA_OCTETS,
            threads: 32 * warps,
            shared,
            step: step(warps),
            min_part: step(warps),
            at_once: fitting.clamp(1, AT_ONCE * MMA_WARPS / warps).into(),
        }
    }
}

/// Bytes from one row of a tile to the next, as `row_pitch` of the file: an odd number of 16 bytes, with room for the bytes before a row that its
/// strides imply.
fn row_pitch(t: &TensorDesc, channels: usize) -> u32 {
    let bytes = (channels / t.dtype().block_len() * t.dtype().block_bytes()) as u32;
    let bits = t.nb()[1] | t.nb()[2] | t.nb()[3] | 16;
    let alignment = 1 << bits.trailing_zeros();
    let before = if alignment < 4 { 0 } else { 16 - alignment };
    16 * ((bytes + before).div_ceil(16) | 1)
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        let tiles = include_str!("../../../../kernels/flash_attn_block_tiles.cuh");
        assert_constants(tiles, &[("POSITIONS", POSITIONS.into())]);
    }
}
