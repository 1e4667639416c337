//! Plan verifier: checks that a plan computes what its task describes, in every order in which its queues may run.
//!
//! - `structure` checks everything that needs no replay: indices, placement, alignment, and that each step runs on a fitting queue.
//! - `replay` (read this first) executes the plan symbolically for several runs. Each byte carries its writer and its position in
//!   its slot instead of data. A reference execution runs all nodes in order, with separate memory for each slot; every read of
//!   the plan must find the same writer as the reference.
//! - `replay` also detects races with vector clocks. Two steps on different queues that touch the same bytes, at least one of
//!   them writing, must be ordered by queue order and waits. Without races, every interleaving of the queues has the outcome of
//!   the replay.
//! - `collectives` checks that the ranks of a group run the same collectives, and that no rank waits for ever.
//! - `reads` lists what each node reads, and the host after a run.
//! - `byte_map` is the interval map that both executions store their bytes in.
//!
//! The verifier computes hazards and memory ranges itself and does not reuse the results of the planning passes: a bug in a
//! planning pass would otherwise hide itself.

mod byte_map;
mod collectives;
#[cfg(test)]
mod mutations;
mod reads;
mod replay;
mod structure;
#[cfg(test)]
mod tests;

use super::{ArenaKind, Devices, Plan, QueueRole, StepAction, Storage};
use std::fmt::Write as _;
use std::ops::Range;
use thiserror::Error;

/// The first defect found in a plan, with the expected and the actual state.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum PlanFault {
    /// Parts of the plan contradict each other, or an index is out of range.
    #[error("{what}: expected {expected}, found {found}")]
    Structure { what: String, expected: String, found: String },
    /// A tensor lies outside its buffer, is misaligned or too small, or overlaps a source that must not be overwritten.
    #[error("{tensor} on {device}: expected {expected}, found {found}")]
    Placement { tensor: String, device: String, expected: String, found: String },
    /// Deadlock: a step waits for a mark that is submitted only after the step.
    #[error("{step} waits for mark {mark}, which no earlier step of this run makes")]
    Wait { step: String, mark: u32 },
    /// A read finds bytes of another writer, run or position than in the reference execution.
    #[error("{read} in {step}: expected {expected}, found {found}")]
    Value { read: String, step: String, expected: String, found: String },
    /// Data race: two steps touch the same bytes, at least one writes, and neither queue order nor a wait orders them.
    #[error(
        "{first} and {second} both touch bytes {bytes:?} of {memory}, at least one writes, and no wait orders them"
    )]
    Race { first: String, second: String, memory: String, bytes: Range<u64> },
}

/// Checks the structure of a plan and replays it for `2 * depth + 2` runs: each ring copy is used at least twice.
///
/// # Errors
/// The first [`PlanFault`] found.
pub(crate) fn verify(plan: &Plan, devices: &Devices) -> Result<(), PlanFault> {
    structure::check(plan, devices)?;
    collectives::check(plan)?;
    let runs = 2 * plan.depth + 2;
    replay::replay(plan, runs)
}

/// A byte offset in one memory of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ByteLocation {
    memory: ReplayMemory,
    start: u64,
}

/// A memory of a plan. A ring buffer stands for the copy that the current run uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReplayMemory {
    Arena { device: usize, kind: ArenaKind, buffer: u32 },
    Stored { slot: u32 },
}

impl ByteLocation {
    /// Where the nodes of a split read a slot's bytes: at home or in one of the split's replicas.
    fn in_split(plan: &Plan, split: usize, slot: u32, bytes: &Range<usize>) -> Option<ByteLocation> {
        let split = &plan.split_graph.splits[split];
        if plan.split_graph.homes[slot as usize] == Some(split.device) {
            return ByteLocation::at_home(plan, slot, bytes);
        }
        let found = split.reads.iter().find(|&&number| {
            let replica = &plan.split_graph.replicas[number as usize];
            replica.slot == slot && replica.range.start <= bytes.start && bytes.end <= replica.range.end
        });
        let number = *found?;
        let skipped = bytes.start - plan.split_graph.replicas[number as usize].range.start;
        let at = ByteLocation::of_replica(plan, number);
        Some(ByteLocation { start: at.start + skipped as u64, ..at })
    }

    /// Where a slot's bytes lie on its home device.
    fn at_home(plan: &Plan, slot: u32, bytes: &Range<usize>) -> Option<ByteLocation> {
        let start = bytes.start as u64;
        if let Storage::Stored { .. } = plan.task.storage()[slot as usize] {
            return Some(ByteLocation { memory: ReplayMemory::Stored { slot }, start });
        }
        let (device, allocation) = (plan.split_graph.homes[slot as usize]?, plan.layout.slots[slot as usize]?);
        let memory = ReplayMemory::Arena { device, kind: allocation.kind, buffer: allocation.buffer };
        Some(ByteLocation { memory, start: allocation.offset + start })
    }

    fn of_replica(plan: &Plan, number: u32) -> ByteLocation {
        let (replica, allocation) =
            (&plan.split_graph.replicas[number as usize], plan.layout.replicas[number as usize]);
        ByteLocation {
            memory: ReplayMemory::Arena { device: replica.device, kind: allocation.kind, buffer: allocation.buffer },
            start: allocation.offset,
        }
    }
}

/// A slot's label in messages: its tensor's name where there is one, and its number.
fn slot_name(plan: &Plan, slot: u32) -> String {
    let name = plan.task.slot_tensor(slot).map_or("", |id| plan.task.name(id));
    if name.is_empty() { format!("slot {slot}") } else { format!("{name:?} (slot {slot})") }
}

/// A step's label in messages: its number, its action and its queue.
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
        StepAction::Download(number) => format!("download for {}", replica(number)),
        StepAction::UploadStaged(number) => format!("staged upload to {}", replica(number)),
        StepAction::CopyExperts(number) => format!("copy of experts to {}", replica(number)),
        StepAction::RunSplit(number) => format!("split {number}"),
    };
    let _ = write!(text, " ({work}");
    if let Some(queue) = plan.queues.get(step.queue) {
        let role = if queue.role == QueueRole::Compute { "compute" } else { "transfer" };
        let device = plan.devices.get(queue.device).map_or("no device", String::as_str);
        let _ = write!(text, ", {role} queue {} of {device}", step.queue);
    }
    text + ")"
}
