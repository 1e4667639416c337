//! Cases of ROPE of queries and keys, and SET_ROWS of keys and values, in one launch.

use super::Sweep;
use super::rope::{bound, positions};
use fanout::device::DeviceError;
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::{Op, OpCode};
use fanout::tensor::DType::{BF16, F16, F32, I32, I64};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::{BuiltCase, Case};

/// Rows of a cache.
const CONTEXT: usize = 20;

#[derive(Clone, Debug)]
struct Setting {
    op: Rope,
    /// Channels of a head.
    d: usize,
    /// Heads of queries, and of keys and values.
    heads: [usize; 2],
    cache: DType,
    /// Rows of the caches of keys and values that the tokens are written to.
    to: [Vec<i64>; 2],
    /// Whether values are written too.
    values: bool,
    /// Whether the queries are rotated in place.
    in_place: bool,
    /// Whether heads of queries and keys are normalised before, without factors of the frequencies.
    norms: bool,
    /// Bytes between heads of queries and of keys, and between tokens of values.
    gaps: [usize; 3],
}

impl Setting {
    fn new(op: Rope, d: usize, heads: [usize; 2]) -> Setting {
        let to = [vec![5, 0, 13, 5, 19], vec![5, 0, 13, 5, 19]];
        Setting { op, d, heads, cache: F16, to, values: true, in_place: false, norms: false, gaps: [0; 3] }
    }

    /// Launches if not all nodes are fused: for the norms of queries and of keys, the ROPE of queries, the ROPE and SET_ROWS of keys,
    /// the SET_ROWS of values.
    fn separate(&self) -> u64 {
        2 + u64::from(self.values) + 2 * u64::from(self.norms)
    }
}

pub fn run(sweep: &Sweep) {
    for (d, n_dims, heads) in [(128, 128, [32, 8]), (64, 48, [4, 4]), (64, 64, [3, 1]), (37, 36, [2, 1])] {
        for (to, values) in [(vec![11], true), (vec![5, 0, 13, 5, 19], true), (vec![3, 4], false)] {
            for (mode, cache) in [(RopeMode::Neox, F16), (RopeMode::Normal, F32), (RopeMode::Neox, BF16)] {
                for (in_place, norms) in [(false, false), (true, false), (false, true), (true, true)] {
                    let norms = norms && d == n_dims as usize;
                    let usual = Setting::new(Rope::new(mode, n_dims), d, heads);
                    let to = [to.clone(), to.clone()];
                    check_case(sweep, &Setting { cache, to, values, in_place, norms, ..usual }, Some(true));
                }
            }
        }
    }
    for mode in [RopeMode::Mrope([8, 12, 12, 0]), RopeMode::Imrope([11, 11, 10, 0])] {
        for norms in [false, true] {
            check_case(sweep, &Setting { norms, ..Setting::new(Rope::new(mode, 64), 64, [4, 2]) }, Some(true));
        }
    }
    // Partial rotation, and more heads than scales.
    for (n_dims, heads, norms) in
        [(48, [4, 2], true), (64, [130, 2], true), (64, [2, 130], true), (64, [130, 2], false)]
    {
        let usual = Setting::new(Rope::new(RopeMode::Neox, n_dims), 64, heads);
        let to = [vec![7], vec![8]];
        check_case(sweep, &Setting { norms, to, ..usual }, Some(!norms));
    }
    strided(sweep);
    outside(sweep);
}

/// Gaps between heads, which are multiples of 16 bytes or not.
fn strided(sweep: &Sweep) {
    for (gaps, is_fused) in [
        ([16, 32, 16], true),
        ([4, 4, 4], true),
        ([0, 0, 4], true),
        // The blocks of queries and keys have different numbers of threads.
        ([0, 4, 0], false),
        ([4, 0, 0], false),
    ] {
        for (norms, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
            for mode in [RopeMode::Neox, RopeMode::Normal] {
                let usual = Setting::new(Rope::new(mode, 64), 64, [4, 2]);
                check_case(sweep, &Setting { norms, in_place, gaps, ..usual }, Some(is_fused));
            }
        }
    }
    // Blocks of long heads have the same number of threads with 16-byte accesses and without.
    for gaps in [[0, 4, 0], [4, 0, 0], [4, 4, 0], [0, 0, 0]] {
        let usual = Setting::new(Rope::new(RopeMode::Neox, 1024), 1024, [3, 2]);
        check_case(sweep, &Setting { gaps, ..usual }, None);
    }
}

