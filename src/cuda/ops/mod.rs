//! Kernel selection, one file per op family: the entries of `kernels/<stem>.cu` for a node, with their grids and arguments.
//!
//! Each family's `select` maps a node to its launches. The same result answers
//! [`Device::support`](crate::device::Device::support), so that a supported node can always be launched. Nodes that `select`
//! rejects run on the CPU: see [`crate::fallback`].
//!
//! Each file declares the scalar arguments of its entries as `#[repr(C)]` structs with the names that the `.cu` file uses; the
//! fields are documented there.

mod assign;
mod backward;
mod binary;
mod concat;
mod conv;
mod copy;
mod diag;
mod dsv4;
mod elementwise;
mod flash_attn;
mod glu;
mod im2col;
mod linear_attn;
mod moe;
mod mul_mat;
mod mul_mat_fused;
mod norm;
mod out_prod;
mod pad;
mod pool;
mod reduce;
mod repack;
mod rope;
mod rows;
mod sequence;
mod softmax;
mod solve_tri;
mod sort;
mod ssm;
mod topk_mask;
mod unary;
mod upscale;

#[cfg(test)]
mod kernel_constants;

pub(super) use mul_mat::{quantized_column_bytes, uses_gemm};
pub(super) use repack::{Repack, can_pack, repack_launch};

use super::access::{self, Access, KernelArguments, saturating_product};
use super::driver::Gpu;
use super::kernel::{Grid, KernelLaunch, Loops, NodeLaunches, Ptr};
use crate::device::{Unsupported, unsupported_types};
use crate::graph::fuse::FusedOp;
use crate::ops::{MAX_SRC, NodeView, Op, OpCode, for_each_family};
use crate::tensor::{DIMS, DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Lowest compute capability with the tensor-core instructions of our kernels, times ten.
pub(super) const MIN_MMA_CAPABILITY: u32 = 80;

/// Calls `select` of the family of `$op`, or returns an error if the table of families lists no CUDA kernels for it.
macro_rules! select_family {
    ([$op:ident $on:ident] $($stem:ident: $family:ident [$($code:ident),+] on cpu $($cuda:ident)?
        $(, [$($cpu_only:ident),+] on cpu)?;)+) => {
        match $op.code() {
            $($($(OpCode::$cpu_only)|+ => Err($on.unsupported("no CUDA kernels for this op")),)?)+
            _ => match $op {
                $(Op::$family(op) => select_family!(@ $stem op $on $($cuda)?),)+
            }
        }
    };
    (@ $stem:ident $op:ident $on:ident cuda) => { $stem::select(*$op, &$on) };
    (@ $stem:ident $op:ident $on:ident) => {{
        let _ = $op;
        Err($on.unsupported("no CUDA kernels for this op"))
    }};
}

/// Default number of threads per block.
const THREADS: u32 = 256;

/// Limit of blocks in y and z; beyond it, kernels loop.
const MAX_GRID_YZ: u64 = 65535;
/// Limits of kernels whose threads loop for long: passes of a thread (3 ms at 100 ns, the latency of a load), and instructions of all threads
/// (0.08 s of an H200, 0.5 s of a small GPU).
const MAX_PASSES: u64 = 1 << 15;
const MAX_LOOP_INSTRUCTIONS: u64 = 1 << 41;

/// Selects the launches for a node whose operands satisfy the op's shape rule.
///
/// # Errors
/// [`Unsupported`] names the type, shape or op that has no CUDA kernel.
pub(super) fn select(node: &NodeView<'_>, gpu: &Gpu) -> Result<NodeLaunches, Unsupported> {
    if node.dst.is_empty() {
        return Ok(NodeLaunches::default());
    }
    let on = NodeOnGpu { node, gpu };
    // Only the kernels of matrix products accept any address.
    if !node.aligned && !matches!(node.op, Op::MulMat(_)) {
        return Err(on.unsupported("a tensor that is not aligned to its elements"));
    }
    let op = node.op;
    let mut launches = for_each_family!(select_family!(op on))?;
    access::check(&mut launches, node).map_err(|reason| on.unsupported(reason))?;
    Ok(launches)
}

/// Selects the launches for a fused group of nodes, if kernels exist.
/// `view` has the operands of the group.
pub(super) fn fused(op: &FusedOp, view: &NodeView<'_>, gpu: &Gpu) -> Option<NodeLaunches> {
    let on = NodeOnGpu { node: view, gpu };
    if (0..MAX_SRC).any(|i| view.srcs.get(i).is_some_and(TensorDesc::is_empty)) {
        return None;
    }
    let mut launches = match *op {
        FusedOp::Norm { op, fusion } => norm::fused(op, fusion, &on),
        FusedOp::RopeSetRows { op, row } => rope::fused(op, row, &on),
        FusedOp::RopeCache { op, row, values, norms } => rope::fused_cache(op, row, (values, norms), &on),
        FusedOp::Route { op, used, bounds } => moe::route(op, used, bounds, &on),
        FusedOp::ExpertSum => moe::expert_sum(&on),
        FusedOp::Products { biased, .. } => mul_mat_fused::products(biased, &on),
        FusedOp::GatedProduct(op) => mul_mat_fused::gated(&op, &on),
    }?;
    let checked = access::check(&mut launches, view);
    // The nodes of a group run alone, too, and the patterns check the shapes: a violation here is a missing rule of one of them.
    debug_assert!(checked.is_ok(), "{op:?}: {checked:?}");
    checked.ok()?;
    Some(launches)
}

/// A node and the GPU for which kernels are selected.
struct NodeOnGpu<'a> {
    node: &'a NodeView<'a>,
    gpu: &'a Gpu,
}

