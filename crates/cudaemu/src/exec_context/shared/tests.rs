//! Race detector of shared memory: handwritten programs, random programs compared with a model, and counts of bank conflicts.

use super::super::fixture::{Fixture, fault_name, strided};
use super::super::{Lanes, StateSpace};
use super::vector_clocks::LAST_CLOCK;

const ALL: u32 = u32::MAX;

/// A step of a block of four warps. Lanes and sets of warps are masks. An access has 4 bytes per lane unless stated otherwise.
#[derive(Clone, Copy, Debug)]
enum BlockStep {
    /// Warp, lanes, word, stride: each lane writes its own number to `word + lane * stride` (in words).
    Write(u32, u32, u64, u64),
    /// Warp, lanes, word, stride: as `Write`, but all lanes write the value 7.
    WriteSame(u32, u32, u64, u64),
    /// Warp, lanes, word, stride: each lane reads the word `word + lane * stride`.
    Read(u32, u32, u64, u64),
    /// Warp, lanes, word: each lane adds 1 to the same word.
    Atomic(u32, u32, u64),
    /// Warp, lanes, byte address, stride in bytes: each lane writes a byte.
    WriteBytes(u32, u32, u64, u64),
    /// Warp, lanes, byte address, stride in bytes: each lane reads a byte.
    ReadBytes(u32, u32, u64, u64),
    /// Warp, lanes, byte address: each lane writes 16 bytes, contiguously.
    WriteWide(u32, u32, u64),
    /// Warps: all of them arrive at barrier 0 and wait for each other.
    Barrier(u32),
    /// Barrier, warp: the warp arrives at the barrier.
    Arrive(u32, u32),
    /// Barrier, warps: the barrier completes, and these warps, which waited at it, continue.
    Release(u32, u32),
    /// Warp, lanes: `bar.warp.sync` of these lanes.
    WarpSync(u32, u32),
    /// Warp: all of its lanes exit.
    Exit(u32),
    /// The block ends and the next one starts in the same memory.
    NextBlock,
    /// Sets all clocks to just below the limit at which they are restarted.
    AgeClocks,
}
use BlockStep::*;

/// Executes a step, whose accesses get the PTX line `line`; returns [`fault_name`] of the result.
fn execute_step(fixture: &mut Fixture, step: BlockStep, line: u32) -> String {
    let shared = |word: u64, stride: u64| strided(word * 4, stride * 4);
    let own: Lanes<[u8; 4]> = std::array::from_fn(|lane| (lane as u32 + 100).to_le_bytes());
    let mut done = Ok(());
    match step {
        Write(warp, mask, word, stride) => {
            done = fixture.context(warp, line).store(StateSpace::Shared, &shared(word, stride), &own, mask);
        }
        WriteSame(warp, mask, word, stride) => {
            done = fixture.context(warp, line).store(StateSpace::Shared, &shared(word, stride), &[[7; 4]; 32], mask);
        }
        Read(warp, mask, word, stride) => {
            done = fixture.context(warp, line).load::<4>(StateSpace::Shared, &shared(word, stride), mask).map(|_| ());
        }
        Atomic(warp, mask, word) => {
            let add = &mut |_, old: [u8; 4]| (u32::from_le_bytes(old).wrapping_add(1)).to_le_bytes();
            done = fixture.context(warp, line).update(StateSpace::Shared, &shared(word, 0), mask, add).map(|_| ());
        }
        WriteBytes(warp, mask, at, stride) => {
            let values: Lanes<[u8; 1]> = std::array::from_fn(|lane| [lane as u8 + 100]);
            done = fixture.context(warp, line).store(StateSpace::Shared, &strided(at, stride), &values, mask);
        }
        ReadBytes(warp, mask, at, stride) => {
            done = fixture.context(warp, line).load::<1>(StateSpace::Shared, &strided(at, stride), mask).map(|_| ());
        }
        WriteWide(warp, mask, at) => {
            done = fixture.context(warp, line).store(StateSpace::Shared, &strided(at, 16), &[[9; 16]; 32], mask);
        }
        Barrier(warps) => fixture.shared.barrier(warps),
        Arrive(id, warp) => fixture.shared.arrive(id, warp),
        Release(id, warps) => fixture.shared.release(id, warps),
        WarpSync(warp, lanes) => fixture.shared.warp_sync(warp, lanes, ALL),
        Exit(warp) => fixture.shared.exit(warp),
        NextBlock => fixture.shared.reset(),
        AgeClocks => {
            fixture.shared.shadow.order().clock = [LAST_CLOCK - 1; 32];
        }
    }
    fault_name(&done)
}

