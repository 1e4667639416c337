//! Every pattern against the same graph node by node, and everything that must keep it from being fused.

use super::kernel;
use crate::cpu::ops::{self, Kernel};
use crate::cpu::program::Code;
use crate::cpu::{CpuDevice, Path};
use crate::device::{Account, Device, Program, Source, Unsupported};
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
    ops::select(node, Path::Exact)
}

const RMS: Norm = Norm::RmsNorm { eps: 1e-5 };
const NORMS: [Norm; 2] = [RMS, Norm::Norm { eps: 1e-5 }];

/// A graph in the making: f32 leaves with seeded values, ids, and the tensors that a fused run leaves out.
struct Case {
    b: Builder,
    bytes: Vec<(TensorId, Vec<u8>)>,
    passed_on: Vec<TensorId>,
}

impl Case {
    fn new() -> Case {
        Case { b: Builder::new(), bytes: Vec::new(), passed_on: Vec::new() }
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

    fn onto(&mut self, op: impl Into<crate::ops::Op>, srcs: &[TensorId], dst: TensorId) -> TensorId {
        self.b.node_into(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    /// Another tensor in the memory of one.
    fn alias(&mut self, of: TensorId, ne: [usize; 4], offset: usize) -> TensorId {
        self.b.view(of, TensorDesc::contiguous(F32, ne).unwrap(), offset).unwrap()
    }

    /// A tensor again: a node's destination is not one of its sources.
    fn again(&mut self, id: TensorId) -> TensorId {
        let desc = self.b.tensor(id).unwrap().desc;
        self.b.view(id, desc, 0).unwrap()
    }

    /// A result that only the next node reads.
    fn pass_on(&mut self, id: TensorId) {
        self.b.set_use_count(id, 1).unwrap();
        self.passed_on.push(id);
    }

    /// Runs the graph with and without the patterns: both must leave the same bytes, and the tensors passed on untouched.
    fn check(mut self, what: &str, want: usize) {
        let graph = Arc::new(std::mem::take(&mut self.b).build().unwrap());
        let mut count = 0;
        let counted = select_kernels(&graph, FUSION_PATTERNS, exact, kernel, |_| {
            count += 1;
            Ok::<_, Unsupported>(())
        });
        assert_eq!(counted.map(|()| count), Ok(want), "{what}: steps");
        let mut memory = vec![0xa5; graph.slot_sizes()[0]];
        for (id, bytes) in &self.bytes {
            let at = graph.tensor(*id).unwrap().place.unwrap().offset;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        for threads in [1, 3] {
            let device = CpuDevice::new("CPU", threads, Path::Exact, 1 << 30).unwrap();
            let fused = Code::new(&graph, Path::Exact, threads).unwrap();
            let single = Code::of(&graph, threads, &[], exact).unwrap();
            let (fused, mut single) = (run(&device, &graph, fused, &memory), run(&device, &graph, single, &memory));
            for t in self.passed_on.iter().map(|&id| graph.tensor(id).unwrap()) {
                let start = t.place.unwrap().offset;
                // A later node may write the memory too.
                if graph.nodes().iter().filter(|n| graph.tensor(n.dst).unwrap().place == t.place).count() == 1 {
                    single[start..start + t.desc.extent()].fill(0xa5);
                }
            }
            assert!(fused == single, "{what}, {threads} threads: a fused run leaves other bytes");
        }
    }
}

fn run(device: &Arc<CpuDevice>, graph: &Arc<Graph>, code: Code, memory: &[u8]) -> Vec<u8> {
    let account = Account::new(1 << 30);
    let program = Program::new(Arc::clone(graph), Box::new(code));
    let buffer = device.alloc(memory.len() as u64, &account).unwrap();
    let mut queue = device.queue(&account).unwrap();
    queue.upload(buffer.whole(), None, Source::Borrowed(memory)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    queue.download(buffer.whole()).unwrap().wait(Some(Instant::now() + Duration::from_secs(60))).unwrap()
}

/// Shapes of rows, with those of the weights.
const SHAPES: [([usize; 4], [usize; 4]); 5] = [
    ([100, 7, 3, 2], [100, 1, 1, 1]),
    ([100, 7, 3, 2], [100, 7, 1, 2]),
    ([2048, 40, 1, 1], [2048, 1, 1, 1]),
    ([5000, 1, 1, 1], [5000, 1, 1, 1]),
    ([1, 1, 1, 1], [1, 1, 1, 1]),
];

/// The result `y` times the weights, and plus a bias: all but the last is passed on, which is written to `dst`.
fn weighted(c: &mut Case, y: TensorId, w: TensorId, bias: Option<TensorId>, dst: TensorId) {
    c.pass_on(y);
    match bias {
        Some(bias) => {
            let product = c.node(Binary::Mul, &[y, w]);
            c.pass_on(product);
            c.onto(Binary::Add, &[product, bias], dst);
        }
        None => {
            c.onto(Binary::Mul, &[y, w], dst);
        }
    }
}

#[test]
fn norms_and_their_weights() {
    for (ne, weights) in SHAPES {
        // The result lies apart, on x, or on the norm.
        for (op, plus, onto) in NORMS.into_iter().flat_map(|op| (0..6).map(move |i| (op, i > 2, i % 3))) {
            let mut c = Case::new();
            let (x, w, bias) = (c.leaf(ne), c.leaf(weights), c.leaf(weights));
            let y = c.node(op, &[x]);
            let dst = match onto {
                0 => c.b.leaf(F32, ne).unwrap(),
                1 => c.alias(x, ne, 0),
                _ => c.alias(y, ne, 0),
            };
            weighted(&mut c, y, w, plus.then_some(bias), dst);
            c.node(Binary::Add, &[dst, w]);
            c.check(&format!("{op:?} MUL {ne:?} plus {plus} onto {onto}"), 2);
        }
    }
    // The result lies on what is added last.
    let mut c = Case::new();
    let (x, w, residual) = (c.leaf([64, 5, 1, 1]), c.leaf([64, 1, 1, 1]), c.leaf([64, 5, 1, 1]));
    let y = c.node(RMS, &[x]);
    let dst = c.again(residual);
    weighted(&mut c, y, w, Some(residual), dst);
    c.check("RMS_NORM MUL ADD onto the residual", 1);
}

#[test]
fn sums_and_their_norms() {
    for (ne, weights) in SHAPES {
        for (op, around) in NORMS.into_iter().flat_map(|op| (0..3).map(move |around| (op, around))) {
            // The sum lies apart, on a or on b; the result apart, on a, or on b.
            for (sum_on, dst_on) in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 2)] {
                let mut c = Case::new();
                let (a, b, w, bias) = (c.leaf(ne), c.leaf(ne), c.leaf(weights), c.leaf(weights));
                let place = |c: &mut Case, on| match on {
                    0 => c.b.leaf(F32, ne).unwrap(),
                    1 => c.alias(a, ne, 0),
                    _ => c.alias(b, ne, 0),
                };
                let sum = place(&mut c, sum_on);
                c.onto(Binary::Add, &[a, b], sum);
                let dst = place(&mut c, dst_on);
                if around > 0 {
                    let y = c.node(op, &[sum]);
                    weighted(&mut c, y, w, (around > 1).then_some(bias), dst);
                } else {
                    c.onto(op, &[sum], dst);
                }
                c.node(Binary::Sub, &[sum, dst]);
                let what = format!("ADD {op:?} {ne:?} with {around} behind, sum on {sum_on} result on {dst_on}");
                c.check(&what, 2);
            }
        }
    }
}

/// Keys of `[d, heads, tokens]`, turned and written as rows of a cache of the given type.
fn keys(c: &mut Case, mode: RopeMode, cache: TensorId, ids: TensorId, tokens: usize, factors: bool) -> [TensorId; 3] {
    let x = c.leaf([32, 4, tokens, 1]);
    let positions = c.ids(I32, &(0..tokens as i32).map(|i| i * 7 + 3).collect::<Vec<_>>());
    let mut srcs = vec![x, positions];
    if factors {
        srcs.push(c.leaf([16, 1, 1, 1]));
    }
    let y = c.node(Rope::new(mode, 24), &srcs);
    let rows = c.alias(y, [128, tokens, 1, 1], 0);
    let target = c.again(cache);
    c.onto(Rows::SetRows, &[rows, ids, cache], target);
    [x, y, rows]
}

#[test]
fn turned_keys_and_their_rows() {
    for dtype in [F32, F16, Q8_0] {
        for (mode, factors) in [(RopeMode::Normal, true), (RopeMode::Neox, false)] {
            // Two tokens go to one row: the later one stays.
            for (id_type, to) in [(I64, &[5, 0, 3, 5, 9][..]), (I32, &[1])] {
                let mut c = Case::new();
                let cache = c.b.leaf(dtype, [128, 10, 1, 1]).unwrap();
                let ids = c.ids(id_type, to);
                let [_, y, rows] = keys(&mut c, mode, cache, ids, to.len(), factors);
                c.pass_on(y);
                c.b.set_use_count(rows, 1).unwrap();
                c.check(&format!("ROPE SET_ROWS {dtype} {mode:?} {to:?}"), 1);
            }
        }
    }
    let mut c = Case::new();
    let cache = c.b.leaf(F16, [128, 600, 1, 1]).unwrap();
    let ids = c.ids(I64, &(0..300).map(|i| i * 2).collect::<Vec<_>>());
    let [_, y, rows] = keys(&mut c, RopeMode::Normal, cache, ids, 300, false);
    c.pass_on(y);
    c.b.set_use_count(rows, 1).unwrap();
    c.check("many keys", 1);
}

/// RMS_NORM and MUL that must stay two nodes, each for one reason.
#[test]
fn what_keeps_norms_and_weights_apart() {
    type Spoil = fn(&mut Case, TensorId, TensorId, TensorId) -> usize;
    let ne = [64, 6, 1, 1];
    let cases: [(&str, Spoil); 10] = [
        ("nobody says who reads it, or it is an output", |c, _, y, w| {
            c.node(Binary::Mul, &[y, w]);
            2
        }),
        ("it has two uses", |c, _, y, w| {
            c.b.set_use_count(y, 2).unwrap();
            c.node(Binary::Mul, &[y, w]);
            2
        }),
        ("another node reads it, whatever was said", |c, _, y, w| {
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
            c.onto(Unary::Sqr, &[x], over);
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
            c.onto(Binary::Mul, &[y, w], across);
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
    for (what, spoil) in cases {
        let mut c = Case::new();
        // Room behind x for what lies across it.
        let (room, w) = (c.leaf([64, 8, 1, 1]), c.leaf([64, 1, 1, 1]));
        let x = c.alias(room, ne, 0);
        let y = c.node(RMS, &[x]);
        let nodes = spoil(&mut c, x, y, w);
        c.check(what, nodes);
    }
}

#[test]
fn what_keeps_sums_and_norms_apart() {
    let ne = [64, 6, 1, 1];
    let mut c = Case::new();
    let (a, row) = (c.leaf(ne), c.leaf([64, 1, 1, 1]));
    let sum = c.node(Binary::Add, &[a, row]);
    c.node(RMS, &[sum]);
    c.check("a summand repeats", 2);

    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf(ne));
    let sum = c.node(Binary::Add, &[a, b]);
    c.node(Unary::Sqr, &[a]);
    c.node(RMS, &[sum]);
    c.check("a node between", 3);

    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf([64, 8, 1, 1]));
    let b0 = c.alias(b, ne, 0);
    let sum = c.node(Binary::Add, &[a, b0]);
    let across = c.alias(b, ne, 256);
    c.onto(RMS, &[sum], across);
    c.check("the norm lies across a summand", 2);

    // The norm may be fused with the sum or with the weights, but the weights are what the sum wrote.
    let mut c = Case::new();
    let (a, b) = (c.leaf(ne), c.leaf(ne));
    let sum = c.node(Binary::Add, &[a, b]);
    let y = c.node(RMS, &[sum]);
    c.b.set_use_count(y, 1).unwrap();
    let w = c.alias(sum, [64, 1, 1, 1], 256);
    c.node(Binary::Mul, &[y, w]);
    c.check("the weights lie in the sum", 2);

    // Or with weights, but what is added to the product is the sum, or somebody else reads the product.
    for residual in [true, false] {
        let mut c = Case::new();
        let (a, b, w) = (c.leaf(ne), c.leaf(ne), c.leaf([64, 1, 1, 1]));
        let sum = c.node(Binary::Add, &[a, b]);
        let y = c.node(RMS, &[sum]);
        c.pass_on(y);
        let product = c.node(Binary::Mul, &[y, w]);
        c.b.set_use_count(product, if residual { 1 } else { 2 }).unwrap();
        c.node(Binary::Add, &[product, if residual { sum } else { a }]);
        c.check("the last ADD stays alone", 2);
    }

    let mut c = Case::new();
    let long = [20_000, 1, 1, 1];
    let (a, b) = (c.leaf(long), c.leaf(long));
    let sum = c.node(Binary::Add, &[a, b]);
    c.node(RMS, &[sum]);
    c.check("rows too long to keep", 2);
}

#[test]
fn what_keeps_keys_and_rows_apart() {
    type Spoil = fn(&mut Case, [TensorId; 3]);
    let cases: [(&str, usize, Spoil); 4] = [
        ("nobody says who reads them", 2, |_, _| ()),
        ("nobody says who reads the view", 2, |c, [_, y, _]| c.b.set_use_count(y, 1).unwrap()),
        ("they have two uses", 2, |c, [_, y, rows]| {
            c.b.set_use_count(y, 2).unwrap();
            c.b.set_use_count(rows, 1).unwrap();
        }),
        ("another node reads them", 3, |c, [_, y, rows]| {
            c.b.set_use_count(y, 1).unwrap();
            c.b.set_use_count(rows, 1).unwrap();
            c.node(Unary::Sqr, &[y]);
        }),
    ];
    for (what, nodes, spoil) in cases {
        let mut c = Case::new();
        let cache = c.b.leaf(F16, [128, 10, 1, 1]).unwrap();
        let ids = c.ids(I64, &[5, 0, 3]);
        let tensors = keys(&mut c, RopeMode::Normal, cache, ids, 3, false);
        spoil(&mut c, tensors);
        c.check(what, nodes);
    }
    // The cache lies where the keys were before they were turned.
    let mut c = Case::new();
    let x = c.leaf([32, 4, 3, 1]);
    let (positions, ids) = (c.ids(I32, &[4, 5, 6]), c.ids(I64, &[2, 1, 0]));
    let y = c.node(Rope::new(RopeMode::Normal, 24), &[x, positions]);
    let rows = c.alias(y, [128, 3, 1, 1], 0);
    let cache = c.alias(x, [128, 3, 1, 1], 0);
    let target = c.again(cache);
    c.onto(Rows::SetRows, &[rows, ids, cache], target);
    c.b.set_use_count(y, 1).unwrap();
    c.b.set_use_count(rows, 1).unwrap();
    c.check("the cache lies on the keys", 2);
}
