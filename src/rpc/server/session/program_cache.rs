//! The prepared graphs of a session: an LRU cache, bounded in entries and bytes, for both front ends.
//!
//! ggml's clients send the same few GRAPH_COMPUTE bodies for each token; a body is its own key. Looking one up costs one
//! comparison of its bytes: equal bytes mean the same device and buffers, because handles are never reused and a freed buffer
//! takes its programs along. Clients of the extension number their graphs, and count as this cache does, so that they know what is
//! in it: its eviction is part of `docs/protocol.md`.
//!
//! Programs are host memory that no budget pays for, hence the [`Bound`], over all devices of the session. An evicted program
//! lives on while a queue has yet to run it. Such bytes count as `evicted` until the session has waited for its queues.

use std::sync::Arc;
use std::time::Duration;

use crate::device::{DeviceError, Program, Queue, Region};

/// Programs per session: more than any client alternates between.
pub(in crate::rpc::server) const MAX_PROGRAMS: usize = 64;

/// Bytes that a session's cached programs take, about. A graph that the limits allow may alone take more, and is then the only
/// one.
pub(in crate::rpc::server) const MAX_BYTES: u64 = 40 << 20;

/// How long a program may keep the session from its next request: longer than a token takes, shorter than a client that closes
/// its connection would wait for the session to notice.
const INLINE_BUDGET: Duration = Duration::from_millis(100);

/// A program with the memory that it runs on.
#[derive(Clone)]
pub(in crate::rpc::server) struct Prepared {
    pub(super) program: Program,
    pub(super) bindings: Arc<[Region]>,
}

impl Prepared {
    /// Submits it: `inline`, on the calling thread while it is short, which is faster where no other queue needs that thread.
    pub(in crate::rpc::server) fn submit(&self, queue: &mut dyn Queue, inline: bool) -> Result<(), DeviceError> {
        let Prepared { program, bindings } = self;
        if inline { queue.run_inline_or_submit(program, bindings, INLINE_BUDGET) } else { queue.run(program, bindings) }
    }
}

/// What a client calls a graph.
#[derive(PartialEq, Eq)]
pub(in crate::rpc::server) enum Key {
    /// By the body of its GRAPH_COMPUTE.
    Body(Box<[u8]>),
    /// By a number of the client's own.
    Number(u64),
}

impl Key {
    fn is_body(&self, other: &[u8]) -> bool {
        matches!(self, Key::Body(body) if **body == *other)
    }
}

/// A graph in the cache.
pub(in crate::rpc::server) struct CachedProgram {
    key: Key,
    /// The position of its device.
    pub(in crate::rpc::server) device: u32,
    /// Bytes that it takes: [`graph_cost`](crate::rpc::wire::graph_cost).
    cost: u64,
    /// Handles of the buffers without which it is worth nothing.
    buffers: Box<[u64]>,
    /// Why it cannot be run, where that is reported when it is run.
    pub(in crate::rpc::server) prepared: Result<Prepared, DeviceError>,
    /// Unique, unlike its place, which changes as others are evicted.
    serial: u64,
    /// The serial of the program that was used after this one on the same device last time: the first guess for the next one.
    successor: u64,
    /// When it was used last, by the cache's clock.
    used: u64,
}

impl CachedProgram {
    pub(in crate::rpc::server) fn new(
        key: Key,
        device: u32,
        cost: u64,
        buffers: Box<[u64]>,
        prepared: Result<Prepared, DeviceError>,
    ) -> CachedProgram {
        CachedProgram { key, device, cost, buffers, prepared, serial: 0, successor: 0, used: 0 }
    }
}

/// Bytes at which a cache evicts and waits.
#[derive(Clone, Copy)]
pub(in crate::rpc::server) struct Bound {
    /// Of the programs in the cache, with one that is about to be added: more evicts.
    cached: u64,
    /// Of the programs that an eviction leaves.
    low: u64,
    /// Of those in the cache and the evicted ones that queues may still hold: more waits for the queues.
    total: u64,
}

impl Bound {
    /// For ggml's clients, which do not know what is evicted. Evicting half at once means that not every new program waits for
    /// the queues.
    pub(in crate::rpc::server) const BODIES: Bound = Bound { cached: MAX_BYTES, low: MAX_BYTES / 2, total: MAX_BYTES };

    /// For the extension, whose clients count along: it evicts no more than it must, and the queues may hold as much again.
    pub(in crate::rpc::server) const NUMBERS: Bound = Bound { cached: MAX_BYTES, low: MAX_BYTES, total: 2 * MAX_BYTES };
}

/// The prepared graphs of a session.
pub(in crate::rpc::server) struct ProgramCache {
    bound: Bound,
    entries: Vec<CachedProgram>,
    /// The serial of the one that was used last, by device.
    last: Vec<Option<u64>>,
    clock: u64,
    /// Bytes of evicted programs that queues may still hold.
    evicted: u64,
}

