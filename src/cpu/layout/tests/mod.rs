//! Tests of packing, conversion and locking with a product kernel that can read panels on every architecture.

mod giving_way;
mod graphs;
mod random_accesses;
mod sharing;
mod transfers;

use super::*;
use crate::cpu::CpuDevice;
use crate::cpu::ops::{self, Kernel, MathMode};
use crate::cpu::panel::unpack_row;
use crate::cpu::pool::KernelContext;
use crate::cpu::program::CpuProgram;
use crate::device::{
    Buffer, Device, Lane, MemoryBudget, Program, Queue, QueueThreads, Timeline, TimelinePoint, UploadSource,
};
use crate::graph::{Builder, Graph, TensorId};
use crate::ops::copy::CopyOp;
use crate::ops::mul_mat::MulMat;
use crate::ops::rows::Rows;
use crate::ops::{NodeView, Op};
use crate::tensor::DType;
use crate::tensor::quant::dequantiser;
use fastrand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize as Count, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 28;

fn deadline() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// Counts the products that found their first source packed, and those that found it as rows.
#[derive(Default)]
struct LayoutCounts {
    panels: Count,
    rows: Count,
}

impl LayoutCounts {
    /// Returns the numbers of products that found panels and that found rows, and resets both.
    fn take(&self) -> (usize, usize) {
        (self.panels.swap(0, Relaxed), self.rows.swap(0, Relaxed))
    }
}

