//! Structural checks of a plan, which need no replay: indices, splits, steps, marks, arena sizes, allocations and operand
//! overlap.

use super::{ByteLocation, PlanFault, slot_name, step_name};
use crate::device::Device;
use crate::sched::{
    Allocation, ArenaKind, Devices, Plan, QueueId, QueueRole, ReplicaOrigin, StepAction, Storage, node_name,
};
use std::fmt::Display;
use std::ops::Range;

/// Runs all structural checks.
pub(super) fn check(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    check_indices(plan, devices)?;
    check_split_graph(plan)?;
    check_steps(plan)?;
    check_marks(plan)?;
    check_arenas(plan, devices)?;
    check_allocations(plan, devices)?;
    check_operands(plan)
}

/// Returns [`PlanFault::Structure`] unless the two values are equal.
fn expect_equal<T: PartialEq + Display>(what: impl FnOnce() -> String, expected: T, found: T) -> Result<(), PlanFault> {
    expect(expected == found, what, &expected, &found)
}

fn expect(
    holds: bool,
    what: impl FnOnce() -> String,
    expected: &dyn Display,
    found: &dyn Display,
) -> Result<(), PlanFault> {
    let fault = || PlanFault::Structure { what: what(), expected: expected.to_string(), found: found.to_string() };
    if holds { Ok(()) } else { Err(fault()) }
}

/// Checks that all indices are in range. The checks after this one index without testing.
fn check_indices(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    let below = |what: &str, number: usize, of: usize| {
        expect(number < of, || what.to_owned(), &format_args!("a number below {of}"), &number)
    };
    let (nodes, slots) = (plan.task.graph().nodes().len(), plan.task.storage().len());
    let Plan { split_graph, layout, .. } = plan;
    let lengths = [
        ("names of devices", devices.len(), plan.devices.len()),
        ("arena sizes", devices.len(), layout.arenas.len()),
        ("assigned nodes", nodes, plan.assignments.len()),
        ("homes of slots", slots, split_graph.homes.len()),
        ("allocations of slots", slots, layout.slots.len()),
        ("allocations of replicas", split_graph.replicas.len(), layout.replicas.len()),
    ];
    for (what, expected, found) in lengths {
        expect_equal(|| format!("number of {what}"), expected, found)?;
    }
    expect(plan.depth > 0, || "depth".to_owned(), &"at least 1", &plan.depth)?;
    for (at, queue) in plan.queues.iter().enumerate() {
        below("a queue's device", queue.device, devices.len())?;
        expect(
            !plan.queues[..at].contains(queue),
            || format!("queue {at}"),
            &"a device and role of its own",
            &"a duplicate",
        )?;
    }
    for home in split_graph.homes.iter().flatten() {
        below("a slot's home", *home, devices.len())?;
    }
    for split in &split_graph.splits {
        below("a split's device", split.device, devices.len())?;
        split
            .reads
            .iter()
            .try_for_each(|&r| below("a replica that a split reads", r as usize, split_graph.replicas.len()))?;
    }
    for replica in &split_graph.replicas {
        below("a replica's device", replica.device, devices.len())?;
        below("a replica's slot", replica.slot as usize, slots)?;
        below("a replica's split", replica.first_split, split_graph.splits.len())?;
        if let ReplicaOrigin::Device(home) | ReplicaOrigin::Experts { home, .. } = replica.origin {
            below("a replica's home", home, devices.len())?;
        }
    }
    for step in &plan.steps {
        below("a step's queue", step.queue, plan.queues.len())?;
        match step.action {
            StepAction::RunSplit(split) => below("a step's split", split as usize, split_graph.splits.len())?,
            StepAction::UploadInput(r)
            | StepAction::DeviceCopy(r)
            | StepAction::Download(r)
            | StepAction::UploadStaged(r)
            | StepAction::CopyExperts(r) => {
                below("a step's replica", r as usize, split_graph.replicas.len())?;
            }
        }
    }
    Ok(())
}

