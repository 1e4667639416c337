//! Plans with one mistake each, which have to be found.

use super::{PlanFault, step_name, verify};
use crate::device::Device;
use crate::graph::Node;
use crate::sched::tests::graphs;
use crate::sched::{Allocation, ArenaKind, Options, Plan, Split, StepAction};
use fastrand::Rng;
use std::ops::Range;
use std::sync::Arc;

/// Plans of all graphs over one to four devices of one domain and of several, which do not copy from each other or some do.
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
fn what_is_planned_passes_and_no_wait_is_superfluous() {
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            verify(plan, devices).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            for (at, step) in plan.steps.iter().enumerate() {
                for wait in 0..step.waits.len() {
                    let mut less = plan.clone();
                    less.steps[at].waits.remove(wait);
                    let fault = verify(&less, devices);
                    let found = matches!(fault, Err(PlanFault::Race { .. } | PlanFault::Value { .. }));
                    assert!(found, "{name}: without {:?} of {}: {fault:?}", step.waits[wait], step_name(plan, at));
                }
            }
        });
    }
}

/// Something with a place: a slot or a replica.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Thing {
    Slot(u32),
    Replica(u32),
}

/// Where a thing lies, and from when to when all of its bytes matter: twice the number of a node while it runs, one less
/// just before it.
#[derive(Clone, Copy, Debug)]
struct Resident {
    thing: Thing,
    device: usize,
    spot: Allocation,
    start: usize,
    end: usize,
}

fn residents(plan: &Plan) -> Vec<Resident> {
    let (task, cut) = (&plan.task, &plan.split_graph);
    let nodes = task.graph().nodes();
    // The last node of some splits that reads all of some bytes.
    let last_read = |splits: &dyn Fn(&Split) -> bool, slot: u32, range: Range<usize>| {
        let reads = |node: &Node| task.reads(node).any(|(_, of, read)| of == slot && read == range);
        let among = cut.splits.iter().filter(|split| splits(split)).flat_map(|split| split.nodes.clone());
        among.filter(|&at| reads(&nodes[at])).map(|at| 2 * at).max().unwrap_or(0)
    };
    let before = |split: usize| (2 * cut.splits[split].nodes.start).saturating_sub(1);
    let mut all = Vec::new();
    for (slot, spot) in (0..).zip(&plan.layout.slots) {
        let (Some(spot), Some(device)) = (*spot, cut.homes[slot as usize]) else { continue };
        let writes = |node: &Node| task.write_range(node).is_some_and(|(of, _)| of == slot);
        let mut writers = (0..nodes.len()).filter(|&at| writes(&nodes[at]));
        // Of what is written piece by piece, some bytes live later than others.
        let (Some(writer), None) = (writers.next(), writers.next()) else { continue };
        let whole = 0..task.graph().slot_sizes()[slot as usize];
        let copies = cut.replicas.iter().filter(|replica| replica.slot == slot && replica.range == whole);
        let copied = copies.map(|replica| before(replica.first_split)).max().unwrap_or(0);
        let seen = if task.is_output(slot) { 2 * nodes.len() } else { 0 };
        let read = last_read(&|split| split.device == device, slot, whole);
        let end = read.max(copied).max(seen).max(2 * writer);
        all.push(Resident { thing: Thing::Slot(slot), device, spot, start: 2 * writer, end });
    }
    for (number, replica) in (0..).zip(&cut.replicas) {
        let (thing, spot) = (Thing::Replica(number), plan.layout.replicas[number as usize]);
        let end = last_read(&|split| split.reads.contains(&number), replica.slot, replica.range.clone());
        all.push(Resident { thing, device: replica.device, spot, start: before(replica.first_split), end });
    }
    all
}

#[test]
fn what_lies_on_something_that_lives_is_found() {
    let mut rng = Rng::with_seed(11);
    for depth in DEPTHS {
        let mut moved = 0;
        each_plan(depth, |name, plan, devices| {
            let all = residents(plan);
            for a in &all {
                let meets = |b: &&Resident| {
                    let beside = b.device == a.device && b.spot.kind == a.spot.kind && b.spot != a.spot;
                    beside && a.start < b.end && b.start < a.end
                };
                let others: Vec<&Resident> = all.iter().filter(meets).collect();
                let Some(b) = rng.choice(&others) else { continue };
                let mut mixed = plan.clone();
                let spot = Allocation { bytes: a.spot.bytes, ..b.spot };
                match a.thing {
                    Thing::Slot(slot) => mixed.layout.slots[slot as usize] = Some(spot),
                    Thing::Replica(number) => mixed.layout.replicas[number as usize] = spot,
                }
                let room = &mut mixed.layout.arenas[a.device];
                let buffers = if spot.kind == ArenaKind::Arena { &mut room.arena } else { &mut room.ring };
                let buffer = &mut buffers[spot.buffer as usize];
                *buffer = (*buffer).max(spot.offset + spot.bytes);
                assert!(verify(&mixed, devices).is_err(), "{name}: {a:?} moved onto {b:?}");
                moved += 1;
            }
        });
        assert!(moved > 300, "{moved} of depth {depth}");
    }
}

/// The steps with one of them moved to where another one is.
fn moved(plan: &Plan, from: usize, to: usize) -> Plan {
    let mut plan = plan.clone();
    let step = plan.steps.remove(from);
    plan.steps.insert(to, step);
    plan
}

#[test]
fn steps_that_are_missing_or_late_are_found() {
    for depth in DEPTHS {
        each_plan(depth, |name, plan, devices| {
            for (at, step) in plan.steps.iter().enumerate() {
                let mut less = plan.clone();
                less.steps.remove(at);
                assert!(verify(&less, devices).is_err(), "{name}: without {}", step_name(plan, at));
                let user = match step.action {
                    StepAction::UploadInput(r)
                    | StepAction::DeviceCopy(r)
                    | StepAction::UploadStaged(r)
                    | StepAction::CopyExperts(r) => {
                        StepAction::RunSplit(plan.split_graph.replicas[r as usize].first_split as u32)
                    }
                    StepAction::Download(r) => StepAction::UploadStaged(r),
                    StepAction::RunSplit(_) => continue,
                };
                let user = plan.steps.iter().position(|step| step.action == user).unwrap();
                assert!(verify(&moved(plan, at, user), devices).is_err(), "{name}: late {}", step_name(plan, at));
            }
        });
    }
}

#[test]
fn splits_that_run_too_early_are_found() {
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
fn replicas_that_are_not_the_right_ones_are_found() {
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
    assert!(swapped > 0, "some slot has an older replica on the same device");
}

#[test]
fn copies_by_devices_that_do_not_copy_are_found() {
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
                        // The other way is not enough.
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
