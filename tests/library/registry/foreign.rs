//! A device that was written outside of the crate, at work: by itself, behind a name, and beside others.

use super::minimal_device::MinimalDevice;
use super::{emulated, floats, small, soon, with_minimal};
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, DeviceError, Point, Queue, Region, Source, Support, Timeline};
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

/// x, y, and what becomes of them: (x + y) * y, or ((x + y) * y)² + x.
fn graph(square: bool) -> (Arc<Graph>, [TensorId; 3]) {
    let mut b = Builder::new();
    let [x, y] = [(); 2].map(|()| b.leaf(DType::F32, [N, 1, 1, 1]).unwrap());
    let sum = b.node(Binary::Add, &[Some(x), Some(y)]).unwrap();
    let mut z = b.node(Binary::Mul, &[Some(sum), Some(y)]).unwrap();
    if square {
        z = b.node(Unary::Sqr, &[Some(z)]).unwrap();
        z = b.node(Binary::Add, &[Some(z), Some(x)]).unwrap();
    }
    (Arc::new(b.build().unwrap()), [x, y, z])
}

fn region(graph: &Graph, buffer: &Buffer, id: TensorId) -> Region {
    let tensor = graph.tensor(id).unwrap();
    buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
}

fn upload(queue: &mut dyn Queue, dst: Region, values: [f32; N]) {
    queue.upload(dst, None, Source::Borrowed(&values.map(f32::to_le_bytes).concat())).unwrap();
}

const X: [f32; N] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
const Y: [f32; N] = [0.5, 1.5, -1.0, 2.0, 0.0, 3.0, -2.0, 1.0];

/// What a device makes of [`graph`].
fn computed(device: &dyn Device, square: bool) -> Vec<f32> {
    let (account, (graph, [x, y, z])) = (Account::new(MEMORY), graph(square));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
    let mut queue = device.queue(&account).unwrap();
    upload(&mut *queue, region(&graph, &buffer, x), X);
    upload(&mut *queue, region(&graph, &buffer, y), Y);
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let bytes = queue.download(region(&graph, &buffer, z)).unwrap().wait(soon()).unwrap();
    floats(&bytes)
}

#[test]
fn it_computes_what_the_cpu_does_and_leaves_the_rest_to_it() {
    emulated("CUDAEMU_DEVICES=0", |mut registry| {
        let abacus = MinimalDevice::new("Abacus");
        registry.register(abacus.clone()).unwrap();
        let cpu = registry.by_name("CPU").unwrap().open(&small()).unwrap();
        for (square, nodes) in [(false, 2), (true, 3)] {
            let want = computed(&*cpu, square);
            for list in ["Abacus", "Abacus,CPU", "CPU,Abacus"] {
                let opened = registry.open(list, &small()).unwrap();
                let device = opened.iter().find(|device| device.info().name == "Abacus").unwrap();
                assert_eq!(computed(&**device, square), want, "{list}");
                assert_eq!(abacus.done.swap(0, Relaxed), nodes, "{list}");
            }
        }
    });
}

#[test]
fn bare_it_refuses_what_it_does_not_run() {
    emulated("CUDAEMU_DEVICES=1", |registry| {
        let registry = with_minimal(registry);
        let (graph, _) = graph(true);
        for (list, fallback, runs) in [("Abacus", true, true), ("Abacus,CPU", false, false), ("0", false, true)] {
            let device = registry.open(list, &small().with_fallback(fallback)).unwrap().swap_remove(0);
            let supported = graph.nodes().iter().all(|node| device.support(graph.node_view(node).unwrap()).runs());
            let prepared = device.prepare(Arc::clone(&graph));
            assert_eq!((supported, prepared.is_ok()), (runs, runs), "{list}");
            if let Err(e) = prepared {
                assert!(matches!(&e, DeviceError::Unsupported(no) if no.op == OpCode::Sqr), "{e}");
                assert_eq!(e.to_string(), "SQR is not supported: an abacus adds and multiplies");
            }
        }
        let refused =
            graph.nodes().iter().map(|node| graph.node_view(node).unwrap()).find(|node| node.op.code() == OpCode::Sqr);
        assert!(matches!(MinimalDevice::new("Bare").support(refused.unwrap()), Support::No(_)));
    });
}

