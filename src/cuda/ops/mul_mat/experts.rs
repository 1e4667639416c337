//! MUL_MAT_ID of packed weights with many tokens, on tensor cores. A slot is one expert of one token. `moe_tiles` (kernels/moe.cu) sorts all
//! slots by expert; the kernels of kernels/mul_mat_mma.cu then multiply groups of slots with the weights of their expert, and store each
//! result at its slot. Products of the same columns by the same ids, gate and up, share the table and the quantised columns.

use super::super::{Access, Grid, KernelArguments, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Unsupported};
use super::mma::{TiledArgs, quantize_launch, row_blocks, table_bytes, tiled_launch, tiles_bytes};
use super::planes::stride;
use super::{
    MAX_DOT_COLUMNS, MAX_MMA_COLUMNS, MAX_MMA_COLUMNS_K, MMA_TILE_COLUMNS, MulMatArgs, WeightLayout, group_len,
    weight_strides,
};
use crate::cuda::kernel::{ColumnConversion, ColumnTable};
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// Limits of `moe_tiles`, and its threads.
const MAX_EXPERTS: u32 = 512;
const MAX_SLOTS: u32 = 65536;
/// Most experts of a token: a warp stores a quantised row of b for all of them, one after the other. Models have at most 16.
const MAX_USED: u32 = 64;
/// Limit of the quantised columns, which have k elements for each slot, also if b has one row.
const MAX_BYTES: u64 = 512 << 20;
const TILES_THREADS: u32 = 1024;

/// `struct MoeTilesArgs` of kernels/moe.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MoeTilesArgs {
    table: u64,
    ids: [u64; 2],
    experts: u32,
    used: u32,
    slots: u32,
    groups: u32,
    log2_width: u32,
    padding: u32,
}

impl KernelArguments for MoeTilesArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let &MoeTilesArgs { table, ids, used, slots, groups, log2_width, .. } = self;
        let tokens = slots / used.max(1);
        let bytes = table.saturating_add(table_bytes(groups, 1 << log2_width, slots.into()));
        Ok(vec![Access::one(0).along(used, ids[0]).along(tokens, ids[1]), Access::bytes(1, bytes)])
    }
}

/// The slots of a node in groups of columns of the same expert.
pub(super) struct ExpertGroups {
    /// The source of the ids.
    ids: u8,
    used: u32,
    slots: u32,
    experts: u32,
    /// Tiles of 8 columns per group.
    tiles: u32,
    /// Bytes between the results of slots.
    slot_stride: u64,
}

impl ExpertGroups {
    /// `None` if other kernels multiply slot by slot.
    ///
    /// As for the columns of a plain product, tensor cores pay off with more than two slots per expert, on average over all experts: for
    /// Q4_K, a group of 8 columns takes 1.57 instructions per weight in the main loop, and the vector kernel 1.2 for each slot. With fewer
    /// slots, that kernel also computes gate, up and GLU in one launch instead of five.
    pub(super) fn of(
        a: &TensorDesc,
        ids: u8,
        layout: WeightLayout,
        on: &NodeOnGpu<'_>,
    ) -> Result<Option<ExpertGroups>, Unsupported> {
        let ([k, _, experts, _], dst) = (on.shape(a)?.ne, on.shape(on.dst())?);
        let [used, tokens, ..] = on.shape(on.src(ids.into())?)?.ne;
        let slots = u64::from(used) * u64::from(tokens);
        let slot_stride = if used == 1 { stride(&dst, 2) } else { stride(&dst, 1) };
        let is_even = used == 1 || tokens == 1 || dst.nb[2] == u64::from(used) * dst.nb[1];
        let applies = layout == WeightLayout::Packed
            && on.gpu.capability >= MIN_MMA_CAPABILITY
            && on.node.aligned
            && is_even
            && experts <= MAX_EXPERTS
            && used <= MAX_USED
            && slots <= u64::from(MAX_SLOTS)
            && slots > u64::from(MAX_DOT_COLUMNS) * u64::from(experts);
        let tiles = tiles_of_group(slots as u32 / experts.max(1), group_len(a) == 256);
        let groups = ExpertGroups { ids, used, slots: slots as u32, experts, tiles, slot_stride };
        let fits = || tiles_bytes(k, group_len(a) as u32, tiles).saturating_mul(groups.count().into()) <= MAX_BYTES;
        Ok((applies && fits()).then_some(groups))
    }

    /// Columns of a group.
    fn width(&self) -> u32 {
        MMA_TILE_COLUMNS * self.tiles
    }

