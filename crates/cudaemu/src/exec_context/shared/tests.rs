use super::super::fixture::{Fixture, fault_name, strided};
use super::super::{Lanes, StateSpace};
use super::vector_clocks::LAST_CLOCK;

const ALL: u32 = u32::MAX;

/// A step of a block. Lanes are masks; accesses are of 4 bytes per lane unless stated otherwise.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Warp, lanes, word, stride: each lane writes its own number to `word + lane * stride` (in words).
    Write(u32, u32, u64, u64),
    /// Warp, lanes, word, stride: as `Write`, with the value 7 in all lanes.
    Same(u32, u32, u64, u64),
    Read(u32, u32, u64, u64),
    Atomic(u32, u32, u64),
    /// Warp, lanes, byte address, stride in bytes: each lane writes a byte.
    WriteBytes(u32, u32, u64, u64),
    ReadBytes(u32, u32, u64, u64),
    /// Warp, lanes, word: each lane writes 16 bytes, contiguously.
    WriteWide(u32, u32, u64),
    Barrier(u32),
    Arrive(u32, u32),
    Release(u32, u32),
    WarpSync(u32, u32),
    Exit(u32),
    NextBlock,
    /// Sets the clocks to the point where they are about to overflow.
    Old,
}
use Step::*;

fn step(rig: &mut Fixture, step: Step, line: u32) -> String {
    let shared = |word: u64, stride: u64| strided(word * 4, stride * 4);
    let own: Lanes<[u8; 4]> = std::array::from_fn(|lane| (lane as u32 + 100).to_le_bytes());
    let mut done = Ok(());
    match step {
        Write(warp, mask, word, stride) => {
            done = rig.context(warp, line).store(StateSpace::Shared, &shared(word, stride), &own, mask);
        }
        Same(warp, mask, word, stride) => {
            done = rig.context(warp, line).store(StateSpace::Shared, &shared(word, stride), &[[7; 4]; 32], mask);
        }
        Read(warp, mask, word, stride) => {
            done = rig.context(warp, line).load::<4>(StateSpace::Shared, &shared(word, stride), mask).map(|_| ());
        }
        Atomic(warp, mask, word) => {
            let add = &mut |_, old: [u8; 4]| (u32::from_le_bytes(old).wrapping_add(1)).to_le_bytes();
            done = rig.context(warp, line).update(StateSpace::Shared, &shared(word, 0), mask, add).map(|_| ());
        }
        WriteBytes(warp, mask, at, stride) => {
            let values: Lanes<[u8; 1]> = std::array::from_fn(|lane| [lane as u8 + 100]);
            done = rig.context(warp, line).store(StateSpace::Shared, &strided(at, stride), &values, mask);
        }
        ReadBytes(warp, mask, at, stride) => {
            done = rig.context(warp, line).load::<1>(StateSpace::Shared, &strided(at, stride), mask).map(|_| ());
        }
        WriteWide(warp, mask, at) => {
            done = rig.context(warp, line).store(StateSpace::Shared, &strided(at, 16), &[[9; 16]; 32], mask);
        }
        Barrier(warps) => rig.shared.barrier(warps),
        Arrive(id, warp) => rig.shared.arrive(id, warp),
        Release(id, warps) => rig.shared.release(id, warps),
        WarpSync(warp, lanes) => rig.shared.warp_sync(warp, lanes, ALL),
        Exit(warp) => rig.shared.exit(warp),
        NextBlock => rig.shared.reset(),
        Old => {
            for _ in 0..2 {
                rig.shared.shadow.order().clock = [LAST_CLOCK - 1; 32];
            }
        }
    }
    fault_name(&done)
}

