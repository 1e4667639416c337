//! The prepared graphs of a session: an LRU cache, bounded in entries and bytes, for both front ends.
//!
//! The key `K` is the front end's: what its protocol calls a graph. A key is unique in the cache. A client runs the same few
//! graphs in the same order for each token, so a look-up first compares the key of the program that followed last time. The
//! eviction is part of `docs/protocol.md`: clients of the extension count as this cache does, so that they know what is in it.
//!
//! Programs are host memory that no budget pays for, hence the [`Bound`], over all devices of the session. An evicted program
//! lives on while a queue has yet to run it. Such bytes count as `evicted` until the session has waited for its queues.

use std::borrow::Borrow;
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

/// A graph in the cache.
pub(in crate::rpc::server) struct CachedProgram<K> {
    key: K,
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

impl<K> CachedProgram<K> {
    pub(in crate::rpc::server) fn new(
        key: K,
        device: u32,
        cost: u64,
        buffers: Box<[u64]>,
        prepared: Result<Prepared, DeviceError>,
    ) -> CachedProgram<K> {
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
    /// Evicts half at once, for clients that do not know what is evicted: not every new program waits for the queues then.
    pub(in crate::rpc::server) const EVICT_HALF: Bound =
        Bound { cached: MAX_BYTES, low: MAX_BYTES / 2, total: MAX_BYTES };

    /// Evicts no more than it must, for clients that count along; the queues may hold as much again.
    pub(in crate::rpc::server) const EVICT_FEWEST: Bound =
        Bound { cached: MAX_BYTES, low: MAX_BYTES, total: 2 * MAX_BYTES };
}

/// The prepared graphs of a session.
pub(in crate::rpc::server) struct ProgramCache<K> {
    bound: Bound,
    entries: Vec<CachedProgram<K>>,
    /// The serial of the one that was used last, by device.
    last: Vec<Option<u64>>,
    clock: u64,
    /// Bytes of evicted programs that queues may still hold.
    evicted: u64,
}

impl<K> ProgramCache<K> {
    /// An empty cache.
    pub(in crate::rpc::server) fn new(bound: Bound) -> ProgramCache<K> {
        ProgramCache { bound, entries: Vec::new(), last: Vec::new(), clock: 0, evicted: 0 }
    }

    /// Looks up a key, whose program is likely to be one of `device`, and makes it the most recently used.
    pub(in crate::rpc::server) fn get<Q>(&mut self, device: u32, key: &Q) -> Option<&CachedProgram<K>>
    where
        K: Borrow<Q>,
        Q: PartialEq + ?Sized,
    {
        let guess = self.last_index(device).map(|last| self.entries[last].successor);
        let guess = guess.and_then(|serial| self.index(serial)).filter(|&at| self.entries[at].key.borrow() == key);
        let at = guess.or_else(|| self.position(key))?;
        Some(self.touch(at))
    }

    /// Whether a key is in the cache. Does not count as a use.
    pub(in crate::rpc::server) fn contains<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: PartialEq + ?Sized,
    {
        self.position(key).is_some()
    }

    /// The most recently used program of a device, unless it is gone: never an older one in its place. Does not count as a use.
    pub(in crate::rpc::server) fn most_recent(&self, device: u32) -> Option<&CachedProgram<K>> {
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
    pub(in crate::rpc::server) fn add(&mut self, program: CachedProgram<K>) {
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

    fn position<Q>(&self, key: &Q) -> Option<usize>
    where
        K: Borrow<Q>,
        Q: PartialEq + ?Sized,
    {
        self.entries.iter().position(|entry| entry.key.borrow() == key)
    }

    fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.cost).sum()
    }

    fn touch(&mut self, at: usize) -> &CachedProgram<K> {
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
        let graph = crate::graph::validate::import_untrusted(&[], &[], vec![64]).unwrap();
        Prepared { program: device.prepare(Arc::new(graph)).unwrap(), bindings: Arc::from([buffer.whole()]) }
    }

    /// The bytes of a message as a key.
    type Body = Box<[u8]>;

    /// A graph of a device, whose tensors lie in one buffer.
    fn body(device: u32, body: &[u8], cost: u64, buffer: u64, prepared: &Prepared) -> CachedProgram<Body> {
        CachedProgram::new(body.into(), device, cost, [buffer].into(), Ok(prepared.clone()))
    }

