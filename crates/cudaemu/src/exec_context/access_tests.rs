//! Checked accesses to global, local, constant and parameter memory and asynchronous copies: each fault beside a valid access,
//! and the fast paths compared with a simple model. Races in shared memory are tested in `shared/tests.rs`.

use super::fixture::{Fixture, fault_name, strided};
use super::{Addresses, Global, LANES, Lanes, StateSpace, window};
use crate::fault::{Fault, FaultKind, MemorySpace};
use crate::mem::Footprint;
use std::sync::Arc;

const ALL: u32 = u32::MAX;

#[test]
fn invalid_global_accesses_are_reported_and_valid_ones_pass() {
    // Only half of the allocation is written.
    let (mut fixture, (base, freed, other, constant)) = Fixture::new(0, 1, |space| {
        let alloc = |device| space.alloc(device, 4096, "cuMemAlloc").expect("memory").base();
        let (base, freed, other) = (alloc(0), alloc(0), alloc(1));
        let constant = space.alloc_constant(0, 4096, "cuModuleLoad").expect("memory").base();
        let view = space.snapshot();
        for at in [base, other, constant] {
            view.write(at, &[1; 2048]).expect("inside");
        }
        space.free(freed).expect("freed");
        (base, freed, other, constant)
    });
    // (description, first address, stride, lanes, write, result of a load or store of 4 bytes)
    let cases = [
        ("coalesced", base, 4, ALL, false, "ok"),
        ("coalesced, up to the last written byte", base + 1920, 4, ALL, false, "ok"),
        ("coalesced, beyond the last written byte", base + 1924, 4, ALL, false, "Uninitialised 31"),
        ("strided, beyond the last written byte", base, 128, ALL, false, "Uninitialised 16"),
        ("one lane, at the last written word", base + 2044, 4, 1, false, "ok"),
        ("up to the end of the allocation", base + 4096 - 128, 4, ALL, true, "ok"),
        ("beyond the end of the allocation", base + 4096 - 124, 4, ALL, true, "OutOfBounds 31"),
        ("the lane beyond the end is masked off", base + 4096 - 124, 4, ALL >> 1, true, "ok"),
        ("before the start", base - 4, 4, ALL, true, "OutOfBounds 0"),
        ("descending addresses", base + 124, 4u64.wrapping_neg(), ALL, false, "ok"),
        ("descending addresses, before the start", base + 120, 4u64.wrapping_neg(), ALL, false, "OutOfBounds 31"),
        ("misaligned", base + 2, 4, ALL, true, "Misaligned 0"),
        ("misaligned in lane 1", base, 2, ALL, false, "Misaligned 1"),
        ("freed", freed, 4, ALL, false, "UseAfterFree 0"),
        ("freed, write", freed, 4, 8, true, "UseAfterFree 3"),
        ("null", 0, 0, ALL, false, "OutOfBounds 0"),
        ("no peer access", other, 4, ALL, false, "NotAccessible 0"),
        ("constant, read", constant, 4, ALL, false, "ok"),
        ("constant, write", constant, 4, ALL, true, "NotAccessible 0"),
        ("window of shared memory", window::SHARED, 4, ALL, true, "OutOfBounds 0"),
    ];
    for (what, first, step, mask, write, wanted) in cases {
        let at = strided(first, step);
        let mut cx = fixture.context(0, 1);
        let result = if write {
            cx.store(StateSpace::Global, &at, &[[1; 4]; LANES], mask)
        } else {
            cx.load::<4>(StateSpace::Global, &at, mask).map(|_| ())
        };
        assert_eq!(fault_name(&result), wanted, "{what}");
        if let Err(fault) = result {
            let access = fault.access.expect("an access");
            assert_eq!((access.address, access.bytes), (at[usize::from(fault.lane)], 4), "{what}");
        }
    }
    fixture.global = Global::new(fixture.space.snapshot(), 0, 1 << 1, true, None);
    fixture.context(0, 1).load::<4>(StateSpace::Global, &strided(other, 4), ALL).expect("peer access is enabled now");
    // An allocation that is freed while the launch runs: the launch's older snapshot must not hide the free.
    let base_again = strided(base, 4);
    fixture.context(0, 1).load::<4>(StateSpace::Global, &base_again, ALL).expect("still there");
    fixture.space.free(base).expect("freed");
    let result = fixture.context(0, 1).load::<4>(StateSpace::Global, &base_again, ALL);
    assert_eq!(fault_name(&result), "UseAfterFree 0");
}

