#![allow(clippy::panic, reason = "a test")]
use std::sync::Arc;

use super::{AddressSpace, Error, Footprint, MovedBytes};
use crate::fault::FaultKind;

const SIZE: u64 = 4096;

fn space() -> AddressSpace {
    AddressSpace::new(&[64 << 20, 64 << 20]).expect("a space")
}

fn text(kind: &FaultKind) -> String {
    kind.to_string()
}

#[test]
fn addresses_are_aligned_to_512_and_no_more() {
    let space = space();
    for bytes in [1, 511, 512, 513, 5000, 3 << 20] {
        let base = space.alloc(0, bytes, "cuMemAlloc").expect("memory").base();
        assert_eq!(base % 1024, 512, "{base:#x}");
    }
}

#[test]
fn device_addresses_are_unmapped_for_the_host() {
    let space = space();
    let base = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let holds = |line: &&str| {
        let (start, end) = line.split(' ').next().and_then(|range| range.split_once('-')).unwrap_or(("0", "0"));
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        (number(start)..number(end)).contains(&base)
    };
    let line = maps.lines().find(holds).expect("the reservation is mapped");
    assert!(line.contains(" ---p "), "{line}");
}

#[test]
fn an_access_outside_names_the_nearest_allocation() {
    let space = space();
    let base = space.alloc(1, SIZE, "cuMemAllocAsync").expect("memory").base();
    let freed = space.alloc(0, 100, "cuMemAlloc").expect("memory").base();
    space.free(freed).expect("freed");
    let what = format!("the 4096-byte allocation at {base:#x} (cuMemAllocAsync, device 1)");
    let of_freed = format!("the 100-byte allocation at {freed:#x} (cuMemAlloc, device 0), freed");
    let cases = [
        (base, 4, None),
        (base + SIZE - 4, 4, None),
        (base + SIZE - 4, 8, Some(format!("its last byte lies 4 bytes past the end of {what}"))),
        (base + SIZE, 4, Some(format!("0 bytes past the end of {what}"))),
        (base + SIZE + 100, 1, Some(format!("100 bytes past the end of {what}"))),
        (base - 8, 8, Some(format!("8 bytes before the start of {what}"))),
        (freed + 40, 4, Some(format!("byte 40 of {of_freed}"))),
        (16, 4, Some("a null pointer plus 16 bytes".into())),
        (u64::MAX, 4, Some("past the end".into())),
    ];
    let view = space.snapshot();
    for (address, bytes, wanted) in cases {
        match (view.find(address, bytes), wanted) {
            (Ok(_), None) => {}
            (Err(kind), Some(wanted)) => assert!(text(&kind).contains(&wanted), "{kind}\nshould contain: {wanted}"),
            (other, wanted) => panic!("{address:#x}: {other:?}, expected {wanted:?}"),
        }
    }
}

#[test]
fn freed_addresses_stay_out_of_use() {
    let space = space();
    let first = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
    let before = space.snapshot();
    space.free(first).expect("freed");
    for _ in 0..1000 {
        let other = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
        assert!(other > first + SIZE || other + SIZE < first);
        space.free(other).expect("freed");
    }
    for view in [before, space.snapshot()] {
        assert!(matches!(view.find(first + 8, 8), Err(FaultKind::UseAfterFree(_))));
        assert!(matches!(view.write(first, &[1]), Err(FaultKind::UseAfterFree(_))));
    }
    let Err(Error::NotAllocated { near, .. }) = space.free(first) else { panic!("a second free succeeded") };
    assert!(near.contains("use after free"), "{near}");
    let inside = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base() + 4;
    assert!(matches!(space.free(inside), Err(Error::NotAllocated { .. })));
}

#[test]
fn memory_is_limited_and_accounted() {
    let space = space();
    let half = space.alloc(0, 40 << 20, "cuMemAlloc").expect("memory");
    let Err(error) = space.alloc(0, 40 << 20, "cuMemAlloc") else { panic!("an allocation above the limit succeeded") };
    let wanted = Error::OutOfMemory { device: 0, asked: 40 << 20, used: 40 << 20, limit: 64 << 20 };
    assert_eq!(error, wanted);
    assert_eq!((space.used(0), space.used(1)), (40 << 20, 0));
    space.alloc(1, 40 << 20, "cuMemAlloc").expect("the other device's memory");
    // Freeing releases the memory although a reference still exists.
    space.free(half.base()).expect("freed");
    assert_eq!(space.used(0), 0);
    space.alloc(0, 60 << 20, "cuMemAlloc").expect("memory");
    assert!(matches!(space.alloc(2, 1, "cuMemAlloc"), Err(Error::Device { device: 2, count: 2 })));
    assert!(matches!(space.alloc(0, 0, "cuMemAlloc"), Err(Error::Invalid(_))));
    assert!(matches!(space.alloc(0, u64::MAX, "cuMemAlloc"), Err(Error::OutOfMemory { .. })));
}