/// (description, steps, result of the last step); "ok" is the valid counterpart of a fault. All earlier steps must pass.
#[test]
fn races_are_reported_and_valid_programs_pass() {
    let cases: &[(&str, &[Step], &str)] = &[
        ("own bytes", &[Write(0, ALL, 0, 1), Read(0, ALL, 0, 1), Write(0, ALL, 0, 1)], "ok"),
        ("never written", &[Read(0, 4, 0, 1)], "Uninitialised 2"),
        ("another block wrote it", &[Write(0, ALL, 0, 1), NextBlock, Read(0, ALL, 0, 1)], "Uninitialised 0"),
        ("another block raced", &[Write(0, ALL, 0, 1), NextBlock, Write(1, ALL, 0, 1), Read(1, ALL, 0, 1)], "ok"),
        ("other lane, no sync", &[Write(0, ALL, 0, 1), Read(0, 2, 3, 1)], "Race 1"),
        ("other lane, warp sync", &[Write(0, ALL, 0, 1), WarpSync(0, ALL), Read(0, 2, 3, 1)], "ok"),
        ("other lane, barrier", &[Write(0, ALL, 0, 1), Barrier(0xf), Read(0, 2, 3, 1)], "ok"),
        ("other warp, no sync", &[Write(0, ALL, 0, 1), Read(1, ALL, 0, 1)], "Race 0"),
        ("other warp, its own warp sync", &[Write(0, ALL, 0, 1), WarpSync(1, ALL), Read(1, ALL, 0, 1)], "Race 0"),
        (
            "other warp, warp sync of both",
            &[Write(0, 1, 0, 1), WarpSync(0, ALL), WarpSync(1, ALL), Read(1, 1, 0, 1)],
            "Race 0",
        ),
        ("other warp, barrier", &[Write(0, ALL, 0, 1), Barrier(0xf), Read(1, ALL, 0, 1)], "ok"),
        ("write after read", &[Write(0, ALL, 0, 1), Barrier(0xf), Read(1, ALL, 0, 0), Write(0, 1, 0, 1)], "Race 0"),
        (
            "write after read, barrier",
            &[Write(0, ALL, 0, 1), Barrier(0xf), Read(1, ALL, 0, 0), Barrier(0xf), Write(0, 1, 0, 1)],
            "ok",
        ),
        ("write after own read", &[Write(0, 1, 0, 1), Barrier(0xf), Read(2, 1, 0, 0), Write(2, 1, 0, 1)], "ok"),
        (
            "write after reads of own warp's lanes",
            &[Write(0, 1, 0, 1), Barrier(0xf), Read(2, 3, 0, 0), Write(2, 1, 0, 1)],
            "Race 0",
        ),
        (
            "reads of many warps, then a write by a reader",
            &[Write(0, 1, 0, 1), Barrier(0xf), Read(0, 1, 0, 0), Read(1, 1, 0, 0), Write(1, 1, 0, 1)],
            "Race 0",
        ),
        (
            "reads of many warps at different clocks",
            &[
                Write(0, 1, 0, 1),
                Barrier(0xf),
                WarpSync(1, ALL),
                Read(0, 1, 0, 0),
                Read(1, 2, 0, 0),
                Read(2, 4, 0, 0),
                Barrier(0xf),
                Write(3, 1, 0, 1),
            ],
            "ok",
        ),
        (
            "the oldest of many reads is not forgotten",
            &[
                Write(0, 1, 0, 1),
                Barrier(0xf),
                WarpSync(1, ALL),
                Read(0, 1, 0, 0),
                Read(1, 2, 0, 0),
                Arrive(3, 1),
                Release(3, 4),
                Write(2, 1, 0, 1),
            ],
            "Race 0",
        ),
        (
            "part of a warp met",
            &[Write(0, 1, 0, 1), WarpSync(0, 0xff), Read(0, 2, 0, 0), WarpSync(0, 0xff00), Read(0, 0x10, 0, 0)],
            "ok",
        ),
        ("part of a warp met without it", &[Write(0, 1, 0, 1), WarpSync(0, 0xff), Read(0, 1 << 8, 0, 0)], "Race 8"),
        ("parts that met in turn", &[Write(0, 1, 0, 1), WarpSync(0, 3), WarpSync(0, 6), Read(0, 4, 0, 0)], "ok"),
        (
            "parts that met in the wrong turn",
            &[Write(0, 1, 0, 1), WarpSync(0, 6), WarpSync(0, 3), Read(0, 4, 0, 0)],
            "Race 2",
        ),
        (
            "named barrier of two",
            &[Write(0, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 3), Read(1, 1, 5, 0)],
            "ok",
        ),
        (
            "named barrier of others",
            &[Write(0, ALL, 0, 1), Arrive(1, 2), Arrive(1, 1), Release(1, 6), Read(1, 1, 5, 0)],
            "Race 0",
        ),
        (
            "producer arrives, consumer waits",
            &[Write(0, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 2), Read(1, ALL, 0, 1)],
            "ok",
        ),
        (
            "producer writes on after it arrived",
            &[Arrive(1, 0), Write(0, ALL, 0, 1), Arrive(1, 1), Release(1, 2), Read(1, ALL, 0, 1)],
            "Race 0",
        ),
        (
            "a warp that only arrived is not ordered",
            &[Write(1, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 2), Read(0, ALL, 0, 1)],
            "Race 0",
        ),
        (
            "order passed on by a third",
            &[
                Write(0, 1, 0, 1),
                Arrive(1, 0),
                Arrive(1, 1),
                Release(1, 3),
                Arrive(2, 1),
                Arrive(2, 2),
                Release(2, 6),
                Read(2, 1, 0, 1),
            ],
            "ok",
        ),
        (
            "who exited is ordered by the next barrier",
            &[Write(3, 1, 0, 1), Exit(3), Barrier(7), Read(0, 1, 0, 1)],
            "ok",
        ),
        ("who exited is not ordered by that alone", &[Write(3, 1, 0, 1), Exit(3), Read(0, 1, 0, 1)], "Race 0"),
        ("atomics do not race", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, ALL, 0), Atomic(1, ALL, 0)], "ok"),
        ("atomic and read", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, ALL, 0), Read(1, 1, 0, 1)], "Race 0"),
        ("atomic and write", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, 1, 0), Write(1, 1, 0, 1)], "Race 0"),
        ("write and atomic", &[Write(0, 1, 0, 1), Atomic(1, 1, 0)], "Race 0"),
        ("read and atomic", &[Write(0, 1, 0, 1), Barrier(0xf), Read(0, 1, 0, 1), Atomic(1, 1, 0)], "Race 0"),
        ("atomic on nothing", &[Atomic(1, 1, 0)], "Uninitialised 0"),
        ("two lanes of one instruction", &[Write(0, 0x30, 0, 0)], "Race 5"),
        ("two lanes, one value", &[Same(0, ALL, 0, 0)], "ok"),
        ("two warps, one value", &[Same(0, ALL, 0, 0), Same(1, ALL, 0, 0)], "ok"),
        ("two warps, two values", &[Same(0, ALL, 0, 0), Write(1, 1, 0, 0)], "Race 0"),
        ("bytes of one word", &[WriteBytes(0, ALL, 0, 1), WriteBytes(1, ALL, 32, 1), ReadBytes(0, ALL, 0, 1)], "ok"),
        ("a byte of another's word", &[Write(0, 1, 0, 1), ReadBytes(1, 1, 3, 1)], "Race 0"),
        (
            "a byte written, its neighbour read",
            &[Write(0, 1, 0, 1), Barrier(15), WriteBytes(1, 1, 1, 1), ReadBytes(0, 1, 2, 0)],
            "ok",
        ),
        (
            "a byte written, then its word read",
            &[Write(0, 1, 0, 1), Barrier(15), WriteBytes(1, 1, 1, 1), Read(0, 1, 0, 0)],
            "Race 0",
        ),
        (
            "bytes, barrier, word",
            &[WriteBytes(0, 15, 0, 1), Barrier(15), Read(1, 1, 0, 0), Barrier(15), Write(2, 1, 0, 1)],
            "ok",
        ),
        ("three bytes, barrier, word", &[WriteBytes(0, 7, 0, 1), Barrier(15), Read(1, 1, 0, 0)], "Uninitialised 0"),
        (
            "bytes read, word written",
            &[Write(0, 1, 0, 1), Barrier(15), ReadBytes(1, 1, 2, 0), Write(0, 1, 0, 1)],
            "Race 0",
        ),
        ("wide and words", &[WriteWide(0, 3, 0), Barrier(0xf), Read(1, 0xff, 0, 1)], "ok"),
        ("wide and words, no barrier", &[WriteWide(0, 3, 0), Read(1, 0xff, 0, 1)], "Race 0"),
        (
            "clocks that start again keep what is written",
            &[Write(0, ALL, 0, 1), Old, Barrier(0xf), Read(1, ALL, 0, 1)],
            "ok",
        ),
        ("and races after it", &[Old, Barrier(0xf), Write(0, ALL, 0, 1), Read(1, ALL, 0, 1)], "Race 0"),
        (
            "blocks after the clocks ran far",
            &[Write(0, ALL, 0, 1), Old, NextBlock, Read(1, ALL, 0, 1)],
            "Uninitialised 0",
        ),
        ("outside", &[Read(0, 1, 1024, 1)], "OutOfBounds 0"),
        ("far outside", &[Read(0, 1, u64::MAX / 4, 1)], "OutOfBounds 0"),
    ];
    for (what, steps, wanted) in cases {
        let (mut rig, ()) = Fixture::new(4096, 4, |_| ());
        for (i, &now) in steps.iter().enumerate() {
            let result = step(&mut rig, now, i as u32 + 1);
            let wanted = if i + 1 == steps.len() { wanted } else { "ok" };
            assert_eq!(result, wanted, "{what}: step {i}, {now:?}: {:?}", rig.log.faults);
        }
    }
}

