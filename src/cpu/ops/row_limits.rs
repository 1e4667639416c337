//! Longest rows that the CPU processes.
//!
//! The kernels of these ops process whole rows, and a run can pause only between two claims of rows. So a row must be short enough
//! that other clients can wait for it. Dividing longer rows between claims would take a barrier and partial results for each pass of
//! each op; rows of models are far shorter, so longer ones are refused.

use super::{bounded, store_cost};
use crate::device::Unsupported;
use crate::ops::backward::Backward;
use crate::ops::norm::Norm;
use crate::ops::reduce::Reduce;
use crate::ops::rows::Rows;
use crate::ops::training::Training;
use crate::ops::{NodeView, Op};
use crate::tensor::TensorDesc;

/// Most elements of a row in ops that read and write it a few times. Rows are vocabularies (2^18) or the positions of a context
/// (2^20).
pub(in crate::cpu) const MAX_ROW: usize = 1 << 25;

/// Most elements of a group of GROUP_NORM. A decoder of images has groups of 2^25 elements for 2048 by 2048 pixels, one of videos
/// normalises over the frames too. A group of this size holds the device for about a second.
pub(in crate::cpu) const MAX_GROUP: usize = 1 << 28;

/// Most elements of a row that is sorted.
pub(in crate::cpu) const MAX_SORTED_ROW: usize = 1 << 21;

/// Most elements of a row that is rotated. Heads have some hundred elements.
pub(in crate::cpu) const MAX_ROTATED_ROW: usize = 1 << 20;

/// Refuses a node with rows that are too long for one claim.
pub(super) fn check(node: &NodeView<'_>) -> Result<(), Unsupported> {
    let most = match node.op {
        Op::Norm(Norm::GroupNorm { .. }) => MAX_GROUP,
        Op::Norm(_) | Op::SoftMax(_) | Op::Concat(_) | Op::Window(_) | Op::TopkMask(_) => MAX_ROW,
        Op::Reduce(Reduce::SumRows | Reduce::Mean | Reduce::Cumsum | Reduce::Argmax) => MAX_ROW,
        Op::Backward(Backward::RmsNorm { .. } | Backward::SoftMax { .. }) => MAX_ROW,
        Op::Training(Training::CrossEntropyLoss | Training::CrossEntropyLossBack) => MAX_ROW,
        Op::Rows(Rows::GetRows) => MAX_ROW,
        Op::Rows(Rows::SetRows) => MAX_ROW / store_cost(node.dst.dtype()),
        Op::Sort(_) => MAX_SORTED_ROW,
        Op::Rope(_) => MAX_ROTATED_ROW,
        _ => return Ok(()),
    };
    let source = node.srcs.get(0).map_or([0; 4], TensorDesc::ne);
    let row = match node.op {
        Op::Norm(Norm::GroupNorm { groups, .. }) => {
            source[0].saturating_mul(source[1]).saturating_mul(source[2].div_ceil(groups.get() as usize))
        }
        _ => source[0].max(node.dst.ne()[0]),
    };
    bounded(node.op.code(), "elements of a row", row, most)
}
