//! DUP, CPY, CONT: copies of a tensor, with the elements in the same order but possibly another layout, shape or type.

use super::{NodeView, OpCode, OpFamily, OutputSpec, ShapeError, Sources, ensure, plain_ops};
use crate::tensor::TensorDesc;

/// A copy of source 0. These ops have no parameters.
///
/// Element k of the source, counted with dimension 0 fastest, becomes element k of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOp {
    /// Same type and shape.
    Dup,
    /// Converts to the destination's type, shape and strides. Source 1, if present, only names the destination's memory.
    Cpy,
    /// Same type and number of elements.
    Cont,
}

impl OpFamily for CopyOp {
    plain_ops!(Cpy, Dup, Cont);

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let src = srcs.required(0)?;
        Ok(match (self, srcs.get(1)) {
            (CopyOp::Cpy, Some(target)) => OutputSpec::like(target),
            _ => OutputSpec::like(src),
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (src, dst) = (node.src(0)?, node.dst);
        ensure!(node, src.elements() == dst.elements(), "source and destination have equally many elements");
        match self {
            CopyOp::Dup => node.expect_dst(OutputSpec::like(src))?,
            CopyOp::Cont => ensure!(node, src.dtype() == dst.dtype(), "the destination has the source's type"),
            CopyOp::Cpy => {
                if let Some(target) = node.srcs.get(1) {
                    node.expect_dst(OutputSpec::like(target))?;
                }
                ensure!(
                    node,
                    blocks_fit_rows(src, dst) && blocks_fit_rows(dst, src),
                    "rows of the unblocked side are whole blocks of the other side, or it is contiguous"
                );
            }
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        true
    }

    fn writes_onto(&self, i: usize) -> bool {
        *self == CopyOp::Cpy && i == 1
    }

    fn batch(&self, _: &NodeView<'_>) -> usize {
        0
    }
}

/// Whether each quantisation block of `blocked` corresponds to elements of `other` within one row. A contiguous `other` always
/// qualifies, because it can be reshaped to the shape of `blocked`.
fn blocks_fit_rows(blocked: &TensorDesc, other: &TensorDesc) -> bool {
    other.is_contiguous() || other.ne()[0].is_multiple_of(blocked.dtype().block_len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn a_block_must_not_span_two_rows_unless_contiguous() {
        let t = |dtype, ne, nb| TensorDesc::strided(dtype, ne, nb).unwrap();
        let blocked = TensorDesc::contiguous(DType::Q8_0, [64, 3, 1, 1]).unwrap();
        assert!(blocks_fit_rows(&blocked, &t(DType::F32, [48, 4, 1, 1], [4, 192, 768, 768])), "packed");
        assert!(blocks_fit_rows(&blocked, &t(DType::F32, [96, 2, 1, 1], [4, 400, 800, 800])), "3 blocks to a row");
        assert!(!blocks_fit_rows(&blocked, &t(DType::F32, [48, 4, 1, 1], [4, 200, 800, 800])), "a block over two rows");
    }
}
