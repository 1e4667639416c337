//! Test graphs: tasks of many shapes over any number of devices, for tests of planning, verification and golden plans.

use crate::device::noop::NoopDevice;
use crate::device::{Device, DeviceInfo, DeviceKind, Domain, Support};
use crate::graph::TensorId;
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::glu::{Glu, GluKind};
use crate::ops::mul_mat::MulMat;
use crate::ops::norm::Norm;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::rows::Rows;
use crate::ops::softmax::SoftMax;
use crate::ops::sort::Sort;
use crate::ops::unary::Unary;
use crate::ops::{OpCode, OutputSpec};
use crate::sched::{Task, TaskBuilder};
use crate::tensor::{DType, TensorDesc};
use std::sync::Arc;

type Built = Result<Task, crate::graph::BuildError>;

/// Builds a task for a number of devices.
pub(crate) type TaskMaker = fn(usize) -> Built;

/// All test graphs, by name.
pub(crate) const ALL: [(&str, TaskMaker); 14] = [
    ("chain", chain),
    ("diamond", diamond),
    ("transformer", |devices| TransformerTask { devices, layers: 2, ..TransformerTask::default() }.build()),
    ("cache-on-last", |devices| {
        TransformerTask { devices, layers: 2, cache_on_last: true, ..TransformerTask::default() }.build()
    }),
    ("layers-as-outputs", |devices| {
        TransformerTask { devices, layers: 2, outputs: true, ..TransformerTask::default() }.build()
    }),
    ("experts-on-last", |devices| {
        TransformerTask { devices, layers: 2, experts: true, ..TransformerTask::default() }.build()
    }),
    ("ping-pong", ping_pong),
    ("in-place", in_place),
    ("written-views", written_views),
    ("columns", columns),
    ("shared-input", shared_input),
    ("rewritten-part", rewritten_part),
    ("state", state),
    ("gathered", gathered),
];

/// `count` no-op devices, in one domain or in a domain each: GPUs that prefer to offload MUL_MAT_ID, and a CPU as the last of
/// several.
pub(crate) fn devices(count: usize, one_domain: bool) -> Vec<Arc<dyn Device>> {
    devices_copying(count, one_domain, |_, _, _| false)
}

/// As [`devices`], in a domain each: each device copies from the devices before it, and the first also from the last.
pub(crate) fn one_way(count: usize) -> Vec<Arc<dyn Device>> {
    devices_copying(count, false, |count, to, from| from < to || (to == 0 && from + 1 == count))
}

fn devices_copying(count: usize, one_domain: bool, copies: fn(usize, usize, usize) -> bool) -> Vec<Arc<dyn Device>> {
    let is_cpu = move |at: usize| at > 0 && at + 1 == count;
    let named = move |at: usize| if is_cpu(at) { "CPU".to_owned() } else { format!("GPU{at}") };
    let device = |at: usize| {
        let (name, kind) = (named(at), if is_cpu(at) { DeviceKind::Cpu } else { DeviceKind::Gpu });
        let domain = Domain::named(if one_domain { "all" } else { &name });
        let number = move |info: &DeviceInfo| (0..count).find(|&at| named(at) == info.name);
        let from = move |info: &DeviceInfo| number(info).is_some_and(|from| copies(count, at, from));
        let null = NoopDevice::new(&name, kind).with_info(|info| info.domain = domain).with_copies_from(from);
        if kind == DeviceKind::Cpu {
            return null.shared();
        }
        let by_id = |code| if code == OpCode::MulMatId { Support::Offload } else { Support::Yes };
        null.with_support(move |node| by_id(node.op.code())).shared()
    };
    (0..count).map(device).collect()
}

const ROW: [usize; 4] = [64, 4, 1, 1];

