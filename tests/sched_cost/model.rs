//! A task with the graph of a transformer language model (about 1,500 nodes), over no-op devices.

use fanout::device::noop::NoopDevice;
use fanout::device::{Device, DeviceKind, MemoryBudget};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::sched::{Task, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;

/// Width of an attention head.
const HEAD_WIDTH: usize = 16;
const HEADS: usize = 4;
const WIDTH: usize = HEAD_WIDTH * HEADS;
/// Width of the feed-forward nets.
const FFN_WIDTH: usize = 128;
const TOKENS: usize = 4;
const CONTEXT: usize = 32;
const LAYERS: usize = 65;

pub struct Model {
    pub task: Arc<Task>,
    pub devices: Vec<Arc<dyn Device>>,
    pub budget: Arc<MemoryBudget>,
    /// Inputs with their bytes.
    pub inputs: Vec<(TensorId, Vec<u8>)>,
}

impl Model {
    /// The inputs in the form that [`fanout::sched::Scheduler::run`] takes.
    pub fn input_slices(&self) -> Vec<(TensorId, &[u8])> {
        self.inputs.iter().map(|(id, bytes)| (*id, &**bytes)).collect()
    }
}

struct ModelBuilder {
    b: TaskBuilder,
    devices: Vec<Arc<dyn Device>>,
    budget: Arc<MemoryBudget>,
    /// The device for new weights and caches.
    device: usize,
}

impl ModelBuilder {
    /// A new tensor in device memory: a weight or a cache.
    fn stored(&mut self, ne: [usize; 2]) -> TensorId {
        let desc = TensorDesc::contiguous(DType::F32, [ne[0], ne[1], 1, 1]).unwrap();
        let buffer = self.devices[self.device].alloc(desc.extent() as u64, &self.budget).unwrap();
        self.b.stored("stored", desc, self.device, Some(buffer.whole())).unwrap()
    }

    fn node(&mut self, op: impl Into<fanout::ops::Op>, srcs: &[TensorId]) -> TensorId {
        self.b.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    /// A product with a new weight matrix.
    fn linear(&mut self, output_width: usize, x: TensorId) -> TensorId {
        let columns = self.b.desc(x).unwrap().ne()[0];
        let w = self.stored([columns, output_width]);
        self.node(MulMat::PLAIN, &[w, x])
    }

    fn norm(&mut self, x: TensorId) -> TensorId {
        let norm = self.node(Norm::RmsNorm { eps: 1e-5 }, &[x]);
        let w = self.stored([WIDTH, 1]);
        self.node(Binary::Mul, &[norm, w])
    }

    /// Splits the rows into heads and permutes the dimensions.
    fn heads(&mut self, x: TensorId, axes: [usize; 4]) -> TensorId {
        let n = self.b.desc(x).unwrap().elements() / WIDTH;
        let split = self.b.reshape(x, [HEAD_WIDTH, HEADS, n, 1]).unwrap();
        self.b.permute(split, axes).unwrap()
    }

    /// A layer: attention and a feed-forward net. `cache_rows` are the rows of the caches to which SET_ROWS writes.
    fn layer(&mut self, x: TensorId, positions: TensorId, cache_rows: TensorId, mask: TensorId) -> TensorId {
        let rope = Rope::new(RopeMode::Normal, HEAD_WIDTH as u32);
        let h = self.norm(x);
        let [q, k, v] = [0; 3].map(|_| self.linear(WIDTH, h));
        let [q, k] = [q, k].map(|x| {
            let heads = self.b.reshape(x, [HEAD_WIDTH, HEADS, TOKENS, 1]).unwrap();
            let rotated = self.node(rope, &[heads, positions]);
            self.b.reshape(rotated, [WIDTH, TOKENS, 1, 1]).unwrap()
        });
        let [keys, values] = [k, v].map(|new| {
            let cache = self.stored([WIDTH, CONTEXT]);
            self.b.node_onto(Rows::SetRows, &[Some(new), Some(cache_rows), Some(cache)], cache).unwrap();
            cache
        });
        let q = self.heads(q, [0, 2, 1, 3]);
        let keys = self.heads(keys, [0, 2, 1, 3]);
        let values = self.heads(values, [1, 2, 0, 3]);
        let scores = self.node(MulMat::PLAIN, &[keys, q]);
        let weights = self.node(SoftMax { scale: 0.25, max_bias: 0.0 }, &[scores, mask]);
        let values = self.node(CopyOp::Cont, &[values]);
        let attended = self.node(MulMat::PLAIN, &[values, weights]);
        let attended = self.b.permute(attended, [0, 2, 1, 3]).unwrap();
        let attended = self.node(CopyOp::Cont, &[attended]);
        let attended = self.b.reshape(attended, [WIDTH, TOKENS, 1, 1]).unwrap();
        let attended = self.linear(WIDTH, attended);
        let x = self.node(Binary::Add, &[attended, x]);
        let h = self.norm(x);
        let (gate, up) = (self.linear(FFN_WIDTH, h), self.linear(FFN_WIDTH, h));
        let both = self.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up]);
        let down = self.linear(WIDTH, both);
        self.node(Binary::Add, &[down, x])
    }
}

/// Builds the model with its layers distributed over `devices` no-op devices.
pub fn model(devices: usize) -> Model {
    let device = |i| NoopDevice::new(&format!("N{i}"), DeviceKind::Gpu).shared();
    let devices: Vec<Arc<dyn Device>> = (0..devices).map(device).collect();
    let mut m = ModelBuilder { b: TaskBuilder::new(), devices, budget: MemoryBudget::new(1 << 30), device: 0 };
    let x = m.b.input("x", DType::F32, [WIDTH, TOKENS, 1, 1]).unwrap();
    let positions = m.b.input("positions", DType::I32, [TOKENS, 1, 1, 1]).unwrap();
    let cache_rows = m.b.input("rows", DType::I64, [TOKENS, 1, 1, 1]).unwrap();
    let mask = m.b.input("mask", DType::F32, [CONTEXT, TOKENS, 1, 1]).unwrap();
    let mut h = x;
    for layer in 0..LAYERS {
        m.device = layer * m.devices.len() / LAYERS;
        h = m.layer(h, positions, cache_rows, mask);
    }
    let h = m.norm(h);
    let logits = m.linear(WIDTH, h);
    m.b.output(logits).unwrap();
    let zeros = |id| (id, vec![0; m.b.desc(id).unwrap().extent()]);
    let inputs = [x, positions, cache_rows, mask].map(zeros).to_vec();
    Model { task: Arc::new(m.b.build().unwrap()), devices: m.devices, budget: m.budget, inputs }
}