    fn number(number: u64, cost: u64, buffers: &[u64]) -> CachedProgram<u64> {
        CachedProgram::new(number, 0, cost, buffers.into(), Err(DeviceError::Ended))
    }

    fn numbers(cache: &ProgramCache<u64>) -> Vec<u64> {
        (0..1000).filter(|&number| cache.contains(&number)).collect()
    }

    #[test]
    fn bodies_are_found_and_freed_buffers_take_theirs_along() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::EVICT_HALF));
        assert!(cache.get(0, b"a".as_slice()).is_none() && cache.most_recent(0).is_none());
        cache.add(body(0, b"aa", 2, 1, &p));
        cache.add(body(0, b"ab", 2, 2, &p));
        cache.add(body(3, b"c", 2, 1, &p));
        for _ in 0..3 {
            assert!(cache.get(0, b"aa".as_slice()).unwrap().key[..] == *b"aa");
            assert!(cache.most_recent(0).unwrap().key[..] == *b"aa");
            assert!(cache.get(0, b"ab".as_slice()).unwrap().key[..] == *b"ab");
            assert!(cache.most_recent(3).unwrap().key[..] == *b"c");
        }
        assert!(cache.get(0, b"a".as_slice()).is_none() && cache.most_recent(1).is_none());
        cache.forget_buffer(2);
        assert!(cache.most_recent(0).is_none() && cache.get(0, b"ab".as_slice()).is_none());
        assert!(cache.get(0, b"aa".as_slice()).is_some() && cache.most_recent(0).is_some());
    }

    #[test]
    fn the_longest_unused_makes_room() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::EVICT_HALF));
        let add = |cache: &mut ProgramCache<Body>, key: &[u8], cost| {
            let full = cache.make_room(cost);
            cache.add(body(0, key, cost, 1, &p));
            full
        };
        for i in 0..MAX_PROGRAMS as u8 {
            assert!(!add(&mut cache, &[i], 1));
        }
        cache.get(0, [0].as_slice()).unwrap();
        assert!(!add(&mut cache, b"new", 1));
        assert!(cache.get(0, [0].as_slice()).is_some() && cache.get(0, [1].as_slice()).is_none());
        assert!(cache.get(0, [2].as_slice()).is_some());
        assert!(add(&mut cache, b"huge", MAX_BYTES), "the queues may hold some of the others");
        cache.settle();
        assert!(cache.entries.len() == 1 && cache.most_recent(0).is_some());
        assert!(add(&mut cache, b"next", 1) && cache.entries.len() == 1, "and now the huge one");
    }

    #[test]
    fn what_waits_in_queues_counts_until_it_is_settled() {
        let (p, mut cache) = (prepared(), ProgramCache::new(Bound::EVICT_HALF));
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
        let mut cache = ProgramCache::new(Bound::EVICT_FEWEST);
        let quarter = MAX_BYTES / 4;
        for n in 1..=4 {
            assert!(!cache.make_room(quarter));
            cache.add(number(n, quarter, &[n, 9]));
        }
        assert!(cache.get(0, &1).is_some() && cache.get(0, &5).is_none());
        assert!(cache.get(0, &1).unwrap().prepared.is_err(), "one that cannot be run is cached like any other");
        assert!(!cache.make_room(quarter));
        cache.add(number(5, quarter, &[5]));
        assert_eq!(numbers(&cache), [1, 3, 4, 5], "2 was the longest unused, and had to go alone");
        assert!(!cache.make_room(quarter + 1));
        cache.add(number(6, 0, &[]));
        assert_eq!(numbers(&cache), [1, 5, 6]);
        cache.forget_buffer(9);
        assert_eq!(numbers(&cache), [5, 6]);
        assert!(cache.get(0, &1).is_none());
        // As many as may be there, by their number.
        for n in 100..100 + MAX_PROGRAMS as u64 {
            cache.make_room(0);
            cache.add(number(n, 0, &[]));
        }
        assert_eq!(cache.entries.len(), MAX_PROGRAMS);
        assert!(cache.contains(&100) && !cache.contains(&6));
    }

    #[test]
    fn evicted_numbers_take_as_much_again_until_they_are_settled() {
        let mut cache = ProgramCache::new(Bound::EVICT_FEWEST);
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
