use super::*;
use crate::device::Budget;
use crate::rpc::server::host_memory::{BASE_BYTES, HostMemory};
use MissingGraph::{Evicted, FreedBuffer, Unknown, Unnumbered};
use fastrand::Rng;
use std::time::Duration;

const UNLIMITED: u64 = u64::MAX;
const DEVICES: u32 = 3;
const BUFFERS: u64 = 40;

fn new_store(max_bytes: u64) -> GraphStore {
    GraphStore::new(max_bytes, &HostMemory::new(Budget::new(u64::MAX), 0, Duration::ZERO).admit().unwrap())
}

fn body_of(store: &mut GraphStore, device: u32, uid: u64) -> Result<Vec<u8>, MissingGraph> {
    store.body(device, uid).map(|body| body.to_vec())
}

fn random_bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
}

/// Checks that the counted bytes are the stored bytes.
#[track_caller]
fn check_bytes(store: &GraphStore) {
    let mut bytes = 0;
    for device in &store.devices {
        assert!(device.graphs.len() <= MAX_GRAPHS);
        bytes += device.number_bytes();
        bytes += device.stored().map(|(_, stored)| stored.bytes()).sum::<u64>();
    }
    assert_eq!((store.bytes(), store.charge.bytes()), (bytes, bytes));
}

/// A stored body with the handles of its buffers, or why it is gone.
type StoredBody = Result<(Vec<u8>, Vec<u64>), MissingGraph>;

/// A device as the protocol describes it, with whole bodies and without a budget.
#[derive(Default)]
struct Reference {
    graphs: HashMap<u64, StoredBody>,
}

impl Reference {
    fn record_compute(&mut self, uid: u64, body: &[u8], buffers: &[u64]) -> bool {
        let clear = uid != 0 && self.graphs.len() == 1024;
        if clear {
            self.graphs.clear();
        }
        if uid != 0 {
            self.graphs.insert(uid, Ok((body.to_vec(), buffers.to_vec())));
        }
        clear
    }

    fn body(&self, uid: u64) -> Result<Vec<u8>, MissingGraph> {
        match self.graphs.get(&uid) {
            _ if uid == 0 => Err(Unnumbered),
            Some(graph) => graph.clone().map(|(body, _)| body),
            None => Err(Unknown),
        }
    }

    fn remove_graphs_of_buffer(&mut self, handle: u64) {
        let graphs = self.graphs.values_mut();
        let named = graphs.filter(|graph| graph.as_ref().is_ok_and(|(_, buffers)| buffers.contains(&handle)));
        named.for_each(|graph| *graph = Err(FreedBuffer));
    }
}

/// What a random run has covered.
#[derive(Default, Debug)]
struct Coverage {
    clearings: usize,
    found: usize,
    evicted: usize,
    freed: usize,
}

/// Runs random operations on a store and on the reference. The store may answer [`Evicted`] instead of a body.
fn run_random(seed: u64, operations: usize, max_bytes: u64, max_len: usize) -> Coverage {
    let (mut rng, mut coverage) = (Rng::with_seed(seed), Coverage::default());
    let mut store = new_store(max_bytes);
    let mut references: [Reference; DEVICES as usize] = Default::default();
    let templates: Vec<_> = (0..6).map(|_| random_bytes(&mut rng, max_len * 3 / 4)).collect();
    let mut last = 0;
    for operation in 0..operations {
        let device = if rng.u8(0..4) == 0 { rng.u32(1..DEVICES) } else { 0 };
        let reference = &mut references[device as usize];
        let old = rng.u64(last.max(1500) - 1500..=last + 1);
        match rng.u8(0..100) {
            0..60 => {
                let uid = if rng.u8(0..4) == 0 { old } else { last + rng.u64(1..3) };
                last = last.max(uid);
                let mut body = rng.choice(&templates).unwrap().clone();
                for _ in 0..rng.usize(0..4) {
                    let at = rng.usize(0..=body.len());
                    let end = rng.usize(at..=body.len().min(at + 8));
                    let len = if rng.bool() { end - at } else { rng.usize(0..max_len / 8) };
                    body.splice(at..end, random_bytes(&mut rng, len));
                }
                let buffers: Vec<_> = (0..rng.usize(0..4)).map(|_| rng.u64(0..BUFFERS)).collect();
                let cleared = store.record_compute(device, uid, &body, &buffers).unwrap();
                assert_eq!(cleared, reference.record_compute(uid, &body, &buffers), "seed {seed}, {operation}");
                coverage.clearings += usize::from(cleared);
                let numbers: u64 = store.devices.iter().map(DeviceGraphs::number_bytes).sum();
                let fits = numbers + stored_bytes(&body, &buffers) <= max_bytes;
                assert!(
                    !fits || uid == 0 || body_of(&mut store, device, uid) == Ok(body),
                    "seed {seed}, operation {operation}"
                );
            }
            60..96 => match (body_of(&mut store, device, old), reference.body(old)) {
                (Err(Evicted), Ok(_) | Err(FreedBuffer)) => coverage.evicted += 1,
                (have, expected) => {
                    coverage.found += usize::from(have.is_ok());
                    coverage.freed += usize::from(have == Err(FreedBuffer));
                    assert!(have == expected, "seed {seed}, operation {operation}, device {device}, graph {old}");
                }
            },
            96..98 => store.record_use(device, old),
            _ => {
                let handle = rng.u64(0..BUFFERS);
                store.remove_graphs_of_buffer(handle);
                references.iter_mut().for_each(|reference| reference.remove_graphs_of_buffer(handle));
            }
        }
        let has_bodies = store.devices.iter().any(|device| device.body_bytes > 0);
        assert!(store.bytes() <= max_bytes || !has_bodies, "seed {seed}, operation {operation}");
        if operation % 256 == 0 {
            check_bytes(&store);
        }
    }
    coverage
}