/// A product that prefers panels, and computes the same result from rows.
fn product(counts: Arc<LayoutCounts>) -> Kernel {
    Kernel::new(1 << 20, move |ctx: &mut KernelContext<'_>| {
        let (a, b, dst, ids) = (ctx.src(0), ctx.src(1), ctx.dst(), ctx.optional_src(2));
        if ctx.member.is_leader() {
            let count = if a.is_packed() { &counts.panels } else { &counts.rows };
            count.fetch_add(1, Relaxed);
        }
        let ([k, m, planes2, planes3], bn, [_, n1, n2, n3]) = (a.ne(), b.ne(), dst.ne());
        let convert = dequantiser(a.desc().dtype()).unwrap();
        let (mut row, mut x, mut y) = (vec![0; a.desc().row_bytes()], vec![0.0; k], vec![0.0; k]);
        for i in ctx.chunks(m, 16).flatten() {
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
    .prefers_panels()
}

/// A CPU device, two queues on it, and the layouts that its products found.
struct Fixture {
    device: Arc<CpuDevice>,
    budget: Arc<MemoryBudget>,
    queue: Box<dyn Queue>,
    other: Box<dyn Queue>,
    counts: Arc<LayoutCounts>,
}

impl Fixture {
    fn new() -> Fixture {
        let (device, budget) = (CpuDevice::new("CPU", 3, MathMode::Exact, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
        let (queue, other) = (device.queue(&budget).unwrap(), device.queue(&budget).unwrap());
        Fixture { device, budget, queue, other, counts: Arc::default() }
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.device.alloc(bytes as u64, &self.budget).unwrap()
    }

    fn program(&self, graph: &Arc<Graph>) -> Program {
        let select = |node: &NodeView<'_>| match node.op {
            Op::MulMat(_) => Ok(product(Arc::clone(&self.counts))),
            _ => ops::select(node, MathMode::Exact),
        };
        Program::new(Arc::clone(graph), Box::new(CpuProgram::with_patterns(graph, 3, &[], select).unwrap()))
    }

    fn run(&mut self, program: &Program, buffer: &Buffer) {
        self.queue.run(program, &Arc::from([buffer.whole()])).unwrap();
        self.queue.mark().wait(deadline()).unwrap();
    }

    fn write(&mut self, buffer: &Buffer, offset: usize, bytes: &[u8]) {
        let region = buffer.region(offset as u64, bytes.len() as u64).unwrap();
        self.queue.upload(region, None, UploadSource::Borrowed(bytes)).unwrap();
        self.queue.mark().wait(deadline()).unwrap();
    }

    fn read(&mut self, buffer: &Buffer, offset: usize, bytes: usize) -> Vec<u8> {
        let region = buffer.region(offset as u64, bytes as u64).unwrap();
        self.queue.download(region).unwrap().wait(deadline()).unwrap()
    }
}

fn memory(buffer: &Buffer) -> &CpuMemory {
    buffer.memory().unwrap()
}

/// The row-major content of a memory, without changing its layout. Also checks the invariants that the layout map has while no
/// conversion is unfinished.
fn row_content(memory: &CpuMemory) -> Vec<u8> {
    let map = memory.read_map();
    let whole = |span: &PanelSpan| span.range.len() >= MIN_PACKED_BYTES && !map.delays.is_delayed(&span.range);
    assert!(map.packed().iter().all(whole), "{map:?}");
    drop(map);
    content_as_rows(memory)
}

/// As [`row_content`]; conversions may be unfinished.
fn content_as_rows(memory: &CpuMemory) -> Vec<u8> {
    let map = memory.read_map();
    let mut bytes = Vec::new();
    assert!(memory.pages.append_to(&mut bytes, 0..memory.pages.bytes()));
    for span in map.packed() {
        let n = span.layout.bytes();
        for panel in bytes[span.range.clone()].chunks_exact_mut(n) {
            let packed = panel.to_vec();
            for (r, row) in panel.chunks_exact_mut(span.layout.row_bytes).enumerate() {
                unpack_row(span.layout.dtype, &packed, r, row);
            }
        }
    }
    assert!(map.packed().is_sorted_by(|a, b| a.range.end <= b.range.start), "{map:?}");
    bytes
}

/// The bytes that a transfer reads, without giving way.
fn read(memory: &CpuMemory, offset: usize, bytes: usize) -> Vec<u8> {
    let mut out = Vec::new();
    assert!(memory.read(offset, bytes, &mut out, Locking::WAIT).unwrap());
    out
}

fn is_packed(buffer: &Buffer, graph: &Graph, id: TensorId) -> bool {
    let t = graph.tensor(id).unwrap();
    memory(buffer).read_map().contains(&PanelSpan::of(t.place.unwrap().offset, &t.desc).unwrap())
}

/// Random weights of a type, small numbers without NaN (which would not compare equal), as bytes.
fn weights(rng: &mut Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let values: Vec<f32> = (0..elements).map(|_| rng.f32() - 0.5).collect();
    let mut bytes = vec![0; elements / dtype.block_len() * dtype.block_bytes()];
    crate::tensor::quant::quantiser(dtype).unwrap()(&values, &mut bytes);
    bytes
}

/// Byte offset of a tensor in its slot.
fn offset_of(graph: &Graph, id: TensorId) -> usize {
    graph.tensor(id).unwrap().place.unwrap().offset
}

const K: usize = 256;
const M: usize = 512; // 73 728 bytes of Q4_0

struct ProductGraph {
    graph: Arc<Graph>,
    a: TensorId,
    c: TensorId,
}

/// The graph c = a b, with the additional nodes of `more`.
fn product_graph(dtype: DType, more: impl FnOnce(&mut Builder, TensorId)) -> ProductGraph {
    let mut g = Builder::new();
    let a = g.leaf(dtype, [K, M, 1, 1]).unwrap();
    let b = g.leaf(DType::F32, [K, 2, 1, 1]).unwrap();
    let c = g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    more(&mut g, a);
    ProductGraph { graph: Arc::new(g.build()), a, c }
}

/// Fills the leaves of a graph: F32 and quantised tensors with random numbers, I32 tensors with indices below `below`.
fn fill(fixture: &mut Fixture, buffer: &Buffer, graph: &Graph, rng: &mut Rng, below: i32) {
    let computed: Vec<_> = graph.nodes().iter().map(|n| n.dst).collect();
    for (i, t) in graph.tensors().iter().enumerate() {
        if computed.contains(&graph.id(i)) {
            continue;
        }
        let bytes = match t.desc.dtype() {
            DType::I32 => (0..t.desc.elements()).flat_map(|_| rng.i32(0..below).to_le_bytes()).collect(),
            dtype => weights(rng, dtype, t.desc.elements()),
        };
        fixture.write(buffer, t.place.unwrap().offset, &bytes);
    }
}

/// The result c for a memory content when nothing is packed.
fn product_without_packing(case: &ProductGraph, content: &[u8]) -> Vec<u8> {
    let mut fixture = Fixture::new();
    let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(content.len()));
    fixture.write(&buffer, 0, content);
    let everything = 0..content.len();
    memory(&buffer).write_map().pin(everything);
    fixture.run(&program, &buffer);
    assert_eq!(fixture.counts.take(), (0, 1));
    fixture.read(&buffer, offset_of(&case.graph, case.c), 4 * 2 * M)
}

/// A turn of a device that nobody else uses.
fn turn(lane: Lane) -> Turn {
    QueueThreads::start("test", 1).unwrap().begin(lane, &MemoryBudget::new(0))
}