/// Checks that the splits partition the nodes, that each node is on its split's device, and that no replica is on its slot's
/// home.
fn check_split_graph(plan: &Plan) -> Result<(), PlanFault> {
    let (task, split_graph) = (&plan.task, &plan.split_graph);
    let mut next = 0;
    for (number, split) in split_graph.splits.iter().enumerate() {
        expect_equal(|| format!("first node of split {number}"), next, split.nodes.start)?;
        next = split.nodes.end.max(next);
        for node in split.nodes.clone().take_while(|&node| node < plan.assignments.len()) {
            let device = plan.assignments[node].device;
            expect_equal(|| format!("device of {} in split {number}", node_name(task, node)), device, split.device)?;
        }
        for (at, &a) in split.reads.iter().enumerate() {
            let a = &split_graph.replicas[a as usize];
            let what = || format!("a replica of {} that split {number} reads", slot_name(plan, a.slot));
            expect_equal(what, split.device, a.device)?;
            expect(a.first_split <= number, what, &"one made before the split", &"one made after it")?;
            let apart = |b: &u32| {
                let b = &split_graph.replicas[*b as usize];
                a.slot != b.slot || a.range.end <= b.range.start || b.range.end <= a.range.start
            };
            expect(split.reads[..at].iter().all(apart), what, &"disjoint ones", &"two that overlap")?;
        }
    }
    expect_equal(|| "nodes in splits".to_owned(), task.graph().nodes().len(), next)?;
    for (slot, (storage, &home)) in task.storage().iter().zip(&split_graph.homes).enumerate() {
        let expected = match *storage {
            Storage::Stored { device, .. } => Some(device),
            Storage::Input => None,
            Storage::Computed => home,
        };
        let what = || format!("home of {}", slot_name(plan, slot as u32));
        expect(expected == home, what, &format_args!("{expected:?}"), &format_args!("{home:?}"))?;
    }
    for (number, replica) in split_graph.replicas.iter().enumerate() {
        let what = || format!("replica {number} of {}", slot_name(plan, replica.slot));
        let home = split_graph.homes[replica.slot as usize];
        let from = match replica.origin {
            ReplicaOrigin::Host => None,
            ReplicaOrigin::Device(home) | ReplicaOrigin::Experts { home, .. } => Some(home),
        };
        expect(home == from, what, &format_args!("home {home:?}"), &format_args!("{from:?}"))?;
        expect(home != Some(replica.device), what, &"a device other than its home", &"its home")?;
        let slot = task.graph().slot_sizes()[replica.slot as usize];
        let inside = replica.range.start < replica.range.end && replica.range.end <= slot;
        expect(inside, what, &format_args!("a range inside {slot} bytes"), &format_args!("{:?}", replica.range))?;
    }
    Ok(())
}

/// Checks that each split runs once and that each replica is made once, by the action of its origin on a fitting queue.
fn check_steps(plan: &Plan) -> Result<(), PlanFault> {
    let mut runs = vec![0; plan.split_graph.splits.len()];
    // By replica: how often it is written, and how often its bytes are downloaded.
    let mut made = vec![0; plan.split_graph.replicas.len()];
    let mut downloaded = made.clone();
    for (at, step) in plan.steps.iter().enumerate() {
        let queue = plan.queues[step.queue];
        let what = || step_name(plan, at);
        let (device, origin) = match step.action {
            StepAction::RunSplit(split) => {
                runs[split as usize] += 1;
                let expected =
                    QueueId { device: plan.split_graph.splits[split as usize].device, role: QueueRole::Compute };
                let texts = [expected, queue].map(|queue| format!("{queue:?}"));
                expect(expected == queue, what, &texts[0], &texts[1])?;
                continue;
            }
            StepAction::UploadInput(r)
            | StepAction::DeviceCopy(r)
            | StepAction::Download(r)
            | StepAction::UploadStaged(r)
            | StepAction::CopyExperts(r) => {
                let download = matches!(step.action, StepAction::Download(_));
                let count = if download { &mut downloaded } else { &mut made };
                count[r as usize] += 1;
                let replica = &plan.split_graph.replicas[r as usize];
                (replica.device, replica.origin)
            }
        };
        let fits = match (step.action, origin) {
            (StepAction::UploadInput(_), ReplicaOrigin::Host)
            | (StepAction::CopyExperts(_), ReplicaOrigin::Experts { .. }) => device == queue.device,
            (StepAction::DeviceCopy(_), ReplicaOrigin::Device(home)) => {
                device == queue.device && plan.copy_paths.can_copy(device, home)
            }
            (StepAction::Download(_), ReplicaOrigin::Device(home)) => {
                queue == QueueId { device: home, role: QueueRole::Compute }
            }
            (StepAction::UploadStaged(_), ReplicaOrigin::Device(_)) => device == queue.device,
            _ => false,
        };
        let found = format!("origin {origin:?}, queue {queue:?}");
        expect(
            fits,
            what,
            &format_args!("a replica of that origin, on a queue that can make it on device {device}"),
            &found,
        )?;
    }
    for (split, &times) in runs.iter().enumerate() {
        expect_equal(|| format!("times that split {split} runs"), 1, times)?;
    }
    for (replica, &times) in made.iter().enumerate() {
        expect_equal(|| format!("times that replica {replica} is made"), 1, times)?;
        let uploaded = plan.steps.iter().any(|step| step.action == StepAction::UploadStaged(replica as u32));
        expect_equal(
            || format!("times that replica {replica} is downloaded"),
            i32::from(uploaded),
            downloaded[replica],
        )?;
    }
    Ok(())
}