/// A chain of matrix products whose weights are on the devices in turn.
fn chain(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let mut x = b.input("x", DType::F32, ROW)?;
    for i in 0..2 * devices {
        let desc = TensorDesc::contiguous(DType::F32, [64, 64, 1, 1])?;
        let weight = b.stored(format!("w{i}"), desc, i % devices, None)?;
        x = b.node(MulMat::PLAIN, &[Some(weight), Some(x)])?;
    }
    b.output(x)?;
    b.build()
}

/// Two paths from one tensor to another, over two devices.
fn diamond(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let top = b.node(Unary::Sqr, &[Some(x)])?;
    b.pin(0)?;
    let left = b.node(Unary::Sqrt, &[Some(top)])?;
    b.pin(0)?;
    let right = b.node(Unary::Scale { scale: 2.0, bias: 0.0 }, &[Some(top)])?;
    b.pin(1 % devices)?;
    let bottom = b.node(Binary::Add, &[Some(left), Some(right)])?;
    b.pin(2 % devices)?;
    b.output(bottom)?;
    b.build()
}

/// A transformer that processes several tokens at once, with its layers spread over the devices.
#[derive(Clone, Copy)]
pub(crate) struct TransformerTask {
    pub(crate) devices: usize,
    pub(crate) layers: usize,
    /// Whether the caches of keys and values of all layers are on the last device.
    pub(crate) cache_on_last: bool,
    /// Whether feed-forward nets are mixtures of experts, with their weights on the last device.
    pub(crate) experts: bool,
    /// Whether the result of each layer is an output.
    pub(crate) outputs: bool,
}

impl Default for TransformerTask {
    fn default() -> TransformerTask {
        TransformerTask { devices: 1, layers: 1, cache_on_last: false, experts: false, outputs: false }
    }
}

const WIDTH: usize = 64;
const HEADS: usize = 4;
const HEAD_WIDTH: usize = WIDTH / HEADS;
const TOKENS: usize = 4;
const CONTEXT: usize = 32;
/// Width of the feed-forward nets.
const HIDDEN: usize = 128;
const VOCABULARY: usize = 96;
const EXPERTS: usize = 4;
/// Experts that each token uses.
const USED: usize = 2;

/// The inputs that each layer reads.
struct Inputs {
    positions: TensorId,
    rows: TensorId,
    mask: TensorId,
}

impl TransformerTask {
    pub(crate) fn build(self) -> Built {
        let mut b = TaskBuilder::new();
        let tokens = b.input("tokens", DType::I32, [TOKENS, 1, 1, 1])?;
        let inputs = Inputs {
            positions: b.input("positions", DType::I32, [TOKENS, 1, 1, 1])?,
            rows: b.input("rows", DType::I64, [TOKENS, 1, 1, 1])?,
            mask: b.input("mask", DType::F32, [CONTEXT, TOKENS, 1, 1])?,
        };
        let embeddings = weight(&mut b, "embeddings", [WIDTH, VOCABULARY, 1, 1], self.devices - 1)?;
        let mut x = b.node(Rows::GetRows, &[Some(embeddings), Some(tokens)])?;
        for layer in 0..self.layers {
            x = self.layer(&mut b, layer, x, &inputs)?;
            if self.outputs {
                b.output(x)?;
            }
        }
        let last = self.devices - 1;
        let x = normed(&mut b, "output.norm", x, last)?;
        let logits = product(&mut b, "output", x, VOCABULARY, last)?;
        b.name(logits, "logits");
        b.output(logits)?;
        b.build()
    }

