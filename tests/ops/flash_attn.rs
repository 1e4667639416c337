//! FLASH_ATTN_EXT: results of every device against the formula in f64, masked positions, parameters and shape rules.

use crate::devices::devices;
use crate::softmax::slope;
use fanout::graph::{BuildError, TensorId};
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::{Op, OpCode, OpFamily, OpParams};
use fanout::tensor::quant::dequantiser;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, nmse};
use fanout_testing::inputs::{at, normal, uniform};
use fanout_testing::op_case::Case;
use std::ops::Range;

const PLAIN: FlashAttn = FlashAttn { scale: 0.3, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };

/// Shapes of one case.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Head size of Q and K.
    dk: usize,
    /// Head size of V.
    dv: usize,
    /// Tokens, each with one query per head.
    n: usize,
    /// Positions of K and V.
    kv: usize,
    /// Heads of Q.
    heads: usize,
    k_heads: usize,
    v_heads: usize,
    batches: usize,
}

const SMALL: Shape = Shape { dk: 16, dv: 24, n: 3, kv: 70, heads: 4, k_heads: 2, v_heads: 2, batches: 2 };

impl Shape {
    fn q(&self) -> [usize; 4] {
        [self.dk, self.n, self.heads, self.batches]
    }

    fn k(&self) -> [usize; 4] {
        [self.dk, self.kv, self.k_heads, self.batches]
    }

    fn v(&self) -> [usize; 4] {
        [self.dv, self.kv, self.v_heads, self.batches]
    }
}

/// The values of all sources; the mask with its shape.
struct Values<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    mask: Option<(&'a [f64], [usize; 4])>,
    sinks: Option<&'a [f64]>,
}

fn oracle(op: FlashAttn, s: Shape, x: &Values<'_>) -> Vec<f64> {
    let mut out = Vec::new();
    let softcap = f64::from(op.softcap);
    for b in 0..s.batches {
        for n in 0..s.n {
            for h in 0..s.heads {
                let (hk, hv) = (h / (s.heads / s.k_heads), h / (s.heads / s.v_heads));
                let score = |c| {
                    let dot: f64 =
                        (0..s.dk).map(|d| x.q[at(s.q(), [d, n, h, b])] * x.k[at(s.k(), [d, c, hk, b])]).sum();
                    let mut z = f64::from(op.scale) * dot;
                    if softcap != 0.0 {
                        z = softcap * (z / softcap).tanh();
                    }
                    let bias = x.mask.map_or(0.0, |(m, ne)| m[at(ne, [c, n, h % ne[2], b % ne[3]])]);
                    if bias == f64::NEG_INFINITY { bias } else { z + slope(op.max_bias, s.heads, h) * bias }
                };
                let z: Vec<f64> = (0..s.kv).map(score).collect();
                let sink = x.sinks.map(|sinks| sinks[h]);
                let top = z.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let weight = |z: f64| if z == f64::NEG_INFINITY { 0.0 } else { (z - top).exp() };
                let total: f64 = z.iter().copied().chain(sink).map(weight).sum();
                for d in 0..s.dv {
                    let sum: f64 = (0..s.kv)
                        .filter(|&c| z[c] != f64::NEG_INFINITY)
                        .map(|c| weight(z[c]) * x.v[at(s.v(), [d, c, hv, b])])
                        .sum();
                    out.push(if total == 0.0 { 0.0 } else { sum / total });
                }
            }
        }
    }
    out
}

/// A causal mask, aligned to the end, with a few more masked positions and small biases.
fn causal(ne: [usize; 4], n: usize) -> Vec<f32> {
    let bias = uniform(8, ne.iter().product(), -0.5, 0.0);
    let seen = |k: usize| {
        let [c, i1, ..] = fanout_testing::inputs::index(ne, k);
        c + n <= ne[0] + i1 && !(c + i1).is_multiple_of(5)
    };
    bias.iter().enumerate().map(|(k, &m)| if seen(k) { m } else { f32::NEG_INFINITY }).collect()
}

/// A case with leaves for Q, K and V.
struct Inputs {
    case: Case,
    q: TensorId,
    k: TensorId,
    v: TensorId,
}

