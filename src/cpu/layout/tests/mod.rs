//! The machinery under products that do read strips, whatever the real ones do.

mod graphs;
mod sharing;
mod transfers;

use super::*;
use crate::cpu::CpuDevice;
use crate::cpu::ops::{self, Kernel, Path};
use crate::cpu::pool::Work;
use crate::cpu::program::Code;
use crate::device::{Account, Buffer, Device, Point, Program, Queue, Source, Timeline};
use crate::graph::{Builder, Graph, TensorId};
use crate::ops::copy::CopyOp;
use crate::ops::mul_mat::MulMat;
use crate::ops::rows::Rows;
use crate::ops::{NodeView, Op};
use crate::tensor::DType;
use crate::tensor::quant::dequantiser;
use fastrand::Rng;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Count;
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 28;

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// How often a product found its first source in strips, and how often not.
#[derive(Default)]
struct Seen {
    strips: Count,
    rows: Count,
}

impl Seen {
    fn take(&self) -> (usize, usize) {
        (self.strips.swap(0, Relaxed), self.rows.swap(0, Relaxed))
    }
}

/// A product that wants strips, and computes the same from rows.
fn product(seen: Arc<Seen>) -> Kernel {
    Kernel::new(1 << 20, move |work: &mut Work<'_>| {
        let (a, b, dst, ids) = (work.src(0), work.src(1), work.dst(), work.optional(2));
        if work.worker() == 0 {
            let count = if a.packed() { &seen.strips } else { &seen.rows };
            count.fetch_add(1, Relaxed);
        }
        let ([k, m, planes2, planes3], bn, [_, n1, n2, n3]) = (a.ne(), b.ne(), dst.ne());
        let convert = dequantiser(a.desc().dtype()).unwrap();
        let (mut row, mut x, mut y) = (vec![0; a.desc().row_bytes()], vec![0.0; k], vec![0.0; k]);
        for i in work.chunks(m, 16).flatten() {
            for column in 0..n1 * n2 * n3 {
                let [j1, j2, j3] = dst.desc().row_index(column);
                let (i2, i3) = match &ids {
                    Some(ids) => (ids.index([j1, j2, 0, 0]) as usize, 0),
                    None => (j2 / (n2 / planes2), j3 / (n3 / planes3)),
                };
                a.load_row([i, i2, i3], &mut row);
                convert(&row, &mut x);
                b.load([0, j1 % bn[1], j2, j3], &mut y);
                let sum: f32 = x.iter().zip(&y).map(|(x, y)| x * y).sum();
                dst.store([i, j1, j2, j3], &[sum]);
            }
        }
    })
    .wants_strips()
}

/// A CPU device, two queues on it, and what its products saw.
struct Rig {
    device: Arc<CpuDevice>,
    account: Arc<Account>,
    queue: Box<dyn Queue>,
    other: Box<dyn Queue>,
    seen: Arc<Seen>,
}

impl Rig {
    fn new() -> Rig {
        let (device, account) = (CpuDevice::new("CPU", 3, Path::Exact, MEMORY).unwrap(), Account::new(MEMORY));
        let (queue, other) = (device.queue(&account).unwrap(), device.queue(&account).unwrap());
        Rig { device, account, queue, other, seen: Arc::default() }
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.device.alloc(bytes as u64, &self.account).unwrap()
    }

    fn program(&self, graph: &Arc<Graph>) -> Program {
        let select = |node: &NodeView<'_>| match node.op {
            Op::MulMat(_) => Ok(product(Arc::clone(&self.seen))),
            _ => ops::select(node, Path::Exact),
        };
        Program::new(Arc::clone(graph), Box::new(Code::of(graph, 3, &[], select).unwrap()))
    }

    fn run(&mut self, program: &Program, buffer: &Buffer) {
        self.queue.run(program, &Arc::from([buffer.whole()])).unwrap();
        self.queue.mark().wait(soon()).unwrap();
    }

    fn write(&mut self, buffer: &Buffer, offset: usize, bytes: &[u8]) {
        let region = buffer.region(offset as u64, bytes.len() as u64).unwrap();
        self.queue.upload(region, None, Source::Borrowed(bytes)).unwrap();
        self.queue.mark().wait(soon()).unwrap();
    }

    fn read(&mut self, buffer: &Buffer, offset: usize, bytes: usize) -> Vec<u8> {
        let region = buffer.region(offset as u64, bytes as u64).unwrap();
        self.queue.download(region).unwrap().wait(soon()).unwrap()
    }
}

