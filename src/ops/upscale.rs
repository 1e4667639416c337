//! UPSCALE: interpolation to a larger or smaller image.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// How a value between elements is interpolated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleMode {
    /// The element at or before it.
    Nearest,
    /// From two elements in each of the dimensions 0 and 1.
    Bilinear,
    /// From four elements in each of the dimensions 0 and 1, by cubic convolution with a = -0.75.
    Bicubic,
}

/// Interpolates source 0 F32 to the shape of the destination, along all four dimensions; along dimensions 2 and 3 always by the
/// nearest element. Images can become smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upscale {
    /// The interpolation along dimensions 0 and 1.
    pub mode: ScaleMode,
    /// The centres of the corner elements coincide, instead of the corners of the images.
    pub align_corners: bool,
    /// With [`ScaleMode::Bilinear`]: a triangle filter over all elements that a smaller image's element covers.
    pub antialias: bool,
}

impl Upscale {
    /// Elements of the destination for each element of the source along dimension 0 or 1, of which the source has `n` and the
    /// destination `out`. In f32, as in ggml.
    pub(crate) fn factor(self, n: usize, out: usize) -> f32 {
        let corners = self.align_corners && n > 1 && out > 1;
        if corners { (out - 1) as f32 / (n - 1) as f32 } else { out as f32 / n as f32 }
    }

    /// Distance of an element's centre from its index along dimensions 0 and 1.
    pub(crate) fn offset(self) -> f32 {
        if self.align_corners { 0.0 } else { 0.5 }
    }

    /// Half the width of the antialiasing filter in elements, for a factor.
    pub(crate) fn support(factor: f32) -> f32 {
        (1.0 / factor).max(1.0)
    }
}

const ALIGN_CORNERS: i32 = 1 << 8;
const ANTIALIAS: i32 = 1 << 9;

impl OpFamily for Upscale {
    fn code(&self) -> OpCode {
        OpCode::Upscale
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let word = params.int(0);
        let (align_corners, antialias) = (word & ALIGN_CORNERS != 0, word & ANTIALIAS != 0);
        let mode = match word & !(ALIGN_CORNERS | ANTIALIAS) {
            0 if !antialias => ScaleMode::Nearest,
            1 => ScaleMode::Bilinear,
            2 if !antialias => ScaleMode::Bicubic,
            _ => {
                let expected = "0 to 2, 0x100 (align corners) added, or 0x200 (antialias) added to 1";
                return Err(ParamError::new(code, 0, "mode", word, expected));
            }
        };
        Ok(Upscale { mode, align_corners, antialias })
    }

    fn encode(&self) -> OpParams {
        let flag = |set: bool, bit: i32| if set { bit } else { 0 };
        let word = self.mode as i32 | flag(self.align_corners, ALIGN_CORNERS) | flag(self.antialias, ANTIALIAS);
        OpParams::default().with_int(0, word)
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Err(srcs.rule_error("the destination's shape must be given: it determines the scale"))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let src = node.src(0)?;
        ensure!(node, src.dtype() == DType::F32 && node.dst.dtype() == DType::F32, "source and destination are F32");
        ensure!(node, !self.antialias || self.mode == ScaleMode::Bilinear, "only bilinear scaling can be antialiased");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}
