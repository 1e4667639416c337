//! Cases of CPY, CONT and DUP: copies, conversions, permutations and quantisation.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::copy::CopyOp;
use fanout::tensor::DType::{self, BF16, F16, F32, I8, I16, I32, I64, Q4_0, Q8_0};
use fanout::tensor::{Capability, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// The block types with quantising and dequantising kernels.
pub fn block_types() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::Cuda).filter(|t| t.is_block())
}

/// The block types with dequantising kernels.
pub fn readable_block_types() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::CudaRead).filter(|t| t.is_block())
}

/// A permuted layout: dimension `order[0]` has the smallest stride, then `order[1]` and so on, with `gap` unused blocks behind
/// each row of `order[0]`.
pub fn permuted(dtype: DType, ne: [usize; 4], order: [usize; 4], gap: usize) -> TensorDesc {
    let blocks = [ne[0] / dtype.block_len(), ne[1], ne[2], ne[3]];
    let (mut nb, mut step) = ([0; 4], dtype.block_bytes());
    for (k, d) in order.into_iter().enumerate() {
        nb[d] = step;
        step *= blocks[d];
        if k == 0 {
            step += gap * dtype.block_bytes();
        }
    }
    TensorDesc::strided(dtype, ne, nb).unwrap()
}

/// A tensor of random bytes that starts at byte `offset` of its memory.
pub fn noise(case: &mut Case, desc: TensorDesc, offset: usize) -> TensorId {
    let mut rng = fastrand::Rng::with_seed(desc.extent() as u64);
    let bytes = (0..offset + desc.extent()).map(|_| rng.u8(..)).collect();
    let memory = case.raw(I8, [offset + desc.extent(), 1, 1, 1], bytes);
    case.b.view(memory, desc, offset).unwrap()
}

pub fn run(sweep: &Sweep) {
    copies_without_conversion(sweep);
    conversions(sweep);
    permutations(sweep);
    changed_shapes(sweep);
    quantising_copies(sweep);
}

#[track_caller]
fn raw(sweep: &Sweep, src: (TensorDesc, usize), dst: (TensorDesc, usize)) {
    let mut case = Case::new();
    let x = noise(&mut case, src.0, src.1);
    let y = noise(&mut case, dst.0, dst.1);
    case.b.node_into(CopyOp::Cpy, &[Some(x)], y).unwrap();
    sweep.check_bytes(&case.build(), &[y], &format!("{src:?} -> {dst:?}"));
}

/// Copies without conversion: every type; every access width, with remainders; one row of many pieces, long and short rows.
fn copies_without_conversion(sweep: &Sweep) {
    for &dtype in DType::ALL {
        let ne = [3 * dtype.block_len(), 5, 2, 1];
        raw(sweep, (permuted(dtype, ne, [0, 1, 2, 3], 0), 0), (permuted(dtype, ne, [0, 2, 1, 3], 1), 0));
        raw(sweep, (permuted(dtype, ne, [1, 0, 2, 3], 0), 0), (permuted(dtype, ne, [0, 1, 2, 3], 0), 0));
    }
    let plain = |dtype, ne, gap| permuted(dtype, ne, [0, 1, 2, 3], gap);
    for (dtype, offsets) in [
        (I8, [(0, 0), (1, 0), (3, 16), (16, 1)]),
        (F16, [(0, 0), (2, 0), (6, 2), (16, 8)]),
        (F32, [(0, 0), (4, 0), (8, 24), (4, 4)]),
        (I64, [(0, 0), (8, 0), (8, 8), (0, 16)]),
    ] {
        for (x, y) in offsets {
            raw(sweep, (plain(dtype, [40_013, 1, 1, 1], 0), x), (plain(dtype, [40_013, 1, 1, 1], 0), y));
            raw(sweep, (plain(dtype, [33, 21, 3, 2], 3), x), (plain(dtype, [33, 21, 3, 2], 0), y));
            raw(sweep, (plain(dtype, [515, 3, 1, 1], 5), x), (plain(dtype, [515, 3, 1, 1], 13), y));
        }
    }
}

#[track_caller]
fn convert(sweep: &Sweep, src: TensorDesc, to: DType, ne: [usize; 4], dst: Option<TensorDesc>) {
    let mut case = Case::new();
    let values: Vec<f32> = normal(3, src.elements()).into_iter().map(|v| 100.0 * v).collect();
    let x = case.leaf_with_desc(src, &values);
    let y = match dst {
        Some(desc) => {
            let y = noise(&mut case, desc, 0);
            case.b.node_into(CopyOp::Cpy, &[Some(x)], y).unwrap();
            y
        }
        None => case.b.node_with_output(CopyOp::Cpy, &[Some(x)], OutputSpec { dtype: to, ne }).unwrap(),
    };
    sweep.check_bytes(&case.build(), &[y], &format!("{src:?} -> {to} {ne:?} {dst:?}"));
}

