//! How the window of a convolution or of IM2COL moves along a dimension.

use super::{OpCode, OpParams, ParamError};

/// Bound of image extents and of the reach of a kernel: sums of three such values do not overflow an i64.
const MAX_REACH: i64 = 1 << 60;

/// Stride, padding and dilation of a window along one dimension. Tap `k` of output `o` reads element
/// `o * stride + k * dilation - padding`, and 0 outside of the image. Negative padding crops the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvAxis {
    /// Elements between the windows of two outputs; at least 1.
    pub stride: i32,
    /// Zeros before and after the image.
    pub padding: i32,
    /// Elements between two taps of the kernel.
    pub dilation: i32,
}

impl ConvAxis {
    /// Every element, without padding.
    pub const PLAIN: ConvAxis = ConvAxis { stride: 1, padding: 0, dilation: 1 };

    /// The output size of `image` elements and a kernel of `kernel` taps:
    /// `(image + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1`, with a quotient that is truncated toward zero as in
    /// ggml, so that a kernel which exceeds the padded image by less than a stride still has one output. The formula also holds for a kernel without taps.
    /// `None` if it is negative, if an index of the image could overflow, and for a stride below 1.
    pub fn output(&self, image: usize, kernel: usize) -> Option<usize> {
        let stride = Some(i64::from(self.stride)).filter(|&stride| stride > 0)?;
        let image = i64::try_from(image).ok().filter(|&n| n <= MAX_REACH)?;
        let last_tap = i64::try_from(kernel).ok()? - 1;
        let reach = i64::from(self.dilation).checked_mul(last_tap).filter(|n| n.abs() <= MAX_REACH)?;
        usize::try_from((image + 2 * i64::from(self.padding) - reach - 1) / stride + 1).ok()
    }

    /// Decodes the axes of `N` dimensions: the strides, the paddings, then the dilations, from word 0 on.
    pub(super) fn decode<const N: usize>(code: OpCode, params: &OpParams) -> Result<[ConvAxis; N], ParamError> {
        let mut axes = [ConvAxis::PLAIN; N];
        for (d, axis) in axes.iter_mut().enumerate() {
            let [stride, padding, dilation] = [0, 1, 2].map(|group| params.int(group * N + d));
            if stride < 1 {
                return Err(ParamError::new(code, d, "stride", stride, "a positive number"));
            }
            *axis = ConvAxis { stride, padding, dilation };
        }
        Ok(axes)
    }

    /// Encodes axes; the inverse of [`ConvAxis::decode`].
    pub(super) fn encode<const N: usize>(axes: &[ConvAxis; N]) -> OpParams {
        axes.iter().enumerate().fold(OpParams::default(), |params, (d, axis)| {
            let values = [axis.stride, axis.padding, axis.dilation].into_iter().enumerate();
            values.fold(params, |params, (group, value)| params.with_int(group * N + d, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_those_of_the_formula() {
        let output =
            |stride, padding, dilation, image, kernel| ConvAxis { stride, padding, dilation }.output(image, kernel);
        assert_eq!(output(1, 0, 1, 10, 3), Some(8));
        assert_eq!(output(2, 1, 1, 10, 3), Some(5));
        assert_eq!(output(1, 2, 2, 10, 3), Some(10));
        assert_eq!(output(1, -2, 1, 10, 3), Some(4), "negative padding crops");
        assert_eq!(output(1, 0, 0, 10, 3), Some(10), "all taps read one element");
        assert_eq!(output(3, 0, 1, 1, 2), Some(1), "the quotient is truncated toward zero");
        assert_eq!(output(3, 0, 1, 1, 4), Some(0));
        assert_eq!(output(3, 0, 1, 1, 9), None);
        assert_eq!(output(1, 0, 1, 10, 0), Some(11), "no taps");
        assert_eq!(output(0, 0, 1, 10, 3), None);
        assert_eq!(output(-1, 0, 1, 1, 9), None);
    }

    #[test]
    fn extreme_values_do_not_overflow() {
        for image in [0, 1, 1 << 31, 1 << 60, usize::MAX] {
            for kernel in [0, 1, 1 << 31, 1 << 60, usize::MAX] {
                for values in [i32::MIN, -1, 0, 1, i32::MAX] {
                    let axis = ConvAxis { stride: values, padding: values, dilation: values };
                    let _ = axis.output(image, kernel);
                    let _ = ConvAxis { stride: 1, ..axis }.output(image, kernel);
                }
            }
        }
        let huge = ConvAxis { dilation: i32::MIN, ..ConvAxis::PLAIN };
        assert_eq!(huge.output(1, 3), Some((1 << 32) + 1));
    }
}