impl<'a> NodeOnGpu<'a> {
    fn dst(&self) -> &'a TensorDesc {
        self.node.dst
    }

    /// Source `i`.
    fn src(&self, i: usize) -> Result<&'a TensorDesc, Unsupported> {
        self.node.srcs.get(i).ok_or_else(|| self.unsupported("a source is missing"))
    }

    /// One launch of an entry; see [`KernelLaunch::new`].
    fn launch(
        &self,
        entry: (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        args: &impl KernelArguments,
    ) -> Result<KernelLaunch, Unsupported> {
        KernelLaunch::new(self.node.op.code(), self.gpu, entry, grid, pointers, args)
    }

    /// As `launch`, for a node that needs a single launch and no scratch memory.
    fn single_launch(
        &self,
        entry: (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        args: &impl KernelArguments,
    ) -> Result<NodeLaunches, Unsupported> {
        self.launch(entry, grid, pointers, args).map(NodeLaunches::one)
    }

    /// As [`NodeOnGpu::single_launch`], for a kernel whose threads compute `outputs` values by `passes` passes of a loop, of so many instructions
    /// each. What would take longer than about a tenth of a second is left to the CPU: a launch cannot be interrupted.
    fn looping_launch(
        &self,
        entry: (&str, &str),
        grid: Grid,
        (pointers, args): (&[Ptr], &impl KernelArguments),
        counts: [u64; 3],
    ) -> Result<NodeLaunches, Unsupported> {
        let loops = self.loops(counts)?;
        Ok(NodeLaunches { loops, ..self.single_launch(entry, grid, pointers, args)? })
    }

    /// The loops of a launch for the estimate of its time, by the counts of [`NodeOnGpu::looping_launch`], which has the limit.
    fn loops(&self, [outputs, passes, instructions]: [u64; 3]) -> Result<Loops, Unsupported> {
        let instructions = outputs.saturating_mul(passes).saturating_mul(instructions);
        if passes > MAX_PASSES || instructions > MAX_LOOP_INSTRUCTIONS {
            return Err(self.unsupported("loops that would take too long"));
        }
        Ok(Loops { instructions, chain: passes })
    }

    /// Element counts and strides of a tensor for a kernel.
    fn shape(&self, t: &TensorDesc) -> Result<Shape, Unsupported> {
        Shape::of(t).ok_or_else(|| self.unsupported("a tensor with 2^31 or more elements in a dimension"))
    }

    fn unsupported(&self, reason: impl Into<String>) -> Unsupported {
        Unsupported { op: self.node.op.code(), reason: reason.into() }
    }

    /// The error for a combination of types without kernels.
    fn unsupported_types(&self) -> Unsupported {
        unsupported_types(self.node)
    }
}

/// `struct Shape` of kernels/common/abi.cuh: element counts and byte strides.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Shape {
    ne: [u32; DIMS],
    nb: [u64; DIMS],
}

impl Shape {
    /// The accesses of all elements.
    fn access(&self, pointer: usize) -> Access {
        Access::shape(pointer, self.ne, self.nb)
    }

