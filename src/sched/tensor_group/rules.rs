//! Split rules: for each op, which parts of its sources a rank reads and how its result is split.
//!
//! An op without a rule, or whose sources do not fit its rule, is mirrored: every rank computes it with whole sources.
//!
//! | op | sources | result |
//! |---|---|---|
//! | MUL_MAT, MUL_MAT_ID | weight split by rows, activations whole | split in dimension 0 |
//! | | both split in dimension 0 (the columns of the weight) | partial sums |
//! | | both split in dimension 2 or 3 (heads) | split in that dimension |
//! | FLASH_ATTN_EXT | queries, keys and values split by heads | split by heads |
//! | | weight whole, activations split in dimension 1 | split in dimension 1 |
//! | element-wise ops, GLU of two sources | all split alike | split alike |
//! | ADD, SUB of partial sums; MUL, DIV, SCALE of partial sums by a whole tensor; copies of them | partial sums | partial sums |
//! | norms, SUM_ROWS, MEAN, CUMSUM, ARGSORT, TOP_K, GLU of one source | split in a dimension from 1 on | split alike |
//! | ROPE | split in dimension 1 (heads) | split alike |
//! | SOFT_MAX | split in a dimension from 1 on, mask whole | split alike |
//! | CONT, DUP, CPY, SET_ROWS | split | split, if the parts remain ranges |
//! | CONCAT | split alike in another dimension than that of the op | split alike |
//! | GET_ROWS | table split in dimension 0 | split in dimension 0 |
//! | | table split in dimension 2 or 3, ids alike | split in that dimension |

use super::propagate::{Interrupt, OperandState, Propagation, SourcePart};
use super::split_class::ClassId;
use super::views::{blocks, reshaped_split};
use crate::graph::{Node, TensorId};
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::norm::Norm;
use crate::ops::reduce::Reduce;
use crate::ops::rows::Rows;
use crate::ops::unary::Unary;
use crate::ops::{MAX_SRC, Op};
use crate::tensor::DIMS;

/// The part of each source that a rank reads, and how the result is distributed.
pub(super) type NodeSplit = ([Option<SourcePart>; MAX_SRC], OperandState);

/// `None`: the rule does not apply, and the node is mirrored.
type RuleResult = Result<Option<NodeSplit>, Interrupt>;

/// The accesses of the first sources.
fn accesses<const N: usize>(first: [SourcePart; N]) -> [Option<SourcePart>; MAX_SRC] {
    let mut all = [None; MAX_SRC];
    all.iter_mut().zip(first).for_each(|(to, access)| *to = Some(access));
    all
}

