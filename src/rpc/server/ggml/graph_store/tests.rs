use super::*;
use crate::device::Budget;
use crate::rpc::server::host_memory::{BASE_BYTES, HostMemory};
use crate::rpc::wire::{GraphCompute, REQUEST_HEADER, Request, TENSOR_RECORD, TensorRecord};
use MissingGraph::{Evicted, Forgotten, FreedBuffer, NeverSent, Unnumbered};
use fastrand::Rng;
use std::collections::HashSet;
use std::time::Duration;

const UNLIMITED: u64 = u64::MAX;
const DEVICES: u32 = 3;
const BUFFERS: u64 = 40;

fn new_store(max_bytes: u64) -> GraphStore {
    GraphStore::new(max_bytes, &HostMemory::new(Budget::new(u64::MAX), 0, Duration::ZERO).admit().unwrap())
}

fn random_bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
}

/// Checks that the counted bytes are those of what is stored.
#[track_caller]
fn check_bytes(store: &GraphStore) {
    let mut bytes = 0;
    for device in &store.devices {
        assert!(device.graphs.len() <= MAX_GRAPHS && device.forgotten.len() <= MAX_GRAPHS);
        let used: HashSet<_> = device.stored().map(|(_, stored)| stored.keyframe.as_ptr()).collect();
        assert_eq!(device.keyframes.len(), used.len(), "keyframes without a reference are dropped");
        assert!(device.keyframes.iter().all(|keyframe| used.contains(&keyframe.as_ptr())));
        bytes += device.number_bytes();
        bytes += device.stored().map(|(_, stored)| stored.own_bytes()).sum::<u64>();
        bytes += device.keyframes.iter().map(|keyframe| keyframe_bytes(keyframe)).sum::<u64>();
    }
    assert_eq!((store.bytes(), store.charge.bytes()), (bytes, bytes));
}

/// A stored body with the handles of its buffers, or why it is gone.
type StoredBody = Result<(Vec<u8>, Vec<u64>), MissingGraph>;

/// A device as the protocol describes it, with whole bodies and without a budget.
#[derive(Default)]
struct Reference {
    graphs: HashMap<u64, StoredBody>,
    forgotten: HashSet<u64>,
}

impl Reference {
    fn record_compute(&mut self, uid: u64, body: &[u8], buffers: &[u64]) -> bool {
        let clear = uid != 0 && self.graphs.len() == 1024;
        if clear {
            self.forgotten = self.graphs.drain().map(|(uid, _)| uid).collect();
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
            None if self.forgotten.contains(&uid) => Err(Forgotten),
            None => Err(NeverSent),
        }
    }

    fn remove_graphs_of_buffer(&mut self, handle: u64) {
        let graphs = self.graphs.values_mut();
        let named = graphs.filter(|graph| graph.as_ref().is_ok_and(|(_, buffers)| buffers.contains(&handle)));
        named.for_each(|graph| *graph = Err(FreedBuffer));
    }
}

/// What a random run coverage.
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
                let fits = numbers + keyframe_bytes(&body) + 100 <= max_bytes;
                assert!(!fits || uid == 0 || store.body(device, uid) == Ok(body), "seed {seed}, operation {operation}");
            }
            60..96 => match (store.body(device, old), reference.body(old)) {
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
    for (seed, max_kib, max_len) in [(10, 0, 40), (11, 300, 400), (12, 500, 2000), (13, 600, 8000)] {
        let coverage = run_random(seed, 10_000, max_kib << 10, max_len);
        assert!(coverage.evicted > 100 && (coverage.found > 100) == (max_kib > 0), "seed {seed}: {coverage:?}");
    }
}

#[test]
fn missing_graphs_have_a_reason() {
    let mut store = new_store(UNLIMITED);
    let compute =
        |store: &mut GraphStore, device, uid| store.record_compute(device, uid, &[1; 100], &[uid % 2]).unwrap();
    assert_eq!(store.body(2, 1), Err(NeverSent), "no graph of the device");
    for uid in 1..=1024 {
        assert!(!compute(&mut store, 0, uid) && !compute(&mut store, 1, uid));
    }
    assert!(!compute(&mut store, 0, 0), "0 neither clears nor counts");
    store.remove_graphs_of_buffer(1);
    let expected = [(0, Err(Unnumbered)), (1, Err(FreedBuffer)), (2, Ok(vec![1; 100])), (1025, Err(NeverSent))];
    for (uid, body) in expected {
        assert_eq!(store.body(0, uid), body, "{uid}");
    }
    assert!(compute(&mut store, 0, 2), "a number among the 1024 clears, too");
    let expected = [(1, Err(Forgotten)), (2, Ok(vec![1; 100])), (3, Err(Forgotten)), (1025, Err(NeverSent))];
    for (uid, body) in expected {
        assert_eq!(store.body(0, uid), body, "{uid}");
    }
    assert!(store.body(1, 4).is_ok(), "devices are cleared one by one");
    for uid in 3..=1025 {
        assert!(!compute(&mut store, 0, uid), "{uid}: numbers of freed graphs were counted");
    }
    assert!(compute(&mut store, 0, 9) && store.body(0, 1) == Err(NeverSent));
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
        store.record_compute(uid as u32 % 2, uid, &bodies[uid as usize], &[]).unwrap();
    }
    store.max_bytes = store.bytes() + 2 * NUMBER_BYTES;
    store.record_use(1, 1);
    assert!(store.body(0, 2).is_ok());
    store.record_compute(0, 4, &bodies[4], &[]).unwrap();
    assert_eq!(stored(&store), [1, 2, 4], "3 was used before 1 and 2");
    store.record_compute(0, 5, &bodies[5], &[]).unwrap();
    assert_eq!(stored(&store), [2, 4, 5], "the order is over all devices");

    // 1 is the keyframe of 2 and 3.
    let mut store = new_store(UNLIMITED);
    for uid in 1..=3 {
        store.record_compute(0, uid, &[&[uid as u8; 100], &bodies[0][..]].concat(), &[uid]).unwrap();
    }
    assert_eq!(store.devices[0].keyframes.len(), 1);
    let full = store.bytes();
    store.record_compute(0, 4, &bodies[4], &[]).unwrap();
    store.max_bytes = store.bytes() - 1;
    store.record_compute(0, 4, &bodies[4], &[]).unwrap();
    assert_eq!(stored(&store), [1, 3, 4], "2 is evicted: without 1 the keyframe would stay for 2 and 3");
    store.max_bytes = full;
    store.record_compute(0, 4, &bodies[4], &[]).unwrap();
    assert_eq!(stored(&store), [4], "3 goes before its keyframe");

    // A keyframe outlives its graph while a difference needs it.
    let mut store = new_store(UNLIMITED);
    for uid in 1..=3 {
        store.record_compute(0, uid, &[&[uid as u8; 100], &bodies[0][..]].concat(), &[uid]).unwrap();
    }
    store.remove_graphs_of_buffer(1);
    store.remove_graphs_of_buffer(2);
    check_bytes(&store);
    assert_eq!(store.body(0, 3).unwrap()[..100], [3; 100]);
    store.remove_graphs_of_buffer(3);
    assert_eq!(store.bytes(), 3 * NUMBER_BYTES);
}

