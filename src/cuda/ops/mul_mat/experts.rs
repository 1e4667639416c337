//! MUL_MAT_ID with many tokens, on tensor cores. A slot is one expert of one token. `moe_tiles` (kernels/moe.cu) sorts all slots by expert.
//! The GEMM, or for fewer slots the kernels of kernels/mul_mat_mma.cu, which read packed weights, then multiply groups of slots with the
//! weights of their expert, and store each result at its slot. Products of the same columns by the same ids, gate and up, share the table and the
//! converted columns.

use super::super::{Access, Grid, KernelArguments, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Unsupported};
use super::gemm::{self, GemmArgs};
use super::mma::{TiledArgs, quantize_launch, row_blocks, table_bytes, tiled_launch, tiles_bytes};
use super::planes::stride;
use super::{
    MAX_DOT_COLUMNS, MAX_MMA_COLUMNS, MAX_MMA_COLUMNS_K, MMA_TILE_COLUMNS, MulMatArgs, WeightLayout, group_len,
    weight_strides,
};
use crate::cuda::kernel::{ColumnConversion, ColumnTable};
use crate::ops::mul_mat::Precision;
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

/// The kernel that multiplies groups.
#[derive(Clone, Copy)]
enum GroupKernel {
    /// 8-bit codes: tiles of 8 columns per group.
    Tiles(u32),
    /// The GEMM: columns per group.
    Gemm(u32),
}

/// The slots of a node in groups of columns of the same expert.
pub(super) struct ExpertGroups {
    /// The source of the ids.
    ids: u8,
    used: u32,
    slots: u32,
    experts: u32,
    kernel: GroupKernel,
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
        round: Precision,
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
        let sorts = is_even && experts <= MAX_EXPERTS && used <= MAX_USED && slots <= u64::from(MAX_SLOTS);
        if !sorts {
            return Ok(None);
        }
        let groups = |kernel| ExpertGroups { ids, used, slots: slots as u32, experts, kernel, slot_stride };
        if let Some(width) = gemm::width_for_experts(round, a, layout, slots, on)? {
            return Ok(Some(groups(GroupKernel::Gemm(width))));
        }
        let applies = layout == WeightLayout::Packed
            && on.gpu.capability >= MIN_MMA_CAPABILITY
            && on.node.aligned
            && slots > u64::from(MAX_DOT_COLUMNS) * u64::from(experts);
        let tiles = tiles_of_group(slots as u32 / experts.max(1), group_len(a) == 256);
        let groups = groups(GroupKernel::Tiles(tiles));
        let fits = || tiles_bytes(k, group_len(a) as u32, tiles).saturating_mul(groups.count().into()) <= MAX_BYTES;
        Ok((applies && fits()).then_some(groups))
    }

    /// Columns of a group.
    fn width(&self) -> u32 {
        match self.kernel {
            GroupKernel::Tiles(tiles) => MMA_TILE_COLUMNS * tiles,
            GroupKernel::Gemm(width) => width,
        }
    }

    /// A bound of the number of groups: each expert, and the slots without one, may have one group that is not full.
    fn count(&self) -> u32 {
        let experts = (self.experts + 1).min(self.slots);
        (self.slots + experts * (self.width() - 1)) / self.width()
    }

    /// The number of groups if each expert has about as many slots.
    fn likely_count(&self) -> u64 {
        self.slots.div_ceil(self.width()).max(self.experts.min(self.slots)).into()
    }

    /// The launch that writes the table, at a byte offset behind the columns.
    fn table_at(&self, table: u64, on: &NodeOnGpu<'_>) -> Result<ColumnTable, Unsupported> {
        let ids = on.shape(on.src(self.ids.into())?)?;
        let args = MoeTilesArgs {
            table,
            ids: [ids.nb[0], ids.nb[1]],
            experts: self.experts,
            used: self.used,
            slots: self.slots,
            groups: self.count(),
            log2_width: self.width().ilog2(),
            padding: 0,
        };
        let pointers = [Ptr::Src(self.ids), Ptr::Columns, Ptr::ErrorWord];
        let launch = on.launch(("moe", "moe_tiles"), Grid::line(1, TILES_THREADS), &pointers, &args)?;
        Ok(ColumnTable { launch, source: self.ids.into() })
    }

    /// Bytes of the table.
    fn table_bytes(&self) -> u64 {
        table_bytes(self.count(), self.width(), self.slots.into())
    }

    /// The arguments of a product whose columns have these strides, but for `log2_lanes`.
    fn product(
        &self,
        a: &TensorDesc,
        layout: WeightLayout,
        b: [u64; 3],
        on: &NodeOnGpu<'_>,
    ) -> Result<MulMatArgs, Unsupported> {
        let (shape, dst) = (on.shape(a)?, on.shape(on.dst())?);
        let [k, m, ..] = shape.ne;
        let [_, a1, a2, _] = weight_strides(a, &shape, layout);
        Ok(MulMatArgs {
            k,
            m,
            n: self.width(),
            log2_lanes: 0,
            planes: self.count(),
            b2: self.experts,
            r2: self.slots,
            r3: 1,
            a: [a1, a2, 0],
            b,
            dst: [stride(&dst, 0), self.slot_stride, 0, 0],
        })
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
pub(super) fn select(
    a: &TensorDesc,
    layout: WeightLayout,
    groups: &ExpertGroups,
    on: &NodeOnGpu<'_>,
) -> Result<NodeLaunches, Unsupported> {
    match groups.kernel {
        GroupKernel::Tiles(tiles) => by_tiles(a, tiles, groups, on),
        GroupKernel::Gemm(_) => by_gemm(a, layout, groups, on),
    }
}

/// Products of 8-bit codes. The columns are gathered while they are quantised.
fn by_tiles(a: &TensorDesc, tiles: u32, of: &ExpertGroups, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (group, groups, width) = (group_len(a) as u32, of.count(), of.width());
    let group_bytes = tiles_bytes(on.shape(a)?.ne[0], group, tiles);
    let too_large = || on.unsupported("b is too large");
    let table = group_bytes.checked_mul(groups.into()).ok_or_else(too_large)?;
    let bytes = table.checked_add(of.table_bytes()).ok_or_else(too_large)?;
    let b = on.src(1)?;
    // Blocks for the rows, and for the missing columns of groups.
    let rows = b.rows() as u64 + u64::from(groups);
    let quantize = quantize_launch(a, on.shape(b)?, (of.used, tiles), rows, Some((table, groups)), on)?;

    let (in_x, log2_lanes) = row_blocks(a, of.likely_count(), on)?;
    let b = [group_bytes / u64::from(width), group_bytes, 0];
    let product = MulMatArgs { log2_lanes, ..of.product(a, WeightLayout::Packed, b, on)? };
    let launch = tiled_launch(a, tiles, [in_x, 1, groups.into()], &TiledArgs { product, table }, on)?;
    let table = Some(of.table_at(table, on)?);
    let conversion = ColumnConversion { launch: quantize, table, bytes, column: 0, group: None };
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::one(launch) })
}