#[test]
fn a_race_names_the_other_thread_and_its_line() {
    let (mut rig, ()) = Fixture::new(4096, 4, |_| ());
    step(&mut rig, Write(2, 1 << 5, 0, 0), 77);
    step(&mut rig, Read(1, 1, 0, 0), 78);
    let text = rig.log.faults[0].kind.to_string();
    assert!(text.contains("thread 69 of the block wrote it at PTX line 77"), "{text}");
    step(&mut rig, Write(0, 3, 9, 0), 79);
    let text = rig.log.faults[1].kind.to_string();
    assert!(text.contains("two lanes of one instruction: thread 0"), "{text}");
}

#[test]
fn addresses_are_checked() {
    let (mut rig, ()) = Fixture::new(4096, 4, |_| ());
    let mut cx = rig.context(0, 1);
    cx.store(StateSpace::Shared, &strided(0, 16), &[[1; 16]; 32], ALL).expect("inside");
    let load = |at| fault_name(&rig.context(0, 1).load::<8>(StateSpace::Shared, &strided(at, 0), 1));
    let mut load = load;
    assert_eq!(["ok", "Misaligned 0", "OutOfBounds 0"], [load(0), load(4), load(4096)].each_ref().map(String::as_str));
}

/// Random programs of a block, compared with a model that keeps every access since the block started.
#[test]
fn the_shadow_agrees_with_a_model() {
    /// An access to a byte: thread, whether it is a write, whether it is atomic, and for each thread whether it is ordered before
    /// that thread's next access.
    #[derive(Clone)]
    struct Past {
        thread: usize,
        write: bool,
        atomic: bool,
        known: [bool; 128],
    }
    let mut rng = fastrand::Rng::with_seed(11);
    let (mut rig, ()) = Fixture::new(64, 4, |_| ());
    let (mut races, mut clean) = (0, 0);
    for round in 0..3000 {
        rig.shared.reset();
        rig.log.faults.clear();
        let mut past: Vec<Vec<Past>> = vec![Vec::new(); 64];
        // Some rounds use few barriers, others only barriers of all warps.
        let partial = rng.bool();
        let barriers = rng.u32(1..4);
        // Every other round makes only valid accesses, so that it gets long.
        let careful = round % 2 == 0;
        for count in 0..40 {
            let warp = rng.u32(0..4);
            if rng.u32(0..4) < barriers {
                let warps = if partial { rng.u32(1..16) } else { 15 };
                match rng.u8(0..3) {
                    0 if partial => {
                        rig.shared.warp_sync(warp, ALL, ALL);
                        let range = warp as usize * 32..warp as usize * 32 + 32;
                        for access in past.iter_mut().flatten() {
                            if access.known[range.clone()].contains(&true) {
                                access.known[range.clone()].fill(true);
                            }
                        }
                    }
                    _ => {
                        rig.shared.barrier(warps);
                        let within = |thread: usize| warps >> (thread / 32) & 1 != 0;
                        for access in past.iter_mut().flatten() {
                            if (0..128).any(|thread| within(thread) && access.known[thread]) {
                                (0..128).filter(|&t| within(t)).for_each(|thread| access.known[thread] = true);
                            }
                        }
                    }
                }
                continue;
            }
            let (lane, wide) = (rng.usize(0..4), rng.bool());
            let size = if wide { 4 } else { 1 };
            let at = rng.u64(0..8) / size * size;
            let (write, atomic) = (rng.bool(), wide && rng.u8(0..5) == 0);
            let thread = warp as usize * 32 + lane;
            let unordered = |old: bool| {
                let clash = |p: &Past| {
                    let race = p.write || write || atomic;
                    race && !(p.atomic && atomic) && p.thread != thread && !p.known[thread]
                };
                // Of unordered atomics on a byte only the last one is kept: older ones may be missed.
                let kept = |byte: u64, i: usize| {
                    let accesses = &past[byte as usize];
                    !accesses[i].atomic || !accesses[i + 1..].iter().any(|p| p.atomic) || old
                };
                (at..at + size)
                    .any(|byte| past[byte as usize].iter().enumerate().any(|(i, p)| clash(p) && kept(byte, i)))
            };
            let conflict = unordered(false);
            let doubtful = unordered(true) && !conflict;
            let mut empty = (at..at + size).any(|byte| !past[byte as usize].iter().any(|p| p.write));
            empty &= !write || atomic;
            let (mask, to, line) = (1 << lane, strided(at, 0), count + 1);
            if doubtful || careful && (conflict || empty) {
                continue;
            }
            // A new value each time: writing the value that memory holds already would not be a race.
            let value = [count as u8 + 1; 4];
            let mut cx = rig.context(warp, line);
            let result = match (atomic, write, wide) {
                (true, ..) => cx.update::<4>(StateSpace::Shared, &to, mask, &mut |_, _| value).map(|_| ()),
                (_, true, true) => cx.store(StateSpace::Shared, &to, &[value; 32], mask),
                (_, true, false) => cx.store(StateSpace::Shared, &to, &[[value[0]]; 32], mask),
                (_, false, true) => cx.load::<4>(StateSpace::Shared, &to, mask).map(|_| ()),
                (_, false, false) => cx.load::<1>(StateSpace::Shared, &to, mask).map(|_| ()),
            };
            if conflict || empty {
                let reported = result.is_err();
                assert!(reported, "round {round} step {count}: race {conflict} empty {empty} was not reported");
                races += 1;
                break;
            }
            assert_eq!(fault_name(&result), "ok", "round {round} step {count}: {:?}", rig.log.faults);
            clean += 1;
            let mut known = [false; 128];
            known[thread] = true;
            for byte in at..at + size {
                past[byte as usize].push(Past { thread, write: write || atomic, atomic, known });
            }
        }
    }
    assert!(races > 500 && clean > 5000, "{races} {clean}");
}

