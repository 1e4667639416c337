//! Which nodes mean the same in an older version.

use super::{Dialect, Unsayable};
use crate::ops::unary::Unary;
use crate::ops::{MAX_SRC, NodeView, Op, OpCode};
use crate::tensor::TensorDesc;

impl Dialect {
    /// That a node can be said, and means there what it means here.
    ///
    /// # Errors
    /// [`Unsayable`] names what of it the version lacks: the op, a type, a parameter or a source.
    pub(crate) fn says(&self, node: &NodeView<'_>) -> Result<(), Unsayable> {
        if self.current {
            return Ok(());
        }
        let code = node.op.code();
        let has = |has: bool, what: &str| if has { Ok(()) } else { Err(self.no(format!("{code} {what}"))) };
        self.op(code).ok_or_else(|| self.no(code.name()))?;
        for tensor in (0..MAX_SRC).filter_map(|i| node.srcs.get(i)).chain([node.dst]) {
            if !self.has_type(tensor.dtype()) {
                return Err(self.no(tensor.dtype().name()));
            }
        }
        let meaning = &self.meaning;
        let words = node.op.encode();
        match node.op {
            Op::Unary(Unary::Scale { bias, .. }) => has(meaning.scale_bias || *bias == 0.0, "with a bias"),
            Op::Unary(Unary::Kind(kind)) => has(self.kind(kind).is_some(), &format!("{kind:?}")),
            Op::Glu(glu) => has(self.has_glu(words.int(0)), &format!("{:?}", glu.kind)),
            Op::SoftMax(_) => self.masked(code, node.srcs.get(1), node.srcs.get(2)),
            Op::FlashAttn(_) => {
                self.masked(code, node.srcs.get(3), node.srcs.get(4))?;
                let rows = |tensor: Option<&TensorDesc>, dim: usize| tensor.map_or(0, |tensor| tensor.ne()[dim]);
                let wanted = rows(node.srcs.get(0), 1).next_multiple_of(meaning.mask_rows);
                let long = node.srcs.get(3).is_none_or(|mask| mask.ne()[1] >= wanted);
                has(long, &format!("with a mask of less than {wanted} rows"))?;
                let same = rows(node.srcs.get(1), 0) == rows(node.srcs.get(2), 0);
                has(meaning.wide_values || same, "with values of another length than the keys'")
            }
            Op::Rope(rope) => {
                has(meaning.rope_modes.contains(&words.int(2)), &format!("{:?}", rope.mode))?;
                has(meaning.rope_offset || rope.n_offs == 0, "that begins behind a row's first channels")
            }
            _ => Ok(()),
        }
    }

    fn masked(&self, op: OpCode, mask: Option<&TensorDesc>, sinks: Option<&TensorDesc>) -> Result<(), Unsayable> {
        if !self.meaning.large_masks && mask.is_some_and(|mask| mask.ne()[2..] != [1, 1]) {
            return Err(self.no(format!("{op} with a mask for each head")));
        }
        if !self.meaning.sinks && sinks.is_some() {
            return Err(self.no(format!("{op} with sinks")));
        }
        Ok(())
    }
}
