//! Cases of ops on elements and rows: binary, unary, glu, reduce, norm, softmax, rope.

use super::{Draft, EQUAL, IN_F16, IN_F32, case};
use crate::ops::binary::Binary;
use crate::ops::glu::{Glu, GluKind};
use crate::ops::mul_mat::NO_EXPERT;
use crate::ops::norm::Norm;
use crate::ops::reduce::Reduce;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::softmax::SoftMax;
use crate::ops::unary::{Unary, UnaryKind};
use crate::tensor::DType::{F16, F32};
use std::num::NonZeroU32;

pub(super) fn cases() -> Vec<Draft> {
    [binary(), unary(), kinds(), glu(), reduce(), norm(), softmax(), rope()].into_iter().flatten().collect()
}

fn binary() -> Vec<Draft> {
    let (a, b) = ([33, 5, 6, 2], [33, 1, 3, 1]);
    let expert = |k: i32| if k == 4 { NO_EXPERT as i32 } else { k * 7 % 4 };
    vec![
        case(IN_F32).normal(F32, a).normal(F32, b).node(Binary::Add),
        case(IN_F16).variant("F16").normal(F16, a).normal(F16, b).node(Binary::Add),
        case(IN_F32).normal(F32, a).normal(F32, b).node(Binary::Sub),
        case(IN_F32).normal(F32, a).normal(F32, b).node(Binary::Mul),
        case(IN_F32).normal(F32, a).uniform(b, 0.5, 2.0).node(Binary::Div),
        case(IN_F32)
            .normal(F32, [70, 3, 5, 1])
            .normal(F32, [70, 4, 1, 1])
            .indices([3, 5, 1, 1], (0..15).map(expert))
            .node(Binary::AddId),
        case(IN_F32).normal(F32, a).listed(F32, [1; 4], [0.75]).node(Binary::Add1),
    ]
}

fn unary() -> Vec<Draft> {
    let ne = [61, 7, 3, 1];
    vec![
        case(IN_F32).normal(F32, ne).node(Unary::Sqr),
        case(IN_F32).uniform(ne, 0.1, 4.0).node(Unary::Sqrt),
        case(IN_F32).uniform(ne, 0.1, 4.0).node(Unary::Log),
        case(IN_F32).normal(F32, ne).node(Unary::Sin),
        case(IN_F32).normal(F32, ne).node(Unary::Cos),
        case(IN_F32).normal(F32, ne).node(Unary::Scale { scale: -1.5, bias: 0.25 }),
        case(EQUAL).normal(F32, ne).node(Unary::Clamp { min: -0.5, max: 1.5 }),
        case(IN_F32).normal(F32, ne).node(Unary::LeakyRelu { slope: 0.1 }),
        case(EQUAL).normal(F32, ne).node(Unary::Fill { value: -3.5 }),
    ]
}

/// The kinds of UNARY.
fn kinds() -> Vec<Draft> {
    let xielu = UnaryKind::Xielu { alpha_n: 0.9, alpha_p: 0.7, beta: 0.5, eps: -1e-6 };
    let rows = [
        ("ABS", UnaryKind::Abs, EQUAL),
        ("SGN", UnaryKind::Sgn, EQUAL),
        ("NEG", UnaryKind::Neg, EQUAL),
        ("STEP", UnaryKind::Step, EQUAL),
        ("TANH", UnaryKind::Tanh, IN_F32),
        ("ELU", UnaryKind::Elu, IN_F32),
        ("RELU", UnaryKind::Relu, EQUAL),
        ("SIGMOID", UnaryKind::Sigmoid, IN_F32),
        ("GELU", UnaryKind::Gelu, IN_F32),
        ("GELU_QUICK", UnaryKind::GeluQuick, IN_F32),
        ("SILU", UnaryKind::Silu, IN_F32),
        ("HARDSWISH", UnaryKind::HardSwish, IN_F32),
        ("HARDSIGMOID", UnaryKind::HardSigmoid, IN_F32),
        ("EXP", UnaryKind::Exp, IN_F32),
        ("EXPM1", UnaryKind::Expm1, IN_F32),
        ("SOFTPLUS", UnaryKind::Softplus, IN_F32),
        ("GELU_ERF", UnaryKind::GeluErf, IN_F32),
        ("XIELU", xielu, IN_F32),
        ("FLOOR", UnaryKind::Floor, EQUAL),
        ("CEIL", UnaryKind::Ceil, EQUAL),
        ("ROUND", UnaryKind::Round, EQUAL),
        ("TRUNC", UnaryKind::Trunc, EQUAL),
    ];
    let ne = [61, 7, 3, 1];
    rows.map(|(name, kind, bound)| case(bound).variant(name).uniform(ne, -4.0, 4.0).node(Unary::Kind(kind))).into()
}

