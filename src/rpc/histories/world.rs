//! The state of a history while it runs: two servers, the objects of the client, and the model beside them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::model::{Causes, Cell, Faults, GRAPHS, difference};
use super::operations::{BUFFERS, CONNECTIONS, History, QUEUES, SERVERS, place, server_of};
use super::servers::{SHORT_TIMEOUT, TestServer, reserve_numbers};
use crate::device::{Buffer, DeviceError, MemoryBudget, PendingRead, Program, Queue, TimelinePoint};
use crate::rpc::client::{ConnectError, Endpoint, Options};
use crate::rpc::transport::memory::{Dialler, Link, latest_link};

/// Timeouts that no history reaches.
const PATIENCE: Duration = Duration::from_secs(600);

/// Why a history stops: the model does not allow what happened.
pub(super) type Violation = String;

/// The numbers of the queues after whose accesses to a buffer the next ones must come.
#[derive(Clone, Debug, Default)]
pub(super) struct Accesses {
    pub(super) writers: Vec<usize>,
    pub(super) readers: Vec<usize>,
}

impl Accesses {
    /// An access that is not among `waited`, and after which a read or a write must come.
    pub(super) fn next(&self, writes: bool, waited: &BTreeSet<usize>) -> Option<usize> {
        let readers = self.readers.iter().filter(|_| writes);
        self.writers.iter().chain(readers).find(|number| !waited.contains(number)).copied()
    }
}

/// A write that is not known to be done.
pub(super) struct Write {
    /// The number of the buffer, and its slot.
    pub(super) buffer: (usize, usize),
    pub(super) at: usize,
    /// The cells before, and the cells that the write leaves.
    pub(super) cells: [Vec<Cell>; 2],
    /// Whether a part of the write may leave any value.
    pub(super) any: bool,
    /// The accesses for which the write waits: if it is discarded, later ones have to wait for them.
    pub(super) earlier: Accesses,
}

pub(super) struct Connection {
    pub(super) number: usize,
    pub(super) endpoint: Endpoint,
    pub(super) link: Option<Link>,
    pub(super) programs: HashMap<(usize, usize), Program>,
}

pub(super) struct OpenQueue {
    pub(super) number: usize,
    pub(super) queue: Box<dyn Queue>,
    pub(super) has_failed: bool,
    pub(super) writes: Vec<Write>,
}

/// A queue that was dropped, and whose end nobody has waited for.
pub(super) struct PastQueue {
    pub(super) point: TimelinePoint,
    pub(super) writes: Vec<Write>,
}

pub(super) struct ModelledBuffer {
    pub(super) number: usize,
    pub(super) buffer: Buffer,
    pub(super) cells: Vec<Cell>,
    /// The last queue that wrote, and the queues that have read since; more of them after a failure.
    pub(super) accesses: Accesses,
}

pub(super) struct Read {
    pub(super) queue: usize,
    pub(super) expected: Vec<Cell>,
    pub(super) pending: PendingRead,
}

pub(super) struct World {
    is_impatient: bool,
    seed: u64,
    pub(super) numbers: [u64; SERVERS],
    servers: Vec<TestServer>,
    sizes: [usize; BUFFERS],
    pub(super) budget: Arc<MemoryBudget>,
    pub(super) connections: [Option<Connection>; CONNECTIONS],
    pub(super) queues: [Option<OpenQueue>; QUEUES],
    pub(super) buffers: [Option<ModelledBuffer>; BUFFERS],
    pub(super) past: HashMap<usize, PastQueue>,
    pub(super) reads: Vec<Read>,
    pub(super) faults: Faults,
    /// Whether the next connection of a client to a server may be lost.
    pub(super) is_next_faulty: [bool; SERVERS],
    buffer_count: usize,
}

/// Whether an operation found what it needs; otherwise it is skipped.
pub(super) type Done = Result<Option<()>, Violation>;

impl World {
    pub(super) fn start(history: &History) -> World {
        let (numbers, is_impatient, seed) = (reserve_numbers(), history.is_impatient, history.seed);
        let mut faults = Faults::default();
        if is_impatient {
            faults.links = (0..SERVERS).flat_map(|from| (0..SERVERS).map(move |to| (from, to))).collect();
        }
        World {
            is_impatient,
            seed,
            numbers,
            servers: (0..SERVERS)
                .map(|at| TestServer::start(numbers, at, 1000 * seed + at as u64, is_impatient))
                .collect(),
            sizes: history.sizes,
            budget: MemoryBudget::new(64 << 20),
            connections: Default::default(),
            queues: Default::default(),
            buffers: Default::default(),
            past: HashMap::new(),
            reads: Vec::new(),
            faults,
            is_next_faulty: [is_impatient; SERVERS],
            buffer_count: 0,
        }
    }

