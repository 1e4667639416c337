//! Wrappers forward every method and every capability of the wrapped device and queue.

use super::{MEMORY, device as cpu, test_deadline};
use fanout::device::noop::NoopDevice;
use fanout::device::{
    Buffer, Collectives, CopyOutcome, Device, DeviceActivity, DeviceError, DeviceInfo, DeviceKind, Feature,
    ForwardDevice, ForwardQueue, HostBuffer, HostThreads, ImportHost, LinkStats, LoadByDigest, LoadOutcome, MappedFile,
    Membership, MemoryBudget, MemoryInfo, PeerCopies, PendingRead, PinnedMemory, Prefault, Program, Queue,
    ReadOnlyMapping, Region, Support, TensorDigest, Timeline, TimelinePoint, UploadSource,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph};
use fanout::ops::NodeView;
use fanout::ops::unary::Unary;
use fanout::tensor::{ByteRuns, DType, TensorDesc};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Calls = Arc<Mutex<Vec<&'static str>>>;

/// A device with all capabilities or with none, which records the calls that it receives.
#[derive(Debug)]
struct CallProbe {
    inner: Arc<dyn Device>,
    able: bool,
    calls: Calls,
}

impl CallProbe {
    fn new(able: bool) -> Arc<CallProbe> {
        Arc::new(CallProbe { inner: NoopDevice::new("PROBE", DeviceKind::Gpu).shared(), able, calls: Calls::default() })
    }

    fn record<T>(&self, call: &'static str, result: T) -> T {
        self.calls.lock().unwrap().push(call);
        result
    }
}

// Implements `Device` directly, since the forwarding traits are under test.
impl Device for CallProbe {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn features(&self) -> Vec<Feature> {
        self.record("features", vec![Feature::new("probe", 1)])
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.record("memory", self.inner.memory())
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.record("alloc", self.inner.alloc(bytes, budget))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.record("alloc_size", self.inner.alloc_size(tensor))
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        self.record("support", self.inner.support(node))
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.record("prepare", self.inner.prepare(graph))
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.inner.queue(budget)?;
        self.record("queue", Ok(Box::new(CallProbeQueue { inner, able: self.able, calls: Arc::clone(&self.calls) })))
    }

    fn lost(&self) -> Option<DeviceError> {
        self.record("lost", self.able.then_some(DeviceError::Ended))
    }

    fn endpoint(&self) -> Option<&str> {
        self.record("endpoint", self.able.then_some("probe:1"))
    }

    fn activity(&self) -> Option<DeviceActivity> {
        self.record("activity", self.able.then_some(DeviceActivity::default()))
    }

    fn link_stats(&self) -> Option<LinkStats> {
        let stats = LinkStats::new("probe:1").with_sent(1).with_received(2).with_waits(3);
        self.record("link_stats", self.able.then_some(stats))
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        self.able.then_some(self)
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        self.able.then_some(self)
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        self.able.then_some(self)
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        self.able.then_some(self)
    }
}

impl PeerCopies for CallProbe {
    fn copies_from(&self, _: &DeviceInfo) -> bool {
        self.record("copies_from", true)
    }
}

impl ImportHost for CallProbe {
    fn import(&self, memory: HostBuffer, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.record("import", self.inner.alloc(memory.len() as u64, budget))
    }

    fn import_read_only(&self, _: ReadOnlyMapping) -> Result<Buffer, DeviceError> {
        self.record("import_read_only", self.inner.alloc(64, &MemoryBudget::new(MEMORY)))
    }
}

impl PinnedMemory for CallProbe {
    fn alloc_pinned(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        self.record("alloc_pinned", HostBuffer::zeroed(bytes, budget))
    }
}

impl HostThreads for CallProbe {
    fn set_threads(&self, _: usize) -> Result<(), DeviceError> {
        self.record("set_threads", Ok(()))
    }
}

struct CallProbeQueue {
    inner: Box<dyn Queue>,
    able: bool,
    calls: Calls,
}

impl CallProbeQueue {
    fn record(&mut self, call: &'static str) -> &mut dyn Queue {
        self.calls.lock().unwrap().push(call);
        &mut *self.inner
    }
}

