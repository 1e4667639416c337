//! IM2COL, IM2COL_3D: the patches of an image as columns of a matrix. IM2COL_BACK, COL2IM_1D: sums of columns into an image.

use super::conv_axis::ConvAxis;
use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, DType, TensorDesc};

/// A conversion between an image and the matrix of its patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Im2col {
    /// The patches of an image. Sources: kernel (only its shape is used), image. In one dimension kernel `[KW, IC, OC]`,
    /// image `[W, IC, N]`, dst `[IC*KW, OW, N]`; in two kernel `[KW, KH, IC, OC]`, image `[W, H, IC, N]`, dst
    /// `[IC*KH*KW, OW, OH, N]`.
    Im2col {
        /// Along x and y; in one dimension the second is [`ConvAxis::PLAIN`].
        axes: [ConvAxis; 2],
        /// Whether the image has two dimensions.
        two_d: bool,
    },
    /// The gradient of the image from the gradient of its patches: each element of the image is the sum of the gradients of
    /// its copies. Sources: gradient F32 of the patches, kernel (only its shape is used). dst F32 has the image's shape.
    Im2colBack {
        /// Along x and y; in one dimension the second is [`ConvAxis::PLAIN`].
        axes: [ConvAxis; 2],
        /// Whether the image has two dimensions.
        two_d: bool,
    },
    /// The patches of a volume. Sources: kernel `[KW, KH, KD, OC*IC]` (only its shape is used), image `[W, H, D, N*IC]`. dst
    /// `[IC*KD*KH*KW, OW, OH, OD*N]`.
    Im2col3d {
        /// Along x, y and z.
        axes: [ConvAxis; 3],
        /// IC, at least 1.
        channels: i32,
    },
    /// A signal `[(T-1)*stride + K - 2*padding, OC]` from columns `[K*OC, T]`: element `oc*K + k` of column t is added to sample
    /// `t*stride + k - padding` of channel oc.
    Col2im1d {
        /// Samples between two columns, at least 1.
        stride: i32,
        /// OC, at least 1.
        channels: i32,
        /// Samples that are dropped at each end, at least 0.
        padding: i32,
    },
}

/// A shape that does not overflow, or the violated rule.
type Shape = Result<[usize; DIMS], &'static str>;

/// The shape of the patches of an image.
fn patches(axes: &[ConvAxis; 2], two_d: bool, kernel: &TensorDesc, image: &TensorDesc) -> Shape {
    let ([kw, kh, kc, _], [w, h, c, n]) = (kernel.ne(), image.ne());
    let width = axes[0].output(w, kw).filter(|&n| n > 0).ok_or("the kernel is not wider than the padded image")?;
    if !two_d {
        if h != kh || n != 1 {
            return Err(
                "in one dimension, kernel and image have as many channels (dimension 1), and the image no dimension 3",
            );
        }
        return Ok([kw.checked_mul(kh).ok_or(TOO_LARGE)?, width, c, 1]);
    }
    if kc != c {
        return Err("kernel and image have as many channels (dimension 2)");
    }
    let height = axes[1].output(h, kh).filter(|&n| n > 0).ok_or("the kernel is not higher than the padded image")?;
    let patch = kw.checked_mul(kh).and_then(|n| n.checked_mul(kc)).ok_or(TOO_LARGE)?;
    Ok([patch, width, height, n])
}

const TOO_LARGE: &str = "the size of a patch does not overflow";

/// The shape of the patches of a volume.
fn volume_patches(axes: &[ConvAxis; 3], channels: i32, kernel: &TensorDesc, image: &TensorDesc) -> Shape {
    let ([kw, kh, kd, _], [w, h, d, cn]) = (kernel.ne(), image.ne());
    let channels = usize::try_from(channels).ok().filter(|&n| n > 0).ok_or("the number of channels is positive")?;
    let output = |axis: usize, image, kernel| axes[axis].output(image, kernel).filter(|&n| n > 0);
    let outputs = (output(0, w, kw), output(1, h, kh), output(2, d, kd));
    let (Some(width), Some(height), Some(depth)) = outputs else {
        return Err("the kernel is not larger than the padded image");
    };
    let patch = [kw, kh, kd].iter().try_fold(channels, |n, &k| n.checked_mul(k)).ok_or(TOO_LARGE)?;
    Ok([patch, width, height, depth.checked_mul(cn / channels).ok_or(TOO_LARGE)?])
}