const LAYERS: usize = 32;
const LAYER_TENSORS: usize = 40;
const LAYER_NODES: usize = 31;

/// A graph of llama.cpp's kind with 32 layers: 1280 tensors, of which 992 are nodes.
fn llama_graph() -> (Vec<[u8; 8]>, Vec<[u8; TENSOR_RECORD]>) {
    let id = |tensor: usize| 0x5581_7a40_0000 + 0x170 * tensor as u64;
    let record = |tensor: usize| {
        let (layer, part) = (tensor / LAYER_TENSORS, tensor % LAYER_TENSORS);
        let mut src = [0; 10];
        src[..2].copy_from_slice(&[id(tensor.saturating_sub(1)), id(tensor.saturating_sub(9))]);
        let mut name = [0; 64];
        let text = format!("blk.{layer}.tensor_{part}");
        name[..text.len()].copy_from_slice(text.as_bytes());
        TensorRecord {
            id: id(tensor),
            dtype: 0,
            buffer: 1 + part as u64 % 3,
            ne: [4096, 1, 1, 1],
            nb: [4, 16384, 16384, 16384],
            op: part as u32,
            op_params: [0; 16],
            flags: 16,
            src,
            view_src: 0,
            view_offs: 0,
            data: 0x7f12_0000_0000 + 0x4000 * tensor as u64,
            name,
            use_count: 1,
        }
    };
    let tensors: Vec<_> = (0..LAYERS * LAYER_TENSORS).collect();
    let nodes = tensors.iter().filter(|&&tensor| tensor % LAYER_TENSORS >= LAYER_TENSORS - LAYER_NODES);
    (nodes.map(|&tensor| id(tensor).to_le_bytes()).collect(), tensors.iter().map(|&t| record(t).encode()).collect())
}

/// The body of a graph that is built anew with other shapes, strides and addresses in 5 % of its tensors.
fn rebuilt(uid: u64, nodes: &[[u8; 8]], mut tensors: Vec<[u8; TENSOR_RECORD]>) -> Vec<u8> {
    let mut rng = Rng::with_seed(uid);
    let count = tensors.len();
    for tensor in rng.choose_multiple(0..count, count / 20) {
        let mut record = TensorRecord::decode(&tensors[tensor]);
        record.ne[..2].copy_from_slice(&[rng.u32(..1 << 16), rng.u32(..1 << 10)]);
        record.nb[1..].fill_with(|| rng.u32(..));
        record.view_offs = rng.u64(..1 << 32);
        record.data += rng.u64(..1 << 32);
        tensors[tensor] = record.encode();
    }
    let mut message = Vec::new();
    Request::GraphCompute(GraphCompute::new(0, nodes, &tensors).unwrap().with_uid(uid)).encode(&mut message);
    message.split_off(REQUEST_HEADER)
}

#[test]
fn a_session_keeps_512_builds_of_a_graph_with_32_layers() {
    const BUDGET: u64 = 3 << 20;
    let (nodes, tensors) = llama_graph();
    let body = |uid| rebuilt(uid, &nodes, tensors.clone());
    let mut store = new_store(BUDGET);
    for uid in 1..=512 {
        assert!(!store.record_compute(0, uid, &body(uid), &[1, 2, 3]).unwrap());
    }
    check_bytes(&store);
    for uid in 1..=512 {
        assert!(store.body(0, uid).as_ref() == Ok(&body(uid)), "build {uid}; {} bytes in use", store.bytes());
    }
    let whole = keyframe_bytes(&body(1));
    assert!(store.bytes() <= BUDGET && store.bytes() > BUDGET * 3 / 4, "{} bytes in use", store.bytes());
    assert!(BUDGET / whole < 10, "{} whole bodies of {whole} bytes fit", BUDGET / whole);
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
        assert_eq!(store.body(0, uid).as_ref(), Ok(&body), "{uid}");
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