impl Queue for CallProbeQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.record("upload").upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.record("download").download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        self.record("download_all").download_all(srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.record("fill").fill(dst, value)
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.record("copy_from").copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.record("run").run(program, bindings)
    }

    fn mark(&mut self) -> TimelinePoint {
        self.record("mark").mark()
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.record("wait").wait(point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.able { Some(self) } else { None }
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        if self.able { Some(self) } else { None }
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, _: Duration) -> Result<(), DeviceError> {
        self.record("run_inline").run(program, bindings)
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        if self.able { Some(self) } else { None }
    }
}

impl Prefault for CallProbeQueue {
    fn prefault(&mut self, _: &Region) {
        self.record("prefault");
    }
}

impl LoadByDigest for CallProbeQueue {
    fn load_by_digest(
        &mut self,
        _: Region,
        _: Option<&TensorDesc>,
        _: TensorDigest<'_>,
        _: ByteRuns,
    ) -> Result<PendingRead<LoadOutcome>, DeviceError> {
        self.record("load_by_digest");
        Ok(PendingRead::ready(LoadOutcome::Found))
    }
}

impl Collectives for CallProbeQueue {
    fn join(&mut self, _: u32, _: Membership) -> Result<(), DeviceError> {
        self.record("join");
        Ok(())
    }
}

/// A wrapper that changes nothing.
#[derive(Debug)]
struct ForwardAll(Arc<dyn Device>);

impl ForwardDevice for ForwardAll {
    fn inner(&self) -> &dyn Device {
        &*self.0
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(ForwardAllQueue(self.0.queue(budget))))
    }
}

struct ForwardAllQueue(Result<Box<dyn Queue>, DeviceError>);

impl ForwardQueue for ForwardAllQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        match &mut self.0 {
            Ok(queue) => Ok(&mut **queue),
            Err(error) => Err(error.clone()),
        }
    }
}

fn empty_mapping() -> ReadOnlyMapping {
    let file = tempfile::NamedTempFile::new().unwrap();
    MappedFile::open(file.path()).unwrap().map_read_only(0..0).unwrap()
}

/// Calls every method of a device and of its queue.
fn exercise(device: &dyn Device) {
    let budget = MemoryBudget::new(MEMORY);
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [4, 1, 1, 1]).unwrap();
    b.node(Unary::Sqr, &[Some(x)]).unwrap();
    let graph = Arc::new(b.build());
    assert!(!device.features().is_empty());
    device.memory().unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    assert_eq!(buffer.device(), device.info().id);
    device.alloc_size(&graph.tensor(x).unwrap().desc);
    assert_eq!(device.support(graph.node_view(&graph.nodes()[0]).unwrap()), Support::Yes);
    let _ = (device.lost(), device.endpoint(), device.activity(), device.link_stats());
    device.copies_from(cpu(1).info());
    if let Some(import) = device.import_host() {
        import.import(HostBuffer::zeroed(64, &budget).unwrap(), &budget).unwrap();
        import.import_read_only(empty_mapping()).unwrap();
    }
    if let Some(pinned) = device.pinned_memory() {
        pinned.alloc_pinned(64, &budget).unwrap();
    }
    if let Some(threads) = device.host_threads() {
        threads.set_threads(1).unwrap();
    }
    let (program, bindings) = (device.prepare(graph).unwrap(), Arc::from([buffer.whole()]));
    let mut queue = device.queue(&budget).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(&vec![0; buffer.bytes() as usize])).unwrap();
    queue.download(buffer.whole()).unwrap();
    queue.download_all(&[buffer.whole(), buffer.whole()]).unwrap();
    queue.fill(buffer.whole(), 0).unwrap();
    assert!(queue.copy_from(buffer.whole(), buffer.whole(), None).unwrap().is_submitted());
    queue.run(&program, &bindings).unwrap();
    queue.mark().wait(test_deadline()).unwrap();
    queue.wait(&TimelinePoint::new(&Timeline::new(), 0)).unwrap();
    if let Some(memory) = queue.prefault() {
        memory.prefault(&buffer.whole());
    }
    if let Some(loads) = queue.load_by_digest() {
        let bytes = buffer.bytes();
        let (wanted, runs) = (TensorDigest { digest: [0; 32], bytes, name: "w" }, ByteRuns::whole(bytes));
        let outcome = loads.load_by_digest(buffer.whole(), None, wanted, runs).unwrap().wait(test_deadline());
        assert_eq!(outcome, Ok(LoadOutcome::Found));
    }
    if let Some(collectives) = queue.collectives() {
        collectives.join(1, Membership::group(&[&*cpu(1)], 64, &budget).unwrap().remove(0)).unwrap();
    }
    queue.run_inline(&program, &bindings, Duration::from_secs(1)).unwrap();
}

