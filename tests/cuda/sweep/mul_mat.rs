//! Cases of MUL_MAT and MUL_MAT_ID.

use super::{Sweep, mul_mat_fused, mul_mat_gemm, mul_mat_id};
use fanout::device::DeviceError;
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use fanout::ops::mul_mat::{MulMat, NO_EXPERT};
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, Q4_0, Q6_K};
use fanout::tensor::{Capability, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};

/// The plain float types.
fn floats() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|t| t.is_float())
}

/// The block types with CUDA kernels.
pub(super) fn blocks() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::CudaRead).filter(|t| t.is_block())
}

/// Whether the device repacks weights of a block type. The others have no tiled kernels.
pub(super) fn packs(t: DType) -> bool {
    t.can(Capability::Cuda)
}

/// Bounds of the NMSE: f32 products; three tf32 products (about as accurate); products of halves, whose sums the tensor cores truncate; with
/// weights rounded to F16.
const IN_F32: f64 = 1e-12;
const IN_THREE: f64 = 1e-11;
const IN_HALVES: f64 = 1e-11;
const IN_F16: f64 = 1e-6;

pub fn run(sweep: &Sweep) {
    mul_mat_id::run(sweep);
    for t in floats().chain(blocks()) {
        let one = t.block_len().max(8);
        for (k, m, n) in [(one, 1, 1), (5 * one, 9, 2), (3 * one, 30, 3), (9 * one, 7, 8), (3 * one, 70, 21)] {
            contiguous(sweep, t, [k, m, 1, 1], F32, [k, n, 1, 1]);
        }
        // Rows that are shared by several warps.
        contiguous(sweep, t, [1536, 11, 1, 1], F32, [1536, 1, 1, 1]);
        contiguous(sweep, t, [1536, 11, 1, 1], F32, [1536, 6, 1, 1]);
        // Enough planes for large tiles of plain types, with one partial tile; gaps between rows keep weights in ggml's layout.
        let n = if t.is_block() { 9 } else { 33 };
        permuted(sweep, t, [one, 144, 110], 0, [one, n, 110]);
        permuted(sweep, t, [one, 130, 110], t.block_bytes(), [one, n, 110]);
        unaligned_rows(sweep, t);
        experts(sweep, t);
        expert_id_out_of_range(sweep, t);
    }
    for t in blocks().filter(|&t| packs(t)) {
        for n in [1, 2, 3, 7, 9, 20, 60, 70] {
            packed(sweep, t, packable(t, 3 * t.block_len().max(128)), n);
        }
        // Numbers of blocks that are no multiple of what a warp multiplies at a time.
        for n in [1, 6, 13] {
            packed(sweep, t, packable(t, 5 * t.block_len()), n);
        }
        packed_experts(sweep, t);
    }
    for t in floats() {
        // Lengths that are not multiples of 8, and rows that are not multiples of 16 bytes.
        for (k, m, n) in [(1, 3, 1), (37, 5, 2), (300, 6, 5), (37, 70, 70), (301, 5, 12), (4, 66, 9)] {
            contiguous(sweep, t, [k, m, 1, 1], F32, [k, n, 1, 1]);
        }
        for (tb, n) in [(F16, 1), (F16, 9), (BF16, 3), (BF16, 70)] {
            contiguous(sweep, t, [70, 13, 2, 1], tb, [70, n, 4, 3]);
        }
        long_rows(sweep, t);
    }
    for t in [F32, F16, Q4_0, Q6_K] {
        let k = t.block_len().max(32);
        // Planes that are folded into columns in one dimension, in both, and in none.
        for (planes_a, planes_b) in [([2, 1], [6, 1]), ([2, 3], [4, 6]), ([1, 1], [3, 2]), ([3, 2], [3, 2])] {
            for n in [1, 4, 9] {
                contiguous(sweep, t, [k, 10, planes_a[0], planes_a[1]], F32, [k, n, planes_b[0], planes_b[1]]);
            }
        }
        permuted(sweep, t, [k, 10, 2], 0, [k, 3, 6]);
    }
    // Short rows in such number that four lanes per row suffice.
    permuted(sweep, Q4_0, [128, 130, 1], 0, [128, 2, 500]);
    permuted(sweep, F16, [44, 130, 1], 0, [44, 2, 500]);
    // More planes than a grid permits.
    contiguous(sweep, F32, [4, 1, 65_540, 1], F32, [4, 1, 65_540, 1]);
    mul_mat_fused::run(sweep);
    mul_mat_gemm::run(sweep);
}

