//! kernels/flash_attn_latent.cu: latent attention (MLA) on tensor cores, where V is the first channels of K's rows.

use super::prompt::SCALES;
use super::{Blocks, MIN_MMA_CAPABILITY, NodeOnGpu, suffix};
use crate::ops::flash_attn::FlashAttn;
use crate::tensor::{DType, TensorDesc};

const THREADS: u32 = 256;
const POSITIONS: u32 = 32;
/// Queries per block: the former for up to as many queries of a head of k. A block of the latter takes 64 registers more per query, and
/// computes the products of all of them.
const FEW_ROWS: u32 = 16;
const ROWS: u32 = 64;
/// Fewest positions per part. A part of 64 queries takes as long as 64 positions to load its queries and to store its sums.
const FEW_MIN_PART: u32 = 64;
const MIN_PART: u32 = 128;
/// Shared memory of a block that the driver takes, in bytes.
const RESERVED: u32 = 1 << 10;
/// Channels of k, and those of v among them.
const WIDTHS: [[usize; 2]; 2] = [[576, 512], [320, 256]];

/// A variant of the kernel.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Latent {
    dtype: DType,
    channels: u32,
    values: u32,
    rows: u32,
    /// Blocks that a multiprocessor has shared memory for.
    at_once: u64,
}

impl Latent {
    /// The variant that computes a node, if there is one, for a number of queries per head of k.
    pub(super) fn of(op: &FlashAttn, [k, v]: [&TensorDesc; 2], queries: u32, on: &NodeOnGpu<'_>) -> Option<Latent> {
        let ([dk, positions_heads @ ..], [dv, of_v @ ..]) = (k.ne(), v.ne());
        // Shapes and strides alone do not tell a view of k from another tensor.
        let is_view = on.node.srcs.start_together(1, 2) && positions_heads == of_v && k.nb() == v.nb();
        let has_type = k.dtype() == v.dtype() && matches!(k.dtype(), DType::F16 | DType::BF16);
        // The kernel takes the strides of positions as 32 bits, and divides biases by the scale.
        let fits = u32::try_from(k.nb()[1]).is_ok() && SCALES.contains(&op.scale.abs()) && op.softcap == 0.0;
        let is_usable = is_view && has_type && fits && on.gpu.capability >= MIN_MMA_CAPABILITY;
        if !is_usable || !WIDTHS.contains(&[dk, dv]) {
            return None;
        }
        let rows = if queries <= FEW_ROWS { FEW_ROWS } else { ROWS };
        let latent = Latent { dtype: k.dtype(), channels: dk as u32, values: dv as u32, rows, at_once: 1 };
        let has_room = latent.shared() <= on.gpu.shared_per_block;
        // A multiprocessor has room for the largest block, and keeps a reserve for each.
        let fitting = u64::from((on.gpu.shared_per_block + RESERVED) / (latent.shared() + RESERVED));
        // Registers allow two blocks of few queries.
        let at_once = fitting.min(if rows == FEW_ROWS { 2 } else { 1 });
        has_room.then_some(Latent { at_once, ..latent })
    }

    /// The name of the entry and of its file.
    pub(super) fn entry(self) -> String {
        format!("flash_attn_latent_{}_{}_{}", suffix(self.dtype), self.channels, self.rows)
    }

    /// Bytes of shared memory, as `struct Layout` of the file.
    fn shared(self) -> u32 {
        let tiles = 2 * POSITIONS * 2 * self.channels;
        let parts = if self.rows == ROWS { 12 } else { 4 };
        let scan_words = 8 * THREADS / 32;
        tiles + parts * 8 * THREADS + (16 + 4 + 4) * self.rows + scan_words + 4 * THREADS + 24
    }

    pub(super) fn blocks(self) -> Blocks {
        Blocks {
            log_quads: (self.rows / 4).ilog2(),
            octets: self.values / 8,
            threads: THREADS,
            shared: self.shared(),
            step: POSITIONS,
            min_part: if self.rows == ROWS { MIN_PART } else { FEW_MIN_PART },
            at_once: self.at_once,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        let expected = [("THREADS", THREADS.into()), ("POSITIONS", POSITIONS.into())];
        assert_constants(include_str!("../../../../kernels/flash_attn_latent.cu"), &expected);
    }
}