/// Wraps a device.
type Wrap = fn(Arc<dyn Device>) -> Arc<dyn Device>;

/// The calls that a device receives through `wrap`, and those that it receives directly.
fn calls(able: bool, wrap: Wrap) -> [Vec<&'static str>; 2] {
    let probes = [(); 2].map(|()| CallProbe::new(able));
    exercise(&*wrap(Arc::clone(&probes[0]) as _));
    exercise(&*probes[1]);
    probes.map(|probe| std::mem::take(&mut *probe.calls.lock().unwrap()))
}

#[test]
fn wrappers_forward_every_call_and_capability() {
    for able in [true, false] {
        let wrappers: [(&str, Wrap); 3] = [
            ("the adaptor", |device| Arc::new(ForwardAll(device))),
            ("Fallback", |device| Fallback::new(device, NoopDevice::new("SECOND", DeviceKind::Cpu).shared())),
            ("both", |device| {
                Arc::new(ForwardAll(Fallback::new(device, NoopDevice::new("SECOND", DeviceKind::Cpu).shared())))
            }),
        ];
        for (name, wrap) in wrappers {
            let [through, direct] = calls(able, wrap);
            assert_eq!(through, direct, "{name}, with capabilities: {able}");
            let count = if able { 28 } else { 20 };
            assert_eq!(direct.len(), count, "the probe has every method of the contract: {direct:?}");
        }
    }
}

#[test]
fn a_wrapper_without_an_inner_queue_fails_every_call() {
    let budget = MemoryBudget::new(MEMORY);
    let cpu = cpu(1);
    let buffer = cpu.alloc(64, &budget).unwrap();
    let mut queue: Box<dyn Queue> = Box::new(ForwardAllQueue(Err(DeviceError::Ended)));
    assert_eq!(queue.fill(buffer.whole(), 0), Err(DeviceError::Ended));
    assert_eq!(queue.mark().wait(test_deadline()), Err(DeviceError::Ended));
    assert!(queue.prefault().is_none() && queue.load_by_digest().is_none());
    assert!(queue.collectives().is_none());
}

/// Two devices with the same name are distinguished.
#[test]
fn devices_are_distinguished_by_identity() {
    use fanout::device::TensorMemory;
    let (one, other, budget) = (cpu(1), cpu(1), MemoryBudget::new(MEMORY));
    assert_eq!(one.info().name, other.info().name);
    let tensor = TensorDesc::contiguous(DType::F32, [4, 1, 1, 1]).unwrap();
    let plan = TensorMemory::plan(&*one, [tensor]).unwrap();
    assert!(matches!(plan.allocate(&*other, &budget), Err(DeviceError::Misuse(_))));
    let mut memory = plan.allocate(&*one, &budget).unwrap();
    assert!(matches!(memory.place(&*other, []), Err(DeviceError::Misuse(_))));
    assert_eq!(memory.place(&*one, []), Ok(()));
}

/// A writer's error is returned with its type, and the queue stays usable.
#[test]
fn an_upload_returns_the_writers_error() {
    use fanout::device::UploadError;
    let (cpu, budget) = (cpu(1), MemoryBudget::new(MEMORY));
    let mut queue = cpu.queue(&budget).unwrap();
    for bytes in [16, 1 << 20] {
        let buffer = cpu.alloc(bytes, &budget).unwrap();
        let failed = queue.upload_from(buffer.whole(), None, |_| Err(parse()));
        assert_eq!(failed, Err(UploadError::Source(parse())));
        let foreign = NoopDevice::new("GPU", DeviceKind::Gpu).shared().alloc(bytes, &budget).unwrap();
        let misused = queue.upload_from(foreign.whole(), None, |_| Ok::<(), String>(()));
        assert!(matches!(misused, Err(UploadError::Device(DeviceError::Misuse(_)))));
        let filled = queue.upload_from(buffer.whole(), None, |piece| {
            piece.fill(3);
            Ok::<(), String>(())
        });
        assert_eq!(filled, Ok(()));
        assert!(queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap().iter().all(|&b| b == 3));
    }
}

fn parse() -> std::num::ParseIntError {
    "x".parse::<u8>().unwrap_err()
}
