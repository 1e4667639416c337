//! GLU: gated linear units, `activation(x) * gate`. x and the gate are the halves of one tensor, or two tensors.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};

/// A gated linear unit. With one source `[2 n, ne1, ne2, ne3]`, the first half of each row is x and the second half is the gate
/// g. With two sources `[n, ne1, ne2, ne3]`, the first is x and the second is g. The result is `[n, ne1, ne2, ne3]`, computed
/// in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Glu {
    /// The activation.
    pub kind: GluKind,
    /// With one source: the first half of each row is g, and the second half is x.
    pub swapped: bool,
}

/// The kinds of GLU, in the order of their numbers on the wire. GELU is evaluated directly, not by table: see
/// [`super::unary::UnaryKind::Gelu`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluKind {
    /// `x > 0 ? x g : 0`.
    Reglu,
    /// `gelu(x) g`, with the tanh approximation of GELU.
    Geglu,
    /// `silu(x) g`.
    Swiglu,
    /// `x' / (1 + e^(-alpha x')) (g' + 1)` with `x' = min(x, limit)` and `g'` clamped to ±limit (gpt-oss).
    SwigluOai {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Upper bound of x, and bound of the absolute value of g.
        limit: f32,
    },
    /// `gelu_erf(x) g`.
    GegluErf,
    /// `gelu_quick(x) g`.
    GegluQuick,
    /// `silu(x') g'` with `x' = min(x, limit)` and `g'` clamped to ±limit.
    SwigluClamp {
        /// Upper bound of x, and bound of the absolute value of g.
        limit: f32,
    },
}

impl OpFamily for Glu {
    fn code(&self) -> OpCode {
        OpCode::Glu
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let (alpha, limit) = (params.float(2), params.float(3));
        let kind = match params.int(0) {
            0 => GluKind::Reglu,
            1 => GluKind::Geglu,
            2 => GluKind::Swiglu,
            3 => GluKind::SwigluOai { alpha, limit },
            4 => GluKind::GegluErf,
            5 => GluKind::GegluQuick,
            6 => GluKind::SwigluClamp { limit },
            other => return Err(ParamError::new(code, 0, "kind", other, "0 to 6")),
        };
        let swapped = match params.int(1) {
            0 => false,
            1 => true,
            other => return Err(ParamError::new(code, 1, "swapped", other, "0 or 1")),
        };
        Ok(Glu { kind, swapped })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default().with_int(1, i32::from(self.swapped));
        match self.kind {
            GluKind::Reglu => params.with_int(0, 0),
            GluKind::Geglu => params.with_int(0, 1),
            GluKind::Swiglu => params.with_int(0, 2),
            GluKind::SwigluOai { alpha, limit } => params.with_int(0, 3).with_float(2, alpha).with_float(3, limit),
            GluKind::GegluErf => params.with_int(0, 4),
            GluKind::GegluQuick => params.with_int(0, 5),
            GluKind::SwigluClamp { limit } => params.with_int(0, 6).with_float(3, limit),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let mut out = OutputSpec::like(srcs.required(0)?);
        if srcs.get(1).is_none() {
            ensure!(srcs, out.ne[0].is_multiple_of(2), "the rows of one source have two halves");
            out.ne[0] /= 2;
        }
        Ok(out)
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let mut ne = node.src(0)?.ne();
        if let Some(b) = node.srcs.get(1) {
            ensure!(node, b.ne() == ne, "both sources have the same shape");
            ensure!(node, !self.swapped, "halves of one source are swapped, two sources are not");
        } else {
            ne[0] /= 2;
        }
        ensure!(node, node.dst.ne() == ne, "dst has the shape of x");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}
