//! Program cache: the compiled graphs of a session, in an LRU cache that is limited in entries and bytes. For both front ends.
//!
//! The key `K` is the front end's name of a graph: the request's body for ggml's protocol, a number for the extension. Keys are
//! unique. A client runs the same few graphs in the same order for each token, so a lookup first compares the key of the
//! program that followed the last used one before.
//!
//! The eviction is part of the protocol (`docs/protocol.md`): clients of the extension simulate this cache to predict which
//! graphs it holds. Changing the order or the time of evictions breaks them.
//!
//! Programs take host memory, hence the [`CacheLimits`], over all devices of the session, and a [`HostCharge`] for each. An evicted
//! program stays in memory while a queue has yet to run it. Its bytes count as `evicted_bytes`, and stay charged, until the session
//! has waited for its queues.

use std::sync::Arc;
use std::time::Duration;

use crate::device::{DeviceError, Program, Region};
use crate::rpc::server::host_memory::{HostCharge, SessionMemory};

/// Maximum number of programs of a session of the extension, whose clients simulate the cache.
pub(in crate::rpc::server) const MAX_PROGRAMS: usize = 64;

/// Maximum number of programs of a session of ggml's protocol. Under a tensor split, llama.cpp alternates between a few graphs
/// per layer, most of a single node. An LRU cache that is smaller than such a cycle would never hit.
const MAX_GGML_PROGRAMS: usize = 1024;

/// Limit of the estimated bytes of a session's cached programs. A single program may exceed it, and is then the only one in the
/// cache.
pub(in crate::rpc::server) const MAX_CACHED_BYTES: u64 = 40 << 20;

/// Time that a program may run inline on the session's thread, which reads no requests meanwhile. Longer than a token takes,
/// and short enough that the session notices a closed connection soon.
pub(in crate::rpc::server) const INLINE_BUDGET: Duration = Duration::from_millis(100);

/// A compiled graph with the regions that it is bound to.
#[derive(Clone)]
pub(in crate::rpc::server) struct BoundProgram {
    pub(in crate::rpc::server) program: Program,
    pub(in crate::rpc::server) bindings: Arc<[Region]>,
}

/// A program in the cache.
pub(in crate::rpc::server) struct CachedProgram<K> {
    key: K,
    /// Position of its device in the server's list.
    pub(in crate::rpc::server) device: u32,
    /// Its estimated bytes: [`graph_cost`](crate::rpc::wire::graph_cost).
    cost: u64,
    /// Pays for `program`; of no bytes if that is an error.
    charge: HostCharge,
    /// Handles of the buffers that it is bound to. Freeing one of them removes the program.
    buffers: Box<[u64]>,
    /// The program, or the error that is reported when the client runs it.
    pub(in crate::rpc::server) program: Result<BoundProgram, DeviceError>,
    /// Slot of the program that was used after this one on the same device last time: the first candidate of the next lookup,
    /// although another program may have the slot by then.
    successor: usize,
    /// Time of its last use, by the cache's logical clock.
    last_use: u64,
}

impl<K> CachedProgram<K> {
    pub(in crate::rpc::server) fn new(
        key: K,
        device: u32,
        cost: u64,
        buffers: Box<[u64]>,
        program: Result<BoundProgram, DeviceError>,
        charge: HostCharge,
    ) -> CachedProgram<K> {
        CachedProgram { key, device, cost, charge, buffers, program, successor: 0, last_use: 0 }
    }
}

/// Limits at which a cache evicts programs, and at which the session must wait for its queues. All in bytes.
#[derive(Clone, Copy)]
pub(in crate::rpc::server) struct CacheLimits {
    /// Maximum number of cached programs.
    max_programs: usize,
    /// Limit of the cached programs in bytes, including one that is about to be inserted. Above it, programs are evicted.
    max_cached: u64,
    /// Low watermark: an eviction continues until the cached programs are at most this.
    keep_after_eviction: u64,
    /// Limit of the cached programs and the evicted ones that queues may still hold. Above it, the session waits for its
    /// queues.
    max_total: u64,
}

