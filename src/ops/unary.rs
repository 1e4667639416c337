//! Element-wise ops of one tensor: SQR, SQRT, SCALE, CLAMP, FILL, and the 22 kinds of UNARY.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};

/// An element-wise op: `dst = f(x)`, both of shape `[ne3, ne2, ne1, ne0]`, computed in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `x * x`.
    Sqr,
    /// `sqrt(x)`.
    Sqrt,
    /// One of the activations and roundings of UNARY.
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
        /// Lower bound, which wins when the bounds are crossed.
        min: f32,
        /// Upper bound.
        max: f32,
    },
    /// `value` everywhere; the source gives only the shape.
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
    /// Evaluated directly. ggml's CPU rounds f32 to f16 and takes the result from a table over f16, which costs a
    /// relative error of up to 1e-3; its other devices evaluate the formula, as we do.
    Gelu,
    /// `x / (1 + e^(-1.702 x))`, evaluated directly as [`Kind::Gelu`] is.
    GeluQuick,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x min(1, max(0, (x + 3) / 6))`.
    HardSwish,
    /// `min(1, max(0, (x + 3) / 6))`.
    HardSigmoid,
    /// `e^x`.
    Exp,
    /// `e^x - 1`, with the cancellation of that difference in f32 around 0.
    Expm1,
    /// `x > 20 ? x : ln(1 + e^x)`.
    Softplus,
    /// `x/2 (1 + erf(x / sqrt 2))`.
    GeluErf,
    /// `x > 0 ? alpha_p x² + beta x : (e^min(x, eps) - 1 - x) alpha_n + beta x`.
    Xielu {
        /// Factor of the negative side: `beta + softplus(α_n)`, applied by whoever builds the node.
        alpha_n: f32,
        /// Factor of the positive side: `softplus(α_p)`.
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
    /// Every kind by its number; XIELU without its parameters.
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

    /// Its number on the wire.
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
            Unary::Kind(_) => OpCode::Unary,
            Unary::Scale { .. } => OpCode::Scale,
            Unary::Clamp { .. } => OpCode::Clamp,
            Unary::Fill { .. } => OpCode::Fill,
        }
    }

    fn decode(code: OpCode, words: &OpParams) -> Result<Self, ParamError> {
        Ok(match code {
            OpCode::Sqrt => Unary::Sqrt,
            OpCode::Scale => Unary::Scale { scale: words.float(0), bias: words.float(1) },
            OpCode::Clamp => Unary::Clamp { min: words.float(0), max: words.float(1) },
            OpCode::Fill => Unary::Fill { value: words.float(0) },
            OpCode::Unary => {
                let number = words.int(0);
                let kind = usize::try_from(number).ok().and_then(|k| UnaryKind::ALL.get(k));
                Unary::Kind(match kind {
                    Some(UnaryKind::Xielu { .. }) => UnaryKind::Xielu {
                        alpha_n: words.float(1),
                        alpha_p: words.float(2),
                        beta: words.float(3),
                        eps: words.float(4),
                    },
                    Some(kind) => *kind,
                    None => return Err(ParamError::new(code, 0, "kind", number, "0 to 21")),
                })
            }
            _ => Unary::Sqr,
        })
    }

    fn encode(&self) -> OpParams {
        let words = OpParams::default();
        match *self {
            Unary::Sqr | Unary::Sqrt => words,
            Unary::Scale { scale, bias } => words.with_float(0, scale).with_float(1, bias),
            Unary::Clamp { min, max } => words.with_float(0, min).with_float(1, max),
            Unary::Fill { value } => words.with_float(0, value),
            Unary::Kind(kind) => {
                let words = words.with_int(0, kind.wire_number());
                match kind {
                    UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => {
                        words.with_float(1, alpha_n).with_float(2, alpha_p).with_float(3, beta).with_float(4, eps)
                    }
                    _ => words,
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