/// Checks that each mark is made once, that waits refer to existing marks, and that the last step of each queue makes a mark.
fn check_marks(plan: &Plan) -> Result<(), PlanFault> {
    let mut made = vec![false; plan.marks as usize];
    let mut last = vec![None; plan.queues.len()];
    for (at, step) in plan.steps.iter().enumerate() {
        last[step.queue] = Some(at);
        for wait in &step.waits {
            let what =
                || format!("{}: a wait for mark {} of {} runs ago", step_name(plan, at), wait.mark, wait.runs_ago);
            expect(wait.mark < plan.marks, what, &format_args!("one of {} marks", plan.marks), &wait.mark)?;
            expect(
                wait.runs_ago as usize <= plan.depth,
                what,
                &format_args!("at most {}", plan.depth),
                &wait.runs_ago,
            )?;
        }
        if let Some(mark) = step.mark {
            let fresh = made.get_mut(mark as usize).is_some_and(|made| !std::mem::replace(made, true));
            expect(fresh, || step_name(plan, at), &"a mark that no other step makes", &mark)?;
        }
    }
    expect(made.iter().all(|&made| made), || "marks".to_owned(), &"each made by a step", &"one that no step makes")?;
    for at in last.into_iter().flatten() {
        expect(
            plan.steps[at].mark.is_some(),
            || step_name(plan, at),
            &"a mark, as the last step of its queue",
            &"none",
        )?;
    }
    Ok(())
}

fn check_arenas(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    for (device, sizes) in devices.iter().zip(&plan.layout.arenas) {
        let info = device.info();
        for &bytes in sizes.arena.iter().chain(&sizes.ring) {
            let what = || format!("a buffer of {}", info.name);
            expect(bytes <= info.max_buffer, what, &format_args!("at most {} bytes", info.max_buffer), &bytes)?;
        }
    }
    Ok(())
}

/// Checks that allocations lie inside their buffers, are aligned, and reserve what [`Device::alloc_size`] requires.
fn check_allocations(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    let (graph, storage) = (plan.task.graph(), plan.task.storage());
    let mut slots: Vec<u64> = graph.slot_sizes().iter().map(|&bytes| bytes as u64).collect();
    let mut replicas: Vec<u64> = plan.split_graph.replicas.iter().map(|replica| replica.range.len() as u64).collect();
    for (number, split) in plan.split_graph.splits.iter().enumerate() {
        for node in &graph.nodes()[split.nodes.clone()] {
            let written = plan.task.write_range(node).map(|(slot, range)| (node.dst, slot, range));
            for (id, slot, range) in plan.task.reads(node).chain(written) {
                let wanted = graph.tensor(id).map_or(0, |tensor| devices[split.device].alloc_size(&tensor.desc));
                let has = |r: &&u32| replica_has(plan, **r, slot, &range);
                if plan.split_graph.homes[slot as usize] == Some(split.device) {
                    let min_bytes = &mut slots[slot as usize];
                    *min_bytes = (*min_bytes).max(range.start as u64 + wanted);
                } else if let Some(&replica) = split.reads.iter().find(has) {
                    let from = range.start - plan.split_graph.replicas[replica as usize].range.start;
                    let min_bytes = &mut replicas[replica as usize];
                    *min_bytes = (*min_bytes).max(from as u64 + wanted);
                } else {
                    let tensor = format!("{} for split {number}", slot_name(plan, slot));
                    let device = devices[split.device].info().name.clone();
                    let expected = format!("a replica of its bytes {range:?}");
                    return Err(PlanFault::Placement { tensor, device, expected, found: "none".to_owned() });
                }
            }
        }
    }
    for (slot, allocation) in plan.layout.slots.iter().enumerate() {
        let name = || slot_name(plan, slot as u32);
        match (&storage[slot], allocation, plan.split_graph.homes[slot]) {
            (Storage::Computed, Some(allocation), Some(home)) => {
                check_allocation(plan, &*devices[home], home, *allocation, slots[slot], name)?;
            }
            (Storage::Computed, None, None) | (Storage::Stored { .. } | Storage::Input, None, _) => {}
            (_, allocation, home) => {
                let found = format!("allocation {allocation:?}, home {home:?}");
                return Err(PlanFault::Structure {
                    what: name(),
                    expected: "an allocation at its home".to_owned(),
                    found,
                });
            }
        }
    }
    for (number, (replica, allocation)) in plan.split_graph.replicas.iter().zip(&plan.layout.replicas).enumerate() {
        let name = || format!("replica {number} of {}", slot_name(plan, replica.slot));
        check_allocation(plan, &*devices[replica.device], replica.device, *allocation, replicas[number], name)?;
    }
    Ok(())
}