#[test]
fn reads_of_uninitialised_memory_continue_if_the_sink_allows_it() {
    let (mut fixture, base) = Fixture::new(64, 1, |space| space.alloc(0, 256, "cuMemAlloc").expect("memory").base());
    fixture.log.continue_after_fault = true;
    let mut cx = fixture.context(0, 1);
    cx.load::<4>(StateSpace::Global, &strided(base, 4), ALL).expect("the sink continues");
    cx.load::<4>(StateSpace::Shared, &strided(0, 0), ALL).expect("the sink continues");
    cx.load::<4>(StateSpace::Local, &strided(0, 0), ALL).expect("the sink continues");
    assert!(
        cx.load::<4>(StateSpace::Global, &strided(base + 256, 4), ALL).is_err(),
        "hardware would stop at this fault too"
    );
    assert!(fixture.log.faults.iter().all(|fault| fault.kind == FaultKind::Uninitialised));
    assert!(fixture.log.faults.len() >= 3);
}

/// Loads, stores and atomics of all widths and address patterns, compared with a model of bytes and written bits.
#[test]
fn fast_paths_agree_with_a_model() {
    const BYTES: usize = 1024;
    let mut rng = fastrand::Rng::with_seed(3);
    for round in 0..60 {
        let (mut fixture, base) =
            Fixture::new(0, 1, |space| space.alloc(0, BYTES as u64, "cuMemAlloc").expect("memory").base());
        let mut model: Vec<Option<u8>> = vec![None; BYTES];
        if round % 3 == 0 {
            fixture.space.snapshot().write(base, &[5; BYTES]).expect("inside");
            model.fill(Some(5));
        }
        let mut touched = [vec![false; BYTES], vec![false; BYTES]];
        let mut wanted = [[0; 3]; 2];
        for _ in 0..100 {
            match rng.u8(0..5) {
                0 => access_and_compare::<1>(&mut rng, &mut fixture, base, &mut model, &mut touched, &mut wanted),
                1 => access_and_compare::<2>(&mut rng, &mut fixture, base, &mut model, &mut touched, &mut wanted),
                2 => access_and_compare::<4>(&mut rng, &mut fixture, base, &mut model, &mut touched, &mut wanted),
                3 => access_and_compare::<8>(&mut rng, &mut fixture, base, &mut model, &mut touched, &mut wanted),
                _ => access_and_compare::<16>(&mut rng, &mut fixture, base, &mut model, &mut touched, &mut wanted),
            }
        }
        let counts = [&fixture.counts.global_read, &fixture.counts.global_written];
        assert_eq!(counts.map(|c| [c.requests, c.bytes, c.sectors]), wanted, "round {round}");
        let distinct = touched.map(|bytes| bytes.iter().filter(|&&touched| touched).count() as u64);
        assert_eq!([fixture.footprint.read_bytes(), fixture.footprint.written_bytes()], distinct);
    }
}