fn inputs(s: Shape, tk: DType, tv: DType) -> Inputs {
    let mut case = Case::new();
    let count = |ne: [usize; 4]| ne.iter().product::<usize>();
    let q = case.leaf(DType::F32, s.q(), &normal(1, count(s.q())));
    let k = case.leaf(tk, s.k(), &normal(2, count(s.k())));
    let v = case.leaf(tv, s.v(), &normal(3, count(s.v())));
    Inputs { case, q, k, v }
}

/// Runs a case on all devices against the oracle.
fn check(op: FlashAttn, s: Shape, types: (DType, DType), mask: Option<([usize; 4], Vec<f32>)>, with_sinks: bool) {
    let Inputs { mut case, q, k, v } = inputs(s, types.0, types.1);
    let mne = mask.as_ref().map(|(ne, _)| *ne);
    let mask = mask.map(|(ne, values)| case.leaf(DType::F16, ne, &values));
    let sinks = with_sinks.then(|| case.leaf(DType::F32, [s.heads, 1, 1, 1], &normal(4, s.heads)));
    let dst = case.b.node(op, &[Some(q), Some(k), Some(v), mask, sinks]).unwrap();
    let case = case.build();
    let (m, sinks) = (mask.map(|m| case.values(m)), sinks.map(|s| case.values(s)));
    let (qv, kv, vv) = (case.values(q), case.values(k), case.values(v));
    let mask = m.as_deref().zip(mne);
    let want = oracle(op, s, &Values { q: &qv, k: &kv, v: &vv, mask, sinks: sinks.as_deref() });
    for on in devices() {
        let got = case.run(on).values(dst);
        let what = format!("{op:?} {s:?} {types:?} mask {mne:?} sinks {with_sinks} {}", on.name);
        // With these blocks, tensor cores have weights of 11 bits.
        let has_short_weights =
            on.name == "CUDA" && types.0 == types.1 && [DType::Q8_0, DType::Q4_0].contains(&types.0);
        let (relative, absolute, bound) = if has_short_weights { (1e-3, 1e-3, 1e-7) } else { (1e-4, 2e-5, 1e-9) };
        assert_close(&got, &want, relative, absolute, &what);
        assert!(nmse(&got, &want) < bound, "{what}");
    }
}

fn shapes() -> Vec<Shape> {
    let decode = Shape { n: 1, kv: 1500, batches: 1, ..SMALL };
    vec![
        Shape { dk: 1, dv: 1, n: 1, kv: 1, heads: 1, k_heads: 1, v_heads: 1, batches: 1 },
        SMALL,
        Shape { dk: 40, dv: 33, kv: 64, heads: 12, k_heads: 6, v_heads: 2, ..SMALL },
        decode,
        Shape { heads: 1, k_heads: 1, v_heads: 1, kv: 513, ..decode },
        Shape { heads: 70, k_heads: 1, v_heads: 1, n: 2, kv: 300, batches: 1, ..SMALL },
        Shape { n: 45, kv: 130, batches: 1, ..SMALL },
    ]
}

#[test]
fn shapes_masks_alibi_softcaps_and_sinks_match_the_oracle() {
    for s in shapes() {
        for (mask, max_bias, softcap, sinks) in [
            (false, 0.0, 0.0, false),
            (false, 0.0, 1.5, true),
            (true, 0.0, 0.0, false),
            (true, 8.0, 0.0, true),
            (true, 4.0, 2.0, false),
        ] {
            let op = FlashAttn { max_bias, softcap, ..PLAIN };
            for ne in [[s.kv, s.n + 5, 1, 1], [s.kv, s.n, s.heads, s.batches]] {
                check(op, s, (DType::F16, DType::F16), mask.then(|| (ne, causal(ne, s.n))), sinks);
            }
        }
    }
}

