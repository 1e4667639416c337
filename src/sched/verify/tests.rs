use super::*;
use crate::graph::BuildError;
use crate::ops::collective::{Collective, CollectiveKind};
use crate::ops::unary::Unary;
use crate::ops::{Op, OutputSpec};
use crate::sched::tests::graphs::{self, TaskMaker};
use crate::sched::{Allocation, Options, ReplicaOrigin, StepWait, Task, TaskBuilder};
use crate::tensor::DType;
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

/// A task of two ranks, each with the given nodes: a number is an all-reduce of the group with that number, `None` a node of
/// another op.
fn ranks(nodes: [&[Option<u32>]; 2]) -> Result<Task, BuildError> {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [8, 1, 1, 1])?;
    for _ in 0..2 {
        b.add_collective_group(vec![0, 1]);
    }
    for (device, nodes) in nodes.into_iter().enumerate() {
        let mut last = x;
        for node in nodes {
            let op = match node {
                Some(group) => Op::from(Collective { kind: CollectiveKind::AllReduce, group: *group }),
                None => Op::from(Unary::Sqr),
            };
            last = b.node_as(op, &[Some(last)], OutputSpec { dtype: DType::F32, ne: [8, 1, 1, 1] })?;
            b.pin(device)?;
        }
        b.output(last)?;
    }
    b.build()
}

#[test]
fn ranks_with_other_collectives_and_endless_waits_are_found() {
    let devices = graphs::devices(2, true);
    let plan = |task: Task| Plan::new(Arc::new(task), &devices, &Options::default());
    let fault = |task: Task| plan(task).map(drop).unwrap_err().to_string();
    let (a, b, other) = (Some(0), Some(1), None);
    plan(ranks([&[other, a, other, b, a], &[a, other, b, a, other]]).unwrap()).unwrap();
    let missing = fault(ranks([&[a, other, a], &[other, a]]).unwrap());
    assert!(missing.contains("the collectives of group 0 on"), "{missing}");
    let crossed = fault(ranks([&[a, b], &[b, a]]).unwrap());
    assert!(crossed.contains("that every step ends"), "{crossed}");
    // The program of rank 1 waits for a mark after the collective of rank 0.
    let mut late = plan(ranks([&[a], &[a]]).unwrap()).unwrap();
    let first = late.steps.iter().find_map(|step| matches!(step.action, StepAction::RunSplit(0)).then_some(step.mark));
    let mark = first.flatten().unwrap();
    let second = late.steps.iter_mut().find(|step| matches!(step.action, StepAction::RunSplit(1))).unwrap();
    second.waits.push(StepWait { mark, runs_ago: 0 });
    let late = verify(&late, &devices).unwrap_err().to_string();
    assert!(late.contains("that every step ends"), "{late}");
    // A group that the device is not in.
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [8, 1, 1, 1]).unwrap();
    b.add_collective_group(vec![1]);
    let op = Collective { kind: CollectiveKind::AllReduce, group: 0 };
    let y = b.node_as(op, &[Some(x)], OutputSpec { dtype: DType::F32, ne: [8, 1, 1, 1] }).unwrap();
    b.pin(0).unwrap();
    b.output(y).unwrap();
    let outside = fault(b.build().unwrap());
    assert!(outside.contains("one that the device is in"), "{outside}");
}
