//! DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, TRI: matrices that depend on a diagonal.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};

/// An op on the rows of each matrix, by their position relative to the diagonal. i0 is the index within a row, i1 that of the
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Diag {
    /// The diagonal matrices `[n, n, a2, a3]` of the rows `[n, 1, a2, a3]`.
    Diag,
    /// The source, with -inf where `i0 > n_past + i1`: the causal mask of attention.
    MaskInf {
        /// Number of columns before the diagonal; at most `i32::MAX`.
        n_past: u32,
    },
    /// As [`Diag::MaskInf`], with 0.
    MaskZero {
        /// Number of columns before the diagonal; at most `i32::MAX`.
        n_past: u32,
    },
    /// A triangle of each square matrix, and 0 elsewhere. The source is contiguous.
    Tri(Triangle),
}

/// The elements that TRI keeps, in the order of their numbers on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Triangle {
    /// `i0 >= i1`.
    UpperWithDiagonal,
    /// `i0 > i1`.
    Upper,
    /// `i0 <= i1`.
    LowerWithDiagonal,
    /// `i0 < i1`.
    Lower,
}

impl Triangle {
    /// Every triangle, in the order of the numbers on the wire.
    pub const ALL: [Triangle; 4] =
        [Triangle::UpperWithDiagonal, Triangle::Upper, Triangle::LowerWithDiagonal, Triangle::Lower];
}

impl OpFamily for Diag {
    fn code(&self) -> OpCode {
        match self {
            Diag::Diag => OpCode::Diag,
            Diag::MaskInf { .. } => OpCode::DiagMaskInf,
            Diag::MaskZero { .. } => OpCode::DiagMaskZero,
            Diag::Tri(_) => OpCode::Tri,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let word = params.int(0);
        let n_past = || u32::try_from(word).map_err(|_| ParamError::new(code, 0, "n_past", word, "at least 0"));
        Ok(match code {
            OpCode::DiagMaskInf => Diag::MaskInf { n_past: n_past()? },
            OpCode::DiagMaskZero => Diag::MaskZero { n_past: n_past()? },
            OpCode::Tri => {
                let kind = usize::try_from(word).ok().and_then(|k| Triangle::ALL.get(k));
                Diag::Tri(*kind.ok_or_else(|| ParamError::new(code, 0, "kind", word, "0 to 3"))?)
            }
            _ => Diag::Diag,
        })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default();
        match *self {
            Diag::Diag => params,
            Diag::MaskInf { n_past } | Diag::MaskZero { n_past } => params.with_int(0, n_past as i32),
            Diag::Tri(kind) => params.with_int(0, kind as i32),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let mut out = OutputSpec::like(srcs.required(0)?);
        if let Diag::Diag = self {
            out.ne[1] = out.ne[0];
        }
        Ok(out)
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let x = node.src(0)?;
        match self {
            Diag::Diag => ensure!(node, x.ne()[1] == 1, "the source has one row in each plane"),
            Diag::MaskInf { n_past } | Diag::MaskZero { n_past } => {
                ensure!(node, i32::try_from(*n_past).is_ok(), "n_past fits an I32");
            }
            Diag::Tri(_) => {
                ensure!(node, x.ne()[0] == x.ne()[1], "the source is square");
                ensure!(node, x.is_contiguous(), "the source is contiguous");
            }
        }
        node.expect_dst(self.infer(&node.srcs)?)
    }

    fn in_place(&self, _: usize) -> bool {
        matches!(self, Diag::MaskInf { .. } | Diag::MaskZero { .. })
    }
}
