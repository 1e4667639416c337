//! MUL_MAT of many columns with weights that are never repacked: rows are dequantised to F16 in scratch memory, a piece at a time, and
//! multiplied by the tiled kernels of F16.
//!
//! Tiled kernels of each of these types would take more PTX than all of their other kernels. F16 has as many bits as tf32, to which
//! the tiles of other types round weights; but as in llama.cpp's CUDA backend, a weight beyond its range (65504) becomes infinite.

use super::copy::dequantize_rows;
use super::mul_mat::planes::Planes;
use super::mul_mat::{ColumnForm, WeightLayout, Weights, convert_columns, mul_mat_launch};
use super::{MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Unsupported};
use crate::tensor::{Capability, DType, TensorDesc};

/// Bytes of dequantised weights in scratch memory, unless 128 rows are larger: they stay in the L2 cache of a server GPU.
const PIECE_BYTES: usize = 32 << 20;

/// Rows of the highest tile. Pieces are multiples of it.
const TILE_ROWS: usize = 128;

/// Fewest columns. Writing and reading the dequantised weights, and a pass of the tiled kernels, cost about as much as this many columns
/// in the vector kernels. Fewer columns of F16 do not use the tiles, and round the activations again.
const MIN_COLUMNS: u32 = 33;

/// Whether the product of `a` and `b` takes this path. Several matrices (batches) do not: their products rarely have many columns each.
pub(super) fn applies(a: &TensorDesc, b: &TensorDesc, on: &NodeOnGpu<'_>) -> Result<bool, Unsupported> {
    let never_packed = a.dtype().is_block() && !a.dtype().can(Capability::Cuda);
    let one_matrix = a.ne()[2] * a.ne()[3] == 1;
    Ok(never_packed
        && one_matrix
        && on.gpu.capability >= MIN_MMA_CAPABILITY
        && Planes::of_scratch(a, b, on)?.n >= MIN_COLUMNS)
}

/// The launches of the product of `a` and `b`.
pub(super) fn select(a: &TensorDesc, b: &TensorDesc, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (conversion, columns) = convert_columns(a, b, ColumnForm::Rounded, on)?;
    let [k, m, ..] = a.ne();
    let row = DType::F16.row_bytes(k).ok_or_else(|| on.unsupported("rows are too long in F16"))?;
    let most = (PIECE_BYTES / row / TILE_ROWS).max(1) * TILE_ROWS;
    let mut launches = Vec::new();
    for first in (0..m).step_by(most) {
        let rows = most.min(m - first);
        let piece = TensorDesc::contiguous(DType::F16, [k, rows, 1, 1]).map_err(|e| on.unsupported(e.to_string()))?;
        launches.push(dequantize_rows(on, a, first, (Ptr::Scratch(0), &piece))?);
        let weights = Weights { desc: &piece, at: Ptr::Scratch(0), layout: WeightLayout::Ggml };
        let dst = Ptr::DstAt((first * on.dst().nb()[0]) as u64);
        launches.push(mul_mat_launch(&weights, &columns, dst, on)?);
    }
    let scratch = (row * most.min(m)) as u64;
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::new(launches, scratch) })
}

#[cfg(test)]
mod tests {
    use super::super::select as select_node;
    use crate::cuda::driver::Gpu;
    use crate::cuda::kernel::Ptr;
    use crate::ops::mul_mat::MulMat;
    use crate::ops::{NodeView, Op, Sources};
    use crate::tensor::{DType, TensorDesc};

    /// Kernel names and the offsets of their operands in weights and destination, of a product of `n` columns.
    fn launches(capability: u32, [k, m, n]: [usize; 3]) -> Vec<(&'static str, u64)> {
        let contiguous = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
        let a = contiguous(DType::IQ4_XS, [k, m, 1, 1]);
        let (b, dst) = (contiguous(DType::F32, [k, n, 1, 1]), contiguous(DType::F32, [m, n, 1, 1]));
        let op = Op::MulMat(MulMat::PLAIN);
        let node = NodeView { op: &op, dst: &dst, srcs: Sources::new(op.code(), &[Some(&a), Some(&b)]), aligned: true };
        let kernel = select_node(&node, &Gpu::with_capability(capability)).unwrap();
        let offset = |pointers: &[Ptr]| {
            let offsets = pointers.iter().filter_map(|pointer| match *pointer {
                Ptr::SrcAt(_, offset) | Ptr::DstAt(offset) => Some(offset),
                _ => None,
            });
            offsets.sum()
        };
        let conversion = kernel.columns.map(|conversion| conversion.launch);
        conversion
            .iter()
            .chain(&kernel.launches)
            .map(|launch| (launch.entry().name, offset(&launch.pointers)))
            .collect()
    }

    #[test]
    fn pieces_cover_the_rows() {
        // 136 bytes for 256 weights; 32 MiB of F16 are 1152 rows.
        let row = 14336 / 256 * 136;
        let (dequantize, product) = ("copy_from_iq4_xs", "mul_mat_tile64_f16");
        let want = [("mul_mat_round", 0), (dequantize, 0), (product, 0), (dequantize, 1152 * row), (product, 4 * 1152)];
        assert_eq!(launches(90, [14336, 1200, 33]), want);
    }

    #[test]
    fn few_columns_and_old_gpus_use_the_vector_kernels() {
        for (capability, n) in [(90, 32), (75, 512)] {
            assert_eq!(launches(capability, [1024, 64, n]), [("mul_mat_quantize", 0), ("mul_mat_vec4_iq4_xs", 0)]);
        }
    }
}
