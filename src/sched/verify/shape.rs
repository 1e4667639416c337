//! That the parts of a plan fit together, and that everything has its place, whatever happens there.

use super::{At, Fault, slot_name, step_name};
use crate::device::Device;
use crate::sched::{Area, Devices, Lane, LaneKind, Origin, Plan, Spot, Storage, Work, node_name};
use std::fmt::Display;
use std::ops::Range;

pub(super) fn check(plan: &Plan, devices: &Devices) -> Result<(), Fault> {
    numbers(plan, devices)?;
    cut(plan)?;
    steps(plan)?;
    marks(plan)?;
    rooms(plan, devices)?;
    spots(plan, devices)?;
    operands(plan)
}

/// A fault unless two things are equal.
fn same<T: PartialEq + Display>(what: impl FnOnce() -> String, expected: T, found: T) -> Result<(), Fault> {
    fits(expected == found, what, &expected, &found)
}

fn fits(holds: bool, what: impl FnOnce() -> String, expected: &dyn Display, found: &dyn Display) -> Result<(), Fault> {
    let fault = || Fault::Shape { what: what(), expected: expected.to_string(), found: found.to_string() };
    if holds { Ok(()) } else { Err(fault()) }
}

/// That nothing names what is not there: after this, the rest may look things up by their numbers.
fn numbers(plan: &Plan, devices: &Devices) -> Result<(), Fault> {
    let below = |what: &str, number: usize, of: usize| {
        fits(number < of, || what.to_owned(), &format_args!("a number below {of}"), &number)
    };
    let (nodes, slots) = (plan.task.graph().nodes().len(), plan.task.storage().len());
    let Plan { cut, layout, .. } = plan;
    let lengths = [
        ("names of devices", devices.len(), plan.devices.len()),
        ("rooms", devices.len(), layout.rooms.len()),
        ("assigned nodes", nodes, plan.assigned.len()),
        ("homes of slots", slots, cut.homes.len()),
        ("spots of slots", slots, layout.slots.len()),
        ("spots of replicas", cut.replicas.len(), layout.replicas.len()),
    ];
    for (what, expected, found) in lengths {
        same(|| format!("number of {what}"), expected, found)?;
    }
    fits(plan.depth > 0, || "depth".to_owned(), &"at least 1", &plan.depth)?;
    for (at, lane) in plan.lanes.iter().enumerate() {
        below("a lane's device", lane.device, devices.len())?;
        fits(!plan.lanes[..at].contains(lane), || format!("lane {at}"), &"another lane than before", &"the same")?;
    }
    for home in cut.homes.iter().flatten() {
        below("a slot's home", *home, devices.len())?;
    }
    for split in &cut.splits {
        below("a split's device", split.device, devices.len())?;
        split.reads.iter().try_for_each(|&r| below("a replica that a split reads", r as usize, cut.replicas.len()))?;
    }
    for replica in &cut.replicas {
        below("a replica's device", replica.device, devices.len())?;
        below("a replica's slot", replica.slot as usize, slots)?;
        below("a replica's split", replica.split, cut.splits.len())?;
        if let Origin::Device(home) | Origin::Experts { home, .. } = replica.origin {
            below("a replica's home", home, devices.len())?;
        }
    }
    for step in &plan.steps {
        below("a step's lane", step.lane, plan.lanes.len())?;
        match step.work {
            Work::Run(split) => below("a step's split", split as usize, cut.splits.len())?,
            Work::Upload(r) | Work::Copy(r) | Work::Fetch(r) | Work::Deliver(r) | Work::Experts(r) => {
                below("a step's replica", r as usize, cut.replicas.len())?;
            }
        }
    }
    Ok(())
}