fn glu() -> Vec<Draft> {
    let kinds = [
        ("REGLU", GluKind::Reglu),
        ("GEGLU", GluKind::Geglu),
        ("SWIGLU", GluKind::Swiglu),
        ("SWIGLU_OAI", GluKind::SwigluOai { alpha: 1.702, limit: 1.25 }),
        ("GEGLU_ERF", GluKind::GegluErf),
        ("GEGLU_QUICK", GluKind::GegluQuick),
        ("SWIGLU_CLAMP", GluKind::SwigluClamp { limit: 0.75 }),
    ];
    // The halves of one source, in both orders, and two sources.
    kinds
        .map(|(name, kind)| {
            let draft = case(IN_F32).variant(name).normal(F32, [66, 5, 2, 1]).normal(F32, [66, 5, 2, 1]);
            let swapped = |swapped| Glu { kind, swapped };
            draft.node_of(swapped(false), &[0]).node_of(swapped(true), &[0]).node_of(swapped(false), &[0, 1])
        })
        .into()
}

fn reduce() -> Vec<Draft> {
    let ne = [137, 5, 3, 2];
    vec![
        case(IN_F32).uniform(ne, 0.5, 1.5).node(Reduce::Sum),
        case(IN_F32).uniform(ne, 0.5, 1.5).node(Reduce::SumRows),
        case(IN_F32).normal(F32, [300, 7, 1, 1]).node(Reduce::Cumsum),
        case(IN_F32).uniform(ne, 0.5, 1.5).node(Reduce::Mean),
        case(EQUAL).distinct([300, 7, 1, 1]).node(Reduce::Argmax),
        case(EQUAL)
            .indices([67, 5, 1, 1], (0..335).map(|k| k * k % 7))
            .indices([67, 5, 1, 1], (0..335).map(|k| k * 3 % 7))
            .node(Reduce::CountEqual),
    ]
}

fn norm() -> Vec<Draft> {
    let (ne, groups) = ([137, 5, 3, 1], NonZeroU32::MIN.saturating_add(2));
    vec![
        case(IN_F32).normal(F32, ne).node(Norm::Norm { eps: 1e-5 }),
        case(IN_F32).normal(F32, ne).node(Norm::RmsNorm { eps: 1e-6 }),
        case(IN_F32).normal(F32, [13, 5, 9, 2]).node(Norm::GroupNorm { groups, eps: 1e-6 }),
        case(IN_F32).normal(F32, ne).node(Norm::L2Norm { eps: 1e-12 }),
    ]
}

/// A mask of `rows` rows: token `row` sees the positions up to `n - rows + row`, with a small bias.
pub(super) fn causal(n: usize, rows: usize) -> impl Iterator<Item = f32> {
    (0..n * rows).map(move |k| {
        let (position, row) = (k % n, k / n);
        if position + rows <= n + row { -0.01 * (k % 5) as f32 } else { f32::NEG_INFINITY }
    })
}

fn softmax() -> Vec<Draft> {
    let (x, mask) = ([37, 5, 4, 2], [37, 5, 1, 1]);
    let op = |max_bias| SoftMax { scale: 0.7, max_bias };
    vec![
        case(IN_F32).normal(F32, x).node(op(0.0)),
        case(IN_F32).variant("with mask").normal(F32, x).listed(F16, mask, causal(37, 5)).node(op(0.0)),
        case(IN_F32)
            .variant("with ALiBi and sinks")
            .normal(F32, x)
            .listed(F32, mask, causal(37, 5))
            .normal(F32, [4, 1, 1, 1])
            .node(op(8.0)),
    ]
}

fn rope() -> Vec<Draft> {
    let ne = [64, 5, 7, 2];
    // One position per token, or four.
    let plain = |draft: Draft| draft.indices([7, 1, 1, 1], (0..7).map(|k| (k * 37 + 5) % 61));
    let sections = |draft: Draft| draft.indices([28, 1, 1, 1], (0..28).map(|k| (k * 37 + 5) % 61));
    let f32s = |variant| case(IN_F32).variant(variant).normal(F32, ne);
    let new = |mode| Rope::new(mode, 48);
    let yarn = Rope {
        n_ctx_orig: 128,
        freq_base: 500.0,
        freq_scale: 0.25,
        ext_factor: 0.8,
        attn_factor: 1.1,
        beta_fast: 32.0,
        beta_slow: 1.0,
        ..new(RopeMode::Neox)
    };
    vec![
        plain(f32s("")).node(new(RopeMode::Normal)),
        plain(f32s("NEOX")).node(new(RopeMode::Neox)),
        plain(case(IN_F16).variant("NEOX F16").normal(F16, ne)).node(new(RopeMode::Neox)),
        plain(f32s("YARN")).uniform([24, 1, 1, 1], 0.5, 4.0).node(yarn),
        sections(f32s("MROPE")).node(new(RopeMode::Mrope([8, 6, 6, 4]))),
        sections(f32s("VISION")).node(Rope::new(RopeMode::Vision([16, 16, 0, 0]), 32)),
        sections(f32s("IMROPE")).node(new(RopeMode::Imrope([8, 8, 8, 0]))),
        plain(f32s("")).node(Rope { backward: true, ..new(RopeMode::Normal) }),
    ]
}
