//! Each fusion pattern against the same graph run node by node, and each condition that must prevent fusion.

use super::kernel;
use crate::cpu::ops::{self, Kernel};
use crate::cpu::program::CpuProgram;
use crate::cpu::{CpuDevice, MathMode};
use crate::device::{Device, MemoryBudget, Program, Unsupported, UploadSource};
use crate::graph::fuse::{FUSION_PATTERNS, select_kernels};
use crate::graph::{Builder, Graph, TensorId};
use crate::ops::NodeView;
use crate::ops::binary::Binary;
use crate::ops::norm::Norm;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::rows::Rows;
use crate::ops::unary::Unary;
use crate::tensor::DType::{F16, F32, I32, I64, Q8_0};
use crate::tensor::{DType, TensorDesc};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn exact(node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    ops::select(node, MathMode::Exact)
}

const RMS: Norm = Norm::RmsNorm { eps: 1e-5 };
const NORMS: [Norm; 2] = [RMS, Norm::Norm { eps: 1e-5 }];

/// A graph under construction: f32 leaves with seeded values, ids, and the intermediate tensors that a fused run does not
/// write.
struct Case {
    b: Builder,
    bytes: Vec<(TensorId, Vec<u8>)>,
    intermediates: Vec<TensorId>,
}

impl Case {
    fn new() -> Case {
        Case { b: Builder::new(), bytes: Vec::new(), intermediates: Vec::new() }
    }

    fn leaf(&mut self, ne: [usize; 4]) -> TensorId {
        let mut rng = fastrand::Rng::with_seed(self.bytes.len() as u64);
        let id = self.b.leaf(F32, ne).unwrap();
        let values: Vec<f32> = (0..ne.iter().product()).map(|_| rng.f32() * 4.0 - 2.0).collect();
        self.bytes.push((id, bytemuck::cast_slice(&values).to_vec()));
        id
    }

    fn ids(&mut self, dtype: DType, ids: &[i32]) -> TensorId {
        let id = self.b.leaf(dtype, [ids.len(), 1, 1, 1]).unwrap();
        let wide = |&i: &i32| if dtype == I64 { i64::from(i).to_le_bytes().to_vec() } else { i.to_le_bytes().to_vec() };
        self.bytes.push((id, ids.iter().flat_map(wide).collect()));
        id
    }

