//! Cases of GET_ROWS and SET_ROWS.

use super::Sweep;
use super::copy::{block_types, noise, permuted, readable_block_types};
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, I64, Q8_0};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

pub fn run(sweep: &Sweep) {
    for dtype in [F32, F16, BF16, I32].into_iter().chain(readable_block_types()) {
        let n = if dtype.is_block() { 2 * dtype.block_len() } else { 33 };
        get(sweep, permuted(dtype, [n, 9, 2, 3], [0, 1, 2, 3], 0), 5, 0);
        get(sweep, permuted(dtype, [n, 9, 2, 3], [0, 2, 1, 3], 1), 5, 3);
        get(sweep, permuted(dtype, [2 * n, 7, 1, 1], [1, 0, 2, 3], 1), 2, 1);
    }
    for dtype in [F32, F16, BF16, I32].into_iter().chain(block_types()) {
        let n = if dtype.is_block() { 2 * dtype.block_len() } else { 33 };
        for (src, ids) in [(F32, I64), (F16, I32)] {
            set(sweep, [n, 6, 2, 3], src, dtype, ids, 11, [2, 1], [0, 1, 2, 3], 0);
            set(sweep, [n, 40, 2, 1], src, dtype, ids, 13, [1, 1], [0, 2, 1, 3], 1);
        }
    }
    // Long rows, in pieces, with every access width.
    for dtype in [F32, F16, BF16] {
        for (n, gap) in [(8200, 0), (9001, 0), (8200, 3)] {
            get(sweep, permuted(dtype, [n, 3, 1, 1], [0, 1, 2, 3], gap), 2, gap);
            set(sweep, [n, 2, 1, 1], F32, dtype, I64, 3, [1, 1], [0, 1, 2, 3], gap);
        }
    }
    // A transposed cache: rows of one element. The last of equal ids is found by scanning and by hashing, with several lists.
    for (r, lists) in [(20, [1, 1]), (700, [1, 1]), (700, [2, 3])] {
        for dtype in [F16, F32] {
            set(sweep, [1, r, 4, 3], F32, dtype, I64, 300, lists, [0, 1, 2, 3], 0);
        }
    }
    set(sweep, [64, 500, 1, 1], F32, Q8_0, I64, 23, [1, 1], [0, 1, 2, 3], 0);
}

fn draw(seed: u64, n: usize, below: usize) -> Vec<i64> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.i64(0..below as i64)).collect()
}

/// GET_ROWS of `k` rows of each matrix of a table, to a destination with gaps.
#[track_caller]
fn get(sweep: &Sweep, table: TensorDesc, k: usize, gap: usize) {
    let (mut case, [n, rows, a2, a3]) = (Case::new(), table.ne());
    let t = case.leaf_with_desc(table, &normal(1, table.elements()));
    let ids = case.indices(I32, [k, a2, a3, 1], &draw(2, k * a2 * a3, rows));
    let dtype = if table.dtype() == I32 { I32 } else { F32 };
    let dst = noise(&mut case, permuted(dtype, [n, k, a2, a3], [0, 1, 2, 3], gap), 0);
    case.b.node_into(Rows::GetRows, &[Some(t), Some(ids)], dst).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{k} rows of {table:?}, gap {gap}"));
}

/// SET_ROWS with random ids; many ids are equal if there are more ids than rows.
#[track_caller]
fn set(
    sweep: &Sweep,
    b: [usize; 4],
    src: DType,
    dtype: DType,
    ids: DType,
    rows: usize,
    lists: [usize; 2],
    order: [usize; 4],
    gap: usize,
) {
    let mut case = Case::new();
    let x = case.leaf_with_desc(permuted(src, b, order, gap), &normal(3, b.iter().product()));
    let list = case.indices(ids, [b[1], lists[0], lists[1], 1], &draw(4, b[1] * lists[0] * lists[1], rows));
    let desc = permuted(dtype, [b[0], rows, b[2], b[3]], [0, 1, 2, 3], gap);
    let cache = case.leaf_with_desc(desc, &normal(5, desc.elements()));
    let dst = case.b.view(cache, desc, 0).unwrap();
    case.b.node_into(Rows::SetRows, &[Some(x), Some(list), Some(cache)], dst).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{b:?} {src} {dtype} {ids} {rows} {lists:?} {order:?} {gap}"));
}