impl ProgramCache {
    /// An empty cache.
    pub(in crate::rpc::server) fn new(bound: Bound) -> ProgramCache {
        ProgramCache { bound, entries: Vec::new(), last: Vec::new(), clock: 0, evicted: 0 }
    }

    /// Looks up a body, which names `device`, and makes it the most recently used.
    pub(in crate::rpc::server) fn use_body(&mut self, device: u32, body: &[u8]) -> Option<&CachedProgram> {
        let guess = self.last_index(device).map(|last| self.entries[last].successor);
        let guess = guess.and_then(|serial| self.index(serial)).filter(|&at| self.entries[at].key.is_body(body));
        let at = guess.or_else(|| self.entries.iter().position(|entry| entry.key.is_body(body)))?;
        Some(self.touch(at))
    }

    /// Looks up a number and makes it the most recently used.
    pub(in crate::rpc::server) fn use_number(&mut self, number: u64) -> Option<&CachedProgram> {
        let at = self.entries.iter().position(|entry| entry.key == Key::Number(number))?;
        Some(self.touch(at))
    }

    /// Whether a number is in use. Does not count as a use.
    pub(in crate::rpc::server) fn has_number(&self, number: u64) -> bool {
        self.entries.iter().any(|entry| entry.key == Key::Number(number))
    }

    /// The program that was used last on a device, unless it is gone. Does not count as a use.
    pub(in crate::rpc::server) fn last(&self, device: u32) -> Option<&CachedProgram> {
        self.last_index(device).map(|at| &self.entries[at])
    }

    /// Evicts the least recently used programs until there is room for one of `cost` bytes. True when the session must wait for its
    /// queues, and then call [`ProgramCache::settle`], before it prepares that one.
    pub(in crate::rpc::server) fn make_room(&mut self, cost: u64) -> bool {
        let Bound { cached, low, total } = self.bound;
        let mut bytes = self.bytes();
        if self.entries.len() >= MAX_PROGRAMS || bytes.saturating_add(cost) > cached {
            let most = low.min(cached.saturating_sub(cost));
            while self.entries.len() >= MAX_PROGRAMS || bytes > most {
                let oldest = (0..self.entries.len()).min_by_key(|&at| self.entries[at].used);
                let Some(oldest) = oldest else { break };
                let gone = self.entries.swap_remove(oldest).cost;
                bytes -= gone;
                self.evicted += gone;
            }
        }
        self.evicted > 0 && (bytes + self.evicted).saturating_add(cost) > total
    }

    /// All work submitted so far is done: no queue holds an evicted program any more.
    pub(in crate::rpc::server) fn settle(&mut self) {
        self.evicted = 0;
    }

    /// Adds a program, the most recently used from now on. [`ProgramCache::make_room`] has made room for it.
    pub(in crate::rpc::server) fn add(&mut self, program: CachedProgram) {
        self.clock += 1;
        self.entries.push(CachedProgram { serial: self.clock, ..program });
        self.touch(self.entries.len() - 1);
    }

    /// Drops the programs that need a buffer.
    pub(in crate::rpc::server) fn forget_buffer(&mut self, handle: u64) {
        let before = self.bytes();
        self.entries.retain(|entry| !entry.buffers.contains(&handle));
        self.evicted += before - self.bytes();
    }

    fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.cost).sum()
    }

    fn touch(&mut self, at: usize) -> &CachedProgram {
        self.clock += 1;
        let CachedProgram { serial, device, .. } = self.entries[at];
        if let Some(before) = self.last_index(device) {
            self.entries[before].successor = serial;
        }
        self.entries[at].used = self.clock;
        let slot = device as usize; // the position of a device that exists
        if self.last.len() <= slot {
            self.last.resize(slot + 1, None);
        }
        self.last[slot] = Some(serial);
        &self.entries[at]
    }

    fn last_index(&self, device: u32) -> Option<usize> {
        self.last.get(device as usize).copied().flatten().and_then(|serial| self.index(serial))
    }

    fn index(&self, serial: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.serial == serial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, Path};
    use crate::device::{Account, Device};

    fn prepared() -> Prepared {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap();
        let buffer = device.alloc(64, &Account::new(64)).unwrap();
        let graph = crate::graph::validate::foreign(&[], &[], vec![64]).unwrap();
        Prepared { program: device.prepare(Arc::new(graph)).unwrap(), bindings: Arc::from([buffer.whole()]) }
    }

    /// A graph of a device, whose tensors lie in one buffer.
    fn body(device: u32, body: &[u8], cost: u64, buffer: u64, prepared: &Prepared) -> CachedProgram {
        CachedProgram::new(Key::Body(body.into()), device, cost, [buffer].into(), Ok(prepared.clone()))
    }

    fn number(number: u64, cost: u64, buffers: &[u64]) -> CachedProgram {
        CachedProgram::new(Key::Number(number), 0, cost, buffers.into(), Err(DeviceError::Ended))
    }

    fn numbers(cache: &ProgramCache) -> Vec<u64> {
        (0..1000).filter(|&number| cache.has_number(number)).collect()
    }

    #[test]
    fn bodies_are_found_and_freed_buffers_take_theirs_along() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::BODIES));
        assert!(cache.use_body(0, b"a").is_none() && cache.last(0).is_none());
        cache.add(body(0, b"aa", 2, 1, &p));
        cache.add(body(0, b"ab", 2, 2, &p));
        cache.add(body(3, b"c", 2, 1, &p));
        for _ in 0..3 {
            assert!(cache.use_body(0, b"aa").unwrap().key.is_body(b"aa"));
            assert!(cache.last(0).unwrap().key.is_body(b"aa"));
            assert!(cache.use_body(0, b"ab").unwrap().key.is_body(b"ab"));
            assert!(cache.last(3).unwrap().key.is_body(b"c"));
        }
        assert!(cache.use_body(0, b"a").is_none() && cache.last(1).is_none());
        cache.forget_buffer(2);
        assert!(cache.last(0).is_none() && cache.use_body(0, b"ab").is_none());
        assert!(cache.use_body(0, b"aa").is_some() && cache.last(0).is_some());
    }

    #[test]
    fn the_longest_unused_makes_room() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::BODIES));
        let add = |cache: &mut ProgramCache, key: &[u8], cost| {
            let full = cache.make_room(cost);
            cache.add(body(0, key, cost, 1, &p));
            full
        };
        for i in 0..MAX_PROGRAMS as u8 {
            assert!(!add(&mut cache, &[i], 1));
        }
        cache.use_body(0, &[0]).unwrap();
        assert!(!add(&mut cache, b"new", 1));
        assert!(cache.use_body(0, &[0]).is_some() && cache.use_body(0, &[1]).is_none());
        assert!(cache.use_body(0, &[2]).is_some());
        assert!(add(&mut cache, b"huge", MAX_BYTES), "the queues may hold some of the others");
        cache.settle();
        assert!(cache.entries.len() == 1 && cache.last(0).is_some());
        assert!(add(&mut cache, b"next", 1) && cache.entries.len() == 1, "and now the huge one");
    }

    #[test]
    fn what_waits_in_queues_counts_until_it_is_settled() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::BODIES));
        let tenth = MAX_BYTES / 10;
        let mut settled = 0;
        for i in 0..100 {
            if cache.make_room(tenth) {
                cache.settle();
                settled += 1;
            }
            cache.add(body(0, &[i], tenth, 1, &p));
            assert!(cache.bytes() + cache.evicted <= MAX_BYTES);
        }
        assert!((10..=20).contains(&settled), "{settled}: each time a part of the programs was replaced");
        cache.forget_buffer(1);
        assert!(cache.make_room(MAX_BYTES / 2));
    }

    /// A client of the extension counts along: no program may be evicted before it must be, nor stay longer.
    #[test]
    fn numbers_are_evicted_as_the_protocol_says() {
        let mut cache = ProgramCache::new(Bound::NUMBERS);
        let quarter = MAX_BYTES / 4;
        for n in 1..=4 {
            assert!(!cache.make_room(quarter));
            cache.add(number(n, quarter, &[n, 9]));
        }
        assert!(cache.use_number(1).is_some() && cache.use_number(5).is_none());
        assert!(cache.use_number(1).unwrap().prepared.is_err(), "one that cannot be run is cached like any other");
        assert!(!cache.make_room(quarter));
        cache.add(number(5, quarter, &[5]));
        assert_eq!(numbers(&cache), [1, 3, 4, 5], "2 was the longest unused, and had to go alone");
        assert!(!cache.make_room(quarter + 1));
        cache.add(number(6, 0, &[]));
        assert_eq!(numbers(&cache), [1, 5, 6]);
        cache.forget_buffer(9);
        assert_eq!(numbers(&cache), [5, 6]);
        assert!(cache.use_number(1).is_none());
        // As many as may be there, by their number.
        for n in 100..100 + MAX_PROGRAMS as u64 {
            cache.make_room(0);
            cache.add(number(n, 0, &[]));
        }
        assert_eq!(cache.entries.len(), MAX_PROGRAMS);
        assert!(cache.has_number(100) && !cache.has_number(6));
    }

    #[test]
    fn evicted_numbers_take_as_much_again_until_they_are_settled() {
        let mut cache = ProgramCache::new(Bound::NUMBERS);
        let tenth = MAX_BYTES / 10;
        let mut settled = 0;
        for n in 0..100 {
            if cache.make_room(tenth) {
                cache.settle();
                settled += 1;
            }
            cache.add(number(n, tenth, &[]));
            assert!(cache.bytes() <= MAX_BYTES && cache.bytes() + cache.evicted <= 2 * MAX_BYTES);
        }
        assert!((5..=10).contains(&settled), "{settled}");
        assert!(cache.make_room(3 * MAX_BYTES), "one that takes more is the only one, and waits for the others' end");
        assert!(cache.entries.is_empty());
    }
}