/// (description, steps, result of the last step). All earlier steps must pass. A case with "ok" is a program without a race,
/// beside a case that has one.
#[test]
fn races_are_reported_and_valid_programs_pass() {
    let cases: &[(&str, &[BlockStep], &str)] = &[
        (
            "a lane reads and writes its own bytes",
            &[Write(0, ALL, 0, 1), Read(0, ALL, 0, 1), Write(0, ALL, 0, 1)],
            "ok",
        ),
        ("never written", &[Read(0, 4, 0, 1)], "Uninitialised 2"),
        (
            "bytes that an earlier block wrote are uninitialised",
            &[Write(0, ALL, 0, 1), NextBlock, Read(0, ALL, 0, 1)],
            "Uninitialised 0",
        ),
        (
            "writes of an earlier block do not race",
            &[Write(0, ALL, 0, 1), NextBlock, Write(1, ALL, 0, 1), Read(1, ALL, 0, 1)],
            "ok",
        ),
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
            "lanes within a partial warp sync",
            &[Write(0, 1, 0, 1), WarpSync(0, 0xff), Read(0, 2, 0, 0), WarpSync(0, 0xff00), Read(0, 0x10, 0, 0)],
            "ok",
        ),
        (
            "a lane outside of a partial warp sync",
            &[Write(0, 1, 0, 1), WarpSync(0, 0xff), Read(0, 1 << 8, 0, 0)],
            "Race 8",
        ),
        (
            "partial warp syncs that pass the order on",
            &[Write(0, 1, 0, 1), WarpSync(0, 3), WarpSync(0, 6), Read(0, 4, 0, 0)],
            "ok",
        ),
        (
            "partial warp syncs in the wrong order",
            &[Write(0, 1, 0, 1), WarpSync(0, 6), WarpSync(0, 3), Read(0, 4, 0, 0)],
            "Race 2",
        ),
        (
            "named barrier of both warps",
            &[Write(0, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 3), Read(1, 1, 5, 0)],
            "ok",
        ),
        (
            "named barrier of other warps",
            &[Write(0, ALL, 0, 1), Arrive(1, 2), Arrive(1, 1), Release(1, 6), Read(1, 1, 5, 0)],
            "Race 0",
        ),
        (
            "producer arrives, consumer waits",
            &[Write(0, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 2), Read(1, ALL, 0, 1)],
            "ok",
        ),
        (
            "producer writes after its arrival",
            &[Arrive(1, 0), Write(0, ALL, 0, 1), Arrive(1, 1), Release(1, 2), Read(1, ALL, 0, 1)],
            "Race 0",
        ),
        (
            "a warp that only arrives is not ordered after the others",
            &[Write(1, ALL, 0, 1), Arrive(1, 0), Arrive(1, 1), Release(1, 2), Read(0, ALL, 0, 1)],
            "Race 0",
        ),
        (
            "two barriers pass the order on through a third warp",
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
            "a barrier orders the accesses of an exited warp",
            &[Write(3, 1, 0, 1), Exit(3), Barrier(7), Read(0, 1, 0, 1)],
            "ok",
        ),
        ("exiting alone orders nothing", &[Write(3, 1, 0, 1), Exit(3), Read(0, 1, 0, 1)], "Race 0"),
        ("atomics do not race", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, ALL, 0), Atomic(1, ALL, 0)], "ok"),
        ("atomic and read", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, ALL, 0), Read(1, 1, 0, 1)], "Race 0"),
        ("atomic and write", &[Write(0, 1, 0, 1), Barrier(0xf), Atomic(0, 1, 0), Write(1, 1, 0, 1)], "Race 0"),
        ("write and atomic", &[Write(0, 1, 0, 1), Atomic(1, 1, 0)], "Race 0"),
        ("read and atomic", &[Write(0, 1, 0, 1), Barrier(0xf), Read(0, 1, 0, 1), Atomic(1, 1, 0)], "Race 0"),
        ("atomic on uninitialised bytes", &[Atomic(1, 1, 0)], "Uninitialised 0"),
        ("two lanes of one instruction write different values", &[Write(0, 0x30, 0, 0)], "Race 5"),
        ("two lanes of one instruction write the same value", &[WriteSame(0, ALL, 0, 0)], "ok"),
        ("two warps write the same value", &[WriteSame(0, ALL, 0, 0), WriteSame(1, ALL, 0, 0)], "ok"),
        ("two warps write different values", &[WriteSame(0, ALL, 0, 0), Write(1, 1, 0, 0)], "Race 0"),
        (
            "warps that write different bytes",
            &[WriteBytes(0, ALL, 0, 1), WriteBytes(1, ALL, 32, 1), ReadBytes(0, ALL, 0, 1)],
            "ok",
        ),
        ("a byte of a word that another warp wrote", &[Write(0, 1, 0, 1), ReadBytes(1, 1, 3, 1)], "Race 0"),
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
            "four bytes written, barrier, their word read",
            &[WriteBytes(0, 15, 0, 1), Barrier(15), Read(1, 1, 0, 0), Barrier(15), Write(2, 1, 0, 1)],
            "ok",
        ),
        (
            "three bytes written, barrier, their word read",
            &[WriteBytes(0, 7, 0, 1), Barrier(15), Read(1, 1, 0, 0)],
            "Uninitialised 0",
        ),
        (
            "bytes read, word written",
            &[Write(0, 1, 0, 1), Barrier(15), ReadBytes(1, 1, 2, 0), Write(0, 1, 0, 1)],
            "Race 0",
        ),
        ("16-byte writes, barrier, words read", &[WriteWide(0, 3, 0), Barrier(0xf), Read(1, 0xff, 0, 1)], "ok"),
        ("16-byte writes, words read without a barrier", &[WriteWide(0, 3, 0), Read(1, 0xff, 0, 1)], "Race 0"),
        (
            "bytes stay initialised when the clocks are restarted",
            &[Write(0, ALL, 0, 1), AgeClocks, Barrier(0xf), Read(1, ALL, 0, 1)],
            "ok",
        ),
        (
            "races are found after the clocks are restarted",
            &[AgeClocks, Barrier(0xf), Write(0, ALL, 0, 1), Read(1, ALL, 0, 1)],
            "Race 0",
        ),
        (
            "a block after the clocks are restarted starts uninitialised",
            &[Write(0, ALL, 0, 1), AgeClocks, NextBlock, Read(1, ALL, 0, 1)],
            "Uninitialised 0",
        ),
        ("an address outside of the memory", &[Read(0, 1, 1024, 1)], "OutOfBounds 0"),
        ("an address far outside of the memory", &[Read(0, 1, u64::MAX / 4, 1)], "OutOfBounds 0"),
    ];
    for (description, steps, expected) in cases {
        let (mut fixture, ()) = Fixture::new(4096, 4, |_| ());
        for (i, &step) in steps.iter().enumerate() {
            let result = execute_step(&mut fixture, step, i as u32 + 1);
            let expected = if i + 1 == steps.len() { expected } else { "ok" };
            assert_eq!(result, expected, "{description}: step {i}, {step:?}: {:?}", fixture.log.faults);
        }
    }
}