    fn layer(
        self,
        b: &mut TaskBuilder,
        layer: usize,
        x: TensorId,
        inputs: &Inputs,
    ) -> Result<TensorId, crate::graph::BuildError> {
        let device = layer * self.devices / self.layers;
        let name = |part: &str| format!("{layer}.{part}");
        let normal = normed(b, &name("attention.norm"), x, device)?;
        let attended = self.attention(b, layer, normal, inputs)?;
        let attended = product(b, &name("attention.out"), attended, WIDTH, device)?;
        let x = b.node(Binary::Add, &[Some(attended), Some(x)])?;
        let normal = normed(b, &name("feed.norm"), x, device)?;
        let fed = if self.experts {
            self.experts(b, layer, normal)?
        } else {
            let gate = product(b, &name("gate"), normal, HIDDEN, device)?;
            let up = product(b, &name("up"), normal, HIDDEN, device)?;
            let hidden = b.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[Some(gate), Some(up)])?;
            product(b, &name("down"), hidden, WIDTH, device)?
        };
        let x = b.node(Binary::Add, &[Some(fed), Some(x)])?;
        b.name(x, name("out"));
        Ok(x)
    }

    fn attention(
        self,
        b: &mut TaskBuilder,
        layer: usize,
        x: TensorId,
        inputs: &Inputs,
    ) -> Result<TensorId, crate::graph::BuildError> {
        let device = layer * self.devices / self.layers;
        let home = if self.cache_on_last { self.devices - 1 } else { device };
        let name = |part: &str| format!("{layer}.{part}");
        let mut turned = Vec::new();
        for part in ["query", "key"] {
            let flat = product(b, &name(part), x, WIDTH, device)?;
            let heads = b.reshape(flat, [HEAD_WIDTH, HEADS, TOKENS, 1])?;
            let rope = Rope::new(RopeMode::Neox, HEAD_WIDTH as u32);
            turned.push(b.node(rope, &[Some(heads), Some(inputs.positions)])?);
        }
        let value = product(b, &name("value"), x, WIDTH, device)?;
        let key = b.reshape(turned[1], [WIDTH, TOKENS, 1, 1])?;
        let mut cached = Vec::new();
        for (part, rows) in [("keys", key), ("values", value)] {
            let desc = TensorDesc::contiguous(DType::F32, [WIDTH, CONTEXT, 1, 1])?;
            let cache = b.stored(name(part), desc, home, None)?;
            let written = b.node_onto(Rows::SetRows, &[Some(rows), Some(inputs.rows), Some(cache)], cache)?;
            let heads = b.reshape(written, [HEAD_WIDTH, HEADS, CONTEXT, 1])?;
            cached.push(b.permute(heads, [0, 2, 1, 3])?);
        }
        let query = b.permute(turned[0], [0, 2, 1, 3])?;
        let scores = b.node(MulMat::PLAIN, &[Some(cached[0]), Some(query)])?;
        let soft = SoftMax { scale: 0.25, max_bias: 0.0 };
        let weights = b.node(soft, &[Some(scores), Some(inputs.mask)])?;
        // Contiguous, with the context as the fastest dimension.
        let values = b.permute(cached[1], [1, 0, 2, 3])?;
        let packed = b.node(CopyOp::Cont, &[Some(values)])?;
        let mixed = b.node(MulMat::PLAIN, &[Some(packed), Some(weights)])?;
        let mixed = b.permute(mixed, [0, 2, 1, 3])?;
        let mixed = b.node(CopyOp::Cont, &[Some(mixed)])?;
        b.reshape(mixed, [WIDTH, TOKENS, 1, 1])
    }

    fn experts(self, b: &mut TaskBuilder, layer: usize, x: TensorId) -> Result<TensorId, crate::graph::BuildError> {
        let device = layer * self.devices / self.layers;
        let name = |part: &str| format!("{layer}.{part}");
        let logits = product(b, &name("router"), x, EXPERTS, device)?;
        let shares = b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[Some(logits)])?;
        let chosen =
            b.node_as(Sort::TopK, &[Some(shares)], OutputSpec { dtype: DType::I32, ne: [USED, TOKENS, 1, 1] })?;
        let x = b.reshape(x, [WIDTH, 1, TOKENS, 1])?;
        let mut hidden = Vec::new();
        for part in ["gates", "ups"] {
            let experts = weight(b, &name(part), [WIDTH, HIDDEN, EXPERTS, 1], self.devices - 1)?;
            hidden.push(b.node(MulMat::BY_ID, &[Some(experts), Some(x), Some(chosen)])?);
        }
        let hidden = b.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[Some(hidden[0]), Some(hidden[1])])?;
        let experts = weight(b, &name("downs"), [HIDDEN, WIDTH, EXPERTS, 1], self.devices - 1)?;
        let down = b.node(MulMat::BY_ID, &[Some(experts), Some(hidden), Some(chosen)])?;
        let row = WIDTH * 4;
        let each = TensorDesc::strided(DType::F32, [WIDTH, TOKENS, 1, 1], [4, USED * row, TOKENS * USED * row, 0])?;
        let (first, second) = (b.view(down, each, 0)?, b.view(down, each, row)?);
        b.node(Binary::Add, &[Some(first), Some(second)])
    }
}