/// Makes one random access of `N` bytes per lane and compares its result with the model, which it updates. `touched` and
/// `wanted` are the bytes touched and the expected counts (requests, bytes, sectors), each for reads and for writes.
fn access_and_compare<const N: usize>(
    rng: &mut fastrand::Rng,
    fixture: &mut Fixture,
    base: u64,
    model: &mut [Option<u8>],
    touched: &mut [Vec<bool>; 2],
    wanted: &mut [[u64; 3]; 2],
) {
    let slots = (model.len() / N) as u64;
    let first = rng.u64(0..slots);
    let unit = N as u64;
    let at: Addresses = match rng.u8(0..4) {
        0 => strided(first * unit, unit),
        1 => strided(first * unit, 0),
        2 => strided(first * unit, rng.u64(0..4) * unit),
        _ => std::array::from_fn(|_| rng.u64(0..slots) * unit),
    };
    let mut mask = if rng.bool() { ALL } else { rng.u32(1..) };
    // Drop lanes outside of the allocation; another test covers them.
    for lane in 0..LANES {
        if at[lane] + unit > model.len() as u64 {
            mask &= !(1 << lane);
        }
    }
    if mask == 0 {
        return;
    }
    let active: Vec<usize> = (0..LANES).filter(|&lane| mask >> lane & 1 != 0).collect();
    let range = |lane: usize| at[lane] as usize..at[lane] as usize + N;
    let addresses = at.map(|at| base + at);
    let values: Lanes<[u8; N]> = std::array::from_fn(|_| std::array::from_fn(|_| rng.u8(..)));
    let what = rng.u8(0..3);
    let (read, write) = (what != 1, what != 0);
    let atomic = what == 2 && N > 1;
    let missing = active.iter().copied().find(|&lane| model[range(lane)].contains(&None));
    if read && what != 2 || atomic {
        let result = if atomic {
            // If lanes share an address, the first lane's write initialises the bytes for the others.
            fixture.context(0, 1).update::<N>(StateSpace::Generic, &addresses, mask, &mut |lane, old| {
                std::array::from_fn(|i| old[i].wrapping_add(values[lane][i]))
            })
        } else {
            fixture.context(0, 1).load::<N>(StateSpace::Global, &addresses, mask)
        };
        if let Some(lane) = missing {
            assert_eq!(fault_name(&result), format!("Uninitialised {lane}"));
            // The model cannot follow the lanes before the faulting one, which were executed: write all of memory to make both
            // equal.
            fixture.space.snapshot().write(base, &[5; 1024]).expect("inside");
            model.fill(Some(5));
            let done = active.iter().take_while(|&&other| other != lane);
            for index in done.flat_map(|&lane| range(lane)) {
                touched[0][index] = true;
                touched[1][index] |= atomic;
            }
            return;
        }
        let got = result.expect("all is written");
        for &lane in &active {
            for (i, index) in range(lane).enumerate() {
                assert_eq!(Some(got[lane][i]), model[index], "lane {lane}");
                if atomic {
                    model[index] = Some(got[lane][i].wrapping_add(values[lane][i]));
                }
            }
        }
    } else if write {
        fixture.context(0, 1).store(StateSpace::Generic, &addresses, &values, mask).expect("inside");
        for &lane in &active {
            range(lane).enumerate().for_each(|(i, index)| model[index] = Some(values[lane][i]));
        }
    }
    let mut sectors: Vec<u64> = active.iter().map(|&lane| addresses[lane] / 32).collect();
    sectors.sort_unstable();
    sectors.dedup();
    for (side, counted) in [(0, atomic || what == 0), (1, atomic || what != 0)] {
        if counted {
            let count = [1, (active.len() * N) as u64, sectors.len() as u64];
            wanted[side].iter_mut().zip(count).for_each(|(to, more)| *to += more);
            active.iter().flat_map(|&lane| range(lane)).for_each(|index| touched[side][index] = true);
        }
    }
}

