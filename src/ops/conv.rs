//! CONV_2D, CONV_3D, CONV_2D_DW: convolutions (cross-correlations) with zero padding. CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D:
//! their transposes, without padding.

use super::conv_axis::ConvAxis;
use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// A convolution. Source 0 is the kernel, source 1 the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conv {
    /// Kernel `[KW, KH, IC, OC]`, image `[W, H, IC, N]`, dst `[OW, OH, OC, N]` of the image's type.
    Conv2d {
        /// Along x and y.
        axes: [ConvAxis; 2],
    },
    /// Kernel `[KW, KH, KD, OC*IC]`, image `[W, H, D, N*IC]`, dst F32 `[OW, OH, OD, N*OC]`; IC is the inner index.
    Conv3d {
        /// Along x, y and z.
        axes: [ConvAxis; 3],
        /// IC, at least 1.
        channels: i32,
        /// N, at least 1.
        batches: i32,
        /// OC, at least 1.
        outputs: i32,
    },
    /// Each channel with a kernel of its own (depthwise): kernel `[KW, KH, 1, C]`, image `[W, H, C, N]`, dst `[OW, OH, C, N]` of
    /// the image's type.
    Conv2dDw {
        /// Along x and y.
        axes: [ConvAxis; 2],
    },
    /// Kernel `[K, OC, IC]`, input `[L, IC]`, dst F32 `[(L-1)*stride + K, OC]`: tap k of sample l is added at
    /// `l*stride + k`.
    Transpose1d {
        /// At least 1.
        stride: i32,
    },
    /// Kernel `[KW, KH, OC, IC]`, input `[W, H, IC, N]`, dst F32 `[(W-1)*stride + KW, (H-1)*stride + KH, OC, N]`.
    Transpose2d {
        /// Along x and y; at least 1.
        stride: i32,
    },
}

impl Conv {
    /// Position of the kernel.
    pub const KERNEL: usize = 0;
    /// Position of the image.
    pub const IMAGE: usize = 1;
}

/// The size of a transposed convolution's output; `None` if it overflows, and for a stride below 1.
fn transposed_output(input: usize, kernel: usize, stride: i32) -> Option<usize> {
    let stride = usize::try_from(stride).ok().filter(|&stride| stride > 0)?;
    input.checked_sub(1)?.checked_mul(stride)?.checked_add(kernel)
}

impl OpFamily for Conv {
    fn code(&self) -> OpCode {
        match self {
            Conv::Conv2d { .. } => OpCode::Conv2d,
            Conv::Conv3d { .. } => OpCode::Conv3d,
            Conv::Conv2dDw { .. } => OpCode::Conv2dDw,
            Conv::Transpose1d { .. } => OpCode::ConvTranspose1d,
            Conv::Transpose2d { .. } => OpCode::ConvTranspose2d,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let positive = |word: usize, name| match params.int(word) {
            got @ 1.. => Ok(got),
            got => Err(ParamError::new(code, word, name, got, "a positive number")),
        };
        Ok(match code {
            OpCode::Conv3d => Conv::Conv3d {
                axes: ConvAxis::decode(code, params)?,
                channels: positive(9, "channels")?,
                batches: positive(10, "batches")?,
                outputs: positive(11, "outputs")?,
            },
            OpCode::Conv2dDw => Conv::Conv2dDw { axes: ConvAxis::decode(code, params)? },
            OpCode::ConvTranspose1d => {
                for (word, name, only) in [(1, "padding", 0), (2, "dilation", 1)] {
                    if params.int(word) != only {
                        return Err(ParamError::new(
                            code,
                            word,
                            name,
                            params.int(word),
                            if word == 1 { "0" } else { "1" },
                        ));
                    }
                }
                Conv::Transpose1d { stride: positive(0, "stride")? }
            }
            OpCode::ConvTranspose2d => Conv::Transpose2d { stride: positive(0, "stride")? },
            _ => Conv::Conv2d { axes: ConvAxis::decode(code, params)? },
        })
    }

    fn encode(&self) -> OpParams {
        match *self {
            Conv::Conv2d { ref axes } | Conv::Conv2dDw { ref axes } => ConvAxis::encode(axes),
            Conv::Conv3d { ref axes, channels, batches, outputs } => {
                ConvAxis::encode(axes).with_int(9, channels).with_int(10, batches).with_int(11, outputs)
            }
            Conv::Transpose1d { stride } => OpParams::default().with_int(0, stride).with_int(2, 1),
            Conv::Transpose2d { stride } => OpParams::default().with_int(0, stride),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let (kernel, image) = (srcs.required(Self::KERNEL)?, srcs.required(Self::IMAGE)?);
        let (k, i) = (kernel.ne(), image.ne());
        let spatial = |axes: &[ConvAxis], d: usize| {
            axes[d]
                .output(i[d], k[d])
                .ok_or_else(|| srcs.rule_error("the output size is not negative and does not overflow"))
        };
        let transposed = |d: usize, stride| {
            transposed_output(i[d], k[d], stride).ok_or_else(|| srcs.rule_error("the output size does not overflow"))
        };
        Ok(match *self {
            Conv::Conv2d { ref axes } => {
                ensure!(srcs, k[2] == i[2], "kernel and image have as many channels (dimension 2)");
                OutputSpec { dtype: image.dtype(), ne: [spatial(axes, 0)?, spatial(axes, 1)?, k[3], i[3]] }
            }
            Conv::Conv2dDw { ref axes } => {
                ensure!(srcs, k[2] == 1, "dimension 2 of the kernel has one element");
                ensure!(srcs, k[3] == i[2], "a kernel for each channel of the image");
                OutputSpec { dtype: image.dtype(), ne: [spatial(axes, 0)?, spatial(axes, 1)?, i[2], i[3]] }
            }
            Conv::Conv3d { ref axes, channels, batches, outputs } => {
                let product = |a: i32, b: i32| usize::try_from(i64::from(a) * i64::from(b)).ok();
                ensure!(srcs, channels > 0 && batches > 0 && outputs > 0, "the counts are positive");
                ensure!(
                    srcs,
                    Some(k[3]) == product(channels, outputs),
                    "dimension 3 of the kernel is channels times outputs"
                );
                ensure!(
                    srcs,
                    Some(i[3]) == product(channels, batches),
                    "dimension 3 of the image is channels times batches"
                );
                let planes = product(outputs, batches).unwrap_or(0);
                OutputSpec { dtype: DType::F32, ne: [spatial(axes, 0)?, spatial(axes, 1)?, spatial(axes, 2)?, planes] }
            }
            Conv::Transpose1d { stride } => {
                ensure!(srcs, i[2] == 1 && i[3] == 1, "the input is a matrix");
                ensure!(
                    srcs,
                    k[2] == i[1] && k[3] == 1,
                    "the kernel has the input's channels in dimension 2, and no dimension 3"
                );
                OutputSpec { dtype: DType::F32, ne: [transposed(0, stride)?, k[1], 1, 1] }
            }
            Conv::Transpose2d { stride } => {
                ensure!(srcs, k[3] == i[2], "the kernel has the input's channels in dimension 3");
                OutputSpec { dtype: DType::F32, ne: [transposed(0, stride)?, transposed(1, stride)?, k[2], i[3]] }
            }
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    /// A sum over no taps is 0.
    fn may_be_empty(&self, _: usize) -> bool {
        true
    }
}
