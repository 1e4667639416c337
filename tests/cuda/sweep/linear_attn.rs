//! Cases of RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET.

use super::Sweep;
use fanout::ops::linear_attn::LinearAttn::{self, DeltaNet, Gated, RwkvWkv6, RwkvWkv7};
use fanout::tensor::DType::F32;
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// Heads around the limits of each entry, and numbers of tokens around those of tiles.
pub fn run(sweep: &Sweep) {
    check_extreme_decays(sweep);
    for (size, tokens) in [(1, 3), (8, 1), (31, 17), (64, 18), (65, 5), (128, 9), (128, 16), (200, 2), (256, 5)] {
        for op in [RwkvWkv6, RwkvWkv7, Gated { scale: 0.3 }] {
            check_tokens(sweep, op, size, tokens);
        }
        for (by_key, snapshots) in [(false, 1), (true, 2), (false, 5), (true, 1)] {
            check_delta_net(sweep, [size, tokens], by_key, snapshots, [-2.0, -0.01]);
        }
    }
    // Gates that nearly keep, or that clear the state, or both, and those of a state that grows; e^-200 is 0.
    for gates in [[-0.01, 0.0], [-12.0, -0.1], [-200.0, -60.0], [-200.0, 0.0], [-1.0, 1.0], [f32::NEG_INFINITY, -80.0]]
    {
        for (size, by_key) in [(128, false), (128, true), (64, false)] {
            check_delta_net(sweep, [size, 38], by_key, 2, gates);
        }
    }
}

/// Decays whose product overflows, or is subnormal, beside a state that stays in range.
fn check_extreme_decays(sweep: &Sweep) {
    for (gates, scale) in [([11.0, 80.0], 0.0), ([11.0, 80.0], 1e-10), ([-10.0, -85.0], 1e30)] {
        let mut case = Case::new();
        let ne = [64, 1, 2, 1];
        let zeros = |case: &mut Case| case.leaf(F32, ne, &[0.0; 128]);
        let (k, v) = (zeros(&mut case), zeros(&mut case));
        let q = case.leaf(F32, ne, &normal(1, 128));
        let gate = case.leaf(F32, [1, 1, 2, 1], &gates);
        let beta = case.leaf(F32, [1, 1, 2, 1], &[0.5; 2]);
        let state: Vec<f32> = normal(2, 64 * 64).into_iter().map(|x| x * scale).collect();
        let state = case.leaf(F32, [64, 64, 1, 1], &state);
        let y = case.b.node(DeltaNet { snapshots: 1 }, &[q, k, v, gate, beta, state]).unwrap();
        sweep.check(&case.build(), &[y], 1e-10, &format!("delta net with gates {gates:?}, state {scale}"));
    }
}

#[track_caller]
fn check_tokens(sweep: &Sweep, op: LinearAttn, size: usize, tokens: usize) {
    let (heads, sequences) = (2, 2);
    let ne = [size, heads, tokens * sequences, 1];
    let (n, bound) = (ne.iter().product(), 0.5 / (size as f32).sqrt());
    let mut case = Case::new();
    let mut srcs = Vec::new();
    for i in 0..op.state() {
        srcs.push(Some(match (op, i) {
            (RwkvWkv6, 3) => case.leaf(F32, [size, heads, 1, 1], &normal(3, size * heads)),
            (RwkvWkv6, 4) | (RwkvWkv7, 1) | (Gated { .. }, 3) => case.leaf(F32, ne, &uniform(4, n, 0.2, 0.9)),
            (RwkvWkv7, 4 | 5) => case.leaf(F32, ne, &uniform(i as u64, n, -bound, bound)),
            _ => case.leaf(F32, ne, &normal(i as u64 + 10, n)),
        }));
    }
    let states = size * size * heads;
    srcs.push(Some(case.leaf(F32, [states, sequences, 1, 1], &normal(9, states * sequences))));
    let y = case.b.node(op, &srcs).unwrap();
    sweep.check(&case.build(), &[y], 1e-10, &format!("{op:?} {size} {tokens}"));
}

/// Gates are random numbers in the given range; if it starts with -inf, every third one is that.
#[track_caller]
fn check_delta_net(sweep: &Sweep, [size, tokens]: [usize; 2], by_key: bool, snapshots: u32, [low, high]: [f32; 2]) {
    let (heads, sequences) = (4, 2);
    let mut case = Case::new();
    // With one block of states, some rows are not at multiples of 16 bytes.
    let gap = if snapshots == 1 { 8 } else { 16 };
    let strided = |case: &mut Case, ne: [usize; 4], values: &[f32]| {
        let row = 4 * ne[0] + gap;
        let desc = TensorDesc::strided(F32, ne, [4, row * ne[2], row, row * ne[1] * ne[2]]).unwrap();
        Some(case.leaf_with_desc(desc, values))
    };
    let (v, bound) = ([size, heads, tokens, sequences], 1.5 / (size as f32).sqrt());
    let outer = heads * tokens * sequences;
    let q = strided(&mut case, [size, 2, tokens, 1], &normal(1, size * 2 * tokens));
    let k = strided(&mut case, [size, 3, tokens, 2], &uniform(2, size * 6 * tokens, -bound, bound));
    let values = strided(&mut case, v, &normal(3, size * outer));
    let of_head = if by_key { size } else { 1 };
    let mut gates = uniform(4, of_head * outer, low.max(-200.0), high);
    if low.is_infinite() {
        gates.iter_mut().step_by(3).for_each(|gate| *gate = low);
    }
    let gate = case.leaf(F32, [of_head, heads, tokens, sequences], &gates);
    let beta = case.leaf(F32, [1, heads, tokens, sequences], &uniform(5, outer, 0.0, 1.0));
    let states = size * size * heads * sequences;
    let state = case.leaf(F32, [size, size, heads, sequences], &normal(6, states));
    let y = case.b.node(DeltaNet { snapshots }, &[q, k, values, Some(gate), Some(beta), Some(state)]).unwrap();
    let what = format!("delta net {size} {tokens} {by_key} {snapshots} {low} {high}");
    sweep.check(&case.build(), &[y], 1e-10, &what);
}