    fn node(&mut self, op: impl Into<crate::ops::Op>, srcs: &[TensorId]) -> TensorId {
        self.b.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    fn node_onto(&mut self, op: impl Into<crate::ops::Op>, srcs: &[TensorId], dst: TensorId) -> TensorId {
        self.b.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    /// Another tensor in the memory of tensor `of`.
    fn alias(&mut self, of: TensorId, ne: [usize; 4], offset: usize) -> TensorId {
        self.b.view(of, TensorDesc::contiguous(F32, ne).unwrap(), offset).unwrap()
    }

    /// A view of the same tensor: a node's destination must not be one of its sources.
    fn view_of(&mut self, id: TensorId) -> TensorId {
        let desc = self.b.tensor(id).unwrap().desc;
        self.b.view(id, desc, 0).unwrap()
    }

    /// Marks a result that only the next node reads: fusion may leave it out.
    fn mark_intermediate(&mut self, id: TensorId) {
        self.b.set_use_count(id, 1).unwrap();
        self.intermediates.push(id);
    }

    /// Compiles the graph with the fusion patterns, which must give `steps` steps. Runs it with and without the patterns: both
    /// must produce the same bytes, and the fused run must not write the intermediate tensors.
    fn check(mut self, what: &str, steps: usize) {
        let graph = Arc::new(std::mem::take(&mut self.b).build());
        let mut count = 0;
        let counted = select_kernels(&graph, FUSION_PATTERNS, exact, kernel, |_| {
            count += 1;
            Ok::<_, Unsupported>(())
        });
        assert_eq!(counted.map(|()| count), Ok(steps), "{what}: steps");
        let mut memory = vec![0xa5; graph.slot_sizes()[0]];
        for (id, bytes) in &self.bytes {
            let at = graph.tensor(*id).unwrap().place.unwrap().offset;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        for threads in [1, 3] {
            let device = CpuDevice::new("CPU", threads, MathMode::Exact, 1 << 30).unwrap();
            let fused = CpuProgram::new(&graph, MathMode::Exact, threads).unwrap();
            let single = CpuProgram::with_patterns(&graph, threads, &[], exact).unwrap();
            let (fused, mut single) = (run(&device, &graph, fused, &memory), run(&device, &graph, single, &memory));
            for t in self.intermediates.iter().map(|&id| graph.tensor(id).unwrap()) {
                let start = t.place.unwrap().offset;
                // A later node may write the same memory.
                if graph.nodes().iter().filter(|n| graph.tensor(n.dst).unwrap().place == t.place).count() == 1 {
                    single[start..start + t.desc.extent()].fill(0xa5);
                }
            }
            assert!(fused == single, "{what}, {threads} threads: the fused run writes other bytes");
        }
    }
}

fn run(device: &Arc<CpuDevice>, graph: &Arc<Graph>, code: CpuProgram, memory: &[u8]) -> Vec<u8> {
    let budget = MemoryBudget::new(1 << 30);
    let program = Program::new(Arc::clone(graph), Box::new(code));
    let buffer = device.alloc(memory.len() as u64, &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(memory)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    queue.download(buffer.whole()).unwrap().wait(Some(Instant::now() + Duration::from_secs(60))).unwrap()
}

/// Shapes of rows with the shapes of their weights.
const SHAPES: [([usize; 4], [usize; 4]); 5] = [
    ([100, 7, 3, 2], [100, 1, 1, 1]),
    ([100, 7, 3, 2], [100, 7, 1, 2]),
    ([2048, 40, 1, 1], [2048, 1, 1, 1]),
    ([5000, 1, 1, 1], [5000, 1, 1, 1]),
    ([1, 1, 1, 1], [1, 1, 1, 1]),
];

/// Adds MUL by the weights and, with a bias, ADD. Only the last result is kept; it is written to `dst`.
fn weighted(c: &mut Case, y: TensorId, w: TensorId, bias: Option<TensorId>, dst: TensorId) {
    c.mark_intermediate(y);
    match bias {
        Some(bias) => {
            let product = c.node(Binary::Mul, &[y, w]);
            c.mark_intermediate(product);
            c.node_onto(Binary::Add, &[product, bias], dst);
        }
        None => {
            c.node_onto(Binary::Mul, &[y, w], dst);
        }
    }
}

#[test]
fn norm_with_weights_is_fused() {
    for (ne, weights) in SHAPES {
        // `dst_on`: the result is in its own memory (0), on x (1), or on the norm's result (2).
        for (op, with_bias, dst_on) in NORMS.into_iter().flat_map(|op| (0..6).map(move |i| (op, i > 2, i % 3))) {
            let mut c = Case::new();
            let (x, w, bias) = (c.leaf(ne), c.leaf(weights), c.leaf(weights));
            let y = c.node(op, &[x]);
            let dst = match dst_on {
                0 => c.b.leaf(F32, ne).unwrap(),
                1 => c.alias(x, ne, 0),
                _ => c.alias(y, ne, 0),
            };
            weighted(&mut c, y, w, with_bias.then_some(bias), dst);
            c.node(Binary::Add, &[dst, w]);
            c.check(&format!("{op:?} MUL {ne:?}, bias {with_bias}, result on {dst_on}"), 2);
        }
    }
    // The result is on the residual, which is added last.
    let mut c = Case::new();
    let (x, w, residual) = (c.leaf([64, 5, 1, 1]), c.leaf([64, 1, 1, 1]), c.leaf([64, 5, 1, 1]));
    let y = c.node(RMS, &[x]);
    let dst = c.view_of(residual);
    weighted(&mut c, y, w, Some(residual), dst);
    c.check("RMS_NORM MUL ADD onto the residual", 1);
}

#[test]
fn add_with_norm_is_fused() {
    for (ne, weights) in SHAPES {
        for (op, followers) in NORMS.into_iter().flat_map(|op| (0..3).map(move |followers| (op, followers))) {
            // The sum and the result are each in their own memory (0), on a (1), or on b (2).
            for (sum_on, dst_on) in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 2)] {
                let mut c = Case::new();
                let (a, b, w, bias) = (c.leaf(ne), c.leaf(ne), c.leaf(weights), c.leaf(weights));
                let place = |c: &mut Case, on| match on {
                    0 => c.b.leaf(F32, ne).unwrap(),
                    1 => c.alias(a, ne, 0),
                    _ => c.alias(b, ne, 0),
                };
                let sum = place(&mut c, sum_on);
                c.node_onto(Binary::Add, &[a, b], sum);
                let dst = place(&mut c, dst_on);
                if followers > 0 {
                    let y = c.node(op, &[sum]);
                    weighted(&mut c, y, w, (followers > 1).then_some(bias), dst);
                } else {
                    c.node_onto(op, &[sum], dst);
                }
                c.node(Binary::Sub, &[sum, dst]);
                let what = format!("ADD {op:?} {ne:?} and {followers} more nodes, sum on {sum_on} result on {dst_on}");
                c.check(&what, 2);
            }
        }
    }
}

/// The norm moves ahead of nodes that do not touch its operands.
#[test]
fn nodes_that_are_no_neighbours_are_fused() {
    let ne = [64, 6, 1, 1];
    let mut c = Case::new();
    let (a, b, w) = (c.leaf(ne), c.leaf(ne), c.leaf([64, 1, 1, 1]));
    let sum = c.node(Binary::Add, &[a, b]);
    let other = c.node(Unary::Sqr, &[a]);
    let y = c.node(RMS, &[sum]);
    c.mark_intermediate(y);
    let over = c.view_of(other);
    c.node_onto(Unary::Sqr, &[b], over);
    c.node(Binary::Mul, &[y, w]);
    c.check("ADD, SQR, RMS_NORM, SQR, MUL", 3);
}

/// Keys `[d, heads, tokens]`, rotated and written as rows of a cache of the given type. Returns the keys, the rotated keys and
/// their row view.
fn keys(c: &mut Case, mode: RopeMode, cache: TensorId, ids: TensorId, tokens: usize, factors: bool) -> [TensorId; 3] {
    let x = c.leaf([32, 4, tokens, 1]);
    let positions = c.ids(I32, &(0..tokens as i32).map(|i| i * 7 + 3).collect::<Vec<_>>());
    let mut srcs = vec![x, positions];
    if factors {
        srcs.push(c.leaf([16, 1, 1, 1]));
    }
    let y = c.node(Rope::new(mode, 24), &srcs);
    let rows = c.alias(y, [128, tokens, 1, 1], 0);
    let target = c.view_of(cache);
    c.node_onto(Rows::SetRows, &[rows, ids, cache], target);
    [x, y, rows]
}

#[test]
fn rope_with_set_rows_is_fused() {
    for dtype in [F32, F16, Q8_0] {
        for (mode, factors) in [(RopeMode::Normal, true), (RopeMode::Neox, false)] {
            // Two tokens have the same row id: the later token's row remains.
            for (id_type, to) in [(I64, &[5, 0, 3, 5, 9][..]), (I32, &[1])] {
                let mut c = Case::new();
                let cache = c.b.leaf(dtype, [128, 10, 1, 1]).unwrap();
                let ids = c.ids(id_type, to);
                let [_, y, rows] = keys(&mut c, mode, cache, ids, to.len(), factors);
                c.mark_intermediate(y);
                c.b.set_use_count(rows, 1).unwrap();
                c.check(&format!("ROPE SET_ROWS {dtype} {mode:?} {to:?}"), 1);
            }
        }
    }
    let mut c = Case::new();
    let cache = c.b.leaf(F16, [128, 600, 1, 1]).unwrap();
    let ids = c.ids(I64, &(0..300).map(|i| i * 2).collect::<Vec<_>>());
    let [_, y, rows] = keys(&mut c, RopeMode::Normal, cache, ids, 300, false);
    c.mark_intermediate(y);
    c.b.set_use_count(rows, 1).unwrap();
    c.check("many keys", 1);
}

/// RMS_NORM and MUL that must stay two nodes, each for one reason.
#[test]
fn norm_with_weights_is_not_fused_if_a_condition_fails() {
    type PreventFusion = fn(&mut Case, TensorId, TensorId, TensorId) -> usize;
    let ne = [64, 6, 1, 1];
    let cases: [(&str, PreventFusion); 10] = [
        ("no use count, or an output", |c, _, y, w| {
            c.node(Binary::Mul, &[y, w]);
            2
        }),
        ("two uses", |c, _, y, w| {
            c.b.set_use_count(y, 2).unwrap();
            c.node(Binary::Mul, &[y, w]);
            2
        }),
        ("another node reads it in spite of the use count", |c, _, y, w| {
            c.b.set_use_count(y, 1).unwrap();
            c.node(Binary::Mul, &[y, w]);
            c.node(Unary::Sqr, &[y]);
            3
        }),
        ("another node reads a view of it", |c, _, y, w| {
            c.b.set_use_count(y, 1).unwrap();
            c.node(Binary::Mul, &[y, w]);
            let part = c.alias(y, [64, 2, 1, 1], 512);
            c.node(Unary::Sqr, &[part]);
            3
        }),
        ("a node between writes it", |c, x, y, w| {
            c.b.set_use_count(y, 1).unwrap();
            let over = c.alias(y, [64, 6, 1, 1], 0);
            c.node_onto(Unary::Sqr, &[x], over);
            c.node(Binary::Mul, &[y, w]);
            3
        }),
        ("a view of a part is multiplied", |c, _, y, w| {
            c.b.set_use_count(y, 1).unwrap();
            let part = c.alias(y, [64, 3, 1, 1], 256);
            c.b.set_use_count(part, 1).unwrap();
            c.node(Binary::Mul, &[part, w]);
            2
        }),
        ("a view with other rows is multiplied", |c, _, y, _| {
            c.b.set_use_count(y, 1).unwrap();
            let rows = c.alias(y, [64, 2, 3, 1], 0);
            c.b.set_use_count(rows, 1).unwrap();
            let w = c.leaf([64, 2, 1, 1]);
            c.node(Binary::Mul, &[rows, w]);
            2
        }),
        ("the product lies across x", |c, x, y, w| {
            c.b.set_use_count(y, 1).unwrap();
            let across = c.alias(x, [64, 6, 1, 1], 256);
            c.node_onto(Binary::Mul, &[y, w], across);
            2
        }),
        ("the weights repeat within a row", |c, _, y, _| {
            c.b.set_use_count(y, 1).unwrap();
            let short = c.leaf([16, 1, 1, 1]);
            c.node(Binary::Mul, &[y, short]);
            2
        }),
        ("it multiplies itself", |c, _, y, _| {
            c.b.set_use_count(y, 2).unwrap();
            c.node(Binary::Mul, &[y, y]);
            2
        }),
    ];
    for (what, prevent) in cases {
        let mut c = Case::new();
        // Space after x for a destination that overlaps it.
        let (room, w) = (c.leaf([64, 8, 1, 1]), c.leaf([64, 1, 1, 1]));
        let x = c.alias(room, ne, 0);
        let y = c.node(RMS, &[x]);
        let nodes = prevent(&mut c, x, y, w);
        c.check(what, nodes);
    }
}

#[test]
fn add_with_norm_is_not_fused_if_a_condition_fails() {
    let ne = [64, 6, 1, 1];
    let mut c = Case::new();
    let (a, row) = (c.leaf(ne), c.leaf([64, 1, 1, 1]));
    let sum = c.node(Binary::Add, &[a, row]);
    c.node(RMS, &[sum]);
    c.check("a summand repeats", 2);

    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf(ne));
    let sum = c.node(Binary::Add, &[a, b]);
    let over = c.view_of(a);
    c.node_onto(Unary::Sqr, &[sum], over);
    let y = c.view_of(a);
    c.node_onto(RMS, &[sum], y);
    c.check("a node between writes where the norm does", 3);

    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf([64, 8, 1, 1]));
    let b0 = c.alias(b, ne, 0);
    let sum = c.node(Binary::Add, &[a, b0]);
    let across = c.alias(b, ne, 256);
    c.node_onto(RMS, &[sum], across);
    c.check("the norm lies across a summand", 2);

