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

/// The task `chain` of `graphs::ALL`.
fn chain(devices: usize) -> Result<crate::sched::Task, crate::graph::BuildError> {
    let (_, make) = graphs::ALL[0];
    make(devices)
}

#[test]
fn faults_report_expected_and_found_state() {
    type Change = fn(&mut Plan);
    let cases: [(Change, &str); 9] = [
        (
            |plan| {
                plan.layout.slots[2] =
                    plan.layout.slots[2].map(|allocation| Allocation { offset: 32, bytes: 64, ..allocation })
            },
            "slot 2 on GPU0: expected an offset that is a multiple of 64, \
             found Allocation { kind: Arena, buffer: 0, offset: 32, bytes: 64 }",
        ),
        (
            |plan| {
                plan.layout.slots[2] = plan.layout.slots[2].map(|allocation| Allocation { bytes: 960, ..allocation })
            },
            "slot 2 on GPU0: expected at least 1024 bytes, \
             found Allocation { kind: Arena, buffer: 0, offset: 0, bytes: 960 }",
        ),
        (
            |plan| plan.layout.arenas[0].ring[0] -= 64,
            "replica 2 of slot 4 on GPU0: expected an end within 1984 bytes, \
             found Allocation { kind: Ring, buffer: 0, offset: 1024, bytes: 1024 }",
        ),
        (
            |plan| {
                plan.steps.remove(0);
            },
            "times that replica 0 is made: expected 1, found 0",
        ),
        (
            |plan| plan.steps[2].waits.clear(),
            "run 0's step 1 (split 0, compute queue 1 of GPU0) and run 0's step 2 (copy to replica 1 of slot 2, \
             transfer queue 2 of CPU) both touch bytes 0..1024 of the arena of GPU0, buffer 0, at least one writes, and \
             no wait orders them",
        ),
        (
            |plan| plan.steps.swap(2, 3),
            "step 2 (split 1, compute queue 3 of CPU) waits for mark 2, which no earlier step of this run makes",
        ),
        (
            |plan| plan.steps[0].waits.push(StepWait { mark: 7, runs_ago: 0 }),
            "step 0 (upload of replica 0 of \"x\" (slot 0), transfer queue 0 of GPU0) waits for mark 7, which no earlier \
             step of this run makes",
        ),
        (
            |plan| plan.split_graph.replicas[0].origin = ReplicaOrigin::Device(1),
            "replica 0 of \"x\" (slot 0): expected home None, found Some(1)",
        ),
        (|plan| plan.steps[0].mark = None, "marks: expected each made by a step, found one that no step makes"),
    ];
    for (change, expected) in cases {
        let (mut plan, devices) = plan_of(chain, 2, true, 2);
        change(&mut plan);
        assert_eq!(verify(&plan, &devices).unwrap_err().to_string(), expected);
    }
}

#[test]
fn verifying_a_plan_of_1500_nodes_takes_less_than_10_seconds() {
    let (plan, devices) =
        plan_of(|devices| graphs::TransformerTask { devices, layers: 66, ..Default::default() }.build(), 8, true, 4);
    let nodes = plan.task.graph().nodes().len();
    assert!(nodes >= 1500, "{nodes} nodes");
    let start = Instant::now();
    verify(&plan, &devices).unwrap();
    let took = start.elapsed();
    assert!(took.as_secs() < 10, "{took:?}");
}
