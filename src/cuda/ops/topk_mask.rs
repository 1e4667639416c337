//! Launches of TOP_K_MASK: kernels/topk_mask.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported};
use crate::ops::topk_mask::TopkMask;
use crate::tensor::DIMS;
use crate::tensor::DType::{F16, F32};
use bytemuck::{Pod, Zeroable};

/// Threads of a block, which writes a whole row: few rows must do with few blocks.
const THREADS: u32 = 1024;

/// `struct TopkMaskArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TopkMaskArgs {
    mask: Shape,
    y: Shape,
    picks: [u64; DIMS],
    score: [u64; DIMS],
    blocks: [u64; 2],
    extra: [u64; DIMS],
    n_picks: u32,
    limit: u32,
    n_block: u32,
    n_extra: u32,
    size: u32,
    padding: u32,
}

impl KernelArguments for TopkMaskArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [cells, rows @ ..] = self.y.ne;
        let of_rows = |pointer, n, nb| Access::shape(pointer, [n, rows[0], rows[1], rows[2]], nb);
        // Kept cells are below the length of a row of dst; the mask's rows repeat.
        let rows_of_mask: [u32; DIMS] = std::array::from_fn(|d| self.mask.ne[d].min(self.y.ne[d]));
        if self.mask.ne.contains(&0) {
            return Err("an empty mask");
        }
        Ok(vec![
            Access::shape(0, [cells, rows_of_mask[1], rows_of_mask[2], rows_of_mask[3]], self.mask.nb),
            of_rows(1, self.n_picks, self.picks),
            of_rows(2, self.limit, self.score),
            Access::one(3).along(self.n_block, self.blocks[0]).along(self.limit, self.blocks[1]),
            of_rows(4, self.n_extra, self.extra),
            self.y.access(5),
        ])
    }
}

pub(super) fn select(_: TopkMask, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (mask, y) = (on.src(TopkMask::MASK)?, on.dst());
    let optional = |i| on.node.srcs.get(i);
    let [score, blocks, extra] = [TopkMask::SCORE, TopkMask::BLOCKS, TopkMask::EXTRA].map(optional);
    let types = mask.dtype() == y.dtype() && matches!(y.dtype(), F16 | F32);
    if !types || score.is_some_and(|score| score.dtype() != F32) {
        return Err(on.unsupported_types());
    }
    let size = y.dtype().block_bytes() as u32;
    let [score, blocks, extra] = [score, blocks, extra].map(|t| t.map(|t| on.shape(t)).transpose());
    let (score, blocks, extra) = (score?, blocks?, extra?);
    let (mask, picks, y) = (on.shape(mask)?, on.shape(on.src(TopkMask::TOP_K)?)?, on.shape(y)?);
    let nb = |shape: Option<Shape>| shape.map_or([0; DIMS], |shape| shape.nb);
    let limit = blocks.map(|blocks| blocks.ne[1]).or(score.map(|score| score.ne[0])).unwrap_or(y.ne[0]);
    let n_block = blocks.map_or(1, |blocks| blocks.ne[0]);
    let n_extra = extra.map_or(0, |extra| extra.ne[0]);
    let kept = u64::from(picks.ne[0]).saturating_mul(n_block.into()).saturating_add(n_extra.into());
    let rows = on.dst().rows() as u64;
    let [b0, b1, ..] = nb(blocks);
    let args = TopkMaskArgs {
        mask,
        y,
        picks: picks.nb,
        score: nb(score),
        blocks: [b0, b1],
        extra: nb(extra),
        n_picks: picks.ne[0],
        limit,
        n_block,
        n_extra,
        size,
        padding: 0,
    };
    let pointer = |i: usize, is_given: bool| if is_given { Ptr::Src(i as u8) } else { Ptr::Null };
    let pointers = [
        Ptr::Src(TopkMask::MASK as u8),
        Ptr::Src(TopkMask::TOP_K as u8),
        pointer(TopkMask::SCORE, score.is_some()),
        pointer(TopkMask::BLOCKS, blocks.is_some()),
        pointer(TopkMask::EXTRA, extra.is_some()),
        Ptr::Dst,
    ];
    // A block copies the kept cells of a row.
    let loops = [rows.saturating_mul(THREADS.into()), kept.div_ceil(THREADS.into()), 50];
    on.looping_launch(("topk_mask", "topk_mask"), Grid::line(rows, THREADS), (&pointers, &args), loops)
}
