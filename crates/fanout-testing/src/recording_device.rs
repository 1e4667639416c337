//! A CPU device that counts the calls of its queues, refuses chosen ops, and fails or waits on request.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{
    Buffer, CopyOutcome, Device, DeviceError, DeviceInfo, HostThreads, ImportHost, LinkStats, LoadByDigest,
    LoadOutcome, MemoryBudget, MemoryInfo, PeerCopies, PendingRead, Prefault, Program, Queue, QueueAborter, Region,
    Support, TensorDigest, TimelinePoint, Unsupported, UploadSource,
};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::{ByteRuns, TensorDesc};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

/// A CPU device with one thread that counts the calls of its queues.
#[derive(Debug)]
pub struct RecordingDevice {
    inner: Arc<CpuDevice>,
    refused: Vec<OpCode>,
    /// Counters and switches.
    pub record: Arc<CallRecord>,
}

/// Call counters of all queues of a device, and switches that a test may set while queues run.
#[derive(Debug, Default)]
pub struct CallRecord {
    /// Bytes downloaded.
    pub downloaded: AtomicU64,
    /// Bytes uploaded.
    pub uploaded: AtomicU64,
    /// Calls of [`Queue::run`].
    pub runs: AtomicU64,
    /// Calls of [`Queue::run_inline`].
    pub inline_runs: AtomicU64,
    /// Calls of [`Queue::mark`].
    pub marks: AtomicU64,
    /// Calls of [`Queue::copy_from`].
    pub copies: AtomicU64,
    /// Calls of [`Queue::download_all`].
    pub batches: AtomicU64,
    /// Bytes prefaulted.
    pub prefaulted: AtomicU64,
    /// Queues opened.
    pub queues: AtomicU64,
    /// The threads that submitted.
    pub threads: Mutex<HashSet<ThreadId>>,
    /// While set, every program fails with [`DeviceError::Bug`].
    pub fail_programs: AtomicBool,
    /// A point for which every program waits before it runs.
    pub gate: Mutex<Option<TimelinePoint>>,
    /// Receives an event for each program that is submitted and each queue that is dropped.
    pub events: Mutex<Option<mpsc::Sender<QueueEvent>>>,
}

/// An event of a queue.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum QueueEvent {
    /// A program was submitted.
    Submitted,
    /// The queue was dropped.
    Dropped,
}

impl CallRecord {
    fn send(&self, event: QueueEvent) {
        if let Some(events) = &*self.events.lock().unwrap() {
            events.send(event).unwrap();
        }
    }
}

impl RecordingDevice {
    /// A device with `memory` bytes that refuses nodes with these ops.
    ///
    /// # Panics
    /// If the CPU device cannot start its threads.
    pub fn new(name: &str, memory: u64, refused: &[OpCode]) -> Arc<RecordingDevice> {
        let inner = CpuDevice::new(name, 1, MathMode::Exact, memory).unwrap();
        Arc::new(RecordingDevice { inner, refused: refused.to_vec(), record: Arc::default() })
    }

    /// Bytes downloaded and uploaded since the last call.
    pub fn take_transferred_bytes(&self) -> (u64, u64) {
        (self.record.downloaded.swap(0, SeqCst), self.record.uploaded.swap(0, SeqCst))
    }
}

impl Device for RecordingDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    /// Constant counters, by which a test recognises that a wrapper forwards this device's counters.
    fn link_stats(&self) -> Option<LinkStats> {
        Some(LinkStats::new(self.inner.info().name.clone()).with_sent(1).with_received(2).with_waits(3))
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        self.inner.import_host()
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        self.inner.host_threads()
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner.memory()
    }

    fn lost(&self) -> Option<DeviceError> {
        self.inner.lost()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, budget)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.inner.alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        let op = node.op.code();
        if self.refused.contains(&op) {
            return Support::No(Unsupported { op, reason: "this recording device refuses it".to_owned() });
        }
        self.inner.support(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        for node in graph.nodes() {
            if let Support::No(no) = self.support(graph.node_view(node).unwrap()) {
                return Err(no.into());
            }
        }
        fanout::graph::validate::check(&graph).unwrap();
        self.inner.prepare(graph)
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.record.queues.fetch_add(1, SeqCst);
        Ok(Box::new(RecordingQueue { inner: self.inner.queue(budget)?, record: Arc::clone(&self.record) }))
    }
}

impl PeerCopies for RecordingDevice {
    /// True for its own copy domain, and for any domain with this device's name in the domain's name.
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.inner.info().domain == other.domain || other.domain.name().contains(&self.inner.info().name)
    }
}

struct RecordingQueue {
    inner: Box<dyn Queue>,
    record: Arc<CallRecord>,
}

impl RecordingQueue {
    fn count(&self, counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, SeqCst);
        self.record.threads.lock().unwrap().insert(std::thread::current().id());
    }

    fn before_program(&mut self) -> Result<(), DeviceError> {
        if self.record.fail_programs.load(SeqCst) {
            return Err(DeviceError::Bug("a recording device failed on request".to_owned()));
        }
        let gate = self.record.gate.lock().unwrap().clone();
        gate.map_or(Ok(()), |gate| self.inner.wait(&gate))
    }
}

impl Queue for RecordingQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.count(&self.record.uploaded, dst.bytes());
        self.inner.upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.count(&self.record.downloaded, src.bytes());
        self.inner.download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        self.count(&self.record.batches, 1);
        self.inner.download_all(srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.inner.fill(dst, value)
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.count(&self.record.copies, 1);
        self.inner.copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.count(&self.record.runs, 1);
        self.before_program()?;
        self.inner.run(program, bindings)?;
        self.record.send(QueueEvent::Submitted);
        Ok(())
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        self.count(&self.record.inline_runs, 1);
        self.before_program()?;
        self.inner.run_inline(program, bindings, budget)?;
        self.record.send(QueueEvent::Submitted);
        Ok(())
    }

    fn mark(&mut self) -> TimelinePoint {
        self.count(&self.record.marks, 1);
        self.inner.mark()
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.inner.wait(point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        Some(self)
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        Some(self)
    }

    fn aborter(&mut self) -> Option<QueueAborter> {
        self.inner.aborter()
    }
}

impl Drop for RecordingQueue {
    fn drop(&mut self) {
        self.record.send(QueueEvent::Dropped);
    }
}

impl Prefault for RecordingQueue {
    fn prefault(&mut self, region: &Region) {
        self.count(&self.record.prefaulted, region.bytes());
    }
}

impl LoadByDigest for RecordingQueue {
    /// Finds every digest: fills the region with the first byte of the digest. Counts as an upload of the slice.
    fn load_by_digest(
        &mut self,
        dst: Region,
        _: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
        _: ByteRuns,
    ) -> Result<PendingRead<LoadOutcome>, DeviceError> {
        self.count(&self.record.uploaded, dst.bytes());
        let bytes = vec![wanted.digest[0]; dst.bytes() as usize];
        self.inner.upload(dst, None, UploadSource::Borrowed(&bytes))?;
        Ok(PendingRead::ready(LoadOutcome::Found))
    }
}
