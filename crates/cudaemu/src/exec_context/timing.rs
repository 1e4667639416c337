//! Microbenchmark of checked accesses: `cargo test --release -p cudaemu --lib timing -- --nocapture` prints the cost of each.
//! Sizes in the names are bytes per lane.

use std::hint::black_box;
use std::time::Instant;

use super::fixture::{Fixture, strided};
use super::{ExecContext, StateSpace};

/// Prints the time of `f`, which makes one access; its second argument counts from 0 to 63 and repeats.
fn time_access(name: &str, fixture: &mut Fixture, mut f: impl FnMut(&mut ExecContext<'_>, u64)) {
    // Minimum of many short runs, because other processes disturb the machine.
    const ROUNDS: u64 = 640;
    let mut best = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        let mut cx = fixture.context(0, 1);
        for i in 0..ROUNDS {
            f(&mut cx, i % 64);
        }
        best = best.min(start.elapsed().as_secs_f64() / ROUNDS as f64 * 1e9);
    }
    println!("{name:<48} {best:>7.1} ns per warp instruction");
}

#[test]
fn checked_accesses_are_timed() {
    let (mut fixture, base) = Fixture::new(32 << 10, 8, |space| {
        let fully_written = space.alloc(0, 64 << 10, "cuMemAlloc").expect("memory");
        let partly_written = space.alloc(0, 64 << 10, "cuMemAlloc").expect("memory");
        space.snapshot().write(fully_written.base(), &vec![1; 64 << 10]).expect("written");
        space.snapshot().write(partly_written.base(), &vec![1; 48 << 10]).expect("written");
        (fully_written.base(), partly_written.base())
    });
    fixture.global = super::Global::new(fixture.space.snapshot(), 0, 0, false, None);
    fixture.shared = super::Shared::new(32 << 10, 256, false);
    let load =
        |cx: &mut ExecContext<'_>, window, at: &_| black_box(cx.load::<4>(window, black_box(at), u32::MAX)).is_ok();
    for (name, base) in [("fully written", base.0), ("partly written", base.1)] {
        time_access(&format!("global load 4, coalesced, {name}"), &mut fixture, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 4)));
        });
        time_access(&format!("global load 16, coalesced, {name}"), &mut fixture, |cx, i| {
            let at = strided(base + i * 512, 16);
            assert!(black_box(cx.load::<16>(StateSpace::Global, black_box(&at), u32::MAX)).is_ok());
        });
        time_access(&format!("global load 4, stride 36, {name}"), &mut fixture, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 36)));
        });
        time_access(&format!("global load 4, one address, {name}"), &mut fixture, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 0)));
        });
        time_access(&format!("global load 4, 31 lanes, {name}"), &mut fixture, |cx, i| {
            let at = strided(base + i * 128, 4);
            assert!(black_box(cx.load::<4>(StateSpace::Global, black_box(&at), u32::MAX >> 1)).is_ok());
        });
        time_access(&format!("global store 4, coalesced, {name}"), &mut fixture, |cx, i| {
            let at = strided(base + i * 128, 4);
            assert!(cx.store(StateSpace::Global, black_box(&at), &[[1; 4]; 32], u32::MAX).is_ok());
        });
        time_access(&format!("global store 2, stride 6, {name}"), &mut fixture, |cx, i| {
            let at = strided(base + i * 128, 6);
            assert!(cx.store(StateSpace::Global, black_box(&at), &[[1; 2]; 32], u32::MAX).is_ok());
        });
    }
    time_access("generic load 4, coalesced", &mut fixture, |cx, i| {
        assert!(load(cx, StateSpace::Generic, &strided(base.0 + i * 128, 4)));
    });
    time_access("global atomic 4, one address", &mut fixture, |cx, _| {
        let at = strided(base.0, 0);
        assert!(cx.update::<4>(StateSpace::Global, black_box(&at), u32::MAX, &mut |_, old| old).is_ok());
    });
    time_access("shared store 4, coalesced", &mut fixture, |cx, i| {
        assert!(cx.store(StateSpace::Shared, black_box(&strided(i * 128, 4)), &[[1; 4]; 32], u32::MAX).is_ok());
    });
    time_access("shared store 16, coalesced", &mut fixture, |cx, i| {
        let at = strided(i % 16 * 512, 16);
        assert!(cx.store(StateSpace::Shared, black_box(&at), &[[1; 16]; 32], u32::MAX).is_ok());
    });
    // After the reset all bytes are unwritten. Write those that the loads below read, then a barrier, so that the loads find no
    // hazard.
    fixture.shared.reset();
    fixture.context(0, 1).store(StateSpace::Shared, &strided(0, 0), &[[1; 4]; 32], 1).expect("inside");
    for i in 0..64 {
        fixture.context(0, 1).store(StateSpace::Shared, &strided(i * 128, 4), &[[1; 4]; 32], u32::MAX).expect("inside");
    }
    fixture.shared.barrier(0xff);
    time_access("shared load 4, coalesced", &mut fixture, |cx, i| {
        assert!(load(cx, StateSpace::Shared, &strided(i * 128, 4)))
    });
    time_access("shared load 4, one address", &mut fixture, |cx, i| {
        assert!(load(cx, StateSpace::Shared, &strided(i * 128, 0)))
    });
    time_access("shared load 16, coalesced", &mut fixture, |cx, i| {
        let at = strided(i % 16 * 512, 16);
        assert!(black_box(cx.load::<16>(StateSpace::Shared, black_box(&at), u32::MAX)).is_ok());
    });
    time_access("shared load 2, coalesced", &mut fixture, |cx, i| {
        let at = strided(i * 64, 2);
        assert!(black_box(cx.load::<2>(StateSpace::Shared, black_box(&at), u32::MAX)).is_ok());
    });
    time_access("local store 4", &mut fixture, |cx, i| {
        assert!(cx.store(StateSpace::Local, black_box(&strided(i * 4, 0)), &[[1; 4]; 32], u32::MAX).is_ok());
    });
    time_access("local load 4", &mut fixture, |cx, i| assert!(load(cx, StateSpace::Local, &strided(i * 4, 0))));
    time_access("param load 8", &mut fixture, |cx, i| {
        let at = strided(i % 8 * 8, 0);
        assert!(black_box(cx.load::<8>(StateSpace::Param, black_box(&at), u32::MAX)).is_ok());
    });
}
