//! Cases of ops that move elements, or make them from numbers: copy, rows, concat, sort, topk_mask, assign, sequence, diag, pad.

use super::elementwise::causal;
use super::{Draft, EQUAL, IN_F16, IN_F32, IN_Q8, case, weight_types};
use crate::ops::assign::Assign;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::diag::{Diag, Triangle};
use crate::ops::pad::Pad;
use crate::ops::rows::Rows;
use crate::ops::sequence::Sequence;
use crate::ops::sort::Sort;
use crate::ops::topk_mask::TopkMask;
use crate::tensor::DType::{BF16, F16, F32, I32, Q4_0, Q8_0};

pub(super) fn cases() -> Vec<Draft> {
    let groups = [copy(), rows(), concat(), sort(), topk_mask(), assign(), sequence(), diag(), pad()];
    groups.into_iter().flatten().collect()
}

fn copy() -> Vec<Draft> {
    let (ne, blocks) = ([33, 5, 3, 2], [96, 5, 3, 1]);
    vec![
        case(EQUAL).normal(F32, ne).node(CopyOp::Dup),
        case(IN_F16).variant("F32 to F16").normal(F32, ne).node_as(CopyOp::Cpy, F16, ne),
        case(EQUAL).variant("F16 to F32").normal(F16, ne).permuted([0, 2, 1, 3]).node_as(
            CopyOp::Cpy,
            F32,
            [33, 3, 5, 2],
        ),
        case(IN_Q8).variant("F32 to Q8_0").normal(F32, blocks).node_as(CopyOp::Cpy, Q8_0, blocks),
        case(IN_F32).variant("Q4_0 to F32").normal(Q4_0, blocks).node_as(CopyOp::Cpy, F32, blocks),
        case(EQUAL).normal(F32, ne).permuted([1, 0, 2, 3]).node_as(CopyOp::Cont, F32, [5, 33, 3, 2]),
        case(EQUAL).variant("BF16").normal(BF16, ne).permuted([0, 2, 1, 3]).node_as(CopyOp::Cont, BF16, [33, 3, 5, 2]),
    ]
}

fn rows() -> Vec<Draft> {
    let ids = |draft: Draft| draft.indices([9, 1, 1, 1], (0..9).map(|k| k * 11 % 37));
    let table = |dtype| ids(case(IN_F32).variant(dtype).normal(dtype, [512, 37, 1, 1])).node(Rows::GetRows);
    let integers = case(EQUAL).variant(I32).indices([33, 37, 1, 1], (0..33 * 37).map(|k| k * 7 - 1000));
    let mut cases: Vec<Draft> = weight_types().map(table).collect();
    cases.push(ids(integers).node(Rows::GetRows));
    // Six rows to different ones of eleven, in each of two planes.
    cases.extend([(F32, EQUAL), (F16, IN_F16), (Q8_0, IN_Q8)].map(|(dtype, bound)| {
        case(bound)
            .variant(dtype)
            .normal(F32, [96, 6, 2, 1])
            .long_indices([6, 2, 1, 1], (0..12).map(|k| (5 * (k % 6) + k / 6) % 11))
            .normal(dtype, [96, 11, 2, 1])
            .node_onto(Rows::SetRows, 2)
    }));
    cases
}

fn concat() -> Vec<Draft> {
    let join = |dim, b| case(EQUAL).variant(dim).normal(F32, [33, 5, 3, 2]).normal(F32, b).node(Concat::Concat { dim });
    vec![
        join(0, [20, 5, 3, 2]),
        join(1, [33, 2, 3, 2]),
        join(2, [33, 5, 4, 2]),
        case(EQUAL).normal(F32, [33, 5, 1, 2]).node_as(Concat::Repeat, F32, [66, 5, 3, 2]),
    ]
}

fn sort() -> Vec<Draft> {
    let ne = [300, 5, 1, 1];
    vec![
        case(EQUAL).variant("ascending").distinct(ne).node(Sort::Argsort { descending: false }),
        case(EQUAL).variant("descending").distinct(ne).node(Sort::Argsort { descending: true }),
        case(EQUAL).distinct(ne).node_as(Sort::TopK, I32, [10, 5, 1, 1]),
    ]
}

fn topk_mask() -> Vec<Draft> {
    let mask = |draft: Draft, rows| draft.listed(F16, [33, rows, 1, 1], causal(33, rows));
    vec![
        mask(case(EQUAL), 4).indices([9, 4, 1, 1], (0..36).map(|k| k * 13 % 33)).node(TopkMask),
        mask(case(EQUAL).variant("with scores and blocks"), 2)
            .indices([7, 4, 1, 1], (0..28).map(|k| k * 5 % 19))
            .listed(F32, [19, 4, 1, 1], (0..76).map(|k| if k % 3 == 0 { f32::NEG_INFINITY } else { 0.5 }))
            .indices([3, 19, 1, 1], (0..57).map(|k| k * 10 % 33))
            .indices([2, 4, 1, 1], (0..8).map(|k| k * 4 % 33))
            .node(TopkMask),
    ]
}

/// A region of three rows of ten elements, from column 2 of row 1.
fn assign() -> Vec<Draft> {
    let [row, plane] = [33, 33 * 7].map(|elements| 4 * elements);
    let op = |accumulate| Assign { accumulate, nb: [row, plane, 2 * plane], offset: row + 8, in_place: false };
    let operands = |bound| case(bound).normal(F32, [33, 7, 2, 1]).normal(F32, [10, 3, 2, 1]);
    vec![operands(IN_F32).node(op(true)), operands(EQUAL).node(op(false))]
}

fn sequence() -> Vec<Draft> {
    let embedding = Sequence::TimestepEmbedding { dim: 65, max_period: 10000 };
    vec![
        case(IN_F32).node(Sequence::Arange { start: 0.5, stop: 40.0, step: 0.75 }),
        case(IN_F32).uniform([9, 1, 1, 1], 0.0, 50.0).node(embedding),
    ]
}

fn diag() -> Vec<Draft> {
    let triangles = [
        ("upper with diagonal", Triangle::UpperWithDiagonal),
        ("upper", Triangle::Upper),
        ("lower with diagonal", Triangle::LowerWithDiagonal),
        ("lower", Triangle::Lower),
    ];
    let triangle = |(name, t)| case(EQUAL).variant(name).normal(F32, [19, 19, 3, 1]).node(Diag::Tri(t));
    let mut cases = vec![
        case(EQUAL).normal(F32, [37, 1, 3, 1]).node(Diag::Diag),
        case(EQUAL).normal(F32, [37, 9, 2, 1]).node(Diag::MaskInf { n_past: 3 }),
        case(EQUAL).normal(F32, [37, 9, 2, 1]).node(Diag::MaskZero { n_past: 3 }),
    ];
    cases.extend(triangles.map(triangle));
    cases
}

fn pad() -> Vec<Draft> {
    let pad = |circular| Pad::Pad { before: [1, 2, 0, 0], after: [3, 0, 1, 0], circular };
    let ne = [33, 7, 3, 2];
    vec![
        case(EQUAL).normal(F32, ne).node(pad(false)),
        case(EQUAL).variant("circular").normal(F32, ne).node(pad(true)),
        case(EQUAL).normal(F32, ne).node(Pad::Reflect { before: 3, after: 5 }),
        case(EQUAL).normal(F32, ne).node(Pad::Roll { shifts: [5, -2, 1, 0] }),
    ]
}
