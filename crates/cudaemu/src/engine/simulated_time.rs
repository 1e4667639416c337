//! Simulated time: when operations would begin and end on a machine with the configured rates.
//!
//! Times are computed when an operation is *submitted*. All durations are known then, so times depend on what the program
//! submits, and not on the order in which the emulator executes it. The rule: an operation begins in the first gap of its
//! resource that is long enough, but not before
//!
//! - the clock of the thread that submitted it,
//! - the end of its stream's earlier operations, and of the operations that the default stream's rules imply,
//! - the ends of its dependencies (events, predecessors in a graph).
//!
//! Resources are: a device's multiprocessors (kernels, and copies and fills within the device; several slots if so configured),
//! one copy engine from the host and one to the host per device, and one link per direction between two devices. Everything
//! else (events, host functions, allocations, awaited values) takes no time. Gaps are assigned in the order of submission.
//!
//! Each host thread has its own clock, which starts at 0. Launching a kernel or a graph keeps the thread busy for
//! `CUDAEMU_LAUNCH_US`; waiting for a point advances the thread's clock to at least that point's time. A query whether a point
//! is reached compares with the thread's clock and advances it: by 1 µs, and by twice as much at each further query that
//! follows directly, but never beyond the point. Synchronisation between threads by other means than streams and events does
//! not advance clocks.

use std::collections::{BTreeMap, HashMap};
use std::thread::ThreadId;

use crate::config::SimulatedRates;

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

/// A resource with a limited number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Compute(u32),
    ToDevice(u32),
    ToHost(u32),
    Link(u32, u32),
}

/// Maximum gaps remembered per slot; older ones count as busy.
const GAPS: usize = 1024;

/// One slot of a resource: its busy intervals, sorted, no two of them adjacent.
#[derive(Clone, Debug, Default)]
struct BusyIntervals(Vec<(Picos, Picos)>);

/// The machine's clock.
#[derive(Debug, Default)]
pub struct Timeline {
    rates: SimulatedRates,
    busy: BTreeMap<Resource, Vec<BusyIntervals>>,
    threads: HashMap<ThreadId, Picos>,
    /// Number of consecutive failed queries per thread.
    queries: HashMap<ThreadId, u32>,
}

/// Picoseconds that the first failed query takes.
const QUERY_TIME: Picos = 1_000_000;

impl Timeline {
    /// A timeline with these rates. If none is set, time is not simulated.
    pub fn new(rates: SimulatedRates) -> Self {
        Self { rates, ..Self::default() }
    }

    /// Whether time is simulated.
    pub fn is_enabled(&self) -> bool {
        let SimulatedRates { kernel_us, launch_us, host_gbps, peer_gbps, device_gbps, .. } = self.rates;
        [kernel_us, launch_us, host_gbps, peer_gbps, device_gbps].iter().any(Option::is_some)
    }

    /// A thread's clock.
    pub fn now(&self, thread: ThreadId) -> Picos {
        self.threads.get(&thread).copied().unwrap_or(0)
    }

    /// The time at which all operations submitted so far end.
    pub fn end(&self) -> Picos {
        let places = self.busy.values().flatten();
        places.filter_map(|place| place.0.last().map(|&(_, end)| end)).max().unwrap_or(0)
    }

    /// Advances a thread's clock by the duration of a launch; returns the new value.
    pub fn launch(&mut self, thread: ThreadId) -> Picos {
        let now = self.now(thread) + micros(self.rates.launch_us);
        if now > 0 {
            self.threads.insert(thread, now);
        }
        now
    }

    /// A thread queries whether something that happens at `time` has happened; advances its clock if not.
    pub fn poll(&mut self, thread: ThreadId, time: Picos) -> bool {
        let now = self.now(thread);
        if time > now {
            let queries = self.queries.entry(thread).or_default();
            let later = now + (QUERY_TIME << *queries);
            *queries = (*queries + 1).min(20);
            self.threads.insert(thread, later.min(time));
            if later < time {
                return false;
            }
        }
        self.reset_polling(thread);
        true
    }

    /// Resets the thread's count of queries, because it made another call.
    pub fn reset_polling(&mut self, thread: ThreadId) {
        self.queries.remove(&thread);
    }

    /// Advances a thread's clock to at least `time`, because it waited for something that happens then.
    pub fn advance_to(&mut self, thread: ThreadId, time: Picos) {
        if time > self.now(thread) {
            self.threads.insert(thread, time);
        }
    }