fn memory(buffer: &Buffer) -> &Memory {
    buffer.memory().unwrap()
}

/// What a memory holds, without any effect on it; and that its marks keep their rules.
fn peek(memory: &Memory) -> Vec<u8> {
    let marks = memory.shared();
    let mut bytes = memory.pages.read(0, memory.pages.bytes()).unwrap();
    for span in marks.packed() {
        let n = span.strips.bytes();
        for strip in bytes[span.range.clone()].chunks_exact_mut(n) {
            let packed = strip.to_vec();
            unpack(span, &packed, strip);
        }
        assert!(span.range.len() >= LEAST && !marks.stays_plain(&span.range), "{marks:?}");
    }
    assert!(marks.packed().is_sorted_by(|a, b| a.range.end <= b.range.start), "{marks:?}");
    bytes
}

fn is_packed(buffer: &Buffer, graph: &Graph, id: TensorId) -> bool {
    let t = graph.tensor(id).unwrap();
    memory(buffer).shared().holds(&Span::of(t.place.unwrap().offset, &t.desc).unwrap())
}

/// Small numbers of a type as bytes of `rows` rows of `k`: no NaN, which equals nothing.
fn weights(rng: &mut Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let values: Vec<f32> = (0..elements).map(|_| rng.f32() - 0.5).collect();
    let mut bytes = vec![0; elements / dtype.block_len() * dtype.block_bytes()];
    crate::tensor::quant::quantiser(dtype).unwrap()(&values, &mut bytes);
    bytes
}

fn at(graph: &Graph, id: TensorId) -> usize {
    graph.tensor(id).unwrap().place.unwrap().offset
}

const K: usize = 256;
const M: usize = 512; // 73 728 bytes of Q4_0

struct One {
    graph: Arc<Graph>,
    a: TensorId,
    c: TensorId,
}

/// c = a b, and what `more` adds.
fn one(dtype: DType, more: impl FnOnce(&mut Builder, TensorId)) -> One {
    let mut g = Builder::new();
    let a = g.leaf(dtype, [K, M, 1, 1]).unwrap();
    let b = g.leaf(DType::F32, [K, 2, 1, 1]).unwrap();
    let c = g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    more(&mut g, a);
    One { graph: Arc::new(g.build().unwrap()), a, c }
}

/// Fills the leaves of a graph: `dtype` tensors with weights, F32 ones with numbers, I32 ones with indices below `below`.
fn fill(rig: &mut Rig, buffer: &Buffer, graph: &Graph, rng: &mut Rng, below: i32) {
    let computed: Vec<_> = graph.nodes().iter().map(|n| n.dst).collect();
    for (i, t) in graph.tensors().iter().enumerate() {
        if computed.contains(&TensorId(i as u32)) {
            continue;
        }
        let bytes = match t.desc.dtype() {
            DType::I32 => (0..t.desc.elements()).flat_map(|_| rng.i32(0..below).to_le_bytes()).collect(),
            dtype => weights(rng, dtype, t.desc.elements()),
        };
        rig.write(buffer, t.place.unwrap().offset, &bytes);
    }
}

/// The product of a memory's content when nothing is packed.
fn plainly(one: &One, content: &[u8]) -> Vec<u8> {
    let mut rig = Rig::new();
    let (program, buffer) = (rig.program(&one.graph), rig.buffer(content.len()));
    rig.write(&buffer, 0, content);
    let everything = 0..content.len();
    memory(&buffer).alone().pin(everything);
    rig.run(&program, &buffer);
    assert_eq!(rig.seen.take(), (0, 1));
    rig.read(&buffer, at(&one.graph, one.c), 4 * 2 * M)
}
