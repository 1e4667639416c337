//! GET_ROWS and SET_ROWS: gather and scatter of rows by index.

use super::{NodeView, OpCode, OpFamily, OutputSpec, ShapeError, Sources, ensure, plain_ops};
use crate::tensor::DType;

/// Reads or writes of rows by index. These ops have no parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Gather, e.g. token embeddings. `dst[:, i, j, l] = table[:, ids[i, j, l], j, l]`: table `[n, rows, a2, a3]`, ids I32
    /// `[k, a2, a3, 1]`, dst `[n, k, a2, a3]` of F32 (I32 for a table of I32).
    GetRows,
    /// Scatter, e.g. into a KV cache. `dst[:, ids[i, j % c1, l % c2], j, l] = b[:, i, j, l]`: source 0 is b `[n, r, b2, b3]` of
    /// F32 or F16, source 1 ids `[r, c1, c2, 1]` of I64 or I32, dst `[n, rows, b2, b3]`. Source 2 only names the destination's
    /// memory. Rows that no index names keep their content. If an index occurs more than once, the last row wins.
    SetRows,
}

impl OpFamily for Rows {
    plain_ops!(SetRows, GetRows);

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

    fn may_be_empty(&self, _: usize) -> bool {
        matches!(self, Rows::SetRows)
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
