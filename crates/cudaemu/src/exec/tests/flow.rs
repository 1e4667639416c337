//! Control flow: divergence and reconvergence, calls, barriers.

use super::TestLaunch;
use crate::fault::FaultKind;

#[test]
fn divergent_branches_reconverge() {
    // Odd lanes add 100. A lane whose number is a multiple of four loops that often. Afterwards each lane counts the lanes of
    // its group.
    let body = "
        and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 1; mov.u32 %r2, 0;
        @%p1 bra ODD;
        and.b32 %r1, %r0, 3; setp.ne.u32 %p2, %r1, 0; @%p2 bra JOIN;
        mov.u32 %r3, %r0;
    LOOP: setp.eq.u32 %p3, %r3, 0; @%p3 bra JOIN;
        add.u32 %r2, %r2, 2; sub.u32 %r3, %r3, 1; bra LOOP;
    ODD: add.u32 %r2, %r2, 100;
    JOIN: vote.sync.ballot.b32 %r4, 1, 0xffffffff; popc.b32 %r4, %r4; shl.b32 %r4, %r4, 16;
        add.u32 %r2, %r2, %r4; st.global.u32 [%rd3], %r2; ret;";
    let want = |lane: u32| {
        32 << 16
            | if lane % 2 == 1 {
                100
            } else if lane.is_multiple_of(4) {
                2 * lane
            } else {
                0
            }
    };
    assert_eq!(TestLaunch::new(body).values(), (0..32).map(want).collect::<Vec<_>>());
}

#[test]
fn lanes_from_a_distant_cold_path_reconverge_at_the_vote() {
    // The cold path lies after all other code: the warp's other lanes reach the vote first and wait there.
    let body = "
        setp.lt.u32 %p1, %r0, 5; mov.u32 %r2, 1; @%p1 bra COLD;
    BACK: vote.sync.ballot.b32 %r4, 1, 0xffffffff; add.u32 %r2, %r2, %r4; st.global.u32 [%rd3], %r2; ret;
    COLD: mov.u32 %r2, 7; bra BACK;";
    let want = |lane: u32| u32::MAX.wrapping_add(if lane < 5 { 7 } else { 1 });
    assert_eq!(TestLaunch::new(body).values(), (0..32).map(want).collect::<Vec<_>>());
}

#[test]
fn a_lock_holder_progresses_while_other_lanes_spin() {
    // A lock that lanes of one warp take in turn: the holder must make progress while the others spin.
    let body = "
        mov.u32 %r3, 0;
    TRY: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra TRY;
        add.u32 %r3, %r3, 1;
        atom.global.exch.b32 %r2, [%rd1], 0;
        ret;";
    assert_eq!(TestLaunch::new(body).values()[0], 0);
}

#[test]
fn recursive_calls_pass_arguments_and_results() {
    let mut test = TestLaunch::new(
        "{ .param .b32 a; .param .b32 r; st.param.b32 [a], %r0; call.uni (r), fib, (a); ld.param.b32 %r5, [r]; }
        st.global.u32 [%rd3], %r5; ret;",
    );
    test.functions = ".func (.param .b32 out) fib(.param .b32 n) {
        .reg .pred %p<2>; .reg .b32 %a<6>;
        ld.param.u32 %a1, [n]; setp.lt.u32 %p1, %a1, 2; mov.u32 %a4, %a1; @%p1 bra DONE;
        sub.u32 %a2, %a1, 1;
        { .param .b32 x; .param .b32 y; st.param.b32 [x], %a2; call.uni (y), fib, (x); ld.param.b32 %a3, [y]; }
        sub.u32 %a2, %a1, 2;
        { .param .b32 x; .param .b32 y; st.param.b32 [x], %a2; call.uni (y), fib, (x); ld.param.b32 %a4, [y]; }
        add.u32 %a4, %a3, %a4;
    DONE: st.param.b32 [out], %a4; ret; }"
        .into();
    let fib = |n: u32| (0..n).fold((0, 1), |(a, b), _| (b, a + b)).0;
    test.block = 12;
    assert_eq!(test.values(), (0..12).map(fib).collect::<Vec<_>>());
}

