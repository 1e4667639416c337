//! CPU devices in one and in several copy domains (devices in one domain copy without the host): host-staged
//! copies between domains, several plans, observers, comparison and abort.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, ForwardQueue, MemoryBudget, Program, Queue, Region, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::sched::{ObservedNode, Observer, Options, PreparedPlan, SchedError, Scheduler, Task, TaskBuilder, compare};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::forwarding_device::ForwardingDevice;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Memory of each device in bytes.
pub(super) const MEMORY: u64 = 1 << 24;

pub(super) fn cpus(n: usize) -> Vec<Arc<dyn Device>> {
    let cpu = |i| CpuDevice::new(&format!("CPU{i}"), 1, MathMode::Exact, MEMORY).unwrap() as Arc<dyn Device>;
    (0..n).map(cpu).collect()
}

fn isolated_devices(n: usize) -> Vec<Arc<dyn Device>> {
    (0..n).map(|i| ForwardingDevice::isolated(&format!("I{i}"), MEMORY).shared()).collect()
}

const WIDTH: usize = 32;

/// A network of three layers. Each layer has its own weights and cache: it computes `s = x + w * x`, writes `s` to two rows of
/// its cache, and returns `s` plus the first two rows of the cache.
pub(super) struct LayeredNetwork {
    task: Arc<Task>,
    inputs: [TensorId; 2],
    y: TensorId,
    scheduler: Scheduler,
}