#[test]
fn random_graphs_follow_the_rule_of_1024() {
    for seed in 0..4 {
        let coverage = run_random(seed, 8000, UNLIMITED, 40);
        assert!(
            coverage.clearings >= 2 && coverage.found > 500 && coverage.freed > 100 && coverage.evicted == 0,
            "seed {seed}: {coverage:?}"
        );
    }
}

#[test]
fn random_graphs_stay_within_the_budget() {
    // The numbers of three devices take up to 480 KB.
    for (seed, max_kib, max_len) in [(10, 0, 40), (11, 300, 400), (12, 500, 2000), (13, 1200, 8000)] {
        let coverage = run_random(seed, 10_000, max_kib << 10, max_len);
        assert!(coverage.evicted > 100 && (coverage.found > 100) == (max_kib > 0), "seed {seed}: {coverage:?}");
    }
}

#[test]
fn missing_graphs_have_a_reason() {
    let mut store = new_store(UNLIMITED);
    let compute =
        |store: &mut GraphStore, device, uid| store.record_compute(device, uid, &[1; 100], &[uid % 2]).unwrap();
    assert_eq!(store.body(2, 1), Err(Unknown), "no graph of the device");
    for uid in 1..=1024 {
        assert!(!compute(&mut store, 0, uid) && !compute(&mut store, 1, uid));
    }
    assert!(!compute(&mut store, 0, 0), "0 neither clears nor counts");
    store.remove_graphs_of_buffer(1);
    let expected = [(0, Err(Unnumbered)), (1, Err(FreedBuffer)), (2, Ok(vec![1; 100])), (1025, Err(Unknown))];
    for (uid, body) in expected {
        assert_eq!(body_of(&mut store, 0, uid), body, "{uid}");
    }
    assert!(compute(&mut store, 0, 2), "a number among the 1024 clears, too");
    let expected = [(1, Err(Unknown)), (2, Ok(vec![1; 100])), (3, Err(Unknown)), (1025, Err(Unknown))];
    for (uid, body) in expected {
        assert_eq!(body_of(&mut store, 0, uid), body, "{uid}");
    }
    assert!(store.body(1, 4).is_ok(), "devices are cleared one by one");
    for uid in 3..=1025 {
        assert!(!compute(&mut store, 0, uid), "{uid}: numbers of freed graphs were counted");
    }
    assert!(compute(&mut store, 0, 9) && store.body(0, 1) == Err(Unknown));
    let mut small = new_store(1000);
    assert!(!small.record_compute(0, 1, &[1; 600], &[]).unwrap() && small.body(0, 1).is_ok());
    assert!(!small.record_compute(0, 2, &[1; 1000], &[]).unwrap());
    assert_eq!((small.body(0, 1).is_ok(), small.body(0, 2)), (true, Err(Evicted)), "too large to displace others");
}

