//! Wrappers forward every method and every capability of what they wrap.

use super::{MEMORY, device as cpu, soon};
use fanout::device::noop::NoopDevice;
use fanout::device::{
    Account, Buffer, CopyOutcome, Device, DeviceError, DeviceInfo, DeviceKind, Feature, ForwardDevice, ForwardQueue,
    HostBuffer, HostThreads, ImportHost, LinkStats, LoadByDigest, LoadOutcome, MemoryInfo, PeerCopies, PinnedMemory,
    Point, Prefault, Program, Queue, Region, RunInline, Source, Support, TensorDigest, Ticket, Timeline,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph};
use fanout::ops::NodeView;
use fanout::ops::unary::Unary;
use fanout::tensor::{DType, TensorDesc};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Calls = Arc<Mutex<Vec<&'static str>>>;

/// A device with all capabilities, or none, that lists the calls that arrive.
#[derive(Debug)]
struct Probe {
    inner: Arc<dyn Device>,
    able: bool,
    calls: Calls,
}

impl Probe {
    fn new(able: bool) -> Arc<Probe> {
        Arc::new(Probe { inner: NoopDevice::new("PROBE", DeviceKind::Gpu).shared(), able, calls: Calls::default() })
    }

    fn saw<T>(&self, call: &'static str, result: T) -> T {
        self.calls.lock().unwrap().push(call);
        result
    }
}

// Not by the adaptor: that is what is tested.
impl Device for Probe {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn features(&self) -> Vec<Feature> {
        self.saw("features", vec![Feature::new("probe", 1)])
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.saw("memory", self.inner.memory())
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.saw("alloc", self.inner.alloc(bytes, account))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.saw("alloc_size", self.inner.alloc_size(tensor))
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        self.saw("support", self.inner.support(node))
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.saw("prepare", self.inner.prepare(graph))
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.inner.queue(account)?;
        self.saw("queue", Ok(Box::new(ProbeQueue { inner, able: self.able, calls: Arc::clone(&self.calls) })))
    }

    fn link_stats(&self) -> Option<LinkStats> {
        let stats = LinkStats::new("probe:1").with_sent(1).with_received(2).with_waits(3);
        self.saw("link_stats", self.able.then_some(stats))
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

impl PeerCopies for Probe {
    fn copies_from(&self, _: &DeviceInfo) -> bool {
        self.saw("copies_from", true)
    }
}

impl ImportHost for Probe {
    fn import(&self, memory: HostBuffer, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.saw("import", self.inner.alloc(memory.len() as u64, account))
    }
}

impl PinnedMemory for Probe {
    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        self.saw("alloc_pinned", HostBuffer::zeroed(bytes, account))
    }
}

impl HostThreads for Probe {
    fn set_threads(&self, _: usize) -> Result<(), DeviceError> {
        self.saw("set_threads", Ok(()))
    }
}

struct ProbeQueue {
    inner: Box<dyn Queue>,
    able: bool,
    calls: Calls,
}

impl ProbeQueue {
    fn saw(&mut self, call: &'static str) -> &mut dyn Queue {
        self.calls.lock().unwrap().push(call);
        &mut *self.inner
    }
}

impl Queue for ProbeQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.saw("upload").upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.saw("download").download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        self.saw("download_all").download_all(srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.saw("fill").fill(dst, value)
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.saw("copy_from").copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.saw("run").run(program, bindings)
    }

    fn mark(&mut self) -> Point {
        self.saw("mark").mark()
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.saw("wait").wait(point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.able { Some(self) } else { None }
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        if self.able { Some(self) } else { None }
    }

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        if self.able { Some(self) } else { None }
    }
}

impl Prefault for ProbeQueue {
    fn prefault(&mut self, _: &Region) {
        self.saw("prefault");
    }
}

impl LoadByDigest for ProbeQueue {
    fn load_by_digest(
        &mut self,
        _: Region,
        _: Option<&TensorDesc>,
        _: TensorDigest<'_>,
    ) -> Result<Ticket<LoadOutcome>, DeviceError> {
        self.saw("load_by_digest");
        Ok(Ticket::ready(LoadOutcome::Found))
    }
}

impl RunInline for ProbeQueue {
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, _: Duration) -> Result<(), DeviceError> {
        self.saw("run_inline").run(program, bindings)
    }
}

/// A wrapper that changes nothing.
#[derive(Debug)]
struct Plain(Arc<dyn Device>);

impl ForwardDevice for Plain {
    fn inner(&self) -> &dyn Device {
        &*self.0
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(PlainQueue(self.0.queue(account))))
    }
}

struct PlainQueue(Result<Box<dyn Queue>, DeviceError>);

impl ForwardQueue for PlainQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        match &mut self.0 {
            Ok(queue) => Ok(&mut **queue),
            Err(error) => Err(error.clone()),
        }
    }
}

