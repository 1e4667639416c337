//! Runs the operations of a history.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::model::{Cell, GRAPHS, numbers};
use super::operations::{BUFFERS, History, Operation, Part, Source, Target, place, server_of};
use super::servers::DEVICE_BYTES;
use super::world::{Done, Read, Violation, World};
use crate::device::{CopyOutcome, DeviceError, SourceError, UploadSource};
use crate::rpc::transport::memory::{Dialler, Fault, Injection, inject_next, latest_link};

/// Time after which a server gives up to reach another one.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Most reads that are pending.
const MAX_READS: usize = 8;

/// Runs a history; `Err` says what the model does not allow.
pub(super) fn run(history: &History) -> Result<(), Violation> {
    let mut world = World::start(history);
    for (number, operation) in &history.operations {
        let done = world.perform(operation);
        done.map_err(|violation| format!("operation {number}: {violation}"))?;
    }
    world.finish().map_err(|violation| format!("at the end: {violation}"))
}

/// The slot of a queue's buffer.
fn buffer_of(queue: usize, buffer: usize) -> usize {
    (queue + buffer * BUFFERS / 2) % BUFFERS
}

impl World {
    fn perform(&mut self, operation: &Operation) -> Done {
        match *operation {
            Operation::Write { queue, buffer, part, source, seed } => {
                self.write(queue, buffer_of(queue, buffer), part, (source, seed))
            }
            Operation::Read { queue, buffer, part, also } => self.read(queue, buffer_of(queue, buffer), part, also),
            Operation::Fill { queue, buffer, part, value } => {
                let buffer = buffer_of(queue, buffer);
                if !self.begin(queue, buffer, true)? {
                    return Ok(None);
                }
                let modelled = self.buffers[buffer].as_ref().unwrap();
                let range = part.of(modelled.cells.len());
                let region = modelled.buffer.region(range.start as u64, range.len() as u64).unwrap();
                let submitted = self.queues[queue].as_mut().unwrap().queue.fill(region, value);
                self.record_write(queue, buffer, (range.start, vec![Cell::One(value); range.len()], false), submitted)
            }
            Operation::Copy { queue, buffer, from, part } => self.copy(queue, buffer_of(queue, buffer), from, part),
            Operation::Run { queue, buffer, graph, times } => {
                self.run_graph(queue, buffer_of(queue, buffer), graph, times)
            }
            Operation::AwaitRead { read, passed } => {
                if read >= self.reads.len() {
                    return Ok(None);
                }
                let read = self.reads.remove(read);
                self.await_read(read, passed).map(Some)
            }
            Operation::AwaitQueue { queue, passed } => self.await_queue(queue, passed),
            Operation::QueueWaits { queue, other } => {
                if self.queue(queue)?.is_none() {
                    return Ok(None);
                }
                let Some(other) = self.queues[other].as_ref().map(|open| open.number) else { return Ok(None) };
                self.wait_for(queue, other).map(|_| Some(()))
            }
            Operation::AllocateTooMuch { queue, beyond_budget } => self.allocate_too_much(queue, beyond_budget),
            Operation::Free { buffer } => {
                self.buffers[buffer] = None;
                Ok(Some(()))
            }
            Operation::DropRead { read } => {
                if read < self.reads.len() {
                    self.reads.remove(read);
                }
                Ok(Some(()))
            }
            Operation::DropQueue { queue } => {
                self.drop_queue(queue);
                Ok(Some(()))
            }
            Operation::Disconnect { connection } => {
                self.forget(connection);
                Ok(Some(()))
            }
            Operation::Inject { target, injection } => {
                self.inject(target, injection);
                Ok(Some(()))
            }
            Operation::Replace { server } => self.replace(server).map(Some),
        }
    }

    /// Makes the queue and the buffer of an access, and orders it after others. `false`: one of them is not there.
    fn begin(&mut self, queue: usize, buffer: usize, writes: bool) -> Result<bool, Violation> {
        // A failure of the second one may forget the first one.
        if self.buffer(buffer)?.is_none() || self.queue(queue)?.is_none() || self.buffer(buffer)?.is_none() {
            return Ok(false);
        }
        Ok(self.queues[queue].is_some() && self.order(queue, buffer, writes)?)
    }

