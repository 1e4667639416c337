//! That a plan does what its task says, in whatever order its lanes run.
//!
//! A plan is replayed for several runs, with marks in the place of bytes: who wrote them, and which byte of which slot they
//! are. Each node has to find what it would find if all nodes ran one after another on memory of their own. Two steps of
//! different lanes that touch the same bytes, one of them writing, have to be ordered by lanes and waits; then whatever the
//! lanes do has the outcome of the replay. Nothing here uses what the planning passes know about waits and memory.

mod bytes;
#[cfg(test)]
mod mutations;
mod replay;
mod shape;
#[cfg(test)]
mod tests;

use super::{Area, Devices, LaneKind, Plan, Storage, Work};
use std::fmt::Write as _;
use std::ops::Range;
use thiserror::Error;

/// What is wrong with a plan.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum Fault {
    /// Parts that do not fit together.
    #[error("{what}: expected {expected}, found {found}")]
    Shape { what: String, expected: String, found: String },
    /// A tensor that does not lie where it could.
    #[error("{tensor} on {device}: expected {expected}, found {found}")]
    Place { tensor: String, device: String, expected: String, found: String },
    /// A step that waits for what comes after it.
    #[error("{step} waits for mark {mark}, which this run has not made yet")]
    Wait { step: String, mark: u32 },
    /// A reader that does not find what it should.
    #[error("{read} in {step}: expected {expected}, found {found}")]
    Value { read: String, step: String, expected: String, found: String },
    /// Two steps that may run at once and must not.
    #[error("{first} and {second} both touch bytes {bytes:?} of {memory}, one writes, and nothing orders them")]
    Race { first: String, second: String, memory: String, bytes: Range<u64> },
}

/// Checks a plan.
///
/// # Errors
/// The first [`Fault`] found.
pub(crate) fn verify(plan: &Plan, devices: &Devices) -> Result<(), Fault> {
    shape::check(plan, devices)?;
    let runs = 2 * plan.depth + 2;
    replay::replay(plan, runs)
}

/// Where bytes lie, for a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct At {
    memory: Memory,
    start: u64,
}

/// A memory of a plan; of a ring, each run's copy of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Memory {
    Room { device: usize, area: Area, chunk: u32 },
    Stored { slot: u32 },
}

impl At {
    /// Where the nodes of a split find a slot's bytes.
    fn in_split(plan: &Plan, split: usize, slot: u32, bytes: &Range<usize>) -> Option<At> {
        let split = &plan.cut.splits[split];
        if plan.cut.homes[slot as usize] == Some(split.device) {
            return At::at_home(plan, slot, bytes);
        }
        let held = split.reads.iter().find(|&&number| {
            let replica = &plan.cut.replicas[number as usize];
            replica.slot == slot && replica.range.start <= bytes.start && bytes.end <= replica.range.end
        });
        let number = *held?;
        let skipped = bytes.start - plan.cut.replicas[number as usize].range.start;
        let at = At::replica(plan, number);
        Some(At { start: at.start + skipped as u64, ..at })
    }

    /// Where a slot's bytes lie on its own device.
    fn at_home(plan: &Plan, slot: u32, bytes: &Range<usize>) -> Option<At> {
        let start = bytes.start as u64;
        if let Storage::Stored { .. } = plan.task.storage()[slot as usize] {
            return Some(At { memory: Memory::Stored { slot }, start });
        }
        let (device, spot) = (plan.cut.homes[slot as usize]?, plan.layout.slots[slot as usize]?);
        let memory = Memory::Room { device, area: spot.area, chunk: spot.chunk };
        Some(At { memory, start: spot.offset + start })
    }

    fn replica(plan: &Plan, number: u32) -> At {
        let (replica, spot) = (&plan.cut.replicas[number as usize], plan.layout.replicas[number as usize]);
        At { memory: Memory::Room { device: replica.device, area: spot.area, chunk: spot.chunk }, start: spot.offset }
    }
}

/// What a slot is called in messages.
fn slot_name(plan: &Plan, slot: u32) -> String {
    let name = plan.task.owner(slot).map_or("", |id| plan.task.name(id));
    if name.is_empty() { format!("slot {slot}") } else { format!("{name:?} (slot {slot})") }
}

/// What a step is called in messages.
fn step_name(plan: &Plan, number: usize) -> String {
    let mut text = format!("step {number}");
    let Some(step) = plan.steps.get(number) else { return text };
    let replica = |number: u32| {
        let slot = plan.cut.replicas.get(number as usize).map(|replica| slot_name(plan, replica.slot));
        format!("replica {number} of {}", slot.unwrap_or_default())
    };
    let work = match step.work {
        Work::Upload(number) => format!("upload of {}", replica(number)),
        Work::Copy(number) => format!("copy to {}", replica(number)),
        Work::Fetch(number) => format!("fetch for {}", replica(number)),
        Work::Deliver(number) => format!("delivery to {}", replica(number)),
        Work::Experts(number) => format!("experts for {}", replica(number)),
        Work::Run(number) => format!("split {number}"),
    };
    let _ = write!(text, " ({work}");
    if let Some(lane) = plan.lanes.get(step.lane) {
        let kind = if lane.kind == LaneKind::Compute { "computing" } else { "bringing" };
        let device = plan.devices.get(lane.device).map_or("no device", String::as_str);
        let _ = write!(text, ", {kind} lane {} of {device}", step.lane);
    }
    text + ")"
}