    // The norm could be fused with the sum or with the weights, but the weights lie in the sum's result.
    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf(ne));
    let sum = c.node(Binary::Add, &[a, b]);
    let y = c.node(RMS, &[sum]);
    c.b.set_use_count(y, 1).unwrap();
    let w = c.alias(sum, [64, 1, 1, 1], 256);
    c.node(Binary::Mul, &[y, w]);
    c.check("the weights lie in the sum", 2);

    // The norm could be fused with its weights, but the bias is the sum, or another node reads the product.
    for residual in [true, false] {
        let mut c = Case::new();
        let (a, b, w) = (c.leaf(ne), c.leaf(ne), c.leaf([64, 1, 1, 1]));
        let sum = c.node(Binary::Add, &[a, b]);
        let y = c.node(RMS, &[sum]);
        c.mark_intermediate(y);
        let product = c.node(Binary::Mul, &[y, w]);
        c.b.set_use_count(product, if residual { 1 } else { 2 }).unwrap();
        c.node(Binary::Add, &[product, if residual { sum } else { a }]);
        c.check("the last ADD is not fused", 2);
    }

    let mut c = Case::new();
    let long = [20_000, 1, 1, 1];
    let (a, b) = (c.leaf(long), c.leaf(long));
    let sum = c.node(Binary::Add, &[a, b]);
    c.node(RMS, &[sum]);
    c.check("rows too long for the kernel's row buffer", 2);
}