    fn write(&mut self, queue: usize, buffer: usize, part: Part, (source, seed): (Source, u64)) -> Done {
        if !self.begin(queue, buffer, true)? {
            return Ok(None);
        }
        let modelled = self.buffers[buffer].as_ref().unwrap();
        let range = part.of(modelled.cells.len());
        let region = modelled.buffer.region(range.start as u64, range.len() as u64).unwrap();
        let bytes = numbers(seed, range.len());
        let open = self.queues[queue].as_mut().unwrap();
        let (mut at, is_failing) = (0, source == Source::FailingWriter);
        let mut writer = |chunk: &mut [u8]| {
            if is_failing && (at > 0 || seed % 2 == 0) {
                return Err(SourceError::new("the writer fails"));
            }
            chunk.copy_from_slice(&bytes[at..at + chunk.len()]);
            at += chunk.len();
            Ok(())
        };
        let submitted = match source {
            Source::Slice => open.queue.upload(region, None, UploadSource::Borrowed(&bytes)),
            Source::Writer | Source::FailingWriter => {
                open.queue.upload(region, None, UploadSource::Writer(&mut writer))
            }
        };
        let after = match submitted {
            Err(DeviceError::Source(_)) if is_failing => {
                let any = (range.start, vec![Cell::Any; range.len()], true);
                return self.record_write(queue, buffer, any, Ok(()));
            }
            _ => bytes.iter().map(|byte| Cell::One(*byte)).collect(),
        };
        self.record_write(queue, buffer, (range.start, after, false), submitted)
    }

    fn read(&mut self, queue: usize, buffer: usize, part: Part, also: Option<Part>) -> Done {
        if !self.begin(queue, buffer, false)? {
            return Ok(None);
        }
        let modelled = self.buffers[buffer].as_ref().unwrap();
        let ranges = [Some(part), also].into_iter().flatten().map(|part| part.of(modelled.cells.len()));
        let ranges: Vec<_> = ranges.collect();
        let region = |range: &std::ops::Range<usize>| modelled.buffer.region(range.start as u64, range.len() as u64);
        let regions: Vec<_> = ranges.iter().map(|range| region(range).unwrap()).collect();
        let expected: Vec<_> = ranges.into_iter().map(|range| modelled.cells[range].to_vec()).collect();
        let open = self.queues[queue].as_mut().unwrap();
        match open.queue.download_all(&regions) {
            Ok(reads) => {
                let number = open.number;
                let reads = reads.into_iter().zip(expected);
                self.reads.extend(reads.map(|(pending, expected)| Read { queue: number, expected, pending }));
                while self.reads.len() > MAX_READS {
                    let first = self.reads.remove(0);
                    self.await_read(first, false)?;
                }
                Ok(Some(()))
            }
            Err(error) => self.fail(queue, &error).map(Some),
        }
    }

