//! How much a worker does between two points at which a run can pause.

use super::pauses::{Case, Family};
use super::*;
use crate::cpu::memory::{BLOCK, accesses};
use crate::cpu::ops::row_limits::{MAX_GROUP, MAX_ROTATED_ROW, MAX_ROW, MAX_SORTED_ROW};
use crate::device::Buffer;
use crate::graph::TensorId;
use crate::ops::Op;
use crate::ops::assign::Assign;
use crate::ops::backward::Backward;
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::diag::{Diag, Triangle};
use crate::ops::glu::{Glu, GluKind};
use crate::ops::mul_mat::MulMat;
use crate::ops::pad::Pad;
use crate::ops::reduce::Reduce;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::rows::Rows;
use crate::ops::softmax::SoftMax;
use crate::ops::sort::Sort;
use crate::ops::training::Training;
use crate::ops::unary::{Unary, UnaryKind};
use crate::tensor::DType::{F16, F32, I32, Q8_0};
use std::num::NonZeroU32;

/// Elements of short rows that a claim processes together at most.
const SHORT_ROWS: usize = 1 << 13;

/// Calls `each` after each claim of one worker, and after the run.
fn each_claim(graph: &Arc<Graph>, buffer: &Buffer, budget: &Arc<MemoryBudget>, each: &(dyn Fn() + Sync)) {
    let code = CpuProgram::new(graph, MathMode::Fast, 1).unwrap();
    let scratch = code.scratch(1).unwrap();
    let scratch = [scratch.0, scratch.1].map(|bytes| HostMemory::scratch(bytes, budget).unwrap());
    let pause = || {
        each();
        false
    };
    let limits = RunLimits { pause: &pause, locking: Locking::WAIT, polls_at_first_collective: true };
    let abort = AtomicBool::new(false);
    let resources =
        RunResources { scratch: (&scratch[0], &scratch[1]), groups: &JoinedGroups::default(), abort: &abort };
    let pool = Pool::new(1).unwrap();
    let end = code.run(&pool, &[buffer.whole()], resources, RunPosition::default(), limits);
    assert_eq!(end.unwrap(), None);
    each();
}

/// A node, the shapes of its sources, and how often it reads or writes each element of its longest row.
struct RowOp {
    name: &'static str,
    accesses: usize,
    build: fn(&mut Case, [usize; 4]),
}

fn one(c: &mut Case, op: impl Into<Op>, ne: [usize; 4]) {
    let x = c.leaf(F32, ne);
    c.node(op, &[x]);
}

fn two(c: &mut Case, op: impl Into<Op>, ne: [usize; 4]) {
    let (x, y) = (c.leaf(F32, ne), c.leaf(F32, ne));
    c.node(op, &[x, y]);
}