#[test]
fn a_race_names_the_other_thread_and_its_line() {
    let (mut fixture, ()) = Fixture::new(4096, 4, |_| ());
    execute_step(&mut fixture, Write(2, 1 << 5, 0, 0), 77);
    execute_step(&mut fixture, Read(1, 1, 0, 0), 78);
    let text = fixture.log.faults[0].kind.to_string();
    assert!(text.contains("thread 69 of the block wrote it at PTX line 77"), "{text}");
    execute_step(&mut fixture, Write(0, 3, 9, 0), 79);
    let text = fixture.log.faults[1].kind.to_string();
    assert!(text.contains("two lanes of one instruction: thread 0"), "{text}");
}

#[test]
fn misaligned_and_outside_addresses_are_reported() {
    let (mut fixture, ()) = Fixture::new(4096, 4, |_| ());
    let mut cx = fixture.context(0, 1);
    cx.store(StateSpace::Shared, &strided(0, 16), &[[1; 16]; 32], ALL).expect("inside");
    let mut load = |at| fault_name(&fixture.context(0, 1).load::<8>(StateSpace::Shared, &strided(at, 0), 1));
    assert_eq!(["ok", "Misaligned 0", "OutOfBounds 0"], [load(0), load(4), load(4096)].each_ref().map(String::as_str));
}