#[test]
fn atomics_of_many_threads_add_up() {
    let (fixture, base) = Fixture::new(0, 1, |space| {
        let base = space.alloc(0, 64, "cuMemAlloc").expect("memory").base();
        space.snapshot().write(base, &[0; 64]).expect("inside");
        base
    });
    fn add<const N: usize>(fixture: &mut Fixture, at: u64) {
        for _ in 0..200 {
            let add = &mut |_, old: [u8; N]| {
                let mut wide = [0; 16];
                wide[..N].copy_from_slice(&old);
                let sum = (u128::from_le_bytes(wide) + 1).to_le_bytes();
                std::array::from_fn(|i| sum[i])
            };
            fixture.context(0, 1).update::<N>(StateSpace::Global, &strided(at, 0), ALL, add).expect("inside");
        }
    }
    let space = fixture.space.clone();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (mut fixture, ()) = Fixture::new(0, 1, |_| ());
                fixture.global = Global::new(space.snapshot(), 0, 0, false, None);
                add::<2>(&mut fixture, base);
                add::<4>(&mut fixture, base + 4);
                add::<8>(&mut fixture, base + 8);
                add::<16>(&mut fixture, base + 16);
            });
        }
    });
    let mut out = [0; 32];
    space.snapshot().read(base, &mut out).expect("inside");
    let sum = 2u64 * 200 * 32;
    assert_eq!(u16::from_le_bytes([out[0], out[1]]), sum as u16);
    assert_eq!(out[4..8], (sum as u32).to_le_bytes());
    assert_eq!(out[8..16], sum.to_le_bytes());
    assert_eq!(out[16..32], u128::from(sum).to_le_bytes());
}

/// The first five bytes of every eight are written. A load that uses only these is valid; a load that uses others is reported.
#[test]
fn padding_need_not_be_written() {
    let (mut fixture, base) = Fixture::new(512, 1, |space| {
        let base = space.alloc(0, 256, "cuMemAlloc").expect("memory").base();
        (0..LANES as u64).for_each(|i| space.snapshot().write(base + 8 * i, &[7; 5]).expect("inside"));
        base
    });
    let first = |start| strided(start, 8);
    for (window, start) in [(StateSpace::Shared, 0), (StateSpace::Local, 0)] {
        let mut cx = fixture.context(0, 1);
        cx.store(window, &first(start), &[[7; 4]; LANES], ALL).expect("inside");
        cx.store(window, &first(start + 4), &[[7; 1]; LANES], ALL).expect("inside");
    }
    for (window, start) in
        [(StateSpace::Global, base), (StateSpace::Generic, base), (StateSpace::Shared, 0), (StateSpace::Local, 0)]
    {
        for (padding, wanted) in [
            (0, "Uninitialised 0"),
            (!0x1f, "ok"),
            (0xe0, "ok"),
            (!0x3f, "Uninitialised 0"),
            (!1, "ok"),
            (!0x80, "Uninitialised 0"),
        ] {
            let mut cx = fixture.context(0, 1);
            cx.padding = padding;
            let result = cx.load::<8>(window, &first(start), ALL);
            assert_eq!(fault_name(&result), wanted, "{window:?} {padding:#x}");
            let one = cx.load::<1>(window, &first(start + 5), ALL);
            assert_eq!(
                fault_name(&one),
                if padding & 1 != 0 { "ok" } else { "Uninitialised 0" },
                "{window:?} {padding:#x}"
            );
        }
    }
}

#[test]
fn reports_say_which_memory_and_whether_it_was_read() {
    let (mut fixture, base) = Fixture::new(64, 1, |space| space.alloc(0, 64, "cuMemAlloc").expect("memory").base());
    let mut cx = fixture.context(0, 1);
    let access = |result: Result<Lanes<[u8; 4]>, Box<Fault>>| {
        let fault = result.expect_err("it is wrong");
        fault.access.map(|access| (access.memory, access.write))
    };
    // An atomic reads all bytes of its operand.
    let mut add = |_: usize, old: [u8; 4]| old;
    let at = strided(base, 0);
    assert_eq!(access(cx.update(StateSpace::Global, &at, 1, &mut add)), Some((MemorySpace::Global, false)));
    assert_eq!(access(cx.update(StateSpace::Shared, &strided(0, 0), 1, &mut add)), Some((MemorySpace::Shared, false)));
    let outside = strided(base + 64, 0);
    assert_eq!(access(cx.update(StateSpace::Global, &outside, 1, &mut add)), Some((MemorySpace::Global, true)));
    assert_eq!(access(cx.load(StateSpace::Global, &outside, 1)), Some((MemorySpace::Global, false)));
    assert_eq!(access(cx.load(StateSpace::Const, &outside, 1)), Some((MemorySpace::Const, false)));
}

