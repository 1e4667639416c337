//! Launches of OUT_PROD: kernels/out_prod.cu.

use super::elementwise::block_shape;
use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product, suffix};
use crate::ops::out_prod::OutProd;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// Rows of dst per thread.
const ROWS: u32 = 8;

/// `struct OutProdArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct OutProdArgs {
    a: [u64; 3],
    b: [u64; 4],
    d: [u64; 3],
    n: u32,
    m: u32,
    depth: u32,
    ne: [u32; 2],
    repeats: [u32; 2],
    pieces: u32,
}

impl KernelArguments for OutProdArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [n2, n3] = self.ne;
        let [a2, a3] = [0, 1].map(|d| self.ne[d].div_ceil(self.repeats[d].max(1)));
        let a = Access::run(0, &[self.n]).along(self.depth, self.a[0]).along(a2, self.a[1]).along(a3, self.a[2]);
        let b = Access::one(1).along(self.m, self.b[0]).along(self.depth, self.b[1]);
        let d = Access::run(2, &[self.n]).along(self.m, self.d[0]).along(n2, self.d[1]).along(n3, self.d[2]);
        Ok(vec![a, b.along(n2, self.b[2]).along(n3, self.b[3]), d])
    }
}

pub(super) fn select(_: OutProd, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b, d) = (on.src(0)?, on.src(1)?, on.dst());
    if !a.dtype().is_float() || b.dtype() != F32 || d.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let name = format!("out_prod_{}", suffix(a.dtype()));
    let [a, b, d] = [on.shape(a)?, on.shape(b)?, on.shape(d)?];
    let [n, m, n2, n3] = d.ne;
    let (threads, pieces) = block_shape(n.into(), m.div_ceil(ROWS).into());
    let args = OutProdArgs {
        a: [a.nb[1], a.nb[2], a.nb[3]],
        b: b.nb,
        d: [d.nb[1], d.nb[2], d.nb[3]],
        n,
        m,
        depth: a.ne[1],
        ne: [n2, n3],
        repeats: [n2 / a.ne[2].max(1), n3 / a.ne[3].max(1)].map(|n| n.max(1)),
        pieces: pieces as u32,
    };
    let groups = u64::from(m).div_ceil(u64::from(threads[1]) * u64::from(ROWS));
    let blocks = pieces.saturating_mul(groups).saturating_mul(saturating_product(&[n2, n3]));
    let grid = Grid { blocks: [blocks, 1, 1], threads, shared: 0 };
    let threads = u64::from(n).saturating_mul(m.div_ceil(ROWS).into()).saturating_mul(saturating_product(&[n2, n3]));
    let loops = [threads, a.ne[1].into(), 20];
    on.looping_launch(("out_prod", &name), grid, (&[Ptr::Src(0), Ptr::Src(1), Ptr::Dst], &args), loops)
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        assert_constants(include_str!("../../../kernels/out_prod.cu"), &[("ROWS", u64::from(ROWS))]);
    }
}
