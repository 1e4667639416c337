//! Interleaving tests: for many seeds, gated devices execute the queues in random orders. The results must equal the results of
//! one device, at every depth, and the gate must detect no race.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, Domain, MemoryBudget, PendingRead, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::Op;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::sched::{Options, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::gated_device::{Gate, GatedDevice};
use std::sync::Arc;

/// Memory of each device in bytes.
const MEMORY: u64 = 1 << 24;

/// Runs of each schedule.
const RUNS: u64 = 6;

/// Elements of a row.
const WIDTH: usize = 8;

/// Builder of a task with its nodes pinned to devices.
struct TaskFixture {
    b: TaskBuilder,
    devices: Vec<Arc<dyn Device>>,
    budget: Arc<MemoryBudget>,
    inputs: Vec<(TensorId, InputValues)>,
    /// Tensors that are read after each run.
    outputs: Vec<TensorId>,
    stored: u64,
}

/// Kind of random values for an input.
#[derive(Clone, Copy)]
enum InputValues {
    /// This many floats.
    Floats(usize),
    /// `(n, of)`: `n` distinct row indices below `of`, as I64.
    Rows(usize, usize),
    /// `(n, of)`: `n` expert ids below `of`, as I32.
    Experts(usize, usize),
}

impl TaskFixture {
    fn new(devices: &[Arc<dyn Device>]) -> TaskFixture {
        let (b, budget) = (TaskBuilder::new(), MemoryBudget::new(MEMORY));
        TaskFixture { b, devices: devices.to_vec(), budget, inputs: Vec::new(), outputs: Vec::new(), stored: 0 }
    }

    /// An input matrix of floats.
    fn input(&mut self, rows: usize) -> TensorId {
        let id = self.b.input("x", DType::F32, [WIDTH, rows, 1, 1]).unwrap();
        self.inputs.push((id, InputValues::Floats(WIDTH * rows)));
        id
    }

    fn rows(&mut self, n: usize, of: usize) -> TensorId {
        let id = self.b.input("rows", DType::I64, [n, 1, 1, 1]).unwrap();
        self.inputs.push((id, InputValues::Rows(n, of)));
        id
    }

    fn experts(&mut self, n: usize, of: usize) -> TensorId {
        let id = self.b.input("experts", DType::I32, [1, n, 1, 1]).unwrap();
        self.inputs.push((id, InputValues::Experts(n, of)));
        id
    }

    /// A stored tensor of random floats on a device.
    fn stored(&mut self, on: usize, ne: [usize; 4]) -> TensorId {
        let (on, desc) = (on % self.devices.len(), TensorDesc::contiguous(DType::F32, ne).unwrap());
        let region = self.devices[on].alloc(desc.extent() as u64, &self.budget).unwrap().whole();
        let mut queue = self.devices[on].queue(&self.budget).unwrap();
        self.stored += 1;
        let values = floats(self.stored, desc.elements());
        queue.upload(region.clone(), Some(&desc), UploadSource::Borrowed(&values)).unwrap();
        queue.mark().wait(None).unwrap();
        self.b.stored("stored", desc, on, Some(region)).unwrap()
    }

    fn node(&mut self, on: usize, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        let srcs: Vec<_> = srcs.iter().copied().map(Some).collect();
        let id = self.b.node(op, &srcs).unwrap();
        self.b.pin(on % self.devices.len()).unwrap();
        id
    }

    /// `x = a * x + b`
    fn scaled(&mut self, on: usize, scale: f32, bias: f32, of: TensorId) -> TensorId {
        self.node(on, Unary::Scale { scale, bias }, &[of])
    }

    fn set_rows(&mut self, on: usize, rows: TensorId, ids: TensorId, of: TensorId) -> TensorId {
        let id = self.b.node_onto(Rows::SetRows, &[Some(rows), Some(ids), Some(of)], of).unwrap();
        self.b.pin(on % self.devices.len()).unwrap();
        id
    }

    fn output(&mut self, id: TensorId) {
        self.b.output(id).unwrap();
        self.outputs.push(id);
    }