#[test]
fn each_thread_has_its_own_local_memory() {
    let (mut fixture, ()) = Fixture::new(0, 1, |_| ());
    let values: Lanes<[u8; 8]> = std::array::from_fn(|lane| [lane as u8; 8]);
    let mut cx = fixture.context(0, 1);
    cx.store(StateSpace::Local, &strided(8, 0), &values, ALL).expect("inside");
    assert_eq!(cx.load::<8>(StateSpace::Local, &strided(8, 0), ALL).expect("written"), values);
    let generic = strided(window::LOCAL + 8, 0);
    assert_eq!(cx.load::<8>(StateSpace::Generic, &generic, ALL).expect("written"), values);
    assert_eq!(fault_name(&cx.load::<1>(StateSpace::Local, &strided(16, 0), 2)), "Uninitialised 1");
    assert_eq!(fault_name(&cx.load::<4>(StateSpace::Local, &strided(10, 0), 2)), "Misaligned 1");
    assert_eq!(fault_name(&cx.load::<4>(StateSpace::Local, &strided(256, 0), 2)), "OutOfBounds 1");
    assert_eq!(fault_name(&cx.load::<8>(StateSpace::Local, &strided(u64::MAX - 7, 0), 2)), "OutOfBounds 1");
    assert_eq!(cx.counts.local_written.bytes, 256);
    // A call's frame starts uninitialised. The argument, copied to bytes 12 to 19, stays initialised; the bytes behind it are
    // not.
    fixture.local.copy_param(3, 8, 12, 8).expect("inside");
    fixture.local.enter_frame(8, 4, ALL);
    let mut cx = fixture.context(0, 1);
    assert_eq!(fault_name(&cx.load::<4>(StateSpace::Local, &strided(8, 0), ALL)), "Uninitialised 0");
    assert_eq!(cx.load::<8>(StateSpace::Local, &strided(16, 0), 8).map(|_| ()).map_err(|f| f.lane), Err(3));
    assert_eq!(cx.load::<4>(StateSpace::Local, &strided(16, 0), 8).expect("passed")[3], [3; 4]);
    fixture.local.poke(0, 100, &[1, 2]).expect("inside");
    let mut out = [0; 2];
    fixture.local.peek(0, 100, &mut out).expect("inside");
    assert_eq!(out, [1, 2]);
    assert!(fixture.local.peek(0, 255, &mut out).is_err());
    fixture.local.reset();
    assert_eq!(fault_name(&fixture.context(0, 1).load::<1>(StateSpace::Local, &strided(100, 0), 1)), "Uninitialised 0");
}

#[test]
fn parameters_are_read_only() {
    let (mut fixture, ()) = Fixture::new(0, 1, |_| ());
    let mut cx = fixture.context(0, 1);
    assert_eq!(cx.load::<4>(StateSpace::Param, &strided(8, 0), ALL).expect("inside"), [[8, 9, 10, 11]; LANES]);
    let each = cx.load::<2>(StateSpace::Param, &strided(0, 2), ALL).expect("inside");
    assert_eq!(each[31], [62, 63]);
    assert_eq!(fault_name(&cx.load::<2>(StateSpace::Param, &strided(2, 2), ALL)), "OutOfBounds 31");
    assert_eq!(fault_name(&cx.load::<8>(StateSpace::Param, &strided(4, 0), ALL)), "Misaligned 0");
    assert_eq!(fault_name(&cx.store(StateSpace::Param, &strided(0, 0), &[[0; 4]; LANES], 4)), "NotAccessible 2");
    assert_eq!(
        fault_name(&cx.store(StateSpace::Generic, &strided(window::PARAM, 0), &[[0; 4]; LANES], 4)),
        "NotAccessible 2"
    );
}