#[test]
fn bank_conflicts_are_counted() {
    let conflicts = |bytes: u32, step: u64, mask: u32| {
        let (mut rig, ()) = Fixture::new(32 << 10, 1, |_| ());
        let at = strided(0, step);
        let mut cx = rig.context(0, 1);
        let stored = match bytes {
            1 => cx.store(StateSpace::Shared, &at, &[[1; 1]; 32], mask),
            4 => cx.store(StateSpace::Shared, &at, &[[1; 4]; 32], mask),
            8 => cx.store(StateSpace::Shared, &at, &[[1; 8]; 32], mask),
            _ => cx.store(StateSpace::Shared, &at, &[[1; 16]; 32], mask),
        };
        stored.expect("inside");
        rig.counts.bank_conflicts
    };
    // (bytes, stride, lanes, extra passes)
    let cases = [
        (4, 4, ALL, 0),
        (4, 0, ALL, 0),
        (4, 8, ALL, 1),
        (4, 128, ALL, 31),
        (4, 132, ALL, 0),
        (4, 128, 0xff, 7),
        (1, 1, ALL, 0),
        (8, 8, ALL, 0),
        (8, 16, ALL, 2),
        (16, 16, ALL, 0),
        (16, 128, ALL, 28),
        (16, 144, ALL, 0),
    ];
    for (bytes, step, mask, wanted) in cases {
        assert_eq!(conflicts(bytes, step, mask), wanted, "{bytes} bytes, stride {step}, lanes {mask:#x}");
    }
}