/// The bound for `n` columns, whose [`activations`] are not rounded.
fn bound(a: DType, n: usize) -> f64 {
    match n {
        9.. if a == F32 => IN_THREE,
        33.. if a.is_block() && !packs(a) => IN_F16,
        65.. if a.is_block() => IN_F16,
        33.. if !a.is_block() => IN_HALVES,
        _ => IN_F32,
    }
}

/// Values for `b`. With quantised weights, `b` is rounded to 8 bits in groups of 32 or 256; with F16 and BF16, to their type. Integers
/// with a maximum of 127 in each group are not changed by the rounding, so the exact result can be required.
pub(super) fn activations(a: DType, seed: u64, n: usize) -> Vec<f32> {
    let values = normal(seed, n);
    if a == F32 {
        return values;
    }
    let whole = |(i, v): (usize, f32)| if i % 32 == 7 { 127.0 } else { (v * 40.0).round().clamp(-127.0, 126.0) };
    values.into_iter().enumerate().map(whole).collect()
}

#[track_caller]
fn contiguous(sweep: &Sweep, ta: DType, an: [usize; 4], tb: DType, bn: [usize; 4]) {
    let mut case = Case::new();
    let a = case.leaf(ta, an, &normal(1, an.iter().product()));
    let b = case.leaf(tb, bn, &activations(ta, 2, bn.iter().product()));
    let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    // Columns of all planes, if the planes are folded into one.
    let n = bn[1] * bn[2] * bn[3];
    sweep.check(&case.build(), &[dst], bound(ta, n), &format!("{ta} {an:?} x {tb} {bn:?}"));
}

/// Rows so long that the truncated sums of tensor cores show, most of all if no terms cancel. F32 keeps its bound; with F16 and BF16,
/// errors stay below those of rounding columns to F16.
#[track_caller]
fn long_rows(sweep: &Sweep, t: DType) {
    let bound = if t == F32 { IN_THREE } else { IN_F16 };
    let (k, m) = (16_384, 70);
    for (n, positive) in [(4, true), (12, true), (40, true), (40, false)] {
        let sign = |v: f32| if positive { v.abs() } else { v };
        let values = |values: Vec<f32>| values.into_iter().map(sign).collect::<Vec<_>>();
        let mut case = Case::new();
        let a = case.leaf(t, [k, m, 1, 1], &values(normal(11, k * m)));
        let b = case.leaf(F32, [k, n, 1, 1], &values(activations(t, 12, k * n)));
        let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        let what = format!("{t}, rows of {k} elements, {n} columns, positive: {positive}");
        sweep.check(&case.build(), &[dst], bound, &what);
    }
}

/// `k` elements per row, and a number of rows that the device packs: 16 KiB in whole groups, but no multiple of four rows if groups
/// permit that.
pub(super) fn packable(t: DType, k: usize) -> [usize; 2] {
    let row = t.row_bytes(k).unwrap();
    let group = 16 >> row.trailing_zeros().min(4);
    [k, ((16usize << 10).div_ceil(row).next_multiple_of(4) + 1).next_multiple_of(group)]
}

/// A weight that the product packs, and that GET_ROWS reads too.
#[track_caller]
fn packed(sweep: &Sweep, t: DType, [k, m]: [usize; 2], n: usize) {
    let mut case = Case::new();
    let a = case.leaf(t, [k, m, 2, 1], &normal(9, 2 * k * m));
    let b = case.leaf(F32, [k, n, 2, 1], &activations(t, 10, 2 * k * n));
    let ids = case.indices(I32, [3, 2, 1, 1], &[m as i64 - 1, 0, 5, 1, 2, 3]);
    let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    let rows = case.b.node(Rows::GetRows, &[Some(a), Some(ids)]).unwrap();
    let what = format!("{t}, packed, {k} x {m}, {n} columns");
    let case = case.build();
    sweep.check(&case, &[dst], bound(t, n), &what);
    sweep.check(&case, &[rows], IN_F32, &what);
}

/// Experts that the product packs.
#[track_caller]
fn packed_experts(sweep: &Sweep, t: DType) {
    let [k, m] = packable(t, 3 * t.block_len().max(128));
    let (case, dst) = by_id(t, [k, m, 2], 2, &[0, 4, NO_EXPERT, 2, 1, 1]);
    sweep.check(&case, &[dst], IN_F32, &format!("{t}, packed experts"));
}

