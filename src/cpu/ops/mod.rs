//! CPU kernels, one file per op family.
//!
//! A family's `select` decides whether a node is supported and returns its kernel. The device supports a node if `select`
//! succeeds, so that the two cannot diverge. Start with [`Kernel`] and [`select`]; a family to read first is `unary`.

mod assign;
mod backward;
mod binary;
mod collective;
mod concat;
mod conv;
mod copy;
mod diag;
mod dsv4;
mod flash_attn;
mod glu;
mod im2col;
mod linear_attn;
mod math;
mod mul_mat;
pub(super) mod norm;
mod out_prod;
mod pad;
mod pool;
mod recurrence;
mod reduce;
pub(super) mod rope;
pub(super) mod row_limits;
mod rows;
mod sequence;
mod softmax;
mod solve_tri;
mod sort;
mod ssm;
mod topk_mask;
mod training;
mod unary;
mod upscale;
mod window;

use super::layout::LayoutAccess;
use super::pool::KernelContext;
use super::simd::{GemmKernels, RhsPacking};
use crate::device::Unsupported;
pub(super) use crate::device::unsupported_types;
use crate::ops::softmax::Alibi;
use crate::ops::{NodeView, Op, OpCode};
use crate::tensor::{DType, TensorDesc};

/// Elements that element-wise kernels convert, compute and write at a time: a few such buffers fit the L1 cache and the stack.
pub(super) const CHUNK: usize = 1024;

/// Nodes below this cost (see [`Kernel::new`]) run on one worker: sharing them would cost more than it saves.
const MIN_SHARED_COST: usize = 1 << 14;

/// Operations per piece, if elements cost several operations each: a fraction of a millisecond.
const MAX_PIECE_COST: usize = 1 << 18;

/// Arithmetic of matrix products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MathMode {
    /// f32 products with f64 accumulators where ggml has them: the reference for all other devices.
    Exact,
    /// SIMD kernels and quantised activations, as in ggml's CPU backend.
    Fast,
}