/// Every pair of plain types: contiguous, rows with gaps, transposed, and element by element.
fn conversions(sweep: &Sweep) {
    let pairs = [F32, F16, BF16]
        .into_iter()
        .flat_map(|from| [F32, F16, BF16, I32].map(|to| (from, to)))
        .filter(|(from, to)| from != to)
        .chain([(I32, F32)]);
    for (from, to) in pairs {
        for (ne, order, gap) in [
            ([9001, 1, 1, 1], [0, 1, 2, 3], 0),
            ([64, 5, 3, 1], [0, 1, 2, 3], 8),
            ([33, 5, 3, 2], [0, 2, 1, 3], 1),
            ([40, 37, 2, 1], [1, 0, 2, 3], 0),
            ([3, 50, 2, 2], [1, 0, 2, 3], 1),
        ] {
            convert(sweep, permuted(from, ne, order, gap), to, ne, None);
            convert(sweep, permuted(from, ne, order, gap), to, ne, Some(permuted(to, ne, [0, 1, 2, 3], 4)));
        }
        convert(sweep, permuted(from, [5, 7, 11, 3], [0, 1, 2, 3], 1), to, [3, 11, 7, 5], None);
    }
}

/// Every element size through tiles, with partial tiles at the edges; and permutations that are not transposes.
fn permutations(sweep: &Sweep) {
    for dtype in [I8, F16, I16, F32, I64] {
        for ne in [[70, 45, 2, 3], [8, 100, 1, 1], [129, 8, 3, 1], [32, 32, 2, 1]] {
            for order in [[1, 0, 2, 3], [2, 1, 0, 3], [3, 1, 2, 0], [0, 2, 1, 3], [1, 2, 0, 3]] {
                let to = permuted(dtype, ne, [0, 1, 2, 3], 0);
                raw(sweep, (permuted(dtype, ne, order, 0), 0), (to, 0));
                raw(sweep, (to, 0), (permuted(dtype, ne, order, 1), 0));
            }
        }
    }
}

/// Source and destination of different shapes, with rows that end at different elements.
fn changed_shapes(sweep: &Sweep) {
    for (dtype, from, to) in [
        (I8, [5, 7, 11, 13], [13, 11, 7, 5]),
        (F32, [6, 10, 15, 7], [4, 9, 25, 7]),
        (Q8_0, [64, 6, 5, 1], [96, 4, 5, 1]),
        (Q4_0, [160, 3, 2, 1], [96, 5, 2, 1]),
        (DType::Q8_1, [96, 5, 1, 1], [160, 3, 1, 1]),
        (DType::MXFP4, [96, 5, 1, 1], [160, 3, 1, 1]),
    ] {
        for order in [[0, 1, 2, 3], [1, 0, 2, 3]] {
            raw(sweep, (permuted(dtype, from, order, 1), 0), (permuted(dtype, to, [0, 1, 2, 3], 1), 0));
        }
    }
}

/// Quantisation and dequantisation: contiguous with a partial thread block, strided rows on either side, strided elements, and
/// changed shapes.
fn quantising_copies(sweep: &Sweep) {
    for dtype in block_types() {
        let n = dtype.block_len();
        let ne = [2 * n, 3, 2, 1];
        let packed = [0, 1, 2, 3];
        for float in [F32, F16, BF16] {
            let dst = permuted(dtype, ne, [0, 2, 1, 3], 1);
            convert(sweep, permuted(float, ne, packed, 0), dtype, [4 * n, 3, 1, 1], None);
            convert(sweep, permuted(float, ne, packed, 1), dtype, ne, Some(dst));
        }
        convert(sweep, permuted(F32, ne, [1, 0, 2, 3], 0), dtype, ne, None);
        let many = [n, if n == 32 { 131 } else { 33 }, 1, 1];
        convert(sweep, permuted(F32, many, packed, 0), dtype, many, None);
    }
    for dtype in readable_block_types() {
        let n = dtype.block_len();
        let ne = [2 * n, 3, 2, 1];
        let packed = [0, 1, 2, 3];
        for float in [F32, F16, BF16] {
            convert(sweep, permuted(dtype, ne, packed, 0), float, [n, 12, 1, 1], None);
            convert(sweep, permuted(dtype, ne, [1, 0, 2, 3], 1), float, ne, Some(permuted(float, ne, packed, 3)));
        }
        convert(sweep, permuted(dtype, ne, packed, 0), F32, ne, Some(permuted(F32, ne, [1, 2, 0, 3], 0)));
    }
}