    /// `None` if a dimension has 2³¹ or more elements.
    fn of(t: &TensorDesc) -> Option<Shape> {
        let count = |n: usize| i32::try_from(n).ok().map(|n| n as u32);
        let [n0, n1, n2, n3] = t.ne().map(count);
        Some(Shape { ne: [n0?, n1?, n2?, n3?], nb: t.nb().map(|b| b as u64) })
    }

    /// Merges the row dimensions (1 to 3) of shapes with equal counts as far as the strides of all allow. With one row
    /// dimension, a kernel needs no division to locate a row.
    fn merge_rows(shapes: &mut [Shape]) {
        for next in [2, 3] {
            let mergeable = |&Shape { ne, nb }: &Shape| {
                let count_fits = u64::from(ne[1]) * u64::from(ne[next]) <= i32::MAX as u64;
                let strides_fit = ne[next] == 1 || ne[1] == 1 || nb[next] == nb[1] * u64::from(ne[1]);
                // Dimension 3 merges only if dimension 2 has merged or is 1.
                count_fits && strides_fit && (next == 2 || ne[2] == 1)
            };
            if shapes.iter().all(mergeable) {
                for Shape { ne, nb } in shapes.iter_mut() {
                    if ne[1] == 1 {
                        nb[1] = nb[next];
                    }
                    ne[1] *= ne[next];
                    ne[next] = 1;
                }
            }
        }
    }

    /// Whether all strides from dimension `from` on are multiples of 16 bytes, so that rows are aligned if the first one is.
    fn keeps_alignment(&self, from: usize) -> bool {
        (from..DIMS).all(|d| self.ne[d] == 1 || self.nb[d].is_multiple_of(16))
    }
}

/// Name of a type within an entry's name, for example `f32` or `q4_0`.
fn suffix(dtype: DType) -> String {
    dtype.name().to_ascii_lowercase()
}

/// The grid of a kernel with one thread per element of the destination, in blocks of pieces of rows and of rows; and the pieces
/// per row.
fn rows_grid(on: &NodeOnGpu<'_>, t: &TensorDesc) -> Result<(Grid, u32), Unsupported> {
    let rows = t.rows() as u64;
    if rows > i32::MAX as u64 {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let (threads, pieces) = elementwise::block_shape(t.ne()[0] as u64, rows);
    let blocks = rows.div_ceil(u64::from(threads[1])).saturating_mul(pieces);
    Ok((Grid { blocks: [blocks, 1, 1], threads, shared: 0 }, pieces as u32))
}

/// Number of blocks of `threads` threads for `n` items, with `each` items per thread.
fn blocks(n: usize, threads: u32, each: usize) -> u64 {
    (n as u64).div_ceil(u64::from(threads) * each as u64)
}

/// Tests the macro on a table with a CPU-only family; the crate's own table may have none.
#[cfg(test)]
mod tests {
    use crate::ops::OpCode;

    #[derive(Debug)]
    enum Op {
        Slow(u8),
        Fast(u8),
    }

    impl Op {
        /// An even parameter stands for the family's op without CUDA kernels.
        fn code(&self) -> OpCode {
            match self {
                Op::Slow(_) => OpCode::Sqr,
                Op::Fast(n) if n % 2 == 0 => OpCode::Add1,
                Op::Fast(_) => OpCode::Add,
            }
        }
    }

    struct NodeOnGpu;

    impl NodeOnGpu {
        fn unsupported(&self, reason: &'static str) -> &'static str {
            reason
        }
    }

    mod fast {
        pub(super) fn select(parameter: u8, _: &super::NodeOnGpu) -> Result<u8, &'static str> {
            Ok(parameter)
        }
    }

    fn select(op: &Op, on: NodeOnGpu) -> Result<u8, &'static str> {
        select_family!([op on]
            slow: Slow [Sqr, Sqrt] on cpu;
            fast: Fast [Add] on cpu cuda, [Add1] on cpu;
        )
    }

    #[test]
    fn a_family_without_cuda_kernels_is_unsupported() {
        assert_eq!(select(&Op::Fast(7), NodeOnGpu), Ok(7));
        assert_eq!(select(&Op::Slow(7), NodeOnGpu), Err("no CUDA kernels for this op"));
    }

    #[test]
    fn an_op_without_cuda_kernels_is_unsupported() {
        assert_eq!(select(&Op::Fast(8), NodeOnGpu), Err("no CUDA kernels for this op"));
    }
}