/// The stride of a dimension with one element may be any number, also one that 32 bits do not hold.
#[test]
fn strides_of_single_batches_of_masks_are_ignored() {
    let s = Shape { batches: 1, ..SMALL };
    let ne = [s.kv, s.n, 1, 1];
    for nb3 in [8 << 30, (8 << 30) + 2, usize::MAX >> 2] {
        let Inputs { mut case, q, k, v } = inputs(s, DType::F16, DType::F16);
        let desc = TensorDesc::strided(DType::F16, ne, [2, 2 * s.kv, 2 * s.kv * s.n, nb3]).unwrap();
        let mask = case.leaf_with_desc(desc, &causal(ne, s.n));
        let dst = case.b.node(PLAIN, &[Some(q), Some(k), Some(v), Some(mask)]).unwrap();
        let case = case.build();
        let [qv, kv, vv, mv] = [q, k, v, mask].map(|id| case.values(id));
        let want = oracle(PLAIN, s, &Values { q: &qv, k: &kv, v: &vv, mask: Some((&mv, ne)), sinks: None });
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-4, 2e-5, &format!("{nb3} {}", on.name));
        }
    }
}

/// Sinks that are not adjacent, such as a column of a matrix.
#[test]
fn strided_sinks_match_the_oracle() {
    for (s, step) in [(SMALL, 8), (Shape { n: 1, kv: 1500, ..SMALL }, 12), (Shape { dk: 64, dv: 64, n: 9, ..SMALL }, 8)]
    {
        let Inputs { mut case, q, k, v } = inputs(s, DType::F16, DType::F16);
        let desc = TensorDesc::strided(DType::F32, [s.heads, 1, 1, 1], [step, 64, 64, 64]).unwrap();
        let sinks = case.leaf_with_desc(desc, &normal(4, s.heads));
        let dst = case.b.node(PLAIN, &[Some(q), Some(k), Some(v), None, Some(sinks)]).unwrap();
        let case = case.build();
        let [qv, kv, vv, sv] = [q, k, v, sinks].map(|id| case.values(id));
        let want = oracle(PLAIN, s, &Values { q: &qv, k: &kv, v: &vv, mask: None, sinks: Some(&sv) });
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-4, 2e-5, &format!("{s:?} {step} {}", on.name));
        }
    }
}

/// No positions: the result is 0, as in ggml, with sinks too.
#[test]
fn attention_over_no_positions_is_zero() {
    let s = Shape { kv: 0, ..SMALL };
    for dtype in [DType::F16, DType::Q8_0] {
        let s = if dtype.is_block() { Shape { dk: 32, dv: 32, ..s } } else { s };
        for with_mask in [false, true] {
            let Inputs { mut case, q, k, v } = inputs(s, dtype, dtype);
            let mask = with_mask.then(|| case.leaf(DType::F16, [0, s.n, 1, 1], &[]));
            let sinks = with_mask.then(|| case.leaf(DType::F32, [s.heads, 1, 1, 1], &normal(4, s.heads)));
            let dst = case.b.node(PLAIN, &[Some(q), Some(k), Some(v), mask, sinks]).unwrap();
            let case = case.build();
            let zeros = vec![0.0; s.dv * s.heads * s.n * s.batches];
            for on in devices() {
                assert_eq!(case.run(on).values(dst), zeros, "{dtype} {with_mask} {}", on.name);
            }
        }
    }
}

#[test]
fn pairs_of_cache_types_match_the_oracle() {
    use DType::{BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_1, Q8_0};
    let s = Shape { dk: 64, dv: 32, n: 5, ..SMALL };
    for types in
        [(F32, F32), (F16, F32), (F32, BF16), (BF16, F16), (Q8_0, Q8_0), (Q4_0, F16), (Q5_1, Q4_1), (F16, IQ4_NL)]
    {
        check(PLAIN, s, types, None, false);
    }
}

#[test]
fn every_convertible_type_works_as_kv_cache() {
    for &dtype in DType::ALL.iter().filter(|&&t| dequantiser(t).is_some()) {
        let s = Shape { dk: 256, dv: 256, n: 2, kv: 9, batches: 1, ..SMALL };
        check(FlashAttn { scale: 0.06, ..PLAIN }, s, (dtype, dtype), None, false);
    }
}

