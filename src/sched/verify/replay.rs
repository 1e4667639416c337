//! Symbolic execution of a plan: several runs in submission order, with a writer and a position for each byte instead of data.
//!
//! Each read of a step is compared with the reference execution ([`Replay::run_reference`]). Each access is checked for races
//! with vector clocks.

use super::byte_map::ByteMap;
use super::reads::{Read, Reads};
use super::{ByteLocation, PlanFault, ReplayMemory, slot_name, step_name};
use crate::sched::{ArenaKind, Plan, QueueRole, ReplicaOrigin, StepAction, Storage, node_name};
use std::ops::Range;

/// Replays a plan that has passed the structural checks.
pub(super) fn replay(plan: &Plan, runs: usize) -> Result<(), PlanFault> {
    let reads = Reads::new(plan);
    let mut replay = Replay::new(plan, &reads);
    for run in 0..runs {
        replay.run_reference(run);
        for step in 0..plan.steps.len() {
            replay.run_step(run, step)?;
        }
        replay.check_outputs(run)?;
    }
    Ok(())
}

/// The last writer of a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writer {
    /// The bytes were not written, or not in this run: their contents are undefined.
    Unwritten,
    /// Contents from before the first run.
    Stored {
        slot: u32,
    },
    /// The host, as an input of a run.
    Host {
        slot: u32,
        run: usize,
    },
    Node {
        node: usize,
        run: usize,
    },
}

/// The symbolic value of a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ByteValue {
    writer: Writer,
    /// The byte's offset in memory minus its offset in its slot. A wrong shift means the right writer but the wrong byte.
    shift: i64,
}

/// An executed step: the `count`-th on its queue over all runs, from 1 on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StepEvent {
    queue: usize,
    count: u32,
}

/// A byte of a memory: its value, and the last steps that accessed it.
#[derive(Clone, Debug)]
struct ByteState {
    value: ByteValue,
    written: Option<StepEvent>,
    /// The last read since then, one for each queue.
    read: Vec<StepEvent>,
}

/// Ranges of bytes and their values.
type ByteValues = Vec<(Range<u64>, ByteValue)>;

/// By queue: how many of its steps have completed.
type VectorClock = Vec<u32>;

struct Replay<'a> {
    plan: &'a Plan,
    reads: &'a Reads,
    /// By slot: the writers that the reference execution leaves there.
    slots: Vec<ByteMap<Writer>>,
    /// By read: the writers that it must find in the current run, as a range of `values`.
    expected: Vec<Range<usize>>,
    values: Vec<(Range<u64>, Writer)>,
    memories: Vec<ByteMap<ByteState>>,
    /// By device: the index of its first arena memory.
    arenas: Vec<usize>,
    /// By device: the index of its first ring memory. All copies of a ring buffer are adjacent.
    rings: Vec<usize>,
    /// By slot: the index of its memory, for stored slots.
    stored: Vec<Option<usize>>,
    /// By queue: the completed steps that its next step is ordered after.
    clocks: Vec<VectorClock>,
    /// By queue: its steps.
    steps: Vec<Vec<usize>>,
    /// By run and mark: the clock of the queue that made the mark, at that step.
    marks: Vec<Vec<Option<VectorClock>>>,
    /// By replica: the bytes downloaded for it in this run, and the clock of the downloading queue.
    downloads: Vec<Option<(VectorClock, ByteValues)>>,
}

