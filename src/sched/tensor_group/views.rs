//! Views of split slots: which dimension of a view carries the split of its slot, and the view's layout on one rank.
//!
//! A slot is contiguous. A view steps along its dimensions by strides, and each stride is a number of steps along one dimension
//! of the slot. [`Factors`] decomposes every dimension of the view into such steps. Dimension 0 is counted in blocks.

use crate::tensor::{DIMS, TensorDesc};
use std::ops::Range;

/// Consecutive steps of a view's dimension along one dimension of the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Factor {
    /// The slot's dimension.
    axis: usize,
    /// Elements (blocks in dimension 0) per step.
    step: usize,
    /// Number of steps.
    count: usize,
}

/// By dimension of a view: its factors, the fastest first.
type Factors = [Vec<Factor>; DIMS];

/// How a view carries a split of its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CarriedSplit {
    /// The dimension of the view that is split.
    pub(super) axis: usize,
    /// Cuts may lie at multiples of 1/`count` of the dimension: a finer cut would fall between elements that the view has in a
    /// faster dimension, such as the channels of a head.
    pub(super) count: usize,
}

/// The dimension of `view` (at `offset` bytes in a contiguous slot) that carries a split of the slot's dimension `axis`. `None`
/// if no dimension does: the view then has no part on each rank that is a range of one of its dimensions.
pub(super) fn carried_split(slot: &TensorDesc, axis: usize, view: &TensorDesc, offset: usize) -> Option<CarriedSplit> {
    let factors = factors(slot, view)?;
    let whole = blocks(slot);
    let start = start(slot, offset)?;
    if whole[axis] <= 1 || start[axis] != 0 {
        return None;
    }
    // Steps along faster dimensions must not carry over into the split one.
    let faster = factors.iter().flatten().filter(|factor| factor.axis < axis);
    let farthest: usize = faster.map(|f| (f.count - 1) * f.step * slot.nb()[f.axis]).sum();
    let begin: usize = (0..axis).map(|dim| start[dim] * slot.nb()[dim]).sum();
    if begin + farthest >= slot.nb()[axis] {
        return None;
    }
    let mut along: Vec<(usize, usize, Factor)> = Vec::new();
    for (dim, list) in factors.iter().enumerate() {
        along.extend(list.iter().enumerate().filter(|(_, f)| f.axis == axis).map(|(at, f)| (dim, at, *f)));
    }
    along.sort_unstable_by_key(|(_, _, factor)| factor.step);
    // Together the factors must cover the slot's dimension once, without gaps.
    let covered = along.iter().try_fold(1, |next, (_, _, f)| (f.step == next).then_some(next * f.count))?;
    let &(dim, at, outer) = along.last()?;
    (covered == whole[axis] && at + 1 == factors[dim].len()).then_some(CarriedSplit { axis: dim, count: outer.count })
}

/// The layout and the offset of a view on a rank that holds the elements `part` of the slot's dimension `axis`.
pub(super) fn local_view(
    slot: &TensorDesc,
    axis: usize,
    part: &Range<usize>,
    view: &TensorDesc,
    offset: usize,
) -> Option<(TensorDesc, usize)> {
    let carried = carried_split(slot, axis, view, offset)?;
    let (factors, start) = (factors(slot, view)?, start(slot, offset)?);
    let block = |dim: usize| block_len(slot, dim);
    let (own, whole) = (part.len() / block(axis), blocks(slot)[axis]);
    let (mut ne, mut nb) = (view.ne(), view.nb());
    let list = &factors[carried.axis];
    let (outer, inner) = list.split_last()?;
    let inner: usize = inner.iter().map(|factor| factor.count).product();
    if !part.len().is_multiple_of(block(axis)) || !own.is_multiple_of(outer.step) {
        return None;
    }
    ne[carried.axis] = inner * (own / outer.step) * block(carried.axis);
    // Strides beyond the split dimension shrink with it.
    let span = slot.nb()[axis] * whole;
    let shrink = |stride: usize| stride / span * (slot.nb()[axis] * own) + stride % span;
    for (stride, list) in nb.iter_mut().zip(&factors) {
        if list.first().map_or(*stride >= span, |first| first.axis > axis) {
            *stride = shrink(*stride);
        }
    }
    let offset = (0..DIMS).map(|dim| start[dim] * if dim > axis { shrink(slot.nb()[dim]) } else { slot.nb()[dim] });
    Some((TensorDesc::strided(view.dtype(), ne, nb).ok()?, offset.sum()))
}

