//! How each op runs on a GPU, one file per family: which kernels of `kernels/<stem>.cu`, on which grid, with which arguments.
//!
//! A family's `select` is both the device's answer to "do you support this" and the thing that is launched. A node it
//! refuses runs on the CPU: see [`crate::fallback`].

mod binary;
mod concat;
mod copy;
mod flash_attn;
mod glu;
mod mul_mat;
mod norm;
mod reduce;
mod rope;
mod rows;
mod softmax;
mod sort;
mod unary;
mod zip;

use super::driver::Gpu;
use super::kernel::{Grid, Kernel, Launch, Ptr};
use crate::device::{Unsupported, unsupported_types};
use crate::graph::fuse::FusedOp;
use crate::ops::{NodeView, Op, for_each_family};
use crate::tensor::{DIMS, DType, TensorDesc};
use bytemuck::{NoUninit, Pod, Zeroable};

/// The kernels of `$op`, by the families that have some.
macro_rules! select_family {
    ([$op:ident $on:ident] $($stem:ident: $family:ident [$($code:ident),+] on cpu $($cuda:ident)?;)+) => {
        match $op {
            $(Op::$family(op) => select_family!(@ $stem op $on $($cuda)?),)+
        }
    };
    (@ $stem:ident $op:ident $on:ident cuda) => { $stem::select(*$op, &$on) };
    (@ $stem:ident $op:ident $on:ident) => {{
        let _ = $op;
        Err($on.unsupported("no CUDA kernels for this op"))
    }};
}

/// Threads of a block where nothing speaks for another number.
const THREADS: u32 = 256;

/// The kernels for a node that keeps its shape rule.
///
/// # Errors
/// [`Unsupported`] names what CUDA lacks for it.
pub(super) fn select(node: &NodeView<'_>, gpu: &Gpu) -> Result<Kernel, Unsupported> {
    if node.dst.is_empty() {
        return Ok(Kernel::default());
    }
    let on = On { node, gpu };
    // Products alone read and write at any address.
    if !node.aligned && !matches!(node.op, Op::MulMat(_)) {
        return Err(on.unsupported("a tensor that is not aligned to its elements"));
    }
    let op = node.op;
    for_each_family!(select_family!(op on))
}

/// The kernels for a fused step, where there are some. `view` has the fused operands.
pub(super) fn fused(fused: &FusedOp, view: &NodeView<'_>, gpu: &Gpu) -> Option<Kernel> {
    let on = On { node: view, gpu };
    match *fused {
        FusedOp::Norm { op, fusion: around } => norm::fused(op, around, &on),
        FusedOp::RopeSetRows { op, row } => rope::fused(op, row, &on),
    }
}

/// A node and the GPU it shall run on.
struct On<'a> {
    node: &'a NodeView<'a>,
    gpu: &'a Gpu,
}

impl<'a> On<'a> {
    fn dst(&self) -> &'a TensorDesc {
        self.node.dst
    }

    /// Source `i`.
    fn src(&self, i: usize) -> Result<&'a TensorDesc, Unsupported> {
        self.node.srcs.get(i).ok_or_else(|| self.unsupported("a source is missing"))
    }

    /// One launch of the entry `name` of `kernels/<stem>.cu`: see [`Launch::new`].
    fn launch(
        &self,
        entry: (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        numbers: &impl NoUninit,
    ) -> Result<Launch, Unsupported> {
        Launch::new(self.node, self.gpu, entry, grid, pointers, numbers)
    }

    /// The same, alone.
    fn kernel(
        &self,
        entry: (&str, &str),
        grid: Grid,
        pointers: &[Ptr],
        numbers: &impl NoUninit,
    ) -> Result<Kernel, Unsupported> {
        self.launch(entry, grid, pointers, numbers).map(Kernel::one)
    }

    /// The kernel's view of a tensor.
    fn shape(&self, t: &TensorDesc) -> Result<Shape, Unsupported> {
        Shape::of(t).ok_or_else(|| self.unsupported("a tensor with 2^31 or more elements in a dimension"))
    }

    fn unsupported(&self, reason: impl Into<String>) -> Unsupported {
        Unsupported { op: self.node.op.code(), reason: reason.into() }
    }

    /// The error that a node's types are not among those its kernels take.
    fn types(&self) -> Unsupported {
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
    /// `None` when a dimension has 2³¹ or more elements.
    fn of(t: &TensorDesc) -> Option<Shape> {
        let count = |n: usize| i32::try_from(n).ok().map(|n| n as u32);
        let [n0, n1, n2, n3] = t.ne().map(count);
        Some(Shape { ne: [n0?, n1?, n2?, n3?], nb: t.nb().map(|b| b as u64) })
    }

    /// Counts rows, of which all tensors have the same numbers, in as few dimensions as their steps allow: a kernel then need
    /// not divide to find a row.
    fn merge_rows(shapes: &mut [Shape]) {
        for next in [2, 3] {
            let follows = |&Shape { ne, nb }: &Shape| {
                let few = u64::from(ne[1]) * u64::from(ne[next]) <= i32::MAX as u64;
                let after = ne[next] == 1 || ne[1] == 1 || nb[next] == nb[1] * u64::from(ne[1]);
                few && after && (next == 2 || ne[2] == 1)
            };
            if shapes.iter().all(follows) {
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

    /// Whether the dimensions from `from` on keep what they count at multiples of 16 bytes.
    fn keeps_alignment(&self, from: usize) -> bool {
        (from..DIMS).all(|d| self.ne[d] == 1 || self.nb[d].is_multiple_of(16))
    }
}

/// A type's part of an entry's name: `f32`, `q4_0`.
fn suffix(dtype: DType) -> String {
    dtype.name().to_ascii_lowercase()
}

/// Blocks of `threads` threads for `n` items, each thread with `each` of them.
fn blocks(n: usize, threads: u32, each: usize) -> u64 {
    (n as u64).div_ceil(u64::from(threads) * each as u64)
}

/// The macro over a table with a family that only the CPU runs: the crate's own table may have none.
#[cfg(test)]
mod tests {
    #[derive(Debug)]
    enum Op {
        Slow(u8),
        Fast(u8),
    }

    struct On;

    impl On {
        fn unsupported(&self, reason: &'static str) -> &'static str {
            reason
        }
    }

    mod fast {
        pub(super) fn select(parameter: u8, _: &super::On) -> Result<u8, &'static str> {
            Ok(parameter)
        }
    }

    fn select(op: &Op, on: On) -> Result<u8, &'static str> {
        select_family!([op on]
            slow: Slow [Sqr, Sqrt] on cpu;
            fast: Fast [Add] on cpu cuda;
        )
    }

    #[test]
    fn a_family_without_cuda_is_refused() {
        assert_eq!(select(&Op::Fast(7), On), Ok(7));
        assert_eq!(select(&Op::Slow(7), On), Err("no CUDA kernels for this op"));
    }
}
