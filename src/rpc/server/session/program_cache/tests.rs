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
