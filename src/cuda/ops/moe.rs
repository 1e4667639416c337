//! Launches of a mixture of experts, fused: kernels/moe.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, blocks};
use crate::ops::softmax::SoftMax;
use bytemuck::{Pod, Zeroable};

/// Limits of `moe_route`: experts, used experts.
const MAX_EXPERTS: usize = 256;
const MAX_USED: usize = 32;
/// Tokens per block of `moe_route`, one warp each.
const ROUTE_WARPS: u32 = 4;

/// `struct MoeRouteArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MoeRouteArgs {
    experts: u32,
    size: u32,
    used: u32,
    tokens: u32,
    scale: f32,
    bounds: [f32; 2],
    padding: u32,
}

impl KernelArguments for MoeRouteArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let all = |pointer| Access::run(pointer, &[self.experts, self.tokens]);
        let used = |pointer| Access::run(pointer, &[self.used, self.tokens]);
        let one = |pointer| Access::run(pointer, &[self.tokens]);
        Ok(vec![all(0), all(1), all(2), used(3), one(4), one(5), used(6)])
    }
}

/// `struct MoeSumArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MoeSumArgs {
    n: u32,
    used: u32,
    tokens: u32,
    padding: u32,
}

impl KernelArguments for MoeSumArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let &MoeSumArgs { n, used, tokens, .. } = self;
        Ok(vec![Access::run(0, &[n, used, tokens]), Access::run(1, &[used, tokens]), Access::run(2, &[n, tokens])])
    }
}

/// The launch of a router; see [`crate::graph::fuse::FusedOp::Route`] for the operands.
pub(super) fn route(op: SoftMax, used: usize, bounds: Option<[f32; 2]>, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let [experts, tokens, ..] = on.src(0).ok()?.ne();
    let tokens = i32::try_from(tokens).ok()? as u32;
    if experts > MAX_EXPERTS || used > MAX_USED.min(experts) || op.max_bias > 0.0 || op.scale <= 0.0 {
        return None;
    }
    let args = MoeRouteArgs {
        experts: experts as u32,
        size: experts.next_power_of_two() as u32,
        used: used as u32,
        tokens,
        scale: op.scale,
        bounds: bounds.unwrap_or_default(),
        padding: 0,
    };
    let grid =
        Grid { blocks: [u64::from(tokens.div_ceil(ROUTE_WARPS)), 1, 1], threads: [32, ROUTE_WARPS, 1], shared: 0 };
    let clamped = if bounds.is_some() { Ptr::Src(5) } else { Ptr::Null };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Src(3), Ptr::Src(4), clamped, Ptr::Dst];
    on.single_launch(("moe", "moe_route"), grid, &pointers, &args).ok()
}

/// The launch of the weighted sum of experts; see [`crate::graph::fuse::FusedOp::ExpertSum`] for the operands.
pub(super) fn expert_sum(on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let [n, used, tokens, _] = on.shape(on.src(0).ok()?).ok()?.ne;
    let grid =
        Grid::of([blocks(n as usize, super::THREADS, 1), u64::from(tokens).min(super::MAX_GRID_YZ), 1], super::THREADS);
    let args = MoeSumArgs { n, used, tokens, padding: 0 };
    on.single_launch(("moe", "moe_sum"), grid, &[Ptr::Src(0), Ptr::Src(1), Ptr::Dst], &args).ok()
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [("MAX_EXPERTS", MAX_EXPERTS as u64), ("ROUTE_WARPS", ROUTE_WARPS.into())];
        assert_constants(include_str!("../../../kernels/moe.cu"), &expected);
    }
}
