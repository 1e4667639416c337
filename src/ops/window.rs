//! WIN_PART, WIN_UNPART: an image as square windows, and back. GET_REL_POS, ADD_REL_POS: relative position embeddings of
//! attention within a window.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// An op of windowed attention, as in the image encoder of Segment Anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Source 0 F32 `[C, W, H]`; dst F32 `[C, size, size, columns*rows]`. Window `y*columns + x` begins at element
    /// `[x*size, y*size]` of the image; it is 0 outside of the image.
    Part {
        /// Windows along W: `W / size`, rounded up.
        columns: i32,
        /// Windows along H: `H / size`, rounded up.
        rows: i32,
        /// Width and height of a window, at least 1.
        size: i32,
    },
    /// The image `[C, W, H]` from its windows `[C, size, size, n]`: the inverse of [`Window::Part`]. The shape of the
    /// destination determines W and H.
    Unpart {
        /// Width and height of a window, at least 1.
        size: i32,
    },
    /// Source 0 F16 or BF16 `[C, 2*k - 1]`; dst F16 `[C, k, k]`: row `[x, y]` has the bits of row `k - 1 - x + y`.
    GetRelPos,
    /// Sources F32, contiguous: scores `[n*n, a*b, c]`, pw and ph `[n, a, b, c]`. dst: the scores, with ph of `[p, i]` added to
    /// elements `i*n + j` of row p and pw of `[p, i]` to elements `j*n + i`, for all i and j below n.
    AddRelPos,
}

/// Number of windows along `n` elements; `None` for an invalid size of windows.
fn windows(n: usize, size: i32) -> Option<usize> {
    usize::try_from(size).ok().filter(|&size| size > 0).map(|size| n.div_ceil(size))
}

impl OpFamily for Window {
    fn code(&self) -> OpCode {
        match self {
            Window::Part { .. } => OpCode::WinPart,
            Window::Unpart { .. } => OpCode::WinUnpart,
            Window::GetRelPos => OpCode::GetRelPos,
            Window::AddRelPos => OpCode::AddRelPos,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let positive = |word: usize, name| match params.int(word) {
            got @ 1.. => Ok(got),
            got => Err(ParamError::new(code, word, name, got, "a positive number")),
        };
        Ok(match code {
            OpCode::WinPart => Window::Part {
                columns: positive(0, "columns")?,
                rows: positive(1, "rows")?,
                size: positive(2, "size")?,
            },
            OpCode::WinUnpart => Window::Unpart { size: positive(0, "size")? },
            OpCode::GetRelPos => Window::GetRelPos,
            // The word says that dst is on source 0, which the addresses say too.
            _ => Window::AddRelPos,
        })
    }

    fn encode(&self) -> OpParams {
        match *self {
            Window::Part { columns, rows, size } => {
                OpParams::default().with_int(0, columns).with_int(1, rows).with_int(2, size)
            }
            Window::Unpart { size } => OpParams::default().with_int(0, size),
            Window::GetRelPos | Window::AddRelPos => OpParams::default(),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let x = srcs.required(0)?;
        let [n0, n1, n2, n3] = x.ne();
        match *self {
            Window::Part { columns, rows, size } => {
                ensure!(srcs, x.dtype() == DType::F32 && n3 == 1, "the image is F32 and has no dimension 3");
                ensure!(
                    srcs,
                    windows(n1, size) == usize::try_from(columns).ok()
                        && windows(n2, size) == usize::try_from(rows).ok(),
                    "the numbers of windows follow from the image and the size of a window"
                );
                let count = i64::from(columns) * i64::from(rows);
                ensure!(srcs, i32::try_from(count).is_ok(), "the number of windows fits an i32");
                Ok(OutputSpec { dtype: DType::F32, ne: [n0, size as usize, size as usize, count as usize] })
            }
            Window::Unpart { .. } => {
                Err(srcs.rule_error("the image's shape must be given: it does not follow from its windows"))
            }
            Window::GetRelPos => {
                ensure!(srcs, n1 % 2 == 1, "the table has an odd number of rows");
                ensure!(srcs, matches!(x.dtype(), DType::F16 | DType::BF16), "the table is F16 or BF16");
                Ok(OutputSpec { dtype: DType::F16, ne: [n0, n1.div_ceil(2), n1.div_ceil(2), 1] })
            }
            Window::AddRelPos => {
                let (pw, ph) = (srcs.required(1)?, srcs.required(2)?);
                let [n, a, b, c] = pw.ne();
                ensure!(srcs, pw.ne() == ph.ne(), "pw and ph have one shape");
                ensure!(srcs, [x, pw, ph].iter().all(|t| t.dtype() == DType::F32), "the sources are F32");
                ensure!(srcs, [x, pw, ph].iter().all(|t| t.is_contiguous()), "the sources are contiguous");
                let fits = n.checked_mul(n) == Some(n0) && a.checked_mul(b) == Some(n1) && c == n2;
                ensure!(srcs, fits, "pw is [n, a, b, c] for scores [n*n, a*b, c]");
                Ok(OutputSpec::like(x))
            }
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let Window::Unpart { size } = *self else { return node.expect_dst(self.infer(&node.srcs)?) };
        let (x, dst) = (node.src(0)?, node.dst);
        let ([n0, n1, n2, count], [d0, d1, d2, d3]) = (x.ne(), dst.ne());
        ensure!(node, x.dtype() == DType::F32 && dst.dtype() == DType::F32, "windows and image are F32");
        ensure!(node, d0 == n0 && d3 == 1, "the image has as many channels as the windows, and no dimension 3");
        ensure!(node, [n1, n2].iter().all(|&n| i32::try_from(n) == Ok(size)), "the windows have the given size");
        let needed = windows(d1, size).zip(windows(d2, size)).and_then(|(x, y)| x.checked_mul(y));
        ensure!(node, needed.is_some_and(|n| n <= count), "there are enough windows for the image");
        Ok(())
    }

    fn in_place(&self, i: usize) -> bool {
        *self == Window::AddRelPos && i == 0
    }
}
