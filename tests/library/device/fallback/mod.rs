//! A device that falls back, on two CPU devices of which the first refuses some ops.

mod graphs;
mod moves;
mod order;

use super::{MEMORY, floats, soon};
use fanout::device::{
    Account, Buffer, Device, DeviceError, Domain, LoadOutcome, PeerCopies, Queue, Region, Source, Support, TensorDigest,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::OpCode::{self, Add, Mul, Sqr};
use fanout::ops::binary::Binary;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::tensor::DType;
use fanout_testing::recording_device::RecordingDevice;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

const ROW: [usize; 4] = [16, 1, 1, 1];

/// A falling back device with both of its parts.
struct Pair {
    primary: Arc<RecordingDevice>,
    second: Arc<RecordingDevice>,
    device: Arc<Fallback>,
    account: Arc<Account>,
}

fn pair(refused: &[OpCode]) -> Pair {
    let (primary, second) = (RecordingDevice::new("GPU", MEMORY, refused), RecordingDevice::new("HOST", MEMORY, &[]));
    let device = Fallback::new(Arc::clone(&primary) as _, Arc::clone(&second) as _);
    Pair { primary, second, device, account: Account::new(MEMORY) }
}

impl Pair {
    fn queue(&self) -> Box<dyn Queue> {
        self.device.queue(&self.account).unwrap()
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.device.alloc(bytes as u64, &self.account).unwrap()
    }
}

/// y = (a + b)², then z = y * a, on rows of 16 floats; with the ids of a, b, y, z.
fn chain() -> (Arc<Graph>, [TensorId; 4]) {
    let mut b = Builder::new();
    let (x, w) = (b.leaf(DType::F32, ROW).unwrap(), b.leaf(DType::F32, ROW).unwrap());
    let sum = b.node(Binary::Add, &[Some(x), Some(w)]).unwrap();
    let y = b.node(Unary::Sqr, &[Some(sum)]).unwrap();
    let z = b.node(Binary::Mul, &[Some(y), Some(x)]).unwrap();
    (Arc::new(b.build().unwrap()), [x, w, y, z])
}

fn region(graph: &Graph, buffer: &Buffer, id: TensorId) -> Region {
    let tensor = graph.tensor(id).unwrap();
    buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
}

fn set(queue: &mut dyn Queue, region: Region, value: f32) {
    let bytes: Vec<u8> = (0..region.bytes() / 4).flat_map(|_| value.to_le_bytes()).collect();
    queue.upload(region, None, Source::Borrowed(&bytes)).unwrap();
}

fn get(queue: &mut dyn Queue, region: Region) -> Result<f32, DeviceError> {
    Ok(floats(&queue.download(region)?.wait(soon())?)[0])
}

#[test]
fn it_is_its_primary_to_the_outside() {
    let Pair { primary, second, device, account } = pair(&[Sqr]);
    let buffer = device.alloc(1000, &account).unwrap();
    assert_eq!((device.info().name.as_str(), buffer.device_name()), ("GPU", "GPU"));
    assert_eq!((device.info().id, buffer.device()), (primary.info().id, primary.info().id));
    assert_eq!(device.memory().unwrap().total, MEMORY);
    assert_eq!((primary.memory().unwrap().total, account.used()), (MEMORY, 1000));
    assert_eq!(second.record.queues.load(SeqCst), 0);
    let (graph, _) = chain();
    assert!(graph.nodes().iter().all(|node| device.support(graph.node_view(node).unwrap()) == Support::Yes));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    assert_eq!(program.graph(), &*graph);
}

/// Of what a device says and does on top of what each does, nothing is lost behind it; also while its thread is busy.
#[test]
fn it_is_reached_and_reaches_as_its_primary() {
    let Pair { primary, device, account, .. } = pair(&[Sqr]);
    assert_eq!(device.link_stats(), primary.link_stats());
    for (domain, copies) in [("host", true), ("of a GPU", true), ("elsewhere", false)] {
        let mut other = primary.info().clone();
        other.domain = Domain::named(domain);
        assert_eq!(device.copies_from(&other), copies, "{domain}");
    }
    let (graph, _) = chain();
    let (memory, mut queue) =
        (device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap(), device.queue(&account).unwrap());
    let buffer = device.alloc(64, &account).unwrap();
    let (program, bindings) = (device.prepare(graph).unwrap(), Arc::from([memory.whole()]));
    let parts = [(0, 16), (16, 48)].map(|(offset, bytes)| buffer.region(offset, bytes).unwrap());
    for turn in 1..3 {
        let wanted = TensorDigest { digest: [turn; 32], name: "w" };
        let found = queue.load_by_digest().unwrap().load_by_digest(buffer.whole(), None, wanted).unwrap();
        assert_eq!(found.wait(soon()), Ok(LoadOutcome::Found), "turn {turn}");
        queue.prefault().unwrap().prefault(&buffer.whole());
        let read = queue.download_all(&parts).unwrap();
        let read: Vec<_> = read.into_iter().map(|ticket| ticket.wait(soon()).unwrap()).collect();
        assert_eq!(read, [vec![turn; 16], vec![turn; 48]]);
        // The next turn comes behind this.
        queue.run(&program, &bindings).unwrap();
    }
    assert!(primary.record.batches.load(SeqCst) >= 1);
    assert_eq!(primary.record.prefaulted.load(SeqCst), 2 * 64);
}

#[test]
fn what_neither_runs_is_refused_with_both_reasons() {
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

/// What the log was told.
static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        TOLD.lock().unwrap().push(format!("{} {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn the_log_says_once_that_an_op_falls_back() {
    log::set_logger(&Listener).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let device =
        Fallback::new(RecordingDevice::new("LOUD", MEMORY, &[Sqr, Mul]), RecordingDevice::new("HOST", MEMORY, &[]));
    let (graph, _) = chain();
    for _ in 0..3 {
        device.prepare(Arc::clone(&graph)).unwrap();
    }
    let told = TOLD.lock().unwrap().clone();
    let told: Vec<&String> = told.iter().filter(|line| line.contains("LOUD")).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    for (line, op) in told.iter().zip(["SQR", "MUL"]) {
        let all = ["WARN", op, "HOST", "this recording device refuses it"].iter().all(|part| line.contains(part));
        assert!(all, "{line}");
    }
}
