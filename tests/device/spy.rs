//! A CPU device that refuses some ops, and sees what it is asked for.

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{
    Account, Buffer, Device, DeviceError, DeviceInfo, Known, Link, MemoryInfo, Point, Program, Queue, Region, Source,
    Support, Ticket, Unsupported,
};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::TensorDesc;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Spy {
    inner: Arc<CpuDevice>,
    refused: Vec<OpCode>,
    pub seen: Arc<Seen>,
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Bytes.
    pub down: AtomicU64,
    pub up: AtomicU64,
    /// Calls.
    pub run: AtomicU64,
    pub here: AtomicU64,
    pub marks: AtomicU64,
    pub copies: AtomicU64,
    pub batches: AtomicU64,
    pub queues: AtomicU64,
    /// The threads that submitted.
    pub threads: Mutex<HashSet<ThreadId>>,
    /// Whether the next program fails.
    pub breaks: AtomicBool,
    /// What every program waits for first.
    pub gate: Mutex<Option<Point>>,
    /// Told about each program that is submitted and each queue that is dropped.
    pub told: Mutex<Option<mpsc::Sender<Event>>>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Event {
    Submitted,
    Dropped,
}

impl Seen {
    fn tell(&self, event: Event) {
        if let Some(told) = &*self.told.lock().unwrap() {
            told.send(event).unwrap();
        }
    }
}

impl Spy {
    pub(crate) fn new(name: &str, refused: &[OpCode]) -> Arc<Spy> {
        let inner = CpuDevice::new(name, 1, Path::Exact, super::MEMORY).unwrap();
        Arc::new(Spy { inner, refused: refused.to_vec(), seen: Arc::default() })
    }

    /// Bytes downloaded and uploaded since the last call.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (self.seen.down.swap(0, SeqCst), self.seen.up.swap(0, SeqCst))
    }
}

impl Device for Spy {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn link(&self) -> Option<Link> {
        Some(Link::new(self.inner.info().name.clone()).with_sent(1).with_received(2).with_waits(3))
    }

    /// Also from a device whose name is in the other domain's.
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.inner.copies_from(other) || other.domain.contains(&self.inner.info().name)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, account)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.inner.alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        let op = node.op.code();
        if self.refused.contains(&op) {
            return Support::No(Unsupported { op, reason: "the spy refuses it".to_owned() });
        }
        self.inner.support(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        for node in graph.nodes() {
            if let Support::No(no) = self.support(graph.view(node).unwrap()) {
                return Err(no.into());
            }
        }
        fanout::graph::validate::check(&graph).unwrap();
        self.inner.prepare(graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        self.seen.queues.fetch_add(1, SeqCst);
        Ok(Box::new(SpyQueue { inner: self.inner.queue(account)?, seen: Arc::clone(&self.seen) }))
    }
}

struct SpyQueue {
    inner: Box<dyn Queue>,
    seen: Arc<Seen>,
}

impl SpyQueue {
    fn sees(&self, count: &AtomicU64, by: u64) {
        count.fetch_add(by, SeqCst);
        self.seen.threads.lock().unwrap().insert(std::thread::current().id());
    }

    fn before_a_program(&mut self) -> Result<(), DeviceError> {
        if self.seen.breaks.load(SeqCst) {
            return Err(DeviceError::Bug("the spy breaks it".to_owned()));
        }
        let gate = self.seen.gate.lock().unwrap().clone();
        gate.map_or(Ok(()), |gate| self.inner.wait(&gate))
    }
}

impl Queue for SpyQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.sees(&self.seen.up, dst.bytes());
        self.inner.upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.sees(&self.seen.down, src.bytes());
        self.inner.download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        self.sees(&self.seen.batches, 1);
        self.inner.download_all(srcs)
    }

    /// Finds all of it, and counts it as an upload.
    fn recall(&mut self, dst: Region, _: Option<&TensorDesc>, known: Known<'_>) -> Result<Ticket, DeviceError> {
        self.sees(&self.seen.up, dst.bytes());
        let bytes = vec![known.digest[0]; dst.bytes() as usize];
        self.inner.upload(dst, None, Source::Borrowed(&bytes))?;
        Ok(Ticket::ready(vec![1]))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.inner.fill(dst, value)
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError> {
        self.sees(&self.seen.copies, 1);
        self.inner.copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.sees(&self.seen.run, 1);
        self.before_a_program()?;
        self.inner.run(program, bindings)?;
        self.seen.tell(Event::Submitted);
        Ok(())
    }

    fn run_here(&mut self, program: &Program, bindings: &Arc<[Region]>, patience: Duration) -> Result<(), DeviceError> {
        self.sees(&self.seen.here, 1);
        self.before_a_program()?;
        self.inner.run_here(program, bindings, patience)?;
        self.seen.tell(Event::Submitted);
        Ok(())
    }

    fn mark(&mut self) -> Point {
        self.sees(&self.seen.marks, 1);
        self.inner.mark()
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.inner.wait(point)
    }
}

impl Drop for SpyQueue {
    fn drop(&mut self) {
        self.seen.tell(Event::Dropped);
    }
}