#[test]
fn generic_addresses_may_lie_in_different_windows() {
    let (mut fixture, base) = Fixture::new(256, 1, |space| space.alloc(0, 256, "cuMemAlloc").expect("memory").base());
    let starts = [base, window::SHARED, window::LOCAL];
    let at: Addresses = std::array::from_fn(|lane| starts[lane % 3] + 4 * lane as u64);
    let values: Lanes<[u8; 4]> = std::array::from_fn(|lane| [lane as u8; 4]);
    let mut cx = fixture.context(0, 1);
    cx.store(StateSpace::Generic, &at, &values, ALL).expect("inside");
    assert_eq!(cx.load::<4>(StateSpace::Generic, &at, ALL).expect("written"), values);
    let shared = cx.load::<4>(StateSpace::Shared, &strided(0, 4), 2).expect("written");
    assert_eq!(shared[1], [1; 4]);
    let plus = &mut |_, old: [u8; 4]| old.map(|byte| byte + 1);
    assert_eq!(cx.update(StateSpace::Generic, &at, ALL, plus).expect("written"), values);
    assert_eq!(cx.load::<4>(StateSpace::Generic, &at, ALL).expect("written"), values.map(|v| v.map(|byte| byte + 1)));
}

/// A fixture with two warps, and the base address of its global memory: 512 written bytes, each with the low bits of its index,
/// and 128 unwritten bytes.
fn copy_fixture() -> (Fixture, u64) {
    Fixture::new(4096, 2, |space| {
        let base = space.alloc(0, 640, "cuMemAlloc").expect("memory").base();
        let bytes: Vec<u8> = (0..512).map(|i| i as u8).collect();
        space.snapshot().write(base, &bytes).expect("inside");
        base
    })
}

#[test]
fn asynchronous_copies_arrive_when_waited_for() {
    let (mut fixture, base) = copy_fixture();
    let mut cx = fixture.context(0, 7);
    cx.copy_async(&strided(0, 16), &strided(base, 16), 16, &[16; LANES], ALL).expect("started");
    cx.commit_async(ALL);
    cx.copy_async(&strided(512, 16), &strided(base, 16), 16, &[4; LANES], ALL).expect("started");
    cx.commit_async(ALL);
    let result = cx.load::<4>(StateSpace::Shared, &strided(0, 4), ALL);
    let Err(fault) = &result else { panic!("read before it was waited for") };
    assert!(fault.kind.to_string().contains("started at PTX line 7"), "{}", fault.kind);
    assert_eq!(fault_name(&cx.store(StateSpace::Shared, &strided(0, 4), &[[0; 4]; LANES], 1)), "PendingCopy 0");
    // The copy reads its source as late as allowed, so it sees this write.
    fixture.space.snapshot().write(base, &[99; 4]).expect("inside");
    let mut cx = fixture.context(0, 8);
    cx.wait_async(Some(1), ALL).expect("one group");
    let got = cx.load::<16>(StateSpace::Shared, &strided(0, 16), ALL).expect("it arrived");
    assert_eq!((got[0][..5].to_vec(), got[1][0]), (vec![99, 99, 99, 99, 4], 16));
    assert_eq!(fault_name(&cx.load::<4>(StateSpace::Shared, &strided(512, 0), 1)), "PendingCopy 0");
    cx.wait_async(Some(0), ALL).expect("the other group");
    let got = cx.load::<16>(StateSpace::Shared, &strided(512, 16), 2).expect("it arrived");
    assert_eq!(got[1][..6], [16, 17, 18, 19, 0, 0], "the rest is zeros");
    assert_eq!(fault_name(&fixture.context(1, 9).load::<4>(StateSpace::Shared, &strided(0, 0), 1)), "Race 0");
    fixture.shared.barrier(3);
    fixture.context(1, 9).load::<4>(StateSpace::Shared, &strided(0, 4), ALL).expect("after a barrier");
}

