//! A device implemented outside of the crate (`minimal_device.rs`): alone, opened through a registry, and together with other
//! devices.

use super::minimal_device::MinimalDevice;
use super::{emulated, floats, small, test_deadline, with_minimal};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{
    Buffer, Device, DeviceError, MemoryBudget, Queue, Region, Support, Timeline, TimelinePoint, UploadSource,
};
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::ops::unary::Unary;
use fanout::tensor::DType;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

const N: usize = 8;
const MEMORY: u64 = 1 << 20;

/// A graph of inputs x and y and the result (x + y) * y, or ((x + y) * y)² + x if `square`. Returns the ids of the three.
fn graph(square: bool) -> (Arc<Graph>, [TensorId; 3]) {
    let mut b = Builder::new();
    let [x, y] = [(); 2].map(|()| b.leaf(DType::F32, [N, 1, 1, 1]).unwrap());
    let sum = b.node(Binary::Add, &[Some(x), Some(y)]).unwrap();
    let mut z = b.node(Binary::Mul, &[Some(sum), Some(y)]).unwrap();
    if square {
        z = b.node(Unary::Sqr, &[Some(z)]).unwrap();
        z = b.node(Binary::Add, &[Some(z), Some(x)]).unwrap();
    }
    (Arc::new(b.build()), [x, y, z])
}

fn region(graph: &Graph, buffer: &Buffer, id: TensorId) -> Region {
    let tensor = graph.tensor(id).unwrap();
    buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
}

fn upload(queue: &mut dyn Queue, dst: Region, values: [f32; N]) {
    queue.upload(dst, None, UploadSource::Borrowed(&values.map(f32::to_le_bytes).concat())).unwrap();
}

const X: [f32; N] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
const Y: [f32; N] = [0.5, 1.5, -1.0, 2.0, 0.0, 3.0, -2.0, 1.0];

/// The result of [`graph`] on a device.
fn computed(device: &dyn Device, square: bool) -> Vec<f32> {
    let (budget, (graph, [x, y, z])) = (MemoryBudget::new(MEMORY), graph(square));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    upload(&mut *queue, region(&graph, &buffer, x), X);
    upload(&mut *queue, region(&graph, &buffer, y), Y);
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let bytes = queue.download(region(&graph, &buffer, z)).unwrap().wait(test_deadline()).unwrap();
    floats(&bytes)
}

#[test]
fn unsupported_nodes_fall_back_to_the_cpu() {
    emulated("CUDAEMU_DEVICES=0", |mut registry| {
        let minimal = MinimalDevice::new("Minimal");
        registry.register(minimal.clone()).unwrap();
        let cpu = registry.by_name("CPU").unwrap().open(&small()).unwrap();
        for (square, nodes) in [(false, 2), (true, 3)] {
            let want = computed(&*cpu, square);
            for list in ["Minimal", "Minimal,CPU", "CPU,Minimal"] {
                let opened = registry.open(list, &small()).unwrap();
                let device = opened.iter().find(|device| device.info().name == "Minimal").unwrap();
                assert_eq!(computed(&**device, square), want, "{list}");
                assert_eq!(minimal.done.swap(0, Relaxed), nodes, "{list}");
            }
        }
    });
}

#[test]
fn without_fallback_unsupported_nodes_are_refused() {
    emulated("CUDAEMU_DEVICES=1", |registry| {
        let registry = with_minimal(registry);
        let (graph, _) = graph(true);
        for (list, fallback, runs) in [("Minimal", true, true), ("Minimal,CPU", false, false), ("0", false, true)] {
            let device = registry.open(list, &small().with_fallback(fallback)).unwrap().swap_remove(0);
            let supported = graph.nodes().iter().all(|node| device.support(graph.node_view(node).unwrap()).runs());
            let prepared = device.prepare(Arc::clone(&graph));
            assert_eq!((supported, prepared.is_ok()), (runs, runs), "{list}");
            if let Err(e) = prepared {
                assert!(matches!(&e, DeviceError::Unsupported(no) if no.op == OpCode::Sqr), "{e}");
                assert_eq!(e.to_string(), "SQR is not supported: only ADD and MUL are implemented");
            }
        }
        let refused =
            graph.nodes().iter().map(|node| graph.node_view(node).unwrap()).find(|node| node.op.code() == OpCode::Sqr);
        assert!(matches!(MinimalDevice::new("Bare").support(refused.unwrap()), Support::No(_)));
    });
}

