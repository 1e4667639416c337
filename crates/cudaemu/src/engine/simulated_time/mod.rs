//! Simulated time: when operations would begin and end on a machine with the configured rates.
//!
//! An operation begins in the first gap of its resource that is long enough, but not before
//!
//! - the clock of the thread that submitted it,
//! - the end of its stream's earlier operations, and of the operations that the default stream's rules imply,
//! - the ends of its dependencies (events, predecessors in a graph).
//!
//! Resources are: a device's multiprocessors (kernels, and copies and fills within the device; several slots if so configured),
//! one copy engine from the host and one to the host per device, one link per direction between two devices, and the driver's
//! lock, if `CUDAEMU_ALLOC_SYNC_US` is set. Everything else (events, host functions, allocations, awaited values) takes no time.
//!
//! # Order
//!
//! Times depend on what the program submits, and in which order, but not on the order in which the emulator executes it. The
//! timeline is a log: submission appends an entry, and gaps are assigned in the order of the log. The duration of an operation
//! is known when it is submitted, except that of a kernel which is timed by its bytes: this one is known when the kernel has
//! been executed. Until then, the entry and all later entries that need a resource stay unresolved. If a time is needed that
//! cannot become known in this order (the kernel waits for the host, and the host asks for the time of another stream's
//! event), all executed operations resolve ahead of it ([`Timeline::resolve_executed`]).
//!
//! # Host threads
//!
//! Each host thread has its own clock, which starts at 0. Launching a kernel or a graph keeps the thread busy for
//! `CUDAEMU_LAUNCH_US`, loading a module for `CUDAEMU_COMPILE_MS`. A synchronising allocation waits for its context's operations
//! and then holds the driver's lock for `CUDAEMU_ALLOC_SYNC_US`; a thread that submits an operation meanwhile waits for the lock.
//! The order of submission decides: an operation that was submitted before an allocation is not delayed by it. Waiting for a point advances the thread's clock to at least that point's time. A query whether a point
//! is reached compares with the thread's clock and advances it: by 1 µs, and by twice as much at each further query that
//! follows directly, but never beyond the point. Synchronisation between threads by other means than streams and events does
//! not advance clocks; [`Timeline::restart`] advances all of them.

mod resources;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::thread::ThreadId;

use crate::config::SimulatedRates;
use crate::counts::SimulatedTime;
use crate::mem::MovedBytes;
use resources::{Resource, Resources};

/// Picoseconds since the driver started. Integers, so that sums do not depend on their order.
pub type Picos = u64;

/// Picoseconds per microsecond.
const MICRO: f64 = 1e6;

/// The resource that an operation occupies, and the amount of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpCost {
    /// No resource: takes no time.
    Nothing,
    /// A kernel on this device.
    Kernel(u32),
    /// This many bytes from the host to this device.
    ToDevice(u32, u64),
    /// This many bytes from this device to the host.
    ToHost(u32, u64),
    /// Bytes from the first device to the second.
    Peer(u32, u32, u64),
    /// Bytes written within this device.
    Within(u32, u64),
}

/// Number of an entry in the timeline's log, from 1; 0 for the time at which the driver started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryId(u64);

/// An entry of the log whose end may not be known yet.
#[derive(Debug)]
struct Entry {
    /// Entries that must have ended before it begins.
    after: Vec<EntryId>,
    resource: Option<Resource>,
    /// `None` for a kernel that is timed by its bytes and was not executed yet.
    duration: Option<Picos>,
    /// Set if the entry resolved ahead of an earlier one.
    end: Option<Picos>,
}

/// The machine's clock.
#[derive(Debug, Default)]
pub struct Timeline {
    rates: SimulatedRates,
    resources: Resources,
    /// Ends of the entries from 1 on, as far as all of them are known.
    ends: Vec<Picos>,
    /// The entries after those.
    unresolved: VecDeque<Entry>,
    /// The entry that set each thread's clock.
    threads: HashMap<ThreadId, EntryId>,
    /// The entry that sets the clocks of all other threads.
    start: EntryId,
    /// Time of the last restart.
    origin: Picos,
    /// Number of consecutive failed queries per thread.
    queries: HashMap<ThreadId, u32>,
    /// Times that a thread waited since the last restart.
    host_waits: u64,
}

/// Picoseconds that the first failed query takes.
const QUERY_TIME: Picos = 1_000_000;

impl Timeline {
    /// A timeline with these rates. If none is set, time is not simulated.
    pub fn new(rates: SimulatedRates) -> Self {
        Self { rates, resources: Resources::new(rates.kernels_at_once), ..Self::default() }
    }

    /// Whether time is simulated.
    pub fn is_enabled(&self) -> bool {
        let SimulatedRates { kernel_us, kernel_gbps, launch_us, copy_us, host_gbps, peer_gbps, device_gbps, .. } =
            self.rates;
        let rates = [kernel_us, kernel_gbps, launch_us, copy_us, host_gbps, peer_gbps, device_gbps];
        rates.into_iter().chain([self.rates.alloc_sync_us, self.rates.compile_ms]).any(|rate| rate.is_some())
    }