    fn copy(&mut self, queue: usize, buffer: usize, from: usize, part: Part) -> Done {
        let (to_connection, from_connection) = (place(queue).0, place(from).0);
        if self.buffer(from)?.is_none() || !self.begin(queue, buffer, true)? || self.buffers[from].is_none() {
            return Ok(None);
        }
        let own = self.queues[queue].as_ref().unwrap().number;
        let mut after = None;
        if to_connection == from_connection {
            if !self.order(queue, from, false)? {
                return Ok(None);
            }
        } else {
            self.buffers[from].as_mut().unwrap().accesses.readers.push(own);
            let mut waited = BTreeSet::new();
            while let Some(writer) = self.buffers[from].as_ref().and_then(|from| from.accesses.next(false, &waited)) {
                waited.insert(writer);
                match self.queues.iter_mut().flatten().find(|open| open.number == writer) {
                    Some(open) if open.has_failed => {}
                    Some(open) if after.is_none() => {
                        after = Some(open.queue.mark());
                        self.faults.queues[own].queues.insert(writer);
                    }
                    Some(_) => _ = self.wait_for(queue, writer)?,
                    None => self.settle(writer)?,
                }
            }
            if self.buffers[from].is_none() || self.queues[queue].as_ref().is_none_or(|open| open.has_failed) {
                return Ok(None);
            }
        }
        let (src, dst) = (self.buffers[from].as_ref().unwrap(), self.buffers[buffer].as_ref().unwrap());
        let range = part.of(src.cells.len().min(dst.cells.len()));
        // At the other end of the destination, so that copies within a buffer overlap or not.
        let at = dst.cells.len() - range.end;
        let cells = src.cells[range.clone()].to_vec();
        let [src, dst] = [(src, range.start), (dst, at)]
            .map(|(buffer, at)| buffer.buffer.region(at as u64, range.len() as u64).unwrap());
        if to_connection != from_connection {
            let [from, to] =
                [from_connection, to_connection].map(|slot| self.connections[slot].as_ref().unwrap().number);
            let causes = &mut self.faults.queues[own];
            causes.connections.extend([from, to]);
            causes.links.insert((server_of(from_connection), server_of(to_connection)));
        }
        let since = Instant::now();
        match self.queues[queue].as_mut().unwrap().queue.copy_from(src, dst, after.as_ref()) {
            Ok(CopyOutcome::Submitted) => self.record_write(queue, buffer, (at, cells, false), Ok(())),
            Ok(CopyOutcome::Unreachable) => {
                // On a machine with too much to do, a server may not reach another one in time. The client remembers that.
                if since.elapsed() >= PROBE_TIMEOUT {
                    self.faults.links.extend(self.faults.queues[own].links.clone());
                }
                let causes = &self.faults.queues[own];
                let mut connections = causes.connections.iter().map(|number| &self.faults.connections[*number]);
                let may_fail =
                    connections.any(|(_, may_be_lost)| *may_be_lost) || !causes.links.is_disjoint(&self.faults.links);
                if may_fail { Ok(Some(())) } else { Err("a copy is refused as unreachable without a cause".to_owned()) }
            }
            Err(error) => self.record_write(queue, buffer, (at, cells, false), Err(error)),
        }
    }

    fn run_graph(&mut self, queue: usize, buffer: usize, graph: usize, times: u8) -> Done {
        if !self.begin(queue, buffer, true)? {
            return Ok(None);
        }
        let Some(program) = self.program(queue, graph)? else { return Ok(None) };
        let modelled = self.buffers[buffer].as_ref().unwrap();
        let bytes = program.graph().slot_sizes()[0];
        if modelled.cells.len() < bytes {
            return Ok(None);
        }
        let bindings = Arc::from([modelled.buffer.region(0, bytes as u64).unwrap()]);
        let mut cells = modelled.cells[..bytes].to_vec();
        let mut submitted = Ok(());
        for _ in 0..times {
            GRAPHS[graph].run(program.graph(), &mut cells);
            submitted = submitted.and_then(|()| self.queues[queue].as_mut().unwrap().queue.run(&program, &bindings));
        }
        self.record_write(queue, buffer, (0, cells, true), submitted)
    }

    fn allocate_too_much(&mut self, queue: usize, beyond_budget: bool) -> Done {
        let (slot, device) = place(queue);
        let bytes = if beyond_budget { 1 << 40 } else { 2 * DEVICE_BYTES };
        let budget = Arc::clone(&self.budget);
        let Some(connection) = self.connection(slot)? else { return Ok(None) };
        match connection.endpoint.devices()[device].alloc(bytes, &budget) {
            Err(DeviceError::OutOfMemory { .. }) => Ok(Some(())),
            Err(DeviceError::ConnectionLost { .. }) => self.check_connection(slot).map(|_| Some(())),
            other => Err(format!("an allocation of {bytes} bytes: {other:?}")),
        }
    }

    fn inject(&mut self, target: Target, injection: Injection) {
        let is_loss = !matches!(injection.fault, Fault::Stall(Some(_)));
        match target {
            Target::Client(slot) => {
                if let Some(connection) = &self.connections[slot]
                    && let Some(link) = &connection.link
                {
                    self.faults.connections[connection.number].1 |= is_loss;
                    link.inject(injection);
                }
            }
            Target::NextClient(server) => {
                self.is_next_faulty[server] |= is_loss;
                inject_next(self.numbers[server], Dialler::ThisThread, injection);
            }
            Target::Peer(server) => {
                if is_loss {
                    self.faults.links.extend([(0, server), (1, server)]);
                }
                match latest_link(self.numbers[server], Dialler::OtherThreads) {
                    Some(link) => link.inject(injection),
                    None => inject_next(self.numbers[server], Dialler::OtherThreads, injection),
                }
            }
        }
    }
}