    /// The bytes of each output of each run. Between two runs, the host waits for its pending reads at random.
    fn results(self, depth: usize, seed: u64) -> Vec<Vec<u8>> {
        let options = Options::default().with_depth(depth);
        let mut scheduler = Scheduler::new(self.devices, options, &self.budget).unwrap();
        let mut prepared = scheduler.build(&Arc::new(self.b.build().unwrap())).unwrap();
        let (mut rng, mut results) = (fastrand::Rng::with_seed(seed), Vec::new());
        let mut pending_reads: Vec<PendingRead> = Vec::new();
        for run in 0..RUNS {
            let bytes: Vec<_> = (0..).zip(&self.inputs).map(|(i, (_, values))| values.of(run * 16 + i)).collect();
            let inputs: Vec<_> = self.inputs.iter().zip(&bytes).map(|((id, _), bytes)| (*id, &**bytes)).collect();
            scheduler.submit(&mut prepared, &inputs).unwrap();
            pending_reads.extend(self.outputs.iter().map(|&id| scheduler.read(&prepared, id).unwrap()));
            if rng.u32(0..4) == 0 {
                results.extend(pending_reads.drain(..).map(|pending_read| pending_read.wait(None).unwrap()));
            }
        }
        results.extend(pending_reads.into_iter().map(|pending_read| pending_read.wait(None).unwrap()));
        scheduler.synchronize(None).unwrap();
        results
    }
}

impl InputValues {
    fn of(self, seed: u64) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        match self {
            InputValues::Floats(n) => floats(1000 + seed, n),
            InputValues::Rows(n, of) => {
                rng.choose_multiple(0..of as i64, n).into_iter().flat_map(i64::to_le_bytes).collect()
            }
            InputValues::Experts(n, of) => (0..n).flat_map(|_| rng.i32(0..of as i32).to_le_bytes()).collect(),
        }
    }
}

fn floats(seed: u64, n: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).flat_map(|_| (rng.f32() - 0.5).to_le_bytes()).collect()
}

/// Six layers that visit three devices twice.
fn chain(m: &mut TaskFixture) {
    let mut h = m.input(4);
    for layer in 0..6 {
        let w = m.stored(layer, [WIDTH, WIDTH, 1, 1]);
        let product = m.node(layer, MulMat::PLAIN, &[w, h]);
        h = m.node(layer, Binary::Add, &[product, h]);
    }
    m.output(h);
}

/// A cache that other devices read and that is written again within the same run.
fn cache(m: &mut TaskFixture) {
    let (x, some, others) = (m.input(2), m.rows(2, 16), m.rows(2, 16));
    let cache = m.stored(1, [WIDTH, 16, 1, 1]);
    let k = m.scaled(0, 2.0, 0.5, x);
    m.set_rows(1, k, some, cache);
    let q = m.scaled(2, -1.0, 0.25, x);
    let early = m.node(2, MulMat::PLAIN, &[cache, q]);
    let sum = m.node(2, Binary::Add, &[q, k]);
    m.set_rows(1, sum, others, cache);
    let late = m.node(0, MulMat::PLAIN, &[cache, q]);
    let both = m.node(1, Binary::Add, &[early, late]);
    m.output(both);
    m.output(late);
    m.outputs.push(cache);
}

/// All devices read the same inputs.
fn shared_inputs(m: &mut TaskFixture) {
    let (x, y) = (m.input(3), m.input(3));
    let parts: Vec<_> = (0..3)
        .map(|on| {
            let sum = m.node(on, Binary::Add, &[x, y]);
            m.scaled(on, 1.0 + on as f32, 0.0, sum)
        })
        .collect();
    let first = m.node(1, Binary::Mul, &[parts[0], parts[1]]);
    let second = m.node(2, Binary::Sub, &[first, parts[2]]);
    let last = m.node(0, Binary::Add, &[second, y]);
    m.output(last);
}

/// Intermediate outputs between many in-place nodes: later nodes must not overwrite the outputs.
fn outputs(m: &mut TaskFixture) {
    let mut h = m.input(4);
    for on in [0, 1, 2, 1, 0] {
        for _ in 0..3 {
            h = m.scaled(on, 0.5, 1.0, h);
        }
        m.output(h);
    }
}

