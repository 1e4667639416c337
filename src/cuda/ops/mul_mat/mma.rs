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
struct QuantizeTilesArgs {
    b: Shape,
    group: u32,
    pairs: u32,
    columns: u32,
    tiles: u32,
}

impl KernelArguments for QuantizeTilesArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [k, rows @ ..] = self.b.ne;
        let steps = if self.group == 256 { (k / 256, TILE256_BYTES) } else { (k.div_ceil(64), TILE32_BYTES) };
        let planes = saturating_product(&rows) / u64::from(self.columns.max(1));
        let bytes = saturating_product(&[steps.0, self.tiles]).saturating_mul(steps.1).saturating_mul(planes);
        Ok(vec![self.b.access(0).unaligned(), Access::bytes(1, bytes)])
    }
}

/// `struct MulMatArgs` with columns in tiles, which the kernels read as whole planes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
struct TiledArgs(MulMatArgs);

impl KernelArguments for TiledArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let MulMatArgs { planes, b2, b, .. } = self.0;
        let [weights, _, result] = self.0.accesses();
        let columns = Access::bytes(1, b[1]).along(b2, b[1]).along(planes.div_ceil(b2.max(1)), b[2]);
        Ok(vec![weights, columns, result])
    }
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
    let (b, group) = (on.src(1)?, group_len(a));
    let k = b.ne()[0];
    let (steps, tile_bytes) = if group == 256 { (k / 256, TILE256_BYTES) } else { (k.div_ceil(64), TILE32_BYTES) };
    // The product reads whole groups of tiles; missing columns are zeros.
    let per_plane = planes.n.div_ceil(MMA_TILE_COLUMNS).next_multiple_of(tiles);
    let plane = (steps as u64 * tile_bytes).checked_mul(u64::from(per_plane));
    let [b2, b3] = planes.counts.map(u64::from);
    let bytes = plane.and_then(|plane| plane.checked_mul(b2)?.checked_mul(b3));
    let (plane, bytes) = plane.zip(bytes).ok_or_else(|| on.unsupported("b is too large"))?;
    let args = QuantizeTilesArgs {
        b: merged_rows(on.shape(b)?),
        group: group as u32,
        pairs: u32::from(matches!(a.dtype(), DType::Q8_0 | DType::Q4_K | DType::Q5_K)),
        columns: planes.n,
        tiles: per_plane,
    };
    let pointers = [Ptr::Src(1), Ptr::Columns];
    let columns = (b2 * b3).saturating_mul(u64::from(per_plane * MMA_TILE_COLUMNS));
    let grid = quantize_grid(columns, k, group);
    let launch = on.launch(("mul_mat", "mul_mat_quantize_tiles"), grid, &pointers, &args)?;
    let b = [tile_bytes / u64::from(MMA_TILE_COLUMNS), plane, plane * b2];
    Ok((ColumnConversion { launch, bytes, column: 0, group: None }, Planes { b, ..planes }))
}

/// The product of packed weights with tiles of columns.
fn mma_launch(a: &TensorDesc, planes: &Planes, tiles: u32, on: &NodeOnGpu<'_>) -> Result<KernelLaunch, Unsupported> {
    let [k, m, ..] = on.shape(a)?.ne;
    let groups = u64::from(planes.n.div_ceil(tiles * MMA_TILE_COLUMNS));
    let in_z = planes.count(on)?;
    let rows = u64::from(m.div_ceil(MMA_ROWS));
    let others = groups.saturating_mul(u64::from(in_z));
    // As few parts of k as give each multiprocessor a block, but no more than k has steps.
    let in_x = |log2: u32| rows.div_ceil(u64::from(MMA_WARPS >> log2));
    let most = (k / 256).max(1).ilog2().min(MMA_WARPS.ilog2());
    let enough = |&log2: &u32| in_x(log2).saturating_mul(others) >= u64::from(on.gpu.multiprocessors);
    let log2_split = (0..most).find(enough).unwrap_or(most);
    let args = TiledArgs(mul_mat_args(a, planes, WeightLayout::Packed, log2_split, on)?);
    let grid = Grid::of([in_x(log2_split), groups.min(MAX_GRID_YZ), u64::from(in_z).min(MAX_GRID_YZ)], 32 * MMA_WARPS);
    launch_typed("mma_", &format!("mma{tiles}"), a, grid, &[Ptr::Src(0), Ptr::Columns, Ptr::Dst], &args, on)
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
