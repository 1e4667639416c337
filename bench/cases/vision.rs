//! The timed cases of vision and speech encoders: the patch embedding of CLIP ViT-L/14, convolutions of Stable Diffusion's
//! U-Net and decoder, a depthwise convolution of MobileNet, the convolutions of Whisper, and the upsampling of a vocoder; and the
//! smaller cases of the static roofline.

use super::{Case, Draft, Kind, Sizes, bytes};
use fanout::graph::BuildError;
use fanout::ops::conv::Conv;
use fanout::ops::im2col::Im2col;
use fanout::ops::pool::{Pool, PoolAxis, PoolKind};
use fanout::ops::upscale::{ScaleMode, Upscale};
use fanout::ops::{ConvAxis, Op, OutputSpec, Sources};
use fanout::tensor::DType::{self, F16, F32};
use fanout::tensor::TensorDesc;

/// A node with a kernel and an image, or with an image alone.
struct Node {
    op: Op,
    kernel: Option<(DType, [usize; 4])>,
    image: [usize; 4],
    /// Type and shape of the destination, where they do not follow from the sources.
    out: Option<OutputSpec>,
    shape: String,
    /// Multiplications and additions, if the op computes products.
    ops: usize,
}

fn axis(stride: usize, padding: usize) -> ConvAxis {
    ConvAxis { stride: stride as i32, padding: padding as i32, dilation: 1 }
}

/// A square convolution of a square image.
fn conv_2d(dtype: DType, k: usize, [c, out]: [usize; 2], side: usize, stride: usize, padding: usize) -> Node {
    let outputs = (side + 2 * padding - k) / stride + 1;
    Node {
        op: Conv::Conv2d { axes: [axis(stride, padding); 2] }.into(),
        kernel: Some((dtype, [k, k, c, out])),
        image: [side, side, c, 1],
        out: None,
        shape: format!("{k}x{k}x{c} to {out}, {side}x{side}, stride {stride}"),
        ops: 2 * k * k * c * out * outputs * outputs,
    }
}

fn depthwise(dtype: DType, k: usize, c: usize, side: usize) -> Node {
    Node {
        op: Conv::Conv2dDw { axes: [axis(1, k / 2); 2] }.into(),
        kernel: Some((dtype, [k, k, 1, c])),
        image: [side, side, c, 1],
        out: None,
        shape: format!("{k}x{k} of {c}, {side}x{side}"),
        ops: 2 * k * k * c * side * side,
    }
}

fn transposed_1d(dtype: DType, k: usize, [c, out]: [usize; 2], length: usize, stride: usize) -> Node {
    Node {
        op: Conv::Transpose1d { stride: stride as i32 }.into(),
        kernel: Some((dtype, [k, out, c, 1])),
        image: [length, c, 1, 1],
        out: None,
        shape: format!("{k}x{c} to {out}, {length}, stride {stride}"),
        ops: 2 * k * c * out * length,
    }
}

fn transposed_2d(dtype: DType, k: usize, [c, out]: [usize; 2], side: usize, stride: usize) -> Node {
    Node {
        op: Conv::Transpose2d { stride: stride as i32 }.into(),
        kernel: Some((dtype, [k, k, out, c])),
        image: [side, side, c, 1],
        out: None,
        shape: format!("{k}x{k}x{c} to {out}, {side}x{side}, stride {stride}"),
        ops: 2 * k * k * c * out * side * side,
    }
}

/// The patches of a line of `c` channels, of three taps.
fn im2col_1d(c: usize, length: usize, stride: usize) -> Node {
    let outputs = (length - 1) / stride + 1;
    Node {
        op: Im2col::Im2col { axes: [axis(stride, 1), ConvAxis::PLAIN], two_d: false }.into(),
        kernel: Some((F16, [3, c, 1, 1])),
        image: [length, c, 1, 1],
        out: Some(OutputSpec { dtype: F16, ne: [3 * c, outputs, 1, 1] }),
        shape: format!("3x{c}, {length}, stride {stride}"),
        ops: 0,
    }
}

/// The patches of a square image.
fn im2col_2d(k: usize, c: usize, side: usize, stride: usize, padding: usize) -> Node {
    let outputs = (side + 2 * padding - k) / stride + 1;
    Node {
        op: Im2col::Im2col { axes: [axis(stride, padding); 2], two_d: true }.into(),
        kernel: Some((F16, [k, k, c, 1])),
        image: [side, side, c, 1],
        out: Some(OutputSpec { dtype: F16, ne: [k * k * c, outputs, outputs, 1] }),
        shape: format!("{k}x{k}x{c}, {side}x{side}, stride {stride}"),
        ops: 0,
    }
}

fn pool(kind: PoolKind, c: usize, side: usize) -> Node {
    let axis = PoolAxis { kernel: 2, stride: 2, padding: 0 };
    let name = if kind == PoolKind::Max { "maximum" } else { "mean" };
    Node {
        op: Pool::Pool2d { kind, axes: [axis; 2] }.into(),
        kernel: None,
        image: [side, side, c, 1],
        out: None,
        shape: format!("{name} of 2x2, {side}x{side}x{c}"),
        ops: 0,
    }
}

/// A square image that is scaled from one side to another.
fn upscale(mode: ScaleMode, c: usize, [side, out]: [usize; 2]) -> Node {
    // Smaller images are antialiased.
    let antialias = mode == ScaleMode::Bilinear && out < side;
    let name = match mode {
        ScaleMode::Nearest => "nearest",
        ScaleMode::Bilinear => "bilinear",
        ScaleMode::Bicubic => "bicubic",
    };
    Node {
        op: Upscale { mode, align_corners: false, antialias }.into(),
        kernel: None,
        image: [side, side, c, 1],
        out: Some(OutputSpec { dtype: F32, ne: [out, out, c, 1] }),
        shape: if out == 2 * side {
            format!("{name}, {side}x{side}x{c} by 2")
        } else {
            format!("{name}, {side}x{side}x{c} to {out}x{out}")
        },
        ops: 0,
    }
}