/// K and V as permuted views of one cache (V inside the rows of K), Q permuted.
#[test]
fn permuted_views_of_a_cache_match_the_oracle() {
    let s = Shape { dk: 32, dv: 16, n: 4, kv: 80, heads: 6, k_heads: 3, v_heads: 3, batches: 2 };
    let (width, mut case) = (40, Case::new());
    let cache = case.leaf(DType::F16, [width * 3, 80, 2, 1], &normal(1, width * 3 * 160));
    let desc = |dtype, ne, nb| TensorDesc::strided(dtype, ne, nb).unwrap();
    let nb = [2, 3 * width * 2, width * 2, 80 * 3 * width * 2];
    let k = case.b.view(cache, desc(DType::F16, s.k(), nb), 0).unwrap();
    let v = case.b.view(cache, desc(DType::F16, s.v(), nb), 16).unwrap();
    let q = desc(DType::F32, s.q(), [4, 32 * 6 * 4, 32 * 4, 32 * 6 * 4 * 4]);
    let q = case.leaf_with_desc(q, &normal(2, q.elements()));
    let dst = case.b.node(PLAIN, &[Some(q), Some(k), Some(v)]).unwrap();
    let case = case.build();
    let (qv, kv, vv) = (case.values(q), case.values(k), case.values(v));
    let want = oracle(PLAIN, s, &Values { q: &qv, k: &kv, v: &vv, mask: None, sinks: None });
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 1e-4, 2e-5, on.name);
    }
}

/// A batch of several sequences, whose blocks of 64 cells alternate: each token sees the blocks of its own sequence up to its
/// position. Some sequences have several tokens, and one shares a block with another one.
#[test]
fn tokens_of_several_sequences_match_the_oracle() {
    for (tokens_of, kv, heads) in
        [(&[1, 1, 1, 1][..], 700, 2), (&[1, 9, 1, 1, 3], 330, 2), (&[2, 7], 1500, 8), (&[1; 70], 150, 1)]
    {
        let sequence: Vec<usize> = tokens_of.iter().enumerate().flat_map(|(i, &n)| vec![i; n]).collect();
        let (n, sequences) = (sequence.len(), tokens_of.len());
        let s = Shape { kv, n, heads, k_heads: 1, v_heads: 1, batches: 1, ..SMALL };
        let seen = |token: usize, cell: usize| {
            let owner = if cell % 64 < 50 { cell / 64 } else { cell / 128 };
            owner % sequences == sequence[token] && cell + n <= kv + token
        };
        let mask = (0..n * kv).map(|i| if seen(i / kv, i % kv) { 0.25 * (i % 3) as f32 } else { f32::NEG_INFINITY });
        check(PLAIN, s, (DType::F16, DType::F16), Some(([kv, n, 1, 1], mask.collect())), n % 2 == 0);
    }
}

/// A query with all positions masked gives 0, with and without a sink.
#[test]
fn fully_masked_queries_give_zero() {
    for kv in [10, 700] {
        for with_sinks in [false, true] {
            let s = Shape { kv, n: 2, ..SMALL };
            let ne = [kv, 2, 1, 1];
            let mask = (0..2 * kv).map(|i| if i < kv { f32::NEG_INFINITY } else { 0.0 }).collect();
            check(PLAIN, s, (DType::F32, DType::F32), Some((ne, mask)), with_sinks);
        }
    }
}

/// Infinite or NaN values at masked positions must not change a query's result; at visible positions they must.
#[test]
fn masked_positions_do_not_contribute() {
    // Wide rows have kernels of their own on a GPU.
    let sizes = [(16, 24), (64, 128)];
    for ((kv, bad), (dk, dv)) in
        [(40, 30..33), (700, 600..690)].into_iter().flat_map(|x| sizes.map(|size| (x.clone(), size)))
    {
        let bad: Range<usize> = bad;
        let s = Shape { dk, dv, kv, heads: 2, k_heads: 1, v_heads: 1, batches: 1, n: 2 };
        let mut case = Case::new();
        let q = case.leaf(DType::F32, s.q(), &normal(1, s.dk * 4));
        let mut spoilt = |width: usize, garbage: f32| {
            let mut values = normal(2, width * kv);
            values[bad.start * width..bad.end * width].fill(garbage);
            case.leaf(DType::F16, [width, kv, 1, 1], &values)
        };
        let (k, v) = (spoilt(s.dk, f32::NAN), spoilt(s.dv, f32::INFINITY));
        // The positions with such values are masked for token 0 and visible for token 1.
        let hidden = |i: usize| i < kv && bad.contains(&i);
        let mask: Vec<f32> = (0..2 * kv).map(|i| if hidden(i) { f32::NEG_INFINITY } else { 0.0 }).collect();
        let m = case.leaf(DType::F16, [kv, 2, 1, 1], &mask);
        let dst = case.b.node(PLAIN, &[Some(q), Some(k), Some(v), Some(m)]).unwrap();
        let case = case.build();
        let (qv, kv, vv, mv) = (case.values(q), case.values(k), case.values(v), case.values(m));
        let mask = Some((&mv[..], [s.kv, 2, 1, 1]));
        let want = oracle(PLAIN, s, &Values { q: &qv, k: &kv, v: &vv, mask, sinks: None });
        let per_token = 2 * s.dv;
        for on in devices() {
            let got = case.run(on).values(dst);
            assert_close(&got[..per_token], &want[..per_token], 1e-4, 2e-5, on.name);
            assert!(got[per_token..].iter().all(|y| !y.is_finite()), "{}: {:?}", on.name, &got[per_token..]);
        }
    }
}

