//! GET_ROWS and SET_ROWS: rows read or written by index.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// Rows chosen by index. Neither op has parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// `dst[l, j, i, :] = table[l, j, ids[l, j, i], :]`: table `[a3, a2, rows, n]`, ids I32 `[1, a3, a2, k]`, dst
    /// `[a3, a2, k, n]` of F32 (I32 for a table of I32).
    GetRows,
    /// `dst[l, j, ids[l % c2, j % c1, i], :] = b[l, j, i, :]`: source 0 is b `[b3, b2, r, n]` of F32 or F16, source 1
    /// ids `[1, c2, c1, r]` of I64 or I32, dst `[b3, b2, rows, n]`. Source 2 only names the destination's memory; rows
    /// that no index names keep their content. Of equal indices the last one counts.
    SetRows,
}

impl OpFamily for Rows {
    fn code(&self) -> OpCode {
        match self {
            Rows::GetRows => OpCode::GetRows,
            Rows::SetRows => OpCode::SetRows,
        }
    }

    fn decode(code: OpCode, _: &OpParams) -> Result<Self, ParamError> {
        Ok(if code == OpCode::GetRows { Rows::GetRows } else { Rows::SetRows })
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        match self {
            Rows::GetRows => {
                let (table, ids) = (srcs.required(0)?, srcs.required(1)?);
                let dtype = if table.dtype() == DType::I32 { DType::I32 } else { DType::F32 };
                let [k, a2, a3, _] = ids.ne();
                Ok(OutputSpec { dtype, ne: [table.ne()[0], k, a2, a3] })
            }
            Rows::SetRows => Ok(OutputSpec::like(srcs.required(2)?)),
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        let (ids, dst) = (node.src(1)?, node.dst.ne());
        ensure!(node, ids.ne()[3] == 1, "ids have three dimensions");
        match self {
            Rows::GetRows => {
                let table = node.src(0)?.ne();
                ensure!(node, ids.dtype() == DType::I32, "ids are I32");
                ensure!(node, table[2..] == ids.ne()[1..3], "one list of ids for each matrix of the table");
            }
            Rows::SetRows => {
                let (b, ids_ne) = (node.src(0)?.ne(), ids.ne());
                ensure!(node, matches!(ids.dtype(), DType::I64 | DType::I32), "ids are I64 or I32");
                ensure!(node, b[0] == dst[0] && b[2..] == dst[2..], "b differs from the destination in rows only");
                ensure!(node, ids_ne[0] == b[1], "one id for each row of b");
                ensure!(
                    node,
                    (1..3).all(|d| ids_ne[d] > 0 && b[d + 1].is_multiple_of(ids_ne[d])),
                    "b's matrices are a multiple of the lists of ids"
                );
            }
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn writes_onto(&self, i: usize) -> bool {
        *self == Rows::SetRows && i == 2
    }

    fn keeps_rest(&self) -> bool {
        *self == Rows::SetRows
    }

    fn batch(&self, _: &NodeView<'_>) -> usize {
        0
    }
}