impl<'a> Replay<'a> {
    fn new(plan: &'a Plan, reads: &'a Reads) -> Replay<'a> {
        let (graph, storage) = (plan.task.graph(), plan.task.storage());
        let start = |slot: usize| match storage[slot] {
            Storage::Stored { .. } => Writer::Stored { slot: slot as u32 },
            Storage::Input | Storage::Computed => Writer::Unwritten,
        };
        let slots = graph.slot_sizes().iter().enumerate();
        let slots = slots.map(|(slot, &bytes)| ByteMap::new(bytes as u64, start(slot))).collect();
        let byte = |writer| ByteState { value: ByteValue { writer, shift: 0 }, written: None, read: Vec::new() };
        let mut memories: Vec<ByteMap<ByteState>> = Vec::new();
        let (mut arenas, mut rings) = (Vec::new(), Vec::new());
        for sizes in &plan.layout.arenas {
            arenas.push(memories.len());
            memories.extend(sizes.arena.iter().map(|&bytes| ByteMap::new(bytes, byte(Writer::Unwritten))));
            rings.push(memories.len());
            let copies = sizes.ring.iter().flat_map(|&bytes| std::iter::repeat_n(bytes, plan.depth));
            memories.extend(copies.map(|bytes| ByteMap::new(bytes, byte(Writer::Unwritten))));
        }
        let mut stored = vec![None; storage.len()];
        for (slot, _) in storage.iter().enumerate().filter(|(_, s)| matches!(s, Storage::Stored { .. })) {
            stored[slot] = Some(memories.len());
            memories.push(ByteMap::new(graph.slot_sizes()[slot] as u64, byte(start(slot))));
        }
        let mut steps = vec![Vec::new(); plan.queues.len()];
        plan.steps.iter().enumerate().for_each(|(at, step)| steps[step.queue].push(at));
        Replay {
            plan,
            reads,
            slots,
            expected: vec![0..0; reads.count],
            values: Vec::new(),
            memories,
            arenas,
            rings,
            stored,
            clocks: vec![vec![0; plan.queues.len()]; plan.queues.len()],
            steps,
            marks: Vec::new(),
            downloads: vec![None; plan.split_graph.replicas.len()],
        }
    }

    /// Reference execution: runs all nodes in order, each slot in separate memory, and records the writers that each read
    /// finds.
    fn run_reference(&mut self, run: usize) {
        let (graph, storage) = (self.plan.task.graph(), self.plan.task.storage());
        self.values.clear();
        for (slot, bytes) in self.slots.iter_mut().enumerate() {
            let all = 0..graph.slot_sizes()[slot] as u64;
            match storage[slot] {
                Storage::Input => bytes.set(all, Writer::Host { slot: slot as u32, run }),
                Storage::Computed => bytes.set(all, Writer::Unwritten),
                Storage::Stored { .. } => {}
            }
        }
        let reads = self.reads;
        for (at, node) in graph.nodes().iter().enumerate() {
            reads.nodes[at].iter().for_each(|read| self.record_expected(read));
            if let Some((slot, range)) = self.plan.task.write_range(node) {
                self.slots[slot as usize].set(to_u64(&range), Writer::Node { node: at, run });
            }
        }
        reads.outputs.iter().for_each(|read| self.record_expected(read));
        self.marks.push(vec![None; self.plan.marks as usize]);
        self.downloads.fill(None);
    }

    fn record_expected(&mut self, read: &Read) {
        let first = self.values.len();
        let pieces = self.slots[read.slot as usize].pieces_in(to_u64(&read.range));
        self.values.extend(pieces.map(|(piece, writer)| (piece, *writer)));
        self.expected[read.number] = first..self.values.len();
    }

    fn run_step(&mut self, run: usize, number: usize) -> Result<(), PlanFault> {
        let step = &self.plan.steps[number];
        for wait in &step.waits {
            let Some(of) = run.checked_sub(wait.runs_ago as usize) else { continue };
            let Some(clock) = &self.marks[of][wait.mark as usize] else {
                return Err(PlanFault::Wait { step: step_name(self.plan, number), mark: wait.mark });
            };
            merge_clock(&mut self.clocks[step.queue], clock);
        }
        if let StepAction::UploadStaged(replica) = step.action
            && let Some((clock, _)) = &self.downloads[replica as usize]
        {
            merge_clock(&mut self.clocks[step.queue], clock);
        }
        self.clocks[step.queue][step.queue] += 1;
        self.run_action(run, number)?;
        if let Some(mark) = step.mark {
            self.marks[run][mark as usize] = Some(self.clocks[step.queue].clone());
        }
        Ok(())
    }

    fn run_action(&mut self, run: usize, number: usize) -> Result<(), PlanFault> {
        let (plan, step) = (self.plan, &self.plan.steps[number]);
        match step.action {
            StepAction::RunSplit(split) => self.run_split(run, number, split as usize),
            StepAction::UploadInput(replica) => {
                let Range { start, end } = to_u64(&plan.split_graph.replicas[replica as usize].range);
                let slot = plan.split_graph.replicas[replica as usize].slot;
                let host = ByteValue { writer: Writer::Host { slot, run }, shift: 0 };
                self.write_replica(run, number, replica, &[(start..end, host)])
            }
            StepAction::DeviceCopy(replica) => {
                let values = self.read_home(run, number, replica)?;
                self.write_replica(run, number, replica, &values)
            }
            StepAction::CopyExperts(replica) => {
                self.check_expert_ids(run, number, replica)?;
                let values = self.read_home(run, number, replica)?;
                self.write_replica(run, number, replica, &values)
            }
            StepAction::Download(replica) => {
                let values = self.read_home(run, number, replica)?;
                self.downloads[replica as usize] = Some((self.clocks[step.queue].clone(), values));
                Ok(())
            }
            StepAction::UploadStaged(replica) => {
                let Some((_, values)) = self.downloads[replica as usize].take() else {
                    return Err(PlanFault::Structure {
                        what: step_name(plan, number),
                        expected: "a download before the staged upload".to_owned(),
                        found: "none in this run".to_owned(),
                    });
                };
                self.write_replica(run, number, replica, &values)
            }
        }
    }

    /// Executes the nodes of a split in order.
    fn run_split(&mut self, run: usize, number: usize, split: usize) -> Result<(), PlanFault> {
        let plan = self.plan;
        for at in plan.split_graph.splits[split].nodes.clone() {
            for read in &self.reads.nodes[at] {
                if let Some(from) = ByteLocation::in_split(plan, split, read.slot, &read.range) {
                    self.read_expected(run, number, read, from)?;
                }
            }
            let Some((slot, range)) = plan.task.write_range(&plan.task.graph().nodes()[at]) else { continue };
            if let Some(to) = ByteLocation::at_home(plan, slot, &range) {
                let value =
                    ByteValue { writer: Writer::Node { node: at, run }, shift: to.start as i64 - range.start as i64 };
                self.write(run, number, to.memory, to.start..to.start + range.len() as u64, value)?;
            }
        }
        Ok(())
    }

    /// Checks that the expert ids that select the bytes to copy are the ids that the split's nodes read.
    fn check_expert_ids(&mut self, run: usize, number: usize, replica: u32) -> Result<(), PlanFault> {
        let plan = self.plan;
        let ReplicaOrigin::Experts { ids, .. } = plan.split_graph.replicas[replica as usize].origin else {
            return Ok(());
        };
        let (split, of) =
            (plan.split_graph.replicas[replica as usize].first_split, plan.split_graph.replicas[replica as usize].slot);
        let Some((slot, range)) = plan.task.span(ids) else { return Ok(()) };
        let reads = self.reads;
        let found = plan.split_graph.splits[split].nodes.clone().find_map(|at| {
            let uses = reads.nodes[at].iter().any(|read| read.slot == of);
            reads.nodes[at].iter().find(|read| uses && read.slot == slot && read.range == range)
        });
        let (Some(read), Some(from)) = (found, ByteLocation::in_split(plan, split, slot, &range)) else {
            return Err(PlanFault::Structure {
                what: step_name(plan, number),
                expected: format!("a node that reads the expert ids, {}", slot_name(plan, slot)),
                found: format!("none in split {split}"),
            });
        };
        self.read_expected(run, number, read, from)
    }

    /// Reads the bytes of a replica at the slot's home. Ranges and shifts of the result are relative to the slot.
    fn read_home(&mut self, run: usize, number: usize, replica: u32) -> Result<ByteValues, PlanFault> {
        let plan = self.plan;
        let (slot, range) =
            (plan.split_graph.replicas[replica as usize].slot, &plan.split_graph.replicas[replica as usize].range);
        let Some(home) = ByteLocation::at_home(plan, slot, range) else { return Ok(Vec::new()) };
        let pieces = self.read(run, number, home.memory, home.start..home.start + range.len() as u64)?;
        let shift = home.start as i64 - range.start as i64;
        let in_slot = |at: u64| at - home.start + range.start as u64;
        let moved = |(piece, value): (Range<u64>, ByteValue)| {
            (in_slot(piece.start)..in_slot(piece.end), ByteValue { shift: value.shift - shift, ..value })
        };
        Ok(pieces.into_iter().map(moved).collect())
    }

    /// Writes values, given relative to the slot, into a replica.
    fn write_replica(
        &mut self,
        run: usize,
        number: usize,
        replica: u32,
        values: &[(Range<u64>, ByteValue)],
    ) -> Result<(), PlanFault> {
        let at = ByteLocation::of_replica(self.plan, replica);
        let from = self.plan.split_graph.replicas[replica as usize].range.start as u64;
        for (piece, value) in values {
            let value = ByteValue { shift: value.shift + at.start as i64 - from as i64, ..*value };
            let place = |byte: u64| byte - from + at.start;
            self.write(run, number, at.memory, place(piece.start)..place(piece.end), value)?;
        }
        Ok(())
    }

    /// Checks the values that the host reads after a run on the compute queue of each slot's home.
    fn check_outputs(&mut self, run: usize) -> Result<(), PlanFault> {
        let plan = self.plan;
        for output in &self.reads.outputs {
            let home = plan.split_graph.homes[output.slot as usize];
            let queue =
                plan.queues.iter().position(|queue| Some(queue.device) == home && queue.role == QueueRole::Compute);
            let last = queue.and_then(|queue| self.steps[queue].last().copied());
            if let (Some(step), Some(from)) = (last, ByteLocation::at_home(plan, output.slot, &output.range)) {
                self.read_expected(run, step, output, from)?;
            }
        }
        Ok(())
    }

    /// Reads bytes and compares each with the reference. Bytes that the reference never wrote may hold anything.
    fn read_expected(&mut self, run: usize, number: usize, read: &Read, from: ByteLocation) -> Result<(), PlanFault> {
        let end = from.start + read.range.len() as u64;
        let found = self.read(run, number, from.memory, from.start..end)?;
        let shift = from.start as i64 - read.range.start as i64;
        let to_slot = |at: u64| (at as i64 - shift) as u64;
        let mut pieces = found.into_iter();
        let mut piece = pieces.next();
        for (range, writer) in &self.values[self.expected[read.number].clone()] {
            let mut at = range.start;
            while at < range.end {
                let Some((bytes, value)) = &piece else { break };
                let end = to_slot(bytes.end).min(range.end);
                let right = *value == ByteValue { writer: *writer, shift };
                if !right && *writer != Writer::Unwritten {
                    let reader = match read.node {
                        Some(node) => node_name(&self.plan.task, node),
                        None => "the host, after the run,".to_owned(),
                    };
                    let moved = value.shift - shift;
                    let misplaced = if moved == 0 { String::new() } else { format!(", misplaced by {moved} bytes") };
                    return Err(PlanFault::Value {
                        read: format!("{reader} reads bytes {at}..{end} of {}", slot_name(self.plan, read.slot)),
                        step: format!("run {run}'s {}", step_name(self.plan, number)),
                        expected: self.describe_writer(*writer),
                        found: self.describe_writer(value.writer) + &misplaced,
                    });
                }
                at = end;
                if to_slot(bytes.end) <= at {
                    piece = pieces.next();
                }
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        run: usize,
        number: usize,
        memory: ReplayMemory,
        range: Range<u64>,
    ) -> Result<ByteValues, PlanFault> {
        let queue = self.plan.steps[number].queue;
        let clock = &self.clocks[queue];
        let now = StepEvent { queue, count: clock[queue] };
        let (mut found, mut clash) = (Vec::new(), None);
        let index = self.index(memory, run);
        for (piece, byte) in self.memories[index].pieces_in(range) {
            if let Some(before) = byte.written.filter(|before| unordered(*before, now, clock)) {
                clash = Some((before, piece));
                break;
            }
            match byte.read.iter_mut().find(|read| read.queue == queue) {
                Some(read) => *read = now,
                None => byte.read.push(now),
            }
            found.push((piece, byte.value));
        }
        clash.map_or(Ok(found), |(before, piece)| Err(self.race(before, now, memory, piece)))
    }

    fn write(
        &mut self,
        run: usize,
        number: usize,
        memory: ReplayMemory,
        range: Range<u64>,
        value: ByteValue,
    ) -> Result<(), PlanFault> {
        let queue = self.plan.steps[number].queue;
        let clock = &self.clocks[queue];
        let now = StepEvent { queue, count: clock[queue] };
        let index = self.index(memory, run);
        let clash = self.memories[index].pieces_in(range.clone()).find_map(|(piece, byte)| {
            let mut before = byte.written.iter().chain(&byte.read);
            before.find(|before| unordered(**before, now, clock)).map(|before| (*before, piece))
        });
        if let Some((before, piece)) = clash {
            return Err(self.race(before, now, memory, piece));
        }
        self.memories[index].set(range, ByteState { value, written: Some(now), read: Vec::new() });
        Ok(())
    }

    fn index(&self, memory: ReplayMemory, run: usize) -> usize {
        let depth = self.plan.depth;
        match memory {
            ReplayMemory::Arena { device, kind: ArenaKind::Arena, buffer } => self.arenas[device] + buffer as usize,
            ReplayMemory::Arena { device, kind: ArenaKind::Ring, buffer } => {
                self.rings[device] + buffer as usize * depth + run % depth
            }
            // `ByteLocation::at_home` returns this variant for stored slots only, so the entry exists.
            ReplayMemory::Stored { slot } => self.stored[slot as usize].unwrap_or_default(),
        }
    }

    fn race(&self, first: StepEvent, second: StepEvent, memory: ReplayMemory, bytes: Range<u64>) -> PlanFault {
        let name = |event: StepEvent| {
            let steps = &self.steps[event.queue];
            let nth = event.count as usize - 1;
            format!("run {}'s {}", nth / steps.len(), step_name(self.plan, steps[nth % steps.len()]))
        };
        let memory = match memory {
            ReplayMemory::Arena { device, kind: ArenaKind::Arena, buffer } => {
                format!("the arena of {}, buffer {buffer}", self.plan.devices[device])
            }
            ReplayMemory::Arena { device, kind: ArenaKind::Ring, buffer } => {
                format!("the ring of {}, buffer {buffer}", self.plan.devices[device])
            }
            ReplayMemory::Stored { slot } => format!("stored {}", slot_name(self.plan, slot)),
        };
        PlanFault::Race { first: name(first), second: name(second), memory, bytes }
    }

    fn describe_writer(&self, writer: Writer) -> String {
        match writer {
            Writer::Unwritten => "undefined bytes".to_owned(),
            Writer::Stored { slot } => format!("contents of {} from before run 0", slot_name(self.plan, slot)),
            Writer::Host { slot, run } => format!("run {run}'s input {}", slot_name(self.plan, slot)),
            Writer::Node { node, run } => format!("the result of run {run}'s {}", node_name(&self.plan.task, node)),
        }
    }
}

/// Whether `before` is unordered with `now`: another queue executed it, and `now`'s clock does not include it.
fn unordered(before: StepEvent, now: StepEvent, clock: &VectorClock) -> bool {
    before.queue != now.queue && clock[before.queue] < before.count
}

fn merge_clock(clock: &mut VectorClock, more: &VectorClock) {
    clock.iter_mut().zip(more).for_each(|(count, more)| *count = (*count).max(*more));
}

fn to_u64(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}