/// Random programs of a block. The race detector keeps only the last accesses of each byte (its shadow memory); the model keeps
/// every access since the block started. Both must find the same hazards.
#[test]
fn race_reports_agree_with_a_model_that_keeps_every_access() {
    /// An access to a byte.
    #[derive(Clone)]
    struct PastAccess {
        thread: usize,
        write: bool,
        atomic: bool,
        /// For each thread: whether this access is ordered before that thread's next access.
        ordered_before: [bool; 128],
    }
    let mut rng = fastrand::Rng::with_seed(11);
    let (mut fixture, ()) = Fixture::new(64, 4, |_| ());
    let (mut races, mut clean) = (0, 0);
    for round in 0..3000 {
        fixture.shared.reset();
        fixture.log.faults.clear();
        let mut past: Vec<Vec<PastAccess>> = vec![Vec::new(); 64];
        // Whether the round has barriers of random warps and warp syncs; otherwise all its barriers are of all warps.
        let partial = rng.bool();
        // How many quarters of the steps are barriers.
        let barriers = rng.u32(1..4);
        // Every other round skips invalid accesses, so that it is long.
        let only_valid = round % 2 == 0;
        for count in 0..40 {
            let warp = rng.u32(0..4);
            if rng.u32(0..4) < barriers {
                let warps = if partial { rng.u32(1..16) } else { 15 };
                match rng.u8(0..3) {
                    0 if partial => {
                        fixture.shared.warp_sync(warp, ALL, ALL);
                        let range = warp as usize * 32..warp as usize * 32 + 32;
                        for access in past.iter_mut().flatten() {
                            if access.ordered_before[range.clone()].contains(&true) {
                                access.ordered_before[range.clone()].fill(true);
                            }
                        }
                    }
                    _ => {
                        fixture.shared.barrier(warps);
                        let within = |thread: usize| warps >> (thread / 32) & 1 != 0;
                        for access in past.iter_mut().flatten() {
                            if (0..128).any(|thread| within(thread) && access.ordered_before[thread]) {
                                (0..128).filter(|&t| within(t)).for_each(|thread| access.ordered_before[thread] = true);
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
            // Whether the access races with an earlier one. The shadow keeps only the last unordered atomic of a byte, so it
            // may miss a race with an older one; `forgotten` includes these.
            let unordered = |forgotten: bool| {
                let clash = |p: &PastAccess| {
                    let race = p.write || write || atomic;
                    race && !(p.atomic && atomic) && p.thread != thread && !p.ordered_before[thread]
                };
                let kept = |byte: u64, i: usize| {
                    let accesses = &past[byte as usize];
                    !accesses[i].atomic || !accesses[i + 1..].iter().any(|p| p.atomic) || forgotten
                };
                (at..at + size)
                    .any(|byte| past[byte as usize].iter().enumerate().any(|(i, p)| clash(p) && kept(byte, i)))
            };
            let conflict = unordered(false);
            // Steps whose result depends on what the shadow has forgotten are skipped.
            let doubtful = unordered(true) && !conflict;
            let mut empty = (at..at + size).any(|byte| !past[byte as usize].iter().any(|p| p.write));
            empty &= !write || atomic;
            let (mask, to, line) = (1 << lane, strided(at, 0), count + 1);
            if doubtful || only_valid && (conflict || empty) {
                continue;
            }
            // Each write has a new value, because writing the value that memory already holds is no race.
            let value = [count as u8 + 1; 4];
            let mut cx = fixture.context(warp, line);
            let result = match (atomic, write, wide) {
                (true, ..) => cx.update::<4>(StateSpace::Shared, &to, mask, &mut |_, _| value).map(|_| ()),
                (_, true, true) => cx.store(StateSpace::Shared, &to, &[value; 32], mask),
                (_, true, false) => cx.store(StateSpace::Shared, &to, &[[value[0]]; 32], mask),
                (_, false, true) => cx.load::<4>(StateSpace::Shared, &to, mask).map(|_| ()),
                (_, false, false) => cx.load::<1>(StateSpace::Shared, &to, mask).map(|_| ()),
            };
            if conflict || empty {
                let reported = result.is_err();
                assert!(
                    reported,
                    "round {round} step {count}: neither the race ({conflict}) nor the uninitialised read ({empty}) was reported"
                );
                races += 1;
                break;
            }
            assert_eq!(fault_name(&result), "ok", "round {round} step {count}: {:?}", fixture.log.faults);
            clean += 1;
            let mut ordered_before = [false; 128];
            ordered_before[thread] = true;
            for byte in at..at + size {
                past[byte as usize].push(PastAccess { thread, write: write || atomic, atomic, ordered_before });
            }
        }
    }
    // Checks the generator: both outcomes must be frequent.
    assert!(races > 500 && clean > 5000, "{races} hazards, {clean} valid accesses");
}

#[test]
fn passes_serve_128_bytes_and_conflicts_are_extra_passes() {
    let counts = |bytes: u32, step: u64, mask: u32| {
        let (mut fixture, ()) = Fixture::new(32 << 10, 1, |_| ());
        let at = strided(0, step);
        let mut cx = fixture.context(0, 1);
        let stored = match bytes {
            1 => cx.store(StateSpace::Shared, &at, &[[1; 1]; 32], mask),
            4 => cx.store(StateSpace::Shared, &at, &[[1; 4]; 32], mask),
            8 => cx.store(StateSpace::Shared, &at, &[[1; 8]; 32], mask),
            _ => cx.store(StateSpace::Shared, &at, &[[1; 16]; 32], mask),
        };
        stored.expect("inside");
        (fixture.counts.shared_passes, fixture.counts.bank_conflicts)
    };
    // (bytes, stride, lanes, passes, those that are conflicts)
    let cases = [
        (4, 4, ALL, 1, 0),
        (4, 0, ALL, 1, 0),
        (4, 8, ALL, 2, 1),
        (4, 128, ALL, 32, 31),
        (4, 132, ALL, 1, 0),
        (4, 128, 0xff, 8, 7),
        (1, 1, ALL, 1, 0),
        (8, 8, ALL, 2, 0),
        (8, 16, ALL, 4, 2),
        (8, 8, 0xffff, 1, 0),
        (16, 16, ALL, 4, 0),
        (16, 128, ALL, 32, 28),
        (16, 144, ALL, 4, 0),
        (16, 16, 0xff, 1, 0), // ldmatrix.x1
    ];
    for (bytes, step, mask, passes, conflicts) in cases {
        assert_eq!(counts(bytes, step, mask), (passes, conflicts), "{bytes} bytes, stride {step}, lanes {mask:#x}");
    }
}
