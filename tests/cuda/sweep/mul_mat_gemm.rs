//! Cases of MUL_MAT with many columns, compared with sums in f64.

use super::Sweep;
use super::mul_mat::{blocks, packable, packs};
use fanout::ops::mul_mat::MulMat;
use fanout::tensor::DType::{self, BF16, F16, F32, MXFP4};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};

/// Numbers of columns around those of the tiles.
const COLUMNS: [usize; 8] = [31, 33, 64, 65, 127, 128, 129, 513];

/// Bounds of the NMSE: columns and, for quantised weights, the weights are rounded to F16; to BF16.
const IN_F16: f64 = 3e-6;
const IN_BF16: f64 = 1e-5;
const IN_8_BITS: f64 = 5e-4;

pub(super) fn run(sweep: &Sweep) {
    for t in [F16, BF16] {
        // Rows of whole chunks with an incomplete step; rows at odd multiples of two bytes.
        for (i, n) in COLUMNS.into_iter().enumerate() {
            check(sweep, t, [[264, 135], [301, 70]][i % 2], n, 1.0);
        }
        check(sweep, t, [40, 130], 129, 1e6);
        check(sweep, t, [7, 40], 40, 1e-6);
        // Shares of k that differ; one that ends within a step.
        check(sweep, t, [1704, 140], 70, 1.0);
        check(sweep, t, [4112, 9], 33, 1e6);
    }
    for t in blocks() {
        let least = 96usize.next_multiple_of(t.block_len());
        for (i, n) in COLUMNS.into_iter().enumerate() {
            // Packed types need some weights for that.
            let [k, m] = if packs(t) { packable(t, least) } else { [least, [70, 135][i % 2]] };
            check(sweep, t, [k, m], n, 1.0);
        }
        check(sweep, t, [2048, 131], 70, 1e6);
        // Most types have scales in F16.
        for scale in if t == MXFP4 { [1e30, 1e-12] } else { [1e4, 3e-6] } {
            extreme_weights(sweep, t, scale);
        }
    }
    planes(sweep);
}

/// Weights that are too large for F16, or so small that it has few digits for them; in one row only, or in all.
#[track_caller]
fn extreme_weights(sweep: &Sweep, t: DType, scale: f32) {
    let (k, m, n) = (t.block_len().max(128) * 2, 160, 66);
    for all in [false, true] {
        let factors: Vec<_> = (0..m).map(|r| if all || r == 77 { scale } else { 1.0 }).collect();
        product(sweep, t, k, &factors, &normal(26, k * n), &format!("{t}, weights of {scale:e}, all: {all}"));
    }
}

/// Whether the GEMM computes a product with so many columns.
fn is_gemm(sweep: &Sweep, t: DType, n: usize) -> bool {
    sweep.has_mma && n > if t.is_block() && packs(t) { 64 } else { 32 }
}

/// A product of columns of magnitudes that differ by column, around `scale`.
#[track_caller]
fn check(sweep: &Sweep, t: DType, [k, m]: [usize; 2], n: usize, scale: f32) {
    // Other kernels round to F16 without a scale, or to 8 bits with a scale in F16.
    let magnitude = |c: usize| scale * if is_gemm(sweep, t, n) { 10f32.powi(c as i32 % 13 - 6) } else { 1.0 };
    let columns: Vec<_> = normal(22, k * n).into_iter().enumerate().map(|(i, v)| v * magnitude(i / k)).collect();
    product(sweep, t, k, &vec![1.0; m], &columns, &format!("{t} {k} x {m}, {n} columns of {scale:e}"));
}

/// A product of random rows of weights, each times its factor. The columns must agree, each on its own: the squared errors of a column,
/// with the factors divided out, are compared with the squares of all terms, so that sums whose terms cancel need not be as exact.
#[track_caller]
fn product(sweep: &Sweep, t: DType, k: usize, factors: &[f32], columns: &[f32], what: &str) {
    if !sweep.tally.begin(what) {
        return;
    }
    let (m, n) = (factors.len(), columns.len() / k);
    let weights: Vec<_> = normal(25, k * m).into_iter().enumerate().map(|(i, w)| w * factors[i / k]).collect();
    let mut case = Case::new();
    let a = case.leaf(t, [k, m, 1, 1], &weights);
    let b = case.leaf(F32, [k, n, 1, 1], columns);
    let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    let case = case.build();
    let (weights, columns) = (case.values(a), case.values(b));
    let got = case.run(&sweep.gpu).values(dst);
    // Other kernels round columns to 8 bits for quantised weights.
    let bound = match t {
        BF16 => IN_BF16,
        _ if t == F16 || is_gemm(sweep, t, n) => IN_F16,
        _ => IN_8_BITS,
    };
    for (got, column) in got.chunks_exact(m).zip(columns.chunks_exact(k)) {
        let (mut error, mut power) = (0.0, 0.0);
        for ((row, &got), &factor) in weights.chunks_exact(k).zip(got).zip(factors) {
            let terms = || row.iter().zip(column).map(|(w, x)| w * x / f64::from(factor));
            error += (got / f64::from(factor) - terms().sum::<f64>()).powi(2);
            power += terms().map(|term| term * term).sum::<f64>();
        }
        let nmse = match error {
            0.0 => 0.0,
            _ if error.is_finite() => error / power.max(1e-30),
            _ => f64::INFINITY,
        };
        sweep.tally.compare(nmse, bound, what);
    }
}

/// Planes that share weights, with rows and columns that have gaps; columns of other types.
fn planes(sweep: &Sweep) {
    let compare = |case: &BuiltCase, dst, what: &str| sweep.check(case, &[dst], IN_F16, what);
    for (tb, gap) in [(F32, 16), (F16, 16), (BF16, 16), (F32, 2)] {
        let (k, m, n) = (72, 131, 66);
        let mut case = Case::new();
        let row = 2 * k + gap;
        let desc = TensorDesc::strided(F16, [k, m, 2, 1], [2, row, row * m, 2 * row * m]).unwrap();
        let a = case.leaf_with_desc(desc, &normal(23, 2 * k * m));
        // Columns of neighbouring planes are interleaved, so that planes are not folded into columns.
        let size = tb.block_bytes();
        let desc = TensorDesc::strided(tb, [k, n, 4, 3], [size, 4 * size * k, size * k, 4 * size * k * n]).unwrap();
        let b = case.leaf_with_desc(desc, &super::mul_mat::activations(F16, 24, 12 * k * n));
        let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        compare(&case.build(), dst, &format!("4 x 3 planes of {tb}, rows with gaps of {gap} bytes"));
    }
}
