//! Which nodes are fused: small graphs of which some could be told from their nodes by a read of an elided result, by types or by
//! shapes.

use super::super::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Builder, TensorId};
use crate::ops::binary::Binary;
use crate::ops::glu::{Glu, GluKind};
use crate::ops::mul_mat::MulMat;
use crate::ops::norm::Norm;
use crate::ops::reduce::Reduce;
use crate::ops::rows::Rows;
use crate::ops::softmax::SoftMax;
use crate::ops::sort::Sort;
use crate::ops::unary::Unary;
use crate::ops::{NodeView, Op};
use crate::tensor::DType::{self, F16, F32, I32, Q8_0};
use crate::tensor::TensorDesc;

/// Elements of a row.
const N: usize = 64;

struct Draft(Builder);

impl Draft {
    fn leaf(&mut self, dtype: DType, ne: [usize; 4]) -> TensorId {
        self.0.leaf(dtype, ne).unwrap()
    }

    fn row(&mut self) -> TensorId {
        self.leaf(F32, [N, 1, 1, 1])
    }

    /// A tensor of another shape on the first bytes of `of`.
    fn at(&mut self, of: TensorId, dtype: DType, ne: [usize; 4]) -> TensorId {
        self.0.view(of, TensorDesc::contiguous(dtype, ne).unwrap(), 0).unwrap()
    }