    /// The connection of a slot; `None` if a fault kept it from being made.
    pub(super) fn connection(&mut self, slot: usize) -> Result<Option<&mut Connection>, Violation> {
        if self.connections[slot].is_none() {
            let server = server_of(slot);
            let endpoint = format!("memory:{}", self.numbers[server]);
            let timeout = if self.is_impatient { SHORT_TIMEOUT } else { PATIENCE };
            let options = Options::default().with_connect_timeout(timeout).with_silence_timeout(timeout);
            let may_be_lost = self.is_next_faulty[server];
            self.is_next_faulty[server] = self.is_impatient;
            let endpoint = match Endpoint::connect(&endpoint, &options) {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    use ConnectError::{Closed, Device, Silent};
                    let is_loss =
                        matches!(error, Closed { .. } | Silent { .. } | Device(DeviceError::ConnectionLost { .. }));
                    return if is_loss && may_be_lost { Ok(None) } else { Err(format!("cannot connect: {error:?}")) };
                }
            };
            let number = self.faults.connections.len();
            self.faults.connections.push((endpoint.name().to_owned(), may_be_lost));
            let link = latest_link(self.numbers[server], Dialler::ThisThread);
            self.connections[slot] = Some(Connection { number, endpoint, link, programs: HashMap::new() });
        }
        Ok(self.connections[slot].as_mut())
    }

    /// Whether the connection of a slot works; forgets its objects if it is lost.
    pub(super) fn check_connection(&mut self, slot: usize) -> Result<bool, Violation> {
        let Some(connection) = &self.connections[slot] else { return Ok(false) };
        match connection.endpoint.devices()[0].memory() {
            Ok(_) => Ok(true),
            Err(error) => {
                self.check_loss(slot, &error)?;
                self.forget(slot);
                Ok(false)
            }
        }
    }

    /// Checks that a call to the device of a connection may fail.
    fn check_loss(&self, slot: usize, error: &DeviceError) -> Result<(), Violation> {
        let number = self.connections[slot].as_ref().unwrap().number;
        let (name, may_be_lost) = &self.faults.connections[number];
        match error {
            DeviceError::ConnectionLost { endpoint, .. } if *may_be_lost && endpoint == name => Ok(()),
            error => Err(format!("connection {number} fails without a cause: {error:?}")),
        }
    }

    /// Drops the objects of a connection, except for its pending reads.
    pub(super) fn forget(&mut self, slot: usize) {
        if let Some(connection) = &self.connections[slot] {
            self.faults.connections[connection.number].1 = true;
        }
        for at in 0..QUEUES {
            if place(at).0 == slot
                && let Some(open) = self.queues[at].take()
            {
                self.faults.queues[open.number].is_dropped = true;
            }
        }
        (0..BUFFERS).filter(|at| place(*at).0 == slot).for_each(|at| self.buffers[at] = None);
        self.connections[slot] = None;
    }

    /// The queue of a slot that has not failed; a failed one is replaced.
    pub(super) fn queue(&mut self, slot: usize) -> Result<Option<&mut OpenQueue>, Violation> {
        if self.queues[slot].as_ref().is_some_and(|open| open.has_failed) {
            self.drop_queue(slot);
        }
        if self.queues[slot].is_none() {
            let (at, device) = place(slot);
            let budget = Arc::clone(&self.budget);
            let Some(connection) = self.connection(at)? else { return Ok(None) };
            let number_of_connection = connection.number;
            match connection.endpoint.devices()[device].queue(&budget) {
                Ok(queue) => {
                    let number = self.faults.queues.len();
                    let connections = [number_of_connection].into();
                    self.faults.queues.push(Causes { connections, ..Causes::default() });
                    self.queues[slot] = Some(OpenQueue { number, queue, has_failed: false, writes: Vec::new() });
                }
                Err(error) => {
                    self.check_loss(at, &error)?;
                    self.forget(at);
                    return Ok(None);
                }
            }
        }
        Ok(self.queues[slot].as_mut())
    }

    /// The buffer of a slot.
    pub(super) fn buffer(&mut self, slot: usize) -> Result<Option<&mut ModelledBuffer>, Violation> {
        if self.buffers[slot].is_none() {
            let (at, device) = place(slot);
            let (bytes, budget) = (self.sizes[slot], Arc::clone(&self.budget));
            let Some(connection) = self.connection(at)? else { return Ok(None) };
            match connection.endpoint.devices()[device].alloc(bytes as u64, &budget) {
                Ok(buffer) => {
                    self.buffer_count += 1;
                    self.buffers[slot] = Some(ModelledBuffer {
                        number: self.buffer_count,
                        buffer,
                        cells: vec![Cell::One(0); bytes],
                        accesses: Accesses::default(),
                    });
                }
                Err(error) => {
                    self.check_loss(at, &error)?;
                    self.forget(at);
                    return Ok(None);
                }
            }
        }
        Ok(self.buffers[slot].as_mut())
    }

    /// The program of a graph for the device of a queue's slot.
    pub(super) fn program(&mut self, slot: usize, graph: usize) -> Result<Option<Program>, Violation> {
        let (at, device) = place(slot);
        let Some(connection) = self.connection(at)? else { return Ok(None) };
        if let Some(program) = connection.programs.get(&(device, graph)) {
            return Ok(Some(program.clone()));
        }
        match connection.endpoint.devices()[device].prepare(GRAPHS[graph].build()) {
            Ok(program) => {
                connection.programs.insert((device, graph), program.clone());
                Ok(Some(program))
            }
            Err(error) => {
                self.check_loss(at, &error)?;
                self.forget(at);
                Ok(None)
            }
        }
    }

    /// Drops a queue with its pending work.
    pub(super) fn drop_queue(&mut self, slot: usize) {
        let Some(mut open) = self.queues[slot].take() else { return };
        self.faults.queues[open.number].is_dropped = true;
        if !open.has_failed {
            let point = open.queue.mark();
            self.past.insert(open.number, PastQueue { point, writes: open.writes });
        }
    }

    /// Waits for the end of a dropped queue, after which its memory may be used again.
    pub(super) fn settle(&mut self, number: usize) -> Result<(), Violation> {
        let Some(past) = self.past.remove(&number) else { return Ok(()) };
        if let Err(error) = past.point.wait(None) {
            self.faults.check(number, &error)?;
            self.undo(past.writes);
        }
        Ok(())
    }

    /// Records that writes may have been left undone, or may be done later.
    fn undo(&mut self, writes: Vec<Write>) {
        for Write { buffer: (number, slot), at, cells: [before, after], any, earlier } in writes {
            let Some(buffer) = self.buffers[slot].as_mut().filter(|buffer| buffer.number == number) else { continue };
            buffer.accesses.writers.extend(earlier.writers);
            buffer.accesses.readers.extend(earlier.readers);
            for ((cell, before), after) in buffer.cells[at..].iter_mut().zip(before).zip(after) {
                *cell = if any { Cell::Any } else { cell.union(before).union(after) };
            }
        }
    }

    /// Records the failure of a queue, for which there must be a cause, and checks its connection.
    pub(super) fn fail(&mut self, slot: usize, error: &DeviceError) -> Result<(), Violation> {
        let Some(open) = &mut self.queues[slot] else { return Ok(()) };
        open.has_failed = true;
        let (number, writes) = (open.number, std::mem::take(&mut open.writes));
        self.faults.check(number, error)?;
        self.undo(writes);
        self.check_connection(place(slot).0).map(drop)
    }

    /// Makes the queue of a slot wait for a point of another queue. `false`: the queue has failed.
    pub(super) fn wait_for(&mut self, slot: usize, number: usize) -> Result<bool, Violation> {
        let other = (0..QUEUES).find(|at| self.queues[*at].as_ref().is_some_and(|open| open.number == number));
        match other {
            None => self.settle(number)?,
            Some(at) if at == slot || self.queues[at].as_ref().unwrap().has_failed => {}
            Some(at) => {
                let point = self.queues[at].as_mut().unwrap().queue.mark();
                let open = self.queues[slot].as_mut().unwrap();
                self.faults.queues[open.number].queues.insert(number);
                if let Err(error) = open.queue.wait(&point) {
                    self.fail(slot, &error)?;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Orders an access of the queue of a slot after the accesses with which it would conflict. `false`: the queue has failed.
    pub(super) fn order(&mut self, slot: usize, buffer: usize, writes: bool) -> Result<bool, Violation> {
        let mut waited = BTreeSet::new();
        // A wait for a queue that was dropped may add accesses.
        while let Some(number) = self.buffers[buffer].as_ref().and_then(|buffer| buffer.accesses.next(writes, &waited))
        {
            waited.insert(number);
            if !self.wait_for(slot, number)? {
                return Ok(false);
            }
        }
        if self.buffers[buffer].is_none() {
            return Ok(false);
        }
        let earlier = self.buffers[buffer].as_ref().unwrap().accesses.clone();
        let open = self.queues[slot].as_mut().unwrap();
        let modelled = self.buffers[buffer].as_mut().unwrap();
        if writes {
            modelled.accesses = Accesses { writers: vec![open.number], readers: Vec::new() };
            let (buffer, cells) = ((modelled.number, buffer), Default::default());
            open.writes.push(Write { buffer, at: 0, cells, any: false, earlier });
        } else if !modelled.accesses.readers.contains(&open.number) {
            modelled.accesses.readers.push(open.number);
        }
        Ok(true)
    }

    /// Records a write of the queue of a slot: its cells, if it was submitted.
    pub(super) fn record_write(
        &mut self,
        slot: usize,
        buffer: usize,
        (at, after, any): (usize, Vec<Cell>, bool),
        submitted: Result<(), DeviceError>,
    ) -> Done {
        let modelled = self.buffers[buffer].as_mut().unwrap();
        let cells = &mut modelled.cells[at..at + after.len()];
        let before = cells.to_vec();
        cells.copy_from_slice(&after);
        let (buffer, earlier) = ((modelled.number, buffer), Accesses::default());
        let write = Write { buffer, at, cells: [before, after], any, earlier };
        self.queues[slot].as_mut().unwrap().writes.push(write);
        match submitted {
            Ok(()) => Ok(Some(())),
            Err(error) => self.fail(slot, &error).map(Some),
        }
    }

    /// Waits for a pending read and compares its bytes with the model.
    pub(super) fn await_read(&mut self, read: Read, passed: bool) -> Result<(), Violation> {
        let Read { queue, expected, pending } = read;
        match pending.wait(passed.then(Instant::now)) {
            Ok(bytes) => difference(&expected, &bytes)
                .map_or(Ok(()), |text| Err(format!("queue {queue} read wrong bytes: {text}"))),
            Err(DeviceError::Deadline(_)) if passed => Ok(()),
            Err(error) => self.faults.check(queue, &error),
        }
    }

    /// Waits for all work of the queue of a slot.
    pub(super) fn await_queue(&mut self, slot: usize, passed: bool) -> Done {
        let Some(open) = self.queue(slot)? else { return Ok(None) };
        match open.queue.mark().wait(passed.then(Instant::now)) {
            Ok(()) => open.writes.clear(),
            Err(DeviceError::Deadline(_)) if passed => {}
            Err(error) => self.fail(slot, &error)?,
        }
        Ok(Some(()))
    }

    /// Replaces a server: all its connections are lost.
    pub(super) fn replace(&mut self, server: usize) -> Result<(), Violation> {
        let lost = format!("memory:{}", self.numbers[server]);
        self.faults
            .connections
            .iter_mut()
            .filter(|(name, _)| *name == lost)
            .for_each(|(_, may_be_lost)| *may_be_lost = true);
        for other in 0..SERVERS {
            self.faults.links.extend([(server, other), (other, server)]);
        }
        // The old one first: both listen at the same number.
        self.servers.remove(server).end(false)?;
        self.seed += 1;
        let new = TestServer::start(self.numbers, server, 1000 * self.seed + 500, self.is_impatient);
        self.servers.insert(server, new);
        self.is_next_faulty[server] = self.is_impatient;
        Ok(())
    }

    /// The end of a history: all reads and buffers have the bytes of the model, the connections that no fault has hit work, and
    /// all memory is returned.
    pub(super) fn finish(mut self) -> Result<(), Violation> {
        for read in std::mem::take(&mut self.reads) {
            self.await_read(read, false)?;
        }
        for slot in 0..BUFFERS {
            if self.buffers[slot].is_some() {
                self.check_buffer(slot)?;
            }
        }
        for slot in 0..CONNECTIONS {
            self.check_connection(slot)?;
        }
        for number in self.past.keys().copied().collect::<Vec<_>>() {
            self.settle(number)?;
        }
        (0..CONNECTIONS).for_each(|slot| self.forget(slot));
        for server in std::mem::take(&mut self.servers) {
            server.end(true)?;
        }
        let until = Instant::now() + Duration::from_secs(20);
        while self.budget.used() > 0 {
            if Instant::now() > until {
                return Err(format!("the client still holds {} bytes of its budget", self.budget.used()));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Reads a whole buffer and compares it with the model; once more on a new queue if the queue fails.
    fn check_buffer(&mut self, slot: usize) -> Result<(), Violation> {
        for _ in 0..2 {
            if self.buffers[slot].is_none() || self.queue(slot)?.is_none() || self.buffers[slot].is_none() {
                return Ok(());
            }
            if !self.order(slot, slot, false)? {
                continue;
            }
            let modelled = self.buffers[slot].as_ref().unwrap();
            let (region, expected) = (modelled.buffer.whole(), modelled.cells.clone());
            let open = self.queues[slot].as_mut().unwrap();
            let queue = open.number;
            match open.queue.download(region).and_then(|read| read.wait(None)) {
                Ok(bytes) => {
                    return difference(&expected, &bytes)
                        .map_or(Ok(()), |text| Err(format!("queue {queue} reads wrong bytes at the end: {text}")));
                }
                Err(error) => self.fail(slot, &error)?,
            }
        }
        Ok(())
    }
}
