//! Cases of recurrences and of the ops of single models: ssm, linear_attn, solve_tri, dsv4. Decays and keys are so small that no state
//! grows.

use super::{Draft, IN_F16, IN_F32, case};
use crate::ops::dsv4::Dsv4;
use crate::ops::linear_attn::LinearAttn;
use crate::ops::solve_tri::SolveTri;
use crate::ops::ssm::Ssm;
use crate::tensor::DType::{F16, F32};

pub(super) fn cases() -> Vec<Draft> {
    [ssm(), linear_attn(), vec![solve_tri()], dsv4()].into_iter().flatten().collect()
}

/// SSM_SCAN of 5 tokens of 2 sequences, with two groups of heads, which start in slots 2 and 0 of 3. A head has a decay, or one for each
/// element of its state.
fn scan(variant: &str, state: usize, head: usize, heads: usize, decays: usize, snapshots: u32) -> Draft {
    case(IN_F32)
        .variant(variant)
        .normal(F32, [state, head, heads, 3])
        .normal(F32, [head, heads, 5, 2])
        .uniform([heads, 5, 2, 1], -3.0, 1.0)
        .uniform([decays, heads, 1, 1], -1.5, -0.05)
        .normal(F32, [state, 2, 5, 2])
        .normal(F32, [state, 2, 5, 2])
        .indices([2, 1, 1, 1], [2, 0])
        .node(Ssm::Scan { snapshots })
}

fn ssm() -> Vec<Draft> {
    vec![
        case(IN_F32).normal(F32, [16, 37, 2, 1]).normal(F32, [4, 37, 1, 1]).node(Ssm::Conv),
        scan("Mamba-1", 16, 1, 70, 16, 1),
        scan("Mamba-2", 128, 8, 6, 1, 2),
    ]
}

/// Heads of 64, three of them, 7 tokens of 2 sequences.
fn linear_attn() -> Vec<Draft> {
    let (token, states) = ([64, 3, 14, 1], [64 * 64 * 3, 2, 1, 1]);
    let (key, of_head, state) = (1.0 / 16.0, [1, 3, 7, 2], [64, 64, 3, 2]);
    vec![
        case(IN_F32)
            .normal(F32, token)
            .normal(F32, token)
            .normal(F32, token)
            .normal(F32, [64, 3, 1, 1])
            .uniform(token, 0.2, 0.9)
            .normal(F32, states)
            .node(LinearAttn::RwkvWkv6),
        case(IN_F32)
            .normal(F32, token)
            .normal(F32, token)
            .normal(F32, token)
            .uniform(token, 0.2, 0.9)
            .normal(F32, states)
            .node(LinearAttn::Gated { scale: 0.25 }),
        case(IN_F32)
            .normal(F32, token)
            .uniform(token, 0.2, 0.9)
            .normal(F32, token)
            .normal(F32, token)
            .uniform(token, -key, key)
            .uniform(token, -key, key)
            .normal(F32, states)
            .node(LinearAttn::RwkvWkv7),
        case(IN_F32)
            .normal(F32, [64, 3, 7, 2])
            .uniform([64, 1, 7, 2], -3.0 * key, 3.0 * key)
            .normal(F32, [64, 3, 7, 2])
            .uniform(of_head, -2.0, -0.01)
            .uniform(of_head, 0.0, 1.0)
            .normal(F32, state)
            .node(LinearAttn::DeltaNet { snapshots: 2 }),
    ]
}

/// A lower triangle with a large diagonal, so that the solution does not grow; the other elements are not read.
fn solve_tri() -> Draft {
    const N: usize = 40;
    let element = |k: usize| {
        let (column, row) = (k % N, k / N % N);
        match column.cmp(&row) {
            std::cmp::Ordering::Less => ((k * 37 % 101) as f32 / 50.0 - 1.0) / 7.0,
            std::cmp::Ordering::Equal => 1.0 + (k % 7) as f32 / 5.0,
            std::cmp::Ordering::Greater => f32::NAN,
        }
    };
    let matrices = (0..N * N * 2).map(element);
    case(IN_F32).listed(F32, [N, N, 2, 1], matrices).normal(F32, [33, N, 2, 1]).node(SolveTri)
}

/// 4 streams; 7 or 3 tokens.
fn dsv4() -> Vec<Draft> {
    let pre = |gated| Dsv4::HcPre { scale: 2.5, gated };
    let (streams, weights) = ([70, 4, 3, 1], [4, 3, 1, 1]);
    vec![
        case(IN_F16)
            .normal(F32, [64, 4, 5, 2])
            .normal(F16, [64, 1, 33, 2])
            .normal(F32, [4, 5, 1, 2])
            .normal(F16, [33, 5, 1, 1])
            .node(Dsv4::LightningIndexer),
        case(IN_F32)
            .normal(F32, [24, 7, 1, 1])
            .listed(F32, [3, 1, 1, 1], [0.3, 0.5, 0.7])
            .normal(F32, [24, 1, 1, 1])
            .node(Dsv4::HcComb { eps: 1e-6, iterations: 20 }),
        case(IN_F32).normal(F32, streams).normal(F32, weights).node(pre(false)),
        case(IN_F32).variant("gated").normal(F32, streams).normal(F32, streams).node(pre(true)),
        case(IN_F32)
            .normal(F32, [70, 3, 1, 1])
            .normal(F32, streams)
            .normal(F32, weights)
            .normal(F32, [4, 4, 3, 1])
            .node(Dsv4::HcPost),
    ]
}