fn weight(
    b: &mut TaskBuilder,
    name: &str,
    ne: [usize; 4],
    device: usize,
) -> Result<TensorId, crate::graph::BuildError> {
    b.stored(name, TensorDesc::contiguous(DType::F32, ne)?, device, None)
}

fn product(
    b: &mut TaskBuilder,
    name: &str,
    x: TensorId,
    rows: usize,
    device: usize,
) -> Result<TensorId, crate::graph::BuildError> {
    let columns = b.desc(x)?.ne()[0];
    let weight = weight(b, name, [columns, rows, 1, 1], device)?;
    b.node(MulMat::PLAIN, &[Some(weight), Some(x)])
}

fn normed(b: &mut TaskBuilder, name: &str, x: TensorId, device: usize) -> Result<TensorId, crate::graph::BuildError> {
    let weight = weight(b, name, [WIDTH, 1, 1, 1], device)?;
    let normal = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)])?;
    b.node(Binary::Mul, &[Some(normal), Some(weight)])
}

/// Consecutive nodes are on different devices.
fn ping_pong(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let (mut a, mut z) = (x, x);
    for i in 0..6 {
        let next = b.node(Binary::Add, &[Some(a), Some(z)])?;
        b.pin(i % devices)?;
        (z, a) = (a, next);
    }
    b.output(a)?;
    b.build()
}

/// Destinations that can reuse the memory of a source, and some that cannot.
fn in_place(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let first = b.node(Unary::Sqr, &[Some(x)])?;
    b.pin(0)?;
    let mut chain = first;
    for _ in 0..4 {
        chain = b.node(Unary::Sqrt, &[Some(chain)])?;
        b.pin(0)?;
    }
    b.output(chain)?;
    let again = b.node(Unary::Sqr, &[Some(chain)])?;
    b.pin(0)?;
    // The elements in another order: in-place execution would overwrite elements before they are read.
    let square = b.node_as(CopyOp::Cont, &[Some(again)], OutputSpec { dtype: DType::F32, ne: [16, 16, 1, 1] })?;
    b.pin(0)?;
    let turned = b.permute(square, [1, 0, 2, 3])?;
    let turned = b.node(CopyOp::Cont, &[Some(turned)])?;
    b.pin(0)?;
    let sum = b.node(Binary::Add, &[Some(square), Some(turned)])?;
    b.pin(0)?;
    let twice = b.node(Binary::Mul, &[Some(sum), Some(sum)])?;
    b.pin(1 % devices)?;
    let all = b.node(Binary::Sub, &[Some(twice), Some(sum)])?;
    b.pin(1 % devices)?;
    b.output(all)?;
    b.build()
}

/// A tensor written in two halves, read whole and in part.
fn written_views(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [64, 2, 1, 1])?;
    let whole = b.node(Concat::Concat { dim: 1 }, &[Some(x), Some(x)])?;
    b.pin(0)?;
    let half = b.desc(x)?;
    for (at, scale) in [(0, 2.0), (half.extent(), 3.0)] {
        let part = b.view(whole, half, at)?;
        let scaled = b.node(Unary::Scale { scale, bias: 0.0 }, &[Some(x)])?;
        b.pin(0)?;
        let written = b.node_onto(CopyOp::Cpy, &[Some(scaled), Some(part)], part)?;
        b.pin(0)?;
        let read = b.node(Unary::Sqr, &[Some(written)])?;
        b.pin(1 % devices)?;
        b.output(read)?;
    }
    let read = b.node(Unary::Sqr, &[Some(whole)])?;
    b.pin(2 % devices)?;
    b.output(read)?;
    b.build()
}

