//! LIGHTNING_INDEXER, DSV4_HC_COMB, DSV4_HC_PRE and DSV4_HC_POST: results of every device against the formulas in f64.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::dsv4::Dsv4;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{Capability, DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal, uniform};
use fanout_testing::op_case::Case;

/// Adds a leaf, contiguous or with gaps and exchanged dimensions 1 and 2; with `step` bytes between the elements of a row.
fn leaf(case: &mut Case, ne: [usize; 4], step: usize, values: &[f32]) -> TensorId {
    let row = step * ne[0] + 12;
    let nb = match step {
        0 => TensorDesc::default_strides(DType::F32, ne).unwrap(),
        _ => [step, row * ne[2], row, row * ne[1] * ne[2]],
    };
    case.leaf_with_desc(TensorDesc::strided(DType::F32, ne, nb).unwrap(), values)
}

/// Adds a node whose destination has strides like those of [`leaf`].
fn node(case: &mut Case, op: Dsv4, srcs: &[Option<TensorId>], ne: [usize; 4], step: usize) -> TensorId {
    let row = step * ne[0] + 4;
    let nb = match step {
        0 => TensorDesc::default_strides(DType::F32, ne).unwrap(),
        _ => [step, row, row * ne[1], row * ne[1] * ne[2]],
    };
    let dst = case.b.leaf_with_desc(TensorDesc::strided(DType::F32, ne, nb).unwrap()).unwrap();
    case.b.node_into(op, srcs, dst).unwrap();
    dst
}

/// A case of LIGHTNING_INDEXER: elements, heads, tokens, batches, cells, batches of the mask.
type IndexerShape = [usize; 6];

fn check_indexer(shape: IndexerShape, dtype: DType, step: usize) {
    let [width, heads, tokens, batches, cells, masks] = shape;
    let (q_ne, k_ne) = ([width, heads, tokens, batches], [width, 1, cells, batches]);
    let (w_ne, mask_ne) = ([heads, tokens, 1, batches], [cells, tokens, 1, masks]);
    let mut case = Case::new();
    let q = leaf(&mut case, q_ne, step, &normal(1, q_ne.iter().product()));
    let k = case.leaf(dtype, k_ne, &normal(2, k_ne.iter().product()));
    let w = leaf(&mut case, w_ne, step, &normal(3, w_ne.iter().product()));
    let mut hidden = uniform(4, mask_ne.iter().product(), -2.0, 2.0);
    hidden.iter_mut().step_by(7).for_each(|m| *m = f32::NEG_INFINITY);
    let mask = case.leaf(DType::F16, mask_ne, &hidden);
    let ne = [cells, tokens, 1, batches];
    let dst = node(&mut case, Dsv4::LightningIndexer, &[q, k, w, mask].map(Some), ne, step);
    let case = case.build();
    let [q, k, w, mask] = [q, k, w, mask].map(|id| case.values(id));
    let want: Vec<f64> = (0..ne.iter().product())
        .map(|i| {
            let [c, t, _, b] = index(ne, i);
            let score = |h: usize| {
                let dot: f64 = (0..width).map(|e| q[at(q_ne, [e, h, t, b])] * k[at(k_ne, [e, 0, c, b])]).sum();
                dot.max(0.0) * w[at(w_ne, [h, t, 0, b])]
            };
            (0..heads).map(score).sum::<f64>() + mask[at(mask_ne, [c, t, 0, b % masks])]
        })
        .collect();
    for on in devices() {
        let got = case.run(on).values(dst);
        assert_close(&got, &want, 1e-4, 1e-2, &format!("{}: {shape:?} {dtype} {step}", on.name));
    }
}

#[test]
fn indexers_match_the_oracle() {
    for shape in [
        [128, 4, 1, 1, 70, 1],
        [128, 20, 9, 2, 5, 1],
        [3, 1, 2, 4, 200, 2],
        [40, 17, 33, 1, 130, 1],
        [2500, 3, 2, 1, 3, 1],
        [1, 2, 1, 1, 1, 1],
    ] {
        for step in [0, 4] {
            check_indexer(shape, DType::F32, step);
        }
    }
    for dtype in DType::with_capability(Capability::Convert) {
        check_indexer([256, 3, 2, 2, 9, 2], dtype, 0);
    }
}