#[test]
fn a_snapshot_is_rebuilt_only_after_a_change() {
    let space = space();
    let first = space.snapshot();
    assert!(Arc::ptr_eq(&first, &space.snapshot()));
    let base = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
    let second = space.snapshot();
    assert!(!Arc::ptr_eq(&first, &second));
    assert_eq!((first.allocations().len(), second.allocations().len()), (0, 1));
    assert_eq!(space.find(base + SIZE - 1).map(|a| a.base()), Some(base));
    assert!(space.find(base + SIZE).is_none());
}

#[test]
fn memory_of_another_device_needs_peer_access() {
    let space = space();
    let of = |device, origin| space.alloc(device, SIZE, origin).expect("memory").base();
    let (own, others) = (of(0, "cuMemAlloc"), of(1, "cuMemAlloc"));
    let constant = space.alloc_constant(0, SIZE, "cuModuleLoad").expect("memory").base();
    let pinned = space.alloc_host(1, SIZE, "cuMemHostAlloc").expect("memory").base();
    let managed = space.alloc_managed(1, SIZE, "cuMemAllocManaged").expect("memory").base();
    let view = space.snapshot();
    // (address, peers, write, allowed)
    let cases = [
        (own, 0, true, true),
        (others, 0, false, false),
        (others, 2, true, true),
        (others, 4, false, false),
        (constant, 0, false, true),
        (constant, 0, true, false),
        (pinned, 0, true, true),
        (managed, 0, true, true),
    ];
    for (address, peers, write, allowed) in cases {
        let found = view.reachable(address, 8, 0, peers, write);
        assert_eq!(found.is_ok(), allowed, "{address:#x} {peers} {write}: {found:?}");
        assert!(allowed || matches!(found, Err(FaultKind::NotAccessible(_))));
    }
}

/// Random writes, fills and copies against a simple model of bytes and written bits.
#[test]
fn host_calls_agree_with_a_model() {
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..40 {
        let space = space();
        let sizes = [rng.u64(1..400), rng.u64(1..9000)];
        let bases = sizes.map(|bytes| space.alloc(0, bytes, "cuMemAlloc").expect("memory").base());
        let mut model: [Vec<Option<u8>>; 2] = sizes.map(|bytes| vec![None; bytes as usize]);
        let view = space.snapshot();
        for step in 0..60 {
            let (i, j) = (rng.usize(0..2), rng.usize(0..2));
            let whole = rng.u8(0..8) == 0;
            let at = if whole { 0 } else { rng.usize(0..model[i].len()) };
            let length = if whole { model[i].len() } else { rng.usize(0..=model[i].len() - at) };
            match rng.u8(0..4) {
                0 => {
                    let data: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
                    view.write(bases[i] + at as u64, &data).expect("inside");
                    model[i][at..at + length].iter_mut().zip(&data).for_each(|(to, &from)| *to = Some(from));
                }
                1 => {
                    let unit = [1, 4][rng.usize(0..2)];
                    let (at, pattern) = (at / unit * unit, [1, 2, 3, 4]);
                    let count = length / unit;
                    view.fill(bases[i] + at as u64, &pattern[..unit], count as u64).expect("inside");
                    (0..count * unit).for_each(|k| model[i][at + k] = Some(pattern[k % unit]));
                }
                2 if i != j => {
                    let from = rng.usize(0..model[j].len());
                    let length = length.min(model[j].len() - from);
                    let (to, source) = (bases[i] + at as u64, bases[j] + from as u64);
                    view.copy(to, source, length as u64).expect("inside");
                    let copied = model[j][from..from + length].to_vec();
                    model[i][at..at + length].copy_from_slice(&copied);
                }
                _ => {
                    let mut out = vec![0; length];
                    view.read(bases[i] + at as u64, &mut out).expect("inside");
                    let agrees = |(&got, want): (&u8, &Option<u8>)| want.is_none_or(|want| want == got);
                    assert!(out.iter().zip(&model[i][at..]).all(agrees), "round {round} step {step}");
                }
            }
            let missing = view.first_uninitialised(bases[i] + at as u64, length as u64).expect("inside");
            let wanted = model[i][at..at + length].iter().position(Option::is_none);
            assert_eq!(missing, wanted.map(|k| bases[i] + (at + k) as u64), "round {round} step {step}");
            for (base, model) in bases.iter().zip(&model) {
                let full = space.find(*base).expect("live").physical().is_full();
                let all = model.iter().all(Option::is_some);
                assert!(full == all, "round {round} step {step}: full {full}, should be {all}");
            }
        }
    }
}

