//! Scheduler over several GPUs: runs are pipelined from device to device, and the host does not block between them.

use crate::fixture::{COSTLY, CudaFixture, DOUBLE, INCREMENT, floats, test_deadline};
use fanout::device::Device;
use fanout::graph::TensorId;
use fanout::ops::unary::Unary;
use fanout::sched::{Options, PreparedPlan, Scheduler, TaskBuilder};
use fanout::tensor::DType;
use std::sync::Arc;

/// Floats per activation.
const N: usize = 300;

struct Stages {
    scheduler: Scheduler,
    prepared: PreparedPlan,
    x: TensorId,
    y: TensorId,
    // Last field: dropping the fixture ends the emulator session.
    fixture: CudaFixture,
}

impl Stages {
    /// A pipeline with one stage per device; each stage applies `ops`.
    fn new(settings: &str, ops: &[Unary], depth: usize) -> Stages {
        let fixture = CudaFixture::new(settings);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [N, 1, 1, 1]).unwrap();
        let mut y = x;
        for stage in 0..fixture.devices.len() {
            for &op in ops {
                y = b.node(op, &[Some(y)]).unwrap();
                b.pin(stage).unwrap();
            }
        }
        b.output(y).unwrap();
        let task = Arc::new(b.build().unwrap());
        let devices = fixture.devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let options = Options::default().with_depth(depth);
        let mut scheduler = Scheduler::new(devices, options, &fixture.budget).unwrap();
        let prepared = scheduler.build(&task).unwrap();
        Stages { scheduler, prepared, x, y, fixture }
    }

    /// Submits all runs with different inputs, then waits for their results.
    fn run(&mut self, runs: usize) -> Vec<Vec<f32>> {
        let mut tickets = Vec::new();
        for run in 0..runs {
            let x = input(run);
            self.scheduler.submit(&mut self.prepared, &[(self.x, bytemuck::cast_slice(&x))]).unwrap();
            tickets.push(self.scheduler.read(&self.prepared, self.y).unwrap());
        }
        tickets.into_iter().map(|ticket| floats(&ticket.wait(test_deadline()).unwrap())).collect()
    }
}

fn input(run: usize) -> Vec<f32> {
    (0..N).map(|i| (run * 1000 + i) as f32).collect()
}

/// Emulator settings: devices with peer access, and devices without.
const LINKS: [&str; 2] = ["CUDAEMU_PEERS=all", "CUDAEMU_PEERS=none"];

#[test]
fn no_order_of_the_streams_changes_a_result() {
    let wanted = |run| input(run).into_iter().map(|x| ((x * 2.0 + 1.0) * 2.0 + 1.0) * 2.0 + 1.0).collect::<Vec<_>>();
    for links in LINKS {
        for (seed, depth) in (0..40).zip([1, 2, 4].into_iter().cycle()) {
            let settings = format!("CUDAEMU_DEVICES=3\n{links}\nCUDAEMU_SEED={seed}");
            let mut stages = Stages::new(&settings, &[DOUBLE, INCREMENT], depth);
            for (run, got) in stages.run(12).into_iter().enumerate() {
                assert!(got == wanted(run), "{links}, seed {seed}, depth {depth}, run {run}");
            }
            assert_eq!(stages.fixture.emulator.reports(), Vec::<String>::new(), "{links}, seed {seed}");
        }
    }
}

/// The simulated time is that of an ideal pipeline: (runs + stages - 1) times the time of a stage.
#[test]
fn devices_work_at_the_same_time() {
    const RUNS: usize = 10;
    let timed = "CUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10\nCUDAEMU_LAUNCH_US=1";
    for (links, stages) in LINKS.into_iter().flat_map(|links| [(links, 2), (links, 5)]) {
        let settings = format!("CUDAEMU_DEVICES={stages}\n{links}\n{timed}");
        let mut all = Stages::new(&settings, &[COSTLY; 10], 4);
        // Opening the devices takes time: a pattern is copied between each two of them.
        all.fixture.emulator.restart_simulated_time();
        all.run(RUNS);
        let took = all.fixture.simulated_us();
        let ideal = ((RUNS + stages - 1) * 1000) as f64;
        assert!(
            (ideal..=1.05 * ideal).contains(&took),
            "{stages} stages, {links}: took {took} us, ideal is {ideal} us"
        );
    }
}

#[test]
fn the_host_does_not_block_between_runs() {
    for links in LINKS {
        let mut stages = Stages::new(&format!("CUDAEMU_DEVICES=2\n{links}"), &[DOUBLE, INCREMENT], 4);
        // Warm-up: after a few uses of every slot, all rings, graphs, events and staging memory exist.
        stages.run(32);
        let calls = |stages: &Stages| {
            let waits =
                ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"];
            let memory = ["cuMemAlloc_v2", "cuMemFree_v2", "cuLaunchKernel", "cuStreamCreate", "cuModuleLoadData"];
            waits.into_iter().chain(memory).map(|name| (name, stages.fixture.driver_calls(name))).collect::<Vec<_>>()
        };
        let (before, graphs) = (calls(&stages), stages.fixture.driver_calls("cuGraphLaunch"));
        stages.run(12);
        assert_eq!(calls(&stages), before, "{links}");
        assert_eq!(
            stages.fixture.driver_calls("cuGraphLaunch") - graphs,
            24,
            "{links}: expected one launch per stage and run"
        );
    }
}