const ROWS: &[RowOp] = &[
    RowOp { name: "soft_max", accesses: 6, build: |c, ne| one(c, SoftMax { scale: 0.1, max_bias: 0.0 }, ne) },
    RowOp { name: "norm", accesses: 4, build: |c, ne| one(c, Norm::Norm { eps: 0.1 }, ne) },
    RowOp { name: "rms_norm", accesses: 3, build: |c, ne| one(c, Norm::RmsNorm { eps: 0.1 }, ne) },
    RowOp { name: "l2_norm", accesses: 3, build: |c, ne| one(c, Norm::L2Norm { eps: 0.1 }, ne) },
    RowOp {
        name: "group_norm",
        accesses: 4,
        build: |c, [n, m, k, _]| {
            let groups = NonZeroU32::new((m * k) as u32).unwrap();
            one(c, Norm::GroupNorm { groups, eps: 0.1 }, [n, 1, m * k, 1]);
        },
    },
    RowOp { name: "sum", accesses: 1, build: |c, ne| one(c, Reduce::Sum, ne) },
    RowOp { name: "sum_rows", accesses: 1, build: |c, ne| one(c, Reduce::SumRows, ne) },
    RowOp { name: "mean", accesses: 1, build: |c, ne| one(c, Reduce::Mean, ne) },
    RowOp { name: "cumsum", accesses: 2, build: |c, ne| one(c, Reduce::Cumsum, ne) },
    RowOp { name: "argmax", accesses: 1, build: |c, [n, m, k, _]| one(c, Reduce::Argmax, [n, m * k, 1, 1]) },
    RowOp { name: "argsort", accesses: 2, build: |c, ne| one(c, Sort::Argsort { descending: true }, ne) },
    RowOp {
        name: "top_k",
        accesses: 2,
        build: |c, ne| {
            let x = c.leaf(F32, ne);
            c.node_as(Sort::TopK, &[x], I32, [ne[0] - 1, ne[1], ne[2], ne[3]]);
        },
    },
    RowOp { name: "rms_norm_back", accesses: 5, build: |c, ne| two(c, Backward::RmsNorm { eps: 0.1 }, ne) },
    RowOp { name: "soft_max_back", accesses: 5, build: |c, ne| two(c, Backward::SoftMax { scale: 0.5 }, ne) },
    RowOp { name: "cross_entropy_loss", accesses: 4, build: |c, ne| two(c, Training::CrossEntropyLoss, ne) },
    RowOp {
        name: "cross_entropy_loss_back",
        accesses: 5,
        build: |c, ne| {
            let (g, x, y) = (c.leaf(F32, [1, 1, 1, 1]), c.leaf(F32, ne), c.leaf(F32, ne));
            c.node(Training::CrossEntropyLossBack, &[g, x, y]);
        },
    },
    RowOp { name: "concat", accesses: 4, build: |c, ne| two(c, Concat::Concat { dim: 0 }, ne) },
    RowOp {
        name: "repeat",
        accesses: 2,
        build: |c, ne| {
            let x = c.leaf(F32, [1, 1, 1, 1]);
            c.node_as(Concat::Repeat, &[x], F32, ne);
        },
    },
    RowOp {
        name: "get_rows",
        accesses: 2,
        build: |c, [n, m, ..]| {
            let (table, ids) = (c.leaf(F32, [n, m, 1, 1]), c.ids([3, 1, 1, 1], 0..m as i32));
            c.node(Rows::GetRows, &[table, ids]);
        },
    },
    RowOp {
        name: "cpy to blocks",
        accesses: 2,
        build: |c, [n, m, ..]| {
            let ne = [n.next_multiple_of(32), m, 1, 1];
            let x = c.leaf(F32, ne);
            c.node_as(CopyOp::Cpy, &[x], Q8_0, ne);
        },
    },
    RowOp { name: "silu", accesses: 2, build: |c, ne| one(c, Unary::Kind(UnaryKind::Silu), ne) },
    RowOp { name: "add", accesses: 3, build: |c, ne| two(c, Binary::Add, ne) },
    RowOp { name: "swiglu", accesses: 3, build: |c, ne| two(c, Glu { kind: GluKind::Swiglu, swapped: false }, ne) },
    RowOp { name: "roll", accesses: 2, build: |c, ne| one(c, Pad::Roll { shifts: [ne[0] as i32 / 2, 0, 0, 0] }, ne) },
    RowOp {
        name: "acc",
        accesses: 5,
        build: |c, ne| {
            let region = Assign { accumulate: true, nb: [4 * ne[0] as i32, 0, 0], offset: 0, in_place: false };
            let (x, y) = (c.leaf(F32, [ne[0], ne[1] * ne[2], 1, 1]), c.leaf(F32, [ne[0], 1, 1, 1]));
            c.node(region, &[x, y]);
        },
    },
];

