//! Cases of ROPE and ROPE_BACK, and of ROPE fused with SET_ROWS.

use super::{Sweep, rope_cache};
use fanout::device::DeviceError;
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{BF16, F16, F32, I32, I64};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// All modes, with and without 16-byte accesses; more pairs than a block handles; YaRN, factors, large positions; then the
/// kernel that is fused with SET_ROWS.
pub fn run(sweep: &Sweep) {
    for (mode, wide, odd) in [
        (RopeMode::Normal, 64, 36),
        (RopeMode::Neox, 64, 36),
        (RopeMode::Mrope([8, 12, 12, 0]), 64, 36),
        (RopeMode::Vision([16, 16, 0, 0]), 48, 35),
        (RopeMode::Imrope([11, 11, 10, 0]), 64, 36),
    ] {
        let vision = matches!(mode, RopeMode::Vision(_));
        let offsets = if vision { 0 } else { 16 };
        for dtype in [F32, F16] {
            let row = |n: u32| if vision { 2 * n as usize } else { n as usize + 32 };
            let yarn = |n_dims, n_offs| Rope {
                n_offs,
                n_ctx_orig: 4096,
                freq_base: 500_000.0,
                freq_scale: 0.25,
                ext_factor: 0.9,
                attn_factor: 1.1,
                beta_fast: 32.0,
                beta_slow: 1.0,
                ..Rope::new(mode, n_dims)
            };
            check_case(sweep, Rope { n_offs: offsets, ..Rope::new(mode, wide) }, dtype, [row(wide), 5, 7, 2], false);
            check_case(sweep, yarn(wide, offsets), dtype, [row(wide), 32, 3, 1], true);
            let back = Rope { backward: true, ..yarn(wide, offsets) };
            check_case(sweep, back, dtype, [row(wide), 3, 4, 2], true);
            let odd = if odd % 2 == 1 { odd + 1 } else { odd };
            check_case(
                sweep,
                yarn(odd, if vision { 0 } else { 2 }),
                dtype,
                [row(odd) + if vision { 0 } else { 1 }, 3, 4, 1],
                true,
            );
            let long = if vision { 1300 } else { 2400 };
            check_case(sweep, Rope::new(mode, long), dtype, [2600, 2, 2, 1], true);
        }
    }
    strided(sweep);
    onto_rows(sweep);
    outside(sweep);
    rope_cache::run(sweep);
}

/// Positions spread over a long context, and the extreme values of the type.
pub(super) fn positions(op: &Rope, tokens: usize) -> Vec<i64> {
    let count = if op.mode.sections().is_some() { 4 * tokens } else { tokens };
    (0..count as i64).map(|i| [3, 99_991, 0, 4093, -17, 131_071, i64::from(i32::MAX)][i as usize % 7]).collect()
}

#[track_caller]
fn check_case(sweep: &Sweep, op: Rope, dtype: DType, ne: [usize; 4], with_factors: bool) {
    let mut case = Case::new();
    let x = case.leaf(dtype, ne, &normal(1, ne.iter().product()));
    let at = positions(&op, ne[2]);
    let p = case.indices(I32, [at.len(), 1, 1, 1], &at);
    let factors = with_factors.then(|| case.leaf(F32, [op.pairs(), 1, 1, 1], &uniform(2, op.pairs(), 0.5, 4.0)));
    let y = case.b.node(op, &[Some(x), Some(p), factors]).unwrap();
    sweep.check(&case.build(), &[y], bound(dtype), &format!("{op:?} {dtype} {ne:?}"));
}

/// Bound of the NMSE. Angles are bit-exact; sines and cosines differ in the last bit. A half next to a rounding boundary may
/// round to the other side.
pub(super) fn bound(dtype: DType) -> f64 {
    match dtype {
        F32 => 1e-13,
        F16 => 1e-9,
        _ => 1e-7,
    }
}

