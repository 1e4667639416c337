//! The no-op device: every command succeeds at once without computing, and its memory reads as zeros.
//!
//! For tests of code that drives devices (a scheduler, a server, a runtime's placement of weights), and for measuring the
//! overhead of that code alone. Its buffers hold no bytes, so a device of a terabyte costs nothing, and submitting a program
//! allocates no memory.
//!
//! It follows the [device contract](super): regions of other devices, wrong lengths and bindings that do not fit are
//! [`DeviceError::Misuse`], memory is reserved in the caller's budget and in the device's, and `prepare` refuses the nodes that
//! `support` refuses. Builder methods of [`NoopDevice`] set its description, memory size, supported nodes and possible copies.
//!
//! ```
//! use fanout::device::noop::NoopDevice;
//! use fanout::device::{Device, DeviceKind};
//! use fanout::ops::OpCode;
//!
//! let gpu = NoopDevice::new("GPU0", DeviceKind::Gpu)
//!     .with_memory(24 << 30)
//!     .with_info(|info| info.alignment = 256)
//!     .without_ops(&[OpCode::MulMatId]);
//! assert_eq!(gpu.memory()?.total, 24 << 30);
//! # Ok::<(), fanout::device::DeviceError>(())
//! ```

use super::{
    Buffer, CopyOutcome, DEVICE_TIMEOUT, Device, DeviceError, DeviceInfo, DeviceKind, Domain, MemoryBudget, MemoryInfo,
    PeerCopies, PendingRead, Program, Queue, Region, Support, TRANSFER_CHUNK_BYTES, Timeline, TimelinePoint,
    Unsupported, UploadSource, check_copy,
};
use crate::graph::Graph;
use crate::ops::{NodeView, OpCode};
use crate::tensor::TensorDesc;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Decides whether the device supports a node.
type SupportRule = dyn Fn(NodeView<'_>) -> Support + Send + Sync;

/// Decides whether the device copies from a device of another domain.
type CopyRule = dyn Fn(&DeviceInfo) -> bool + Send + Sync;

/// A device that computes nothing. See the [module](self).
pub struct NoopDevice {
    info: Arc<DeviceInfo>,
    support: Box<SupportRule>,
    copies_from: Arc<CopyRule>,
    /// Budget of all buffers; its limit is the size of the device's memory.
    memory: Arc<MemoryBudget>,
    /// Padding in bytes after each tensor.
    padding: u64,
}

impl NoopDevice {
    /// A device that supports every node, has 1 TiB of memory, no limit on the size of a buffer, and aligns tensors to 64
    /// bytes. All no-op devices share the domain `noop`: they copy from each other's memory.
    pub fn new(name: &str, kind: DeviceKind) -> NoopDevice {
        let mut info = DeviceInfo::new(name, kind);
        "computes nothing".clone_into(&mut info.description);
        (info.alignment, info.domain) = (64, Domain::named("noop"));
        NoopDevice {
            info: Arc::new(info),
            support: Box::new(|_| Support::Yes),
            copies_from: Arc::new(|_| false),
            memory: MemoryBudget::new(1 << 40),
            padding: 0,
        }
    }

    /// Changes the description that [`Device::info`] returns. Buffers refer to the description at the time of their allocation.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> NoopDevice {
        change(Arc::make_mut(&mut self.info));
        self
    }

    /// Sets the size of the device's memory, in bytes.
    pub fn with_memory(self, bytes: u64) -> NoopDevice {
        NoopDevice { memory: MemoryBudget::new(bytes), ..self }
    }

    /// Makes [`Device::alloc_size`] add `bytes` bytes of padding after each tensor.
    pub fn with_padding(self, bytes: u64) -> NoopDevice {
        NoopDevice { padding: bytes, ..self }
    }

    /// Sets the rule that decides which nodes the device supports.
    pub fn with_support(self, rule: impl Fn(NodeView<'_>) -> Support + Send + Sync + 'static) -> NoopDevice {
        NoopDevice { support: Box::new(rule), ..self }
    }

    /// Supports every node except those with one of these ops.
    pub fn without_ops(self, ops: &'static [OpCode]) -> NoopDevice {
        self.with_support(move |node| {
            let op = node.op.code();
            if ops.contains(&op) {
                Support::No(Unsupported { op, reason: "excluded from this no-op device".to_owned() })
            } else {
                Support::Yes
            }
        })
    }

    /// Sets the rule that decides from which devices of other domains the device copies. It never copies from a device that is
    /// no [`NoopDevice`], even if the rule returns true.
    pub fn with_copies_from(self, rule: impl Fn(&DeviceInfo) -> bool + Send + Sync + 'static) -> NoopDevice {
        NoopDevice { copies_from: Arc::new(rule), ..self }
    }

    /// The finished device as a shared trait object, the form that lists of devices take.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl fmt::Debug for NoopDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NoopDevice({})", self.info.name)
    }
}

