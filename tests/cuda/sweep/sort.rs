//! Cases of ARGSORT and TOP_K.

use super::{Sweep, moe};
use fanout::ops::OutputSpec;
use fanout::ops::sort::Sort;
use fanout::tensor::DType::{F32, I32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Rows of one tile, of several tiles that are merged, and TOP_K of few; rows that share a block, and lengths around multiples
/// of tiles.
pub fn run(sweep: &Sweep) {
    moe::run(sweep);
    for ne in [
        [1, 300, 1, 1],
        [3, 7, 5, 3],
        [128, 9, 1, 1],
        [1000, 2, 1, 2],
        [4096, 1, 1, 1],
        [4097, 2, 1, 1],
        [20_001, 1, 2, 1],
    ] {
        for descending in [false, true] {
            check_case(sweep, Sort::Argsort { descending }, ne, ne[0]);
        }
        for k in [1, ne[0].div_ceil(7), ne[0]] {
            check_case(sweep, Sort::TopK, ne, k);
        }
    }
    // Selection with more candidates than one tile holds.
    check_case(sweep, Sort::TopK, [50_000, 1, 1, 1], 700);
    strided(sweep, [300, 4, 2, 1]);
    strided(sweep, [5000, 2, 1, 1]);
}

/// Many ties, NaNs of both signs, infinities, zeros of both signs.
fn values(n: usize) -> Vec<f32> {
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
    let value = |(i, v): (usize, f32)| match i % 7 {
        0 => special[i / 7 % special.len()],
        1 | 2 => (2.0 * v).round(),
        _ => v,
    };
    normal(5, n).into_iter().enumerate().map(value).collect()
}

#[track_caller]
fn check_case(sweep: &Sweep, op: Sort, ne: [usize; 4], k: usize) {
    let mut case = Case::new();
    let x = case.leaf(F32, ne, &values(ne.iter().product()));
    let y = case.b.node_with_output(op, &[Some(x)], OutputSpec { dtype: I32, ne: [k, ne[1], ne[2], ne[3]] }).unwrap();
    let (case, what) = (case.build(), format!("{op:?} {ne:?} {k}"));
    if op != Sort::TopK {
        return sweep.check_bytes(&case, &[y], &what);
    }
    // The order within TOP_K is free; of equal values, the first ones must be selected.
    let sorted = |values: Vec<f64>| {
        let mut rows: Vec<_> = values.chunks(k).map(<[f64]>::to_vec).collect();
        rows.iter_mut().for_each(|row| row.sort_by(f64::total_cmp));
        rows
    };
    let [want, got] = [&sweep.cpu, &sweep.gpu].map(|on| sorted(case.run(on).values(y)));
    assert!(want == got, "{what}: the indices differ from the CPU's");
}

/// Strided elements and strided indices.
#[track_caller]
fn strided(sweep: &Sweep, ne: [usize; 4]) {
    let [n, m, l, _] = ne;
    let mut case = Case::new();
    let x = TensorDesc::strided(F32, ne, [4 * m, 4, 4 * n * m, 4 * n * m * l]).unwrap();
    let x = case.leaf_with_desc(x, &values(n * m * l));
    let y = TensorDesc::strided(I32, ne, [4, 4 * n + 12, (4 * n + 12) * m, (4 * n + 12) * m * l]).unwrap();
    let y = case.b.leaf_with_desc(y).unwrap();
    let y = case.b.node_into(Sort::Argsort { descending: true }, &[Some(x)], y).unwrap();
    sweep.check_bytes(&case.build(), &[y], &format!("strided {ne:?}"));
}
