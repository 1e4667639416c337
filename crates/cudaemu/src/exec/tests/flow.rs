//! Control flow: divergence and reconvergence, calls, barriers.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

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
fn each_lane_calls_the_function_of_its_own_address() {
    let mut test = TestLaunch::new(
        "mov.u64 %rd4, double; mov.u64 %rd5, square; and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 1;
        selp.b64 %rd6, %rd4, %rd5, %p1;
        { .param .b32 a; .param .b32 r; st.param.b32 [a], %r0;
          proto: .callprototype (.param .b32 _) _ (.param .b32 _);
          call (r), %rd6, (a), proto; ld.param.b32 %r5, [r]; }
        st.global.u32 [%rd3], %r5; ret;",
    );
    test.functions = "
    .func (.param .b32 r) double(.param .b32 n) { .reg .b32 %a; ld.param.u32 %a, [n]; shl.b32 %a, %a, 1; st.param.b32 [r], %a; ret; }
    .func (.param .b32 r) square(.param .b32 n) { .reg .b32 %a; ld.param.u32 %a, [n]; mul.lo.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }"
        .into();
    assert_eq!(test.values(), (0..32).map(|n| if n % 2 == 1 { 2 * n } else { n * n }).collect::<Vec<_>>());
    // A number near a function's address is not a function, and neither is a kernel's address.
    for wrong in ["add.s64 %rd6, %rd6, 2;", "mov.u64 %rd6, 0x0008000000000002;", "mov.u64 %rd6, 0;"] {
        let mut bad = TestLaunch::new(&test.body.replace("selp.b64 %rd6, %rd4, %rd5, %p1;", wrong));
        bad.functions = test.functions.clone();
        assert!(matches!(bad.fault(), Some(FaultKind::InvalidValue(_))), "{wrong}: {:?}", bad.fault());
    }
    let mut other = TestLaunch::new(
        &test.body.replace("(.param .b32 _) _ (.param .b32 _)", "(.param .b32 _) _ (.param .b32 _, .param .b32 _)"),
    );
    other.body = other.body.replace("(a), proto", "(a, a), proto");
    other.functions = test.functions.clone();
    assert!(matches!(other.fault(), Some(FaultKind::InvalidValue(_))), "{:?}", other.fault());
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
fn a_cooperative_grid_waits_for_all_its_blocks() {
    // Every thread of every block adds one to a counter in block 0's slot, and all blocks wait until it has the full count.
    let body = "
        bar.sync 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra WAITED;
        atom.global.add.u32 %r1, [%rd1], 1;
    SPIN: ld.volatile.global.u32 %r2, [%rd1]; setp.lt.u32 %p2, %r2, 40; @%p2 bra SPIN;
    WAITED: bar.sync 0; setp.eq.u32 %p3, %r22, 0; @%p3 bra OUT; st.global.u32 [%rd3], 5; OUT: ret;";
    let mut test = TestLaunch::new(body);
    test.grid = 40;
    test.block = 64;
    test.cooperative = true;
    test.max_instructions = 1 << 34;
    let values = test.values();
    assert_eq!((values[0], &values[1..]), (40, &[5; 40 * 64 - 1][..]));
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

/// A kernel in which each thread prints its number.
fn printing_kernel() -> TestLaunch {
    let mut test = TestLaunch::new(
        ".local .align 8 .b8 __local[8]; mov.u64 %rd4, __local; cvta.local.u64 %rd4, %rd4; st.local.u32 [__local], %r0;
        mov.u64 %rd5, text; cvta.global.u64 %rd5, %rd5;
        { .param .b64 f; .param .b64 v; .param .b32 r; st.param.b64 [f], %rd5; st.param.b64 [v], %rd4;
          call.uni (r), vprintf, (f, v); }
        ret;",
    );
    test.functions = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);
        .global .align 1 .b8 text[11] = {116, 104, 114, 101, 97, 100, 32, 37, 100, 10, 0};"
        .into();
    test
}

#[test]
fn printf_prints_in_the_order_of_lanes() {
    let mut test = printing_kernel();
    test.block = 3;
    let ran = test.run();
    ran.outcome.result.unwrap_or_else(|report| unreachable!("{report}"));
    assert_eq!(ran.printed, "thread 0\nthread 1\nthread 2\n");
}

#[test]
fn blocks_are_spread_over_threads() {
    // The first thread that prints waits until another one has printed: a single worker would wait forever.
    let mut test = printing_kernel();
    test.block = 1;
    test.grid = 64;
    let seen = Arc::new((Mutex::new(HashSet::new()), Condvar::new()));
    let outside = seen.clone();
    test.run_printing(Arc::new(move |_| {
        let (threads, more) = &*seen;
        let Ok(mut threads) = threads.lock() else { return };
        threads.insert(std::thread::current().id());
        more.notify_all();
        let _met = more.wait_timeout_while(threads, Duration::from_secs(20), |threads| threads.len() < 2);
    }));
    assert_eq!(outside.0.lock().map(|threads| threads.len()).ok(), Some(2));
}