/// That splits have all nodes, each on its device, and that replicas are of what lies elsewhere.
fn cut(plan: &Plan) -> Result<(), Fault> {
    let (task, cut) = (&plan.task, &plan.cut);
    let mut next = 0;
    for (number, split) in cut.splits.iter().enumerate() {
        same(|| format!("first node of split {number}"), next, split.nodes.start)?;
        next = split.nodes.end.max(next);
        for node in split.nodes.clone().take_while(|&node| node < plan.assigned.len()) {
            let device = plan.assigned[node].device;
            same(|| format!("device of {} in split {number}", node_name(task, node)), device, split.device)?;
        }
        for (at, &a) in split.reads.iter().enumerate() {
            let a = &cut.replicas[a as usize];
            let what = || format!("a replica of {} that split {number} reads", slot_name(plan, a.slot));
            same(what, split.device, a.device)?;
            fits(a.split <= number, what, &"one that is made before", &"one made later")?;
            let apart = |b: &u32| {
                let b = &cut.replicas[*b as usize];
                a.slot != b.slot || a.range.end <= b.range.start || b.range.end <= a.range.start
            };
            fits(split.reads[..at].iter().all(apart), what, &"disjoint ones", &"two that overlap")?;
        }
    }
    same(|| "nodes in splits".to_owned(), task.graph().nodes().len(), next)?;
    for (slot, (storage, &home)) in task.storage().iter().zip(&cut.homes).enumerate() {
        let expected = match *storage {
            Storage::Stored { device, .. } => Some(device),
            Storage::Input => None,
            Storage::Computed => home,
        };
        let what = || format!("home of {}", slot_name(plan, slot as u32));
        fits(expected == home, what, &format_args!("{expected:?}"), &format_args!("{home:?}"))?;
    }
    for (number, replica) in cut.replicas.iter().enumerate() {
        let what = || format!("replica {number} of {}", slot_name(plan, replica.slot));
        let home = cut.homes[replica.slot as usize];
        let from = match replica.origin {
            Origin::Host => None,
            Origin::Device(home) | Origin::Experts { home, .. } => Some(home),
        };
        fits(home == from, what, &format_args!("home {home:?}"), &format_args!("{from:?}"))?;
        fits(home != Some(replica.device), what, &"one away from its home", &"one on it")?;
        let slot = task.graph().slots()[replica.slot as usize];
        let inside = replica.range.start < replica.range.end && replica.range.end <= slot;
        fits(inside, what, &format_args!("some of {slot} bytes"), &format_args!("{:?}", replica.range))?;
    }
    Ok(())
}

/// That each split runs once and each replica is made once, by the right kind of step on the right lane.
fn steps(plan: &Plan) -> Result<(), Fault> {
    let mut runs = vec![0; plan.cut.splits.len()];
    // By replica: how often it is written, and how often its bytes are fetched.
    let mut made = vec![0; plan.cut.replicas.len()];
    let mut fetched = made.clone();
    for (at, step) in plan.steps.iter().enumerate() {
        let lane = plan.lanes[step.lane];
        let what = || step_name(plan, at);
        let (device, origin) = match step.work {
            Work::Run(split) => {
                runs[split as usize] += 1;
                let expected = Lane { device: plan.cut.splits[split as usize].device, kind: LaneKind::Compute };
                let texts = [expected, lane].map(|lane| format!("{lane:?}"));
                fits(expected == lane, what, &texts[0], &texts[1])?;
                continue;
            }
            Work::Upload(r) | Work::Copy(r) | Work::Fetch(r) | Work::Deliver(r) | Work::Experts(r) => {
                let fetch = matches!(step.work, Work::Fetch(_));
                let count = if fetch { &mut fetched } else { &mut made };
                count[r as usize] += 1;
                let replica = &plan.cut.replicas[r as usize];
                (replica.device, replica.origin)
            }
        };
        let right = match (step.work, origin) {
            (Work::Upload(_), Origin::Host) | (Work::Experts(_), Origin::Experts { .. }) => device == lane.device,
            (Work::Copy(_), Origin::Device(home)) => device == lane.device && plan.reach.copies(device, home),
            (Work::Fetch(_), Origin::Device(home)) => lane == Lane { device: home, kind: LaneKind::Compute },
            (Work::Deliver(_), Origin::Device(_)) => device == lane.device,
            _ => false,
        };
        let found = format!("origin {origin:?}, lane {lane:?}");
        fits(
            right,
            what,
            &format_args!("a replica of that origin, on a lane that can make it on device {device}"),
            &found,
        )?;
    }
    for (split, &times) in runs.iter().enumerate() {
        same(|| format!("times that split {split} runs"), 1, times)?;
    }
    for (replica, &times) in made.iter().enumerate() {
        same(|| format!("times that replica {replica} is made"), 1, times)?;
        let delivered = plan.steps.iter().any(|step| step.work == Work::Deliver(replica as u32));
        same(|| format!("times that replica {replica} is fetched"), i32::from(delivered), fetched[replica])?;
    }
    Ok(())
}

