//! Cases of CONCAT and REPEAT.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::concat::Concat;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::op_case::Case;

/// Runs of every alignment, longer than the piece of a thread block and shorter than a vector; repeats in all dimensions at
/// once, of rows, single elements and single blocks.
pub fn run(sweep: &Sweep) {
    for (k, &dtype) in DType::ALL.iter().enumerate() {
        for dim in 0..4 {
            for blocks in [1, 8, 70] {
                concat(sweep, dtype, dim, blocks, k % 3);
            }
        }
        for (ne, times) in [
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            ([3, 2, 2, 2], [5, 3, 2, 2]),
            ([1, 3, 2, 1], [70, 2, 1, 3]),
            ([1, 1, 1, 1], [131, 3, 1, 1]),
            ([64, 1, 3, 1], [1, 40, 1, 1]),
            ([1, 5, 1, 2], [1, 1, 7, 1]),
        ] {
            for padding in [0, 1] {
                repeat(sweep, dtype, ne, times, padding);
            }
        }
    }
    for dtype in [DType::I8, DType::F16, DType::F32] {
        concat(sweep, dtype, 0, 9001, 1);
        concat(sweep, dtype, 2, 9001, 0);
    }
    // More repeats than one block handles.
    repeat(sweep, DType::F32, [300, 1, 1, 1], [1, 70, 1, 1], 0);
    repeat(sweep, DType::F16, [8, 5, 1, 1], [1, 1, 100, 1], 0);
}

/// A tensor of random bytes, with its counts in blocks and a gap of `padding` blocks behind each row.
fn noise(case: &mut Case, dtype: DType, [n, n1, n2, n3]: [usize; 4], padding: usize, seed: u64) -> TensorId {
    let (size, len) = (dtype.block_bytes(), dtype.block_len());
    let row = size * (n + padding);
    let desc = TensorDesc::strided(dtype, [n * len, n1, n2, n3], [size, row, row * n1, row * n1 * n2]).unwrap();
    let mut rng = fastrand::Rng::with_seed(seed);
    let bytes = (0..desc.extent()).map(|_| rng.u8(..)).collect();
    let memory = case.raw(DType::I8, [desc.extent(), 1, 1, 1], bytes);
    case.b.view(memory, desc, 0).unwrap()
}

#[track_caller]
fn concat(sweep: &Sweep, dtype: DType, dim: u8, n: usize, padding: usize) {
    let (mut an, mut bn) = ([n, 3, 2, 2], [n, 3, 2, 2]);
    if dim > 0 {
        (an[usize::from(dim)], bn[usize::from(dim)]) = (1, 2);
    } else {
        bn[0] += 5;
    }
    let mut case = Case::new();
    let a = noise(&mut case, dtype, an, padding, 1);
    let b = noise(&mut case, dtype, bn, 0, 2);
    let dst = case.b.node(Concat::Concat { dim }, &[Some(a), Some(b)]).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{dtype} {an:?} {bn:?} along {dim}, {padding} between a's rows"));
}

#[track_caller]
fn repeat(sweep: &Sweep, dtype: DType, ne: [usize; 4], times: [usize; 4], padding: usize) {
    let mut case = Case::new();
    let a = noise(&mut case, dtype, ne, padding, 3);
    let dst = noise(&mut case, dtype, std::array::from_fn(|d| ne[d] * times[d]), padding, 4);
    let dst = case.b.node_into(Concat::Repeat, &[Some(a)], dst).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{dtype} {ne:?}, {times:?} times, {padding} between rows"));
}
