//! A scheduler over GPUs: micro-batches follow each other from device to device, and the host waits for nothing between them.

use crate::rig::{COSTLY, DOUBLE, INCREMENT, Rig, floats, soon};
use fanout::device::Device;
use fanout::graph::TensorId;
use fanout::ops::unary::Unary;
use fanout::sched::{Options, PreparedPlan, Scheduler, TaskBuilder};
use fanout::tensor::DType;
use std::sync::Arc;

/// Floats of an activation.
const N: usize = 300;

struct Stages {
    scheduler: Scheduler,
    prepared: PreparedPlan,
    x: TensorId,
    y: TensorId,
    // Last: it ends the session.
    rig: Rig,
}

impl Stages {
    /// As many stages as there are devices, each with these ops.
    fn new(settings: &str, ops: &[Unary], depth: usize) -> Stages {
        let rig = Rig::new(settings);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [N, 1, 1, 1]).unwrap();
        let mut y = x;
        for stage in 0..rig.devices.len() {
            for &op in ops {
                y = b.node(op, &[Some(y)]).unwrap();
                b.pin(stage).unwrap();
            }
        }
        b.output(y).unwrap();
        let task = Arc::new(b.build().unwrap());
        let devices = rig.devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let options = Options::default().with_depth(depth);
        let mut scheduler = Scheduler::new(devices, options, &rig.account).unwrap();
        let prepared = scheduler.build(&task).unwrap();
        Stages { scheduler, prepared, x, y, rig }
    }

    /// Submits runs, each with an input of its own, then waits for their results.
    fn run(&mut self, runs: usize) -> Vec<Vec<f32>> {
        let mut tickets = Vec::new();
        for run in 0..runs {
            let x = input(run);
            self.scheduler.submit(&mut self.prepared, &[(self.x, bytemuck::cast_slice(&x))]).unwrap();
            tickets.push(self.scheduler.read(&self.prepared, self.y).unwrap());
        }
        tickets.into_iter().map(|ticket| floats(&ticket.wait(soon()).unwrap())).collect()
    }
}

fn input(run: usize) -> Vec<f32> {
    (0..N).map(|i| (run * 1000 + i) as f32).collect()
}

/// Devices that reach each other's memory, and devices that do not.
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
            assert_eq!(stages.rig.emulator.reports(), Vec::<String>::new(), "{links}, seed {seed}");
        }
    }
}

/// As long as the pipeline is: (runs + stages - 1) times what a stage takes.
#[test]
fn devices_work_at_the_same_time() {
    const RUNS: usize = 10;
    let timed = "CUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10\nCUDAEMU_LAUNCH_US=1";
    for (links, stages) in LINKS.into_iter().flat_map(|links| [(links, 2), (links, 5)]) {
        let settings = format!("CUDAEMU_DEVICES={stages}\n{links}\n{timed}");
        let mut all = Stages::new(&settings, &[COSTLY; 10], 4);
        all.run(RUNS);
        let took = all.rig.simulated();
        let ideal = ((RUNS + stages - 1) * 1000) as f64;
        assert!((ideal..=1.05 * ideal).contains(&took), "{stages} stages, {links}: {took} us, not {ideal}");
    }
}

#[test]
fn the_host_waits_for_nothing_between_runs() {
    for links in LINKS {
        let mut stages = Stages::new(&format!("CUDAEMU_DEVICES=2\n{links}"), &[DOUBLE, INCREMENT], 4);
        // Rings, captures, events and staging memory are there once every copy has been used a few times.
        stages.run(32);
        let calls = |stages: &Stages| {
            let waits =
                ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"];
            let memory = ["cuMemAlloc_v2", "cuMemFree_v2", "cuLaunchKernel", "cuStreamCreate", "cuModuleLoadData"];
            waits.into_iter().chain(memory).map(|name| (name, stages.rig.calls(name))).collect::<Vec<_>>()
        };
        let (before, graphs) = (calls(&stages), stages.rig.calls("cuGraphLaunch"));
        stages.run(12);
        assert_eq!(calls(&stages), before, "{links}");
        assert_eq!(stages.rig.calls("cuGraphLaunch") - graphs, 24, "{links}: one launch for each stage of a run");
    }
}