impl CacheLimits {
    /// Evicts down to half the limit at once, so that not every new program waits for the queues. For ggml's clients, which do
    /// not track the cache.
    pub(in crate::rpc::server) const EVICT_HALF: CacheLimits = CacheLimits {
        max_programs: MAX_GGML_PROGRAMS,
        max_cached: MAX_CACHED_BYTES,
        keep_after_eviction: MAX_CACHED_BYTES / 2,
        max_total: MAX_CACHED_BYTES,
    };

    /// Evicts as few programs as possible, so that clients of the extension can track the cache. The queues may hold the same
    /// number of bytes in evicted programs.
    pub(in crate::rpc::server) const EVICT_FEWEST: CacheLimits = CacheLimits {
        max_programs: MAX_PROGRAMS,
        max_cached: MAX_CACHED_BYTES,
        keep_after_eviction: MAX_CACHED_BYTES,
        max_total: 2 * MAX_CACHED_BYTES,
    };
}

/// The cached programs of a session.
pub(in crate::rpc::server) struct ProgramCache<K> {
    limits: CacheLimits,
    /// An evicted program leaves a free slot, so that no other program changes its own.
    slots: Vec<Option<CachedProgram<K>>>,
    /// Slot of the most recently used program of each device, by the device's position. `None` if that program was removed.
    last_used: Vec<Option<usize>>,
    /// Logical clock: counts insertions and uses.
    clock: u64,
    /// Bytes of evicted programs that queues may still hold.
    evicted_bytes: u64,
    /// The bytes that are charged for their programs.
    evicted_charge: HostCharge,
}

impl<K> ProgramCache<K> {
    /// An empty cache, whose programs are charged to `memory`.
    pub(in crate::rpc::server) fn new(limits: CacheLimits, memory: &Arc<SessionMemory>) -> ProgramCache<K> {
        let evicted_charge = memory.empty();
        ProgramCache { limits, slots: Vec::new(), last_used: Vec::new(), clock: 0, evicted_bytes: 0, evicted_charge }
    }

    /// Looks up `key` and makes its program the most recently used. `device` is its expected device: the successor of the
    /// program that this device used last is compared first.
    pub(in crate::rpc::server) fn get<Q>(&mut self, device: u32, key: &Q) -> Option<&CachedProgram<K>>
    where
        K: PartialEq<Q>,
        Q: ?Sized,
    {
        let has_key = |slot: &Option<CachedProgram<K>>| slot.as_ref().is_some_and(|entry| entry.key == *key);
        let guess = self.most_recent(device).map(|last| last.successor).filter(|&at| has_key(&self.slots[at]));
        let at = guess.or_else(|| self.slots.iter().position(has_key))?;
        self.mark_used(at)
    }

    /// Whether a key is in the cache. Does not count as a use.
    pub(in crate::rpc::server) fn contains<Q>(&self, key: &Q) -> bool
    where
        K: PartialEq<Q>,
        Q: ?Sized,
    {
        self.entries().any(|entry| entry.key == *key)
    }

    /// The most recently used program of a device. `None` if it was removed, even if older programs of the device are cached.
    /// Does not count as a use.
    pub(in crate::rpc::server) fn most_recent(&self, device: u32) -> Option<&CachedProgram<K>> {
        let last = self.last_used.get(device as usize).copied().flatten()?;
        self.slots[last].as_ref()
    }

