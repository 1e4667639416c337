//! Check that an older version computes a node as 7.0 does.

use super::{NotExpressible, V3_0, V3_6_0Unflagged, V7_0, VersionCodec};
use crate::ops::unary::Unary;
use crate::ops::{MAX_SRC, NodeView, Op, OpCode};
use crate::tensor::TensorDesc;

impl VersionCodec {
    /// Checks that the version can express a node, and that its servers compute the same result for it.
    ///
    /// # Errors
    /// [`NotExpressible`] names the op, type, parameter or source that the version lacks.
    pub(crate) fn check_expressible(self, node: &NodeView<'_>) -> Result<(), NotExpressible> {
        let code = node.op.code();
        if !code.is_in_protocol() {
            return Err(self.not_expressible(code.name()));
        }
        if self.is_newest() {
            return Ok(());
        }
        let require =
            |ok: bool, what: &str| if ok { Ok(()) } else { Err(self.not_expressible(format!("{code} {what}"))) };
        self.op_number(code).ok_or_else(|| self.not_expressible(code.name()))?;
        for tensor in (0..MAX_SRC).filter_map(|i| node.srcs.get(i)).chain([node.dst]) {
            if !self.has_type(tensor.dtype()) {
                return Err(self.not_expressible(tensor.dtype().name()));
            }
        }
        let params = node.op.encode();
        match node.op {
            Op::Unary(Unary::Scale { bias, .. }) => require(self >= V3_0 || *bias == 0.0, "with a bias"),
            Op::Unary(Unary::Kind(kind)) => require(self.unary_number(kind).is_some(), &format!("{kind:?}")),
            Op::Glu(glu) => require(self.has_glu(params.int(0)), &format!("{:?}", glu.kind)),
            Op::SoftMax(_) => self.check_mask(code, node.srcs.get(1), node.srcs.get(2)),
            Op::FlashAttn(_) => {
                self.check_mask(code, node.srcs.get(3), node.srcs.get(4))?;
                let rows = |tensor: Option<&TensorDesc>, dim: usize| tensor.map_or(0, |tensor| tensor.ne()[dim]);
                // The kernels of older servers read the rows of the mask in multiples of 64.
                let multiple = if self < V3_6_0Unflagged { 64 } else { 1 };
                let min_rows = rows(node.srcs.get(0), 1).next_multiple_of(multiple);
                let long_enough = node.srcs.get(3).is_none_or(|mask| mask.ne()[1] >= min_rows);
                require(long_enough, &format!("with a mask of less than {min_rows} rows"))?;
                let same = rows(node.srcs.get(1), 0) == rows(node.srcs.get(2), 0);
                require(self >= V3_0 || same, "with rows of values and keys of different lengths")
            }
            Op::Rope(rope) => {
                require(self.has_rope_mode(params.int(2)), &format!("{:?}", rope.mode))?;
                require(self >= V7_0 || rope.n_offs == 0, "that skips the first channels of a row")
            }
            _ => Ok(()),
        }
    }

    /// Checks the optional mask and sinks of SOFT_MAX and FLASH_ATTN_EXT.
    fn check_mask(
        self,
        op: OpCode,
        mask: Option<&TensorDesc>,
        sinks: Option<&TensorDesc>,
    ) -> Result<(), NotExpressible> {
        if self < V3_0 && mask.is_some_and(|mask| mask.ne()[2..] != [1, 1]) {
            return Err(self.not_expressible(format!("{op} with a mask for each head")));
        }
        if self < V3_0 && sinks.is_some() {
            return Err(self.not_expressible(format!("{op} with sinks")));
        }
        Ok(())
    }
}