/// Two queues, of which the first waits for a gate and the second for the first.
struct Row {
    gate: Arc<Timeline>,
    queues: [Box<dyn Queue>; 2],
    buffers: [Buffer; 2],
}

fn row(devices: [&dyn Device; 2]) -> Row {
    let account = Account::new(MEMORY);
    let gate = Timeline::new();
    let mut queues = devices.map(|device| device.queue(&account).unwrap());
    let buffers = devices.map(|device| device.alloc(4 * N as u64, &account).unwrap());
    queues[0].wait(&Point::new(&gate, 1)).unwrap();
    upload(&mut *queues[0], buffers[0].whole(), X);
    let first = queues[0].mark();
    queues[1].wait(&first).unwrap();
    upload(&mut *queues[1], buffers[1].whole(), Y);
    Row { gate, queues, buffers }
}

#[test]
fn points_order_its_queues_and_those_of_others() {
    let (one, two) = (MinimalDevice::new("One"), MinimalDevice::new("Two"));
    let cpu = CpuDevice::new("CPU", 1, Path::Exact, MEMORY).unwrap();
    for devices in [[&*one as &dyn Device, &*one], [&*one, &*two], [&*one, &*cpu], [&*cpu, &*one]] {
        let Row { gate, queues: [mut first, mut second], buffers } = row(devices);
        let (end, ticket) = (second.mark(), second.download(buffers[1].whole()).unwrap());
        assert_eq!(end.poll(), Ok(false));
        assert!(matches!(end.wait(Some(Instant::now())), Err(DeviceError::Deadline(_))));
        gate.advance(1);
        assert_eq!(end.wait(soon()), Ok(()));
        assert_eq!(floats(&ticket.wait(soon()).unwrap()), Y);
        assert_eq!(floats(&first.download(buffers[0].whole()).unwrap().wait(soon()).unwrap()), X);
        // Between two of a kind bytes go directly.
        let direct =
            second.copy_from(buffers[0].whole(), buffers[1].whole(), Some(&first.mark())).unwrap().is_submitted();
        assert_eq!(direct, devices.iter().all(|device| device.info().name != "CPU"));
        if direct {
            assert_eq!(floats(&second.download(buffers[1].whole()).unwrap().wait(soon()).unwrap()), X);
        }
    }
}

#[test]
fn its_failures_stick_and_reach_whoever_waits() {
    let (one, two) = (MinimalDevice::new("One"), MinimalDevice::new("Two"));
    let Row { gate, queues: [mut first, mut second], buffers } = row([&*one, &*two]);
    let (points, ticket) = ([first.mark(), second.mark()], second.download(buffers[1].whole()).unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    points[0].when(move |outcome| tell.send(outcome).unwrap());
    let failure = DeviceError::Bug("the gate fell".to_owned());
    gate.fail(failure.clone());
    assert!(told.try_recv().is_err(), "nobody has looked");
    assert_eq!(ticket.wait(soon()), Err(failure.clone()));
    for point in points {
        assert_eq!(point.wait(soon()), Err(failure.clone()));
    }
    assert_eq!(told.try_recv(), Ok(Err(failure.clone())));
    assert_eq!(first.fill(buffers[0].whole(), 0), Err(failure.clone()));
    assert_eq!(second.mark().wait(soon()), Err(failure));
}

#[test]
fn a_dropped_queue_releases_whoever_waits_for_it() {
    let one = MinimalDevice::new("One");
    let Row { gate, queues: [first, mut second], buffers: _ } = row([&*one, &*one]);
    let end = second.mark();
    drop(first);
    gate.advance(1);
    assert_eq!(end.wait(soon()), Err(DeviceError::Ended));
    let foreign = MinimalDevice::new("Two").alloc(4, &Account::new(MEMORY)).unwrap();
    let mut fresh = one.queue(&Account::new(MEMORY)).unwrap();
    assert_eq!(fresh.fill(foreign.whole(), 0), Err(DeviceError::Misuse("a region of another device")));
}