impl Im2col {
    /// The shape of dst, where it follows from the sources.
    fn shape(&self, srcs: &Sources<'_>) -> Result<[usize; DIMS], ShapeError> {
        let first = srcs.required(0)?;
        let shape = match *self {
            Im2col::Im2col { ref axes, two_d } => patches(axes, two_d, first, srcs.required(1)?),
            Im2col::Im2col3d { ref axes, channels } => volume_patches(axes, channels, first, srcs.required(1)?),
            Im2col::Im2colBack { .. } => Err("the image's shape must be given: it does not follow from its patches"),
            Im2col::Col2im1d { stride, channels, padding } => signal(first, stride, channels, padding),
        };
        shape.map_err(|rule| srcs.rule_error(rule))
    }
}

/// The shape of the signal of COL2IM_1D.
fn signal(columns: &TensorDesc, stride: i32, channels: i32, padding: i32) -> Shape {
    let [rows, count, n2, n3] = columns.ne();
    if n2 != 1 || n3 != 1 || !columns.is_contiguous() {
        return Err("the columns are a contiguous matrix");
    }
    let channels = usize::try_from(channels).ok().filter(|&n| n > 0).ok_or("the number of channels is positive")?;
    if stride < 1 || padding < 0 {
        return Err("the stride is positive and the padding not negative");
    }
    if rows == 0 || !rows.is_multiple_of(channels) {
        return Err("a column has as many samples of each channel");
    }
    let steps = count.checked_sub(1).and_then(|n| n.checked_mul(stride as usize));
    let length = steps.and_then(|n| n.checked_add(rows / channels)).and_then(|n| n.checked_sub(2 * padding as usize));
    let length = length.filter(|&n| n > 0).ok_or("samples are left after both ends are dropped")?;
    Ok([length, channels, 1, 1])
}

impl OpFamily for Im2col {
    fn code(&self) -> OpCode {
        match self {
            Im2col::Im2col { .. } => OpCode::Im2col,
            Im2col::Im2colBack { .. } => OpCode::Im2colBack,
            Im2col::Im2col3d { .. } => OpCode::Im2col3d,
            Im2col::Col2im1d { .. } => OpCode::Col2im1d,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let positive = |word: usize, name| match params.int(word) {
            got @ 1.. => Ok(got),
            got => Err(ParamError::new(code, word, name, got, "a positive number")),
        };
        Ok(match code {
            OpCode::Im2col3d => {
                Im2col::Im2col3d { axes: ConvAxis::decode(code, params)?, channels: positive(9, "channels")? }
            }
            OpCode::Col2im1d => {
                let (stride, channels, padding) = (positive(0, "stride")?, positive(1, "channels")?, params.int(2));
                if padding < 0 {
                    return Err(ParamError::new(code, 2, "padding", padding, "0 or a positive number"));
                }
                Im2col::Col2im1d { stride, channels, padding }
            }
            _ => {
                // ggml compares the word with 1. In one dimension the second axis is not defined; its stride is often 0.
                let two_d = params.int(6) == 1;
                let params = if two_d { *params } else { params.with_int(1, 1).with_int(3, 0).with_int(5, 1) };
                let axes = ConvAxis::decode(code, &params)?;
                if code == OpCode::Im2col { Im2col::Im2col { axes, two_d } } else { Im2col::Im2colBack { axes, two_d } }
            }
        })
    }

    fn encode(&self) -> OpParams {
        match *self {
            Im2col::Im2col { ref axes, two_d } | Im2col::Im2colBack { ref axes, two_d } => {
                let params = ConvAxis::encode(axes).with_int(6, i32::from(two_d));
                if two_d { params } else { params.with_int(1, 0).with_int(3, 0).with_int(5, 0) }
            }
            Im2col::Im2col3d { ref axes, channels } => ConvAxis::encode(axes).with_int(9, channels),
            Im2col::Col2im1d { stride, channels, padding } => {
                OpParams::default().with_int(0, stride).with_int(1, channels).with_int(2, padding)
            }
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        match self {
            Im2col::Im2col { .. } | Im2col::Im2col3d { .. } => {
                Err(srcs.rule_error("the destination's type must be given: patches are F16 or F32"))
            }
            _ => Ok(OutputSpec { dtype: srcs.required(0)?.dtype(), ne: self.shape(srcs)? }),
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let dtype = match *self {
            Im2col::Im2colBack { ref axes, two_d } => {
                let shape = patches(axes, two_d, node.src(1)?, node.dst).map_err(|rule| node.rule_error(rule))?;
                ensure!(node, node.src(0)?.ne() == shape, "the gradient has the shape of the image's patches");
                ensure!(node, node.dst.dtype() == DType::F32, "the image is F32");
                return Ok(());
            }
            Im2col::Col2im1d { .. } => node.src(0)?.dtype(),
            _ => node.dst.dtype(),
        };
        node.expect_dst(OutputSpec { dtype, ne: self.shape(&node.srcs)? })
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}
