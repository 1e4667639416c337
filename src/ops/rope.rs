//! ROPE: rotary position embedding. ROPE_BACK: its inverse rotation.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;
use std::f32::consts::PI;

/// Which channels form a pair, and which position rotates the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopeMode {
    /// Neighbours: pairs `(2j, 2j+1)`.
    Normal,
    /// Halves: pairs `(j, j + n_dims/2)`.
    Neox,
    /// Multimodal: pairs of halves. A token has four positions (time, height, width, extra); consecutive sections of pairs use
    /// one position each.
    Mrope([u32; 4]),
    /// As [`RopeMode::Mrope`] over the whole row, with pairs `(j, j + n_dims)`; frequencies restart in each section.
    Vision([u32; 4]),
    /// As [`RopeMode::Mrope`], with time, height and width interleaved instead of in consecutive sections.
    Imrope([u32; 4]),
}

impl RopeMode {
    /// The four section lengths, in pairs; `None` for a mode with one position per token.
    pub fn sections(&self) -> Option<[u32; 4]> {
        match *self {
            RopeMode::Normal | RopeMode::Neox => None,
            RopeMode::Mrope(s) | RopeMode::Vision(s) | RopeMode::Imrope(s) => Some(s),
        }
    }

    fn to_wire(self) -> i32 {
        match self {
            RopeMode::Normal => 0,
            RopeMode::Neox => 2,
            RopeMode::Mrope(_) => 8,
            RopeMode::Vision(_) => 24,
            RopeMode::Imrope(_) => 40,
        }
    }
}

/// Rotary position embedding: rotates pairs of channels by angles that are proportional to the token's position.
///
/// x F32 or F16 `[ne0, heads, tokens, batch]`; positions I32 `[tokens]`, or `[4*tokens]` for modes with sections (all times,
/// then all heights, widths, extras); optionally F32 factors that divide each pair's frequency. The angles, including the YaRN
/// correction (`ext_factor` ≠ 0), are the same as in ggml's CPU backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// ROPE_BACK, the gradient of ROPE: rotates by the negative angles. The factor on the values is the same.
    pub backward: bool,
    /// Pairing and positions.
    pub mode: RopeMode,
    /// Number of rotated channels: even, not 0.
    pub n_dims: u32,
    /// First rotated channel: even; 0 with [`RopeMode::Vision`].
    pub n_offs: u32,
    /// YaRN: context length of the training, in tokens.
    pub n_ctx_orig: i32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Factor on all angles.
    pub freq_scale: f32,
    /// YaRN: share of the unscaled angle in the mix; 0 turns the correction off.
    pub ext_factor: f32,
    /// Factor on the rotated values.
    pub attn_factor: f32,
    /// YaRN: pairs with more turns than this over the training context keep the unscaled angle.
    pub beta_fast: f32,
    /// YaRN: pairs with fewer turns than this over the training context take the fully scaled angle.
    pub beta_slow: f32,
}

impl Rope {
    /// Rotation of the first `n_dims` channels with base 10000 and no scaling.
    pub fn new(mode: RopeMode, n_dims: u32) -> Rope {
        Rope {
            backward: false,
            mode,
            n_dims,
            n_offs: 0,
            n_ctx_orig: 0,
            freq_base: 10000.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 0.0,
            beta_slow: 0.0,
        }
    }

    /// Number of rotated pairs of channels.
    pub fn pairs(&self) -> usize {
        let n = self.n_dims as usize;
        if matches!(self.mode, RopeMode::Vision(_)) { n } else { n / 2 }
    }

    /// The constants of the angles that depend only on the parameters.
    pub(crate) fn angles(&self) -> RopeAngles {
        let n = self.n_dims as f32;
        // The index of the pair that rotates `turns` times over the training context.
        let pair_of = |turns: f32| n * (self.n_ctx_orig as f32 / (turns * 2.0 * PI)).ln() / (2.0 * self.freq_base.ln());
        let ramp = (pair_of(self.beta_fast).floor().max(0.0), pair_of(self.beta_slow).ceil().min(n - 1.0));
        let yarn = if self.ext_factor == 0.0 { 1.0 } else { 1.0 + 0.1 * (1.0 / self.freq_scale).ln() };
        RopeAngles { theta_scale: self.freq_base.powf(-2.0 / n), corr_dims: ramp, mscale: self.attn_factor * yarn }
    }
}

/// The constants of the angles that depend only on the op's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeAngles {
    /// Ratio of the angles of consecutive pairs.
    pub(crate) theta_scale: f32,
    /// YaRN: pairs before the first index keep the unscaled angle, and pairs after the second index take the scaled angle.
    pub(crate) corr_dims: (f32, f32),
    /// Factor on cosines and sines.
    pub(crate) mscale: f32,
}