/// `b` with neighbouring planes interleaved by row, as heads are in a batch; `a` with `gap` bytes between rows.
#[track_caller]
fn permuted(sweep: &Sweep, t: DType, an: [usize; 3], gap: usize, bn: [usize; 3]) {
    let mut case = Case::new();
    let stride = t.row_bytes(an[0]).unwrap() + gap;
    let (plane, ne) = (stride * an[1], [an[0], an[1], an[2], 1]);
    let desc = TensorDesc::strided(t, ne, [t.block_bytes(), stride, plane, plane * an[2]]).unwrap();
    let a = case.leaf_with_desc(desc, &normal(3, an.iter().product()));
    let (row, plane) = (4 * bn[0] * bn[2], 4 * bn[0]);
    let desc = TensorDesc::strided(F32, [bn[0], bn[1], bn[2], 1], [4, row, plane, row * bn[1]]).unwrap();
    let b = case.leaf_with_desc(desc, &activations(t, 4, bn.iter().product()));
    let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    // Rounded rows are contiguous, so planes that share a plane of a are folded into columns.
    let n = if t.is_block() { bn[1] * bn[2] / an[2] } else { bn[1] };
    sweep.check(&case.build(), &[dst], bound(t, n), &format!("{t} {an:?} x {bn:?}, a gap of {gap}"));
}

/// Rows of `a` with gaps, aligned and unaligned; a destination at an odd address.
#[track_caller]
fn unaligned_rows(sweep: &Sweep, t: DType) {
    let (k, m) = (3 * t.block_len().max(16), 35);
    let row = t.row_bytes(k).unwrap();
    for (gap, n) in [
        (48, 1),
        (48, 12),
        (t.block_bytes(), 2),
        (t.block_bytes(), 9),
        (2, 1),
        (2, 10),
        (1, 1),
        (1, 10),
        (2, 34),
        (1, 34),
    ] {
        // The kernels for types that are never repacked need aligned blocks.
        let everywhere = packs(t) || t.is_float();
        if gap == 1 && !everywhere {
            continue;
        }
        let stride = row.next_multiple_of(if gap == 48 { 16 } else { 1 }) + gap;
        let mut case = Case::new();
        let desc = TensorDesc::strided(t, [k, m, 1, 1], [t.block_bytes(), stride, stride * m, stride * m]).unwrap();
        let a = case.leaf_with_desc(desc, &normal(5, k * m));
        let b = case.leaf(F32, [k, n, 1, 1], &activations(t, 6, k * n));
        let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        let mut dsts = vec![dst];
        if everywhere {
            let room = case.b.leaf(DType::I8, [4 * m * n + 8, 1, 1, 1]).unwrap();
            let odd = case.b.view(room, TensorDesc::contiguous(F32, [m, n, 1, 1]).unwrap(), 3).unwrap();
            dsts.push(case.b.node_into(MulMat::PLAIN, &[Some(a), Some(b)], odd).unwrap());
        }
        sweep.check(&case.build(), &dsts, bound(t, n), &format!("{t}, rows of {row} bytes, a gap of {gap}"));
    }
}

/// MUL_MAT_ID: one matrix of `m` rows for each of five experts; `ids` selects `used` experts per token.
fn by_id(t: DType, [k, m, nb]: [usize; 3], used: usize, ids: &[i64]) -> (BuiltCase, TensorId) {
    let tokens = ids.len() / used;
    let mut case = Case::new();
    let a = case.leaf(t, [k, m, 5, 1], &normal(7, k * m * 5));
    let b = case.leaf(F32, [k, nb, tokens, 1], &activations(t, 8, k * nb * tokens));
    let ids = case.indices(I32, [used, tokens, 1, 1], ids);
    let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
    (case.build(), dst)
}

#[track_caller]
fn experts(sweep: &Sweep, t: DType) {
    let one = t.block_len().max(8);
    for (k, m, nb, tokens) in [(one, 5, 1, 1), (3 * one, 19, 2, 7), (1024, 6, 4, 3)] {
        let id = |slot: i64| if slot % 7 == 2 { NO_EXPERT } else { slot * slot % 5 };
        let ids: Vec<_> = (0..4 * tokens as i64).map(id).collect();
        let (case, dst) = by_id(t, [k, m, nb], 4, &ids);
        // The case with the most tokens has more than 4 slots per expert.
        let bound = if t.is_block() && !packs(t) { IN_F16 } else { IN_F32 };
        sweep.check(&case, &[dst], bound, &format!("{t}, {nb} rows for each of {tokens} tokens"));
    }
}

#[track_caller]
fn expert_id_out_of_range(sweep: &Sweep, t: DType) {
    for bad in [5, -2] {
        let (case, _) = by_id(t, [256, 40, 1], 2, &[0, 4, bad, 2]);
        let error = case.try_run(&sweep.gpu).err();
        assert!(matches!(error, Some(DeviceError::Data { op: OpCode::MulMatId, .. })), "{t}, expert {bad}: {error:?}");
    }
}
