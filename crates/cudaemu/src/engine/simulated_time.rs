//! Simulated time: when work would begin and end on a machine of the rates that are set.
//!
//! Times are computed when work is *submitted*, since all durations are known then: they depend on what the program submits, and not
//! on the order in which the emulator happens to execute it. The rule: a piece of work begins as early as its resource has a gap
//! that is long enough, but not before
//!
//! - the clock of the thread that submitted it,
//! - the end of its stream's earlier work, and of what the default stream's rules imply,
//! - the ends of all that it waits for (events, the nodes of a graph before it).
//!
//! Resources are: a device's multiprocessors (kernels, and copies and fills within the device; several places if so set), one copy
//! engine from the host and one to the host per device, and one link per direction between two devices. Everything else (events,
//! host functions, allocations, awaited values) takes no time. Gaps are given in the order of submission.
//!
//! Each host thread has a clock of its own, which begins at 0: a launch of a kernel or a graph keeps the thread busy for
//! `CUDAEMU_LAUNCH_US`, and waiting for a point sets the thread's clock to that point's time at least. Asking whether a point is
//! reached gets the answer of the thread's clock, and passes the time: 1 µs, and twice as much each time that the thread asks again
//! without having done anything else, but never beyond the point. What one thread tells another by other means than streams and
//! events does not move clocks.

use std::collections::{BTreeMap, HashMap};
use std::thread::ThreadId;

use crate::config::SimulatedRates;

/// Picoseconds since the driver began: whole numbers, so that sums do not depend on their order.
pub type Picos = u64;

/// Picoseconds of a microsecond.
const MICRO: f64 = 1e6;

/// What a piece of work keeps busy, and for how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpCost {
    /// No time.
    Nothing,
    /// A kernel of a device.
    Kernel(u32),
    /// Bytes from the host to a device.
    ToDevice(u32, u64),
    /// Bytes from a device to the host.
    ToHost(u32, u64),
    /// Bytes from one device to another.
    Peer(u32, u32, u64),
    /// Bytes written within a device.
    Within(u32, u64),
}

/// What only so much work can use at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Compute(u32),
    ToDevice(u32),
    ToHost(u32),
    Link(u32, u32),
}

/// Gaps that are remembered per place; older ones count as busy.
const GAPS: usize = 1024;

/// One place of a resource: when it is busy, sorted, no two of them touching.
#[derive(Clone, Debug, Default)]
struct Place(Vec<(Picos, Picos)>);

/// The machine's clock.
#[derive(Debug, Default)]
pub struct Timeline {
    rates: SimulatedRates,
    busy: BTreeMap<Resource, Vec<Place>>,
    threads: HashMap<ThreadId, Picos>,
    /// How often threads have asked in vain since they last did anything else.
    asked: HashMap<ThreadId, u32>,
}

/// Picoseconds that a question takes.
const QUESTION: Picos = 1_000_000;

impl Timeline {
    /// With these rates; without any, nothing is simulated.
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

    /// When all work submitted so far has ended.
    pub fn end(&self) -> Picos {
        let places = self.busy.values().flatten();
        places.filter_map(|place| place.0.last().map(|&(_, end)| end)).max().unwrap_or(0)
    }

    /// A thread launches a kernel or a graph; its clock afterwards.
    pub fn launch(&mut self, thread: ThreadId) -> Picos {
        let now = self.now(thread) + micros(self.rates.launch_us);
        if now > 0 {
            self.threads.insert(thread, now);
        }
        now
    }

    /// A thread asks for something that happens at this time; whether it has happened by the thread's clock.
    pub fn poll(&mut self, thread: ThreadId, time: Picos) -> bool {
        let now = self.now(thread);
        if time > now {
            let asked = self.asked.entry(thread).or_default();
            let later = now + (QUESTION << *asked);
            *asked = (*asked + 1).min(20);
            self.threads.insert(thread, later.min(time));
            if later < time {
                return false;
            }
        }
        self.reset_polling(thread);
        true
    }