/// The memory object of a buffer: the description of its device, and no bytes.
struct NoopMemory(Arc<DeviceInfo>);

impl Device for NoopDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        let total = self.memory.limit();
        Ok(MemoryInfo { free: total.saturating_sub(self.memory.used()), total })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let reservations = (budget.reserve(bytes)?, self.memory.reserve(bytes)?);
        let memory = NoopMemory(Arc::clone(&self.info));
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservations)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64 + self.padding
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        (self.support)(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        for node in graph.nodes().iter().filter_map(|node| graph.node_view(node)) {
            if let Support::No(unsupported) = self.support(node) {
                return Err(unsupported.into());
            }
        }
        Ok(Program::new(graph, Box::new(NoopProgram)))
    }

    fn queue(&self, _: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let (info, copies_from) = (Arc::clone(&self.info), Arc::clone(&self.copies_from));
        Ok(Box::new(NoopQueue { info, copies_from, timeline: Timeline::new() }))
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }
}

impl PeerCopies for NoopDevice {
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.info.domain == other.domain || (self.copies_from)(other)
    }
}

/// Distinguishes programs of no-op devices from programs of other devices.
struct NoopProgram;

struct NoopQueue {
    info: Arc<DeviceInfo>,
    copies_from: Arc<CopyRule>,
    /// Stays at value 0, the value of every point: work is complete when it is submitted.
    timeline: Arc<Timeline>,
}