impl OpFamily for Rope {
    fn code(&self) -> OpCode {
        if self.backward { OpCode::RopeBack } else { OpCode::Rope }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let even = |word, name, expected| {
            let value = params.int(word);
            let error = || ParamError::new(code, word, name, value, expected);
            u32::try_from(value).ok().filter(|v| v.is_multiple_of(2)).ok_or_else(error)
        };
        let n_dims = even(1, "n_dims", "an even number above 0")?;
        if n_dims == 0 {
            return Err(ParamError::new(code, 1, "n_dims", n_dims, "an even number above 0"));
        }
        let n_offs = even(15, "n_offs", "an even number, not negative")?;
        let sections = || {
            let mut sections = [0; 4];
            for (k, section) in sections.iter_mut().enumerate() {
                let value = params.int(11 + k);
                let error = |_| ParamError::new(code, 11 + k, "sections", value, "a length, not negative");
                *section = u32::try_from(value).map_err(error)?;
            }
            if sections[..3] == [0; 3] {
                return Err(ParamError::new(code, 11, "sections", 0, "one of the first three above 0"));
            }
            Ok(sections)
        };
        let mode = match params.int(2) {
            0 => RopeMode::Normal,
            2 => RopeMode::Neox,
            8 => RopeMode::Mrope(sections()?),
            24 => RopeMode::Vision(sections()?),
            40 => RopeMode::Imrope(sections()?),
            other => return Err(ParamError::new(code, 2, "mode", other, "0, 2, 8, 24 or 40")),
        };
        if n_offs != 0 && matches!(mode, RopeMode::Vision(_)) {
            return Err(ParamError::new(code, 15, "n_offs", n_offs, "0 with vision"));
        }
        Ok(Rope {
            backward: code == OpCode::RopeBack,
            mode,
            n_dims,
            n_offs,
            n_ctx_orig: params.int(4),
            freq_base: params.float(5),
            freq_scale: params.float(6),
            ext_factor: params.float(7),
            attn_factor: params.float(8),
            beta_fast: params.float(9),
            beta_slow: params.float(10),
        })
    }

    fn encode(&self) -> OpParams {
        let mut params = OpParams::default()
            .with_int(1, self.n_dims as i32)
            .with_int(2, self.mode.to_wire())
            .with_int(4, self.n_ctx_orig)
            .with_float(5, self.freq_base)
            .with_float(6, self.freq_scale)
            .with_float(7, self.ext_factor)
            .with_float(8, self.attn_factor)
            .with_float(9, self.beta_fast)
            .with_float(10, self.beta_slow)
            .with_int(15, self.n_offs as i32);
        for (k, section) in self.mode.sections().unwrap_or_default().into_iter().enumerate() {
            params = params.with_int(11 + k, section as i32);
        }
        params
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (x, positions) = (node.src(0)?, node.src(1)?);
        node.expect_dst(OutputSpec::like(x))?;
        ensure!(node, x.rows_dense() && node.dst.rows_dense(), "rows of x and dst are dense");
        ensure!(node, matches!(x.dtype(), DType::F32 | DType::F16), "x is F32 or F16");
        let [ne0, _, tokens, _] = x.ne();
        // Ops that are built in process skip `decode`, so its checks are repeated here.
        ensure!(node, self.n_dims > 0 && self.n_dims.is_multiple_of(2), "n_dims is even and above 0");
        ensure!(node, self.n_offs.is_multiple_of(2), "n_offs is even");
        let (n_dims, n_offs) = (self.n_dims as usize, self.n_offs as usize);
        if let Some(sections) = self.mode.sections() {
            ensure!(node, sections[..3] != [0; 3], "one of the first three sections is above 0");
            let sum: u64 = sections.iter().map(|&s| u64::from(s)).sum();
            ensure!(node, sum <= ne0 as u64, "sections together are no longer than a row");
            ensure!(node, Some(positions.ne()[0]) == tokens.checked_mul(4), "there are four positions per token");
        } else {
            ensure!(node, positions.ne()[0] == tokens, "there is one position per token");
        }
        if matches!(self.mode, RopeMode::Vision(_)) {
            ensure!(node, n_offs == 0 && ne0 / 2 == n_dims && ne0 % 2 == 0, "vision rotates the whole row");
        } else {
            ensure!(node, n_offs + n_dims <= ne0, "the rotated channels lie within the row");
        }
        ensure!(node, positions.dtype() == DType::I32 && positions.rows() == 1, "positions are an I32 vector");
        if let Some(factors) = node.srcs.get(2) {
            // `in_place` allows dst to coincide with the factors. That is safe because they are a vector: dst would then be a
            // single row, and kernels read the factors before they write it.
            ensure!(node, factors.dtype() == DType::F32 && factors.rows() == 1, "factors are an F32 vector");
            ensure!(node, factors.ne()[0] >= self.pairs(), "there is a factor for each pair");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        true
    }

    /// The tokens; `ne[1]` counts the heads of a token.
    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.dst.ne()[2]
    }
}
