//! How the elements of an image lie in a tensor, and which of them a window reads.

use crate::ops::ConvAxis;
use crate::tensor::TensorDesc;
use std::ops::Range;

/// The dimensions of a tensor of images.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cpu::ops) enum ImageLayout {
    /// `[x, channel, image]`.
    Line,
    /// `[x, y, channel, image]`.
    Plane,
    /// `[x, y, z, image * channels + channel]`.
    Volume {
        /// Channels of an image.
        channels: usize,
    },
}

impl ImageLayout {
    /// Elements along x, y and z.
    pub(in crate::cpu::ops) fn extents(self, t: &TensorDesc) -> [usize; 3] {
        let [x, y, z, _] = t.ne();
        match self {
            ImageLayout::Line => [x, 1, 1],
            ImageLayout::Plane => [x, y, 1],
            ImageLayout::Volume { .. } => [x, y, z],
        }
    }

    /// The index of an element of the tensor.
    pub(in crate::cpu::ops) fn index(self, [x, y, z]: [usize; 3], channel: usize, image: usize) -> [usize; 4] {
        match self {
            ImageLayout::Line => [x, channel, image, 0],
            ImageLayout::Plane => [x, y, channel, image],
            ImageLayout::Volume { channels } => [x, y, z, image * channels + channel],
        }
    }
}

/// The element that tap `tap` of output `output` reads; outside of the image it is negative or not below its extent. The shape
/// rule has excluded overflow: see [`ConvAxis::output`].
pub(in crate::cpu::ops) fn position(axis: &ConvAxis, output: usize, tap: usize) -> i64 {
    output as i64 * i64::from(axis.stride) + tap as i64 * i64::from(axis.dilation) - i64::from(axis.padding)
}

/// The element that a tap reads, if it is inside of the image.
pub(in crate::cpu::ops) fn inside(axis: &ConvAxis, output: usize, tap: usize, extent: usize) -> Option<usize> {
    usize::try_from(position(axis, output, tap)).ok().filter(|&i| i < extent)
}

/// The numbers `i` in `0..count` for which `start + i * step` is in `0..extent`; `step` is positive.
pub(in crate::cpu::ops) fn steps_inside(start: i64, step: i64, count: usize, extent: usize) -> Range<usize> {
    let last = start.saturating_add((count as i64 - 1).saturating_mul(step));
    if start >= 0 && last < extent as i64 {
        return 0..count; // the common case, without divisions
    }
    // `as`: not negative.
    let first_at_least = |bound: i64| if start >= bound { 0 } else { ((bound - start - 1) / step + 1) as usize };
    let end = first_at_least(extent as i64).min(count);
    first_at_least(0).min(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_inside_are_those_of_a_search() {
        for start in -7..9 {
            for step in 1..5 {
                for count in 0..7 {
                    for extent in 0..6 {
                        let is_inside = |i: &usize| (0..extent as i64).contains(&(start + *i as i64 * step));
                        let found: Vec<_> = (0..count).filter(is_inside).collect();
                        let range = steps_inside(start, step, count, extent);
                        assert!(range.start <= range.end && range.end <= count, "{range:?}");
                        assert_eq!(range.collect::<Vec<_>>(), found, "{start} {step} {count} {extent}");
                    }
                }
            }
        }
    }
}