    /// Evicts the least recently used programs until a program of `cost` bytes fits. Returns true if the session must wait for
    /// its queues, and then call [`ProgramCache::release_evicted`], before it compiles that program.
    pub(in crate::rpc::server) fn evict_for(&mut self, cost: u64) -> bool {
        let CacheLimits { max_programs, max_cached, keep_after_eviction, max_total } = self.limits;
        let (mut bytes, mut programs) = (self.cached_bytes(), self.entries().count());
        if programs >= max_programs || bytes.saturating_add(cost) > max_cached {
            let target = keep_after_eviction.min(max_cached.saturating_sub(cost));
            while programs >= max_programs || bytes > target {
                let used = self.slots.iter().enumerate().filter_map(|(at, slot)| Some((slot.as_ref()?.last_use, at)));
                let Some((_, oldest)) = used.min() else { break };
                bytes -= self.evict(oldest);
                programs -= 1;
            }
        }
        self.evicted_bytes > 0 && (bytes + self.evicted_bytes).saturating_add(cost) > max_total
    }

    /// Evicts all programs, because host memory is short. Not for clients that track the cache.
    pub(in crate::rpc::server) fn evict_all(&mut self) {
        self.evict_where(|_| true);
    }

    /// Called when all submitted work is done: no queue holds an evicted program any more.
    pub(in crate::rpc::server) fn release_evicted(&mut self) {
        self.evicted_bytes = 0;
        self.evicted_charge.shrink_to(0);
    }

    /// Inserts a program as the most recently used. The caller has called [`ProgramCache::evict_for`] with its cost.
    pub(in crate::rpc::server) fn insert(&mut self, program: CachedProgram<K>) {
        let free = self.slots.iter().position(Option::is_none);
        let at = free.unwrap_or(self.slots.len());
        self.slots.resize_with(self.slots.len().max(at + 1), || None);
        self.slots[at] = Some(program);
        self.mark_used(at);
    }

    /// Removes the programs that are bound to a buffer, which is being freed. They count as evicted.
    pub(in crate::rpc::server) fn remove_programs_of_buffer(&mut self, handle: u64) {
        self.evict_where(|entry| entry.buffers.contains(&handle));
    }

    /// Removes the programs whose key `matches`. They count as evicted.
    pub(in crate::rpc::server) fn remove_where(&mut self, matches: impl Fn(&K) -> bool) {
        self.evict_where(|entry| matches(&entry.key));
    }

    fn evict_where(&mut self, matches: impl Fn(&CachedProgram<K>) -> bool) {
        for at in 0..self.slots.len() {
            if self.slots[at].as_ref().is_some_and(&matches) {
                self.evict(at);
            }
        }
    }

    /// Evicts the program in a slot, and returns its cost.
    fn evict(&mut self, at: usize) -> u64 {
        let Some(CachedProgram { cost, charge, .. }) = self.slots[at].take() else { return 0 };
        self.last_used.iter_mut().filter(|last| **last == Some(at)).for_each(|last| *last = None);
        self.evicted_bytes += cost;
        self.evicted_charge.absorb(charge);
        cost
    }

    fn entries(&self) -> impl Iterator<Item = &CachedProgram<K>> {
        self.slots.iter().flatten()
    }

    fn cached_bytes(&self) -> u64 {
        self.entries().map(|entry| entry.cost).sum()
    }

