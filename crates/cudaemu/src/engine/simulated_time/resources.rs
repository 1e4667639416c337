//! Resources of the simulated machine, and the intervals in which they are busy.

use std::collections::BTreeMap;

use super::Picos;

/// A resource with a limited number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Resource {
    /// A device's multiprocessors.
    Compute(u32),
    /// The copy engine from the host to a device.
    ToDevice(u32),
    /// The copy engine from a device to the host.
    ToHost(u32),
    /// The link from the first device to the second.
    Link(u32, u32),
    /// The driver's lock. Work without a duration waits until the lock is free.
    DriverLock,
}

/// Maximum gaps remembered per slot; older ones count as busy.
const GAPS: usize = 1024;

/// One slot of a resource: its busy intervals, sorted, no two of them adjacent.
#[derive(Clone, Debug, Default)]
struct BusyIntervals(Vec<(Picos, Picos)>);

/// All resources.
#[derive(Debug, Default)]
pub(super) struct Resources {
    kernels_at_once: u32,
    busy: BTreeMap<Resource, Vec<BusyIntervals>>,
    /// Sum of the durations of each device's kernels, copies and fills.
    compute: BTreeMap<u32, Picos>,
}

impl Resources {
    /// Idle resources. A device runs up to `kernels_at_once` kernels at once; 0 counts as 1.
    pub(super) fn new(kernels_at_once: u32) -> Self {
        Self { kernels_at_once, ..Self::default() }
    }

    /// The end of work of this duration that may begin at `ready`, after it has occupied its resource.
    pub(super) fn end_of(&mut self, resource: Option<Resource>, duration: Picos, ready: Picos) -> Picos {
        match resource {
            Some(resource) if duration > 0 => self.occupy(resource, duration, ready),
            Some(Resource::DriverLock) => self.free_from(Resource::DriverLock, ready),
            _ => ready + duration,
        }
    }

    /// Occupies a resource in its first gap from `ready` on that is long enough; returns the end.
    fn occupy(&mut self, resource: Resource, duration: Picos, ready: Picos) -> Picos {
        let mut count = 1;
        if let Resource::Compute(device) = resource {
            count = self.kernels_at_once.max(1);
            *self.compute.entry(device).or_default() += duration;
        }
        let slots = self.busy.entry(resource).or_insert_with(|| vec![BusyIntervals::default(); count as usize]);
        let starts = slots.iter().map(|slot| slot.earliest(ready, duration));
        let Some((which, start)) = starts.enumerate().min_by_key(|&(_, start)| start) else { return ready };
        slots[which].take(start, start + duration);
        start + duration
    }

    /// The first time from `ready` on at which a resource with one slot is free.
    fn free_from(&self, resource: Resource, ready: Picos) -> Picos {
        self.busy.get(&resource).and_then(|slots| slots.first()).map_or(ready, |slot| slot.free_from(ready))
    }

    /// The time from which on all resources are idle.
    pub(super) fn idle_from(&self) -> Picos {
        let slots = self.busy.values().flatten();
        slots.filter_map(|slot| slot.0.last().map(|&(_, end)| end)).max().unwrap_or(0)
    }

    /// Sum of the durations of a device's kernels, and of its copies and fills within the device.
    pub(super) fn compute(&self, device: u32) -> Picos {
        self.compute.get(&device).copied().unwrap_or(0)
    }

    /// Forgets everything: nothing occupies a resource any more.
    pub(super) fn clear(&mut self) {
        self.busy.clear();
        self.compute.clear();
    }
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

    /// The first free time from `ready` on. At the start of a busy interval it is not free: the work that came first has it.
    fn free_from(&self, ready: Picos) -> Picos {
        let first = self.0.partition_point(|&(_, end)| end <= ready);
        self.0.get(first).filter(|&&(from, _)| from <= ready).map_or(ready, |&(_, to)| to)
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

    const KERNELS: Resource = Resource::Compute(0);

    #[test]
    fn an_operation_begins_in_the_first_gap_that_fits() {
        let mut resources = Resources::new(0);
        // Duration, earliest start, end.
        for (duration, ready, end) in [
            (10, 25, 35),
            (10, 0, 10),
            (10, 5, 20),
            // The gap before 25 has 5 left: not enough for 10, enough for 5.
            (10, 5, 45),
            (5, 0, 25),
        ] {
            assert_eq!(resources.occupy(KERNELS, duration, ready), end, "{duration} from {ready}");
        }
        assert_eq!(resources.busy[&KERNELS][0].0, [(0, 45)]);
        assert_eq!((resources.idle_from(), resources.compute(0), resources.compute(1)), (45, 45, 0));
        resources.clear();
        assert_eq!((resources.idle_from(), resources.compute(0)), (0, 0));
    }

    #[test]
    fn a_thread_waits_for_the_lock_while_another_holds_it() {
        let mut resources = Resources::new(1);
        assert_eq!(resources.end_of(Some(Resource::DriverLock), 0, 7), 7);
        assert_eq!(resources.end_of(Some(Resource::DriverLock), 10, 20), 30);
        for (ready, end) in [(0, 0), (19, 19), (20, 30), (21, 30), (30, 30), (31, 31)] {
            assert_eq!(resources.end_of(Some(Resource::DriverLock), 0, ready), end, "{ready}");
        }
    }

    #[test]
    fn as_many_kernels_overlap_as_there_are_slots() {
        let mut resources = Resources::new(2);
        assert_eq!([0; 5].map(|ready| resources.occupy(KERNELS, 10, ready)), [10, 10, 20, 20, 30]);
        assert_eq!([0; 2].map(|ready| resources.occupy(Resource::ToHost(0), 10, ready)), [10, 20]);
    }

    #[test]
    fn many_gaps_are_bounded_and_stay_sorted() {
        let mut resources = Resources::new(1);
        for i in 0..3000 {
            assert_eq!(resources.occupy(KERNELS, 10, i * 20), i * 20 + 10);
        }
        let busy = &resources.busy[&KERNELS][0].0;
        assert_eq!(busy.len(), GAPS);
        assert!(busy.windows(2).all(|pair| pair[0].1 < pair[1].0));
        assert!(resources.occupy(KERNELS, 10, 0) > 10);
    }
}