/// That marks are numbered, waits name them, and each lane ends with one.
fn marks(plan: &Plan) -> Result<(), Fault> {
    let mut made = vec![false; plan.marks as usize];
    let mut last = vec![None; plan.lanes.len()];
    for (at, step) in plan.steps.iter().enumerate() {
        last[step.lane] = Some(at);
        for wait in &step.waits {
            let what = || format!("{}: a wait for mark {} of {} runs ago", step_name(plan, at), wait.mark, wait.ago);
            fits(wait.mark < plan.marks, what, &format_args!("one of {} marks", plan.marks), &wait.mark)?;
            fits(wait.ago as usize <= plan.depth, what, &format_args!("at most {}", plan.depth), &wait.ago)?;
        }
        if let Some(mark) = step.mark {
            let fresh = made.get_mut(mark as usize).is_some_and(|made| !std::mem::replace(made, true));
            fits(fresh, || step_name(plan, at), &"a mark of its own", &mark)?;
        }
    }
    fits(made.iter().all(|&made| made), || "marks".to_owned(), &"each made by a step", &"one that is not")?;
    for at in last.into_iter().flatten() {
        fits(plan.steps[at].mark.is_some(), || step_name(plan, at), &"a mark, as the last of its lane", &"none")?;
    }
    Ok(())
}

fn rooms(plan: &Plan, devices: &Devices) -> Result<(), Fault> {
    for (device, room) in devices.iter().zip(&plan.layout.rooms) {
        let info = device.info();
        for &bytes in room.arena.iter().chain(&room.ring) {
            let what = || format!("a buffer of {}", info.name);
            fits(bytes <= info.max_buffer, what, &format_args!("at most {} bytes", info.max_buffer), &bytes)?;
        }
    }
    Ok(())
}

/// That spots lie inside rooms, begin where tensors may, and have what devices want reserved.
fn spots(plan: &Plan, devices: &Devices) -> Result<(), Fault> {
    let (graph, storage) = (plan.task.graph(), plan.task.storage());
    let mut slots: Vec<u64> = graph.slots().iter().map(|&bytes| bytes as u64).collect();
    let mut replicas: Vec<u64> = plan.cut.replicas.iter().map(|replica| replica.range.len() as u64).collect();
    for (number, split) in plan.cut.splits.iter().enumerate() {
        for node in &graph.nodes()[split.nodes.clone()] {
            let written = plan.task.written(node).map(|(slot, range)| (node.dst, slot, range));
            for (id, slot, range) in plan.task.reads(node).chain(written) {
                let wanted = graph.tensor(id).map_or(0, |tensor| devices[split.device].alloc_size(&tensor.desc));
                let has = |r: &&u32| replica_has(plan, **r, slot, &range);
                if plan.cut.homes[slot as usize] == Some(split.device) {
                    let least = &mut slots[slot as usize];
                    *least = (*least).max(range.start as u64 + wanted);
                } else if let Some(&replica) = split.reads.iter().find(has) {
                    let from = range.start - plan.cut.replicas[replica as usize].range.start;
                    let least = &mut replicas[replica as usize];
                    *least = (*least).max(from as u64 + wanted);
                } else {
                    let tensor = format!("{} for split {number}", slot_name(plan, slot));
                    let device = devices[split.device].info().name.clone();
                    let expected = format!("a replica of its bytes {range:?}");
                    return Err(Fault::Place { tensor, device, expected, found: "none".to_owned() });
                }
            }
        }
    }
    for (slot, spot) in plan.layout.slots.iter().enumerate() {
        let name = || slot_name(plan, slot as u32);
        match (&storage[slot], spot, plan.cut.homes[slot]) {
            (Storage::Computed, Some(spot), Some(home)) => {
                check_spot(plan, &*devices[home], home, *spot, slots[slot], name)?;
            }
            (Storage::Computed, None, None) | (Storage::Stored { .. } | Storage::Input, None, _) => {}
            (_, spot, home) => {
                let found = format!("spot {spot:?}, home {home:?}");
                return Err(Fault::Shape { what: name(), expected: "a spot at its home".to_owned(), found });
            }
        }
    }
    for (number, (replica, spot)) in plan.cut.replicas.iter().zip(&plan.layout.replicas).enumerate() {
        let name = || format!("replica {number} of {}", slot_name(plan, replica.slot));
        check_spot(plan, &*devices[replica.device], replica.device, *spot, replicas[number], name)?;
    }
    Ok(())
}

