use super::*;
use crate::sched::tests::graphs::{self, TaskMaker};
use crate::sched::{Allocation, Options, ReplicaOrigin, StepWait};
use std::sync::Arc;
use std::time::Instant;

fn plan_of(make: TaskMaker, count: usize, together: bool, depth: usize) -> (Plan, Vec<Arc<dyn crate::device::Device>>) {
    let devices = graphs::devices(count, together);
    let task = Arc::new(make(count).unwrap());
    let plan = Plan::new(task, &devices, &Options { depth, ..Options::default() }).unwrap();
    (plan, devices)
}

/// The graph that is called a chain.
fn chain(devices: usize) -> Result<crate::sched::Task, crate::graph::BuildError> {
    let (_, make) = graphs::ALL[0];
    make(devices)
}

#[test]
fn faults_say_what_was_expected_and_what_was_found() {
    type Change = fn(&mut Plan);
    let cases: [(Change, &str); 9] = [
        (
            |plan| plan.layout.slots[2] = plan.layout.slots[2].map(|spot| Allocation { offset: 32, bytes: 64, ..spot }),
            "slot 2 on GPU0: expected a multiple of 64, \
             found Spot { area: Arena, chunk: 0, offset: 32, bytes: 64 }",
        ),
        (
            |plan| plan.layout.slots[2] = plan.layout.slots[2].map(|spot| Allocation { bytes: 960, ..spot }),
            "slot 2 on GPU0: expected at least 1024 bytes, \
             found Spot { area: Arena, chunk: 0, offset: 0, bytes: 960 }",
        ),
        (
            |plan| plan.layout.arenas[0].ring[0] -= 64,
            "replica 2 of slot 4 on GPU0: expected a place inside 1984 bytes, \
             found Spot { area: Ring, chunk: 0, offset: 1024, bytes: 1024 }",
        ),
        (
            |plan| {
                plan.steps.remove(0);
            },
            "times that replica 0 is made: expected 1, found 0",
        ),
        (
            |plan| plan.steps[2].waits.clear(),
            "run 0's step 1 (split 0, computing lane 1 of GPU0) and run 0's step 2 (copy to replica 1 of slot 2, \
             bringing lane 2 of CPU) both touch bytes 0..1024 of the arena of GPU0, buffer 0, one writes, and nothing \
             orders them",
        ),
        (
            |plan| plan.steps.swap(2, 3),
            "step 2 (split 1, computing lane 3 of CPU) waits for mark 2, which this run has not made yet",
        ),
        (
            |plan| plan.steps[0].waits.push(StepWait { mark: 7, runs_ago: 0 }),
            "step 0 (upload of replica 0 of \"x\" (slot 0), bringing lane 0 of GPU0) waits for mark 7, which this run has \
             not made yet",
        ),
        (
            |plan| plan.split_graph.replicas[0].origin = ReplicaOrigin::Device(1),
            "replica 0 of \"x\" (slot 0): expected home None, found Some(1)",
        ),
        (|plan| plan.steps[0].mark = None, "marks: expected each made by a step, found one that is not"),
    ];
    for (change, expected) in cases {
        let (mut plan, devices) = plan_of(chain, 2, true, 2);
        change(&mut plan);
        assert_eq!(verify(&plan, &devices).unwrap_err().to_string(), expected);
    }
}

#[test]
fn large_plans_are_checked_in_little_time() {
    let (plan, devices) =
        plan_of(|devices| graphs::TransformerTask { devices, layers: 66, ..Default::default() }.build(), 8, true, 4);
    let nodes = plan.task.graph().nodes().len();
    assert!(nodes >= 1500, "{nodes} nodes");
    let start = Instant::now();
    verify(&plan, &devices).unwrap();
    let took = start.elapsed();
    assert!(took.as_secs() < 10, "{took:?}");
}
