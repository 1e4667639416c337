//! Microbenchmark of checked accesses: `cargo test --release -p cudaemu --lib timing -- --nocapture` prints the cost of each.

use std::hint::black_box;
use std::time::Instant;

use super::fixture::{Fixture, strided};
use super::{ExecContext, StateSpace};

fn time(name: &str, rig: &mut Fixture, mut f: impl FnMut(&mut ExecContext<'_>, u64)) {
    // Minimum of many short runs, because other processes disturb the machine.
    const ROUNDS: u64 = 640;
    let mut best = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        let mut cx = rig.context(0, 1);
        for i in 0..ROUNDS {
            f(&mut cx, i % 64);
        }
        best = best.min(start.elapsed().as_secs_f64() / ROUNDS as f64 * 1e9);
    }
    println!("{name:<48} {best:>7.1} ns a warp instruction");
}

#[test]
fn timing() {
    let (mut rig, base) = Fixture::new(32 << 10, 8, |space| {
        let all = space.alloc(0, 64 << 10, "cuMemAlloc").expect("memory");
        let part = space.alloc(0, 64 << 10, "cuMemAlloc").expect("memory");
        space.snapshot().write(all.base(), &vec![1; 64 << 10]).expect("written");
        space.snapshot().write(part.base(), &vec![1; 48 << 10]).expect("written");
        (all.base(), part.base())
    });
    rig.global = super::Global::new(rig.space.snapshot(), 0, 0, false, None);
    rig.shared = super::Shared::new(32 << 10, 256, false);
    let load =
        |cx: &mut ExecContext<'_>, window, at: &_| black_box(cx.load::<4>(window, black_box(at), u32::MAX)).is_ok();
    for (name, base) in [("fully written", base.0), ("partly written", base.1)] {
        time(&format!("global load 4, coalesced, {name}"), &mut rig, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 4)));
        });
        time(&format!("global load 16, coalesced, {name}"), &mut rig, |cx, i| {
            let at = strided(base + i * 512, 16);
            assert!(black_box(cx.load::<16>(StateSpace::Global, black_box(&at), u32::MAX)).is_ok());
        });
        time(&format!("global load 4, stride 36, {name}"), &mut rig, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 36)));
        });
        time(&format!("global load 4, one address, {name}"), &mut rig, |cx, i| {
            assert!(load(cx, StateSpace::Global, &strided(base + i * 128, 0)));
        });
        time(&format!("global load 4, 31 lanes, {name}"), &mut rig, |cx, i| {
            let at = strided(base + i * 128, 4);
            assert!(black_box(cx.load::<4>(StateSpace::Global, black_box(&at), u32::MAX >> 1)).is_ok());
        });
        time(&format!("global store 4, coalesced, {name}"), &mut rig, |cx, i| {
            let at = strided(base + i * 128, 4);
            assert!(cx.store(StateSpace::Global, black_box(&at), &[[1; 4]; 32], u32::MAX).is_ok());
        });
        time(&format!("global store 2, stride 6, {name}"), &mut rig, |cx, i| {
            let at = strided(base + i * 128, 6);
            assert!(cx.store(StateSpace::Global, black_box(&at), &[[1; 2]; 32], u32::MAX).is_ok());
        });
    }
    time("generic load 4, coalesced", &mut rig, |cx, i| {
        assert!(load(cx, StateSpace::Generic, &strided(base.0 + i * 128, 4)));
    });
    time("global atomic 4, one address", &mut rig, |cx, _| {
        let at = strided(base.0, 0);
        assert!(cx.update::<4>(StateSpace::Global, black_box(&at), u32::MAX, &mut |_, old| old).is_ok());
    });
    time("shared store 4, coalesced", &mut rig, |cx, i| {
        assert!(cx.store(StateSpace::Shared, black_box(&strided(i * 128, 4)), &[[1; 4]; 32], u32::MAX).is_ok());
    });
    time("shared store 16, coalesced", &mut rig, |cx, i| {
        let at = strided(i % 16 * 512, 16);
        assert!(cx.store(StateSpace::Shared, black_box(&at), &[[1; 16]; 32], u32::MAX).is_ok());
    });
    rig.shared.reset();
    rig.context(0, 1).store(StateSpace::Shared, &strided(0, 0), &[[1; 4]; 32], 1).expect("inside");
    for i in 0..64 {
        rig.context(0, 1).store(StateSpace::Shared, &strided(i * 128, 4), &[[1; 4]; 32], u32::MAX).expect("inside");
    }
    rig.shared.barrier(0xff);
    time("shared load 4, coalesced", &mut rig, |cx, i| assert!(load(cx, StateSpace::Shared, &strided(i * 128, 4))));
    time("shared load 4, one address", &mut rig, |cx, i| assert!(load(cx, StateSpace::Shared, &strided(i * 128, 0))));
    time("shared load 16, coalesced", &mut rig, |cx, i| {
        let at = strided(i % 16 * 512, 16);
        assert!(black_box(cx.load::<16>(StateSpace::Shared, black_box(&at), u32::MAX)).is_ok());
    });
    time("shared load 2, coalesced", &mut rig, |cx, i| {
        let at = strided(i * 64, 2);
        assert!(black_box(cx.load::<2>(StateSpace::Shared, black_box(&at), u32::MAX)).is_ok());
    });
    time("local store 4", &mut rig, |cx, i| {
        assert!(cx.store(StateSpace::Local, black_box(&strided(i * 4, 0)), &[[1; 4]; 32], u32::MAX).is_ok());
    });
    time("local load 4", &mut rig, |cx, i| assert!(load(cx, StateSpace::Local, &strided(i * 4, 0))));
    time("param load 8", &mut rig, |cx, i| {
        let at = strided(i % 8 * 8, 0);
        assert!(black_box(cx.load::<8>(StateSpace::Param, black_box(&at), u32::MAX)).is_ok());
    });
}