/// Asynchronous copies of a warp are one instruction: one request, and as many passes as a store of the same width.
#[test]
fn asynchronous_copies_count_once_per_warp() {
    // (bytes per lane, destination stride, lanes, passes, those that are conflicts)
    for (size, step, mask, passes, conflicts) in
        [(4, 4, ALL, 1, 0), (8, 8, ALL, 2, 0), (16, 16, ALL, 4, 0), (16, 16, 0xff, 1, 0), (16, 128, ALL, 32, 28)]
    {
        let (mut fixture, base) = copy_fixture();
        let mut cx = fixture.context(0, 1);
        cx.copy_async(&strided(0, step), &strided(base, 16), size, &[size; LANES], mask).expect("started");
        cx.commit_async(ALL);
        cx.wait_async(Some(0), ALL).expect("inside");
        let counts = &fixture.counts;
        let bytes = u64::from(mask.count_ones() * size);
        assert_eq!((counts.shared_written.requests, counts.shared_written.bytes), (1, bytes), "{size} bytes");
        assert_eq!((counts.shared_passes, counts.bank_conflicts), (passes, conflicts), "{size} bytes, stride {step}");
    }
}

#[test]
fn each_lane_has_its_own_copy_groups() {
    let (mut fixture, base) = copy_fixture();
    let mut cx = fixture.context(0, 1);
    cx.copy_async(&strided(0, 4), &strided(base, 4), 4, &[4; LANES], 3).expect("started");
    cx.commit_async(1);
    cx.wait_async(Some(0), ALL).expect("lane 0's group");
    cx.load::<4>(StateSpace::Shared, &strided(0, 4), 1).expect("lane 0's copy arrived");
    assert_eq!(
        fault_name(&cx.load::<4>(StateSpace::Shared, &strided(0, 4), 2)),
        "PendingCopy 1",
        "lane 1 has not committed"
    );
    cx.wait_async(None, ALL).expect("all copies, committed or not");
    cx.load::<4>(StateSpace::Shared, &strided(0, 4), 2).expect("lane 1's copy arrived");
}

#[test]
fn invalid_asynchronous_copies_are_reported() {
    let (mut fixture, base) = copy_fixture();
    let mut start = |to: u64, from: u64, size: u32, bytes: u32| {
        fault_name(&fixture.context(0, 1).copy_async(
            &strided(to, 16),
            &strided(base + from, 16),
            size,
            &[bytes; LANES],
            1,
        ))
    };
    // (destination, source, size, bytes read, result)
    let cases = [
        (0, 0, 16, 16, "ok"),
        (0, 0, 16, 16, "PendingCopy 0"),
        (64, 4, 16, 16, "Misaligned 0"),
        (68, 0, 16, 16, "Misaligned 0"),
        (4096, 0, 16, 16, "OutOfBounds 0"),
        (128, 640, 16, 16, "OutOfBounds 0"),
        (128, 640, 16, 0, "ok"),
        (160, 512, 16, 16, "Uninitialised 0"),
        (160, 512, 12, 12, "InvalidValue 0"),
    ];
    for (to, from, size, bytes, wanted) in cases {
        assert_eq!(start(to, from, size, bytes), wanted, "{to} {from} {size} {bytes}");
    }
    // Another warp still reads the buffer that the copy refills.
    let mut cx = fixture.context(0, 1);
    cx.store(StateSpace::Shared, &strided(1024, 4), &[[1; 4]; LANES], ALL).expect("inside");
    fixture.shared.barrier(3);
    fixture.context(1, 2).load::<4>(StateSpace::Shared, &strided(1024, 4), ALL).expect("after a barrier");
    let refill = |fixture: &mut Fixture| {
        fault_name(&fixture.context(0, 3).copy_async(&strided(1024, 16), &strided(base, 16), 16, &[16; LANES], 1))
    };
    assert_eq!(refill(&mut fixture), "Race 0");
    let (mut fixture, base) = copy_fixture();
    fixture.context(1, 2).store(StateSpace::Shared, &strided(1024, 4), &[[1; 4]; LANES], ALL).expect("inside");
    fixture.shared.barrier(3);
    let mut cx = fixture.context(0, 3);
    cx.copy_async(&strided(1024, 16), &strided(base, 16), 16, &[16; LANES], ALL).expect("after a barrier");
    // Freed before the copy is waited for.
    fixture.space.free(base).expect("freed");
    assert_eq!(fault_name(&fixture.context(0, 4).wait_async(None, ALL)), "UseAfterFree 0");
}