#[test]
fn rope_with_set_rows_is_not_fused_if_a_condition_fails() {
    type PreventFusion = fn(&mut Case, [TensorId; 3]);
    let cases: [(&str, usize, PreventFusion); 4] = [
        ("no use count of the keys", 2, |_, _| ()),
        ("no use count of the view", 2, |c, [_, y, _]| c.b.set_use_count(y, 1).unwrap()),
        ("two uses of the keys", 2, |c, [_, y, rows]| {
            c.b.set_use_count(y, 2).unwrap();
            c.b.set_use_count(rows, 1).unwrap();
        }),
        ("another node reads them", 3, |c, [_, y, rows]| {
            c.b.set_use_count(y, 1).unwrap();
            c.b.set_use_count(rows, 1).unwrap();
            c.node(Unary::Sqr, &[y]);
        }),
    ];
    for (what, nodes, prevent) in cases {
        let mut c = Case::new();
        let cache = c.b.leaf(F16, [128, 10, 1, 1]).unwrap();
        let ids = c.ids(I64, &[5, 0, 3]);
        let tensors = keys(&mut c, RopeMode::Normal, cache, ids, 3, false);
        prevent(&mut c, tensors);
        c.check(what, nodes);
    }
    // The cache overlaps the keys before rotation.
    let mut c = Case::new();
    let x = c.leaf([32, 4, 3, 1]);
    let (positions, ids) = (c.ids(I32, &[4, 5, 6]), c.ids(I64, &[2, 1, 0]));
    let y = c.node(Rope::new(RopeMode::Normal, 24), &[x, positions]);
    let rows = c.alias(y, [128, 3, 1, 1], 0);
    let cache = c.alias(x, [128, 3, 1, 1], 0);
    let target = c.view_of(cache);
    c.node_onto(Rows::SetRows, &[rows, ids, cache], target);
    c.b.set_use_count(y, 1).unwrap();
    c.b.set_use_count(rows, 1).unwrap();
    c.check("the cache lies on the keys", 2);
}