    /// The time at which an entry ends; `None` if it is not known yet.
    pub fn end(&self, entry: EntryId) -> Option<Picos> {
        let Some(index) = (entry.0 as usize).checked_sub(1) else { return Some(0) };
        match self.ends.get(index) {
            Some(&end) => Some(end),
            None => self.unresolved.get(index - self.ends.len())?.end,
        }
    }

    /// The entry that set a thread's clock.
    pub fn clock(&self, thread: ThreadId) -> EntryId {
        self.threads.get(&thread).copied().unwrap_or(self.start)
    }

    /// Submits an operation that begins after other entries, and not before the thread's clock.
    pub fn submit(&mut self, cost: OpCost, thread: ThreadId, mut after: Vec<EntryId>) -> EntryId {
        if !self.is_enabled() {
            return EntryId::default();
        }
        self.wait_driver_lock(thread);
        after.push(self.clock(thread));
        let (resource, duration) = self.needs(cost);
        self.append(after, resource, duration)
    }

    /// An entry that ends when all of these have ended.
    pub fn join(&mut self, after: Vec<EntryId>) -> EntryId {
        if !self.is_enabled() {
            return EntryId::default();
        }
        self.append(after, None, Some(0))
    }

    /// Advances a thread's clock by the duration of a launch.
    pub fn launch(&mut self, thread: ThreadId) {
        self.wait_driver_lock(thread);
        if self.rates.launch_us.is_some() {
            self.occupy_thread(thread, None, micros(self.rates.launch_us));
        }
    }

    /// Advances a thread's clock by the duration of a module's compilation. Threads compile concurrently.
    pub fn compile(&mut self, thread: ThreadId) {
        if self.rates.compile_ms.is_some() {
            self.occupy_thread(thread, None, micros(self.rates.compile_ms.map(|millis| millis * 1e3)));
        }
    }

    /// Whether allocations synchronise.
    pub fn allocations_synchronise(&self) -> bool {
        self.rates.alloc_sync_us.is_some()
    }

    /// A thread holds the driver's lock for the duration of a synchronising allocation.
    pub fn hold_driver_lock(&mut self, thread: ThreadId) {
        if self.allocations_synchronise() {
            self.occupy_thread(thread, Some(Resource::DriverLock), micros(self.rates.alloc_sync_us));
        }
    }

    /// Advances a thread's clock to the time at which no other thread holds the driver's lock.
    fn wait_driver_lock(&mut self, thread: ThreadId) {
        if self.allocations_synchronise() {
            self.occupy_thread(thread, Some(Resource::DriverLock), 0);
        }
    }

    fn occupy_thread(&mut self, thread: ThreadId, resource: Option<Resource>, duration: Picos) {
        let entry = self.append(vec![self.clock(thread)], resource, Some(duration));
        self.threads.insert(thread, entry);
    }

    /// Advances a thread's clock to at least the ends of these entries, because it waited for them.
    pub fn wait(&mut self, thread: ThreadId, mut entries: Vec<EntryId>) {
        self.host_waits += 1;
        if self.is_enabled() {
            entries.push(self.clock(thread));
            let entry = self.join(entries);
            self.threads.insert(thread, entry);
        }
    }

    /// A thread queries whether these entries have ended; advances its clock if not. The ends must be known: if one is not,
    /// the answer is no.
    pub fn poll(&mut self, thread: ThreadId, entries: &[EntryId]) -> bool {
        let Some(now) = self.end(self.clock(thread)) else { return false };
        let Some(time) = entries.iter().try_fold(0, |latest, &entry| Some(self.end(entry)?.max(latest))) else {
            return false;
        };
        if time > now {
            let queries = self.queries.entry(thread).or_default();
            let later = (now + (QUERY_TIME << *queries)).min(time);
            *queries = (*queries + 1).min(20);
            let entry = self.append_known(later);
            self.threads.insert(thread, entry);
            if later < time {
                return false;
            }
            self.host_waits += 1;
        }
        self.reset_polling(thread);
        true
    }

    /// Resets the thread's count of queries, because it made another call.
    pub fn reset_polling(&mut self, thread: ThreadId) {
        self.queries.remove(&thread);
    }

    /// An operation was executed (or dropped, without bytes): the duration of a kernel that is timed by its bytes is now
    /// known.
    pub fn executed(&mut self, entry: EntryId, moved: MovedBytes) {
        let Some(index) = (entry.0 as usize).checked_sub(self.ends.len() + 1) else { return };
        let MovedBytes { device, peer, host } = moved;
        let SimulatedRates { kernel_us, kernel_gbps, peer_gbps, host_gbps, .. } = self.rates;
        let parts = [(device, kernel_gbps), (peer, peer_gbps), (host, host_gbps)];
        let duration = parts.iter().fold(micros(kernel_us), |sum, &(bytes, rate)| sum + transfer(bytes, rate));
        if let Some(entry) = self.unresolved.get_mut(index) {
            entry.duration.get_or_insert(duration);
        }
        self.resolve_in_order();
    }

