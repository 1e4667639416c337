//! ADD, SUB, MUL, DIV: element-wise arithmetic with broadcast. ADD1: adds a number. ADD_ID: adds a row that is selected by index.

use super::{NodeView, OpCode, OpFamily, OutputSpec, ShapeError, Sources, ensure, plain_ops};
use crate::tensor::{Capability, DType};

/// An element-wise op of two tensors. These ops have no parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// `a + b`; `b` is broadcast to `a`'s shape: it repeats in every dimension. A quantised `a` (or one of F8_E4M3) is converted to
    /// f32 for it, and the sum to dst's type; `b` has `a`'s shape then.
    Add,
    /// `a + b`, where b has one element. dst has a's type.
    Add1,
    /// `a - b`, broadcast as [`Binary::Add`].
    Sub,
    /// `a * b`, broadcast as [`Binary::Add`].
    Mul,
    /// `a / b` (IEEE), broadcast as [`Binary::Add`].
    Div,
    /// `dst[:, i1, i2] = a[:, i1, i2] + b[:, ids[i1, i2]]`: a `[n, n_used, n_tok, 1]`, b `[n, n_expert, 1, 1]`,
    /// ids I32 `[n_used, n_tok, 1, 1]`. Where the id is [`NO_EXPERT`](super::mul_mat::NO_EXPERT), dst is a.
    AddId,
}

impl OpFamily for Binary {
    plain_ops!(Add, Add1, Sub, Mul, Div, AddId);

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (a, b) = (node.src(0)?, node.src(1)?);
        ensure!(node, node.dst.ne() == a.ne(), "dst has a's shape");
        ensure!(node, a.rows_dense() && node.dst.rows_dense(), "rows of a and dst are dense");
        if let Binary::AddId = self {
            let ids = node.src(2)?;
            ensure!(node, ids.dtype() == DType::I32, "ids are I32");
            let ([n, used, tokens, outer], bn, idn) = (a.ne(), b.ne(), ids.ne());
            ensure!(
                node,
                outer == 1 && bn[0] == n && bn[2] == 1 && bn[3] == 1,
                "a is [n, n_used, n_tok], b is [n, n_expert]"
            );
            ensure!(node, idn == [used, tokens, 1, 1], "ids are [n_used, n_tok]");
            ensure!(node, b.rows_dense(), "rows of b are dense");
        } else if let Binary::Add1 = self {
            ensure!(node, b.ne() == [1; 4], "b has one element");
            ensure!(node, a.dtype() == node.dst.dtype(), "dst has a's type");
        } else {
            ensure!(node, b.can_repeat_to(a), "each of a's counts is a multiple of b's");
            let floats = a.dtype().is_float() && node.dst.dtype().is_float();
            let converts = a.dtype().can(Capability::Decode) && !floats;
            ensure!(
                node,
                !converts || b.ne() == a.ne() && b.rows_dense(),
                "b has the shape of a quantised a, and dense rows"
            );
        }
        Ok(())
    }

    fn in_place(&self, i: usize) -> bool {
        // ADD_ID may read a row of b after other rows of dst have been written, so dst must not overlap b.
        i == 0 || *self != Binary::AddId
    }
}