/// The kernel of one node, with its scratch sizes, its cost and the layouts it can read.
pub(super) struct Kernel {
    run: Box<dyn Fn(&mut KernelContext<'_>) + Send + Sync>,
    pub(super) cost: usize,
    /// Whether the node is one part, which one worker runs.
    has_one_part: bool,
    pub(super) local: usize,
    pub(super) shared: usize,
    pub(super) syncs: usize,
    src0_access: LayoutAccess,
    pub(super) packed_rhs: Option<RhsPacking>,
    publish: Option<(u32, Box<Kernel>)>,
}

impl Kernel {
    /// A kernel and its cost in element operations (reading, computing and writing one f32 is about 1). Every worker of the
    /// node calls `run` and claims its part by [`KernelContext::chunks`], before whose claims a run may pause: see there for
    /// what a kernel may do outside of them.
    pub(super) fn new(cost: usize, run: impl Fn(&mut KernelContext<'_>) + Send + Sync + 'static) -> Kernel {
        Kernel {
            run: Box::new(run),
            cost,
            has_one_part: false,
            local: 0,
            shared: 0,
            syncs: 0,
            src0_access: LayoutAccess::Rows,
            packed_rhs: None,
            publish: None,
        }
    }

    /// Floats of scratch for each worker, from [`KernelContext::take_local_scratch`].
    pub(super) fn with_local(mut self, floats: usize) -> Kernel {
        self.local = floats;
        self
    }

    /// Bytes of scratch for all workers together, from [`KernelContext::shared`].
    pub(super) fn with_shared(mut self, bytes: usize) -> Kernel {
        self.shared = bytes;
        self
    }

    /// How often each call of `run` calls [`KernelContext::sync`]. All workers must sync equally often, so the program
    /// completes the count if a kernel fails.
    pub(super) fn with_syncs(mut self, syncs: usize) -> Kernel {
        self.syncs = syncs;
        self
    }

    /// Source 0 may be packed into panels ([`View::is_packed`](super::memory::View::is_packed)).
    pub(super) fn reads_panels(mut self) -> Kernel {
        self.src0_access = LayoutAccess::RowsOrPanels;
        self
    }

    /// As [`Kernel::reads_panels`]; panels are faster, so the program packs source 0 if allowed.
    pub(super) fn prefers_panels(mut self) -> Kernel {
        self.src0_access = LayoutAccess::PreferPanels;
        self
    }

    /// The kernel packs source 1 into shared scratch, which holds nothing else. If it finds source 1 packed there
    /// ([`KernelContext::rhs_is_packed`]), it packs nothing and does not call [`KernelContext::sync`].
    pub(super) fn with_packed_rhs(mut self, packing: RhsPacking) -> Kernel {
        self.packed_rhs = Some(packing);
        self
    }

    /// The kernel reads the parts of all ranks of a group; the kernel `publish` publishes this rank's part. The program runs
    /// `publish` as a step of its own, with the same operands, and waits for the other ranks before this kernel.
    pub(super) fn after_publishing(mut self, group: u32, publish: Kernel) -> Kernel {
        self.publish = Some((group, Box::new(publish)));
        self
    }

    /// The group and the kernel of [`Kernel::after_publishing`].
    pub(super) fn take_publish(&mut self) -> Option<(u32, Box<Kernel>)> {
        self.publish.take()
    }

    /// The layouts in which the kernel can read source `i`.
    pub(super) fn access(&self, i: usize) -> LayoutAccess {
        if i == 0 { self.src0_access } else { LayoutAccess::Rows }
    }

    /// Limits the parallelism: with a single part the node runs on one worker.
    pub(super) fn with_parts(mut self, parts: usize) -> Kernel {
        self.has_one_part = parts <= 1;
        self
    }

    pub(super) fn run(&self, ctx: &mut KernelContext<'_>) {
        (self.run)(ctx);
    }

    pub(super) fn runs_serially(&self) -> bool {
        self.has_one_part || self.cost < MIN_SHARED_COST
    }
}

/// The kernel of a node whose shapes satisfy the shape rule of its op.
///
/// # Errors
/// [`Unsupported`] with the reason why the CPU cannot run the node.
pub(super) fn select(node: &NodeView<'_>, math_mode: MathMode) -> Result<Kernel, Unsupported> {
    row_limits::check(node)?;
    match node.op {
        Op::Binary(op) => binary::select(*op, node),
        Op::Unary(op) => unary::select(*op, node),
        Op::Glu(op) => glu::select(*op, node),
        Op::Reduce(op) => reduce::select(*op, node),
        Op::Norm(op) => norm::select(*op, node),
        Op::CopyOp(_) => copy::select(node),
        Op::Rows(op) => rows::select(*op, node),
        Op::Concat(op) => concat::select(*op, node),
        Op::Sort(op) => sort::select(*op, node),
        Op::MulMat(op) => mul_mat::select(*op, node, math_mode),
        Op::Rope(op) => rope::select(*op, node),
        Op::SoftMax(op) => softmax::select(*op, node),
        Op::FlashAttn(op) => flash_attn::select(*op, node),
        Op::TopkMask(_) => topk_mask::select(node),
        Op::Im2col(op) => im2col::select(*op, node),
        Op::Conv(op) => conv::select(*op, node, math_mode),
        Op::Pool(op) => pool::select(*op, node),
        Op::Upscale(op) => upscale::select(*op, node),
        Op::Window(op) => window::select(*op, node),
        Op::Ssm(op) => ssm::select(*op, node),
        Op::LinearAttn(op) => linear_attn::select(*op, node),
        Op::SolveTri(_) => solve_tri::select(node),
        Op::Dsv4(op) => dsv4::select(*op, node),
        Op::Backward(op) => backward::select(*op, node),
        Op::Assign(op) => assign::select(*op, node),
        Op::Sequence(op) => sequence::select(*op, node),
        Op::Diag(op) => diag::select(*op, node),
        Op::Pad(op) => pad::select(*op, node),
        Op::OutProd(_) => out_prod::select(node),
        Op::Training(op) => training::select(*op, node),
        Op::Collective(op) => collective::select(*op, node),
    }
}

/// A sum without terms, such as a product of rows without elements, or attention over no positions: 0, as in ggml.
fn empty_sum(node: &NodeView<'_>) -> Kernel {
    Kernel::new(node.dst.elements(), |ctx| {
        let dst = ctx.dst();
        RowPieces::new(dst.desc()).share(ctx, |i, n| dst.store(i, &[0.0; CHUNK][..n]));
    })
}

/// Whether products with `math_mode` read this weight from panels.
pub(super) fn packs_into_panels(weight: &TensorDesc, math_mode: MathMode) -> bool {
    math_mode == MathMode::Fast
        && GemmKernels::of(weight.dtype()).is_some_and(|k| k.micro_kernel(weight.ne()[0]).is_some())
}

/// An [`Unsupported`] error with a reason (for wrong types see [`unsupported_types`]).
pub(super) fn unsupported(op: OpCode, reason: impl Into<String>) -> Unsupported {
    Unsupported { op, reason: reason.into() }
}

/// Refuses a node in which `what` is more than `most`. A run can pause only between two elements of a destination, so the work for
/// one must be bounded; the bounds are far above what models use.
pub(super) fn bounded(op: OpCode, what: &str, got: usize, most: usize) -> Result<(), Unsupported> {
    if got <= most { Ok(()) } else { Err(unsupported(op, format!("{got} {what}, of at most {most}"))) }
}

/// Cost of an element that is converted to this type. The searches of the quantisers take up to a tenth of a microsecond.
pub(super) fn store_cost(dtype: DType) -> usize {
    match dtype {
        DType::IQ4_XS => 96,
        _ if dtype.block_len() == 256 => 16,
        _ if dtype.is_block() => 4,
        _ => 1,
    }
}

/// Splits the rows `rows` of `t` into pieces of at most `piece` elements and calls `each(i, n)`: `i` is the index of the first
/// element, `n` the length.
pub(super) fn for_each_piece(
    t: &TensorDesc,
    rows: std::ops::Range<usize>,
    piece: usize,
    mut each: impl FnMut([usize; 4], usize),
) {
    let n = t.ne()[0];
    for r in rows {
        let [i1, i2, i3] = t.row_index(r);
        let mut i0 = 0;
        while i0 < n {
            let len = piece.min(n - i0);
            each([i0, i1, i2, i3], len);
            i0 += len;
        }
    }
}

/// The rows of a tensor, split into pieces of at most [`CHUNK`] elements that are numbered in order: workers can share a
/// tensor of few long rows as well as one of many short rows.
pub(super) struct RowPieces<'a> {
    t: &'a TensorDesc,
    piece: usize,
    per_row: usize,
    /// Operations per element.
    cost: usize,
}

impl<'a> RowPieces<'a> {
    /// With pieces of at most [`CHUNK`] elements.
    pub(super) fn new(t: &'a TensorDesc) -> RowPieces<'a> {
        RowPieces::with_len(t, CHUNK)
    }

    /// With pieces of at most `piece` elements.
    pub(super) fn with_len(t: &'a TensorDesc, piece: usize) -> RowPieces<'a> {
        RowPieces { t, piece, per_row: t.ne()[0].div_ceil(piece), cost: 1 }
    }

    /// For elements that cost `cost` operations each: with shorter pieces and smaller claims, because a run can only pause
    /// between two claims. Pieces have at most `most` elements, a multiple of `unit`.
    pub(super) fn with_cost(t: &'a TensorDesc, cost: usize, unit: usize, most: usize) -> RowPieces<'a> {
        let (cost, unit) = (cost.max(1), unit.max(1));
        let piece = (MAX_PIECE_COST / cost).clamp(unit, most.max(unit)) / unit * unit;
        RowPieces { cost, ..RowPieces::with_len(t, piece) }
    }

    /// Number of pieces.
    pub(super) fn count(&self) -> usize {
        self.t.rows() * self.per_row
    }

    /// Index of the first element of piece `k`, and its length.
    pub(super) fn get(&self, k: usize) -> ([usize; 4], usize) {
        let [i1, i2, i3] = self.t.row_index(k / self.per_row);
        let i0 = k % self.per_row * self.piece;
        ([i0, i1, i2, i3], self.piece.min(self.t.ne()[0] - i0))
    }

    /// Calls `each(i, n)` for the pieces that this worker claims, as [`for_each_piece`] does.
    pub(super) fn share(&self, ctx: &KernelContext<'_>, mut each: impl FnMut([usize; 4], usize)) {
        // Several claims per worker to balance the load, but none so small that claiming dominates.
        let elements = (self.t.elements() / (4 * ctx.workers())).clamp(CHUNK / self.cost, 4 * CHUNK / self.cost);
        let grain = elements / self.piece.min(self.t.ne()[0]).max(1);
        for range in ctx.chunks(self.count(), grain.max(1)) {
            for k in range {
                let (i, n) = self.get(k);
                each(i, n);
            }
        }
    }
}

/// Rows per chunk so that a chunk is about `items` elements.
pub(super) fn rows_per_chunk(t: &TensorDesc, items: usize) -> usize {
    (items / t.ne()[0].max(1)).max(1)
}

/// ALiBi: the mask's factor for query head `h` of `heads`; 1 without ALiBi (`max_bias` ≤ 0).
pub(super) fn alibi_slope(max_bias: f32, heads: usize, h: usize) -> f32 {
    Alibi::new(max_bias, heads).map_or(1.0, |alibi| alibi.slope(h))
}
