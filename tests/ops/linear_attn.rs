//! RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET: results of every device against the formulas in f64.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::linear_attn::LinearAttn;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, normal, uniform};
use fanout_testing::op_case::Case;

use LinearAttn::{DeltaNet, Gated, RwkvWkv6, RwkvWkv7};

/// What memory contains before a run.
const UNWRITTEN: f64 = f32::from_bits(0xa5a5_a5a5) as f64;

/// Sources of an op, by position.
type Values = Vec<Vec<f64>>;

/// The size of a head, heads, tokens of a sequence, sequences.
type Shape = [usize; 4];

/// Output and states of the ops whose tokens lie one after another.
fn tokens_oracle(op: LinearAttn, [size, heads, tokens, sequences]: Shape, src: &Values) -> Vec<f64> {
    let width = size * heads;
    let outputs = width * tokens * sequences;
    let mut dst = vec![0.0; outputs + size * width * sequences];
    dst[outputs..].copy_from_slice(&src[op.state()]);
    for s in 0..sequences {
        for h in 0..heads {
            let state = |dst: &[f64], row: usize, column: usize| {
                let place = outputs + ((s * heads + h) * size + row) * size + column;
                (place, dst[place])
            };
            for t in 0..tokens {
                let token = (s * tokens + t) * width + h * size;
                let of = |i: usize, e: usize| src[i][token + e];
                for value in 0..size {
                    let mut out = 0.0;
                    // RWKV 7: the old state's product with a.
                    let removed: f64 =
                        if op == RwkvWkv7 { (0..size).map(|j| of(4, j) * state(&dst, value, j).1).sum() } else { 0.0 };
                    for key in 0..size {
                        let (place, old) =
                            if op == RwkvWkv7 { state(&dst, value, key) } else { state(&dst, key, value) };
                        let (new, read) = match op {
                            RwkvWkv6 => {
                                let kv = of(0, key) * of(1, value);
                                (old * of(4, key) + kv, of(2, key) * (kv * src[3][h * size + key] + old))
                            }
                            Gated { scale } => {
                                let new = old * of(3, key) + of(0, key) * of(1, value);
                                (new, new * of(2, key) * f64::from(scale))
                            }
                            RwkvWkv7 => {
                                let new = old * of(1, key) + of(3, value) * of(2, key) + removed * of(5, key);
                                (new, new * of(0, key))
                            }
                            DeltaNet { .. } => unreachable!(),
                        };
                        dst[place] = new;
                        out += read;
                    }
                    dst[token + value] = out;
                }
            }
        }
    }
    dst
}

/// The last ones have no tokens: the states are copied.
const SHAPES: [Shape; 9] = [
    [64, 2, 1, 1],
    [64, 3, 7, 2],
    [32, 2, 3, 3],
    [8, 1, 5, 1],
    [7, 3, 4, 2],
    [1, 2, 3, 1],
    [100, 1, 40, 2],
    [64, 3, 0, 2],
    [7, 1, 0, 1],
];

#[test]
fn recurrences_of_tokens_match_the_oracle() {
    for op in [RwkvWkv6, RwkvWkv7, Gated { scale: 0.25 }] {
        for shape in SHAPES.into_iter().chain([[64, 1, 150, 1]]) {
            let [size, heads, tokens, sequences] = shape;
            let ne = [size, heads, tokens * sequences, 1];
            let mut case = Case::new();
            let mut srcs = Vec::new();
            for i in 0..op.state() {
                let n = ne.iter().product();
                srcs.push(match (op, i) {
                    (RwkvWkv6, 3) => case.leaf(DType::F32, [size, heads, 1, 1], &normal(3, size * heads)),
                    (RwkvWkv6, 4) | (RwkvWkv7, 1) | (Gated { .. }, 3) => {
                        case.leaf(DType::F32, ne, &uniform(4, n, 0.2, 0.9))
                    }
                    // Small: the state must not grow.
                    (RwkvWkv7, 4 | 5) => {
                        let bound = 0.5 / (size as f32).sqrt();
                        case.leaf(DType::F32, ne, &uniform(i as u64, n, -bound, bound))
                    }
                    _ => case.leaf(DType::F32, ne, &normal(i as u64 + 10, n)),
                });
            }
            let states = size * size * heads;
            srcs.push(case.leaf(DType::F32, [states, sequences, 1, 1], &normal(9, states * sequences)));
            let srcs: Vec<_> = srcs.into_iter().map(Some).collect();
            let dst = case.b.node(op, &srcs).unwrap();
            let case = case.build();
            let values = srcs.iter().flatten().map(|&id| case.values(id)).collect();
            let want = tokens_oracle(op, shape, &values);
            for on in devices() {
                assert_close(&case.run(on).values(dst), &want, 1e-4, 2e-4, &format!("{}: {op:?} {shape:?}", on.name));
            }
        }
    }
}