#[test]
fn combs_match_the_oracle() {
    for (tokens, iterations, eps) in [(1, 1, 1e-6f32), (5, 20, 1e-6), (40, 2, 0.1), (3, 600, 1e-3)] {
        for step in [0, 4, 8] {
            let mut case = Case::new();
            let mixes = leaf(&mut case, [24, tokens, 1, 1], step, &normal(1, 24 * tokens));
            let scale = leaf(&mut case, [3, 1, 1, 1], step, &[f32::NAN, f32::NAN, 0.7]);
            let base = leaf(&mut case, [24, 1, 1, 1], step, &normal(2, 24));
            let (op, ne) = (Dsv4::HcComb { eps, iterations }, [4, 4, tokens, 1]);
            let dst = node(&mut case, op, &[mixes, scale, base].map(Some), ne, step);
            let case = case.build();
            let (mixes, base, eps) = (case.values(mixes), case.values(base), f64::from(eps));
            let mut want = Vec::new();
            for t in 0..tokens {
                let mut m = [[0.0; 4]; 4];
                for (s, row) in m.iter_mut().enumerate() {
                    for (d, m) in row.iter_mut().enumerate() {
                        *m = (mixes[24 * t + 8 + 4 * s + d] * f64::from(0.7f32) + base[8 + 4 * s + d]).exp();
                    }
                    let sum: f64 = row.iter().sum();
                    row.iter_mut().for_each(|m| *m = *m / sum + eps);
                }
                for round in 0..2 * iterations - 1 {
                    // First over s, then alternately over d and over s.
                    for a in 0..4 {
                        let place = |b: usize| if round % 2 == 0 { (b, a) } else { (a, b) };
                        let sum: f64 = (0..4).map(|b| m[place(b).0][place(b).1]).sum::<f64>() + eps;
                        (0..4).for_each(|b| m[place(b).0][place(b).1] /= sum);
                    }
                }
                want.extend(m.concat());
            }
            for on in devices() {
                let what = format!("{}: {tokens} {iterations} {eps} {step}", on.name);
                assert_close(&case.run(on).values(dst), &want, 1e-4, 1e-5, &what);
            }
        }
    }
}

#[test]
fn inputs_of_layers_match_the_oracle() {
    for ne in [[1, 1, 1, 1], [70, 4, 3, 1], [1500, 4, 2, 1], [5, 9, 4, 1]] {
        for (gated, scale) in [(false, 1.0f32), (true, 2.5), (false, -0.5)] {
            for step in [0, 4, 12] {
                let [width, streams, tokens, _] = ne;
                let weights_ne = if gated { ne } else { [streams, tokens, 1, 1] };
                let mut case = Case::new();
                let x = leaf(&mut case, ne, step, &normal(1, ne.iter().product()));
                let weights = leaf(&mut case, weights_ne, step, &normal(2, weights_ne.iter().product()));
                let dst_ne = [width, tokens, 1, 1];
                let dst = node(&mut case, Dsv4::HcPre { scale, gated }, &[x, weights].map(Some), dst_ne, step);
                let case = case.build();
                let (x, weights) = (case.values(x), case.values(weights));
                let want: Vec<f64> = (0..width * tokens)
                    .map(|i| {
                        let (e, t) = (i % width, i / width);
                        let term = |h: usize| {
                            let place = at(ne, [e, h, t, 0]);
                            let weight =
                                if gated { 1.0 / (1.0 + (-weights[place]).exp()) } else { weights[t * streams + h] };
                            x[place] * weight
                        };
                        f64::from(scale) * (0..streams).map(term).sum::<f64>()
                    })
                    .collect();
                for on in devices() {
                    let what = format!("{}: {ne:?} {gated} {step}", on.name);
                    assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-5, &what);
                }
            }
        }
    }
}

#[test]
fn streams_after_layers_match_the_oracle() {
    for ne in [[1, 1, 1, 1], [70, 4, 3, 1], [1500, 4, 2, 1], [5, 9, 4, 1]] {
        for has_comb in [true, false] {
            for step in [0, 4, 12] {
                let [width, streams, tokens, _] = ne;
                let comb_ne = [streams, streams, tokens, 1];
                let mut case = Case::new();
                let x = leaf(&mut case, [width, tokens, 1, 1], step, &normal(1, width * tokens));
                let residual = leaf(&mut case, ne, step, &normal(2, ne.iter().product()));
                let post = leaf(&mut case, [streams, tokens, 1, 1], step, &normal(3, streams * tokens));
                let comb = has_comb.then(|| leaf(&mut case, comb_ne, step, &normal(4, comb_ne.iter().product())));
                let srcs = [Some(x), Some(residual), Some(post), comb];
                let dst = node(&mut case, Dsv4::HcPost, &srcs, ne, step);
                let case = case.build();
                let [x, residual, post] = [x, residual, post].map(|id| case.values(id));
                let comb = comb.map(|id| case.values(id));
                let want: Vec<f64> = (0..ne.iter().product())
                    .map(|i| {
                        let [e, d, t, _] = index(ne, i);
                        let from = |s: usize| residual[at(ne, [e, s, t, 0])];
                        let mixed = match &comb {
                            Some(comb) => (0..streams).map(|s| from(s) * comb[at(comb_ne, [d, s, t, 0])]).sum::<f64>(),
                            None => from(d),
                        };
                        x[t * width + e] * post[t * streams + d] + mixed
                    })
                    .collect();
                for on in devices() {
                    let what = format!("{}: {ne:?} {has_comb} {step}", on.name);
                    assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-5, &what);
                }
            }
        }
    }
}

