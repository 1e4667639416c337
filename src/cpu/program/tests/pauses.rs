//! Each kernel in a run that pauses before every claim of work, against the same run without pauses.

use super::*;
use crate::device::{Buffer, CollectiveGroup};
use crate::graph::TensorId;
use crate::ops::ConvAxis;
use crate::ops::Op;
use crate::ops::assign::Assign;
use crate::ops::backward::Backward;
use crate::ops::binary::Binary;
use crate::ops::collective::{Collective, CollectiveKind};
use crate::ops::concat::Concat;
use crate::ops::conv::Conv;
use crate::ops::copy::CopyOp;
use crate::ops::diag::{Diag, Triangle};
use crate::ops::flash_attn::FlashAttn;
use crate::ops::glu::{Glu, GluKind};
use crate::ops::im2col::Im2col;
use crate::ops::mul_mat::MulMat;
use crate::ops::out_prod::OutProd;
use crate::ops::pad::Pad;
use crate::ops::pool::{self, PoolAxis, PoolKind};
use crate::ops::reduce::Reduce;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::rows::Rows;
use crate::ops::sequence::Sequence;
use crate::ops::softmax::SoftMax;
use crate::ops::sort::Sort;
use crate::ops::topk_mask::TopkMask;
use crate::ops::training::Training;
use crate::ops::unary::{Unary, UnaryKind};
use crate::ops::upscale::{ScaleMode, Upscale};
use crate::ops::window::Window;
use crate::tensor::DType::{F16, F32, I32, Q4_0, Q8_0};
use crate::tensor::quant::quantiser;
use std::num::NonZeroU32;

/// A graph under construction with the content of its leaves.
#[derive(Default)]
pub(super) struct Case {
    pub(super) b: Builder,
    pub(super) leaves: Vec<(TensorId, Vec<u8>)>,
}

impl Case {
    /// A leaf of random values.
    pub(super) fn leaf(&mut self, dtype: DType, ne: [usize; 4]) -> TensorId {
        let mut rng = fastrand::Rng::with_seed(self.leaves.len() as u64);
        let id = self.b.leaf(dtype, ne).unwrap();
        let values: Vec<f32> = (0..ne.iter().product()).map(|_| rng.f32() * 2.0 - 1.0).collect();
        let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
        quantiser(dtype).unwrap()(&values, &mut bytes);
        self.leaves.push((id, bytes));
        id
    }