#[test]
fn a_claim_takes_one_long_row_or_several_short_ones() {
    let mut failures = Vec::new();
    for ne in [[300_001, 2, 1, 1], [1 << 16, 1, 3, 1], [1000, 300, 2, 1], [40, 9000, 1, 1], [2, 100_000, 1, 1]] {
        for &RowOp { name, accesses: per_element, build } in ROWS {
            let mut case = Case::default();
            build(&mut case, ne);
            let (graph, memory) = case.build();
            let budget = MemoryBudget::new(1 << 30);
            let device = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
            let buffer = device.alloc(memory.len() as u64, &budget).unwrap();
            buffer.memory::<CpuMemory>().unwrap().write(0, &memory, Locking::WAIT).unwrap();
            let most = AtomicUsize::new(0);
            accesses::take();
            each_claim(&graph, &buffer, &budget, &|| {
                most.fetch_max(accesses::take(), Ordering::Relaxed);
            });
            // Beside its rows, a claim reads some numbers, such as ids and partial results.
            let (most, limit) =
                (most.into_inner(), per_element * ne[0].next_multiple_of(32).max(SHORT_ROWS) + SHORT_ROWS);
            if most == 0 || most > limit {
                failures.push(format!("{name} of {ne:?}: {most} elements in a claim, {limit} allowed"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn rows_that_are_too_long_for_a_claim_are_refused() {
    let compiles = |n: usize, build: fn(&mut Case, usize)| {
        let mut case = Case::default();
        build(&mut case, n);
        CpuProgram::new(&Arc::new(case.b.build()), MathMode::Fast, 1).is_ok()
    };
    type Limit = (usize, fn(&mut Case, usize));
    let limits: &[Limit] = &[
        (MAX_ROW, |c, n| {
            let x = c.b.leaf(F32, [n, 1, 1, 1]).unwrap();
            c.node(Norm::RmsNorm { eps: 0.1 }, &[x]);
        }),
        (MAX_GROUP / 4, |c, n| {
            let x = c.b.leaf(F32, [n, 2, 8, 1]).unwrap();
            c.node(Norm::GroupNorm { groups: NonZeroU32::new(4).unwrap(), eps: 0.1 }, &[x]);
        }),
        (MAX_ROW, |c, n| {
            let x = c.b.leaf(F32, [n, 1, 1, 1]).unwrap();
            c.node(Reduce::SumRows, &[x]);
        }),
        (MAX_SORTED_ROW, |c, n| {
            let x = c.b.leaf(F32, [n, 1, 1, 1]).unwrap();
            c.node_as(Sort::TopK, &[x], I32, [4, 1, 1, 1]);
        }),
        (MAX_ROTATED_ROW, |c, n| {
            let (x, positions) = (c.b.leaf(F32, [n, 1, 1, 1]).unwrap(), c.ids([1, 1, 1, 1], 0..9));
            c.node(Rope::new(RopeMode::Neox, 64), &[x, positions]);
        }),
    ];
    for (k, &(most, build)) in limits.iter().enumerate() {
        assert!(compiles(most, build) && !compiles(most + 2, build), "limit {k}");
    }
    // Element-wise ops divide rows.
    assert!(compiles(2 * MAX_ROW, |c, n| {
        let x = c.b.leaf(F32, [n, 1, 1, 1]).unwrap();
        c.node(Unary::Kind(UnaryKind::Silu), &[x]);
    }));
}

/// Rows of a tensor, each in a block of its own, and two blocks from the next.
const FAR: usize = 2 * BLOCK;
const FAR_ROWS: usize = 24;

/// A tensor whose rows are far apart.
fn far(c: &mut Case, dtype: DType, n: usize) -> TensorId {
    let nb = [dtype.block_bytes(), FAR, FAR_ROWS * FAR, FAR_ROWS * FAR];
    c.b.leaf_with_desc(TensorDesc::strided(dtype, [n, FAR_ROWS, 1, 1], nb).unwrap()).unwrap()
}

fn into_far(c: &mut Case, op: impl Into<Op>, srcs: &[TensorId], dtype: DType, n: usize) {
    let dst = far(c, dtype, n);
    c.b.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap();
}

/// Nodes of little work, each of which writes to many blocks of memory.
const FAR_APART: &[Family] = &[
    ("mul_mat", |c| {
        let (a, b) = (c.leaf(F32, [8, 64, 1, 1]), c.leaf(F32, [8, FAR_ROWS, 1, 1]));
        into_far(c, MulMat::PLAIN, &[a, b], F32, 64);
    }),
    ("set_rows", |c| {
        let cache = far(c, F16, 64);
        let (b, ids) = (c.leaf(F32, [64, 700, 1, 1]), c.ids([700, 1, 1, 1], 0..FAR_ROWS as i32));
        c.node_over(Rows::SetRows, &[b, ids, cache], cache);
    }),
    ("set_rows of one element", |c| {
        let cache = far(c, F16, 1);
        let (b, ids) = (c.leaf(F32, [1, 700, 1, 1]), c.ids([700, 1, 1, 1], 0..FAR_ROWS as i32));
        c.node_over(Rows::SetRows, &[b, ids, cache], cache);
    }),
    ("get_rows", |c| {
        let (table, ids) = (c.leaf(F32, [64, 9, 1, 1]), c.ids([FAR_ROWS, 1, 1, 1], 0..9));
        into_far(c, Rows::GetRows, &[table, ids], F32, 64);
    }),
    ("transposed cpy", |c| {
        let x = c.leaf(F32, [FAR_ROWS, 64, 1, 1]);
        let across = c.strided(x, [64, FAR_ROWS, 1, 1], [4 * FAR_ROWS, 4, 256 * FAR_ROWS, 256 * FAR_ROWS]);
        into_far(c, CopyOp::Cpy, &[across], F32, 64);
    }),
    ("elements far apart", |c| {
        let x = c.leaf(F32, [FAR_ROWS, 64, 1, 1]);
        let nb = [FAR, 4, FAR_ROWS * FAR, FAR_ROWS * FAR];
        let dst = c.b.leaf_with_desc(TensorDesc::strided(F32, [FAR_ROWS, 64, 1, 1], nb).unwrap()).unwrap();
        c.b.node_into(CopyOp::Cpy, &[Some(x)], dst).unwrap();
    }),
    ("top_k", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Sort::TopK, &[x], I32, 4);
    }),
    ("argsort", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Sort::Argsort { descending: false }, &[x], I32, 64);
    }),
    ("rope", |c| {
        let (x, positions) = (c.leaf(F32, [64, FAR_ROWS, 1, 1]), c.ids([1, 1, 1, 1], 0..9));
        into_far(c, Rope::new(RopeMode::Neox, 64), &[x, positions], F32, 64);
    }),
    ("rms_norm", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Norm::RmsNorm { eps: 0.1 }, &[x], F32, 64);
    }),
    ("add", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Binary::Add, &[x, x], F32, 64);
    }),
    ("sum_rows", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Reduce::SumRows, &[x], F32, 1);
    }),
    ("concat", |c| {
        let x = c.leaf(F32, [64, FAR_ROWS, 1, 1]);
        into_far(c, Concat::Concat { dim: 0 }, &[x, x], F32, 128);
    }),
    ("tri", |c| {
        let x = c.leaf(F32, [FAR_ROWS, FAR_ROWS, 1, 1]);
        into_far(c, Diag::Tri(Triangle::Lower), &[x], F32, FAR_ROWS);
    }),
];

