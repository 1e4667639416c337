//! Launches of the kernels of packed weights on tensor cores: kernels/mul_mat_mma.cu.

use super::super::{
    Access, Grid, KernelArguments, KernelLaunch, MAX_GRID_YZ, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported,
    saturating_product,
};
use super::planes::Planes;
use super::{MMA_ROWS, MMA_TILE_COLUMNS, MulMatArgs, WeightLayout};
use super::{group_len, launch_typed, merged_rows, mul_mat_args, quantize_grid};
use crate::cuda::kernel::ColumnConversion;
use crate::tensor::{DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Warps per block of the kernels for packed weights on tensor cores.
const MMA_WARPS: u32 = 8;

/// Bytes of a tile of 64 and of 256 elements: kernels/common/tiles.cuh.
const TILE32_BYTES: u64 = 704;
const TILE256_BYTES: u64 = 2336;

/// `struct QuantizeTilesArgs` of kernels/mul_mat.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QuantizeTilesArgs {
    pub(super) b: Shape,
    group: u32,
    pairs: u32,
    columns: u32,
    tiles: u32,
    table: u64,
    groups: u32,
    padding: u32,
}

impl KernelArguments for QuantizeTilesArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [k, rows @ ..] = self.b.ne;
        let bytes = if self.table == 0 {
            let planes = saturating_product(&rows) / u64::from(self.columns.max(1));
            tiles_bytes(k, self.group, self.tiles).saturating_mul(planes)
        } else {
            let slots = saturating_product(&[self.columns, self.b.ne[2]]);
            self.table.saturating_add(table_bytes(self.groups, MMA_TILE_COLUMNS * self.tiles, slots))
        };
        Ok(vec![self.b.access(0).unaligned(), Access::bytes(1, bytes)])
    }
}

/// `struct TiledArgs` of kernels/mul_mat_mma.cu. With a table, planes of the product are its groups, of `n` columns each, `b2` is the number
/// of experts, and `r2` that of slots.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TiledArgs {
    pub(super) product: MulMatArgs,
    pub(super) table: u64,
}

impl TiledArgs {
    /// The accesses with a table; `None` without one.
    pub(super) fn table_accesses(&self) -> Option<Vec<Access>> {
        let MulMatArgs { k, m, n, planes, b2, r2, a, dst, .. } = self.product;
        let weights = Access::run(0, &[k]).along(m, a[0]).along(b2, a[1]);
        let columns = Access::bytes(1, self.table.saturating_add(table_bytes(planes, n, r2.into())));
        let result = Access::one(2).along(m, dst[0]).along(r2, dst[1]);
        (self.table != 0).then(|| vec![weights, columns, result])
    }
}

impl KernelArguments for TiledArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        if let Some(accesses) = self.table_accesses() {
            return Ok(accesses);
        }
        let MulMatArgs { planes, b2, b, .. } = self.product;
        let [weights, _, result] = self.product.accesses();
        // The kernels read columns in tiles as whole planes.
        let columns = Access::bytes(1, b[1]).along(b2, b[1]).along(planes.div_ceil(b2.max(1)), b[2]);
        Ok(vec![weights, columns, result])
    }
}

/// Bytes of `tiles` tiles of columns of `k` elements.
pub(super) fn tiles_bytes(k: u32, group: u32, tiles: u32) -> u64 {
    let (steps, bytes) = if group == 256 { (k / 256, TILE256_BYTES) } else { (k.div_ceil(64), TILE32_BYTES) };
    saturating_product(&[steps, tiles]).saturating_mul(bytes)
}

/// Bytes of a table of experts' columns: kernels/common/tiles.cuh.
pub(super) fn table_bytes(groups: u32, width: u32, slots: u64) -> u64 {
    4 * (u64::from(groups) * (1 + u64::from(width)) + slots)
}

/// The launches of the product of packed weights and planes of columns.
pub(super) fn select(
    a: &TensorDesc,
    planes: Planes,
    tiles: u32,
    on: &NodeOnGpu<'_>,
) -> Result<NodeLaunches, Unsupported> {
    let (conversion, planes) = quantize_tiles(a, planes, tiles, on)?;
    let launch = mma_launch(a, &planes, tiles, on)?;
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::one(launch) })
}

/// A launch that quantises b to tiles of columns in scratch memory, and the planes with their strides there. The layout is documented in
/// kernels/mul_mat_mma.cuh.
fn quantize_tiles(
    a: &TensorDesc,
    planes: Planes,
    tiles: u32,
    on: &NodeOnGpu<'_>,
) -> Result<(ColumnConversion, Planes), Unsupported> {
    let (b, group) = (on.src(1)?, group_len(a) as u32);
    let shape = on.shape(b)?;
    // The product reads whole groups of tiles; missing columns are zeros.
    let per_plane = planes.n.div_ceil(MMA_TILE_COLUMNS).next_multiple_of(tiles);
    let plane = tiles_bytes(shape.ne[0], group, per_plane);
    let [b2, b3] = planes.counts.map(u64::from);
    let bytes = plane.checked_mul(b2).and_then(|bytes| bytes.checked_mul(b3));
    let bytes = bytes.ok_or_else(|| on.unsupported("b is too large"))?;
    let columns = (b2 * b3).saturating_mul(u64::from(per_plane * MMA_TILE_COLUMNS));
    let launch = quantize_launch(a, merged_rows(shape), (planes.n, per_plane), columns, None, on)?;
    let tile = if group == 256 { TILE256_BYTES } else { TILE32_BYTES };
    let b = [tile / u64::from(MMA_TILE_COLUMNS), plane, plane * b2];
    Ok((ColumnConversion { launch, table: None, bytes, column: 0, group: None }, Planes { b, ..planes }))
}