#[test]
fn copies_never_waited_for_never_arrive() {
    let (mut fixture, base) = copy_fixture();
    fixture.context(0, 1).copy_async(&strided(0, 16), &strided(base, 16), 16, &[16; LANES], ALL).expect("started");
    fixture.copies[0].reset();
    fixture.shared.barrier(3);
    assert_eq!(fault_name(&fixture.context(1, 2).load::<4>(StateSpace::Shared, &strided(0, 4), ALL)), "PendingCopy 0");
    fixture.shared.reset();
    assert_eq!(
        fault_name(&fixture.context(1, 2).load::<4>(StateSpace::Shared, &strided(0, 4), ALL)),
        "Uninitialised 0"
    );
    fixture
        .context(1, 2)
        .store(StateSpace::Shared, &strided(0, 4), &[[1; 4]; LANES], ALL)
        .expect("the next block does not inherit the pending copy");
}

#[test]
fn the_sectors_of_a_block_are_counted_once() {
    let (mut fixture, base) = copy_fixture();
    let mut read = |step: u64, mask: u32| {
        fixture.context(0, 1).load::<4>(StateSpace::Global, &strided(base, step), mask).expect("inside");
        fixture.counts.block_sectors
    };
    // Four sectors, then four more, of which a descending warp reads all again.
    assert_eq!([read(4, ALL), read(4, ALL), read(8, ALL), read(8, 0xff)], [4, 4, 8, 8]);
    let backwards = std::array::from_fn(|lane| base + 4 * (31 - lane as u64));
    fixture.context(1, 2).load::<4>(StateSpace::Global, &backwards, ALL).expect("inside");
    assert_eq!(fixture.counts.block_sectors, 8, "all warps of a block share them");
    fixture.block_sectors.clear();
    let mut cx = fixture.context(0, 1);
    // The two lanes of zero bytes read nothing.
    let mut bytes = [16; LANES];
    (bytes[30], bytes[31]) = (0, 0);
    cx.copy_async(&strided(0, 16), &strided(base, 16), 16, &bytes, ALL).expect("started");
    assert_eq!((fixture.counts.block_sectors, fixture.counts.global_read.sectors), (8 + 15, 4 + 4 + 8 + 2 + 4 + 15));
}

#[test]
fn a_footprint_counts_each_byte_once() {
    let (mut fixture, base) = copy_fixture();
    fixture.footprint = Arc::new(Footprint::new(fixture.space.snapshot()));
    fixture.global = Global::new(fixture.space.snapshot(), 0, 0, true, Some(fixture.footprint.clone()));
    for _ in 0..3 {
        fixture.context(0, 1).load::<4>(StateSpace::Global, &strided(base, 8), ALL).expect("inside");
        fixture.context(0, 1).store(StateSpace::Global, &strided(base, 2), &[[0; 2]; LANES], ALL).expect("inside");
    }
    assert_eq!((fixture.footprint.read_bytes(), fixture.footprint.written_bytes()), (128, 64));
    assert_eq!((fixture.counts.global_read.bytes, fixture.counts.global_read.sectors), (384, 3 * 256 / 32));
}