/// The signal of a vocoder from the columns of a transposed convolution.
fn col2im(k: usize, c: usize, columns: usize, stride: usize) -> Node {
    Node {
        op: Im2col::Col2im1d { stride: stride as i32, channels: c as i32, padding: 0 }.into(),
        kernel: None,
        image: [k * c, columns, 1, 1],
        out: None,
        shape: format!("{k}x{c}, {columns}, stride {stride}"),
        ops: 0,
    }
}

impl Node {
    /// The case; the data is cold, since a model's other layers run between two runs of one.
    fn case(self, s: &Sizes) -> Case {
        let Node { op, kernel, image, out, shape, ops } = self;
        let desc = |dtype, ne| TensorDesc::contiguous(dtype, ne).expect("a valid shape");
        let image_desc = desc(F32, image);
        let kernel_desc = kernel.map(|(dtype, ne)| desc(dtype, ne));
        let out = out.unwrap_or_else(|| {
            let srcs = match &kernel_desc {
                Some(kernel) => vec![Some(kernel), Some(&image_desc)],
                None => vec![Some(&image_desc)],
            };
            op.infer(&Sources::new(op.code(), &srcs)).expect("sources that fit the op")
        });
        let elements = |ne: [usize; 4]| ne.iter().product::<usize>();
        // IM2COL uses the kernel's shape only.
        let kernel_bytes = kernel.filter(|_| ops > 0).map_or(0, |(dtype, ne)| bytes(dtype, elements(ne)));
        let (read, written) = (kernel_bytes + bytes(F32, elements(image)), bytes(out.dtype, elements(out.ne)));
        let dtype = kernel.map_or(F32, |(dtype, _)| dtype);
        Case {
            op: op.code().name(),
            dtype: dtype.to_string(),
            shape,
            read,
            written,
            ops,
            kind: Kind::F32,
            cold: true,
            sets: if ops > 0 { 1 } else { s.cold.div_ceil(read + written) },
            build: Box::new(move |d: &mut Draft| -> Result<(), BuildError> {
                let mut srcs = Vec::new();
                if let Some((dtype, ne)) = kernel {
                    srcs.push(Some(d.values(dtype, ne)?));
                }
                srcs.push(Some(d.values(F32, image)?));
                d.b.node_with_output(op.clone(), &srcs, out).map(drop)
            }),
        }
    }
}

/// All cases, which `scripts/bench/peer_ops.py` lists too. The smallest sizes have an eighth of the extents and channels.
pub(super) fn all(s: &Sizes) -> Vec<Case> {
    let part = if s.cold < 1 << 20 { 8 } else { 1 };
    let n = |n: usize| n / part;
    let mut nodes = Vec::new();
    for t in [F16, F32] {
        nodes.push(conv_2d(t, 14, [3, n(1024)], n(224), 14, 0));
        nodes.push(conv_2d(t, 3, [n(320), n(320)], n(64), 1, 1));
        nodes.push(conv_2d(t, 3, [n(128), n(128)], n(256), 1, 1));
        nodes.push(depthwise(t, 3, n(256), n(112)));
        nodes.push(transposed_1d(t, 16, [n(512), n(256)], n(256), 8));
        nodes.push(transposed_2d(t, 2, [n(256), n(64)], n(64), 2));
    }
    nodes.extend([im2col_1d(n(80), n(3000), 1), im2col_1d(n(1280), n(3000), 2)]);
    nodes.extend([im2col_2d(14, 3, n(336), 14, 0), im2col_2d(3, n(320), n(64), 1, 1)]);
    nodes.extend([PoolKind::Max, PoolKind::Average].map(|kind| pool(kind, n(1152), n(56))));
    let modes = [ScaleMode::Nearest, ScaleMode::Bilinear, ScaleMode::Bicubic];
    nodes.extend(modes.map(|mode| upscale(mode, n(512), [n(64), 2 * n(64)])));
    nodes.into_iter().map(|node| node.case(s)).collect()
}

/// Cases of each CUDA kernel, small enough for the emulator.
pub(super) fn canonical(s: &Sizes) -> Vec<Case> {
    let mut nodes = Vec::new();
    for t in [F16, F32] {
        nodes.push(conv_2d(t, 3, [32, 64], 64, 1, 1));
        nodes.push(conv_2d(t, 3, [64, 64], 16, 1, 1));
        nodes.push(depthwise(t, 3, 64, 56));
    }
    nodes.push(conv_2d(F16, 3, [128, 128], 64, 1, 1));
    nodes.push(conv_2d(F16, 1, [320, 320], 64, 1, 0));
    nodes.push(conv_2d(F16, 14, [3, 1024], 224, 14, 0));
    nodes.push(transposed_2d(F16, 2, [64, 32], 64, 2));
    nodes.extend([im2col_1d(80, 1500, 1), im2col_2d(14, 3, 336, 14, 0), col2im(16, 64, 256, 8)]);
    nodes.push(pool(PoolKind::Max, 64, 56));
    let modes = [ScaleMode::Nearest, ScaleMode::Bilinear, ScaleMode::Bicubic];
    nodes.extend(modes.map(|mode| upscale(mode, 64, [64, 128])));
    nodes.push(upscale(ScaleMode::Bilinear, 64, [128, 64]));
    nodes.into_iter().map(|node| node.case(s)).collect()
}
