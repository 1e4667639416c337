//! CPU kernels, one file per op family.
//!
//! A family's `select` decides whether a node can run and how: what it returns is both the device's answer to
//! "do you support this" and the thing that is launched, so that the two cannot drift apart.

mod binary;
mod concat;
mod copy;
mod flash_attn;
mod glu;
mod math;
mod mul_mat;
pub(super) mod norm;
mod reduce;
pub(super) mod rope;
mod rows;
mod softmax;
mod sort;
mod unary;

use super::layout::Access;
use super::pool::Work;
use super::simd::{Kernels, Packing};
use crate::device::Unsupported;
pub(super) use crate::device::unsupported_types as types;
use crate::ops::softmax::Alibi;
use crate::ops::{NodeView, Op, OpCode};
use crate::tensor::TensorDesc;

/// Elements that element-wise kernels convert, compute and write at a time: a few of these buffers stay in the first
/// cache level, on the stack.
pub(super) const CHUNK: usize = 1024;

/// Nodes below this cost (see [`Kernel::new`]) run on one worker: sharing would cost more than it saves.
const SHARE_FROM: usize = 1 << 14;

/// Which arithmetic products use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// f32 with f64 accumulators where ggml has them: the reference for every other device.
    Exact,
    /// SIMD and quantised activations, as ggml's own CPU does.
    Fast,
}

/// A node made ready to run.
pub(super) struct Kernel {
    run: Box<dyn Fn(&mut Work<'_>) + Send + Sync>,
    cost: usize,
    local: usize,
    shared: usize,
    syncs: usize,
    first: Access,
    columns: Option<Packing>,
}

impl Kernel {
    /// A kernel and its cost in element operations (one read, computed and written f32 is about 1). Every worker of the
    /// node calls `run`; it takes its part from [`Work::chunks`].
    pub(super) fn new(cost: usize, run: impl Fn(&mut Work<'_>) + Send + Sync + 'static) -> Kernel {
        Kernel { run: Box::new(run), cost, local: 0, shared: 0, syncs: 0, first: Access::Plain, columns: None }
    }

    /// Floats of scratch for each worker, from [`Work::take_local`].
    pub(super) fn with_local(mut self, floats: usize) -> Kernel {
        self.local = floats;
        self
    }

    /// Bytes of scratch for all workers together, from [`Work::shared`].
    pub(super) fn with_shared(mut self, bytes: usize) -> Kernel {
        self.shared = bytes;
        self
    }

    /// How often each call of `run` calls [`Work::sync`].
    pub(super) fn with_syncs(mut self, syncs: usize) -> Kernel {
        self.syncs = syncs;
        self
    }

    /// It reads source 0 as well when its rows lie in strips ([`View::packed`](super::memory::View::packed)).
    pub(super) fn reads_strips(mut self) -> Kernel {
        self.first = Access::Either;
        self
    }

    /// As [`Kernel::reads_strips`], and that is faster.
    pub(super) fn wants_strips(mut self) -> Kernel {
        self.first = Access::Strips;
        self
    }

    /// It leaves source 1 packed in shared scratch, which holds nothing else, and can find it there: then it does not
    /// call [`Work::sync`].
    pub(super) fn with_columns(mut self, packing: Packing) -> Kernel {
        self.columns = Some(packing);
        self
    }

    pub(super) fn leaves_columns(&self) -> Option<Packing> {
        self.columns
    }

    /// How it reads source `i`.
    pub(super) fn access(&self, i: usize) -> Access {
        if i == 0 { self.first } else { Access::Plain }
    }

    /// How many parts the work has at most: one alone is not worth a meeting of the workers.
    pub(super) fn with_parts(mut self, parts: usize) -> Kernel {
        if parts <= 1 {
            self.cost = 0;
        }
        self
    }

    pub(super) fn run(&self, work: &mut Work<'_>) {
        (self.run)(work);
    }

    pub(super) fn cost(&self) -> usize {
        self.cost
    }

    pub(super) fn alone(&self) -> bool {
        self.cost < SHARE_FROM
    }

    pub(super) fn local(&self) -> usize {
        self.local
    }

    pub(super) fn shared(&self) -> usize {
        self.shared
    }

    pub(super) fn syncs(&self) -> usize {
        self.syncs
    }
}

/// The kernel for a node that keeps its shape rule.
///
/// # Errors
/// [`Unsupported`] names what the CPU lacks for it.
pub(super) fn select(node: &NodeView<'_>, path: Path) -> Result<Kernel, Unsupported> {
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
        Op::MulMat(op) => mul_mat::select(*op, node, path),
        Op::Rope(op) => rope::select(*op, node),
        Op::SoftMax(op) => softmax::select(*op, node),
        Op::FlashAttn(op) => flash_attn::select(*op, node),
    }
}

/// Whether products on `path` read this weight from strips.
pub(super) fn takes_strips(weight: &TensorDesc, path: Path) -> bool {
    path == Path::Fast && Kernels::of(weight.dtype()).is_some_and(|k| k.tiles(weight.ne()[0]).is_some())
}

/// The error for anything but types.
pub(super) fn unsupported(op: OpCode, reason: impl Into<String>) -> Unsupported {
    Unsupported { op, reason: reason.into() }
}

/// Calls `each(i, n)` for the pieces of at most `piece` elements of the rows `rows` of `t`: `i` is the index of the
/// piece's first element, `n` its length.
pub(super) fn pieces(
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

/// The pieces of at most [`CHUNK`] (or fewer) elements of a tensor's rows, numbered in order, so that workers can share a tensor of
/// few long rows as well as one of many short ones.
pub(super) struct Pieces<'a> {
    t: &'a TensorDesc,
    piece: usize,
    per_row: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn of(t: &'a TensorDesc) -> Pieces<'a> {
        Pieces::by(t, CHUNK)
    }

    /// Pieces of at most `piece` elements.
    pub(super) fn by(t: &'a TensorDesc, piece: usize) -> Pieces<'a> {
        Pieces { t, piece, per_row: t.ne()[0].div_ceil(piece) }
    }

    pub(super) fn count(&self) -> usize {
        self.t.rows() * self.per_row
    }

    /// Index of piece `k`'s first element, and its length.
    pub(super) fn get(&self, k: usize) -> ([usize; 4], usize) {
        let [i1, i2, i3] = self.t.row_index(k / self.per_row);
        let i0 = k % self.per_row * self.piece;
        ([i0, i1, i2, i3], self.piece.min(self.t.ne()[0] - i0))
    }

    /// Calls `each(i, n)` for this worker's share of the pieces, as [`pieces`] does.
    pub(super) fn share(&self, work: &Work<'_>, mut each: impl FnMut([usize; 4], usize)) {
        // A few turns for each worker, but no smaller ones than a claim is worth.
        let elements = (self.t.elements() / (4 * work.workers())).clamp(CHUNK, 4 * CHUNK);
        let grain = elements / self.piece.min(self.t.ne()[0]).max(1);
        for range in work.chunks(self.count(), grain.max(1)) {
            for k in range {
                let (i, n) = self.get(k);
                each(i, n);
            }
        }
    }
}

/// Rows per chunk so that a chunk is about `items` elements.
pub(super) fn rows_of(t: &TensorDesc, items: usize) -> usize {
    (items / t.ne()[0].max(1)).max(1)
}

/// The slope of query head `h` of `heads` that ALiBi gives the mask; 1 without it (`max_bias` ≤ 0).
pub(super) fn alibi_slope(max_bias: f32, heads: usize, h: usize) -> f32 {
    Alibi::new(max_bias, heads).map_or(1.0, |alibi| alibi.slope(h))
}