/// Two queues: the first waits for the timeline `gate`, the second for the first.
struct QueueChain {
    gate: Arc<Timeline>,
    queues: [Box<dyn Queue>; 2],
    buffers: [Buffer; 2],
}

fn queue_chain(devices: [&dyn Device; 2]) -> QueueChain {
    let budget = MemoryBudget::new(MEMORY);
    let gate = Timeline::new();
    let mut queues = devices.map(|device| device.queue(&budget).unwrap());
    let buffers = devices.map(|device| device.alloc(4 * N as u64, &budget).unwrap());
    queues[0].wait(&TimelinePoint::new(&gate, 1)).unwrap();
    upload(&mut *queues[0], buffers[0].whole(), X);
    let first = queues[0].mark();
    queues[1].wait(&first).unwrap();
    upload(&mut *queues[1], buffers[1].whole(), Y);
    QueueChain { gate, queues, buffers }
}

#[test]
fn points_order_its_queues_and_those_of_others() {
    let (one, two) = (MinimalDevice::new("One"), MinimalDevice::new("Two"));
    let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap();
    for devices in [[&*one as &dyn Device, &*one], [&*one, &*two], [&*one, &*cpu], [&*cpu, &*one]] {
        let QueueChain { gate, queues: [mut first, mut second], buffers } = queue_chain(devices);
        let (end, read) = (second.mark(), second.download(buffers[1].whole()).unwrap());
        assert_eq!(end.poll(), Ok(false));
        assert!(matches!(end.wait(Some(Instant::now())), Err(DeviceError::Deadline(_))));
        gate.advance(1);
        assert_eq!(end.wait(test_deadline()), Ok(()));
        assert_eq!(floats(&read.wait(test_deadline()).unwrap()), Y);
        assert_eq!(floats(&first.download(buffers[0].whole()).unwrap().wait(test_deadline()).unwrap()), X);
        // Devices of one implementation copy directly.
        let direct =
            second.copy_from(buffers[0].whole(), buffers[1].whole(), Some(&first.mark())).unwrap().is_submitted();
        assert_eq!(direct, devices.iter().all(|device| device.info().name != "CPU"));
        if direct {
            assert_eq!(floats(&second.download(buffers[1].whole()).unwrap().wait(test_deadline()).unwrap()), X);
        }
    }
}

#[test]
fn a_failure_sticks_and_reaches_all_waiters() {
    let (one, two) = (MinimalDevice::new("One"), MinimalDevice::new("Two"));
    let QueueChain { gate, queues: [mut first, mut second], buffers } = queue_chain([&*one, &*two]);
    let (points, read) = ([first.mark(), second.mark()], second.download(buffers[1].whole()).unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    points[0].on_reached(move |outcome| sender.send(outcome).unwrap()).detach();
    let failure = DeviceError::Bug("injected failure".to_owned());
    gate.fail(failure.clone());
    assert!(receiver.try_recv().is_err(), "the timeline was not polled");
    assert_eq!(read.wait(test_deadline()), Err(failure.clone()));
    for point in points {
        assert_eq!(point.wait(test_deadline()), Err(failure.clone()));
    }
    assert_eq!(receiver.try_recv(), Ok(Err(failure.clone())));
    assert_eq!(first.fill(buffers[0].whole(), 0), Err(failure.clone()));
    assert_eq!(second.mark().wait(test_deadline()), Err(failure));
}

#[test]
fn dropping_a_queue_fails_its_points() {
    let one = MinimalDevice::new("One");
    let QueueChain { gate, queues: [first, mut second], buffers: _ } = queue_chain([&*one, &*one]);
    let end = second.mark();
    drop(first);
    gate.advance(1);
    assert_eq!(end.wait(test_deadline()), Err(DeviceError::Ended));
    let foreign = MinimalDevice::new("Two").alloc(4, &MemoryBudget::new(MEMORY)).unwrap();
    let mut fresh = one.queue(&MemoryBudget::new(MEMORY)).unwrap();
    assert_eq!(fresh.fill(foreign.whole(), 0), Err(DeviceError::Misuse("a region of another device")));
}