fn replica_has(plan: &Plan, replica: u32, slot: u32, range: &Range<usize>) -> bool {
    let replica = &plan.cut.replicas[replica as usize];
    replica.slot == slot && replica.range.start <= range.start && range.end <= replica.range.end
}

fn check_spot(
    plan: &Plan,
    device: &dyn Device,
    number: usize,
    spot: Spot,
    least: u64,
    name: impl Fn() -> String,
) -> Result<(), Fault> {
    let (info, room) = (device.info(), &plan.layout.rooms[number]);
    let fault = |expected: String| {
        Err(Fault::Place { tensor: name(), device: info.name.clone(), expected, found: format!("{spot:?}") })
    };
    let buffers = if spot.area == Area::Arena { &room.arena } else { &room.ring };
    let Some(&buffer) = buffers.get(spot.chunk as usize) else {
        return fault(format!("one of {} buffers", buffers.len()));
    };
    if spot.offset.checked_add(spot.bytes).is_none_or(|end| end > buffer) {
        return fault(format!("a place inside {buffer} bytes"));
    }
    if !spot.offset.is_multiple_of(info.alignment.max(1)) {
        return fault(format!("a multiple of {}", info.alignment));
    }
    if spot.bytes < least { fault(format!("at least {least} bytes")) } else { Ok(()) }
}

/// That destinations share bytes with sources of other slots only where the op may work in place.
fn operands(plan: &Plan) -> Result<(), Fault> {
    let graph = plan.task.graph();
    for (number, split) in plan.cut.splits.iter().enumerate() {
        for at in split.nodes.clone() {
            let node = &graph.nodes()[at];
            let Some((dst, written)) = plan.task.written(node) else { continue };
            if plan.cut.homes[dst as usize] != Some(split.device) {
                let what = format!("home of {}, which {} writes", slot_name(plan, dst), node_name(&plan.task, at));
                let found = format!("{:?}", plan.cut.homes[dst as usize]);
                return Err(Fault::Shape { what, expected: format!("{:?}", Some(split.device)), found });
            }
            let Some(to) = At::at_home(plan, dst, &written) else { continue };
            let sources = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
            for (i, id) in sources.filter(|&(i, _)| !node.op.writes_onto(i)) {
                let Some((slot, read)) = plan.task.span(id).filter(|(slot, _)| *slot != dst) else { continue };
                let Some(from) = At::in_split(plan, number, slot, &read) else { continue };
                let (a, b) = (from.start..from.start + read.len() as u64, to.start..to.start + written.len() as u64);
                if from.memory != to.memory || a.start >= b.end || b.start >= a.end || a.is_empty() || b.is_empty() {
                    continue;
                }
                let alike = graph.tensor(id).zip(graph.tensor(node.dst));
                let alike = alike.is_some_and(|(a, b)| a.desc.same_layout(&b.desc));
                if !(node.op.in_place(i) && alike && from.start == to.start) {
                    let tensor = format!("the destination of {}", node_name(&plan.task, at));
                    let device = plan.devices[split.device].clone();
                    let expected = format!("none of the bytes {a:?} of its source {i}");
                    return Err(Fault::Place { tensor, device, expected, found: format!("bytes {b:?}") });
                }
            }
        }
    }
    Ok(())
}