/// Calls everything that a device and its queue have.
fn exercise(device: &dyn Device) {
    let account = Account::new(MEMORY);
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [4, 1, 1, 1]).unwrap();
    b.node(Unary::Sqr, &[Some(x)]).unwrap();
    let graph = Arc::new(b.build().unwrap());
    assert!(!device.features().is_empty());
    device.memory().unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
    assert_eq!(buffer.device(), device.info().id);
    device.alloc_size(&graph.tensor(x).unwrap().desc);
    assert_eq!(device.support(graph.node_view(&graph.nodes()[0]).unwrap()), Support::Yes);
    let _ = device.link_stats();
    device.copies_from(cpu(1).info());
    if let Some(import) = device.import_host() {
        import.import(HostBuffer::zeroed(64, &account).unwrap(), &account).unwrap();
    }
    if let Some(pinned) = device.pinned_memory() {
        pinned.alloc_pinned(64, &account).unwrap();
    }
    if let Some(threads) = device.host_threads() {
        threads.set_threads(1).unwrap();
    }
    let (program, bindings) = (device.prepare(graph).unwrap(), Arc::from([buffer.whole()]));
    let mut queue = device.queue(&account).unwrap();
    queue.upload(buffer.whole(), None, Source::Borrowed(&vec![0; buffer.bytes() as usize])).unwrap();
    queue.download(buffer.whole()).unwrap();
    queue.download_all(&[buffer.whole(), buffer.whole()]).unwrap();
    queue.fill(buffer.whole(), 0).unwrap();
    assert!(queue.copy_from(buffer.whole(), buffer.whole(), None).unwrap().is_submitted());
    queue.run(&program, &bindings).unwrap();
    queue.mark().wait(soon()).unwrap();
    queue.wait(&Point::new(&Timeline::new(), 0)).unwrap();
    if let Some(memory) = queue.prefault() {
        memory.prefault(&buffer.whole());
    }
    if let Some(loads) = queue.load_by_digest() {
        let wanted = TensorDigest { digest: [0; 32], name: "w" };
        let outcome = loads.load_by_digest(buffer.whole(), None, wanted).unwrap().wait(soon());
        assert_eq!(outcome, Ok(LoadOutcome::Found));
    }
    queue.run_inline_or_submit(&program, &bindings, Duration::from_secs(1)).unwrap();
}

/// Makes a wrapper of a device.
type Wrap = fn(Arc<dyn Device>) -> Arc<dyn Device>;

/// Which calls reach a device that `wrap` wraps, and which it gets without a wrapper.
fn calls(able: bool, wrap: Wrap) -> [Vec<&'static str>; 2] {
    let probes = [(); 2].map(|()| Probe::new(able));
    exercise(&*wrap(Arc::clone(&probes[0]) as _));
    exercise(&*probes[1]);
    probes.map(|probe| std::mem::take(&mut *probe.calls.lock().unwrap()))
}

#[test]
fn wrappers_drop_no_call_and_no_capability() {
    for able in [true, false] {
        let wrappers: [(&str, Wrap); 3] = [
            ("the adaptor", |device| Arc::new(Plain(device))),
            ("Fallback", |device| Fallback::new(device, NoopDevice::new("SECOND", DeviceKind::Cpu).shared())),
            ("both", |device| {
                Arc::new(Plain(Fallback::new(device, NoopDevice::new("SECOND", DeviceKind::Cpu).shared())))
            }),
        ];
        for (name, wrap) in wrappers {
            let [through, direct] = calls(able, wrap);
            assert_eq!(through, direct, "{name}, with capabilities: {able}");
            let count = if able { 23 } else { 17 };
            assert_eq!(direct.len(), count, "the probe has every method of the contract: {direct:?}");
        }
    }
}

#[test]
fn a_queue_that_cannot_be_reached_refuses_everything() {
    let account = Account::new(MEMORY);
    let cpu = cpu(1);
    let buffer = cpu.alloc(64, &account).unwrap();
    let mut queue: Box<dyn Queue> = Box::new(PlainQueue(Err(DeviceError::Ended)));
    assert_eq!(queue.fill(buffer.whole(), 0), Err(DeviceError::Ended));
    assert_eq!(queue.mark().wait(soon()), Err(DeviceError::Ended));
    assert!(queue.prefault().is_none() && queue.load_by_digest().is_none() && queue.run_inline().is_none());
}

/// Two devices of one name are two devices.
#[test]
fn devices_are_told_apart_by_identity() {
    use fanout::device::TensorMemory;
    let (one, other, account) = (cpu(1), cpu(1), Account::new(MEMORY));
    assert_eq!(one.info().name, other.info().name);
    let tensor = TensorDesc::contiguous(DType::F32, [4, 1, 1, 1]).unwrap();
    let plan = TensorMemory::plan(&*one, [tensor]).unwrap();
    assert!(matches!(plan.allocate(&*other, &account), Err(DeviceError::Misuse(_))));
    let mut memory = plan.allocate(&*one, &account).unwrap();
    assert!(matches!(memory.place(&*other, []), Err(DeviceError::Misuse(_))));
    assert_eq!(memory.place(&*one, []), Ok(()));
}

/// A writer's own error comes back with its type, and the queue goes on.
#[test]
fn an_upload_returns_the_error_of_its_source() {
    use fanout::device::UploadError;
    let (cpu, account) = (cpu(1), Account::new(MEMORY));
    let mut queue = cpu.queue(&account).unwrap();
    for bytes in [16, 1 << 20] {
        let buffer = cpu.alloc(bytes, &account).unwrap();
        let failed = queue.upload_from(buffer.whole(), None, |_| Err(parse()));
        assert_eq!(failed, Err(UploadError::Source(parse())));
        let foreign = NoopDevice::new("GPU", DeviceKind::Gpu).shared().alloc(bytes, &account).unwrap();
        let misused = queue.upload_from(foreign.whole(), None, |_| Ok::<(), String>(()));
        assert!(matches!(misused, Err(UploadError::Device(DeviceError::Misuse(_)))));
        let filled = queue.upload_from(buffer.whole(), None, |piece| {
            piece.fill(3);
            Ok::<(), String>(())
        });
        assert_eq!(filled, Ok(()));
        assert!(queue.download(buffer.whole()).unwrap().wait(soon()).unwrap().iter().all(|&b| b == 3));
    }
}

fn parse() -> std::num::ParseIntError {
    "x".parse::<u8>().unwrap_err()
}
