//! TOP_K_MASK: the attention mask of sparse attention, which keeps the cells that an indexer has picked.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// A mask of -inf but for the kept cells, which have the value of a given mask.
///
/// Sources: mask `[n_kv, m1, m2, m3]`, top_k I32 `[n_top, ne1, ne2, ne3]`, and optionally score F32 `[n_pick, ne1, ne2, ne3]`,
/// blocks I32 `[n_blk, n_pick]` and extra I32 `[n_extra, ne1, ne2, ne3]`. dst has the mask's type and the shape
/// `[n_kv, ne1, ne2, ne3]`; each ne is a multiple of the mask's m, and row i reads row `i % m` of the mask.
///
/// The picks of a row are the entries of top_k in `0..n_pick` whose score is above -inf (and not NaN). Pick p keeps cell p, or
/// with blocks the cells `blocks[.., p]`. The cells in extra are kept too. Entries out of range are skipped; they are no error.
/// Without blocks, `n_pick` is the length of a row of score, and without score it is `n_kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopkMask;

impl TopkMask {
    /// Position of the source with the mask.
    pub const MASK: usize = 0;
    /// Position of the picks of each row.
    pub const TOP_K: usize = 1;
    /// Position of the optional scores by which picks count.
    pub const SCORE: usize = 2;
    /// Position of the optional cells of each pick.
    pub const BLOCKS: usize = 3;
    /// Position of the optional cells that are kept without a pick.
    pub const EXTRA: usize = 4;
}

impl OpFamily for TopkMask {
    fn code(&self) -> OpCode {
        OpCode::TopKMask
    }

    fn decode(_: OpCode, _: &OpParams) -> Result<Self, ParamError> {
        Ok(TopkMask)
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let (mask, [_, ne1, ne2, ne3]) = (srcs.required(Self::MASK)?, srcs.required(Self::TOP_K)?.ne());
        Ok(OutputSpec { dtype: mask.dtype(), ne: [mask.ne()[0], ne1, ne2, ne3] })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        let (mask, top_k) = (node.src(Self::MASK)?, node.src(Self::TOP_K)?);
        let (rows, m) = (&top_k.ne()[1..], &mask.ne()[1..]);
        ensure!(node, mask.rows_dense() && node.dst.rows_dense(), "rows of the mask and of dst are dense");
        ensure!(node, top_k.dtype() == DType::I32, "picks are I32");
        ensure!(
            node,
            rows.iter().zip(m).all(|(n, m)| n.is_multiple_of(*m)),
            "the outer counts of the picks are multiples of the mask's"
        );
        let score = node.srcs.get(Self::SCORE);
        if let Some(score) = score {
            ensure!(node, score.ne()[1..] == *rows, "one row of scores for each row of picks");
        }
        if let Some(blocks) = node.srcs.get(Self::BLOCKS) {
            ensure!(node, blocks.dtype() == DType::I32, "cells of blocks are I32");
            ensure!(node, blocks.ne()[2..] == [1, 1], "blocks are [n_blk, n_pick]");
            ensure!(node, score.is_none_or(|score| score.ne()[0] == blocks.ne()[1]), "one block for each score");
        }
        if let Some(extra) = node.srcs.get(Self::EXTRA) {
            ensure!(node, extra.dtype() == DType::I32, "extra cells are I32");
            ensure!(node, extra.ne()[1..] == *rows, "one row of extra cells for each row of picks");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}