/// A tensor written in two parts; each part is read by a different device.
fn parts(m: &mut TaskFixture) {
    let (x, y) = (m.input(2), m.input(2));
    let whole = m.input(4);
    let whole = m.scaled(0, 3.0, 0.0, whole);
    let half = TensorDesc::contiguous(DType::F32, [WIDTH, 2, 1, 1]).unwrap();
    let [low, high] = [0, half.extent()].map(|at| m.b.view(whole, half, at).unwrap());
    let write = |m: &mut TaskFixture, x, part| {
        let written = m.b.node_onto(Binary::Add, &[Some(x), Some(x)], part).unwrap();
        m.b.pin(0).unwrap();
        written
    };
    let early = m.node(1, Binary::Add, &[low, y]);
    let low = write(m, x, low);
    let one = m.node(1, Binary::Sub, &[low, early]);
    let high = write(m, y, high);
    let two = m.node(2, Binary::Mul, &[high, one]);
    let all = m.node(1, Binary::Add, &[whole, whole]);
    m.output(two);
    m.output(all);
}

/// Weights of another device: a whole matrix, and the experts that the ids select.
fn remote_weights(m: &mut TaskFixture) {
    let (x, ids) = (m.input(2), m.experts(2, 4));
    let w = m.stored(2, [WIDTH, WIDTH, 1, 1]);
    let experts = m.stored(2, [WIDTH, WIDTH, 4, 1]);
    let h = m.node(0, MulMat::PLAIN, &[w, x]);
    let h = m.node(1, MulMat::PLAIN, &[w, h]);
    let each = m.b.reshape(h, [WIDTH, 1, 2, 1]).unwrap();
    let y = m.node(1, MulMat::BY_ID, &[experts, each, ids]);
    let y = m.node(0, Unary::Sqr, &[y]);
    m.output(y);
}

/// A task's name and its builder.
type NamedTask = (&'static str, fn(&mut TaskFixture));

const TASKS: [NamedTask; 6] = [
    ("chain", chain),
    ("cache", cache),
    ("shared inputs", shared_inputs),
    ("outputs", outputs),
    ("parts", parts),
    ("remote weights", remote_weights),
];

fn results(devices: &[Arc<dyn Device>], task: fn(&mut TaskFixture), depth: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut fixture = TaskFixture::new(devices);
    task(&mut fixture);
    fixture.results(depth, seed)
}

/// Checks that gated devices compute the same results as one device. `change` configures each device by its number.
fn assert_same_as_one_device(seeds: u64, gate: fn(u64) -> Arc<Gate>, change: fn(usize, GatedDevice) -> GatedDevice) {
    for (name, task) in TASKS {
        let one: Arc<dyn Device> = CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap();
        let wanted = results(&[one], task, 1, 0);
        for depth in [1, 2, 4] {
            for seed in 0..seeds {
                let gate = gate(seed);
                let device = |i| change(i, gate.device(&format!("G{i}"))).shared();
                let devices: Vec<_> = (0..3).map(device).collect();
                let got = results(&devices, task, depth, seed);
                assert!(got == wanted, "{name}, depth {depth}, seed {seed}");
                assert_eq!(gate.races(), [""; 0], "{name}, depth {depth}, seed {seed}");
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_order_of_execution() {
    assert_same_as_one_device(100, Gate::new, |_, device| device);
}

#[test]
fn results_do_not_depend_on_the_order_of_execution_with_host_staged_copies() {
    assert_same_as_one_device(10, Gate::among_threads, |i, device| {
        device.with_info(|info| info.domain = Domain::named(format!("of device {}", i % 2)))
    });
}

/// Each device copies from the devices before it, and the first from the last. Copies in the opposite direction are
/// host-staged.
#[test]
fn results_do_not_depend_on_the_order_of_execution_with_one_way_peer_copies() {
    assert_same_as_one_device(10, Gate::among_threads, |i, device| {
        let device = device.with_info(|info| info.domain = Domain::named(format!("of device {i}")));
        device.with_copies_from(|to, from| from.name < to.name || (&*to.name, &*from.name) == ("G0", "G2"))
    });
}