impl Propagation<'_> {
    /// Splits a node.
    pub(super) fn split_node(&mut self, node: &Node) -> Result<NodeSplit, Interrupt> {
        let onto = !self.is_own_slot(node);
        let split = match &node.op {
            Op::Rows(Rows::SetRows) => self.set_rows(node)?,
            Op::CopyOp(_) if onto => self.copy_onto(node)?,
            // Writes into a part of a slot.
            _ if onto => None,
            Op::MulMat(op) if op.by_id => self.mul_mat_id(node)?,
            Op::MulMat(_) => self.mul_mat(node)?,
            Op::FlashAttn(op) => self.flash_attn(node, op.max_bias)?,
            Op::Binary(op @ (Binary::Add | Binary::Sub | Binary::Mul | Binary::Div)) => self.binary(node, *op)?,
            Op::Unary(op) => self.unary(node, op)?,
            Op::Glu(_) => self.glu(node)?,
            Op::Norm(Norm::Norm { .. } | Norm::RmsNorm { .. } | Norm::L2Norm { .. }) => self.row_wise(node)?,
            Op::Reduce(Reduce::SumRows | Reduce::Mean | Reduce::Cumsum) | Op::Sort(_) => self.row_wise(node)?,
            Op::Concat(Concat::Concat { dim }) => self.concat(node, usize::from(*dim))?,
            Op::SoftMax(op) if op.max_bias == 0.0 => self.soft_max(node)?,
            Op::Rope(_) => self.rope(node)?,
            Op::CopyOp(op) => self.copy(node, *op)?,
            Op::Rows(Rows::GetRows) => self.get_rows(node)?,
            _ => None,
        };
        match split {
            Some(split) => Ok(split),
            None => self.mirror_node(node),
        }
    }

    /// Every rank computes the node with whole sources.
    pub(super) fn mirror_node(&mut self, node: &Node) -> Result<NodeSplit, Interrupt> {
        let mut srcs = [None; MAX_SRC];
        for (access, id) in srcs.iter_mut().zip(node.srcs) {
            if let Some(id) = id {
                *access = Some(self.whole(id)?);
            }
        }
        if !self.is_own_slot(node) {
            // A node that writes a part of a split slot would need the split of its result.
            match self.operand(node.dst)? {
                OperandState::Undecided | OperandState::Mirrored => drop(self.whole(node.dst)?),
                _ => return Err(self.cannot_write(node)),
            }
        }
        Ok((srcs, OperandState::Mirrored))
    }

    /// A node writes a part of a split tensor that it cannot split alike. The tensor is mirrored if that is still possible.
    fn cannot_write(&self, node: &Node) -> Interrupt {
        match self.slot_of(node.dst) {
            Ok(slot) if self.may_mirror(slot) => Interrupt::Mirror(vec![slot]),
            _ => {
                let (op, name) = (node.op.code(), self.task.name(node.dst).to_owned());
                super::TensorSplitError::WritesSplitTensor { op, name }.into()
            }
        }
    }

    fn source(&self, node: &Node, i: usize) -> Result<TensorId, Interrupt> {
        Ok(node.srcs[i].ok_or(super::TensorSplitError::Bug("a node without a required source"))?)
    }

    /// A source as an operand of a rule: partial sums and scattered views become whole.
    fn usable(&mut self, id: TensorId) -> Result<OperandState, Interrupt> {
        match self.operand(id)? {
            OperandState::Partial | OperandState::Scattered => self.whole(id).map(|_| OperandState::Mirrored),
            other => Ok(other),
        }
    }

    /// As [`Propagation::usable`]; a stored tensor without a decision becomes mirrored.
    fn decided(&mut self, id: TensorId) -> Result<OperandState, Interrupt> {
        match self.usable(id)? {
            OperandState::Undecided => self.whole(id).map(|_| OperandState::Mirrored),
            other => Ok(other),
        }
    }

    /// A source that is to be split like `class` in dimension `axis`: as it is, assigned, or sliced.
    fn aligned(&mut self, id: TensorId, axis: usize, class: ClassId) -> Result<Option<SourcePart>, Interrupt> {
        match self.usable(id)? {
            OperandState::Split { axis: own, class: of } if own == axis && self.merge(class, of) => {
                Ok(Some(SourcePart::Local))
            }
            OperandState::Undecided if self.assign(id, axis, class)? => Ok(Some(SourcePart::Local)),
            _ => self.slice(id, axis, class),
        }
    }

    fn mul_mat(&mut self, node: &Node) -> RuleResult {
        let (a_id, x_id) = (self.source(node, 0)?, self.source(node, 1)?);
        let (a_ne, x_ne) = (self.desc(a_id)?.ne(), self.desc(x_id)?.ne());
        let is_matrix = a_ne[2..] == [1, 1];
        match (self.usable(a_id)?, self.usable(x_id)?) {
            // The columns of the weight are split like the activations: each rank has a partial sum of the product.
            (_, OperandState::Split { axis: 0, class }) => self.product_of_columns(a_id, x_id, class),
            (OperandState::Split { axis: 0, class }, _) => self.product_of_columns(a_id, x_id, class),
            (a, OperandState::Split { axis: 1, .. }) => {
                if !matches!(a, OperandState::Split { .. }) {
                    self.whole(a_id)?;
                    return self.result_like(accesses([SourcePart::Whole, SourcePart::Local]), x_id, 1);
                }
                Ok(None)
            }
            (OperandState::Split { axis: 1, class }, _) => {
                self.whole(x_id)?;
                Ok(Some((accesses([SourcePart::Local, SourcePart::Whole]), OperandState::Split { axis: 0, class })))
            }
            (_, OperandState::Split { axis, class }) => {
                let Some(a) = self.heads(a_id, axis, class, x_ne[axis])? else { return Ok(None) };
                Ok(Some((accesses([a, SourcePart::Local]), OperandState::Split { axis, class })))
            }
            (OperandState::Split { axis, class }, OperandState::Mirrored) => {
                let x = self.slice(x_id, axis, class)?;
                Ok(x.map(|x| (accesses([SourcePart::Local, x]), OperandState::Split { axis, class })))
            }
            (OperandState::Undecided | OperandState::Mirrored, _) if is_matrix => self.product_of_rows(a_id, x_id),
            _ => Ok(None),
        }
    }

    fn mul_mat_id(&mut self, node: &Node) -> RuleResult {
        let (a_id, x_id, ids) = (self.source(node, 0)?, self.source(node, 1)?, self.source(node, 2)?);
        let split = match (self.usable(a_id)?, self.usable(x_id)?) {
            (_, OperandState::Split { axis: 0, class }) => self.product_of_columns(a_id, x_id, class)?,
            (OperandState::Split { axis: 0, class }, _) => self.product_of_columns(a_id, x_id, class)?,
            (OperandState::Split { axis: 1, class }, _) => {
                self.whole(x_id)?;
                Some((accesses([SourcePart::Local, SourcePart::Whole]), OperandState::Split { axis: 0, class }))
            }
            (OperandState::Undecided | OperandState::Mirrored, _) => self.product_of_rows(a_id, x_id)?,
            _ => None,
        };
        let Some((mut srcs, result)) = split else { return Ok(None) };
        srcs[2] = Some(self.whole(ids)?);
        Ok(Some((srcs, result)))
    }

    /// The inner dimension is split like `class`.
    fn product_of_columns(&mut self, a: TensorId, x: TensorId, class: ClassId) -> RuleResult {
        let Some(weight) = self.aligned(a, 0, class)? else { return self.product_of_rows(a, x) };
        let Some(activations) = self.aligned(x, 0, class)? else { return Ok(None) };
        Ok(Some((accesses([weight, activations]), OperandState::Partial)))
    }

    /// Each rank computes the products with some rows of the weight.
    fn product_of_rows(&mut self, a: TensorId, x: TensorId) -> RuleResult {
        let weight = self.slot_of(a)?;
        let operand = self.usable(a)?;
        let rows = self.desc(a)?.ne()[1];
        if !self.is_stored(a) {
            return Ok(None);
        }
        let access = match operand {
            OperandState::Undecided if !self.is_looked_up(a) => {
                let Some(class) = self.new_class(rows, Some(weight)) else { return Ok(None) };
                self.assign(a, 1, class)?.then_some((SourcePart::Local, class))
            }
            OperandState::Split { axis: 1, class } => Some((SourcePart::Local, class)),
            // Embeddings that are tied to the output stay mirrored, because lookups need all rows.
            OperandState::Undecided | OperandState::Mirrored if self.is_looked_up(a) => {
                match self.new_class(rows, None) {
                    Some(class) => self.slice(a, 1, class)?.map(|slice| (slice, class)),
                    None => None,
                }
            }
            _ => None,
        };
        let Some((access, class)) = access else { return Ok(None) };
        self.whole(x)?;
        Ok(Some((accesses([access, SourcePart::Whole]), OperandState::Split { axis: 0, class })))
    }

    /// Keys or values for queries whose `heads` heads (dimension `axis`) are split.
    fn heads(
        &mut self,
        id: TensorId,
        axis: usize,
        class: ClassId,
        heads: usize,
    ) -> Result<Option<SourcePart>, Interrupt> {
        let own = self.desc(id)?.ne()[axis];
        match self.decided(id)? {
            OperandState::Split { axis: of, class: other } if of == axis => {
                return Ok(self.merge(class, other).then_some(SourcePart::Local));
            }
            _ if own == 1 => return self.whole(id).map(Some),
            _ => {}
        }
        if let Some(slice) = self.slice(id, axis, class)? {
            return Ok(Some(slice));
        }
        // Fewer heads than ranks: the heads of each rank's queries must use one head.
        let ranks = self.ranks();
        let fits = ranks.is_multiple_of(own) && heads.is_multiple_of(ranks) && self.require(class, ranks);
        if !fits {
            return Ok(None);
        }
        self.whole(id)?;
        Ok(Some(SourcePart::EnclosingSlice { axis, class }))
    }

    fn flash_attn(&mut self, node: &Node, max_bias: f32) -> RuleResult {
        let ids = [self.source(node, 0)?, self.source(node, 1)?, self.source(node, 2)?];
        let mask = node.srcs[3];
        // ALiBi's slopes depend on the number of the head, and sinks have one element per head.
        if max_bias != 0.0 || node.srcs[4..].iter().any(Option::is_some) {
            return Ok(None);
        }
        if let Some(mask) = mask
            && self.desc(mask)?.ne()[2] != 1
        {
            return Ok(None);
        }
        let [q, k, v] = ids;
        let class = match (self.decided(q)?, self.decided(k)?) {
            (OperandState::Split { axis: 2, class }, _) => class,
            (OperandState::Mirrored, OperandState::Split { axis: 2, class }) => class,
            _ => return Ok(None),
        };
        let heads = self.desc(q)?.ne()[2];
        let (Some(k), Some(v)) = (self.heads(k, 2, class, heads)?, self.heads(v, 2, class, heads)?) else {
            return Ok(None);
        };
        let Some(q) = self.aligned(q, 2, class)? else { return Ok(None) };
        let mut srcs = accesses([q, k, v]);
        if let Some(mask) = mask {
            srcs[3] = Some(self.whole(mask)?);
        }
        // The result is [DV, H, N, B].
        Ok(Some((srcs, OperandState::Split { axis: 1, class })))
    }

    fn binary(&mut self, node: &Node, op: Binary) -> RuleResult {
        let (a, b) = (self.source(node, 0)?, self.source(node, 1)?);
        let (a_ne, b_ne) = (self.desc(a)?.ne(), self.desc(b)?.ne());
        match (self.operand(a)?, self.operand(b)?) {
            (OperandState::Partial, OperandState::Partial) if matches!(op, Binary::Add | Binary::Sub) => {
                return Ok(Some((accesses([SourcePart::Local; 2]), OperandState::Partial)));
            }
            (OperandState::Partial, OperandState::Mirrored | OperandState::Undecided)
                if matches!(op, Binary::Mul | Binary::Div) =>
            {
                return Ok(Some((accesses([SourcePart::Local, self.whole(b)?]), OperandState::Partial)));
            }
            (OperandState::Mirrored | OperandState::Undecided, OperandState::Partial) if op == Binary::Mul => {
                return Ok(Some((accesses([self.whole(a)?, SourcePart::Local]), OperandState::Partial)));
            }
            _ => {}
        }
        match (self.usable(a)?, self.usable(b)?) {
            (OperandState::Split { axis, class }, _) => {
                let b = if b_ne[axis] == 1 {
                    Some(self.whole(b)?)
                } else if b_ne[axis] == a_ne[axis] {
                    self.aligned(b, axis, class)?
                } else {
                    None
                };
                Ok(b.map(|b| (accesses([SourcePart::Local, b]), OperandState::Split { axis, class })))
            }
            (_, OperandState::Split { axis, class }) if a_ne[axis] == b_ne[axis] => {
                let a = self.aligned(a, axis, class)?;
                Ok(a.map(|a| (accesses([a, SourcePart::Local]), OperandState::Split { axis, class })))
            }
            _ => Ok(None),
        }
    }

    fn unary(&mut self, node: &Node, op: &Unary) -> RuleResult {
        let x = self.source(node, 0)?;
        let linear = matches!(op, Unary::Scale { bias, .. } if *bias == 0.0);
        match self.operand(x)? {
            OperandState::Partial if linear => Ok(Some((accesses([SourcePart::Local]), OperandState::Partial))),
            split @ OperandState::Split { .. } => Ok(Some((accesses([SourcePart::Local]), split))),
            _ => Ok(None),
        }
    }

    fn glu(&mut self, node: &Node) -> RuleResult {
        let x = self.source(node, 0)?;
        let Some(gate) = node.srcs[1] else {
            // Both halves of a row are in one source.
            return self.row_wise(node);
        };
        self.split_alike([x, gate], None)
    }

    /// Two tensors one after the other along dimension `dim`.
    fn concat(&mut self, node: &Node, dim: usize) -> RuleResult {
        let both = [self.source(node, 0)?, self.source(node, 1)?];
        self.split_alike(both, Some(dim))
    }

    /// The first two sources are split alike, in another dimension than `except`, and so is the result.
    fn split_alike(&mut self, [a, b]: [TensorId; 2], except: Option<usize>) -> RuleResult {
        let (axis, class, follows) = match (self.usable(a)?, self.usable(b)?) {
            (OperandState::Split { axis, class }, _) => (axis, class, 1),
            (_, OperandState::Split { axis, class }) => (axis, class, 0),
            _ => return Ok(None),
        };
        if except == Some(axis) {
            return Ok(None);
        }
        let Some(part) = self.aligned([a, b][follows], axis, class)? else { return Ok(None) };
        let mut srcs = [SourcePart::Local; 2];
        srcs[follows] = part;
        Ok(Some((accesses(srcs), OperandState::Split { axis, class })))
    }

    /// An op of one source that treats each row alone.
    fn row_wise(&mut self, node: &Node) -> RuleResult {
        let x = self.source(node, 0)?;
        let rest = node.srcs[1..].iter().any(Option::is_some);
        match self.operand(x)? {
            split @ OperandState::Split { axis: 1.., .. } if !rest => Ok(Some((accesses([SourcePart::Local]), split))),
            _ => Ok(None),
        }
    }

    fn soft_max(&mut self, node: &Node) -> RuleResult {
        let (x, mask) = (self.source(node, 0)?, node.srcs[1]);
        let OperandState::Split { axis, class } = self.operand(x)? else { return Ok(None) };
        if axis == 0 || node.srcs[2].is_some() {
            return Ok(None);
        }
        let mut srcs = accesses([SourcePart::Local]);
        if let Some(mask) = mask {
            if self.desc(mask)?.ne()[axis] != 1 {
                return Ok(None);
            }
            srcs[1] = Some(self.whole(mask)?);
        }
        Ok(Some((srcs, OperandState::Split { axis, class })))
    }

    /// ROPE of heads, which are dimension 1; positions are along dimension 2.
    fn rope(&mut self, node: &Node) -> RuleResult {
        let x = self.source(node, 0)?;
        let split @ OperandState::Split { axis: 1, .. } = self.operand(x)? else { return Ok(None) };
        let mut srcs = accesses([SourcePart::Local]);
        for (access, id) in srcs.iter_mut().zip(node.srcs).skip(1) {
            if let Some(id) = id {
                *access = Some(self.whole(id)?);
            }
        }
        Ok(Some((srcs, split)))
    }

    /// A copy to a slot of its own.
    fn copy(&mut self, node: &Node, op: CopyOp) -> RuleResult {
        let x = self.source(node, 0)?;
        let (from, to) = (self.desc(x)?, self.desc(node.dst)?);
        if op == CopyOp::Cpy && node.srcs[1].is_some() {
            return Ok(None);
        }
        match self.operand(x)? {
            OperandState::Partial if from.dtype() == to.dtype() => {
                Ok(Some((accesses([SourcePart::Local]), OperandState::Partial)))
            }
            OperandState::Split { axis, class } => {
                let Some(split) = reshaped_split(from.ne(), axis, to.ne()) else { return Ok(None) };
                if !self.require(class, split.count) || !self.require(class, blocks(&to)[split.axis]) {
                    return Ok(None);
                }
                Ok(Some((accesses([SourcePart::Local]), OperandState::Split { axis: split.axis, class })))
            }
            _ => Ok(None),
        }
    }

    /// A copy into a part of a slot, of the same shape.
    fn copy_onto(&mut self, node: &Node) -> RuleResult {
        let x = self.source(node, 0)?;
        if self.desc(x)?.ne() != self.desc(node.dst)?.ne() {
            return Ok(None);
        }
        let split = self.written_like(node, x, |axis| axis < DIMS)?;
        Ok(split.map(|access| {
            let mut srcs = accesses([access]);
            srcs[1] = node.srcs[1].map(|_| SourcePart::Local);
            (srcs, OperandState::Mirrored)
        }))
    }

    fn set_rows(&mut self, node: &Node) -> RuleResult {
        let (x, ids) = (self.source(node, 0)?, self.source(node, 1)?);
        // Dimension 1 is the rows that the indices select. Indices that differ along a later dimension would have to be split.
        let ids_ne = self.desc(ids)?.ne();
        let keeps = |axis: usize| axis == 0 || axis >= 2 && ids_ne[axis - 1] == 1;
        let Some(access) = self.written_like(node, x, keeps)? else { return Ok(None) };
        let mut srcs = accesses([access, self.whole(ids)?]);
        srcs[2] = node.srcs[2].map(|_| SourcePart::Local);
        Ok(Some((srcs, OperandState::Mirrored)))
    }

    /// A node that writes a view of a stored tensor, elements of its source `x` at the same index in the dimensions for which
    /// `keeps` is true. Gives the access to `x` if the view is split; an undecided tensor is split like `x`.
    fn written_like(
        &mut self,
        node: &Node,
        x: TensorId,
        keeps: impl Fn(usize) -> bool,
    ) -> Result<Option<SourcePart>, Interrupt> {
        match (self.operand(node.dst)?, self.usable(x)?) {
            (OperandState::Undecided, OperandState::Split { axis, class }) if keeps(axis) => {
                Ok(self.assign(node.dst, axis, class)?.then_some(SourcePart::Local))
            }
            (OperandState::Split { axis, class }, _) if keeps(axis) => match self.aligned(x, axis, class)? {
                Some(access) => Ok(Some(access)),
                None => Err(self.cannot_write(node)),
            },
            _ => Ok(None),
        }
    }

    /// Rows of a table that is split in dimension 0, or of tables that are split in dimension 2 or 3, each with a list of ids. Any other
    /// table becomes whole.
    fn get_rows(&mut self, node: &Node) -> RuleResult {
        let (table, ids) = (self.source(node, 0)?, self.source(node, 1)?);
        match self.operand(table)? {
            split @ OperandState::Split { axis: 0, .. } => {
                Ok(Some((accesses([SourcePart::Local, self.whole(ids)?]), split)))
            }
            split @ OperandState::Split { axis: axis @ 2.., class } => {
                // The lists are along dimensions 1 and 2 of the ids.
                let ids = self.aligned(ids, axis - 1, class)?;
                Ok(ids.map(|ids| (accesses([SourcePart::Local, ids]), split)))
            }
            _ => Ok(None),
        }
    }

    /// The node's result is split like source `id` in dimension `axis`.
    fn result_like(&mut self, srcs: [Option<SourcePart>; MAX_SRC], id: TensorId, axis: usize) -> RuleResult {
        match self.operand(id)? {
            OperandState::Split { class, .. } => Ok(Some((srcs, OperandState::Split { axis, class }))),
            _ => Ok(None),
        }
    }
}