/// A case of GATED_DELTA_NET.
#[derive(Clone, Copy, Debug)]
struct Delta {
    shape: Shape,
    /// Heads and sequences of q, then those of k.
    q: [usize; 2],
    k: [usize; 2],
    /// Whether each key has its own gate.
    by_key: bool,
    snapshots: u32,
    /// Whether dimensions 1 and 2 of q, k and v are exchanged in memory, with gaps.
    permuted: bool,
}

fn build_delta(delta: Delta) -> (Case, Vec<Option<TensorId>>, TensorId) {
    let ([size, heads, tokens, sequences], mut case) = (delta.shape, Case::new());
    let mut strided = |ne: [usize; 4], values: &[f32]| {
        let row = 4 * ne[0] + 8;
        let nb = [4, row * ne[2], row, row * ne[1] * ne[2]];
        let desc = if delta.permuted {
            TensorDesc::strided(DType::F32, ne, nb).unwrap()
        } else {
            TensorDesc::contiguous(DType::F32, ne).unwrap()
        };
        Some(case.leaf_with_desc(desc, values))
    };
    let bound = 1.5 / (size as f32).sqrt();
    let [q, k] = [delta.q, delta.k].map(|[heads, sequences]| [size, heads, tokens, sequences]);
    let v = [size, heads, tokens, sequences];
    let mut srcs = vec![
        strided(q, &normal(1, q.iter().product())),
        strided(k, &uniform(2, k.iter().product(), -bound, bound)),
        strided(v, &normal(3, v.iter().product())),
    ];
    let gates = if delta.by_key { size } else { 1 };
    let outer = heads * tokens * sequences;
    let mut leaf = |ne: [usize; 4], values: &[f32]| srcs.push(Some(case.leaf(DType::F32, ne, values)));
    leaf([gates, heads, tokens, sequences], &uniform(4, gates * outer, -2.0, -0.01));
    leaf([1, heads, tokens, sequences], &uniform(5, outer, 0.0, 1.0));
    leaf([size, size, heads, sequences], &normal(6, size * size * heads * sequences));
    let dst = case.b.node(DeltaNet { snapshots: delta.snapshots }, &srcs).unwrap();
    (case, srcs, dst)
}

fn delta_oracle(delta: Delta, src: &Values) -> Vec<f64> {
    let [size, heads, tokens, sequences] = delta.shape;
    let (outputs, block) = (size * heads * tokens * sequences, size * size * heads * sequences);
    let mut dst = vec![UNWRITTEN; outputs + delta.snapshots as usize * block];
    let v_ne = [size, heads, tokens, sequences];
    for s in 0..sequences {
        for h in 0..heads {
            let of = |i: usize, [of_heads, of_sequences]: [usize; 2], e: usize, t: usize| {
                let at_sequence = s / (sequences / of_sequences);
                src[i][at([size, of_heads, tokens, of_sequences], [e, h % of_heads, t, at_sequence])]
            };
            let first = (s * heads + h) * size * size;
            let mut state = src[5][first..first + size * size].to_vec();
            if tokens == 0 {
                dst[outputs + first..][..size * size].copy_from_slice(&state);
            }
            for t in 0..tokens {
                let place = (s * tokens + t) * heads + h;
                for j in 0..size {
                    let row = &mut state[j * size..(j + 1) * size];
                    for (i, m) in row.iter_mut().enumerate() {
                        *m *= if delta.by_key { src[3][place * size + i].exp() } else { src[3][place].exp() };
                    }
                    let seen: f64 = row.iter().enumerate().map(|(i, m)| m * of(1, delta.k, i, t)).sum();
                    let change = (src[2][at(v_ne, [j, h, t, s])] - seen) * src[4][place];
                    row.iter_mut().enumerate().for_each(|(i, m)| *m += change * of(1, delta.k, i, t));
                    let read: f64 = row.iter().enumerate().map(|(i, m)| m * of(0, delta.q, i, t)).sum();
                    dst[at(v_ne, [j, h, t, s])] = read / (size as f64).sqrt();
                }
                let behind = tokens - 1 - t;
                if behind < delta.snapshots as usize {
                    let block = outputs + behind * block + first;
                    dst[block..block + size * size].copy_from_slice(&state);
                }
            }
        }
    }
    dst
}