    /// Schedules an operation that may begin at `ready`; returns its end.
    pub fn schedule(&mut self, cost: OpCost, ready: Picos) -> Picos {
        let Some((resource, duration)) = self.needs(cost) else { return ready };
        let count = match resource {
            Resource::Compute(_) => self.rates.kernels_at_once.max(1),
            _ => 1,
        };
        let places = self.busy.entry(resource).or_insert_with(|| vec![BusyIntervals::default(); count as usize]);
        let starts = places.iter().map(|place| place.earliest(ready, duration));
        let Some((which, start)) = starts.enumerate().min_by_key(|&(_, start)| start) else { return ready };
        places[which].take(start, start + duration);
        start + duration
    }

    /// Resource and duration; `None` if the operation takes no time.
    fn needs(&self, cost: OpCost) -> Option<(Resource, Picos)> {
        let rates = &self.rates;
        let (resource, duration) = match cost {
            OpCost::Nothing => return None,
            OpCost::Kernel(device) => (Resource::Compute(device), micros(rates.kernel_us)),
            OpCost::ToDevice(device, bytes) => (Resource::ToDevice(device), transfer(bytes, rates.host_gbps)),
            OpCost::ToHost(device, bytes) => (Resource::ToHost(device), transfer(bytes, rates.host_gbps)),
            OpCost::Peer(from, to, bytes) => (Resource::Link(from, to), transfer(bytes, rates.peer_gbps)),
            OpCost::Within(device, bytes) => (Resource::Compute(device), transfer(bytes, rates.device_gbps)),
        };
        (duration > 0).then_some((resource, duration))
    }
}

fn micros(micros: Option<f64>) -> Picos {
    (micros.unwrap_or(0.0) * MICRO).round() as Picos
}

/// Duration of a transfer. One gigabyte per second is one byte per 1000 ps.
fn transfer(bytes: u64, gigabytes_per_second: Option<f64>) -> Picos {
    gigabytes_per_second.map_or(0, |rate| (bytes as f64 * 1000.0 / rate).round() as Picos)
}

impl BusyIntervals {
    /// Start of the first gap from `ready` on that is long enough.
    fn earliest(&self, ready: Picos, duration: Picos) -> Picos {
        let first = self.0.partition_point(|&(_, end)| end <= ready);
        let mut start = ready;
        for &(from, to) in &self.0[first..] {
            if start + duration <= from {
                break;
            }
            start = start.max(to);
        }
        start
    }

