//! Runs of a plan, one after another, on marks in the place of bytes.

use super::bytes::Bytes;
use super::{At, Fault, Memory, slot_name, step_name};
use crate::graph::Node;
use crate::ops::OpCode;
use crate::sched::{Area, LaneKind, Origin, Plan, Storage, Work, node_name};
use std::ops::Range;

/// Replays a plan whose parts fit together.
pub(super) fn replay(plan: &Plan, runs: usize) -> Result<(), Fault> {
    let reads = Reads::new(plan);
    let mut replay = Replay::new(plan, &reads);
    for run in 0..runs {
        replay.expect(run);
        for step in 0..plan.steps.len() {
            replay.step(run, step)?;
        }
        replay.end(run)?;
    }
    Ok(())
}

/// Who wrote a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writer {
    /// Nobody, or nobody in this run.
    Nobody,
    /// It was there before the first run.
    Stored {
        slot: u32,
    },
    /// The host, an input of a run.
    Host {
        slot: u32,
        run: usize,
    },
    Node {
        node: usize,
        run: usize,
    },
}

/// What a byte holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    writer: Writer,
    /// How far in memory it lies after its place in its slot.
    shift: i64,
}

/// A step of some run: the `count`-th on its lane, from 1 on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Event {
    lane: usize,
    count: u32,
}

/// A byte of a memory: what it holds, and the last ones to touch it.
#[derive(Clone, Debug)]
struct Byte {
    value: Value,
    written: Option<Event>,
    /// Since then, the last one of each lane.
    read: Vec<Event>,
}

/// Bytes and what they hold.
type Pieces = Vec<(Range<u64>, Value)>;

/// By lane, how many of its steps have passed.
type Clock = Vec<u32>;

/// A slot's bytes that something reads, and its number among all reads of a run.
struct Read {
    number: usize,
    slot: u32,
    range: Range<usize>,
    /// As a slot's last values, not a node's source.
    node: Option<usize>,
}

/// All that is read in a run.
struct Reads {
    /// By node, in order.
    nodes: Vec<Vec<Read>>,
    /// Slots that someone may read after the run.
    outputs: Vec<Read>,
    /// How many there are.
    count: usize,
}

impl Reads {
    fn new(plan: &Plan) -> Reads {
        let (graph, storage) = (plan.task.graph(), plan.task.storage());
        let mut count = 0;
        let mut read = |node, (slot, range): (u32, Range<usize>)| {
            count += 1;
            Read { number: count - 1, slot, range, node }
        };
        let mut nodes: Vec<Vec<Read>> = Vec::with_capacity(graph.nodes().len());
        let mut written = vec![false; storage.len()];
        for (at, node) in graph.nodes().iter().enumerate() {
            let sources = plan.task.reads(node).map(|(_, slot, range)| (slot, range));
            let onto = plan.task.written(node).filter(|_| keeps_rest(plan, node));
            nodes.push(sources.chain(onto).map(|of| read(Some(at), of)).collect());
            if let Some((slot, _)) = plan.task.written(node) {
                written[slot as usize] = true;
            }
        }
        let seen = |&slot: &u32| {
            let stored = matches!(storage[slot as usize], Storage::Stored { .. });
            written[slot as usize] && (stored || plan.task.is_output(slot))
        };
        let outputs = (0..storage.len() as u32).filter(seen);
        let outputs = outputs.map(|slot| read(None, (slot, 0..graph.slots()[slot as usize]))).collect();
        Reads { nodes, outputs, count }
    }
}

struct Replay<'a> {
    plan: &'a Plan,
    reads: &'a Reads,
    /// By slot: what running one node after another leaves there.
    slots: Vec<Bytes<Writer>>,
    /// By read: what it has to find in the present run, as a range of `values`.
    expected: Vec<Range<usize>>,
    values: Vec<(Range<u64>, Writer)>,
    memories: Vec<Bytes<Byte>>,
    /// By device: the first of its memories; of the ring, all copies of a buffer lie together.
    arenas: Vec<usize>,
    rings: Vec<usize>,
    /// By slot, where stored.
    stored: Vec<Option<usize>>,
    /// By lane: what it knows, and its steps.
    clocks: Vec<Clock>,
    steps: Vec<Vec<usize>>,
    /// By run and mark: what its lane knew.
    marks: Vec<Vec<Option<Clock>>>,
    /// By replica: what was fetched for it in this run, and what the lane knew.
    fetched: Vec<Option<(Clock, Pieces)>>,
}