    /// Makes the program in a slot the most recently used, and the successor of its device's previous program.
    fn mark_used(&mut self, at: usize) -> Option<&CachedProgram<K>> {
        self.clock += 1;
        let entry = self.slots[at].as_mut()?;
        entry.last_use = self.clock;
        let device = entry.device as usize; // position of an existing device, so the resize is small
        self.last_used.resize(self.last_used.len().max(device + 1), None);
        if let Some(before) = self.last_used[device].replace(at)
            && let Some(before) = &mut self.slots[before]
        {
            before.successor = at;
        }
        self.slots[at].as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::device::{Budget, Device, MemoryBudget};
    use crate::rpc::server::host_memory::HostMemory;

    fn bound_program() -> BoundProgram {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap();
        let buffer = device.alloc(64, &MemoryBudget::new(1 << 20)).unwrap();
        let graph =
            crate::graph::validate::import_untrusted(&[], &[], vec![64], crate::graph::validate::OpSet::Protocol)
                .unwrap();
        BoundProgram { program: device.prepare(Arc::new(graph)).unwrap(), bindings: Arc::from([buffer.whole()]) }
    }

    fn memory() -> Arc<SessionMemory> {
        HostMemory::new(Budget::new(u64::MAX), 0, Duration::ZERO).admit().unwrap()
    }

    /// Key of ggml's front end: the body of a request.
    type Body = Vec<u8>;

    /// A program with the key `body`, bound to one buffer, for `cache`.
    fn body(
        cache: &ProgramCache<Body>,
        device: u32,
        body: &[u8],
        cost: u64,
        buffer: u64,
        program: &BoundProgram,
    ) -> CachedProgram<Body> {
        let charge = cache.evicted_charge.session().reserve(cost).unwrap();
        CachedProgram::new(body.into(), device, cost, [buffer].into(), Ok(program.clone()), charge)
    }

    fn number(cache: &ProgramCache<u64>, number: u64, cost: u64, buffers: &[u64]) -> CachedProgram<u64> {
        let charge = cache.evicted_charge.session().empty();
        CachedProgram::new(number, 0, cost, buffers.into(), Err(DeviceError::Ended), charge)
    }

    fn numbers(cache: &ProgramCache<u64>) -> Vec<u64> {
        (0..1000).filter(|&number| cache.contains(&number)).collect()
    }

    #[test]
    fn get_finds_bodies_and_freed_buffers_remove_their_programs() {
        let (p, mut cache) = (bound_program(), ProgramCache::new(CacheLimits::EVICT_HALF, &memory()));
        assert!(cache.get(0, b"a".as_slice()).is_none() && cache.most_recent(0).is_none());
        cache.insert(body(&cache, 0, b"aa", 2, 1, &p));
        cache.insert(body(&cache, 0, b"ab", 2, 2, &p));
        cache.insert(body(&cache, 3, b"c", 2, 1, &p));
        for _ in 0..3 {
            assert!(cache.get(0, b"aa".as_slice()).unwrap().key[..] == *b"aa");
            assert!(cache.most_recent(0).unwrap().key[..] == *b"aa");
            assert!(cache.get(0, b"ab".as_slice()).unwrap().key[..] == *b"ab");
            assert!(cache.most_recent(3).unwrap().key[..] == *b"c");
        }
        assert!(cache.get(0, b"a".as_slice()).is_none() && cache.most_recent(1).is_none());
        cache.remove_programs_of_buffer(2);
        assert!(cache.most_recent(0).is_none() && cache.get(0, b"ab".as_slice()).is_none());
        assert!(cache.get(0, b"aa".as_slice()).is_some() && cache.most_recent(0).is_some());
    }

    #[test]
    fn the_least_recently_used_program_is_evicted() {
        let limits = CacheLimits { max_programs: MAX_PROGRAMS, ..CacheLimits::EVICT_HALF };
        let (p, mut cache) = (bound_program(), ProgramCache::new(limits, &memory()));
        let add = |cache: &mut ProgramCache<Body>, key: &[u8], cost| {
            let must_wait = cache.evict_for(cost);
            cache.insert(body(cache, 0, key, cost, 1, &p));
            must_wait
        };
        for i in 0..MAX_PROGRAMS as u8 {
            assert!(!add(&mut cache, &[i], 1));
        }
        cache.get(0, [0].as_slice()).unwrap();
        assert!(!add(&mut cache, b"new", 1));
        assert!(cache.get(0, [0].as_slice()).is_some() && cache.get(0, [1].as_slice()).is_none());
        assert!(cache.get(0, [2].as_slice()).is_some());
        assert!(add(&mut cache, b"huge", MAX_CACHED_BYTES), "evicted bytes count until the queues are idle");
        cache.release_evicted();
        assert!(cache.entries().count() == 1 && cache.most_recent(0).is_some());
        assert!(add(&mut cache, b"next", 1) && cache.entries().count() == 1, "the huge program is evicted in turn");
    }

    #[test]
    fn evicted_programs_count_until_they_are_released() {
        let (p, mut cache) = (bound_program(), ProgramCache::new(CacheLimits::EVICT_HALF, &memory()));
        let tenth = MAX_CACHED_BYTES / 10;
        let mut waits = 0;
        for i in 0..100 {
            if cache.evict_for(tenth) {
                cache.release_evicted();
                waits += 1;
            }
            cache.insert(body(&cache, 0, &[i], tenth, 1, &p));
            assert!(cache.cached_bytes() + cache.evicted_bytes <= MAX_CACHED_BYTES);
            assert_eq!(cache.evicted_charge.session().held(), cache.cached_bytes() + cache.evicted_bytes);
        }
        assert!((10..=20).contains(&waits), "waited for the queues {waits} times");
        cache.remove_programs_of_buffer(1);
        assert!(cache.evict_for(MAX_CACHED_BYTES / 2));
        cache.insert(body(&cache, 0, b"last", 7, 1, &p));
        cache.evict_all();
        assert!(cache.entries().next().is_none() && cache.evicted_charge.session().held() > 0);
        cache.release_evicted();
        assert_eq!(cache.evicted_charge.session().held(), 0);
    }

    /// Clients of the extension simulate the cache, so every eviction must happen exactly when the protocol specifies.
    #[test]
    fn graph_numbers_are_evicted_as_the_protocol_specifies() {
        let mut cache = ProgramCache::new(CacheLimits::EVICT_FEWEST, &memory());
        let quarter = MAX_CACHED_BYTES / 4;
        for n in 1..=4 {
            assert!(!cache.evict_for(quarter));
            cache.insert(number(&cache, n, quarter, &[n, 9]));
        }
        assert!(cache.get(0, &1).is_some() && cache.get(0, &5).is_none());
        assert!(cache.get(0, &1).unwrap().program.is_err(), "a failed program is cached like any other");
        assert!(!cache.evict_for(quarter));
        cache.insert(number(&cache, 5, quarter, &[5]));
        assert_eq!(numbers(&cache), [1, 3, 4, 5], "only 2 is evicted, the least recently used");
        assert!(!cache.evict_for(quarter + 1));
        cache.insert(number(&cache, 6, 0, &[]));
        assert_eq!(numbers(&cache), [1, 5, 6]);
        cache.remove_programs_of_buffer(9);
        assert_eq!(numbers(&cache), [5, 6]);
        assert!(cache.get(0, &1).is_none());
        // The limit of entries.
        for n in 100..100 + MAX_PROGRAMS as u64 {
            cache.evict_for(0);
            cache.insert(number(&cache, n, 0, &[]));
        }
        assert_eq!(cache.entries().count(), MAX_PROGRAMS);
        assert!(cache.contains(&100) && !cache.contains(&6));
    }

    #[test]
    fn evicted_bytes_may_reach_the_cache_limit_again() {
        let mut cache = ProgramCache::new(CacheLimits::EVICT_FEWEST, &memory());
        let tenth = MAX_CACHED_BYTES / 10;
        let mut waits = 0;
        for n in 0..100 {
            if cache.evict_for(tenth) {
                cache.release_evicted();
                waits += 1;
            }
            cache.insert(number(&cache, n, tenth, &[]));
            assert!(
                cache.cached_bytes() <= MAX_CACHED_BYTES
                    && cache.cached_bytes() + cache.evicted_bytes <= 2 * MAX_CACHED_BYTES
            );
        }
        assert!((5..=10).contains(&waits), "waited for the queues {waits} times");
        assert!(
            cache.evict_for(3 * MAX_CACHED_BYTES),
            "a program above the limit evicts all others and waits for the queues"
        );
        assert!(cache.entries().next().is_none());
    }
}
