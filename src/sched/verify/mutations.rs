//! Mutation tests of the verifier: each test breaks correct plans in one way, and the verifier must reject every mutated plan.

use super::{PlanFault, step_name, verify};
use crate::device::Device;
use crate::graph::Node;
use crate::sched::tests::graphs;
use crate::sched::{Allocation, ArenaKind, Options, Plan, Split, StepAction};
use fastrand::Rng;
use std::ops::Range;
use std::sync::Arc;

/// Calls `check` with plans of all test graphs over one to four devices: in one domain; in a domain each without peer copies;
/// in a domain each with peer copies between some pairs, in one direction only.
fn each_plan(depth: usize, mut check: impl FnMut(&str, &Plan, &[Arc<dyn Device>])) {
    for (graph, make) in graphs::ALL {
        for (count, domains) in (1..=4).flat_map(|count| [(count, "one"), (count, "own"), (count, "own, one way")]) {
            let devices = match domains {
                "own, one way" => graphs::one_way(count),
                domains => graphs::devices(count, domains == "one"),
            };
            let task = Arc::new(make(count).unwrap());
            let plan = Plan::new(task, &devices, &Options { depth, ..Options::default() }).unwrap();
            check(&format!("{graph} on {count} devices, domains: {domains}, depth {depth}"), &plan, &devices);
        }
    }
}

const DEPTHS: [usize; 3] = [1, 2, 4];

#[test]
fn plans_pass_and_removing_any_wait_fails() {
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            verify(plan, devices).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            for (at, step) in plan.steps.iter().enumerate() {
                for wait in 0..step.waits.len() {
                    let mut without = plan.clone();
                    without.steps[at].waits.remove(wait);
                    let fault = verify(&without, devices);
                    let found = matches!(fault, Err(PlanFault::Race { .. } | PlanFault::Value { .. }));
                    assert!(found, "{name}: without {:?} of {}: {fault:?}", step.waits[wait], step_name(plan, at));
                }
            }
        });
    }
}

/// The owner of an allocation: a slot or a replica.
#[derive(Clone, Copy, PartialEq, Debug)]
enum ResidentId {
    Slot(u32),
    Replica(u32),
}

/// An allocation, and the time in which all of its bytes must stay intact. Time `2 * n` is while node `n` runs, `2 * n - 1`
/// just before it.
#[derive(Clone, Copy, Debug)]
struct Resident {
    id: ResidentId,
    device: usize,
    allocation: Allocation,
    start: usize,
    end: usize,
}

fn residents(plan: &Plan) -> Vec<Resident> {
    let (task, split_graph) = (&plan.task, &plan.split_graph);
    let nodes = task.graph().nodes();
    // The time of the last node, among some splits, that reads exactly this range of a slot.
    let last_read = |splits: &dyn Fn(&Split) -> bool, slot: u32, range: Range<usize>| {
        let reads = |node: &Node| task.reads(node).any(|(_, of, read)| of == slot && read == range);
        let among = split_graph.splits.iter().filter(|split| splits(split)).flat_map(|split| split.nodes.clone());
        among.filter(|&at| reads(&nodes[at])).map(|at| 2 * at).max().unwrap_or(0)
    };
    let before = |split: usize| (2 * split_graph.splits[split].nodes.start).saturating_sub(1);
    let mut all = Vec::new();
    for (slot, allocation) in (0..).zip(&plan.layout.slots) {
        let (Some(allocation), Some(device)) = (*allocation, split_graph.homes[slot as usize]) else { continue };
        let writes = |node: &Node| task.write_range(node).is_some_and(|(of, _)| of == slot);
        let mut writers = (0..nodes.len()).filter(|&at| writes(&nodes[at]));
        // Slots with several writers are left out: their bytes become live at different times.
        let (Some(writer), None) = (writers.next(), writers.next()) else { continue };
        let whole = 0..task.graph().slot_sizes()[slot as usize];
        let copies = split_graph.replicas.iter().filter(|replica| replica.slot == slot && replica.range == whole);
        let copied = copies.map(|replica| before(replica.first_split)).max().unwrap_or(0);
        let seen = if task.is_output(slot) { 2 * nodes.len() } else { 0 };
        let read = last_read(&|split| split.device == device, slot, whole);
        let end = read.max(copied).max(seen).max(2 * writer);
        all.push(Resident { id: ResidentId::Slot(slot), device, allocation, start: 2 * writer, end });
    }
    for (number, replica) in (0..).zip(&split_graph.replicas) {
        let (id, allocation) = (ResidentId::Replica(number), plan.layout.replicas[number as usize]);
        let end = last_read(&|split| split.reads.contains(&number), replica.slot, replica.range.clone());
        all.push(Resident { id, device: replica.device, allocation, start: before(replica.first_split), end });
    }
    all
}

