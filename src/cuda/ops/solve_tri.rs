//! Launches of SOLVE_TRI: kernels/solve_tri.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product};
use crate::ops::solve_tri::SolveTri;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// Columns per block: one warp, since few matrices have many columns.
const COLUMNS: u32 = 32;

/// Rows of a block's columns that fit the shared memory of 48 KiB.
const MAX_KEPT: u32 = (48 << 10) / (4 * COLUMNS);

/// `struct SolveTriArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SolveTriArgs {
    n: u32,
    columns: u32,
    groups: u32,
    kept: u32,
}

impl KernelArguments for SolveTriArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let matrices = grid.blocks[0] / u64::from(self.groups.max(1));
        let all = |pointer, columns| {
            Access::elements(pointer, matrices.saturating_mul(saturating_product(&[self.n, columns])))
        };
        Ok(vec![all(0, self.n), all(1, self.columns), all(2, self.columns)])
    }
}

pub(super) fn select(_: SolveTri, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b, x) = (on.src(0)?, on.src(1)?, on.dst());
    if [a.dtype(), b.dtype(), x.dtype()] != [F32; 3] {
        return Err(on.unsupported_types());
    }
    let [columns, n, n2, n3] = on.shape(x)?.ne;
    let groups = columns.div_ceil(COLUMNS);
    let is_kept = n <= MAX_KEPT;
    let args = SolveTriArgs { n, columns, groups, kept: is_kept.into() };
    let grid = Grid::line(saturating_product(&[groups, n2, n3]), COLUMNS);
    let grid = grid.with_shared(if is_kept { 4 * COLUMNS * n } else { 0 });
    // A thread solves a column: products of n rows with those before, of which four take the time of a load.
    let passes = u64::from(n).pow(2) / 8;
    let loops = [u64::from(columns).saturating_mul(saturating_product(&[n2, n3])), passes, 16];
    on.looping_launch(("solve_tri", "solve_tri_f32"), grid, (&[Ptr::Src(0), Ptr::Src(1), Ptr::Dst], &args), loops)
}