/// Strided rows, with and without 16-byte alignment; permuted heads and tokens; in place and not; and a destination that
/// aliases the factors.
fn strided(sweep: &Sweep) {
    for (dtype, nb) in
        [(F32, [4, 576, 144, 1728]), (F32, [4, 148, 600, 1800]), (F16, [2, 80, 400, 1200]), (F16, [2, 66, 400, 1200])]
    {
        for mode in [RopeMode::Normal, RopeMode::Neox] {
            for onto in [false, true] {
                let desc = TensorDesc::strided(dtype, [32, 3, 3, 2], nb).unwrap();
                let mut case = Case::new();
                let x = case.leaf_with_desc(desc, &normal(3, desc.elements()));
                let p = case.indices(I32, [3, 1, 1, 1], &[5, 1000, 77]);
                let srcs = [Some(x), Some(p)];
                let y = if onto { case.b.view(x, desc, 0).unwrap() } else { case.b.leaf_with_desc(desc).unwrap() };
                let y = case.b.node_into(Rope::new(mode, 24), &srcs, y).unwrap();
                sweep.check(&case.build(), &[y], bound(dtype), &format!("{mode:?} {desc:?} onto {onto}"));
            }
        }
    }
    let (n, mut case) = (4096, Case::new());
    let x = case.leaf(F32, [n, 1, 1, 1], &normal(5, n));
    let p = case.indices(I32, [1, 1, 1, 1], &[7]);
    let factors = case.leaf(F32, [n, 1, 1, 1], &uniform(6, n, 0.5, 4.0));
    let y = case.b.view(factors, TensorDesc::contiguous(F32, [n, 1, 1, 1]).unwrap(), 0).unwrap();
    let y = case.b.node_into(Rope::new(RopeMode::Normal, n as u32), &[Some(x), Some(p), Some(factors)], y).unwrap();
    sweep.check(&case.build(), &[y], bound(F32), "onto the factors");
}

/// A graph of ROPE and SET_ROWS: the rotated keys, and the cache.
struct Keys {
    case: Case,
    turned: TensorId,
    cache: TensorId,
}

/// Keys `[d, heads, tokens]` that are written to the rows `to` of a cache of 20. Fused if no other node reads them.
fn keys(op: Rope, d: usize, heads: usize, cache: DType, ids: DType, to: &[i64], fused: bool) -> Keys {
    let (mut case, tokens, row) = (Case::new(), to.len(), d * heads);
    let x = case.leaf(F32, [d, heads, tokens, 1], &normal(8, row * tokens));
    let at = positions(&op, tokens);
    let p = case.indices(I32, [at.len(), 1, 1, 1], &at);
    let factors = case.leaf(F32, [op.pairs(), 1, 1, 1], &uniform(9, op.pairs(), 0.5, 4.0));
    let ids = case.indices(ids, [tokens, 1, 1, 1], to);
    let before = case.leaf(cache, [row, 20, 1, 1], &normal(10, row * 20));
    let turned = case.b.node(op, &[Some(x), Some(p), Some(factors)]).unwrap();
    let rows = case.b.view(turned, TensorDesc::contiguous(F32, [row, tokens, 1, 1]).unwrap(), 0).unwrap();
    let cache = case.b.view(before, TensorDesc::contiguous(cache, [row, 20, 1, 1]).unwrap(), 0).unwrap();
    let cache = case.b.node_into(Rows::SetRows, &[Some(rows), Some(ids), Some(before)], cache).unwrap();
    if fused {
        case.b.set_use_count(turned, 1).unwrap();
        case.b.set_use_count(rows, 1).unwrap();
    }
    Keys { case, turned, cache }
}

/// Compares the fused kernel, which does not write the memory of the rotated keys, with the CPU and with the two separate
/// kernels.
fn onto_rows(sweep: &Sweep) {
    for (mode, d, n_dims) in [
        (RopeMode::Normal, 64, 48),
        (RopeMode::Neox, 64, 64),
        (RopeMode::Neox, 37, 36),
        (RopeMode::Imrope([8, 8, 8, 0]), 64, 48),
        (RopeMode::Normal, 1100, 1100),
    ] {
        for dtype in [F32, F16, BF16] {
            // Two tokens are written to one row: the later token wins.
            for (id_type, to) in [(I64, &[5, 0, 13, 5, 19][..]), (I32, &[11])] {
                let op = Rope::new(mode, n_dims);
                let keys = |fused| keys(op, d, 3, dtype, id_type, to, fused);
                let what = format!("{mode:?} {d} onto rows of {dtype} {to:?}");
                let (fused, single) = (keys(true), keys(false));
                let (turned, cache) = (fused.turned, fused.cache);
                let fused = fused.case.build();
                sweep.check(&fused, &[cache], bound(dtype), &what);
                let fused = fused.run(&sweep.gpu);
                assert!(fused.bytes(turned).iter().all(|&b| b == 0xa5), "{what}: not fused");
                let single = single.case.build().run(&sweep.gpu);
                assert!(
                    fused.bytes(cache) == single.bytes(cache),
                    "{what}: the bytes differ from those of the separate kernels"
                );
            }
        }
    }
}

/// A row outside of the cache is a data error that names the op SET_ROWS.
fn outside(sweep: &Sweep) {
    for (id_type, to) in [(I64, [3, 20]), (I32, [-1, 4]), (I64, [1 << 40, 0])] {
        let keys = keys(Rope::new(RopeMode::Neox, 32), 32, 2, F16, id_type, &to, true);
        match keys.case.build().try_run(&sweep.gpu) {
            Err(DeviceError::Data { op, .. }) => assert_eq!(op, OpCode::SetRows),
            other => panic!("rows {to:?}: {:?}", other.err()),
        }
    }
}