#[test]
fn the_longest_unused_body_is_evicted() {
    let mut rng = Rng::with_seed(3);
    let bodies: Vec<_> = (0..6).map(|_| random_bytes(&mut rng, 1000)).collect();
    let stored = |store: &GraphStore| {
        let mut uids: Vec<_> = store.devices.iter().flat_map(|device| device.stored().map(|(uid, _)| uid)).collect();
        uids.sort_unstable();
        uids
    };
    let mut store = new_store(UNLIMITED);
    for uid in 1..=3 {
        store.record_compute(uid as u32 % 2, uid, &bodies[uid as usize], &[uid]).unwrap();
    }
    store.max_bytes = store.bytes() + 2 * (NUMBER_BYTES + 8);
    store.record_use(1, 1);
    assert!(store.body(0, 2).is_ok());
    store.record_compute(0, 4, &bodies[4], &[4]).unwrap();
    assert_eq!(stored(&store), [1, 2, 4], "3 was used before 1 and 2");
    store.record_compute(0, 5, &bodies[5], &[5]).unwrap();
    assert_eq!(stored(&store), [2, 4, 5], "the order is over all devices");
    store.max_bytes = store.bytes() + 2 * NUMBER_BYTES;
    store.record_compute(0, 6, &bodies[3], &[5]).unwrap();
    assert_eq!(stored(&store), [2, 4, 6], "6 supersedes 5");
    store.remove_graphs_of_buffer(7);
    assert_eq!(stored(&store), [2, 4, 6], "no graph names the buffer");
    check_bytes(&store);
}

/// Host memory that other sessions hold makes the store evict as if its own limit were lower.
#[test]
fn the_least_recently_used_bodies_make_room_if_host_memory_is_short() {
    const BODY: usize = 200 << 10;
    let server = HostMemory::new(Budget::new(3 * BASE_BYTES + (1 << 20)), 0, Duration::ZERO);
    let (own, other) = (server.admit().unwrap(), server.admit().unwrap());
    let mut store = GraphStore::new(UNLIMITED, &own);
    let mut rng = Rng::with_seed(1);
    let mut held = other.empty();
    for uid in 1..=20 {
        // Once this session holds its share, the other one takes the rest.
        while uid == 10 && held.grow(1 << 10).is_ok() {}
        let body = random_bytes(&mut rng, BODY);
        assert_eq!(store.record_compute(0, uid, &body, &[]), Ok(false));
        assert_eq!(body_of(&mut store, 0, uid).as_ref(), Ok(&body), "{uid}");
        check_bytes(&store);
        let stored = store.devices[0].stored().count();
        assert!(stored >= 1 && stored * BODY < 1 << 20, "{stored} bodies");
    }
    assert_eq!(store.body(0, 1), Err(Evicted));
    held.shrink_to(0);
    store.remove_graphs_of_buffer(7);
    drop(store);
    assert_eq!(own.held(), 0);
}

/// Two contexts of a client on one connection: one sends many graphs, while the other runs its only one again from time to time.
#[test]
fn the_last_graph_of_an_idle_context_is_kept() {
    let mut rng = Rng::with_seed(1);
    let mut store = new_store(1 << 20);
    let idle = random_bytes(&mut rng, 100 << 10);
    store.record_compute(0, 1, &idle, &[1, 2]).unwrap();
    for uid in 2..=500 {
        let buffers = if uid % 2 == 0 { [3, 1] } else { [1, 3] };
        store.record_compute(0, uid, &random_bytes(&mut rng, 100 << 10), &buffers).unwrap();
    }
    assert_eq!(body_of(&mut store, 0, 1), Ok(idle));
    assert_eq!(store.body(0, 2), Err(Evicted));
    check_bytes(&store);
}

/// A session that has no next graph gives memory up as well.
#[test]
fn stored_bodies_are_trimmed_if_host_memory_is_short() {
    let server = HostMemory::new(Budget::new(3 * BASE_BYTES + (4 << 20)), 0, Duration::ZERO);
    let (own, other) = (server.admit().unwrap(), server.admit().unwrap());
    let mut store = GraphStore::new(1 << 20, &own);
    let mut rng = Rng::with_seed(1);
    for uid in 1..=20 {
        store.record_compute(0, uid, &random_bytes(&mut rng, 40 << 10), &[1]).unwrap();
    }
    store.trim();
    assert!(store.body(0, 1).is_ok(), "memory is plentiful");
    let mut held = other.empty();
    while other.is_plentiful() && held.grow(1 << 10).is_ok() {}
    store.trim();
    assert!(store.body(0, 1).is_ok() && store.bytes() <= 1 << 16, "the last used one is left: {} bytes", store.bytes());
    check_bytes(&store);
}