/// Nodes that write single columns of a matrix and keep the rest of it.
fn columns(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let whole = b.node(Unary::Sqr, &[Some(x)])?;
    b.pin(0)?;
    let few = TensorDesc::strided(DType::F32, [16, 4, 1, 1], [4, 256, 1024, 1024])?;
    let source = b.view(x, few, 0)?;
    let middle = b.view(whole, few, 64)?;
    let away = b.node(Unary::Sqrt, &[Some(whole)])?;
    b.pin(1 % devices)?;
    let written = b.node_onto(CopyOp::Cpy, &[Some(source), Some(middle)], middle)?;
    b.pin(0)?;
    let packed = b.node(CopyOp::Cont, &[Some(written)])?;
    b.pin(0)?;
    let sum = b.node(Binary::Add, &[Some(away), Some(whole)])?;
    b.pin(1 % devices)?;
    b.output(packed)?;
    b.output(sum)?;
    b.build()
}

/// Every device reads the same inputs.
fn shared_input(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let mask = b.input("mask", DType::F32, ROW)?;
    let mut x = b.input("x", DType::F32, ROW)?;
    for i in 0..devices + 1 {
        x = b.node(Binary::Mul, &[Some(x), Some(mask)])?;
        b.pin(i % devices)?;
    }
    b.output(x)?;
    b.build()
}

/// A node overwrites the middle of a tensor after another device has read the tensor.
fn rewritten_part(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let whole = b.node(Unary::Sqr, &[Some(x)])?;
    b.pin(0)?;
    let row = TensorDesc::contiguous(DType::F32, [64, 1, 1, 1])?;
    let (second, last) = (b.view(whole, row, 256)?, b.view(x, row, 768)?);
    let early = b.node(Unary::Sqrt, &[Some(whole)])?;
    b.pin(1 % devices)?;
    let part = b.node(Unary::Sqrt, &[Some(second)])?;
    b.pin(2 % devices)?;
    b.node_onto(CopyOp::Cpy, &[Some(last), Some(second)], second)?;
    b.pin(0)?;
    let late = b.node(Binary::Sub, &[Some(whole), Some(early)])?;
    b.pin(1 % devices)?;
    let late = b.node(Binary::Mul, &[Some(late), Some(part)])?;
    b.pin(2 % devices)?;
    b.output(late)?;
    b.build()
}

/// Persistent state that another device reads before and after it is written.
fn state(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let desc = TensorDesc::contiguous(DType::F32, ROW)?;
    let state = b.stored("state", desc, 0, None)?;
    let before = b.node(Binary::Add, &[Some(state), Some(x)])?;
    b.pin(1 % devices)?;
    let next = b.node(Binary::Mul, &[Some(before), Some(x)])?;
    b.pin(2 % devices)?;
    let written = b.node_onto(CopyOp::Cpy, &[Some(next), Some(state)], state)?;
    let after = b.node(Binary::Sub, &[Some(written), Some(before)])?;
    b.pin(1 % devices)?;
    b.output(after)?;
    b.build()
}

/// The results of all devices, gathered on one device.
fn gathered(devices: usize) -> Built {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW)?;
    let mut parts = Vec::new();
    for i in 0..devices + 1 {
        parts.push(b.node(Unary::Scale { scale: i as f32, bias: 1.0 }, &[Some(x)])?);
        b.pin(i % devices)?;
    }
    let mut all = parts[0];
    for part in &parts[1..] {
        all = b.node(Concat::Concat { dim: 1 }, &[Some(all), Some(*part)])?;
        b.pin(0)?;
    }
    b.output(all)?;
    b.build()
}
