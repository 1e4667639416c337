//! Real devices of one domain and of several: bytes between domains go through the host, while runs follow each other.

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Device, Source};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::sched::{ObservedNode, Observer, Options, PreparedPlan, SchedError, Scheduler, Task, TaskBuilder, compare};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::isolated_device::IsolatedDevice;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Of each device.
pub(super) const MEMORY: u64 = 1 << 24;

pub(super) fn cpus(n: usize) -> Vec<Arc<dyn Device>> {
    let cpu = |i| CpuDevice::new(&format!("CPU{i}"), 1, Path::Exact, MEMORY).unwrap() as Arc<dyn Device>;
    (0..n).map(cpu).collect()
}

fn isolated_devices(n: usize) -> Vec<Arc<dyn Device>> {
    (0..n).map(|i| IsolatedDevice::new(&format!("I{i}"), MEMORY).shared()).collect()
}

const WIDTH: usize = 32;

/// Three layers, each with stored tensors of its own: `x = x + w * x`, and what a layer saw becomes rows of its cache, of
/// which the first two are added.
pub(super) struct LayeredNetwork {
    task: Arc<Task>,
    inputs: [TensorId; 2],
    y: TensorId,
    scheduler: Scheduler,
}

impl LayeredNetwork {
    /// With the layers on these devices of a list.
    pub(super) fn new(devices: Vec<Arc<dyn Device>>, homes: [usize; 3], depth: usize) -> LayeredNetwork {
        let account = Account::new(MEMORY);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [WIDTH, 2, 1, 1]).unwrap();
        let row = b.input("row", DType::I64, [2, 1, 1, 1]).unwrap();
        let mut h = x;
        for (layer, home) in homes.into_iter().enumerate() {
            let mut rng = fastrand::Rng::with_seed(layer as u64);
            let mut stored = |name: String, ne: [usize; 4], scale: f32| {
                let desc = TensorDesc::contiguous(DType::F32, ne).unwrap();
                let device = &devices[home];
                let region = device.alloc(desc.extent() as u64, &account).unwrap().whole();
                let values: Vec<f32> = (0..desc.elements()).map(|_| scale * (rng.f32() - 0.5)).collect();
                let mut queue = device.queue(&account).unwrap();
                let bytes = Source::Borrowed(bytemuck::cast_slice(&values));
                queue.upload(region.clone(), Some(&desc), bytes).unwrap();
                queue.mark().wait(None).unwrap();
                b.stored(name, desc, home, Some(region)).unwrap()
            };
            let w = stored(format!("w{layer}"), [WIDTH, WIDTH, 1, 1], 0.2);
            let cache = stored(format!("cache{layer}"), [WIDTH, 8, 1, 1], 0.0);
            let product = b.node(MulMat::PLAIN, &[Some(w), Some(h)]).unwrap();
            let sum = b.node(Binary::Add, &[Some(product), Some(h)]).unwrap();
            b.node_onto(Rows::SetRows, &[Some(sum), Some(row), Some(cache)], cache).unwrap();
            let first = b.view(cache, TensorDesc::contiguous(DType::F32, [WIDTH, 2, 1, 1]).unwrap(), 0).unwrap();
            h = b.node(Binary::Add, &[Some(sum), Some(first)]).unwrap();
            b.name(h, format!("h{layer}"));
        }
        let y = b.node(Unary::Sqr, &[Some(h)]).unwrap();
        b.name(y, "y");
        b.output(y).unwrap();
        let options = Options::default().with_depth(depth);
        let scheduler = Scheduler::new(devices, options, &account).unwrap();
        LayeredNetwork { task: Arc::new(b.build().unwrap()), inputs: [x, row], y, scheduler }
    }

    pub(super) fn build(&mut self) -> PreparedPlan {
        self.scheduler.build(&self.task).unwrap()
    }

    /// Submits some runs, each with other inputs, and only then waits for their results.
    pub(super) fn results(&mut self, prepared: &mut PreparedPlan, runs: std::ops::Range<u64>) -> Vec<Vec<f32>> {
        let mut tickets = Vec::new();
        for run in runs {
            let (x, rows) = input(run);
            let [a, b] = self.inputs;
            let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
            self.scheduler.submit(prepared, &inputs).unwrap();
            tickets.push(self.scheduler.read(prepared, self.y).unwrap());
        }
        tickets.into_iter().map(|ticket| floats(&ticket.wait(None).unwrap())).collect()
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn input(run: u64) -> (Vec<f32>, [i64; 2]) {
    let mut rng = fastrand::Rng::with_seed(1000 + run);
    let first = rng.i64(0..8);
    ((0..2 * WIDTH).map(|_| rng.f32() - 0.5).collect(), [first, (first + rng.i64(1..8)) % 8])
}

/// On one device, one run after another.
pub(super) fn expected_results(runs: u64) -> Vec<Vec<f32>> {
    let mut network = LayeredNetwork::new(cpus(1), [0; 3], 1);
    let mut prepared = network.build();
    assert_eq!(prepared.plan().splits(), 1);
    network.results(&mut prepared, 0..runs)
}

#[test]
fn results_do_not_depend_on_where_and_how_deep() {
    let wanted = expected_results(20);
    for depth in [1, 2, 4] {
        for (name, devices) in
            [("cpus", cpus(3)), ("islands", isolated_devices(3)), ("both", [cpus(2), isolated_devices(1)].concat())]
        {
            let mut network = LayeredNetwork::new(devices, [0, 1, 2], depth);
            let mut prepared = network.build();
            assert_eq!((prepared.plan().splits(), prepared.plan().copies()), (3, 2), "{name}");
            assert_eq!(network.results(&mut prepared, 0..20), wanted, "{name}, depth {depth}");
        }
        // There and back again: the cache of the second layer is elsewhere.
        let mut network = LayeredNetwork::new(isolated_devices(2), [0, 1, 0], depth);
        let mut prepared = network.build();
        assert_eq!(network.results(&mut prepared, 0..20), wanted, "and back, depth {depth}");
    }
}

/// Plans of one scheduler take turns on the same memory.
#[test]
fn plans_follow_each_other() {
    let wanted = expected_results(24);
    for depth in [1, 3] {
        let mut network = LayeredNetwork::new([cpus(2), isolated_devices(1)].concat(), [0, 1, 2], depth);
        let mut plans = [network.build(), network.build()];
        let mut got = Vec::new();
        for (turn, start) in (0..24).step_by(3).enumerate() {
            got.extend(network.results(&mut plans[turn % 2], start..start + 3));
        }
        assert_eq!(got, wanted, "depth {depth}");
    }
}

#[test]
fn mistakes_are_told_before_anything_runs() {
    let mut network = LayeredNetwork::new(cpus(2), [0, 1, 0], 1);
    let mut prepared = network.build();
    let (x, rows) = input(0);
    let [a, b] = network.inputs;
    let (x, rows): (&[u8], &[u8]) = (bytemuck::cast_slice(&x), bytemuck::cast_slice(&rows));
    for (inputs, text) in [
        (vec![(a, x)], "input \"row\" takes 16 bytes and was given none"),
        (vec![(a, &x[4..]), (b, rows)], "input \"x\" takes 256 bytes and was given 252"),
    ] {
        let error = network.scheduler.submit(&mut prepared, &inputs).unwrap_err();
        assert_eq!(error.to_string(), text);
    }
    let unread = network.scheduler.read(&prepared, a).unwrap_err();
    assert!(matches!(unread, SchedError::NotAnOutput { .. }), "{unread}");
    let mut other = LayeredNetwork::new(cpus(2), [0, 1, 0], 1);
    let foreign = other.scheduler.submit(&mut prepared, &[(a, x), (b, rows)]).unwrap_err();
    assert!(matches!(foreign, SchedError::ForeignPlan), "{foreign}");
    assert_eq!(network.scheduler.transfer_counts().runs, 0);
    network.scheduler.submit(&mut prepared, &[(a, x), (b, rows)]).unwrap();
    network.scheduler.synchronize(None).unwrap();
    assert_eq!(network.scheduler.transfer_counts().runs, 1);
}

/// Sees some nodes, and stops at one.
struct RecordingObserver {
    asked: usize,
    shown: Vec<(String, usize)>,
    last: &'static str,
}

impl Observer for RecordingObserver {
    fn selects(&mut self, node: ObservedNode<'_>) -> bool {
        self.asked += 1;
        node.name.starts_with('h')
    }

    fn on_result(&mut self, node: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()> {
        assert_eq!(bytes.len(), node.desc.extent());
        self.shown.push((node.name.to_owned(), node.device));
        if node.name == self.last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn observers_see_nodes_and_may_stop() {
    let wanted = expected_results(4);
    for depth in [1, 4] {
        let mut network = LayeredNetwork::new([cpus(1), isolated_devices(2)].concat(), [0, 1, 2], depth);
        let mut prepared = network.build();
        for (run, last) in [(0, ""), (1, ""), (2, "h1"), (3, "")] {
            let (x, rows) = input(run);
            let [a, b] = network.inputs;
            let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
            let mut watcher = RecordingObserver { asked: 0, shown: Vec::new(), last };
            let flow = network.scheduler.run_observed(&mut prepared, &inputs, &mut watcher).unwrap();
            let names = [("h0".to_owned(), 0), ("h1".to_owned(), 1), ("h2".to_owned(), 2)];
            if last.is_empty() {
                assert_eq!((flow, watcher.asked, &*watcher.shown), (ControlFlow::Continue(()), 13, &names[..]));
            } else {
                assert_eq!((flow, watcher.asked, &*watcher.shown), (ControlFlow::Break(()), 8, &names[..2]));
            }
            let result = network.scheduler.read(&prepared, network.y);
            if flow.is_break() {
                assert!(matches!(result, Err(SchedError::OutputExpired { .. })));
                continue;
            }
            let got = floats(&result.unwrap().wait(None).unwrap());
            // The third layer has not seen the third run's rows, so what follows is the network's without it.
            assert!(run >= 2 || got == wanted[run as usize], "run {run}");
        }
    }
}

#[test]
fn two_devices_are_compared_node_by_node() {
    let mut network = LayeredNetwork::new(cpus(2), [0, 1, 0], 1);
    let mut prepared = network.build();
    let before = network.results(&mut prepared, 0..3);
    let (x, rows) = input(3);
    let [a, b] = network.inputs;
    let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
    let reference = CpuDevice::new("reference", 2, Path::Exact, MEMORY).unwrap() as Arc<dyn Device>;
    let account = Account::new(MEMORY);
    let mut seen = Vec::new();
    let mut tell = |node: ObservedNode<'_>, here: &[u8], there: &[u8]| {
        assert_eq!(here, there, "{node:?}");
        seen.push(node.node);
        if node.node == 9 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    compare((&mut network.scheduler, &mut prepared), &reference, &account, &inputs, &mut tell).unwrap();
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
    // All of the reference's memory is given back, once the threads of its queues have ended.
    let deadline = Instant::now() + Duration::from_secs(20);
    while account.used() > 0 {
        assert!(Instant::now() < deadline, "{} bytes are still held", account.used());
        std::thread::yield_now();
    }
    assert_eq!(before, expected_results(3));
    // A reference without the room is told before anything is copied.
    let small = CpuDevice::new("small", 1, Path::Exact, 4096).unwrap() as Arc<dyn Device>;
    let full = compare((&mut network.scheduler, &mut prepared), &small, &account, &inputs, &mut |_, _, _| {
        ControlFlow::Continue(())
    });
    assert!(matches!(full, Err(SchedError::NotEnoughMemory { .. })), "{full:?}");
}

#[test]
fn an_abort_ends_what_runs_and_a_reset_begins_anew() {
    let mut network = LayeredNetwork::new([cpus(1), isolated_devices(1)].concat(), [0, 1, 0], 2);
    let mut prepared = network.build();
    let flag = network.scheduler.abort_flag();
    let (x, rows) = input(0);
    let [a, b] = network.inputs;
    let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
    flag.store(true, Ordering::Relaxed);
    let aborted = network.scheduler.run(&mut prepared, &inputs).unwrap_err();
    assert!(matches!(aborted, SchedError::Aborted), "{aborted}");
    flag.store(false, Ordering::Relaxed);
    network.scheduler.reset();
    assert_eq!(network.scheduler.arena_bytes(), [0, 0]);
    assert_eq!(network.results(&mut prepared, 0..5), expected_results(5));
}