#[test]
fn moving_an_allocation_onto_a_live_one_is_rejected() {
    let mut rng = Rng::with_seed(11);
    for depth in DEPTHS {
        let mut moved = 0;
        each_plan(depth, |name, plan, devices| {
            let all = residents(plan);
            for a in &all {
                let overlaps = |b: &&Resident| {
                    let beside =
                        b.device == a.device && b.allocation.kind == a.allocation.kind && b.allocation != a.allocation;
                    beside && a.start < b.end && b.start < a.end
                };
                let others: Vec<&Resident> = all.iter().filter(overlaps).collect();
                let Some(b) = rng.choice(&others) else { continue };
                let mut mutated = plan.clone();
                let allocation = Allocation { bytes: a.allocation.bytes, ..b.allocation };
                match a.id {
                    ResidentId::Slot(slot) => mutated.layout.slots[slot as usize] = Some(allocation),
                    ResidentId::Replica(number) => mutated.layout.replicas[number as usize] = allocation,
                }
                let sizes = &mut mutated.layout.arenas[a.device];
                let buffers = if allocation.kind == ArenaKind::Arena { &mut sizes.arena } else { &mut sizes.ring };
                let buffer = &mut buffers[allocation.buffer as usize];
                *buffer = (*buffer).max(allocation.offset + allocation.bytes);
                assert!(verify(&mutated, devices).is_err(), "{name}: {a:?} moved onto {b:?}");
                moved += 1;
            }
        });
        assert!(moved > 300, "{moved} of depth {depth}");
    }
}

/// The plan with step `from` moved to index `to`.
fn moved(plan: &Plan, from: usize, to: usize) -> Plan {
    let mut plan = plan.clone();
    let step = plan.steps.remove(from);
    plan.steps.insert(to, step);
    plan
}

#[test]
fn removing_or_delaying_a_step_is_rejected() {
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            for (at, step) in plan.steps.iter().enumerate() {
                let mut without = plan.clone();
                without.steps.remove(at);
                assert!(verify(&without, devices).is_err(), "{name}: without {}", step_name(plan, at));
                let dependent = match step.action {
                    StepAction::UploadInput(r)
                    | StepAction::DeviceCopy(r)
                    | StepAction::UploadStaged(r)
                    | StepAction::CopyExperts(r) => {
                        StepAction::RunSplit(plan.split_graph.replicas[r as usize].first_split as u32)
                    }
                    StepAction::Download(r) => StepAction::UploadStaged(r),
                    StepAction::RunSplit(_) => continue,
                };
                let dependent = plan.steps.iter().position(|step| step.action == dependent).unwrap();
                assert!(verify(&moved(plan, at, dependent), devices).is_err(), "{name}: late {}", step_name(plan, at));
            }
        });
    }
}

#[test]
fn running_a_split_before_its_inputs_is_rejected() {
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            for (number, split) in plan.split_graph.splits.iter().enumerate() {
                let needs = plan.task.graph().nodes()[split.nodes.clone()].iter().any(|node| {
                    plan.task.reads(node).any(|(_, slot, _)| {
                        let writes = |node| plan.task.write_range(node).is_some_and(|(of, _)| of == slot);
                        plan.task.graph().nodes()[..split.nodes.start].iter().any(writes)
                    })
                });
                if needs || !split.reads.is_empty() {
                    let at =
                        plan.steps.iter().position(|step| step.action == StepAction::RunSplit(number as u32)).unwrap();
                    assert!(verify(&moved(plan, at, 0), devices).is_err(), "{name}: early {}", step_name(plan, at));
                }
            }
        });
    }
}

#[test]
fn reading_another_replica_is_rejected() {
    let mut swapped = 0;
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            for (split, at) in
                plan.split_graph.splits.iter().enumerate().flat_map(|(i, s)| (0..s.reads.len()).map(move |r| (i, r)))
            {
                let right = plan.split_graph.splits[split].reads[at];
                for other in 0..plan.split_graph.replicas.len() as u32 {
                    let [a, b] = [right, other].map(|replica| replica as usize);
                    let same = plan.split_graph.replicas[a].device == plan.split_graph.replicas[b].device;
                    if same && plan.layout.replicas[a] != plan.layout.replicas[b] {
                        let mut wrong = plan.clone();
                        wrong.split_graph.splits[split].reads[at] = other;
                        let fault = verify(&wrong, devices);
                        assert!(fault.is_err(), "{name}: split {split} reads replica {other} instead of {right}");
                        swapped += usize::from(matches!(fault, Err(PlanFault::Value { .. } | PlanFault::Race { .. })));
                    }
                }
            }
        });
    }
    assert!(swapped > 0, "no plan had an older replica of the same slot on the same device");
}

#[test]
fn device_copies_without_a_copy_path_are_rejected() {
    let mut found = [0, 0];
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            for (at, step) in plan.steps.iter().enumerate() {
                let mut other = plan.clone();
                match step.action {
                    StepAction::DeviceCopy(replica) => {
                        let replica = &plan.split_graph.replicas[replica as usize];
                        let home = plan.home(replica.slot).unwrap();
                        let (to, from) = (devices[replica.device].as_ref(), devices[home].info());
                        assert!(to.copies_from(from), "{name}: {}", step_name(plan, at));
                        // A copy path in the opposite direction is not enough.
                        other.copy_paths.set(replica.device, home, false);
                        found[0] += 1;
                    }
                    StepAction::UploadStaged(replica) => {
                        other.steps[at].action = StepAction::DeviceCopy(replica);
                        other.steps.retain(|step| step.action != StepAction::Download(replica));
                        found[1] += 1;
                    }
                    _ => continue,
                }
                let fault = verify(&other, devices);
                assert!(
                    matches!(fault, Err(PlanFault::Structure { .. })),
                    "{name}: {}: {fault:?}",
                    step_name(plan, at)
                );
            }
        });
    }
    assert!(found.iter().all(|&found| found > 50), "{found:?}");
}