    fn onto(&mut self, op: impl Into<Op>, srcs: &[TensorId], dst: TensorId) -> TensorId {
        self.0.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    fn node(&mut self, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        self.0.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    fn uses(&mut self, id: TensorId, uses: u32) -> TensorId {
        self.0.set_use_count(id, uses).unwrap();
        id
    }

    /// The numbers of nodes of the kernels.
    fn kernels(self) -> Vec<usize> {
        let mut kernels = Vec::new();
        let select = |_: &NodeView<'_>| Ok::<_, ()>(());
        let emit = |call: super::super::KernelCall<()>| {
            kernels.push(call.nodes.len());
            Ok::<_, ()>(())
        };
        select_kernels(&self.0.build(), FUSION_PATTERNS, select, |_, _| Some(()), emit).unwrap();
        kernels
    }
}

/// RMS_NORM in the place of its source and MUL by weights, also there or not. The source is a leaf or computed, and read once more at
/// the end or not.
fn norm_in_place([leaf, read_later, weights_on_norm, all_in_place]: [bool; 4]) -> Vec<usize> {
    let mut d = Draft(Builder::new());
    let first = d.row();
    let x = if leaf { first } else { d.node(Unary::Sqr, &[first]) };
    d.uses(x, 1 + u32::from(read_later));
    let place = d.at(x, F32, [N, 1, 1, 1]);
    let t = d.onto(Norm::RmsNorm { eps: 1e-6 }, &[x], place);
    d.uses(t, 1);
    let w = if weights_on_norm { d.at(first, F32, [N, 1, 1, 1]) } else { d.row() };
    let y = if all_in_place { d.at(x, F32, [N, 1, 1, 1]) } else { d.row() };
    let y = d.onto(Binary::Mul, &[t, w], y);
    if read_later {
        d.node(Binary::Sub, &[x, y]);
    }
    d.kernels()
}

#[test]
fn a_result_in_the_place_of_a_source_is_elided_only_if_nothing_else_reads_the_source() {
    assert_eq!(norm_in_place([false, false, false, false]), [1, 2]);
    assert_eq!(norm_in_place([false, true, false, false]), [1, 1, 1, 1]);
    // Whoever has the leaf may read it after the run.
    assert_eq!(norm_in_place([true, false, false, false]), [1, 1]);
    // The weights are the norm's result by another name.
    assert_eq!(norm_in_place([true, false, true, false]), [1, 1]);
    // The product, which is written, hides the norm.
    assert_eq!(norm_in_place([false, true, false, true]), [1, 2, 1]);
    assert_eq!(norm_in_place([true, false, false, true]), [2]);
}

#[test]
fn a_gated_product_has_floats_in_separate_memory() {
    let fused = |dst: DType, same_memory: bool| {
        let mut d = Draft(Builder::new());
        let [gate, up] = [0, 1].map(|_| d.leaf(Q8_0, [N, N, 1, 1]));
        let x = d.row();
        let g = d.node(MulMat::PLAIN, &[gate, x]);
        let place = if same_memory { d.at(g, F32, [N, 1, 1, 1]) } else { d.row() };
        let u = d.onto(MulMat::PLAIN, &[up, x], place);
        let [g, u] = [g, u].map(|id| d.uses(id, 1));
        let y = d.leaf(dst, [N, 1, 1, 1]);
        d.onto(Glu { kind: GluKind::Swiglu, swapped: false }, &[g, u], y);
        d.kernels()
    };
    assert_eq!(fused(F32, false), [3]);
    // Two products may still be one kernel.
    assert_eq!(fused(F16, false), [2, 1]);
    assert_eq!(fused(F32, true), [1, 1, 1]);
}

#[test]
fn a_router_uses_experts_that_exist_and_divides_each_token_by_its_sum() {
    let fused = |[experts, used, tokens]: [usize; 3], divisor: [usize; 4]| {
        let mut d = Draft(Builder::new());
        // Memory behind the ids, on which a longer list may lie.
        let memory = d.leaf(I32, [256, 1, 1, 1]);
        let logits = d.leaf(F32, [experts, tokens, 1, 1]);
        let p = d.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[logits]);
        let ids = d.at(memory, I32, [experts, tokens, 1, 1]);
        let ids = d.onto(Sort::Argsort { descending: true }, &[p], ids);
        let nb = [4, 4 * experts, 4 * experts * tokens, 4 * experts * tokens];
        let list = d.0.view(ids, TensorDesc::strided(I32, [used, tokens, 1, 1], nb).unwrap(), 0).unwrap();
        let table = d.at(p, F32, [1, experts, tokens, 1]);
        let w = d.node(Rows::GetRows, &[table, list]);
        let w = d.at(w, F32, [used, tokens, 1, 1]);
        let sum = d.node(Reduce::SumRows, &[w]);
        let sum = d.at(sum, F32, divisor);
        d.node(Binary::Div, &[w, sum]);
        d.kernels()
    };
    assert_eq!(fused([8, 4, 4], [1, 4, 1, 1]), [5]);
    assert_eq!(fused([8, 4, 4], [4, 1, 1, 1]), [1; 5]);
    assert_eq!(fused([2, 8, 1], [1, 1, 1, 1]), [1; 5]);
}

#[test]
fn experts_are_added_up_by_one_kernel_only_as_floats_of_one_memory() {
    let fused = |partial: DType| {
        let (used, mut d) = (4, Draft(Builder::new()));
        let (x, w) = (d.leaf(F32, [N, used, 1, 1]), d.leaf(F32, [1, used, 1, 1]));
        let all = d.node(Binary::Mul, &[x, w]);
        d.uses(all, used as u32);
        let parts: Vec<_> = (0..used)
            .map(|expert| {
                let part = d.0.view(all, TensorDesc::contiguous(F32, [N, 1, 1, 1]).unwrap(), 4 * N * expert).unwrap();
                d.uses(part, 1)
            })
            .collect();
        let mut sum = parts[0];
        for (k, &part) in parts.iter().enumerate().skip(1) {
            let to = d.leaf(if k + 1 < used { partial } else { F32 }, [N, 1, 1, 1]);
            sum = d.onto(Binary::Add, &[sum, part], to);
            d.uses(sum, 1);
        }
        d.kernels()
    };
    assert_eq!(fused(F32), [4]);
    assert_eq!(fused(F16), [1; 4]);
}
