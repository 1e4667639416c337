//! POOL_1D, POOL_2D: the maximum or the mean of a window that moves over an image. POOL_2D_BACK: the gradient of POOL_2D.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, DType};

/// What a window is reduced to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// The maximum of the elements inside of the image, at least `-f32::MAX`.
    Max,
    /// The mean. In POOL_1D it is that of the elements inside of the image, and 0 without any; in POOL_2D the sum of these
    /// elements divided by the size of the whole window.
    Average,
}

/// How a pooling window moves along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolAxis {
    /// Elements of the window, at least 1.
    pub kernel: i32,
    /// Elements between two windows, at least 1.
    pub stride: i32,
    /// Elements by which the first window begins before the image.
    pub padding: i32,
}

impl PoolAxis {
    /// The output size of `image` elements, if `twice` is twice the padding: `(image + twice - kernel) / stride + 1`. `None` if
    /// it is negative, and for a kernel or a stride below 1.
    fn output_for(&self, image: usize, twice: i64) -> Option<usize> {
        let [kernel, stride] = [self.kernel, self.stride].map(i64::from);
        let room = i64::try_from(image).ok()?.checked_add(twice)?.checked_sub(kernel)?;
        let is_valid = kernel > 0 && stride > 0;
        usize::try_from(is_valid.then(|| room.div_euclid(stride) + 1)?).ok()
    }

    /// The output size of `image` elements; `None` if the window is larger than the padded image.
    pub fn output(&self, image: usize) -> Option<usize> {
        self.output_for(image, 2 * i64::from(self.padding)).filter(|&n| n > 0)
    }

    /// Whether ggml can compute `output` as the output size of `image` elements. Its builder computes in f32, which rounds
    /// sizes from 2^24 on. With `fraction`, it has truncated the padding only afterwards.
    fn allows(&self, image: usize, output: usize, fraction: bool) -> bool {
        let (twice, spread, rounding) = (2 * i64::from(self.padding), i64::from(fraction), image >> 22);
        let low = self.output_for(image, twice - if self.padding <= 0 { spread } else { 0 }).unwrap_or(0);
        let high = self.output_for(image, twice + if self.padding >= 0 { spread } else { 0 });
        high.is_some_and(|high| (low.saturating_sub(rounding).max(1)..=high.saturating_add(rounding)).contains(&output))
    }
}

/// A pooling op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Each row of source 0 `[n, ..]`; dst F32 `[output of n, ..]`.
    Pool1d {
        /// The reduction.
        kind: PoolKind,
        /// Along dimension 0.
        axis: PoolAxis,
    },
    /// Each plane of source 0 `[w, h, ..]`; dst F32 `[output of w, output of h, ..]`.
    Pool2d {
        /// The reduction.
        kind: PoolKind,
        /// Along dimensions 0 and 1.
        axes: [PoolAxis; 2],
    },
    /// Sources: gradient F32 of the result of POOL_2D, and its input. dst F32 has the input's shape. A window's gradient is added to its
    /// first maximum, or divided by the window's size and added to each of its elements.
    Pool2dBack {
        /// The reduction.
        kind: PoolKind,
        /// Along dimensions 0 and 1.
        axes: [PoolAxis; 2],
    },
}

impl Pool {
    /// The output shape for an input of shape `ne`.
    fn output(&self, ne: [usize; DIMS]) -> Option<[usize; DIMS]> {
        let mut out = ne;
        match self {
            Pool::Pool1d { axis, .. } => out[0] = axis.output(ne[0])?,
            Pool::Pool2d { axes, .. } | Pool::Pool2dBack { axes, .. } => {
                (out[0], out[1]) = (axes[0].output(ne[0])?, axes[1].output(ne[1])?);
            }
        }
        Some(out)
    }

    /// Whether `out` can be the output shape for an input of shape `ne`.
    fn allows(&self, ne: [usize; DIMS], out: [usize; DIMS]) -> bool {
        ne[2..] == out[2..]
            && match self {
                Pool::Pool1d { axis, .. } => ne[1] == out[1] && axis.allows(ne[0], out[0], false),
                Pool::Pool2d { axes, .. } | Pool::Pool2dBack { axes, .. } => {
                    (0..2).all(|d| axes[d].allows(ne[d], out[d], true))
                }
            }
    }
}

impl OpFamily for Pool {
    fn code(&self) -> OpCode {
        match self {
            Pool::Pool1d { .. } => OpCode::Pool1d,
            Pool::Pool2d { .. } => OpCode::Pool2d,
            Pool::Pool2dBack { .. } => OpCode::Pool2dBack,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let kind = match params.int(0) {
            0 => PoolKind::Max,
            1 => PoolKind::Average,
            got => return Err(ParamError::new(code, 0, "op", got, "0 (maximum) or 1 (mean)")),
        };
        let axis = |words: [usize; 3]| {
            let [kernel, stride, padding] = words.map(|word| params.int(word));
            if kernel < 1 {
                return Err(ParamError::new(code, words[0], "kernel", kernel, "a positive number"));
            }
            if stride < 1 {
                return Err(ParamError::new(code, words[1], "stride", stride, "a positive number"));
            }
            Ok(PoolAxis { kernel, stride, padding })
        };
        if code == OpCode::Pool1d {
            return Ok(Pool::Pool1d { kind, axis: axis([1, 2, 3])? });
        }
        let axes = [axis([1, 3, 5])?, axis([2, 4, 6])?];
        Ok(if code == OpCode::Pool2d { Pool::Pool2d { kind, axes } } else { Pool::Pool2dBack { kind, axes } })
    }

    fn encode(&self) -> OpParams {
        let (Pool::Pool1d { kind, .. } | Pool::Pool2d { kind, .. } | Pool::Pool2dBack { kind, .. }) = self;
        let params = OpParams::default().with_int(0, i32::from(*kind == PoolKind::Average));
        match self {
            Pool::Pool1d { axis, .. } => {
                params.with_int(1, axis.kernel).with_int(2, axis.stride).with_int(3, axis.padding)
            }
            Pool::Pool2d { axes, .. } | Pool::Pool2dBack { axes, .. } => (0..2).fold(params, |params, d| {
                let PoolAxis { kernel, stride, padding } = axes[d];
                params.with_int(1 + d, kernel).with_int(3 + d, stride).with_int(5 + d, padding)
            }),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        if let Pool::Pool2dBack { .. } = self {
            return Ok(OutputSpec { dtype: DType::F32, ne: srcs.required(1)?.ne() });
        }
        let ne = self.output(srcs.required(0)?.ne());
        let ne = ne.ok_or_else(|| srcs.rule_error("the window is not larger than the padded image"))?;
        Ok(OutputSpec { dtype: DType::F32, ne })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (image, pooled) = match self {
            Pool::Pool2dBack { .. } => (node.src(1)?, node.src(0)?),
            _ => (node.src(0)?, node.dst),
        };
        ensure!(node, self.allows(image.ne(), pooled.ne()), "the pooled size follows from the image and the window");
        ensure!(
            node,
            pooled.dtype() == DType::F32 && node.dst.dtype() == DType::F32,
            "pooled values and gradients are F32"
        );
        if let Pool::Pool2dBack { .. } = self {
            ensure!(node, node.dst.ne() == image.ne(), "dst has the shape of the input");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}