#[test]
fn parameters_round_trip() {
    let op = FlashAttn { scale: 0.1, max_bias: 8.0, softcap: 50.0, f32_accumulation: true, n_kv_max: 77 };
    let words = op.encode();
    assert_eq!((words.float(0), words.float(2), words.int(3), words.int(4)), (0.1, 50.0, 10, 77));
    assert_eq!(Op::decode(OpCode::FlashAttnExt, &words), Ok(Some(op.into())));
    let bad: [(OpParams, usize); 3] =
        [(words.with_int(3, 1), 3), (words.with_int(3, 20), 3), (words.with_int(4, -1), 4)];
    for (words, word) in bad {
        assert_eq!(Op::decode(OpCode::FlashAttnExt, &words).err().map(|e| e.word), Some(word));
    }
}

#[test]
fn mismatched_shapes_are_rejected() {
    use DType::{F16, F32};
    type Leaf = (DType, [usize; 4]);
    type Refused = (&'static str, f32, [Leaf; 3], Option<Leaf>, Option<Leaf>);
    let (q, k, v) = ((F32, SMALL.q()), (F16, SMALL.k()), (F16, SMALL.v()));
    let cases: [Refused; 10] = [
        ("rows of k", 0.0, [q, (F16, [17, 70, 2, 2]), v], None, None),
        ("positions", 0.0, [q, k, (F16, [24, 71, 2, 2])], None, None),
        ("heads", 0.0, [q, (F16, [16, 70, 3, 2]), v], None, None),
        ("batches", 0.0, [q, k, (F16, [24, 70, 2, 1])], None, None),
        ("slopes without a mask", 1.0, [q, k, v], None, None),
        ("an f32 mask", 0.0, [q, k, v], Some((F32, [70, 3, 1, 1])), None),
        ("few mask rows", 0.0, [q, k, v], Some((F16, [70, 2, 1, 1])), None),
        ("short mask rows", 0.0, [q, k, v], Some((F16, [69, 3, 1, 1])), None),
        ("mask heads", 0.0, [q, k, v], Some((F16, [70, 3, 3, 1])), None),
        ("sinks", 0.0, [q, k, v], None, Some((F32, [3, 1, 1, 1]))),
    ];
    for (what, max_bias, qkv, mask, sinks) in cases {
        let mut case = Case::new();
        let mut leaf = |(dtype, ne)| case.b.leaf(dtype, ne).unwrap();
        let [q, k, v] = qkv.map(|l| Some(leaf(l)));
        let srcs = [q, k, v, mask.map(&mut leaf), sinks.map(&mut leaf)];
        let error = case.b.node(FlashAttn { max_bias, ..PLAIN }, &srcs).err();
        assert!(matches!(error, Some(BuildError::Node(_))), "{what}: {error:?}");
    }
}

#[test]
fn types_without_a_conversion_are_unsupported() {
    let Inputs { mut case, q, v, .. } = inputs(SMALL, DType::F16, DType::F16);
    let k = case.b.leaf(DType::I8, SMALL.k()).unwrap();
    case.b.node(PLAIN, &[Some(q), Some(k), Some(v)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert!(case.try_run(on).is_err());
    }
}
