//! The fallback device, with two CPU devices: the primary refuses some ops.

mod graphs;
mod moves;
mod order;

use super::{MEMORY, floats, test_deadline};
use fanout::device::{
    Buffer, Device, DeviceError, Domain, LoadOutcome, MemoryBudget, PeerCopies, Queue, Region, Support, TensorDigest,
    UploadSource,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::OpCode::{self, Add, Mul, Sqr};
use fanout::ops::binary::Binary;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::tensor::{ByteRuns, DType};
use fanout_testing::recording_device::RecordingDevice;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

const ROW: [usize; 4] = [16, 1, 1, 1];

/// A fallback device with its primary and its secondary device.
struct FallbackPair {
    primary: Arc<RecordingDevice>,
    secondary: Arc<RecordingDevice>,
    device: Arc<Fallback>,
    budget: Arc<MemoryBudget>,
}

fn pair(refused: &[OpCode]) -> FallbackPair {
    let (primary, secondary) =
        (RecordingDevice::new("GPU", MEMORY, refused), RecordingDevice::new("HOST", MEMORY, &[]));
    let device = Fallback::new(Arc::clone(&primary) as _, Arc::clone(&secondary) as _);
    FallbackPair { primary, secondary, device, budget: MemoryBudget::new(MEMORY) }
}

impl FallbackPair {
    fn queue(&self) -> Box<dyn Queue> {
        self.device.queue(&self.budget).unwrap()
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.device.alloc(bytes as u64, &self.budget).unwrap()
    }
}

/// y = (a + b)², then z = y * a, on rows of 16 floats; with the ids of a, b, y, z.
fn chain() -> (Arc<Graph>, [TensorId; 4]) {
    let mut b = Builder::new();
    let (x, w) = (b.leaf(DType::F32, ROW).unwrap(), b.leaf(DType::F32, ROW).unwrap());
    let sum = b.node(Binary::Add, &[Some(x), Some(w)]).unwrap();
    let y = b.node(Unary::Sqr, &[Some(sum)]).unwrap();
    let z = b.node(Binary::Mul, &[Some(y), Some(x)]).unwrap();
    (Arc::new(b.build()), [x, w, y, z])
}

fn region(graph: &Graph, buffer: &Buffer, id: TensorId) -> Region {
    let tensor = graph.tensor(id).unwrap();
    buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
}

fn set(queue: &mut dyn Queue, region: Region, value: f32) {
    let bytes: Vec<u8> = (0..region.bytes() / 4).flat_map(|_| value.to_le_bytes()).collect();
    queue.upload(region, None, UploadSource::Borrowed(&bytes)).unwrap();
}

fn get(queue: &mut dyn Queue, region: Region) -> Result<f32, DeviceError> {
    Ok(floats(&queue.download(region)?.wait(test_deadline())?)[0])
}

#[test]
fn it_has_the_primarys_identity_and_memory() {
    let FallbackPair { primary, secondary, device, budget } = pair(&[Sqr]);
    let buffer = device.alloc(1 << 20, &budget).unwrap();
    assert_eq!((device.info().name.as_str(), buffer.device_name()), ("GPU", "GPU"));
    assert_eq!((device.info().id, buffer.device()), (primary.info().id, primary.info().id));
    assert_eq!(device.memory().unwrap().total, MEMORY);
    assert_eq!((primary.memory().unwrap().total, budget.used()), (MEMORY, 1 << 20));
    assert_eq!(secondary.record.queues.load(SeqCst), 0);
    let (graph, _) = chain();
    assert!(graph.nodes().iter().all(|node| device.support(graph.node_view(node).unwrap()) == Support::Yes));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    assert_eq!(program.graph(), &*graph);
}

/// Optional methods and capabilities of the primary are forwarded, also while the thread holds its queue.
#[test]
fn capabilities_of_the_primary_are_forwarded() {
    let FallbackPair { primary, device, budget, .. } = pair(&[Sqr]);
    assert_eq!(device.link_stats(), primary.link_stats());
    for (domain, copies) in [("host", true), ("of a GPU", true), ("elsewhere", false)] {
        let mut other = primary.info().clone();
        other.domain = Domain::named(domain);
        assert_eq!(device.copies_from(&other), copies, "{domain}");
    }
    let (graph, _) = chain();
    let (memory, mut queue) =
        (device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap(), device.queue(&budget).unwrap());
    let buffer = device.alloc(64, &budget).unwrap();
    let (program, bindings) = (device.prepare(graph).unwrap(), Arc::from([memory.whole()]));
    let parts = [(0, 16), (16, 48)].map(|(offset, bytes)| buffer.region(offset, bytes).unwrap());
    for turn in 1..3 {
        let (wanted, runs) = (TensorDigest { digest: [turn; 32], bytes: 64, name: "w" }, ByteRuns::whole(64));
        let found = queue.load_by_digest().unwrap().load_by_digest(buffer.whole(), None, wanted, runs).unwrap();
        assert_eq!(found.wait(test_deadline()), Ok(LoadOutcome::Found), "turn {turn}");
        queue.prefault().unwrap().prefault(&buffer.whole());
        let read = queue.download_all(&parts).unwrap();
        let read: Vec<_> = read.into_iter().map(|read| read.wait(test_deadline()).unwrap()).collect();
        assert_eq!(read, [vec![turn; 16], vec![turn; 48]]);
        // Later iterations are ordered after this command.
        queue.run(&program, &bindings).unwrap();
    }
    assert!(primary.record.batches.load(SeqCst) >= 1);
    assert_eq!(primary.record.prefaulted.load(SeqCst), 2 * 64);
}

#[test]
fn a_node_that_neither_device_supports_is_refused_with_both_reasons() {
    let device = Fallback::new(
        RecordingDevice::new("GPU", MEMORY, &[Sqr, Mul]),
        RecordingDevice::new("HOST", MEMORY, &[Mul, Add]),
    );
    let (graph, _) = chain();
    let no = graph.nodes().iter().find_map(|node| match device.support(graph.node_view(node).unwrap()) {
        Support::No(no) => Some(no),
        Support::Yes | Support::Offload => None,
    });
    let no = no.unwrap();
    assert_eq!(no.op, Mul);
    assert!(no.reason.contains("on GPU") && no.reason.contains("on HOST"), "{no}");
    assert_eq!(device.prepare(graph).unwrap_err(), DeviceError::Unsupported(no));
}

fn leaf(b: &mut Builder) -> TensorId {
    b.leaf(DType::F32, ROW).unwrap()
}

fn node(b: &mut Builder, op: Binary, srcs: &[TensorId; 2]) -> TensorId {
    b.node(op, &srcs.map(Some)).unwrap()
}

fn sum(b: &mut Builder) -> TensorId {
    let srcs = [leaf(b), leaf(b)];
    node(b, Binary::Add, &srcs)
}

fn square(b: &mut Builder, x: TensorId) -> TensorId {
    b.node(Unary::Sqr, &[Some(x)]).unwrap()
}

fn in_place(b: &mut Builder, x: TensorId) -> TensorId {
    let desc = b.tensor(x).unwrap().desc;
    let onto = b.view(x, desc, 0).unwrap();
    b.node_into(Unary::Sqr, &[Some(x)], onto).unwrap()
}

/// Two rows into a cache of eight.
fn rows(b: &mut Builder) -> TensorId {
    let rows = b.leaf(DType::F32, [16, 2, 1, 1]).unwrap();
    let ids = b.leaf(DType::I64, [2, 1, 1, 1]).unwrap();
    let cache = b.leaf(DType::F32, [16, 8, 1, 1]).unwrap();
    let desc = b.tensor(cache).unwrap().desc;
    let onto = b.view(cache, desc, 0).unwrap();
    b.node_into(Rows::SetRows, &[Some(rows), Some(ids), Some(cache)], onto).unwrap()
}

/// The logged messages.
static LOG_LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct LogRecorder;

impl log::Log for LogRecorder {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LOG_LINES.lock().unwrap().push(format!("{} {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn an_op_that_falls_back_is_logged_once() {
    log::set_logger(&LogRecorder).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let device =
        Fallback::new(RecordingDevice::new("LOUD", MEMORY, &[Sqr, Mul]), RecordingDevice::new("HOST", MEMORY, &[]));
    let (graph, _) = chain();
    for _ in 0..3 {
        device.prepare(Arc::clone(&graph)).unwrap();
    }
    let lines = LOG_LINES.lock().unwrap().clone();
    let lines: Vec<&String> = lines.iter().filter(|line| line.contains("LOUD")).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, op) in lines.iter().zip(["SQR", "MUL"]) {
        let all = ["WARN", op, "HOST", "this recording device refuses it"].iter().all(|part| line.contains(part));
        assert!(all, "{line}");
    }
}