/// The range `part` of a tensor's dimension `axis` as a view: its layout, and its offset in the tensor.
pub(super) fn subrange(tensor: &TensorDesc, axis: usize, part: &Range<usize>) -> Option<(TensorDesc, usize)> {
    let block = block_len(tensor, axis);
    let mut ne = tensor.ne();
    ne[axis] = part.len();
    let aligned = part.start.is_multiple_of(block);
    let desc = TensorDesc::strided(tensor.dtype(), ne, tensor.nb()).ok()?;
    aligned.then(|| (desc, part.start / block * tensor.nb()[axis]))
}

/// The split of a copy: its source is split in dimension `axis` of shape `from`, its destination has the shape `to` and the same
/// elements in the same order. `None` if the parts are no ranges of one dimension of the destination.
pub(super) fn reshaped_split(from: [usize; DIMS], axis: usize, to: [usize; DIMS]) -> Option<CarriedSplit> {
    // Elements between two indices of the dimension after the split one: the parts repeat with this period.
    let period: usize = from[..=axis].iter().product();
    let axis = (0..DIMS).find(|&dim| to[dim] > 1 && to[..=dim].iter().product::<usize>() == period)?;
    Some(CarriedSplit { axis, count: to[axis] })
}

/// The part of a tensor's dimension `axis`, as a contiguous tensor. `None` if the part cuts a block.
pub(super) fn part_desc(tensor: &TensorDesc, axis: usize, part: &Range<usize>) -> Option<TensorDesc> {
    let mut ne = tensor.ne();
    ne[axis] = part.len();
    TensorDesc::contiguous(tensor.dtype(), ne).ok()
}

/// Elements per block along a dimension: 1 beyond dimension 0.
pub(super) fn block_len(tensor: &TensorDesc, axis: usize) -> usize {
    if axis == 0 { tensor.dtype().block_len() } else { 1 }
}

/// Elements per dimension, blocks in dimension 0.
pub(super) fn blocks(desc: &TensorDesc) -> [usize; DIMS] {
    let [ne0, ne1, ne2, ne3] = desc.ne();
    [ne0 / desc.dtype().block_len(), ne1, ne2, ne3]
}

/// The index in each dimension of a contiguous slot of the byte at `offset`; `None` if it is inside of a block.
fn start(slot: &TensorDesc, offset: usize) -> Option<[usize; DIMS]> {
    let (mut rest, whole, mut index) = (offset, blocks(slot), [0; DIMS]);
    for dim in (0..DIMS).rev().filter(|&dim| whole[dim] > 1) {
        index[dim] = rest / slot.nb()[dim];
        rest %= slot.nb()[dim];
    }
    (rest == 0).then_some(index)
}