impl<'a> Replay<'a> {
    fn new(plan: &'a Plan, reads: &'a Reads) -> Replay<'a> {
        let (graph, storage) = (plan.task.graph(), plan.task.storage());
        let start = |slot: usize| match storage[slot] {
            Storage::Stored { .. } => Writer::Stored { slot: slot as u32 },
            Storage::Input | Storage::Computed => Writer::Nobody,
        };
        let slots = graph.slots().iter().enumerate();
        let slots = slots.map(|(slot, &bytes)| Bytes::new(bytes as u64, start(slot))).collect();
        let byte = |writer| Byte { value: Value { writer, shift: 0 }, written: None, read: Vec::new() };
        let mut memories: Vec<Bytes<Byte>> = Vec::new();
        let (mut arenas, mut rings) = (Vec::new(), Vec::new());
        for room in &plan.layout.rooms {
            arenas.push(memories.len());
            memories.extend(room.arena.iter().map(|&bytes| Bytes::new(bytes, byte(Writer::Nobody))));
            rings.push(memories.len());
            let copies = room.ring.iter().flat_map(|&bytes| std::iter::repeat_n(bytes, plan.depth));
            memories.extend(copies.map(|bytes| Bytes::new(bytes, byte(Writer::Nobody))));
        }
        let mut stored = vec![None; storage.len()];
        for (slot, _) in storage.iter().enumerate().filter(|(_, s)| matches!(s, Storage::Stored { .. })) {
            stored[slot] = Some(memories.len());
            memories.push(Bytes::new(graph.slots()[slot] as u64, byte(start(slot))));
        }
        let mut steps = vec![Vec::new(); plan.lanes.len()];
        plan.steps.iter().enumerate().for_each(|(at, step)| steps[step.lane].push(at));
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
            clocks: vec![vec![0; plan.lanes.len()]; plan.lanes.len()],
            steps,
            marks: Vec::new(),
            fetched: vec![None; plan.cut.replicas.len()],
        }
    }

    /// Runs all nodes, one after another, each slot on memory of its own, and notes what they read.
    fn expect(&mut self, run: usize) {
        let (graph, storage) = (self.plan.task.graph(), self.plan.task.storage());
        self.values.clear();
        for (slot, bytes) in self.slots.iter_mut().enumerate() {
            let all = 0..graph.slots()[slot] as u64;
            match storage[slot] {
                Storage::Input => bytes.set(all, Writer::Host { slot: slot as u32, run }),
                Storage::Computed => bytes.set(all, Writer::Nobody),
                Storage::Stored { .. } => {}
            }
        }
        let reads = self.reads;
        for (at, node) in graph.nodes().iter().enumerate() {
            reads.nodes[at].iter().for_each(|read| self.note(read));
            if let Some((slot, range)) = self.plan.task.written(node) {
                self.slots[slot as usize].set(wide(&range), Writer::Node { node: at, run });
            }
        }
        reads.outputs.iter().for_each(|read| self.note(read));
        self.marks.push(vec![None; self.plan.marks as usize]);
        self.fetched.fill(None);
    }

    fn note(&mut self, read: &Read) {
        let first = self.values.len();
        let pieces = self.slots[read.slot as usize].over(wide(&read.range));
        self.values.extend(pieces.map(|(piece, writer)| (piece, *writer)));
        self.expected[read.number] = first..self.values.len();
    }

    fn step(&mut self, run: usize, number: usize) -> Result<(), Fault> {
        let step = &self.plan.steps[number];
        for wait in &step.waits {
            let Some(of) = run.checked_sub(wait.ago as usize) else { continue };
            let Some(clock) = &self.marks[of][wait.mark as usize] else {
                return Err(Fault::Wait { step: step_name(self.plan, number), mark: wait.mark });
            };
            learn(&mut self.clocks[step.lane], clock);
        }
        if let Work::Deliver(replica) = step.work
            && let Some((clock, _)) = &self.fetched[replica as usize]
        {
            learn(&mut self.clocks[step.lane], clock);
        }
        self.clocks[step.lane][step.lane] += 1;
        self.work(run, number)?;
        if let Some(mark) = step.mark {
            self.marks[run][mark as usize] = Some(self.clocks[step.lane].clone());
        }
        Ok(())
    }

    fn work(&mut self, run: usize, number: usize) -> Result<(), Fault> {
        let (plan, step) = (self.plan, &self.plan.steps[number]);
        match step.work {
            Work::Run(split) => self.split(run, number, split as usize),
            Work::Upload(replica) => {
                let Range { start, end } = wide(&plan.cut.replicas[replica as usize].range);
                let slot = plan.cut.replicas[replica as usize].slot;
                let host = Value { writer: Writer::Host { slot, run }, shift: 0 };
                self.fill(run, number, replica, &[(start..end, host)])
            }
            Work::Copy(replica) => {
                let values = self.take(run, number, replica)?;
                self.fill(run, number, replica, &values)
            }
            Work::Experts(replica) => {
                self.experts(run, number, replica)?;
                let values = self.take(run, number, replica)?;
                self.fill(run, number, replica, &values)
            }
            Work::Fetch(replica) => {
                let values = self.take(run, number, replica)?;
                self.fetched[replica as usize] = Some((self.clocks[step.lane].clone(), values));
                Ok(())
            }
            Work::Deliver(replica) => {
                let Some((_, values)) = self.fetched[replica as usize].take() else {
                    return Err(Fault::Shape {
                        what: step_name(plan, number),
                        expected: "a fetch before it".to_owned(),
                        found: "none so far".to_owned(),
                    });
                };
                self.fill(run, number, replica, &values)
            }
        }
    }

    /// The nodes of a split, one after another.
    fn split(&mut self, run: usize, number: usize, split: usize) -> Result<(), Fault> {
        let plan = self.plan;
        for at in plan.cut.splits[split].nodes.clone() {
            for read in &self.reads.nodes[at] {
                if let Some(from) = At::in_split(plan, split, read.slot, &read.range) {
                    self.find(run, number, read, from)?;
                }
            }
            let Some((slot, range)) = plan.task.written(&plan.task.graph().nodes()[at]) else { continue };
            if let Some(to) = At::at_home(plan, slot, &range) {
                let value =
                    Value { writer: Writer::Node { node: at, run }, shift: to.start as i64 - range.start as i64 };
                self.write(run, number, to.memory, to.start..to.start + range.len() as u64, value)?;
            }
        }
        Ok(())
    }

    /// The numbers of the experts to bring have to be those that the nodes read which use them.
    fn experts(&mut self, run: usize, number: usize, replica: u32) -> Result<(), Fault> {
        let plan = self.plan;
        let Origin::Experts { ids, .. } = plan.cut.replicas[replica as usize].origin else { return Ok(()) };
        let (split, of) = (plan.cut.replicas[replica as usize].split, plan.cut.replicas[replica as usize].slot);
        let Some((slot, range)) = plan.task.span(ids) else { return Ok(()) };
        let reads = self.reads;
        let found = plan.cut.splits[split].nodes.clone().find_map(|at| {
            let uses = reads.nodes[at].iter().any(|read| read.slot == of);
            reads.nodes[at].iter().find(|read| uses && read.slot == slot && read.range == range)
        });
        let (Some(read), Some(from)) = (found, At::in_split(plan, split, slot, &range)) else {
            return Err(Fault::Shape {
                what: step_name(plan, number),
                expected: format!("a node that reads the experts' numbers, {}", slot_name(plan, slot)),
                found: format!("none in split {split}"),
            });
        };
        self.find(run, number, read, from)
    }

    /// What a replica's bytes hold at home, by bytes of the slot.
    fn take(&mut self, run: usize, number: usize, replica: u32) -> Result<Pieces, Fault> {
        let plan = self.plan;
        let (slot, range) = (plan.cut.replicas[replica as usize].slot, &plan.cut.replicas[replica as usize].range);
        let Some(home) = At::at_home(plan, slot, range) else { return Ok(Vec::new()) };
        let pieces = self.read(run, number, home.memory, home.start..home.start + range.len() as u64)?;
        let shift = home.start as i64 - range.start as i64;
        let in_slot = |at: u64| at - home.start + range.start as u64;
        let moved = |(piece, value): (Range<u64>, Value)| {
            (in_slot(piece.start)..in_slot(piece.end), Value { shift: value.shift - shift, ..value })
        };
        Ok(pieces.into_iter().map(moved).collect())
    }

    /// Writes a replica.
    fn fill(&mut self, run: usize, number: usize, replica: u32, of: &[(Range<u64>, Value)]) -> Result<(), Fault> {
        let at = At::replica(self.plan, replica);
        let from = self.plan.cut.replicas[replica as usize].range.start as u64;
        for (piece, value) in of {
            let value = Value { shift: value.shift + at.start as i64 - from as i64, ..*value };
            let place = |byte: u64| byte - from + at.start;
            self.write(run, number, at.memory, place(piece.start)..place(piece.end), value)?;
        }
        Ok(())
    }

    /// What is left after a run, as the home's computing lane sees it when the host reads it then.
    fn end(&mut self, run: usize) -> Result<(), Fault> {
        let plan = self.plan;
        for output in &self.reads.outputs {
            let home = plan.cut.homes[output.slot as usize];
            let lane = plan.lanes.iter().position(|l| Some(l.device) == home && l.kind == LaneKind::Compute);
            let last = lane.and_then(|lane| self.steps[lane].last().copied());
            if let (Some(step), Some(from)) = (last, At::at_home(plan, output.slot, &output.range)) {
                self.find(run, step, output, from)?;
            }
        }
        Ok(())
    }

    /// Reads bytes that have to hold what is expected.
    fn find(&mut self, run: usize, number: usize, read: &Read, from: At) -> Result<(), Fault> {
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
                let right = *value == Value { writer: *writer, shift };
                if !right && *writer != Writer::Nobody {
                    let reader = match read.node {
                        Some(node) => node_name(&self.plan.task, node),
                        None => "whoever wants it after the run".to_owned(),
                    };
                    let moved = value.shift - shift;
                    let astray = if moved == 0 { String::new() } else { format!(", {moved} bytes astray") };
                    return Err(Fault::Value {
                        read: format!("{reader} reads bytes {at}..{end} of {}", slot_name(self.plan, read.slot)),
                        step: format!("run {run}'s {}", step_name(self.plan, number)),
                        expected: self.say(*writer),
                        found: self.say(value.writer) + &astray,
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

    fn read(&mut self, run: usize, number: usize, memory: Memory, range: Range<u64>) -> Result<Pieces, Fault> {
        let lane = self.plan.steps[number].lane;
        let clock = &self.clocks[lane];
        let now = Event { lane, count: clock[lane] };
        let (mut found, mut clash) = (Vec::new(), None);
        let index = self.index(memory, run);
        for (piece, byte) in self.memories[index].over(range) {
            if let Some(before) = byte.written.filter(|before| unordered(*before, now, clock)) {
                clash = Some((before, piece));
                break;
            }
            match byte.read.iter_mut().find(|read| read.lane == lane) {
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
        memory: Memory,
        range: Range<u64>,
        value: Value,
    ) -> Result<(), Fault> {
        let lane = self.plan.steps[number].lane;
        let clock = &self.clocks[lane];
        let now = Event { lane, count: clock[lane] };
        let index = self.index(memory, run);
        let clash = self.memories[index].over(range.clone()).find_map(|(piece, byte)| {
            let mut before = byte.written.iter().chain(&byte.read);
            before.find(|before| unordered(**before, now, clock)).map(|before| (*before, piece))
        });
        if let Some((before, piece)) = clash {
            return Err(self.race(before, now, memory, piece));
        }
        self.memories[index].set(range, Byte { value, written: Some(now), read: Vec::new() });
        Ok(())
    }

    fn index(&self, memory: Memory, run: usize) -> usize {
        let depth = self.plan.depth;
        match memory {
            Memory::Room { device, area: Area::Arena, chunk } => self.arenas[device] + chunk as usize,
            Memory::Room { device, area: Area::Ring, chunk } => {
                self.rings[device] + chunk as usize * depth + run % depth
            }
            // Only stored slots are found there.
            Memory::Stored { slot } => self.stored[slot as usize].unwrap_or_default(),
        }
    }

    fn race(&self, first: Event, second: Event, memory: Memory, bytes: Range<u64>) -> Fault {
        let name = |event: Event| {
            let steps = &self.steps[event.lane];
            let nth = event.count as usize - 1;
            format!("run {}'s {}", nth / steps.len(), step_name(self.plan, steps[nth % steps.len()]))
        };
        let memory = match memory {
            Memory::Room { device, area: Area::Arena, chunk } => {
                format!("the arena of {}, buffer {chunk}", self.plan.devices[device])
            }
            Memory::Room { device, area: Area::Ring, chunk } => {
                format!("the ring of {}, buffer {chunk}", self.plan.devices[device])
            }
            Memory::Stored { slot } => format!("stored {}", slot_name(self.plan, slot)),
        };
        Fault::Race { first: name(first), second: name(second), memory, bytes }
    }

    fn say(&self, writer: Writer) -> String {
        match writer {
            Writer::Nobody => "what nobody wrote".to_owned(),
            Writer::Stored { slot } => format!("what {} held before run 0", slot_name(self.plan, slot)),
            Writer::Host { slot, run } => format!("run {run}'s input {}", slot_name(self.plan, slot)),
            Writer::Node { node, run } => format!("what run {run}'s {} wrote", node_name(&self.plan.task, node)),
        }
    }
}

/// Whether an event may happen after `now`, for all that its lane knows.
fn unordered(before: Event, now: Event, clock: &Clock) -> bool {
    before.lane != now.lane && clock[before.lane] < before.count
}

fn learn(clock: &mut Clock, more: &Clock) {
    clock.iter_mut().zip(more).for_each(|(known, more)| *known = (*known).max(*more));
}

fn wide(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

/// Whether some of the bytes that a node's destination spans stay as they were.
fn keeps_rest(plan: &Plan, node: &Node) -> bool {
    let desc = plan.task.graph().tensor(node.dst).map(|tensor| tensor.desc);
    node.op.code() == OpCode::SetRows || desc.is_some_and(|desc| desc.extent() != desc.dense_bytes())
}
