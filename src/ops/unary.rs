//! Element-wise ops of one tensor: SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP, LEAKY_RELU, FILL, and the 22 kinds of UNARY (activations and roundings).

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};

/// An element-wise op: `dst = f(x)`, both of the same shape, computed in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `x * x`.
    Sqr,
    /// `sqrt(x)`.
    Sqrt,
    /// `ln(x)`.
    Log,
    /// `sin(x)`.
    Sin,
    /// `cos(x)`.
    Cos,
    /// `max(x, 0) + slope min(x, 0)`; 0 for NaN.
    LeakyRelu {
        /// Factor on negative x.
        slope: f32,
    },
    /// One of the kinds of UNARY: an activation or a rounding.
    Kind(UnaryKind),
    /// `x * scale + bias`.
    Scale {
        /// Factor.
        scale: f32,
        /// Summand.
        bias: f32,
    },
    /// `max(min(x, max), min)`; NaN becomes `max`.
    Clamp {
        /// Lower bound; takes precedence if `min > max`.
        min: f32,
        /// Upper bound.
        max: f32,
    },
    /// `value` in every element; only the source's shape is used.
    Fill {
        /// The value.
        value: f32,
    },
}

/// The kinds of UNARY, in the order of their numbers on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UnaryKind {
    /// `|x|`.
    Abs,
    /// -1, 0 or 1; 0 for NaN.
    Sgn,
    /// `-x`.
    Neg,
    /// 1 for `x > 0`, else 0.
    Step,
    /// `tanh(x)`.
    Tanh,
    /// `x > 0 ? x : e^x - 1`.
    Elu,
    /// `x > 0 ? x : 0`.
    Relu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x/2 (1 + tanh(0.79788456 x (1 + 0.044715 x²)))`.
    ///
    /// The formula is evaluated directly, as ggml's GPU backends do. ggml's CPU backend rounds x to f16 and looks the result up
    /// in a table, which has a relative error of up to 1e-3.
    Gelu,
    /// `x / (1 + e^(-1.702 x))`, evaluated directly as [`UnaryKind::Gelu`] is.
    GeluQuick,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x min(1, max(0, (x + 3) / 6))`.
    HardSwish,
    /// `min(1, max(0, (x + 3) / 6))`.
    HardSigmoid,
    /// `e^x`.
    Exp,
    /// `e^x - 1`, computed as this difference in f32, so that it has the cancellation error around 0.
    Expm1,
    /// `x > 20 ? x : ln(1 + e^x)`.
    Softplus,
    /// `x/2 (1 + erf(x / sqrt 2))`.
    GeluErf,
    /// `x > 0 ? alpha_p x² + beta x : (e^min(x, eps) - 1 - x) alpha_n + beta x`.
    Xielu {
        /// Factor of the negative side: `beta + softplus(α_n)`, computed by the client that builds the node.
        alpha_n: f32,
        /// Factor of the positive side: `softplus(α_p)`, also computed by the client.
        alpha_p: f32,
        /// Linear part.
        beta: f32,
        /// Upper bound of the exponential's argument, a small negative number.
        eps: f32,
    },
    /// The nearest integer below or equal.
    Floor,
    /// The nearest integer above or equal.
    Ceil,
    /// The nearest integer, halves away from zero.
    Round,
    /// The integer part.
    Trunc,
}

impl UnaryKind {
    /// Every kind, in the order of the numbers on the wire; XIELU has zero parameters.
    pub const ALL: [UnaryKind; 22] = [
        UnaryKind::Abs,
        UnaryKind::Sgn,
        UnaryKind::Neg,
        UnaryKind::Step,
        UnaryKind::Tanh,
        UnaryKind::Elu,
        UnaryKind::Relu,
        UnaryKind::Sigmoid,
        UnaryKind::Gelu,
        UnaryKind::GeluQuick,
        UnaryKind::Silu,
        UnaryKind::HardSwish,
        UnaryKind::HardSigmoid,
        UnaryKind::Exp,
        UnaryKind::Expm1,
        UnaryKind::Softplus,
        UnaryKind::GeluErf,
        UnaryKind::Xielu { alpha_n: 0.0, alpha_p: 0.0, beta: 0.0, eps: 0.0 },
        UnaryKind::Floor,
        UnaryKind::Ceil,
        UnaryKind::Round,
        UnaryKind::Trunc,
    ];

    /// The number on the wire.
    pub(crate) fn wire_number(&self) -> i32 {
        let same = |kind| std::mem::discriminant(kind) == std::mem::discriminant(self);
        UnaryKind::ALL.iter().position(same).map_or(-1, |k| k as i32)
    }
}

impl OpFamily for Unary {
    fn code(&self) -> OpCode {
        match self {
            Unary::Sqr => OpCode::Sqr,
            Unary::Sqrt => OpCode::Sqrt,
            Unary::Log => OpCode::Log,
            Unary::Sin => OpCode::Sin,
            Unary::Cos => OpCode::Cos,
            Unary::LeakyRelu { .. } => OpCode::LeakyRelu,
            Unary::Kind(_) => OpCode::Unary,
            Unary::Scale { .. } => OpCode::Scale,
            Unary::Clamp { .. } => OpCode::Clamp,
            Unary::Fill { .. } => OpCode::Fill,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        Ok(match code {
            OpCode::Sqrt => Unary::Sqrt,
            OpCode::Log => Unary::Log,
            OpCode::Sin => Unary::Sin,
            OpCode::Cos => Unary::Cos,
            OpCode::LeakyRelu => Unary::LeakyRelu { slope: params.float(0) },
            OpCode::Scale => Unary::Scale { scale: params.float(0), bias: params.float(1) },
            OpCode::Clamp => Unary::Clamp { min: params.float(0), max: params.float(1) },
            OpCode::Fill => Unary::Fill { value: params.float(0) },
            OpCode::Unary => {
                let number = params.int(0);
                let kind = usize::try_from(number).ok().and_then(|k| UnaryKind::ALL.get(k));
                Unary::Kind(match kind {
                    Some(UnaryKind::Xielu { .. }) => UnaryKind::Xielu {
                        alpha_n: params.float(1),
                        alpha_p: params.float(2),
                        beta: params.float(3),
                        eps: params.float(4),
                    },
                    Some(kind) => *kind,
                    None => return Err(ParamError::new(code, 0, "kind", number, "0 to 21")),
                })
            }
            _ => Unary::Sqr,
        })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default();
        match *self {
            Unary::Sqr | Unary::Sqrt | Unary::Log | Unary::Sin | Unary::Cos => params,
            Unary::LeakyRelu { slope } => params.with_float(0, slope),
            Unary::Scale { scale, bias } => params.with_float(0, scale).with_float(1, bias),
            Unary::Clamp { min, max } => params.with_float(0, min).with_float(1, max),
            Unary::Fill { value } => params.with_float(0, value),
            Unary::Kind(kind) => {
                let params = params.with_int(0, kind.wire_number());
                match kind {
                    UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => {
                        params.with_float(1, alpha_n).with_float(2, alpha_p).with_float(3, beta).with_float(4, eps)
                    }
                    _ => params,
                }
            }
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let x = node.src(0)?;
        ensure!(node, node.dst.ne() == x.ne(), "dst has the source's shape");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        true
    }
}
