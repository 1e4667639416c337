//! Overlap rules: which tensors of a node may share bytes.
//!
//! The destination of a node must be disjoint from each source, or coincide exactly with a source if the op supports in-place
//! execution. A source that the op updates must be disjoint from every other operand. Any other overlap is a data race between
//! the threads of a device.

use super::{Graph, Node, Tensor};

/// The overlap of two placed tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Overlap {
    /// No common byte.
    Disjoint,
    /// The same first byte, type, counts and strides.
    Exact,
    /// Common bytes, but not [`Overlap::Exact`].
    Partial,
}

/// Classifies the overlap of two tensors. Tensors without memory, or in different slots, are disjoint.
pub(crate) fn overlap(a: &Tensor, b: &Tensor) -> Overlap {
    let (Some(pa), Some(pb)) = (a.place, b.place) else { return Overlap::Disjoint };
    let (ea, eb) = (a.desc.extent(), b.desc.extent());
    if pa.slot != pb.slot || ea == 0 || eb == 0 || pa.offset + ea <= pb.offset || pb.offset + eb <= pa.offset {
        return Overlap::Disjoint;
    }
    if pa.offset == pb.offset && same_elements(a, b) {
        return Overlap::Exact;
    }
    if interleaved(pa.offset, a, pb.offset, b) { Overlap::Disjoint } else { Overlap::Partial }
}

/// Whether two tensors have the same layout. Strides of dimensions of size 1 are ignored.
fn same_elements(a: &Tensor, b: &Tensor) -> bool {
    let (x, y) = (&a.desc, &b.desc);
    x.dtype() == y.dtype()
        && x.ne() == y.ne()
        && (0..4).all(|d| {
            x.nb()[d] == y.nb()[d] || (d > 0 && x.ne()[d] == 1) || (d == 0 && x.ne()[0] == x.dtype().block_len())
        })
}

/// Whether the tensors interleave without sharing bytes: both have a common stride (the period) and stay in separate parts of
/// it. Examples are two column ranges of the same matrix, and two heads of the same KV cache.
fn interleaved(oa: usize, a: &Tensor, ob: usize, b: &Tensor) -> bool {
    (1..4).any(|d| {
        let period = a.desc.nb()[d];
        if period == 0 || period != b.desc.nb()[d] {
            return false;
        }
        match (within_period(&a.desc, period), within_period(&b.desc, period)) {
            (Some(wa), Some(wb)) => {
                // Relative to the first byte of `a`, because neither tensor needs to start at the start of a period.
                let shift = (ob % period + period - oa % period) % period;
                wa <= shift && shift + wb <= period
            }
            _ => false,
        }
    })
}

/// The span in bytes of the dimensions with strides below `period`; `None` if it exceeds the period. Dimensions with strides
/// that are multiples of the period are skipped.
fn within_period(t: &crate::tensor::TensorDesc, period: usize) -> Option<usize> {
    let blocks = [t.dtype().blocks(t.ne()[0]), t.ne()[1], t.ne()[2], t.ne()[3]];
    let mut width = t.dtype().block_bytes();
    for d in 0..4 {
        if blocks[d] > 1 {
            if t.nb()[d].is_multiple_of(period) && t.nb()[d] > 0 {
                continue;
            }
            width += (blocks[d] - 1) * t.nb()[d];
        }
    }
    (width <= period).then_some(width)
}

/// The index of the first source that overlaps the node's destination in a way that the rules forbid.
pub(super) fn find_overlap_violation(graph: &Graph, node: &Node) -> Option<usize> {
    let dst = graph.tensor(node.dst)?;
    node.srcs.iter().enumerate().find_map(|(i, id)| {
        let src = graph.tensor((*id)?)?;
        let allowed = match overlap(dst, src) {
            Overlap::Disjoint => true,
            Overlap::Exact => node.op.in_place(i) || node.op.writes_onto(i),
            Overlap::Partial => false,
        };
        let other_sources = || node.srcs.iter().enumerate().filter(|&(j, _)| j != i).filter_map(|(_, id)| *id);
        let meets_other = |id| graph.tensor(id).is_some_and(|other| overlap(other, src) != Overlap::Disjoint);
        let shared = node.op.updates(i) && other_sources().any(meets_other);
        (!allowed || shared).then_some(i)
    })
}

#[cfg(test)]
mod tests {
    use super::super::SlotOffset;
    use super::*;
    use crate::tensor::{DType, TensorDesc};

    fn tensor(slot: u32, offset: usize, ne: [usize; 4], nb: [usize; 4]) -> Tensor {
        Tensor {
            desc: TensorDesc::strided(DType::F32, ne, nb).unwrap(),
            place: Some(SlotOffset { slot, offset }),
            use_count: None,
            view_of: None,
        }
    }

    #[test]
    fn overlap_is_classified_correctly_in_both_directions() {
        let base = tensor(0, 64, [8, 4, 1, 1], [4, 64, 256, 256]);
        for (other, want) in [
            (tensor(1, 64, [8, 4, 1, 1], [4, 64, 256, 256]), Overlap::Disjoint),
            (tensor(0, 64, [8, 4, 1, 1], [4, 64, 256, 256]), Overlap::Exact),
            (tensor(0, 64, [8, 4, 1, 1], [4, 64, 9, 9]), Overlap::Exact), // single dimensions' strides differ
            (tensor(0, 96, [8, 4, 1, 1], [4, 64, 256, 256]), Overlap::Disjoint), // the next 8 columns
            (tensor(0, 92, [8, 4, 1, 1], [4, 64, 256, 256]), Overlap::Partial), // one column shared
            (tensor(0, 96, [8, 4, 1, 1], [4, 60, 240, 240]), Overlap::Partial), // other period
            (tensor(0, 128, [8, 4, 1, 1], [4, 64, 256, 256]), Overlap::Partial), // a row further
            (tensor(0, 300, [8, 1, 1, 1], [4, 32, 32, 32]), Overlap::Disjoint), // past the end
            (tensor(0, 0, [16, 1, 1, 1], [4, 64, 64, 64]), Overlap::Disjoint),
            (tensor(0, 4, [16, 1, 1, 1], [4, 64, 64, 64]), Overlap::Partial),
        ] {
            assert_eq!(overlap(&base, &other), want, "{other:?}");
            assert_eq!(overlap(&other, &base), want, "{other:?} swapped");
        }
        // Two column ranges are disjoint, whatever their offset within the period.
        for start in (0..64).step_by(4) {
            let [a, b] = [start, start + 32].map(|at| tensor(0, at, [8, 4, 1, 1], [4, 64, 256, 256]));
            assert_eq!(overlap(&a, &b), Overlap::Disjoint, "at {start}");
        }
    }
}
