//! Cases of RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET.

use super::Sweep;
use fanout::ops::linear_attn::LinearAttn::{self, DeltaNet, Gated, RwkvWkv6, RwkvWkv7};
use fanout::tensor::DType::F32;
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// Heads around the limits of each entry.
pub fn run(sweep: &Sweep) {
    for size in [1, 8, 31, 64, 65, 128, 200] {
        for op in [RwkvWkv6, RwkvWkv7, Gated { scale: 0.3 }] {
            check_tokens(sweep, op, size);
        }
        for (by_key, snapshots) in [(false, 1), (true, 2), (false, 5)] {
            check_delta_net(sweep, size, by_key, snapshots);
        }
    }
}

#[track_caller]
fn check_tokens(sweep: &Sweep, op: LinearAttn, size: usize) {
    let (heads, tokens, sequences) = (2, 3, 2);
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
    sweep.check(&case.build(), &[y], 1e-10, &format!("{op:?} {size}"));
}

#[track_caller]
fn check_delta_net(sweep: &Sweep, size: usize, by_key: bool, snapshots: u32) {
    let (heads, tokens, sequences) = (4, 3, 2);
    let mut case = Case::new();
    let strided = |case: &mut Case, ne: [usize; 4], values: &[f32]| {
        let row = 4 * ne[0] + 8;
        let desc = TensorDesc::strided(F32, ne, [4, row * ne[2], row, row * ne[1] * ne[2]]).unwrap();
        Some(case.leaf_with_desc(desc, values))
    };
    let (v, bound) = ([size, heads, tokens, sequences], 1.5 / (size as f32).sqrt());
    let outer = heads * tokens * sequences;
    let q = strided(&mut case, [size, 2, tokens, 1], &normal(1, size * 2 * tokens));
    let k = strided(&mut case, [size, 3, tokens, 2], &uniform(2, size * 6 * tokens, -bound, bound));
    let values = strided(&mut case, v, &normal(3, size * outer));
    let gates = if by_key { size } else { 1 };
    let gate = case.leaf(F32, [gates, heads, tokens, sequences], &uniform(4, gates * outer, -2.0, -0.01));
    let beta = case.leaf(F32, [1, heads, tokens, sequences], &uniform(5, outer, 0.0, 1.0));
    let states = size * size * heads * sequences;
    let state = case.leaf(F32, [size, size, heads, sequences], &normal(6, states));
    let y = case.b.node(DeltaNet { snapshots }, &[q, k, values, Some(gate), Some(beta), Some(state)]).unwrap();
    sweep.check(&case.build(), &[y], 1e-10, &format!("delta net {size} {by_key} {snapshots}"));
}