#[test]
fn a_barrier_makes_shared_writes_visible_to_other_warps() {
    let body = "
        .shared .b32 s[256];
        mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0;
        bar.sync 0;
        sub.u32 %r4, 255, %r0; shl.b32 %r4, %r4, 2; add.u32 %r4, %r1, %r4; ld.shared.u32 %r5, [%r4];
        st.global.u32 [%rd3], %r5; ret;";
    let mut test = TestLaunch::new(body);
    test.block = 256;
    test.grid = 3;
    assert_eq!(test.values(), (0..768).map(|i| 255 - i % 256).collect::<Vec<u32>>());
    test.body = body.replace("bar.sync 0;", "");
    assert!(matches!(test.fault(), Some(FaultKind::Race(_) | FaultKind::Uninitialised)), "{:?}", test.fault());
}

#[test]
fn reductions_at_a_barrier_count_all_threads() {
    let body = "
        setp.lt.u32 %p1, %r0, 40; barrier.red.popc.u32 %r1, 1, %p1; barrier.red.and.pred %p2, 1, %p1;
        barrier.red.or.pred %p3, 1, %p1; selp.b32 %r2, 1000, 0, %p2; selp.b32 %r3, 2000, 0, %p3;
        add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.u32 [%rd3], %r1; ret;";
    let mut test = TestLaunch::new(body);
    test.block = 96;
    assert_eq!(test.values(), [2040; 96]);
}

/// A kernel's body, the threads of its block, and whether a fault is of the expected kind.
type Row = (&'static str, u32, fn(&FaultKind) -> bool);

#[test]
fn control_flow_faults_are_reported() {
    let table: [Row; 6] = [
        ("setp.lt.u32 %p1, %r0, 7; @%p1 bar.sync 0; ret;", 32, |k| matches!(k, FaultKind::DivergentBarrier(_))),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bra OUT; bar.sync 1, 64; OUT: ret;", 64, |k| {
            matches!(k, FaultKind::Deadlock(_))
        }),
        ("setp.lt.u32 %p1, %r0, 7; @%p1 vote.sync.ballot.b32 %r1, 1, 0xffffffff; ret;", 32, |k| {
            matches!(k, FaultKind::InactiveLane(_))
        }),
        ("AGAIN: bra AGAIN;", 32, |k| matches!(k, FaultKind::InstructionLimit)),
        ("trap; ret;", 32, |k| matches!(k, FaultKind::Trap(_))),
        ("bar.sync 16; ret;", 32, |k| matches!(k, FaultKind::InvalidValue(_))),
    ];
    for (body, block, expected) in table {
        let mut test = TestLaunch::new(body);
        test.block = block;
        let fault = test.fault();
        assert!(fault.as_ref().is_some_and(expected), "{body}: {fault:?}");
    }
}

#[test]
fn faults_name_block_thread_and_line() {
    let mut test = TestLaunch::new("setp.eq.u32 %p1, %r22, 77; @%p1 trap; ret;");
    test.grid = 4;
    let report = test.run().outcome.result.err();
    let report = report.unwrap_or_else(|| unreachable!("the trap was not reached"));
    assert_eq!((report.block, report.thread), ([2, 0, 0], [13, 0, 0]));
    assert!(report.text.contains("trap"), "{report}");
    assert_eq!(report.kernel, "k");
}

#[test]
fn blocks_are_spread_over_threads() {
    // Two blocks that wait for each other: a single worker would wait forever.
    let body = "
        st.volatile.global.u32 [%rd3], 1; xor.b32 %r1, %r20, 1; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd1, %rd4;
    SPIN: ld.volatile.global.u32 %r2, [%rd4]; setp.eq.u32 %p1, %r2, 0; @%p1 bra SPIN; ret;";
    let mut test = TestLaunch::new(body);
    test.block = 1;
    test.grid = 2;
    test.max_instructions = 1 << 34;
    assert_eq!(test.values(), [1, 1]);
}