fn factors(slot: &TensorDesc, view: &TensorDesc) -> Option<Factors> {
    if view.dtype() != slot.dtype() || !slot.is_contiguous() || slot.is_empty() {
        return None;
    }
    let (whole, stride, counts) = (blocks(slot), slot.nb(), blocks(view));
    let mut all = Factors::default();
    for dim in 0..DIMS {
        let mut count = counts[dim];
        if count == 1 {
            continue;
        }
        let step = view.nb()[dim];
        let mut axis = (0..DIMS).rev().find(|&axis| whole[axis] > 1 && stride[axis] <= step)?;
        if !step.is_multiple_of(stride[axis]) {
            return None;
        }
        let mut step = step / stride[axis];
        while count > whole[axis].div_ceil(step) {
            // The dimension goes on along the slot's next dimension, as in a reshape that merges the two.
            let steps = whole[axis] / step;
            if !whole[axis].is_multiple_of(step) || !count.is_multiple_of(steps) {
                return None;
            }
            all[dim].push(Factor { axis, step, count: steps });
            count /= steps;
            axis = (axis + 1..DIMS).find(|&axis| whole[axis] > 1)?;
            step = 1;
        }
        if count > 1 {
            all[dim].push(Factor { axis, step, count });
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn desc(dtype: DType, ne: [usize; DIMS], nb: Option<[usize; DIMS]>) -> TensorDesc {
        match nb {
            Some(nb) => TensorDesc::strided(dtype, ne, nb).unwrap(),
            None => TensorDesc::contiguous(dtype, ne).unwrap(),
        }
    }

    /// The element offsets that a view reaches, in order.
    fn offsets(view: &TensorDesc, offset: usize) -> Vec<usize> {
        let ([n0, n1, n2, n3], nb) = (blocks(view), view.nb());
        let mut all = Vec::new();
        for i3 in 0..n3 {
            for i2 in 0..n2 {
                for i1 in 0..n1 {
                    all.extend((0..n0).map(|i0| offset + i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]));
                }
            }
        }
        all
    }

    /// Views as model graphs have them: for each rank, the local view of the local slot has the elements of the view that lie in
    /// the rank's part, in the same order.
    #[test]
    fn local_views_have_the_elements_of_their_part() {
        let f32 = DType::F32;
        // A slot of 24 rows of 12: heads of 4, a transposed cache, flat and permuted views.
        let slot = desc(f32, [12, 6, 4, 1], None);
        let views = [
            (desc(f32, [12, 6, 4, 1], None), 0),
            (desc(f32, [4, 3, 6, 4], Some([4, 16, 48, 288])), 0),
            (desc(f32, [4, 6, 3, 4], Some([4, 48, 16, 288])), 0),
            (desc(f32, [72, 4, 1, 1], None), 0),
            (desc(f32, [12, 24, 1, 1], None), 0),
            (desc(f32, [12, 2, 4, 1], Some([4, 48, 288, 1152])), 96),
            (desc(f32, [4, 6, 12, 1], Some([288, 48, 4, 1152])), 0),
            (desc(f32, [1, 6, 12, 4], Some([4, 48, 4, 288])), 0),
        ];
        let mut carried = 0;
        for (view, offset) in &views {
            for axis in 0..3 {
                let Some(split) = carried_split(&slot, axis, view, *offset) else { continue };
                carried += 1;
                let whole = slot.ne()[axis];
                let unit = whole / split.count;
                for part in [0..unit, unit..whole] {
                    let (local, at) = local_view(&slot, axis, &part, view, *offset).unwrap();
                    let mut ne = slot.ne();
                    ne[axis] = part.len();
                    let own = desc(f32, ne, None);
                    // The index of an element of the rank's slot in the whole slot.
                    let global = |byte: usize| {
                        let mut index = start(&own, byte).unwrap();
                        index[axis] += part.start;
                        (0..DIMS).map(|dim| index[dim] * slot.nb()[dim]).sum::<usize>()
                    };
                    let got: Vec<usize> = offsets(&local, at).into_iter().map(global).collect();
                    let inside = |byte: &usize| part.contains(&start(&slot, *byte).unwrap()[axis]);
                    let want: Vec<usize> = offsets(view, *offset).into_iter().filter(inside).collect();
                    assert_eq!(got, want, "{view:?} at {offset}, part {part:?} of dimension {axis}");
                }
            }
        }
        assert!(carried >= 15, "{carried}");
    }

    #[test]
    fn views_that_cut_the_split_dimension_carry_nothing() {
        let f32 = DType::F32;
        let slot = desc(f32, [12, 6, 1, 1], None);
        let half = desc(f32, [6, 6, 1, 1], Some([4, 48, 288, 288]));
        let flat = desc(f32, [72, 1, 1, 1], None);
        assert_eq!(carried_split(&slot, 0, &half, 0), None, "a part of each row");
        assert_eq!(carried_split(&slot, 0, &half, 24), None, "the other part");
        assert_eq!(carried_split(&slot, 0, &flat, 0), None, "rows one after another");
        assert_eq!(carried_split(&slot, 1, &flat, 0), Some(CarriedSplit { axis: 0, count: 6 }));
        let carrying = desc(f32, [8, 6, 1, 1], Some([4, 48, 288, 288]));
        assert_eq!(
            carried_split(&desc(f32, [12, 6, 4, 1], None), 1, &carrying, 24),
            None,
            "rows that go on in the next"
        );
        let row = desc(f32, [12, 1, 1, 1], None);
        assert_eq!(carried_split(&slot, 1, &row, 48), None, "one row");
        assert_eq!(carried_split(&slot, 0, &row, 48), Some(CarriedSplit { axis: 0, count: 12 }));
    }

    #[test]
    fn blocks_stay_whole() {
        let slot = desc(DType::Q4_0, [128, 6, 1, 1], None);
        assert_eq!(carried_split(&slot, 0, &slot, 0), Some(CarriedSplit { axis: 0, count: 4 }));
        let (local, at) = local_view(&slot, 0, &(32..128), &slot, 0).unwrap();
        assert_eq!((local.ne(), local.nb()[1], at), ([96, 6, 1, 1], 54, 0));
        assert!(local_view(&slot, 0, &(16..128), &slot, 0).is_none());
        assert_eq!(subrange(&slot, 0, &(32..64)).unwrap().1, 18);
        assert!(subrange(&slot, 0, &(16..64)).is_none());
    }

    #[test]
    fn copies_carry_splits_of_whole_periods() {
        let split = |axis, count| Some(CarriedSplit { axis, count });
        assert_eq!(reshaped_split([64, 8, 5, 1], 1, [512, 5, 1, 1]), split(0, 512));
        assert_eq!(reshaped_split([64, 5, 8, 1], 2, [320, 8, 1, 1]), split(1, 8));
        assert_eq!(reshaped_split([64, 8, 5, 1], 0, [512, 5, 1, 1]), None);
        assert_eq!(reshaped_split([512, 5, 1, 1], 0, [64, 8, 5, 1]), split(1, 8));
    }
}