    /// A thread does something else than to ask.
    pub fn reset_polling(&mut self, thread: ThreadId) {
        self.asked.remove(&thread);
    }

    /// A thread has waited for something that happened at this time.
    pub fn advance_to(&mut self, thread: ThreadId, time: Picos) {
        if time > self.now(thread) {
            self.threads.insert(thread, time);
        }
    }

    /// Finds the place in time of work that can begin at `ready`; when it ends.
    pub fn schedule(&mut self, cost: OpCost, ready: Picos) -> Picos {
        let Some((resource, duration)) = self.needs(cost) else { return ready };
        let count = match resource {
            Resource::Compute(_) => self.rates.kernels_at_once.max(1),
            _ => 1,
        };
        let places = self.busy.entry(resource).or_insert_with(|| vec![Place::default(); count as usize]);
        let starts = places.iter().map(|place| place.earliest(ready, duration));
        let Some((which, start)) = starts.enumerate().min_by_key(|&(_, start)| start) else { return ready };
        places[which].take(start, start + duration);
        start + duration
    }

    /// Resource and duration; none for what takes no time.
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

/// A gigabyte a second is a byte in 1000 ps.
fn transfer(bytes: u64, gigabytes_per_second: Option<f64>) -> Picos {
    gigabytes_per_second.map_or(0, |rate| (bytes as f64 * 1000.0 / rate).round() as Picos)
}

impl Place {
    /// The start of the first gap from `ready` on that is long enough.
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

    /// Notes that it is busy then; that is a gap now.
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
    fn durations() {
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
        // Two streams, each: 50 µs to the device, kernel, 50 µs back. The copies of one direction take turns.
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
        // Another device has all to itself.
        assert_eq!(time.schedule(OpCost::Kernel(1), 0), 10 * US);
        assert_eq!(time.schedule(OpCost::Peer(0, 1, 1_000_000), 0), 20 * US);
        assert_eq!(time.schedule(OpCost::Peer(1, 0, 1_000_000), 0), 20 * US);
        assert_eq!(time.schedule(OpCost::Peer(0, 1, 1_000_000), 0), 40 * US);
    }

    #[test]
    fn gaps_are_used() {
        let mut time = timeline();
        assert_eq!(time.schedule(OpCost::Kernel(0), 25 * US), 35 * US);
        assert_eq!(time.schedule(OpCost::Kernel(0), 0), 10 * US);
        assert_eq!(time.schedule(OpCost::Kernel(0), 5 * US), 20 * US);
        // 5 µs are left before 25: not enough.
        assert_eq!(time.schedule(OpCost::Kernel(0), 5 * US), 45 * US);
        assert_eq!(time.schedule(OpCost::Within(0, 5_000_000), 0), 25 * US);
        assert_eq!(time.busy[&Resource::Compute(0)][0].0, [(0, 45 * US)]);
    }

    #[test]
    fn several_kernels_at_once() {
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
    fn threads_have_clocks() {
        let mut time = timeline();
        let me = std::thread::current().id();
        let other = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
        assert_eq!((time.launch(me), time.launch(me)), (2 * US, 4 * US));
        time.advance_to(me, 3 * US);
        assert_eq!(time.now(me), 4 * US);
        time.advance_to(me, 30 * US);
        assert_eq!((time.now(me), time.now(other)), (30 * US, 0));
    }

    /// What ends later has not happened yet, and asking passes the time, faster and faster.
    #[test]
    fn questions_pass_the_time() {
        let mut time = timeline();
        let me = std::thread::current().id();
        assert!(time.poll(me, 0));
        let mut looks = Vec::new();
        while !time.poll(me, 20 * US) {
            looks.push(time.now(me) / US);
        }
        assert_eq!((looks, time.now(me)), (vec![1, 3, 7, 15], 20 * US));
        // Between other things a question takes no longer than the first.
        for _ in 0..3 {
            time.reset_polling(me);
            assert!(!time.poll(me, 50 * US));
        }
        assert_eq!(time.now(me), 23 * US);
        assert!(time.poll(me, 10 * US) && time.now(me) == 23 * US);
    }
}