    /// Marks an interval as busy; it must be a gap.
    fn take(&mut self, start: Picos, end: Picos) {
        let at = self.0.partition_point(|&(from, _)| from < start);
        self.0.insert(at, (start, end));
        if self.0.get(at + 1).is_some_and(|&(from, _)| from == end) {
            self.0[at].1 = self.0[at + 1].1;
            self.0.remove(at + 1);
        }
        if at > 0 && self.0[at - 1].1 == start {
            self.0[at - 1].1 = self.0[at].1;
            self.0.remove(at);
        }
        if self.0.len() > GAPS {
            self.0[1].0 = self.0[0].0;
            self.0.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Picos = 1_000_000;

    fn timeline() -> Timeline {
        Timeline::new(SimulatedRates {
            kernel_us: Some(10.0),
            launch_us: Some(2.0),
            host_gbps: Some(20.0),
            peer_gbps: Some(50.0),
            device_gbps: Some(1000.0),
            kernels_at_once: 1,
        })
    }

    #[test]
    fn operations_take_the_time_of_their_rates() {
        for (cost, end) in [
            (OpCost::Nothing, 0),
            (OpCost::Kernel(0), 10 * US),
            (OpCost::ToDevice(0, 1_000_000), 50 * US),
            (OpCost::ToHost(0, 2_000_000), 100 * US),
            (OpCost::Peer(0, 1, 1_000_000), 20 * US),
            (OpCost::Within(0, 1_000_000), US),
            (OpCost::ToDevice(0, 0), 0),
        ] {
            assert_eq!(timeline().schedule(cost, 0), end, "{cost:?}");
        }
        let mut off = Timeline::new(SimulatedRates::default());
        assert!(!off.is_enabled() && timeline().is_enabled());
        assert_eq!(off.schedule(OpCost::Kernel(0), 7), 7);
        assert_eq!(off.launch(std::thread::current().id()), 0);
    }

    #[test]
    fn kernels_and_both_copy_directions_overlap() {
        let mut time = timeline();
        // Two streams, each: 50 µs to the device, kernel, 50 µs back. Copies in the same direction serialise.
        let mut ends = [0; 2];
        for end in &mut ends {
            *end = time.schedule(OpCost::ToDevice(0, 1_000_000), *end);
        }
        assert_eq!(ends, [50 * US, 100 * US]);
        for end in &mut ends {
            *end = time.schedule(OpCost::Kernel(0), *end);
        }
        assert_eq!(ends, [60 * US, 110 * US]);
        for end in &mut ends {
            *end = time.schedule(OpCost::ToHost(0, 1_000_000), *end);
        }
        assert_eq!(ends, [110 * US, 160 * US]);
        // Another device has its own resources.
        assert_eq!(time.schedule(OpCost::Kernel(1), 0), 10 * US);
        assert_eq!(time.schedule(OpCost::Peer(0, 1, 1_000_000), 0), 20 * US);
        assert_eq!(time.schedule(OpCost::Peer(1, 0, 1_000_000), 0), 20 * US);
        assert_eq!(time.schedule(OpCost::Peer(0, 1, 1_000_000), 0), 40 * US);
    }

    #[test]
    fn an_operation_begins_in_the_first_gap_that_fits() {
        let mut time = timeline();
        assert_eq!(time.schedule(OpCost::Kernel(0), 25 * US), 35 * US);
        assert_eq!(time.schedule(OpCost::Kernel(0), 0), 10 * US);
        assert_eq!(time.schedule(OpCost::Kernel(0), 5 * US), 20 * US);
        // The gap before 25 µs has 5 µs left: not enough.
        assert_eq!(time.schedule(OpCost::Kernel(0), 5 * US), 45 * US);
        assert_eq!(time.schedule(OpCost::Within(0, 5_000_000), 0), 25 * US);
        assert_eq!(time.busy[&Resource::Compute(0)][0].0, [(0, 45 * US)]);
    }

    #[test]
    fn as_many_kernels_overlap_as_there_are_slots() {
        let mut time = timeline();
        time.rates.kernels_at_once = 2;
        let ends: Vec<Picos> = (0..5).map(|_| time.schedule(OpCost::Kernel(0), 0)).collect();
        assert_eq!(ends, [10, 10, 20, 20, 30].map(|us| us * US));
    }

    #[test]
    fn many_gaps_are_bounded_and_stay_sorted() {
        let mut time = timeline();
        for i in 0..3000 {
            let ready = i * 20 * US;
            assert_eq!(time.schedule(OpCost::Kernel(0), ready), ready + 10 * US);
        }
        let busy = &time.busy[&Resource::Compute(0)][0].0;
        assert_eq!(busy.len(), GAPS);
        assert!(busy.windows(2).all(|pair| pair[0].1 < pair[1].0));
        assert!(time.schedule(OpCost::Kernel(0), 0) > 10 * US);
    }

    #[test]
    fn each_thread_has_its_own_clock() {
        let mut time = timeline();
        let me = std::thread::current().id();
        let other = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
        assert_eq!((time.launch(me), time.launch(me)), (2 * US, 4 * US));
        time.advance_to(me, 3 * US);
        assert_eq!(time.now(me), 4 * US);
        time.advance_to(me, 30 * US);
        assert_eq!((time.now(me), time.now(other)), (30 * US, 0));
    }

    /// A point that ends later is not reached yet; each query advances the clock by twice as much as the one before.
    #[test]
    fn each_failed_query_doubles_the_time_it_takes() {
        let mut time = timeline();
        let me = std::thread::current().id();
        assert!(time.poll(me, 0));
        let mut looks = Vec::new();
        while !time.poll(me, 20 * US) {
            looks.push(time.now(me) / US);
        }
        assert_eq!((looks, time.now(me)), (vec![1, 3, 7, 15], 20 * US));
        // With other calls in between, every query takes only the first query's time.
        for _ in 0..3 {
            time.reset_polling(me);
            assert!(!time.poll(me, 50 * US));
        }
        assert_eq!(time.now(me), 23 * US);
        assert!(time.poll(me, 10 * US) && time.now(me) == 23 * US);
    }
}