    /// A bound of the number of groups: each expert, and the slots without one, may have one group that is not full.
    fn count(&self) -> u32 {
        let experts = (self.experts + 1).min(self.slots);
        (self.slots + experts * (self.width() - 1)) / self.width()
    }
}

/// Tiles of a group if experts have `average` slots on average. More tiles share the decoded weights, and leave more columns of an expert's
/// last group missing: half of a group on average. Decoding takes about twice the instructions of a tile, so the sum is least for about
/// the square root of half the average.
fn tiles_of_group(average: u32, is_k_type: bool) -> u32 {
    let most = if is_k_type { MAX_MMA_COLUMNS_K } else { MAX_MMA_COLUMNS } / MMA_TILE_COLUMNS;
    match average {
        0..4 => 1,
        4..16 => 2,
        16..64 => 4,
        _ => 8,
    }
    .min(most)
}

/// The launches of the product by groups.
pub(super) fn select(a: &TensorDesc, of: &ExpertGroups, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (shape, ids, dst) = (on.shape(a)?, on.shape(on.src(of.ids.into())?)?, on.shape(on.dst())?);
    let ([k, m, ..], group, groups, width) = (shape.ne, group_len(a) as u32, of.count(), of.width());
    let group_bytes = tiles_bytes(k, group, of.tiles);
    let too_large = || on.unsupported("b is too large");
    let table = group_bytes.checked_mul(groups.into()).ok_or_else(too_large)?;
    let bytes = table.checked_add(table_bytes(groups, width, of.slots.into())).ok_or_else(too_large)?;
    let ExpertGroups { used, slots, experts, tiles, slot_stride, .. } = *of;

    let args = MoeTilesArgs {
        table,
        ids: [ids.nb[0], ids.nb[1]],
        experts,
        used,
        slots,
        groups,
        log2_width: width.ilog2(),
        padding: 0,
    };
    let pointers = [Ptr::Src(of.ids), Ptr::Columns, Ptr::ErrorWord];
    let sort = on.launch(("moe", "moe_tiles"), Grid::line(1, TILES_THREADS), &pointers, &args)?;
    let b = on.src(1)?;
    // Blocks for the rows, and for the missing columns of groups.
    let rows = b.rows() as u64 + u64::from(groups);
    let quantize = quantize_launch(a, on.shape(b)?, (used, tiles), rows, Some((table, groups)), on)?;

    // Most groups that have an expert.
    let others = u64::from(slots.div_ceil(width).max(experts.min(slots)));
    let (in_x, log2_lanes) = row_blocks(a, others, on)?;
    let [_, a1, a2, _] = weight_strides(a, &shape, WeightLayout::Packed);
    let product = MulMatArgs {
        k,
        m,
        n: width,
        log2_lanes,
        planes: groups,
        b2: experts,
        r2: slots,
        r3: 1,
        a: [a1, a2, 0],
        b: [group_bytes / u64::from(width), group_bytes, 0],
        dst: [stride(&dst, 0), slot_stride, 0, 0],
    };
    let launch = tiled_launch(a, tiles, [in_x, 1, groups.into()], &TiledArgs { product, table }, on)?;
    let table = Some(ColumnTable { launch: sort, source: of.ids.into() });
    let conversion = ColumnConversion { launch: quantize, table, bytes, column: 0, group: None };
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::one(launch) })
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [("TILES_THREADS", TILES_THREADS.into()), ("MAX_TILED_EXPERTS", MAX_EXPERTS.into())];
        assert_constants(include_str!("../../../../kernels/moe.cu"), &expected);
    }

    /// The number of groups of any distribution of the slots is within the bound.
    #[test]
    fn groups_of_any_slots_are_within_the_bound() {
        for (slots, experts, tiles) in [(1, 1, 8), (7, 3, 1), (300, 4, 2), (65536, 512, 1), (65536, 1, 8), (5, 512, 4)]
        {
            let of = ExpertGroups { ids: 2, used: 1, slots, experts, tiles, slot_stride: 4 };
            // One slot in each group but one, as far as there are experts, is the worst.
            let single = experts.min(slots - 1);
            let most = single + (slots - single).div_ceil(of.width());
            assert!(most <= of.count() && of.count() <= slots, "{slots} slots, {experts} experts, {tiles} tiles");
        }
    }

    #[test]
    fn groups_are_wider_for_more_slots_per_expert() {
        let tiles = |is_k| [0, 3, 4, 15, 16, 63, 64, 5000].map(|average| tiles_of_group(average, is_k));
        assert_eq!(tiles(false), [1, 1, 2, 2, 4, 4, 8, 8]);
        assert_eq!(tiles(true), [1, 1, 2, 2, 4, 4, 4, 4]);
    }
}
