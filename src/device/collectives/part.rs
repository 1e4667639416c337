//! The part of a rank: the collective and the shapes of its operands.

use crate::ops::collective::{CollectiveKind, piece};
use crate::tensor::{DIMS, DType, TensorDesc};
use std::fmt;
#[cfg(feature = "server")]
use std::ops::{Range, RangeInclusive};

/// The part of a rank in a round: the collective and the shapes of its operands. It must fit the parts of the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectivePart {
    pub(super) kind: CollectiveKind,
    /// Type of the part.
    pub(super) dtype: DType,
    /// Shape of what all ranks have together: the destination, of REDUCE_SCATTER the part.
    pub(super) ne: [usize; DIMS],
    /// Extent along the axis: of ALL_GATHER that of the part, of REDUCE_SCATTER that of the rank's piece. Else 0.
    pub(super) extent: usize,
    /// Size of the part.
    pub(super) bytes: usize,
}

impl CollectivePart {
    /// The part of a node, whose shapes satisfy the shape rule of the op.
    pub fn new(kind: CollectiveKind, part: &TensorDesc, dst: &TensorDesc) -> CollectivePart {
        let along = |desc: &TensorDesc, axis: u8| desc.ne().get(usize::from(axis)).copied().unwrap_or(0);
        let (ne, extent) = match kind {
            CollectiveKind::AllReduce => (dst.ne(), 0),
            CollectiveKind::ReduceScatter { axis } => (part.ne(), along(dst, axis)),
            CollectiveKind::AllGather { axis } => (dst.ne(), along(part, axis)),
        };
        CollectivePart { kind, dtype: part.dtype(), ne, extent, bytes: part.dense_bytes() }
    }

    /// What is wrong with the extent of a rank's piece.
    pub(super) fn piece_error(&self, rank: usize, ranks: usize) -> Option<String> {
        let CollectiveKind::ReduceScatter { axis } = self.kind else { return None };
        let want = piece(self.ne.get(usize::from(axis)).copied().unwrap_or(0), rank, ranks).len();
        let got = self.extent;
        (got != want).then(|| format!("{self}: rank {rank} has {got} elements along the axis, not {want}"))
    }

    pub(super) fn belongs_to(&self, other: &CollectivePart) -> bool {
        (self.kind, self.dtype, self.ne) == (other.kind, other.dtype, other.ne)
    }
}

impl fmt::Display for CollectivePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CollectiveKind::AllReduce => write!(f, "ALL_REDUCE of {} {:?}", self.dtype, self.ne),
            CollectiveKind::ReduceScatter { axis } => {
                write!(f, "REDUCE_SCATTER of {} {:?} along axis {axis}", self.dtype, self.ne)
            }
            CollectiveKind::AllGather { axis } => {
                write!(f, "ALL_GATHER of {} {:?} along axis {axis}", self.dtype, self.ne)
            }
        }
    }
}

#[cfg(feature = "server")]
impl CollectivePart {
    /// The part of a rank of another process. `whole`: the part's type, and the shape of what all ranks have together. `extent`: as
    /// in [`CollectivePart`]. `None` if there is no such collective.
    pub(crate) fn from_message(kind: CollectiveKind, whole: &TensorDesc, extent: usize) -> Option<CollectivePart> {
        let (mut ne, is_sum) = (whole.ne(), matches!(whole.dtype(), DType::F32 | DType::BF16));
        let part = |ne| TensorDesc::contiguous(whole.dtype(), ne).ok().filter(|part| !part.is_empty());
        let bytes = match kind {
            CollectiveKind::AllReduce if is_sum && extent == 0 => part(ne)?.dense_bytes(),
            CollectiveKind::ReduceScatter { axis } if is_sum => {
                let (along, above) = ne.get(usize::from(axis)..)?.split_first()?;
                if extent > *along || above.iter().any(|&n| n != 1) {
                    return None;
                }
                part(ne)?.dense_bytes()
            }
            CollectiveKind::AllGather { axis } if !whole.dtype().is_block() => {
                let along = ne.get_mut(usize::from(axis)).filter(|along| extent <= **along)?;
                *along = extent;
                part(ne)?.dense_bytes()
            }
            _ => return None,
        };
        Some(CollectivePart { kind, dtype: whole.dtype(), ne: whole.ne(), extent, bytes })
    }

    /// The bytes of the part that consecutive ranks need: of REDUCE_SCATTER their pieces, else all.
    pub(crate) fn bytes_for(&self, needed_by: &RangeInclusive<usize>, ranks: usize) -> Range<usize> {
        let CollectiveKind::ReduceScatter { axis } = self.kind else { return 0..self.bytes };
        let along = self.ne.get(usize::from(axis)).copied().unwrap_or(0);
        let stride = self.bytes / along.max(1);
        let first = piece(along, *needed_by.start(), ranks).start;
        first * stride..piece(along, *needed_by.end(), ranks).end * stride
    }

    /// The collective.
    pub(crate) fn kind(&self) -> CollectiveKind {
        self.kind
    }

    /// The part's type, and the shape of what all ranks have together.
    pub(crate) fn whole(&self) -> (DType, [usize; DIMS]) {
        (self.dtype, self.ne)
    }

    /// Extent along the axis: of ALL_GATHER that of the part, of REDUCE_SCATTER that of the rank's piece. Else 0.
    pub(crate) fn extent(&self) -> usize {
        self.extent
    }

    /// Length of the part in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