/// Products of halves. The columns are converted in the order of b; the GEMM gathers them when it stages a tile.
fn by_gemm(
    a: &TensorDesc,
    layout: WeightLayout,
    of: &ExpertGroups,
    on: &NodeOnGpu<'_>,
) -> Result<NodeLaunches, Unsupported> {
    let (conversion, columns) = gemm::convert_columns(a.dtype(), on)?;
    let table = conversion.bytes;
    let bytes = table.checked_add(of.table_bytes()).ok_or_else(|| on.unsupported("b is too large"))?;
    let product = of.product(a, layout, [columns.shape.nb[1], 0, 0], on)?;
    let args = GemmArgs { of: TiledArgs { product, table }, used: of.used, rows: columns.shape.ne[1] };
    let (launch, scratch) = gemm::launch_by_table(a, args, of.likely_count(), on)?;
    let table = Some(of.table_at(table, on)?);
    let conversion = ColumnConversion { table, bytes, column: 0, ..conversion };
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::new(vec![launch], scratch) })
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
        use GroupKernel::{Gemm, Tiles};
        for (slots, experts, kernel) in [
            (1, 1, Tiles(8)),
            (7, 3, Tiles(1)),
            (300, 4, Tiles(2)),
            (65536, 512, Tiles(1)),
            (65536, 1, Gemm(128)),
            (5, 512, Gemm(64)),
        ] {
            let of = ExpertGroups { ids: 2, used: 1, slots, experts, kernel, slot_stride: 4 };
            // One slot in each group but one, as far as there are experts, is the worst.
            let single = experts.min(slots - 1);
            let most = single + (slots - single).div_ceil(of.width());
            assert!(
                most <= of.count() && of.count() <= slots,
                "{slots} slots, {experts} experts, {} columns",
                of.width()
            );
        }
    }

    #[test]
    fn groups_are_wider_for_more_slots_per_expert() {
        let tiles = |is_k| [0, 3, 4, 15, 16, 63, 64, 5000].map(|average| tiles_of_group(average, is_k));
        assert_eq!(tiles(false), [1, 1, 2, 2, 4, 4, 8, 8]);
        assert_eq!(tiles(true), [1, 1, 2, 2, 4, 4, 4, 4]);
    }
}
