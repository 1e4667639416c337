//! A task with the graph of a transformer language model (about 1,500 nodes), over no-op devices.

use fanout::device::noop::NoopDevice;
use fanout::device::{Account, Device, DeviceKind};
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

const HEAD: usize = 16;
const HEADS: usize = 4;
const WIDTH: usize = HEAD * HEADS;
const INNER: usize = 128;
const TOKENS: usize = 4;
const CONTEXT: usize = 32;
const LAYERS: usize = 65;

pub struct Model {
    pub task: Arc<Task>,
    pub devices: Vec<Arc<dyn Device>>,
    pub account: Arc<Account>,
    /// Inputs with their bytes.
    pub inputs: Vec<(TensorId, Vec<u8>)>,
}

impl Model {
    pub fn inputs(&self) -> Vec<(TensorId, &[u8])> {
        self.inputs.iter().map(|(id, bytes)| (*id, &**bytes)).collect()
    }
}

struct ModelBuilder {
    b: TaskBuilder,
    devices: Vec<Arc<dyn Device>>,
    account: Arc<Account>,
    /// The device for new weights.
    on: usize,
}

impl ModelBuilder {
    fn stored(&mut self, ne: [usize; 2]) -> TensorId {
        let desc = TensorDesc::contiguous(DType::F32, [ne[0], ne[1], 1, 1]).unwrap();
        let buffer = self.devices[self.on].alloc(desc.extent() as u64, &self.account).unwrap();
        self.b.stored("stored", desc, self.on, Some(buffer.whole())).unwrap()
    }

    fn node(&mut self, op: impl Into<fanout::ops::Op>, srcs: &[TensorId]) -> TensorId {
        self.b.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    /// A product with a new weight matrix.
    fn linear(&mut self, to: usize, x: TensorId) -> TensorId {
        let from = self.b.desc(x).unwrap().ne()[0];
        let w = self.stored([from, to]);
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
        let split = self.b.reshape(x, [HEAD, HEADS, n, 1]).unwrap();
        self.b.permute(split, axes).unwrap()
    }

    fn layer(&mut self, x: TensorId, positions: TensorId, rows: TensorId, mask: TensorId) -> TensorId {
        let rope = Rope::new(RopeMode::Normal, HEAD as u32);
        let h = self.norm(x);
        let [q, k, v] = [0; 3].map(|_| self.linear(WIDTH, h));
        let [q, k] = [q, k].map(|x| {
            let heads = self.b.reshape(x, [HEAD, HEADS, TOKENS, 1]).unwrap();
            let turned = self.node(rope, &[heads, positions]);
            self.b.reshape(turned, [WIDTH, TOKENS, 1, 1]).unwrap()
        });
        let [keys, values] = [k, v].map(|new| {
            let cache = self.stored([WIDTH, CONTEXT]);
            self.b.node_onto(Rows::SetRows, &[Some(new), Some(rows), Some(cache)], cache).unwrap();
            cache
        });
        let q = self.heads(q, [0, 2, 1, 3]);
        let keys = self.heads(keys, [0, 2, 1, 3]);
        let values = self.heads(values, [1, 2, 0, 3]);
        let scores = self.node(MulMat::PLAIN, &[keys, q]);
        let weights = self.node(SoftMax { scale: 0.25, max_bias: 0.0 }, &[scores, mask]);
        let values = self.node(CopyOp::Cont, &[values]);
        let seen = self.node(MulMat::PLAIN, &[values, weights]);
        let seen = self.b.permute(seen, [0, 2, 1, 3]).unwrap();
        let seen = self.node(CopyOp::Cont, &[seen]);
        let seen = self.b.reshape(seen, [WIDTH, TOKENS, 1, 1]).unwrap();
        let seen = self.linear(WIDTH, seen);
        let x = self.node(Binary::Add, &[seen, x]);
        let h = self.norm(x);
        let (gate, up) = (self.linear(INNER, h), self.linear(INNER, h));
        let both = self.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up]);
        let down = self.linear(WIDTH, both);
        self.node(Binary::Add, &[down, x])
    }
}

/// Builds the model with its layers spread over this many devices.
pub fn model(devices: usize) -> Model {
    let device = |i| NoopDevice::new(&format!("N{i}"), DeviceKind::Gpu).shared();
    let devices: Vec<Arc<dyn Device>> = (0..devices).map(device).collect();
    let mut m = ModelBuilder { b: TaskBuilder::new(), devices, account: Account::new(1 << 30), on: 0 };
    let x = m.b.input("x", DType::F32, [WIDTH, TOKENS, 1, 1]).unwrap();
    let positions = m.b.input("positions", DType::I32, [TOKENS, 1, 1, 1]).unwrap();
    let rows = m.b.input("rows", DType::I64, [TOKENS, 1, 1, 1]).unwrap();
    let mask = m.b.input("mask", DType::F32, [CONTEXT, TOKENS, 1, 1]).unwrap();
    let mut h = x;
    for layer in 0..LAYERS {
        m.on = layer * m.devices.len() / LAYERS;
        h = m.layer(h, positions, rows, mask);
    }
    let h = m.norm(h);
    let logits = m.linear(WIDTH, h);
    m.b.output(logits).unwrap();
    let zeros = |id| (id, vec![0; m.b.desc(id).unwrap().extent()]);
    let inputs = [x, positions, rows, mask].map(zeros).to_vec();
    Model { task: Arc::new(m.b.build().unwrap()), devices: m.devices, account: m.account, inputs }
}
