//! Forward progress: lanes, warps and blocks that wait for each other, and the reports of deadlocks.

use super::TestLaunch;
use crate::fault::FaultKind;

#[test]
fn a_lock_taken_in_a_function_is_released() {
    // Lanes that fail to take the lock keep entering a deeper call than the lane that holds it.
    let mut test = TestLaunch::new(
        "AGAIN:
        { .param .b64 a; .param .b32 r; st.param.b64 [a], %rd1; call.uni (r), take, (a); ld.param.b32 %r5, [r]; }
        setp.ne.u32 %p1, %r5, 0; @%p1 bra AGAIN;
        ld.volatile.global.u32 %r6, [%rd1+4]; add.u32 %r6, %r6, 1; st.volatile.global.u32 [%rd1+4], %r6;
        membar.gl; atom.global.exch.b32 %r7, [%rd1], 0; ret;",
    );
    test.functions = ".func (.param .b32 out) take(.param .b64 lock) {
        .reg .b64 %l; .reg .b32 %v;
        ld.param.u64 %l, [lock]; atom.global.cas.b32 %v, [%l], 0, 1; st.param.b32 [out], %v; ret; }"
        .into();
    assert_eq!(test.values()[..2], [0, 32]);
}

#[test]
fn lanes_that_diverge_while_spinning_yield_to_the_others() {
    // Lanes 0 to 30 wait for lane 31, whose code lies behind theirs, and diverge in every round.
    let body = "
        setp.eq.u32 %p1, %r0, 31; @%p1 bra SET;
    SPIN: ld.volatile.global.u32 %r1, [%rd1]; setp.ne.u32 %p2, %r1, 0; @%p2 bra OUT;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p3, %r2, 1; @%p3 bra ODD; add.u32 %r3, %r3, 1; bra SPIN;
    ODD: add.u32 %r3, %r3, 2; bra SPIN;
    SET: mov.u32 %r4, 9; st.volatile.global.u32 [%rd1], %r4;
    OUT: ret;";
    assert_eq!(TestLaunch::new(body).values()[0], 9);
}

#[test]
fn exited_lanes_are_not_waited_for() {
    // Lanes 16 to 23 shuffle among themselves and lanes that exit; lanes 0 to 15 wait at a barrier meanwhile.
    let body = "
        setp.lt.u32 %p1, %r0, 16; @%p1 bra BAR; setp.ge.u32 %p2, %r0, 24; @%p2 bra GONE;
        shfl.sync.idx.b32 %r5, %r0, 16, 0x1f, 0xffff0000; bra BAR;
    GONE: exit;
    BAR: bar.sync 0; st.global.u32 [%rd3], 7; ret;";
    let want = |lane: u32| if lane < 24 { 7 } else { 0 };
    assert_eq!(TestLaunch::new(body).values(), (0..32).map(want).collect::<Vec<_>>());
}

#[test]
fn lanes_meet_at_a_warp_barrier_in_two_branches() {
    let body = "
        .shared .b32 s[32];
        mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; xor.b32 %r4, %r2, 64; add.u32 %r4, %r1, %r4;
        setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;
        st.shared.u32 [%r3], 2; bar.warp.sync 0xffffffff; bra JOIN;
    LOW: st.shared.u32 [%r3], 1; bar.warp.sync 0xffffffff;
    JOIN: ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd3], %r5; ret;";
    assert_eq!(TestLaunch::new(body).values(), (0..32).map(|lane| if lane < 16 { 2 } else { 1 }).collect::<Vec<u32>>());
    let racy = TestLaunch::new(&body.replace("bar.warp.sync 0xffffffff;", ""));
    assert!(matches!(racy.fault(), Some(FaultKind::Race(_) | FaultKind::Uninitialised)), "{:?}", racy.fault());
}

#[test]
fn calls_without_end_overflow_the_stack() {
    for body in ["call.uni deep; ret;", "{ .reg .b32 %x; mov.u32 %x, 1; call.uni deep; add.u32 %x, %x, 1; ret; }"] {
        let mut test = TestLaunch::new("call.uni deep; ret;");
        test.functions = format!(".func deep() {{ {body} }}");
        assert!(matches!(test.fault(), Some(FaultKind::StackOverflow)), "{:?}", test.fault());
    }
}

#[test]
fn a_fault_is_reported_instead_of_the_deadlock_it_causes() {
    // Block 1 faults before it reaches the point that block 0 waits for.
    let body = "
        setp.eq.u32 %p1, %r20, 1; @%p1 bra BAD;
    SPIN: ld.volatile.global.u32 %r1, [%rd1+4]; setp.eq.u32 %p2, %r1, 0; @%p2 bra SPIN; ret;
    BAD: mov.u64 %rd4, 16; st.global.u32 [%rd4], %r0; st.global.u32 [%rd1+4], 1; ret;";
    let mut test = TestLaunch::new(body);
    test.grid = 2;
    test.max_instructions = 1 << 26;
    assert!(matches!(test.fault(), Some(FaultKind::OutOfBounds(_))), "{:?}", test.fault());
}

#[test]
fn warnings_beyond_the_limit_are_only_counted() {
    let mut test = TestLaunch::new("setp.lt.u32 %p1, %r0, 7; @%p1 vote.sync.ballot.b32 %r1, 1, 0xffffffff; ret;");
    test.grid = 500;
    test.report_only = true;
    let outcome = test.run().outcome;
    let kept = outcome.warnings.len() as u64;
    assert!(outcome.result.is_ok() && (1..=128).contains(&kept), "{kept} kept");
    assert_eq!(kept + outcome.more_warnings, 500);
}

#[test]
fn arguments_are_all_read_before_the_first_is_written() {
    // A recursive function with register parameters that calls itself with two of them swapped.
    let mut test = TestLaunch::new("call.uni (%r5), swap, (%r0, 100, 1); st.global.u32 [%rd3], %r5; ret;");
    test.functions = ".func (.reg .b32 out) swap(.reg .b32 a, .reg .b32 b, .reg .b32 again) {
        .reg .pred %p1;
        setp.eq.u32 %p1, again, 0; @%p1 bra DONE;
        call.uni (out), swap, (b, a, 0); ret;
    DONE: mul.lo.u32 out, a, 1000; add.u32 out, out, b; ret; }"
        .into();
    assert_eq!(test.values(), (0..32).map(|lane| 100_000 + lane).collect::<Vec<u32>>());
}