#[test]
fn host_calls_check_ranges() {
    let space = space();
    let base = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
    let view = space.snapshot();
    assert!(matches!(view.write(base + 1, &[0; SIZE as usize]), Err(FaultKind::OutOfBounds(_))));
    assert_eq!(view.first_uninitialised(base, SIZE), Ok(Some(base)), "nothing is written before all is checked");
    assert!(matches!(view.read(base + SIZE - 1, &mut [0; 2]), Err(FaultKind::OutOfBounds(_))));
    assert!(matches!(view.copy(base, base + SIZE, 1), Err(FaultKind::OutOfBounds(_))));
    assert!(matches!(view.fill(base + 2, &[0; 4], 1), Err(FaultKind::Misaligned)));
    assert!(matches!(view.fill(base, &[0; 3], 1), Err(FaultKind::InvalidValue(_))));
    assert!(matches!(view.fill(base, &[0; 4], u64::MAX), Err(FaultKind::OutOfBounds(_))));
    assert_eq!(view.write(base + SIZE, &[]), Ok(()), "nothing is nowhere out of bounds");
}

#[test]
fn threads_may_write_the_same_words() {
    let space = space();
    let base = space.alloc(0, SIZE, "cuMemAlloc").expect("memory").base();
    let view = space.snapshot();
    std::thread::scope(|scope| {
        for offset in 0..2 {
            let view = &view;
            scope.spawn(move || {
                for at in (offset..SIZE).step_by(2) {
                    view.write(base + at, &[7]).expect("inside");
                }
            });
        }
    });
    assert!(space.find(base).expect("live").physical().is_full());
    let mut out = vec![0; SIZE as usize];
    view.read(base, &mut out).expect("inside");
    assert!(out.iter().all(|&byte| byte == 7));
}

#[test]
fn a_footprint_counts_moved_sectors_by_the_memory_that_holds_them() {
    let space = space();
    // Room, so that the large allocation's bitmap has words that are not touched.
    let own = space.alloc(0, 1 << 20, "cuMemAlloc").expect("memory").base();
    let peer = space.alloc(1, SIZE, "cuMemAlloc").expect("memory").base();
    let host = space.alloc_host(0, SIZE, "cuMemHostAlloc").expect("memory").base();
    let managed = space.alloc_managed(1, SIZE, "cuMemAllocManaged").expect("memory").base();
    let view = space.snapshot();
    let footprint = Footprint::new(view.clone());
    assert_eq!(footprint.moved_bytes(0), MovedBytes::default());
    for (base, at, bytes, write) in [
        // Two sectors, read twice; one of them is written.
        (own, 70_000, 40, false),
        (own, 70_016, 8, false),
        (own, 70_000, 4, true),
        // Across a word's boundary: two sectors.
        (own, 128 - 1, 2, false),
        (peer, 0, 100, false),
        (peer, SIZE - 1, 1, true),
        (host, 31, 1, true),
        (managed, 0, 32, false),
    ] {
        let index = view.index_of(base, 1).expect("an allocation");
        footprint.touch(index, at, bytes, write);
    }
    assert_eq!(footprint.moved_bytes(0), MovedBytes { device: 32 * (3 + 2 + 1), peer: 32 * (4 + 1), host: 32 });
    assert_eq!((footprint.read_bytes(), footprint.written_bytes()), (40 + 2 + 100 + 32, 4 + 1 + 1));
    assert_eq!(footprint.moved_bytes(1), MovedBytes { device: 32 * (4 + 1 + 1), peer: 32 * (3 + 2), host: 32 });
}