#[test]
fn parameters_are_decoded() {
    for op in [
        Dsv4::LightningIndexer,
        Dsv4::HcComb { eps: 0.5, iterations: 20 },
        Dsv4::HcPre { scale: 2.0, gated: true },
        Dsv4::HcPre { scale: 1.0, gated: false },
        Dsv4::HcPost,
    ]
    .map(Op::from)
    {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    for n in [0, -1] {
        assert!(Op::decode(OpCode::Dsv4HcComb, &OpParams::default().with_int(1, n)).is_err(), "{n} iterations");
    }
}

/// An op, valid shapes, and shapes of single sources that are not valid.
type Rule<'a> = (Dsv4, &'a [[usize; 4]], &'a [(usize, [usize; 4])]);

#[test]
fn invalid_nodes_are_rejected() {
    let rules: [Rule<'_>; 5] = [
        (
            Dsv4::LightningIndexer,
            &[[8, 3, 2, 4], [8, 1, 5, 4], [3, 2, 1, 4], [5, 2, 1, 2]],
            &[
                (0, [7, 3, 2, 4]),
                (1, [8, 2, 5, 4]),
                (1, [8, 1, 5, 2]),
                (2, [4, 2, 1, 4]),
                (2, [3, 2, 2, 4]),
                (3, [4, 2, 1, 2]),
                (3, [5, 2, 1, 3]),
                (3, [5, 3, 1, 2]),
            ],
        ),
        (
            Dsv4::HcComb { eps: 0.0, iterations: 1 },
            &[[24, 2, 1, 1], [3, 1, 1, 1], [24, 1, 1, 1]],
            &[(0, [15, 2, 1, 1]), (0, [24, 2, 2, 1]), (1, [2, 1, 1, 1]), (1, [3, 2, 1, 1]), (2, [23, 1, 1, 1])],
        ),
        (
            Dsv4::HcPre { scale: 1.0, gated: false },
            &[[8, 4, 3, 1], [4, 3, 1, 1]],
            &[(0, [8, 4, 3, 2]), (1, [3, 3, 1, 1]), (1, [8, 4, 3, 1])],
        ),
        (Dsv4::HcPre { scale: 1.0, gated: true }, &[[8, 4, 3, 1], [8, 4, 3, 1]], &[(1, [4, 3, 1, 1])]),
        (
            Dsv4::HcPost,
            &[[8, 3, 1, 1], [8, 4, 3, 1], [4, 3, 1, 1], [4, 4, 3, 1]],
            &[(0, [8, 2, 1, 1]), (1, [8, 4, 3, 2]), (2, [4, 2, 1, 1]), (3, [4, 3, 3, 1])],
        ),
    ];
    for (op, valid, wrong) in rules {
        let is_valid = |shapes: &[[usize; 4]], of_f16: Option<usize>| {
            let mut case = Case::new();
            let mask = if op == Dsv4::LightningIndexer { 3 } else { usize::MAX };
            let dtype = |i| if (i == mask) != (of_f16 == Some(i)) { DType::F16 } else { DType::F32 };
            let srcs: Vec<_> =
                shapes.iter().enumerate().map(|(i, &ne)| Some(case.b.leaf(dtype(i), ne).unwrap())).collect();
            case.b.node(op, &srcs).is_ok()
        };
        assert!(is_valid(valid, None), "{op:?}");
        for &(i, ne) in wrong {
            let mut shapes = valid.to_vec();
            shapes[i] = ne;
            assert!(!is_valid(&shapes, None), "{op:?}: source {i} with {ne:?}");
        }
        for i in 0..valid.len() {
            let is_free = op == Dsv4::LightningIndexer && i == 1;
            assert_eq!(is_valid(valid, Some(i)), is_free, "{op:?}: the type of source {i}");
        }
    }
}