    /// The graph, and its memory before a run.
    pub(super) fn build(self) -> (Arc<Graph>, Vec<u8>) {
        let graph = Arc::new(self.b.build());
        let mut memory = vec![0xa5; graph.slot_sizes()[0]];
        for (id, bytes) in &self.leaves {
            let at = graph.tensor(*id).unwrap().place.unwrap().offset;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        (graph, memory)
    }

    /// A leaf of random integers.
    pub(super) fn ids(&mut self, ne: [usize; 4], range: std::ops::Range<i32>) -> TensorId {
        let mut rng = fastrand::Rng::with_seed(self.leaves.len() as u64);
        let id = self.b.leaf(I32, ne).unwrap();
        let bytes = (0..ne.iter().product()).flat_map(|_| rng.i32(range.clone()).to_le_bytes()).collect();
        self.leaves.push((id, bytes));
        id
    }

    pub(super) fn node(&mut self, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        self.b.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    /// A node whose result has the given type and shape.
    pub(super) fn node_as(&mut self, op: impl Into<Op>, srcs: &[TensorId], dtype: DType, ne: [usize; 4]) -> TensorId {
        let dst = self.b.leaf(dtype, ne).unwrap();
        self.b.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    /// A node that writes its result over `on`, with the same description.
    pub(super) fn node_over(&mut self, op: impl Into<Op>, srcs: &[TensorId], on: TensorId) -> TensorId {
        let desc = self.b.tensor(on).unwrap().desc;
        let dst = self.b.view(on, desc, 0).unwrap();
        self.b.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    /// A view with other strides.
    pub(super) fn strided(&mut self, of: TensorId, ne: [usize; 4], nb: [usize; 4]) -> TensorId {
        let desc = TensorDesc::strided(self.b.tensor(of).unwrap().desc.dtype(), ne, nb).unwrap();
        self.b.view(of, desc, 0).unwrap()
    }
}

/// A name, and a function that adds its nodes.
pub(super) type Family = (&'static str, fn(&mut Case));

/// The families of kernels. A step of fewer than 16 384 elements would run on one worker, without pauses.
const FAMILIES: &[Family] = &[
    ("element-wise", |c| {
        let (a, b) = (c.leaf(F32, [1000, 31, 1, 1]), c.leaf(F32, [1000, 1, 1, 1]));
        let sum = c.node_over(Binary::Add, &[a, b], a);
        let scaled = c.node_over(Unary::Kind(UnaryKind::Silu), &[sum], sum);
        c.node_over(Binary::Sub, &[scaled, b], scaled);
        let x = c.leaf(F32, [3000, 17, 1, 1]);
        c.node(Glu { kind: GluKind::Swiglu, swapped: true }, &[x]);
        c.node_over(Unary::Fill { value: 3.0 }, &[x], x);
        let (y, bias, ids) = (c.leaf(F32, [512, 4, 20, 1]), c.leaf(F32, [512, 8, 1, 1]), c.ids([4, 20, 1, 1], 0..8));
        c.node_over(Binary::AddId, &[y, bias, ids], y);
    }),
    ("reductions", |c| {
        let x = c.leaf(F32, [700, 90, 1, 1]);
        c.node(Reduce::SumRows, &[x]);
        c.node(Reduce::Mean, &[x]);
        c.node(Reduce::Argmax, &[x]);
        c.node(Reduce::Cumsum, &[x]);
        c.node(Reduce::Sum, &[x]);
    }),
    ("norms", |c| {
        let x = c.leaf(F32, [300, 10, 12, 2]);
        c.node_over(Norm::RmsNorm { eps: 1e-5 }, &[x], x);
        c.node_over(Norm::GroupNorm { groups: NonZeroU32::new(5).unwrap(), eps: 1e-5 }, &[x], x);
        let (a, b, w) = (c.leaf(F32, [500, 70, 1, 1]), c.leaf(F32, [500, 70, 1, 1]), c.leaf(F32, [500, 1, 1, 1]));
        let sum = c.node_over(Binary::Add, &[a, b], a);
        let y = c.node(Norm::Norm { eps: 1e-5 }, &[sum]);
        c.b.set_use_count(y, 1).unwrap();
        c.node_over(Binary::Mul, &[y, w], b);
    }),
    ("copies", |c| {
        let x = c.leaf(F32, [96, 100, 6, 1]);
        c.node_as(CopyOp::Cpy, &[x], F16, [96, 100, 6, 1]);
        c.node_as(CopyOp::Cpy, &[x], Q8_0, [96, 100, 6, 1]);
        let transposed = c.strided(x, [100, 96, 6, 1], [384, 4, 38400, 230_400]);
        c.node(CopyOp::Cont, &[transposed]);
        c.node_as(CopyOp::Cpy, &[transposed], F16, [100, 96, 6, 1]);
        let gaps = c.strided(x, [90, 100, 6, 1], [4, 384, 38400, 230_400]);
        c.node_as(CopyOp::Cpy, &[gaps], F32, [54_000, 1, 1, 1]);
        c.node(Concat::Concat { dim: 1 }, &[x, x]);
        c.node_as(Concat::Repeat, &[x], F32, [192, 100, 6, 2]);
    }),
    ("rows", |c| {
        let (table, ids) = (c.leaf(Q8_0, [256, 300, 1, 1]), c.ids([200, 1, 1, 1], 0..300));
        c.node(Rows::GetRows, &[table, ids]);
        // Several ids name one row.
        let (cache, b, ids) =
            (c.leaf(F16, [1500, 20, 2, 1]), c.leaf(F32, [1500, 50, 2, 1]), c.ids([50, 1, 1, 1], 0..20));
        c.node_over(Rows::SetRows, &[b, ids, cache], cache);
    }),
    ("rows of one element, in several phases", |c| {
        const N: usize = (1 << 19) + 1000;
        let (cache, b, ids) = (c.leaf(F16, [1, 5000, 3, 1]), c.leaf(F32, [1, N, 3, 1]), c.ids([N, 3, 1, 1], 0..5000));
        c.node_over(Rows::SetRows, &[b, ids, cache], cache);
    }),
    ("sorts", |c| {
        let x = c.leaf(F32, [900, 40, 1, 1]);
        c.node(Sort::Argsort { descending: true }, &[x]);
        c.node_as(Sort::TopK, &[x], I32, [50, 40, 1, 1]);
        let (mask, picks) = (c.leaf(F16, [2000, 10, 1, 1]), c.ids([50, 20, 1, 1], 0..2000));
        c.node(TopkMask, &[mask, picks]);
    }),
    ("products of one right-hand side", |c| {
        let b = c.leaf(F32, [256, 70, 1, 1]);
        for dtype in [Q4_0, Q4_0, F16, F32] {
            let a = c.leaf(dtype, [256, 208, 1, 1]);
            c.node(MulMat::PLAIN, &[a, b]);
        }
    }),
    ("products of few columns, and of broadcast planes", |c| {
        let (a, b) = (c.leaf(Q8_0, [512, 400, 1, 1]), c.leaf(F32, [512, 1, 1, 1]));
        c.node(MulMat::PLAIN, &[a, b]);
        let (a, b) = (c.leaf(F16, [64, 130, 2, 1]), c.leaf(F32, [64, 33, 6, 1]));
        c.node(MulMat::PLAIN, &[a, b]);
    }),
    ("products by id", |c| {
        // Some slots have no expert.
        let (a, b, ids) = (c.leaf(Q4_0, [128, 64, 6, 1]), c.leaf(F32, [128, 1, 50, 1]), c.ids([3, 50, 1, 1], -1..6));
        c.node(MulMat::BY_ID, &[a, b, ids]);
    }),
    ("rotations", |c| {
        let (x, positions) = (c.leaf(F32, [64, 8, 60, 1]), c.ids([60, 1, 1, 1], 0..1000));
        c.node_over(Rope::new(RopeMode::Neox, 64), &[x, positions], x);
    }),
    ("rotations into rows, in several phases", |c| {
        const TOKENS: usize = 2100;
        let (x, positions) = (c.leaf(F32, [256, 4, TOKENS, 1]), c.ids([TOKENS, 1, 1, 1], 0..1000));
        let (cache, ids) = (c.leaf(F16, [1024, 300, 1, 1]), c.ids([TOKENS, 1, 1, 1], 0..300));
        let y = c.node(Rope::new(RopeMode::Normal, 64), &[x, positions]);
        let rows = c.b.view(y, TensorDesc::contiguous(F32, [1024, TOKENS, 1, 1]).unwrap(), 0).unwrap();
        for t in [y, rows] {
            c.b.set_use_count(t, 1).unwrap();
        }
        c.node_over(Rows::SetRows, &[rows, ids, cache], cache);
    }),
    ("images", |c| {
        let axes = [ConvAxis { stride: 1, padding: 1, dilation: 1 }; 2];
        let image = c.leaf(F32, [40, 30, 12, 1]);
        for dtype in [F32, F16] {
            let kernel = c.leaf(dtype, [3, 3, 12, 40]);
            c.node(Conv::Conv2d { axes }, &[kernel, image]);
            let transposed = c.leaf(dtype, [4, 3, 20, 12]);
            c.node(Conv::Transpose2d { stride: 2 }, &[transposed, image]);
        }
        let depthwise = c.leaf(F32, [3, 3, 1, 12]);
        c.node(Conv::Conv2dDw { axes }, &[depthwise, image]);
        let shape = c.leaf(F16, [3, 3, 12, 1]);
        let patches = c.node_as(Im2col::Im2col { axes, two_d: true }, &[shape, image], F32, [108, 40, 30, 1]);
        c.node_as(Im2col::Im2colBack { axes, two_d: true }, &[patches, shape], F32, [40, 30, 12, 1]);
        let columns = c.leaf(F32, [60, 500, 1, 1]);
        c.node(Im2col::Col2im1d { stride: 7, channels: 3, padding: 2 }, &[columns]);
        let window = PoolAxis { kernel: 5, stride: 1, padding: 2 };
        for kind in [PoolKind::Max, PoolKind::Average] {
            let pooled = c.node(pool::Pool::Pool2d { kind, axes: [window; 2] }, &[image]);
            c.node(pool::Pool::Pool2dBack { kind, axes: [window; 2] }, &[pooled, image]);
        }
        for (mode, antialias) in [(ScaleMode::Nearest, false), (ScaleMode::Bilinear, true), (ScaleMode::Bicubic, false)]
        {
            c.node_as(Upscale { mode, align_corners: false, antialias }, &[image], F32, [50, 60, 12, 1]);
        }
        c.node(Window::Part { columns: 15, rows: 6, size: 2 }, &[image]);
        let (scores, pw, ph) =
            (c.leaf(F32, [100, 200, 3, 1]), c.leaf(F32, [10, 20, 10, 3]), c.leaf(F32, [10, 20, 10, 3]));
        c.node_over(Window::AddRelPos, &[scores, pw, ph], scores);
    }),
    ("regions, paddings and sequences", |c| {
        let (a, b) = (c.leaf(F32, [600, 50, 1, 1]), c.leaf(F32, [500, 40, 1, 1]));
        let region = Assign { accumulate: true, nb: [2400, 0, 0], offset: 8, in_place: false };
        c.node(region, &[a, b]);
        c.node_over(Assign { accumulate: false, in_place: true, ..region }, &[a, b], a);
        c.node_over(region, &[a, b], a);
        c.node(Pad::Pad { before: [3, 1, 0, 0], after: [0, 2, 0, 0], circular: false }, &[a]);
        c.node(Pad::Roll { shifts: [70, -3, 0, 0] }, &[a]);
        c.node(Pad::Reflect { before: 70, after: 9 }, &[a]);
        c.node_over(Diag::MaskInf { n_past: 9 }, &[a], a);
        let square = c.leaf(F32, [150, 150, 1, 1]);
        c.node(Diag::Tri(Triangle::Lower), &[square]);
        let timesteps = c.leaf(F32, [60, 1, 1, 1]);
        c.node(Sequence::TimestepEmbedding { dim: 320, max_period: 10_000 }, &[timesteps]);
        let (x, y) = (c.ids([500, 40, 1, 1], 0..3), c.ids([500, 40, 1, 1], 0..3));
        c.node(Reduce::CountEqual, &[x, y]);
    }),
    ("gradients, several in phases", |c| {
        let (dy, x) = (c.leaf(F32, [700, 50, 1, 1]), c.leaf(F32, [700, 50, 1, 1]));
        for op in [Backward::Silu, Backward::RmsNorm { eps: 0.1 }, Backward::SoftMax { scale: 0.5 }] {
            c.node(op, &[dy, x]);
        }
        let long = c.leaf(F32, [3000, 200, 1, 1]);
        c.node_as(Backward::Repeat, &[long], F32, [2, 1, 1, 1]);
        let (rows, ids) = (c.leaf(F32, [90, 5000, 1, 1]), c.ids([5000, 1, 1, 1], 0..30));
        c.node_as(Backward::GetRows, &[rows, ids], F32, [90, 30, 1, 1]);
        let (a, b) = (c.leaf(F32, [300, 4200, 1, 1]), c.leaf(F32, [2, 4200, 1, 1]));
        c.node(OutProd, &[a, b]);
        c.node(Training::CrossEntropyLoss, &[dy, x]);
        let one = c.leaf(F32, [1, 1, 1, 1]);
        c.node(Training::CrossEntropyLossBack, &[one, dy, x]);
        let (w, constants) = (c.leaf(F32, [700, 50, 1, 1]), c.leaf(F32, [7, 1, 1, 1]));
        let v = c.leaf(F32, [700, 50, 1, 1]);
        c.node_over(Training::OptStepAdamw, &[w, dy, x, v, constants], w);
    }),
    ("collectives of a group of one rank", |c| {
        let x = c.leaf(F32, [1000, 61, 1, 1]);
        let reduce = Collective { kind: CollectiveKind::AllReduce, group: 0 };
        let sum = c.node(reduce, &[x]);
        c.node_over(reduce, &[sum], sum);
        let gather = Collective { kind: CollectiveKind::AllGather { axis: 0 }, group: 0 };
        c.node_as(gather, &[sum], F32, [1000, 61, 1, 1]);
        let rows = c.leaf(F16, [3, 20_000, 5, 1]);
        c.node_as(gather, &[rows], F16, [3, 20_000, 5, 1]);
    }),
    ("attention", |c| {
        let softmax = SoftMax { scale: 0.1, max_bias: 0.0 };
        let x = c.leaf(F32, [400, 50, 4, 1]);
        c.node_over(softmax, &[x], x);
        let op = FlashAttn { scale: 0.1, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
        // One query with split positions, and many tiles of many queries.
        for (tokens, positions, heads) in [(1, 1500, 4), (40, 100, 70)] {
            let q = c.leaf(F32, [64, tokens, heads, 1]);
            let (k, v) = (c.leaf(F16, [64, positions, heads, 1]), c.leaf(F16, [64, positions, heads, 1]));
            c.node(op, &[q, k, v]);
        }
    }),
];

/// The memory after a run, and the number of turns that it took. The pool of each turn is the next of `workers`. Workers'
/// scratch is new in each turn.
fn run(
    graph: &Arc<Graph>,
    (mode, workers): (MathMode, &[usize]),
    memory: &[u8],
    is_due: &(dyn Fn() -> bool + Sync),
) -> (Vec<u8>, usize) {
    let budget = MemoryBudget::new(1 << 30);
    let device = CpuDevice::new("CPU", 1, mode, 1 << 30).unwrap();
    let mut code = CpuProgram::new(graph, mode, 1).unwrap();
    // Otherwise a small program runs on one worker.
    code.cost = code.cost.max(SMALL_PROGRAM_COST);
    let buffer: Buffer = device.alloc(memory.len() as u64, &budget).unwrap();
    buffer.memory::<CpuMemory>().unwrap().write(0, memory, Locking::WAIT).unwrap();
    let pools: Vec<Pool> = workers.iter().map(|&n| Pool::new(n).unwrap()).collect();
    let shared = HostMemory::scratch(code.scratch(1).unwrap().1, &budget).unwrap();
    let (mut position, mut turns, mut groups) = (RunPosition::default(), 0, JoinedGroups::default());
    groups.join(0, CollectiveGroup::members(1, 1 << 20, &budget).unwrap().remove(0));
    loop {
        let pool = &pools[turns % pools.len()];
        let locals = HostMemory::scratch(code.scratch(pool.workers()).unwrap().0, &budget).unwrap();
        let limits = RunLimits { pause: is_due, locking: Locking::WAIT, polls_at_first_collective: true };
        let abort = AtomicBool::new(false);
        let resources = RunResources { scratch: (&locals, &shared), groups: &groups, abort: &abort };
        let next = code.run(pool, &[buffer.whole()], resources, position, limits).unwrap();
        turns += 1;
        let Some(next) = next else { break };
        assert!(next != position, "turn {turns} makes no progress at {position:?}");
        position = next;
    }
    let mut content = Vec::new();
    assert!(buffer.memory::<CpuMemory>().unwrap().read(0, memory.len(), &mut content, Locking::WAIT).unwrap());
    (content, turns)
}

#[test]
fn pauses_inside_steps_change_no_result() {
    for (what, build) in FAMILIES {
        let mut case = Case::default();
        build(&mut case);
        let (graph, memory) = case.build();
        for mode in [MathMode::Exact, MathMode::Fast] {
            let (want, turns) = run(&graph, (mode, &[1]), &memory, &|| false);
            assert_eq!(turns, 1, "{what}");
            for workers in [&[1][..], &[3], &[3, 1, 2]] {
                let (got, turns) = run(&graph, (mode, workers), &memory, &|| true);
                assert!(got == want, "{what}, {mode:?}, {workers:?} workers: another result after pauses");
                assert!(turns > graph.nodes().len(), "{what}, {workers:?} workers: only {turns} turns");
                // Pauses that begin in the middle of a step, after this turn has done a part of it.
                let calls = AtomicUsize::new(0);
                let (got, _) =
                    run(&graph, (mode, workers), &memory, &|| calls.fetch_add(1, Ordering::Relaxed) % 7 == 6);
                assert!(got == want, "{what}, {mode:?}, {workers:?} workers: another result after some pauses");
            }
        }
    }
}

/// Barriers of a run that does not pause: one before each shared step, and one for each phase.
#[test]
fn runs_without_pauses_pass_no_additional_barrier() {
    let mut b = Builder::new();
    let mut x = b.leaf(DType::F32, [64, 64, 1, 1]).unwrap();
    for _ in 0..6 {
        x = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    }
    let graph = Arc::new(b.build());
    let (barriers, steps) = (Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0));
    let code = CpuProgram::with_patterns(&graph, 2, &[], |_| {
        let (step, barriers) = (steps.fetch_add(1, Ordering::Relaxed), Arc::clone(&barriers));
        // Steps 2 and 3 are serial; step 4 has three phases.
        let cost = if step == 2 || step == 3 { 1 } else { SMALL_PROGRAM_COST };
        let kernel = Kernel::new(cost, move |work| {
            for phase in 0..if step == 4 { 3 } else { 1 } {
                if phase > 0 {
                    work.sync();
                }
                work.chunks(100, 7).for_each(drop);
            }
            barriers.fetch_max(work.member.phase(), Ordering::Relaxed);
        });
        Ok(kernel.with_syncs(if step == 4 { 2 } else { 0 }))
    });
    let (code, budget) = (code.unwrap(), MemoryBudget::new(1 << 20));
    let device = CpuDevice::new("CPU", 2, MathMode::Exact, 1 << 20).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let scratch = HostMemory::scratch(0, &budget).unwrap();
    let limits = RunLimits { pause: &|| false, locking: Locking::WAIT, polls_at_first_collective: true };
    let (pool, abort, start) = (Pool::new(2).unwrap(), AtomicBool::new(false), RunPosition::default());
    let resources = RunResources { scratch: (&scratch, &scratch), groups: &JoinedGroups::default(), abort: &abort };
    assert_eq!(code.run(&pool, &[buffer.whole()], resources, start, limits), Ok(None));
    // Before steps 0, 1, 2, 4 and 5, and two inside step 4.
    assert_eq!(barriers.load(Ordering::Relaxed), 7);
}