#[test]
fn delta_nets_match_the_oracle() {
    let base = Delta { shape: [16, 4, 3, 2], q: [2, 2], k: [4, 1], by_key: false, snapshots: 1, permuted: false };
    for delta in [
        base,
        Delta { by_key: true, permuted: true, ..base },
        Delta { q: [3, 1], k: [1, 2], snapshots: 2, ..base },
        Delta { shape: [128, 2, 1, 1], q: [2, 1], k: [1, 1], ..base },
        Delta { shape: [64, 2, 5, 4], q: [1, 2], k: [2, 4], by_key: true, snapshots: 7, ..base },
        Delta { shape: [5, 3, 4, 1], q: [3, 1], k: [3, 1], permuted: true, snapshots: 3, ..base },
        Delta { shape: [1, 2, 3, 1], q: [1, 1], k: [2, 1], by_key: true, ..base },
        // No tokens.
        Delta { shape: [16, 4, 0, 2], snapshots: 3, ..base },
        Delta { shape: [16, 4, 0, 2], by_key: true, permuted: true, ..base },
        // Several phases.
        Delta { shape: [70, 1, 180, 1], q: [1, 1], k: [1, 1], snapshots: 100, ..base },
    ] {
        let (case, srcs, dst) = build_delta(delta);
        let case = case.build();
        let values = srcs.iter().flatten().map(|&id| case.values(id)).collect();
        let want = delta_oracle(delta, &values);
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-4, 2e-4, &format!("{}: {delta:?}", on.name));
        }
    }
}

#[test]
fn parameters_are_decoded() {
    for op in [RwkvWkv6, RwkvWkv7, Gated { scale: -0.5 }, DeltaNet { snapshots: 3 }].map(Op::from) {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    // The word of clients before 7.0.
    let old = Op::decode(OpCode::GatedDeltaNet, &OpParams::default()).unwrap();
    assert_eq!(old, Some(DeltaNet { snapshots: 1 }.into()));
    for k in [-1, i32::MIN] {
        assert!(Op::decode(OpCode::GatedDeltaNet, &OpParams::default().with_int(0, k)).is_err(), "{k}");
    }
}

/// Whether a node of these contiguous F32 sources is valid.
fn is_valid(op: LinearAttn, shapes: &[[usize; 4]]) -> bool {
    let mut case = Case::new();
    let srcs: Vec<_> = shapes.iter().map(|&ne| Some(case.b.leaf(DType::F32, ne).unwrap())).collect();
    case.b.node(op, &srcs).is_ok()
}

#[test]
fn invalid_nodes_are_rejected() {
    let (token, state) = ([8, 3, 6, 1], [192, 2, 1, 1]);
    for op in [RwkvWkv6, RwkvWkv7, Gated { scale: 1.0 }] {
        let mut valid = vec![token; op.state()];
        if op == RwkvWkv6 {
            valid[3] = [8, 3, 1, 1];
        }
        valid.push(state);
        assert!(is_valid(op, &valid), "{op:?}");
        for i in 0..valid.len() {
            let mut shapes = valid.clone();
            shapes[i] = [8, 2, 6, 1];
            assert!(!is_valid(op, &shapes), "{op:?} {i}");
            assert!(!is_valid(op, &valid[..i]), "{op:?} without source {i}");
        }
        for wrong in [[192, 4, 1, 1], [192, 1, 2, 1], [191, 2, 1, 1]] {
            let mut shapes = valid.clone();
            shapes[op.state()] = wrong;
            assert!(!is_valid(op, &shapes), "{op:?}: sequences that do not divide the tokens, or another size");
        }
    }
    let op = DeltaNet { snapshots: 2 };
    let valid = [[8, 2, 3, 1], [8, 4, 3, 2], [8, 4, 3, 2], [1, 4, 3, 2], [1, 4, 3, 2], [8, 8, 4, 2]];
    assert!(is_valid(op, &valid));
    for (i, wrong) in [
        (0, [7, 2, 3, 1]),
        (0, [8, 2, 2, 1]),
        (1, [8, 4, 3, 3]),
        (2, [8, 4, 3, 3]),
        (3, [2, 4, 3, 2]),
        (3, [1, 4, 3, 1]),
        (4, [8, 4, 3, 2]),
        (5, [8, 8, 4, 1]),
    ] {
        let mut shapes = valid;
        shapes[i] = wrong;
        assert!(!is_valid(op, &shapes), "{i}: {wrong:?}");
    }
}