    /// Resolves all executed operations, even if an earlier one was not executed.
    pub fn resolve_executed(&mut self) {
        for index in 0..self.unresolved.len() {
            let entry = &self.unresolved[index];
            if entry.end.is_none()
                && let Some((duration, ready)) = self.inputs(entry)
            {
                let end = self.resources.end_of(entry.resource, duration, ready);
                self.unresolved[index].end = Some(end);
            }
        }
        self.resolve_in_order();
    }

    /// Time from the last restart to the end of all resolved operations, busy times of the first `devices` devices, and the
    /// number of waits.
    pub fn totals(&self, devices: usize) -> SimulatedTime {
        SimulatedTime {
            makespan: self.resources.idle_from().saturating_sub(self.origin),
            busy: (0..devices).map(|device| self.resources.compute(device as u32)).collect(),
            host_waits: self.host_waits,
        }
    }

    /// Advances the clocks of all threads to the end of all resolved operations, at least to the latest of them, and measures
    /// from there on.
    pub fn restart(&mut self) {
        self.host_waits = 0;
        if self.is_enabled() {
            let clocks = self.threads.values().filter_map(|&entry| self.end(entry));
            self.origin = clocks.fold(self.origin.max(self.resources.idle_from()), Picos::max);
            self.start = self.append_known(self.origin);
            self.threads.clear();
            self.queries.clear();
            self.resources.clear();
        }
    }

    fn append(&mut self, after: Vec<EntryId>, resource: Option<Resource>, duration: Option<Picos>) -> EntryId {
        let mut entry = Entry { after, resource, duration, end: None };
        // Without a resource, the order of the log does not matter.
        if resource.is_none() {
            entry.end = self.inputs(&entry).map(|(duration, ready)| ready + duration);
        }
        self.push(entry)
    }

    /// Appends an entry that ends at this time.
    fn append_known(&mut self, end: Picos) -> EntryId {
        self.push(Entry { after: Vec::new(), resource: None, duration: Some(0), end: Some(end) })
    }

    fn push(&mut self, entry: Entry) -> EntryId {
        self.unresolved.push_back(entry);
        let id = EntryId((self.ends.len() + self.unresolved.len()) as u64);
        self.resolve_in_order();
        id
    }

    /// Resolves entries up to the first whose duration, or dependency, is not known.
    fn resolve_in_order(&mut self) {
        while let Some(entry) = self.unresolved.front() {
            let end = match (entry.end, self.inputs(entry)) {
                (Some(end), _) => end,
                (None, Some((duration, ready))) => self.resources.end_of(entry.resource, duration, ready),
                (None, None) => break,
            };
            self.ends.push(end);
            self.unresolved.pop_front();
        }
    }

    /// An entry's duration and its earliest start, if both are known.
    fn inputs(&self, entry: &Entry) -> Option<(Picos, Picos)> {
        let ready = entry.after.iter().try_fold(0, |latest, &entry| Some(self.end(entry)?.max(latest)));
        entry.duration.zip(ready)
    }

    /// Resource and duration of an operation; no duration if it depends on the bytes that a kernel will move.
    fn needs(&self, cost: OpCost) -> (Option<Resource>, Option<Picos>) {
        let rates = &self.rates;
        let copy = |bytes, rate| micros(rates.copy_us) + transfer(bytes, rate);
        let (resource, duration) = match cost {
            OpCost::Nothing => return (None, Some(0)),
            OpCost::Kernel(device) if rates.kernel_gbps.is_some() => return (Some(Resource::Compute(device)), None),
            OpCost::Kernel(device) => (Resource::Compute(device), micros(rates.kernel_us)),
            OpCost::ToDevice(device, bytes) => (Resource::ToDevice(device), copy(bytes, rates.host_gbps)),
            OpCost::ToHost(device, bytes) => (Resource::ToHost(device), copy(bytes, rates.host_gbps)),
            OpCost::Peer(from, to, bytes) => (Resource::Link(from, to), copy(bytes, rates.peer_gbps)),
            OpCost::Within(device, bytes) => (Resource::Compute(device), copy(bytes, rates.device_gbps)),
        };
        (Some(resource), Some(duration))
    }
}

fn micros(micros: Option<f64>) -> Picos {
    (micros.unwrap_or(0.0) * MICRO).round() as Picos
}

/// Duration of a transfer. One gigabyte per second is one byte per 1000 ps.
fn transfer(bytes: u64, gigabytes_per_second: Option<f64>) -> Picos {
    gigabytes_per_second.map_or(0, |rate| (bytes as f64 * 1000.0 / rate).round() as Picos)
}
