//! DUP, CPY, CONT: the same elements in the same order, in another layout, shape or type.

use super::{Family, NodeView, OpCode, Out, ParamError, ShapeError, Sources, Words, ensure};
use crate::tensor::TensorDesc;

/// A copy of source 0. None has parameters.
///
/// Element k of the source, counted with dimension 0 fastest, becomes element k of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// Same type and shape.
    Dup,
    /// To the destination's type, shape and strides. Source 1, where there is one, only names the target's memory.
    Cpy,
    /// Same type and number of elements.
    Cont,
}

impl Family for Copy {
    fn code(&self) -> OpCode {
        match self {
            Copy::Dup => OpCode::Dup,
            Copy::Cpy => OpCode::Cpy,
            Copy::Cont => OpCode::Cont,
        }
    }

    fn decode(code: OpCode, _: &Words) -> Result<Self, ParamError> {
        Ok(match code {
            OpCode::Dup => Copy::Dup,
            OpCode::Cont => Copy::Cont,
            _ => Copy::Cpy,
        })
    }

    fn encode(&self) -> Words {
        Words::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<Out, ShapeError> {
        let src = srcs.need(0)?;
        Ok(match (self, srcs.get(1)) {
            (Copy::Cpy, Some(target)) => Out::like(target),
            _ => Out::like(src),
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (src, dst) = (node.src(0)?, node.dst);
        ensure!(node, src.elements() == dst.elements(), "source and destination have equally many elements");
        match self {
            Copy::Dup => node.dst_is(Out::like(src))?,
            Copy::Cont => ensure!(node, src.dtype() == dst.dtype(), "the destination has the source's type"),
            Copy::Cpy => {
                if let Some(target) = node.srcs.get(1) {
                    node.dst_is(Out::like(target))?;
                }
                ensure!(
                    node,
                    whole_blocks(src, dst) && whole_blocks(dst, src),
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
        *self == Copy::Cpy && i == 1
    }

    fn batch(&self, _: &NodeView<'_>) -> usize {
        0
    }
}

/// Whether each block of `blocked` meets elements of `other` that lie in one row, once a contiguous `other` is seen in
/// the shape of `blocked`.
fn whole_blocks(blocked: &TensorDesc, other: &TensorDesc) -> bool {
    other.is_contiguous() || other.ne()[0].is_multiple_of(blocked.dtype().block_len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn blocks_meet_parts_of_one_row() {
        let t = |dtype, ne, nb| TensorDesc::strided(dtype, ne, nb).unwrap();
        let blocked = TensorDesc::contiguous(DType::Q8_0, [64, 3, 1, 1]).unwrap();
        assert!(whole_blocks(&blocked, &t(DType::F32, [48, 4, 1, 1], [4, 192, 768, 768])), "packed");
        assert!(whole_blocks(&blocked, &t(DType::F32, [96, 2, 1, 1], [4, 400, 800, 800])), "3 blocks to a row");
        assert!(!whole_blocks(&blocked, &t(DType::F32, [48, 4, 1, 1], [4, 200, 800, 800])), "a block over two rows");
    }
}