/// The launch that quantises rows `b` to tiles, by blocks for `rows` rows. A plane has `of_plane.0` rows in `of_plane.1` tiles, whose missing
/// columns count as rows. With a table, at a byte offset and of so many groups, these are the slots of a token and the tiles of a group.
pub(super) fn quantize_launch(
    a: &TensorDesc,
    b: Shape,
    of_plane: (u32, u32),
    rows: u64,
    table: Option<(u64, u32)>,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let group = group_len(a);
    let (table, groups) = table.unwrap_or_default();
    let args = QuantizeTilesArgs {
        b,
        group: group as u32,
        pairs: u32::from(matches!(a.dtype(), DType::Q8_0 | DType::Q4_K | DType::Q5_K)),
        columns: of_plane.0,
        tiles: of_plane.1,
        table,
        groups,
        padding: 0,
    };
    let grid = quantize_grid(rows, b.ne[0] as usize, group);
    on.launch(("mul_mat", "mul_mat_quantize_tiles"), grid, &[Ptr::Src(1), Ptr::Columns], &args)
}

/// The product of packed weights with tiles of columns.
fn mma_launch(a: &TensorDesc, planes: &Planes, tiles: u32, on: &NodeOnGpu<'_>) -> Result<KernelLaunch, Unsupported> {
    let groups = u64::from(planes.n.div_ceil(tiles * MMA_TILE_COLUMNS));
    let in_z = u64::from(planes.count(on)?);
    let (in_x, log2_split) = row_blocks(a, groups.saturating_mul(in_z), on)?;
    let args = TiledArgs { product: mul_mat_args(a, planes, WeightLayout::Packed, log2_split, on)?, table: 0 };
    tiled_launch(a, tiles, [in_x, groups, in_z], &args, on)
}

/// Blocks for the rows of a if `others` blocks use each row, and the binary logarithm of the parts of k: as few as give each multiprocessor a
/// block, but no more than k has steps.
pub(super) fn row_blocks(a: &TensorDesc, others: u64, on: &NodeOnGpu<'_>) -> Result<(u64, u32), Unsupported> {
    let [k, m, ..] = on.shape(a)?.ne;
    let rows = u64::from(m.div_ceil(MMA_ROWS));
    let in_x = |log2: u32| rows.div_ceil(u64::from(MMA_WARPS >> log2));
    let most = (k / 256).max(1).ilog2().min(MMA_WARPS.ilog2());
    let enough = |&log2: &u32| in_x(log2).saturating_mul(others) >= u64::from(on.gpu.multiprocessors);
    let log2_split = (0..most).find(enough).unwrap_or(most);
    Ok((in_x(log2_split), log2_split))
}

/// The launch of an entry for so many tiles.
pub(super) fn tiled_launch(
    a: &TensorDesc,
    tiles: u32,
    [in_x, in_y, in_z]: [u64; 3],
    args: &TiledArgs,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let grid = Grid::of([in_x, in_y.min(MAX_GRID_YZ), in_z.min(MAX_GRID_YZ)], 32 * MMA_WARPS);
    launch_typed("mma_", &format!("mma{tiles}"), a, grid, &[Ptr::Src(0), Ptr::Columns, Ptr::Dst], args, on)
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::super::{
        GGML_LAYOUT_ROWS, ONLY_READ_ROWS, PACKED_ROWS, PACKED_ROWS_K_EIGHT_COLUMNS, PACKED_ROWS_ONE_COLUMN, VEC_THREADS,
    };
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [("TILE32_BYTES", TILE32_BYTES), ("TILE256_BYTES", TILE256_BYTES)];
        assert_constants(include_str!("../../../../kernels/common/tiles.cuh"), &expected);
        let expected = [("MMA_ROWS", MMA_ROWS.into()), ("MMA_THREADS", u64::from(32 * MMA_WARPS))];
        assert_constants(include_str!("../../../../kernels/mul_mat_mma.cu"), &expected);
        let expected = [("THREADS", VEC_THREADS.into()), ("ROWS_PER_GROUP", GGML_LAYOUT_ROWS as u64)];
        assert_constants(include_str!("../../../../kernels/mul_mat_common.cuh"), &expected);
        let expected = [("ROWS_PER_GROUP", ONLY_READ_ROWS as u64)];
        assert_constants(include_str!("../../../../kernels/mul_mat_unpacked.cu"), &expected);
        let expected = [
            ("PACKED_ROWS", PACKED_ROWS as u64),
            ("PACKED_ROWS_ONE_COLUMN", PACKED_ROWS_ONE_COLUMN as u64),
            ("PACKED_ROWS_K_EIGHT_COLUMNS", PACKED_ROWS_K_EIGHT_COLUMNS as u64),
        ];
        assert_constants(include_str!("../../../../kernels/mul_mat_packed.cu"), &expected);
        assert_constants(include_str!("../../../../kernels/mul_mat_half.cu"), &[("HALF_ROWS", MMA_ROWS.into())]);
    }
}