impl LayeredNetwork {
    /// Layer `i` is on device `homes[i]`.
    pub(super) fn new(devices: Vec<Arc<dyn Device>>, homes: [usize; 3], depth: usize) -> LayeredNetwork {
        let budget = MemoryBudget::new(MEMORY);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [WIDTH, 2, 1, 1]).unwrap();
        let row = b.input("row", DType::I64, [2, 1, 1, 1]).unwrap();
        let mut h = x;
        for (layer, home) in homes.into_iter().enumerate() {
            let mut rng = fastrand::Rng::with_seed(layer as u64);
            let mut stored = |name: String, ne: [usize; 4], scale: f32| {
                let desc = TensorDesc::contiguous(DType::F32, ne).unwrap();
                let device = &devices[home];
                let region = device.alloc(desc.extent() as u64, &budget).unwrap().whole();
                let values: Vec<f32> = (0..desc.elements()).map(|_| scale * (rng.f32() - 0.5)).collect();
                let mut queue = device.queue(&budget).unwrap();
                let bytes = UploadSource::Borrowed(bytemuck::cast_slice(&values));
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
        let scheduler = Scheduler::new(devices, options, &budget).unwrap();
        LayeredNetwork { task: Arc::new(b.build().unwrap()), inputs: [x, row], y, scheduler }
    }

    pub(super) fn build(&mut self) -> PreparedPlan {
        self.scheduler.build(&self.task).unwrap()
    }

    /// Submits some runs, each with different inputs, and only then waits for their results.
    pub(super) fn results(&mut self, prepared: &mut PreparedPlan, runs: std::ops::Range<u64>) -> Vec<Vec<f32>> {
        let mut pending_reads = Vec::new();
        for run in runs {
            let (x, rows) = input(run);
            let [a, b] = self.inputs;
            let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
            self.scheduler.submit(prepared, &inputs).unwrap();
            pending_reads.push(self.scheduler.read(prepared, self.y).unwrap());
        }
        pending_reads.into_iter().map(|pending_read| floats(&pending_read.wait(None).unwrap())).collect()
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

/// The results of one device that executes the runs one by one.
pub(super) fn expected_results(runs: u64) -> Vec<Vec<f32>> {
    let mut network = LayeredNetwork::new(cpus(1), [0; 3], 1);
    let mut prepared = network.build();
    assert_eq!(prepared.plan().splits(), 1);
    network.results(&mut prepared, 0..runs)
}

#[test]
fn results_do_not_depend_on_devices_and_depth() {
    let wanted = expected_results(20);
    for depth in [1, 2, 4] {
        for (name, devices) in
            [("cpus", cpus(3)), ("isolated", isolated_devices(3)), ("both", [cpus(2), isolated_devices(1)].concat())]
        {
            let mut network = LayeredNetwork::new(devices, [0, 1, 2], depth);
            let mut prepared = network.build();
            assert_eq!((prepared.plan().splits(), prepared.plan().copies()), (3, 2), "{name}");
            assert_eq!(network.results(&mut prepared, 0..20), wanted, "{name}, depth {depth}");
        }
        // The second of three layers is on another device, so the data returns to the first device.
        let mut network = LayeredNetwork::new(isolated_devices(2), [0, 1, 0], depth);
        let mut prepared = network.build();
        assert_eq!(network.results(&mut prepared, 0..20), wanted, "two devices, depth {depth}");
    }
}

/// Two plans of one scheduler alternate; they share the arenas.
#[test]
fn alternating_plans_compute_the_same_results() {
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
fn invalid_calls_fail_before_anything_is_submitted() {
    let mut network = LayeredNetwork::new(cpus(2), [0, 1, 0], 1);
    let mut prepared = network.build();
    let (x, rows) = input(0);
    let [a, b] = network.inputs;
    let (x, rows): (&[u8], &[u8]) = (bytemuck::cast_slice(&x), bytemuck::cast_slice(&rows));
    for (inputs, text) in [
        (vec![(a, x)], "input \"row\" needs 16 bytes, got none"),
        (vec![(a, &x[4..]), (b, rows)], "input \"x\" needs 256 bytes, got 252"),
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

/// Records the results of nodes whose names start with `h`, and ends the run at node `last`.
struct RecordingObserver {
    selections: usize,
    results: Vec<(String, usize)>,
    last: &'static str,
}

impl Observer for RecordingObserver {
    fn selects(&mut self, node: ObservedNode<'_>) -> bool {
        self.selections += 1;
        node.name.starts_with('h')
    }

    fn on_result(&mut self, node: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()> {
        assert_eq!(bytes.len(), node.desc.extent());
        self.results.push((node.name.to_owned(), node.device));
        if node.name == self.last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn observers_receive_selected_nodes_and_can_end_the_run() {
    let wanted = expected_results(4);
    for depth in [1, 4] {
        let mut network = LayeredNetwork::new([cpus(1), isolated_devices(2)].concat(), [0, 1, 2], depth);
        let mut prepared = network.build();
        for (run, last) in [(0, ""), (1, ""), (2, "h1"), (3, "")] {
            let (x, rows) = input(run);
            let [a, b] = network.inputs;
            let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
            let mut observer = RecordingObserver { selections: 0, results: Vec::new(), last };
            let flow = network.scheduler.run_observed(&mut prepared, &inputs, &mut observer).unwrap();
            let names = [("h0".to_owned(), 0), ("h1".to_owned(), 1), ("h2".to_owned(), 2)];
            // 4 nodes in each of 3 layers, and y: 13; the first two layers: 8.
            if last.is_empty() {
                assert_eq!(
                    (flow, observer.selections, &*observer.results),
                    (ControlFlow::Continue(()), 13, &names[..])
                );
            } else {
                assert_eq!((flow, observer.selections, &*observer.results), (ControlFlow::Break(()), 8, &names[..2]));
            }
            let result = network.scheduler.read(&prepared, network.y);
            if flow.is_break() {
                assert!(matches!(result, Err(SchedError::OutputExpired { .. })));
                continue;
            }
            let got = floats(&result.unwrap().wait(None).unwrap());
            // Run 2 ended before the third layer wrote its cache, so later results differ from the complete network's.
            assert!(run >= 2 || got == wanted[run as usize], "run {run}");
        }
    }
}

#[test]
fn compare_reports_each_node_and_frees_the_reference_memory() {
    let mut network = LayeredNetwork::new(cpus(2), [0, 1, 0], 1);
    let mut prepared = network.build();
    let before = network.results(&mut prepared, 0..3);
    let (x, rows) = input(3);
    let [a, b] = network.inputs;
    let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
    let reference = CpuDevice::new("reference", 2, MathMode::Exact, MEMORY).unwrap() as Arc<dyn Device>;
    let budget = MemoryBudget::new(MEMORY);
    let mut seen = Vec::new();
    let mut report = |node: ObservedNode<'_>, here: &[u8], there: &[u8]| {
        assert_eq!(here, there, "{node:?}");
        seen.push(node.node);
        // Ends the comparison after 10 of the 13 nodes.
        if node.node == 9 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    compare((&mut network.scheduler, &mut prepared), &reference, &budget, &inputs, &mut report).unwrap();
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
    // All memory of the reference is freed once the threads of its queues have ended.
    let deadline = Instant::now() + Duration::from_secs(20);
    while budget.used() > 0 {
        assert!(Instant::now() < deadline, "{} bytes are still held", budget.used());
        std::thread::yield_now();
    }
    assert_eq!(before, expected_results(3));
    // A reference with too little memory is an error before anything is copied.
    let small = CpuDevice::new("small", 1, MathMode::Exact, 4096).unwrap() as Arc<dyn Device>;
    let refused = compare((&mut network.scheduler, &mut prepared), &small, &budget, &inputs, &mut |_, _, _| {
        ControlFlow::Continue(())
    });
    assert!(matches!(refused, Err(SchedError::NotEnoughMemory { .. })), "{refused:?}");
}

/// A queue that does not run its first program: the node's result is whatever its memory holds.
struct SkipsFirst {
    inner: Box<dyn Queue>,
    has_skipped: bool,
}

impl ForwardQueue for SkipsFirst {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.inner)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        if std::mem::replace(&mut self.has_skipped, true) { self.inner.run(program, bindings) } else { Ok(()) }
    }
}

/// A node whose sources are wrong on its own device computes from those of the reference.
#[test]
fn compare_reports_exactly_the_node_that_computes_wrongly() {
    let wrong = ForwardingDevice::isolated("wrong", MEMORY)
        .with_queues(|inner| Ok(Box::new(SkipsFirst { inner, has_skipped: false })));
    for (second, expected) in [(cpus(1).remove(0), vec![]), (wrong.shared(), vec![4])] {
        let mut network = LayeredNetwork::new([cpus(1), vec![second]].concat(), [0, 1, 0], 1);
        let mut prepared = network.build();
        let (x, rows) = input(0);
        let [a, b] = network.inputs;
        let inputs = [(a, bytemuck::cast_slice(&x)), (b, bytemuck::cast_slice(&rows))];
        let reference = CpuDevice::new("reference", 1, MathMode::Exact, MEMORY).unwrap() as Arc<dyn Device>;
        let (mut nodes, mut differing) = (0, Vec::new());
        let mut report = |node: ObservedNode<'_>, here: &[u8], there: &[u8]| {
            nodes += 1;
            if here != there {
                differing.push(node.node);
            }
            ControlFlow::Continue(())
        };
        let budget = MemoryBudget::new(MEMORY);
        compare((&mut network.scheduler, &mut prepared), &reference, &budget, &inputs, &mut report).unwrap();
        // Node 4 is the first of the second layer: its product with the weights.
        assert_eq!((nodes, differing), (13, expected));
    }
}

#[test]
fn an_abort_fails_the_run_and_a_reset_makes_the_scheduler_usable() {
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