/// A row outside of a cache is a data error that names the op SET_ROWS.
fn outside(sweep: &Sweep) {
    for to in [[vec![3, CONTEXT as i64], vec![3, 4]], [vec![3, 4], vec![-1, 4]], [vec![0, 1], vec![0, 1 << 20]]] {
        for norms in [false, true] {
            let usual = Setting::new(Rope::new(RopeMode::Neox, 64), 64, [4, 2]);
            let (case, _) = build(&Setting { to: to.clone(), norms, ..usual });
            match case.try_run(&sweep.gpu) {
                Err(DeviceError::Data { op, .. }) => assert_eq!(op, OpCode::SetRows),
                other => panic!("rows {to:?}: {:?}", other.err()),
            }
        }
    }
}

/// Runs a setting on both devices. `is_fused`: whether it is one launch, if that is known.
#[track_caller]
fn check_case(sweep: &Sweep, s: &Setting, is_fused: Option<bool>) {
    let (case, results) = build(s);
    let what = format!("{s:?}");
    sweep.check(&case, &results, bound(s.cache), &what);
    if let Some(is_fused) = is_fused {
        sweep.check_launches(if is_fused { 1 } else { s.separate() }, &what, || case.run(&sweep.gpu));
    }
}

/// The graph of a setting in llama.cpp's order, and its results.
fn build(s: &Setting) -> (BuiltCase, Vec<TensorId>) {
    let ([heads, kv_heads], tokens, d) = (s.heads, s.to[0].len(), s.d);
    let (mut case, row) = (Case::new(), d * kv_heads);
    let of_heads = |heads, gap| {
        let head = 4 * d + gap;
        TensorDesc::strided(F32, [d, heads, tokens, 1], [4, head, head * heads, head * heads * tokens]).unwrap()
    };
    let q = case.leaf_with_desc(of_heads(heads, s.gaps[0]), &normal(1, d * heads * tokens));
    let k = case.leaf_with_desc(of_heads(kv_heads, s.gaps[1]), &normal(2, row * tokens));
    let token = 4 * row + s.gaps[2];
    let v = TensorDesc::strided(F32, [row, tokens, 1, 1], [4, token, token * tokens, token * tokens]).unwrap();
    let v = case.leaf_with_desc(v, &normal(3, row * tokens));
    let at = positions(&s.op, tokens);
    let p = case.indices(I32, [at.len(), 1, 1, 1], &at);
    let factors = case.leaf(F32, [s.op.pairs(), 1, 1, 1], &uniform(4, s.op.pairs(), 0.5, 4.0));
    let ids = [(I64, 0), (I32, 1)].map(|(dtype, i)| case.indices(dtype, [tokens, 1, 1, 1], &s.to[i]));
    let caches = [5, 6].map(|seed| case.leaf(s.cache, [row, CONTEXT, 1, 1], &normal(seed, row * CONTEXT)));
    let factors = (!s.norms).then_some(factors);
    let weights = [7, 8].map(|seed| case.leaf(F32, [d, 1, 1, 1], &normal(seed, d)));
    // RMS_NORM, MUL and ROPE, each onto `x` if in place.
    let mut rotated = |x: TensorId, heads: usize, weights: TensorId, in_place: bool| {
        let desc = case.b.tensor(x).unwrap().desc;
        let mut read = x;
        let nodes: &[(Op, [Option<TensorId>; 2])] = &[
            (Norm::RmsNorm { eps: 1e-6 }.into(), [None, None]),
            (Binary::Mul.into(), [Some(weights), None]),
            (s.op.into(), [Some(p), factors]),
        ];
        for (op, others) in &nodes[if s.norms { 0 } else { 2 }..] {
            let onto =
                if in_place { case.b.view(x, desc, 0) } else { case.b.leaf(F32, [d, heads, tokens, 1]) }.unwrap();
            let srcs: Vec<_> = [Some(read)].into_iter().chain(*others).collect();
            read = case.b.node_into(op.clone(), &srcs, onto).unwrap();
            if !matches!(op, Op::Rope(_)) {
                case.b.set_use_count(read, 1).unwrap();
            }
        }
        read
    };
    let y = rotated(q, heads, weights[0], s.in_place);
    let turned = rotated(k, kv_heads, weights[1], false);
    let rows = case.b.view(turned, TensorDesc::contiguous(F32, [row, tokens, 1, 1]).unwrap(), 0).unwrap();
    case.b.set_use_count(turned, 1).unwrap();
    case.b.set_use_count(rows, 1).unwrap();
    let mut results = vec![y];
    for (i, new) in [rows, v].into_iter().enumerate().take(if s.values { 2 } else { 1 }) {
        let onto = case.b.view(caches[i], TensorDesc::contiguous(s.cache, [row, CONTEXT, 1, 1]).unwrap(), 0).unwrap();
        let srcs = [Some(new), Some(ids[i]), Some(caches[i])];
        results.push(case.b.node_into(Rows::SetRows, &srcs, onto).unwrap());
    }
    (case.build(), results)
}