/// By Linux's map of this process's pages: the blocks of a memory in which a page exists.
#[cfg(target_os = "linux")]
fn resident_blocks(address: usize, bytes: usize) -> Vec<bool> {
    use std::os::unix::fs::FileExt;
    /// An entry has a bit for a page in memory, and one for a page that is swapped out.
    const EXISTS: u64 = 3 << 62;
    let page = crate::cpu::memory::charged_bytes(1) as usize;
    let mut entries = vec![0; bytes.div_ceil(page) * size_of::<u64>()];
    let map = std::fs::File::open("/proc/self/pagemap").unwrap();
    map.read_exact_at(&mut entries, (address / page * size_of::<u64>()) as u64).unwrap();
    let exists = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) & EXISTS != 0;
    entries.as_chunks().0.chunks(BLOCK / page).map(|block| block.iter().any(exists)).collect()
}

/// A run on a queue, on new memory: the thread that submits it allocates all pages, and the kernels none.
#[cfg(target_os = "linux")]
#[test]
fn kernels_write_only_to_memory_that_has_pages() {
    for (name, build) in FAR_APART {
        let mut case = Case::default();
        build(&mut case);
        let leaves = std::mem::take(&mut case.leaves);
        let graph = Arc::new(case.b.build());
        let bytes = graph.slot_sizes()[0];
        let budget = MemoryBudget::new(1 << 30);
        let device = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
        for by_queue in [false, true] {
            let buffer = device.alloc(bytes as u64, &budget).unwrap();
            let memory = buffer.memory::<CpuMemory>().unwrap();
            for (id, content) in &leaves {
                memory.write(graph.tensor(*id).unwrap().place.unwrap().offset, content, Locking::WAIT).unwrap();
            }
            let resident = || resident_blocks(memory.pages().address(), bytes).iter().filter(|&&exists| exists).count();
            let before = resident();
            if by_queue {
                let mut queue = device.queue(&budget).unwrap();
                let program = device.prepare(Arc::clone(&graph)).unwrap();
                queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
                queue.mark().wait(None).unwrap();
                // Kernels would not write to the gaps between the rows.
                assert!(resident() >= 2 * FAR_ROWS - 1, "{name}");
            } else {
                let code = CpuProgram::new(&graph, MathMode::Fast, 1).unwrap();
                let ended = AtomicBool::new(true);
                code.populate(&[buffer.whole()], &ended);
                assert_eq!(resident(), before, "{name}: an ended queue allocates nothing");
                code.populate(&[buffer.whole()], &AtomicBool::new(false));
                let populated = resident();
                assert!(populated > before, "{name}");
                each_claim(&graph, &buffer, &budget, &|| ());
                assert_eq!(resident(), populated, "{name}");
            }
        }
    }
}
