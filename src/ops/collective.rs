//! ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER: collectives, which combine the parts of all ranks of a group.
//!
//! A rank is a member of a group: a queue that has joined it (`device::Collectives`). The programs of all ranks run the
//! collectives of a group in the same order. These ops are fanout's own: ggml's protocol does not have them.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, DType};
use std::ops::Range;

/// A collective of the group that the queue has joined as number `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// How the parts are combined.
    pub kind: CollectiveKind,
    /// The group's number in the queue that runs the program; at most `i32::MAX`.
    pub group: u32,
}

/// How a collective combines the parts of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// The sum over all ranks, element by element, added in the order of ranks in F32. So all ranks get the same bits, in every
    /// run. Source and destination are contiguous tensors of one shape, which is the same on all ranks. The source is F32 or
    /// BF16, the destination F32. It may be the memory of an F32 source.
    AllReduce,
    /// The rank's [`piece`] along an axis of the sum that ALL_REDUCE computes, with the same bits. Source and destination differ
    /// in their extent along the axis only, and have one element along each axis above it, so that a piece is contiguous.
    ReduceScatter {
        /// The axis, as an index of `ne`: 0 to 3.
        axis: u8,
    },
    /// The parts of all ranks, one after another along an axis, in the order of ranks. Parts and destination are contiguous and
    /// of one type without blocks. Parts may differ in their extent along the axis, and are equal in the others. The extents of
    /// all parts add up to that of the destination, which is the same on all ranks.
    AllGather {
        /// The axis, as an index of `ne`: 0 to 3.
        axis: u8,
    },
}

/// The range of `n` elements that rank `rank` of `ranks` has after a REDUCE_SCATTER.
pub fn piece(n: usize, rank: usize, ranks: usize) -> Range<usize> {
    let at = |rank: usize| (rank as u128 * n as u128 / ranks.max(1) as u128) as usize; // at most `n` for ranks of the group
    at(rank)..at(rank + 1)
}

impl OpFamily for Collective {
    fn code(&self) -> OpCode {
        match self.kind {
            CollectiveKind::AllReduce => OpCode::AllReduce,
            CollectiveKind::ReduceScatter { .. } => OpCode::ReduceScatter,
            CollectiveKind::AllGather { .. } => OpCode::AllGather,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let (group, axis) = (params.int(0), params.int(1));
        let group = u32::try_from(group).map_err(|_| ParamError::new(code, 0, "group", group, "at least 0"))?;
        let valid = u8::try_from(axis).ok().filter(|&axis| usize::from(axis) < DIMS);
        let axis = valid.ok_or_else(|| ParamError::new(code, 1, "axis", axis, "0 to 3"));
        let kind = match code {
            OpCode::AllGather => CollectiveKind::AllGather { axis: axis? },
            OpCode::ReduceScatter => CollectiveKind::ReduceScatter { axis: axis? },
            _ => CollectiveKind::AllReduce,
        };
        Ok(Collective { kind, group })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default().with_int(0, self.group as i32);
        match self.kind {
            CollectiveKind::AllReduce => params,
            CollectiveKind::ReduceScatter { axis } | CollectiveKind::AllGather { axis } => {
                params.with_int(1, axis.into())
            }
        }
    }

    /// The shape of ALL_REDUCE. Those of the others depend on the other ranks.
    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let part = srcs.required(0)?;
        match self.kind {
            CollectiveKind::AllReduce => Ok(OutputSpec { dtype: DType::F32, ne: part.ne() }),
            CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllGather { .. } => {
                Err(srcs.rule_error("the destination's shape does not follow from one rank's part: it must be given"))
            }
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (part, dst) = (node.src(0)?, node.dst);
        ensure!(node, i32::try_from(self.group).is_ok(), "the group's number fits an I32");
        ensure!(node, !part.is_empty(), "the part has elements");
        ensure!(node, part.is_contiguous() && dst.is_contiguous(), "part and destination are contiguous");
        match self.kind {
            CollectiveKind::AllReduce => {
                ensure!(node, matches!(part.dtype(), DType::F32 | DType::BF16), "the part is F32 or BF16");
                node.expect_dst(OutputSpec { dtype: DType::F32, ne: part.ne() })
            }
            CollectiveKind::ReduceScatter { axis } => {
                ensure!(node, usize::from(axis) < DIMS, "the axis is 0 to 3");
                ensure!(node, matches!(part.dtype(), DType::F32 | DType::BF16), "the part is F32 or BF16");
                ensure!(node, dst.dtype() == DType::F32 && !dst.is_empty(), "the destination is F32 and has elements");
                let axis = usize::from(axis);
                for (d, (whole, piece)) in part.ne().into_iter().zip(dst.ne()).enumerate() {
                    ensure!(node, d == axis || piece == whole, "part and destination differ along the axis only");
                    ensure!(node, d != axis || piece <= whole, "the destination is no longer than the part");
                    ensure!(node, d <= axis || whole == 1, "there is one element along each axis above");
                }
                Ok(())
            }
            CollectiveKind::AllGather { axis } => {
                ensure!(node, usize::from(axis) < DIMS, "the axis is 0 to 3");
                ensure!(node, !part.dtype().is_block(), "the type has no blocks");
                ensure!(node, part.dtype() == dst.dtype(), "the destination has the part's type");
                let axis = usize::from(axis);
                for (d, (part, whole)) in part.ne().into_iter().zip(dst.ne()).enumerate() {
                    ensure!(node, d == axis || part == whole, "part and destination differ along the axis only");
                    ensure!(node, d != axis || part <= whole, "the part is no longer than the destination");
                }
                Ok(())
            }
        }
    }

    fn in_place(&self, _: usize) -> bool {
        self.kind == CollectiveKind::AllReduce
    }

    /// 0: a collective moves its parts to every rank in any case.
    fn batch(&self, _: &NodeView<'_>) -> usize {
        0
    }
}