fn replica_has(plan: &Plan, replica: u32, slot: u32, range: &Range<usize>) -> bool {
    let replica = &plan.split_graph.replicas[replica as usize];
    replica.slot == slot && replica.range.start <= range.start && range.end <= replica.range.end
}

fn check_allocation(
    plan: &Plan,
    device: &dyn Device,
    number: usize,
    allocation: Allocation,
    min_bytes: u64,
    name: impl Fn() -> String,
) -> Result<(), PlanFault> {
    let (info, sizes) = (device.info(), &plan.layout.arenas[number]);
    let fault = |expected: String| {
        Err(PlanFault::Placement {
            tensor: name(),
            device: info.name.clone(),
            expected,
            found: format!("{allocation:?}"),
        })
    };
    let buffers = if allocation.kind == ArenaKind::Arena { &sizes.arena } else { &sizes.ring };
    let Some(&buffer) = buffers.get(allocation.buffer as usize) else {
        return fault(format!("one of {} buffers", buffers.len()));
    };
    if allocation.offset.checked_add(allocation.bytes).is_none_or(|end| end > buffer) {
        return fault(format!("an end within {buffer} bytes"));
    }
    if !allocation.offset.is_multiple_of(info.alignment.max(1)) {
        return fault(format!("an offset that is a multiple of {}", info.alignment));
    }
    if allocation.bytes < min_bytes { fault(format!("at least {min_bytes} bytes")) } else { Ok(()) }
}

/// Checks that destinations share bytes with sources of other slots only where the op may run in place.
fn check_operands(plan: &Plan) -> Result<(), PlanFault> {
    let graph = plan.task.graph();
    for (number, split) in plan.split_graph.splits.iter().enumerate() {
        for at in split.nodes.clone() {
            let node = &graph.nodes()[at];
            let Some((dst, written)) = plan.task.write_range(node) else { continue };
            if plan.split_graph.homes[dst as usize] != Some(split.device) {
                let what = format!("home of {}, which {} writes", slot_name(plan, dst), node_name(&plan.task, at));
                let found = format!("{:?}", plan.split_graph.homes[dst as usize]);
                return Err(PlanFault::Structure { what, expected: format!("{:?}", Some(split.device)), found });
            }
            let Some(to) = ByteLocation::at_home(plan, dst, &written) else { continue };
            let sources = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
            for (i, id) in sources.filter(|&(i, _)| !node.op.writes_onto(i)) {
                let Some((slot, read)) = plan.task.span(id).filter(|(slot, _)| *slot != dst) else { continue };
                let Some(from) = ByteLocation::in_split(plan, number, slot, &read) else { continue };
                let (a, b) = (from.start..from.start + read.len() as u64, to.start..to.start + written.len() as u64);
                if from.memory != to.memory || a.start >= b.end || b.start >= a.end || a.is_empty() || b.is_empty() {
                    continue;
                }
                let tensors = graph.tensor(id).zip(graph.tensor(node.dst));
                let alike = tensors.is_some_and(|(a, b)| a.desc.same_layout(&b.desc));
                if !(node.op.in_place(i) && alike && from.start == to.start) {
                    let tensor = format!("the destination of {}", node_name(&plan.task, at));
                    let device = plan.devices[split.device].clone();
                    let expected = format!("none of the bytes {a:?} of its source {i}");
                    return Err(PlanFault::Placement { tensor, device, expected, found: format!("bytes {b:?}") });
                }
            }
        }
    }
    Ok(())
}
