//! PAD, PAD_REFLECT_1D, ROLL: tensors with more, fewer or rotated elements along their dimensions.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, TensorDesc};

/// `dst[i] = x[j]`, where index j of each dimension follows from i.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pad {
    /// `j = i - before`. Where that is outside of x, dst is 0, or j wraps around.
    Pad {
        /// Elements in front of x, per dimension; a negative number cuts elements off.
        before: [i32; DIMS],
        /// Elements after x, per dimension.
        after: [i32; DIMS],
        /// Whether indices wrap around.
        circular: bool,
    },
    /// Along dimension 0, j is reflected at the first and at the last element, which are not repeated. x is contiguous.
    Reflect {
        /// Elements in front of x, fewer than x has in a row.
        before: u32,
        /// Elements after x, fewer than x has in a row.
        after: u32,
    },
    /// `j = i - shift`, wrapped around.
    Roll {
        /// Shifts per dimension, with an absolute value below the number of elements.
        shifts: [i32; DIMS],
    },
}

impl Pad {
    /// The shape of the destination; `None` if it is negative or overflows.
    fn shape(&self, x: &TensorDesc) -> Option<[usize; DIMS]> {
        let mut ne = x.ne();
        match *self {
            Pad::Pad { before, after, .. } => {
                for (n, (before, after)) in ne.iter_mut().zip(before.into_iter().zip(after)) {
                    *n = n.checked_add_signed(before as isize + after as isize)?;
                }
            }
            Pad::Reflect { before, after } => ne[0] = ne[0].checked_add(before as usize + after as usize)?,
            Pad::Roll { .. } => {}
        }
        Some(ne)
    }
}

impl OpFamily for Pad {
    fn code(&self) -> OpCode {
        match self {
            Pad::Pad { .. } => OpCode::Pad,
            Pad::Reflect { .. } => OpCode::PadReflect1d,
            Pad::Roll { .. } => OpCode::Roll,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let count = |word, name| {
            let got = params.int(word);
            u32::try_from(got).map_err(|_| ParamError::new(code, word, name, got, "at least 0"))
        };
        Ok(match code {
            OpCode::PadReflect1d => Pad::Reflect { before: count(0, "p0")?, after: count(1, "p1")? },
            OpCode::Roll => Pad::Roll { shifts: [0, 1, 2, 3].map(|k| params.int(k)) },
            _ => Pad::Pad {
                before: [0, 2, 4, 6].map(|k| params.int(k)),
                after: [1, 3, 5, 7].map(|k| params.int(k)),
                circular: params.int(8) != 0,
            },
        })
    }

    fn encode(&self) -> OpParams {
        let mut params = OpParams::default();
        match *self {
            Pad::Pad { before, after, circular } => {
                for (k, (before, after)) in before.into_iter().zip(after).enumerate() {
                    params = params.with_int(2 * k, before).with_int(2 * k + 1, after);
                }
                params.with_int(8, i32::from(circular))
            }
            Pad::Reflect { before, after } => params.with_int(0, before as i32).with_int(1, after as i32),
            Pad::Roll { shifts } => {
                for (k, shift) in shifts.into_iter().enumerate() {
                    params = params.with_int(k, shift);
                }
                params
            }
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let x = srcs.required(0)?;
        let ne = self.shape(x).ok_or_else(|| srcs.rule_error("the padded counts are not negative"))?;
        Ok(OutputSpec { dtype: x.dtype(), ne })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let x = node.src(0)?;
        match *self {
            Pad::Pad { .. } => {}
            Pad::Reflect { before, after } => {
                let fits = before.max(after) as usize;
                ensure!(node, fits < x.ne()[0] && i32::try_from(fits).is_ok(), "paddings are shorter than a row");
                ensure!(node, x.is_contiguous(), "the source is contiguous");
            }
            Pad::Roll { shifts } => {
                ensure!(node, x.rows_dense(), "rows of the source are dense");
                let below = |(shift, n): (i32, usize)| (shift.unsigned_abs() as usize) < n;
                ensure!(node, shifts.into_iter().zip(x.ne()).all(below), "shifts are below the counts");
            }
        }
        node.expect_dst(self.infer(&node.srcs)?)
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn may_be_empty(&self, _: usize) -> bool {
        matches!(self, Pad::Pad { circular: false, .. })
    }
}
