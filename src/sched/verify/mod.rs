//! That a plan does what its task says, in whatever order its lanes run.
//!
//! A plan is replayed for several runs, with marks in the place of bytes: who wrote them, and which byte of which slot they
//! are. Each node has to find what it would find if all nodes ran one after another on memory of their own. Two steps of
//! different lanes that touch the same bytes, one of them writing, have to be ordered by lanes and waits; then whatever the
//! lanes do has the outcome of the replay. Nothing here uses what the planning passes know about waits and memory.

mod byte_map;
#[cfg(test)]
mod mutations;
mod replay;
mod structure;
#[cfg(test)]
mod tests;

use super::{ArenaKind, Devices, Plan, QueueRole, StepAction, Storage};
use std::fmt::Write as _;
use std::ops::Range;
use thiserror::Error;

/// What is wrong with a plan.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum PlanFault {
    /// Parts that do not fit together.
    #[error("{what}: expected {expected}, found {found}")]
    Structure { what: String, expected: String, found: String },
    /// A tensor that does not lie where it could.
    #[error("{tensor} on {device}: expected {expected}, found {found}")]
    Placement { tensor: String, device: String, expected: String, found: String },
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
pub(crate) fn verify(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    structure::check(plan, devices)?;
    let runs = 2 * plan.depth + 2;
    replay::replay(plan, runs)
}

/// Where bytes lie, for a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ByteLocation {
    memory: ReplayMemory,
    start: u64,
}

/// A memory of a plan; of a ring, each run's copy of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReplayMemory {
    Arena { device: usize, area: ArenaKind, chunk: u32 },
    Stored { slot: u32 },
}

impl ByteLocation {
    /// Where the nodes of a split find a slot's bytes.
    fn in_split(plan: &Plan, split: usize, slot: u32, bytes: &Range<usize>) -> Option<ByteLocation> {
        let split = &plan.split_graph.splits[split];
        if plan.split_graph.homes[slot as usize] == Some(split.device) {
            return ByteLocation::at_home(plan, slot, bytes);
        }
        let held = split.reads.iter().find(|&&number| {
            let replica = &plan.split_graph.replicas[number as usize];
            replica.slot == slot && replica.range.start <= bytes.start && bytes.end <= replica.range.end
        });
        let number = *held?;
        let skipped = bytes.start - plan.split_graph.replicas[number as usize].range.start;
        let at = ByteLocation::of_replica(plan, number);
        Some(ByteLocation { start: at.start + skipped as u64, ..at })
    }

    /// Where a slot's bytes lie on its own device.
    fn at_home(plan: &Plan, slot: u32, bytes: &Range<usize>) -> Option<ByteLocation> {
        let start = bytes.start as u64;
        if let Storage::Stored { .. } = plan.task.storage()[slot as usize] {
            return Some(ByteLocation { memory: ReplayMemory::Stored { slot }, start });
        }
        let (device, spot) = (plan.split_graph.homes[slot as usize]?, plan.layout.slots[slot as usize]?);
        let memory = ReplayMemory::Arena { device, area: spot.kind, chunk: spot.buffer };
        Some(ByteLocation { memory, start: spot.offset + start })
    }

    fn of_replica(plan: &Plan, number: u32) -> ByteLocation {
        let (replica, spot) = (&plan.split_graph.replicas[number as usize], plan.layout.replicas[number as usize]);
        ByteLocation {
            memory: ReplayMemory::Arena { device: replica.device, area: spot.kind, chunk: spot.buffer },
            start: spot.offset,
        }
    }
}

/// What a slot is called in messages.
fn slot_name(plan: &Plan, slot: u32) -> String {
    let name = plan.task.slot_tensor(slot).map_or("", |id| plan.task.name(id));
    if name.is_empty() { format!("slot {slot}") } else { format!("{name:?} (slot {slot})") }
}

/// What a step is called in messages.
fn step_name(plan: &Plan, number: usize) -> String {
    let mut text = format!("step {number}");
    let Some(step) = plan.steps.get(number) else { return text };
    let replica = |number: u32| {
        let slot = plan.split_graph.replicas.get(number as usize).map(|replica| slot_name(plan, replica.slot));
        format!("replica {number} of {}", slot.unwrap_or_default())
    };
    let work = match step.action {
        StepAction::UploadInput(number) => format!("upload of {}", replica(number)),
        StepAction::DeviceCopy(number) => format!("copy to {}", replica(number)),
        StepAction::Download(number) => format!("fetch for {}", replica(number)),
        StepAction::UploadStaged(number) => format!("delivery to {}", replica(number)),
        StepAction::CopyExperts(number) => format!("experts for {}", replica(number)),
        StepAction::RunSplit(number) => format!("split {number}"),
    };
    let _ = write!(text, " ({work}");
    if let Some(lane) = plan.queues.get(step.queue) {
        let kind = if lane.role == QueueRole::Compute { "computing" } else { "bringing" };
        let device = plan.devices.get(lane.device).map_or("no device", String::as_str);
        let _ = write!(text, ", {kind} lane {} of {device}", step.queue);
    }
    text + ")"
}