impl Queue for NoopQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        dst.check_device(self.info.id)?;
        src.check_size(dst.bytes())?;
        match src {
            UploadSource::Borrowed(_) => Ok(()),
            // The writer runs as on any device, because tests check its errors and its calls.
            UploadSource::Writer(write) => {
                let mut chunk = vec![0; dst.bytes().min(TRANSFER_CHUNK_BYTES) as usize];
                let mut left = dst.bytes();
                loop {
                    let bytes = left.min(TRANSFER_CHUNK_BYTES);
                    write(&mut chunk[..bytes as usize])?;
                    left -= bytes;
                    if left == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        src.check_device(self.info.id)?;
        Ok(PendingRead::ready(vec![0; src.bytes() as usize]))
    }

    fn fill(&mut self, dst: Region, _: u8) -> Result<(), DeviceError> {
        dst.check_device(self.info.id)
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        dst.check_device(self.info.id)?;
        check_copy(&src, &dst)?;
        let Some(NoopMemory(from)) = src.buffer().memory() else { return Ok(CopyOutcome::Unreachable) };
        if from.domain != self.info.domain && !(self.copies_from)(from) {
            return Ok(CopyOutcome::Unreachable);
        }
        after.map_or(Ok(()), |point| self.wait(point))?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        if program.compiled::<NoopProgram>().is_none() {
            return Err(DeviceError::Misuse("a program of another device"));
        }
        program.check_bindings(bindings)?;
        bindings.iter().try_for_each(|region| region.check_device(self.info.id))
    }

    fn mark(&mut self) -> TimelinePoint {
        TimelinePoint::new(&self.timeline, 0)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        if point.poll()? { Ok(()) } else { point.wait(Some(Instant::now() + DEVICE_TIMEOUT)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SourceError;
    use crate::graph::Builder;
    use crate::ops::binary::Binary;
    use crate::tensor::DType;

    fn addition() -> Arc<Graph> {
        let mut b = Builder::new();
        let [x, y] = [0; 2].map(|_| b.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
        b.node(Binary::Add, &[Some(x), Some(y)]).unwrap();
        Arc::new(b.build())
    }

    fn is_misuse<T>(result: Result<T, DeviceError>) -> bool {
        matches!(result, Err(DeviceError::Misuse(_)))
    }

    #[test]
    fn a_program_runs_and_memory_reads_as_zeros() {
        let (device, budget) = (NoopDevice::new("A", DeviceKind::Gpu), MemoryBudget::new(u64::MAX));
        let (graph, mut queue) = (addition(), device.queue(&budget).unwrap());
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
        queue.upload(buffer.region(0, 4).unwrap(), None, UploadSource::Borrowed(&[1, 2, 3, 4])).unwrap();
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        assert_eq!(queue.mark().poll(), Ok(true));
        assert_eq!(queue.download(buffer.region(0, 4).unwrap()).unwrap().wait(None), Ok(vec![0; 4]));
    }

    #[test]
    fn memory_is_reserved_in_the_callers_and_the_devices_budget() {
        let (device, budget) = (NoopDevice::new("A", DeviceKind::Cpu).with_memory(100), MemoryBudget::new(1000));
        let buffer = device.alloc(60, &budget).unwrap();
        assert_eq!((device.memory().unwrap(), budget.used()), (MemoryInfo { free: 40, total: 100 }, 60));
        let refused = device.alloc(41, &budget).unwrap_err();
        assert_eq!(refused, DeviceError::OutOfMemory { requested: 41, available: 40, limit: 100 });
        assert_eq!(budget.used(), 60, "a failed allocation leaves no reservation");
        drop(buffer);
        assert_eq!((device.memory().unwrap().free, budget.used()), (100, 0));
    }

    #[test]
    fn misuse_is_reported_and_does_not_panic() {
        let budget = MemoryBudget::new(u64::MAX);
        let [one, other] = ["A", "B"].map(|name| NoopDevice::new(name, DeviceKind::Gpu));
        let (own, foreign) = (one.alloc(256, &budget).unwrap(), other.alloc(256, &budget).unwrap());
        let mut queue = one.queue(&budget).unwrap();
        assert!(is_misuse(queue.upload(foreign.whole(), None, UploadSource::Borrowed(&[0; 256]))));
        assert!(is_misuse(queue.upload(own.whole(), None, UploadSource::Borrowed(&[0; 255]))));
        assert!(is_misuse(queue.download(foreign.whole())) && is_misuse(queue.fill(foreign.whole(), 0)));
        assert!(is_misuse(queue.copy_from(own.whole(), foreign.whole(), None)));
        assert!(is_misuse(queue.copy_from(foreign.region(0, 8).unwrap(), own.whole(), None)));
        let program = one.prepare(addition()).unwrap();
        for bindings in [vec![], vec![own.region(0, 4).unwrap()], vec![foreign.whole()], vec![own.whole(); 2]] {
            assert!(is_misuse(queue.run(&program, &bindings.into())));
        }
        let other_program = Program::new(addition(), Box::new(()));
        assert!(is_misuse(queue.run(&other_program, &Arc::from([own.whole()]))));
    }

    #[test]
    fn prepare_refuses_nodes_that_support_refuses() {
        let device = NoopDevice::new("A", DeviceKind::Gpu).without_ops(&[OpCode::Add]);
        let refused = device.prepare(addition()).unwrap_err();
        assert!(matches!(refused, DeviceError::Unsupported(Unsupported { op: OpCode::Add, .. })));
        let device = NoopDevice::new("A", DeviceKind::Gpu).without_ops(&[OpCode::Mul]);
        assert!(device.prepare(addition()).is_ok());
    }

    #[test]
    fn copies_follow_domains_and_the_rule() {
        let budget = MemoryBudget::new(u64::MAX);
        let device = |name: &str, domain: &str| {
            let domain = Domain::named(domain);
            NoopDevice::new(name, DeviceKind::Gpu).with_info(|info| info.domain = domain)
        };
        let to = device("A", "x").with_copies_from(|from| from.name == "C");
        let mut queue = to.queue(&budget).unwrap();
        let dst = to.alloc(8, &budget).unwrap();
        for (name, domain, copies) in [("B", "x", true), ("C", "y", true), ("D", "y", false)] {
            let from = device(name, domain);
            let src = from.alloc(8, &budget).unwrap();
            assert_eq!(to.copies_from(from.info()), copies, "{name}");
            let outcome = queue.copy_from(src.whole(), dst.whole(), None).unwrap();
            assert_eq!(outcome.is_submitted(), copies, "{name}");
        }
        let unknown = Buffer::new(&DeviceInfo::new("E", DeviceKind::Gpu), 8, Box::new(()), Box::new(()));
        assert_eq!(queue.copy_from(unknown.whole(), dst.whole(), None), Ok(CopyOutcome::Unreachable));
    }

    #[test]
    fn a_writer_fills_every_byte_and_its_error_is_returned() {
        let (device, budget) = (NoopDevice::new("A", DeviceKind::Gpu), MemoryBudget::new(u64::MAX));
        let mut queue = device.queue(&budget).unwrap();
        for bytes in [0, 1, TRANSFER_CHUNK_BYTES, 2 * TRANSFER_CHUNK_BYTES + 1] {
            let (dst, mut written) = (device.alloc(bytes, &budget).unwrap(), 0);
            let mut count = |chunk: &mut [u8]| {
                written += chunk.len() as u64;
                Ok(())
            };
            queue.upload(dst.whole(), None, UploadSource::Writer(&mut count)).unwrap();
            assert_eq!(written, bytes);
        }
        let dst = device.alloc(8, &budget).unwrap();
        let mut fail = |_: &mut [u8]| Err(SourceError::new("torn"));
        let error = queue.upload(dst.whole(), None, UploadSource::Writer(&mut fail)).unwrap_err();
        assert_eq!(error, DeviceError::Source(SourceError::new("torn")));
    }
}
