//! Control flow: every row of barriers, branches, calls and exits in the instruction table, executed on a device.

use crate::bare_device::{Device, Params};
use cudaemu::fault::FaultKind;
use cudaemu::isa::table;

/// The expected value of a thread, by its number.
type ValueOf = Box<dyn Fn(u32) -> u32>;

/// Threads of a block: two warps.
const THREADS: u32 = 64;

/// A kernel in which `%t` is the thread's number and `%v` the value that it stores at the end.
fn kernel(name: &str, body: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 out) {{
            .reg .b32 %t, %v, %w, %a, %b, %n; .reg .b64 %out, %o, %d; .reg .pred %p, %q, %first;
            .shared .align 4 .b8 shared[256];
            mov.u32 %t, %tid.x;
            mov.u32 %v, 0;
            shl.b32 %a, %t, 2; mov.u32 %n, shared; add.s32 %a, %a, %n;
            sub.s32 %b, 63, %t; shl.b32 %b, %b, 2; add.s32 %b, %b, %n;
            setp.lt.u32 %p, %t, 40;
            setp.lt.u32 %first, %t, 32;
            {body}
            ld.param.u64 %out, [out]; mul.wide.u32 %o, %t, 4; add.s64 %out, %out, %o;
            st.global.u32 [%out], %v;
            ret;
        }}\n"
    )
}

fn header() -> String {
    String::from(".version 8.6\n.target sm_90a\n.address_size 64\n")
}

/// The values that the threads stored.
fn values(device: &mut Device, module: &crate::bare_device::Module, name: &str) -> Vec<u32> {
    let out = device.upload(&[0; 4 * THREADS as usize]);
    device.run(module, name, 1, THREADS, Params::default().pointer(out));
    let bytes = device.download(out, 4 * THREADS as usize);
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn every_barrier_row_synchronises_the_threads() {
    let mut device = Device::new();
    let mut text = header();
    let mut expected: Vec<(String, ValueOf)> = Vec::new();
    // Thread t reads the value that thread 63 - t stored before the barrier.
    let hand_over = |barrier: &str| format!("st.shared.u32 [%a], %t; {barrier} ld.shared.u32 %v, [%b];");
    for row in table().rows() {
        let name = &row.name;
        let words: Vec<&str> = name.split('.').collect();
        if !["bar", "barrier"].contains(&words[0]) {
            continue;
        }
        let has = |word: &str| words.contains(&word);
        let operands = row.operands.len();
        let (body, value): (String, ValueOf) = if has("cluster") {
            let other = if has("arrive") {
                format!("{name}; barrier.cluster.wait;")
            } else {
                format!("barrier.cluster.arrive; {name};")
            };
            (hand_over(&other), Box::new(|t| 63 - t))
        } else if has("warp") {
            (format!("mov.u32 %v, %t; {name} 0xffffffff;"), Box::new(|t| t))
        } else if has("sync") {
            let count = if operands == 2 { ", 64" } else { "" };
            (hand_over(&format!("{name} 3{count};")), Box::new(|t| 63 - t))
        } else if has("arrive") {
            // The first warp stores and arrives; the second warp waits and reads.
            let body = format!(
                "@!%first bra TAKE;
                 st.shared.u32 [%a], %t; mov.u32 %v, 7; {name} 1, 64; bra DONE;
                 TAKE: barrier.sync.aligned 1, 64; ld.shared.u32 %v, [%b];
                 DONE:"
            );
            (body, Box::new(|t| if t < 32 { 7 } else { 63 - t }))
        } else if has("popc") {
            let count = if operands == 4 { " 64," } else { "" };
            (format!("{name} %v, 2,{count} %p;"), Box::new(|_| 40))
        } else {
            // The predicate is true in all threads, then in none, then in some: bits 1, 2 and 4 of the result.
            let count = if operands == 4 { " 64," } else { "" };
            let body = format!(
                "setp.ge.u32 %q, %t, 0; {name} %q, 2,{count} %q; selp.u32 %w, 1, 0, %q; add.u32 %v, %v, %w;
                 setp.ge.u32 %q, %t, 64; {name} %q, 2,{count} %q; selp.u32 %w, 2, 0, %q; add.u32 %v, %v, %w;
                 {name} %q, 2,{count} !%p; selp.u32 %w, 4, 0, %q; add.u32 %v, %v, %w;"
            );
            let result = if has("and") { 1 } else { 5 };
            (body, Box::new(move |_| result))
        };
        let kernel_name = format!("k{}", expected.len());
        text += &kernel(&kernel_name, &body);
        expected.push((name.clone(), value));
    }
    let module = device.load(&text);
    for (number, (name, value)) in expected.iter().enumerate() {
        let want: Vec<u32> = (0..THREADS).map(value).collect();
        assert_eq!(values(&mut device, &module, &format!("k{number}")), want, "{name}");
    }
    device.assert_executed_all(&["bar", "barrier"]);
}

#[test]
fn every_branch_call_and_exit_row_goes_to_its_target() {
    let mut device = Device::new();
    let mut text = header()
        + ".func (.param .b32 r) triple(.param .b32 x) {
            .reg .b32 %x; .reg .pred %p;
            ld.param.u32 %x, [x];
            setp.gt.u32 %p, %x, 50;
            @%p bra.uni OUT;
            mul.lo.u32 %x, %x, 3;
            OUT: st.param.b32 [r], %x;
            ret.uni;
        }\n";
    for (name, body) in [
        // Instructions without effect.
        (
            "idle",
            "griddepcontrol.launch_dependents; griddepcontrol.wait; nanosleep.u32 20; nanosleep.u32 %t;
             setmaxnreg.dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 128; mov.u32 %v, %t;",
        ),
        (
            "called",
            "{ .param .b32 x; .param .b32 r; st.param.b32 [x], %t; call.uni (r), triple, (x); ld.param.b32 %v, [r]; }",
        ),
        ("left", "@%p exit; mov.u32 %v, %t;"),
        ("returned", "@!%p ret; mov.u32 %v, %t;"),
        // Counters do not run backwards, and their two halves match the whole.
        (
            "clocks",
            "{ .reg .b32 %c<6>; .reg .b64 %l<4>; .reg .pred %ok;
             mov.u32 %c0, %clock; mov.u64 %l0, %clock64; mov.u32 %c1, %clock_hi; mov.u32 %c2, %clock;
             mov.u64 %l1, %globaltimer; mov.u32 %c3, %globaltimer_lo; mov.u32 %c4, %globaltimer_hi; mov.u64 %l2, %clock64;
             setp.lt.u32 %ok, %c0, %c2; selp.u32 %c5, 1, 0, %ok; add.u32 %v, %v, %c5;
             setp.lt.u64 %ok, %l0, %l2; selp.u32 %c5, 2, 0, %ok; add.u32 %v, %v, %c5;
             setp.eq.u32 %ok, %c1, %c4; selp.u32 %c5, 4, 0, %ok; add.u32 %v, %v, %c5;
             shr.u64 %l3, %l1, 32; mov.b64 {%c0, %c1}, %l1;
             setp.le.u32 %ok, %c0, %c3; selp.u32 %c5, 8, 0, %ok; add.u32 %v, %v, %c5; }",
        ),
        // The address of a variable of the frame, 64 and 32 bits wide.
        (
            "frame",
            "{ .local .align 8 .b8 before[8]; .local .align 4 .b8 here[8];
             mov.u64 %d, here; mov.u32 %w, here; st.local.u32 [%d+4], %t; ld.local.u32 %v, [%w+4];
             cvta.local.u64 %d, %d; ld.u32 %w, [%d+4]; add.u32 %v, %v, %w; }",
        ),
    ] {
        text += &kernel(name, body);
    }
    let module = device.load(&text);
    let expected: [(&str, &dyn Fn(u32) -> u32); 6] = [
        ("idle", &|t| t),
        ("called", &|t| if t > 50 { t } else { 3 * t }),
        ("left", &|t| if t < 40 { 0 } else { t }),
        ("returned", &|t| if t < 40 { t } else { 0 }),
        ("clocks", &|_| 15),
        ("frame", &|t| 2 * t),
    ];
    for (name, value) in expected {
        assert_eq!(values(&mut device, &module, name), (0..THREADS).map(value).collect::<Vec<u32>>(), "{name}");
    }
    let module = device.load(&(header() + &kernel("k", "@!%p trap;")));
    let out = device.upload(&[0; 4 * THREADS as usize]);
    let report = device.launch(&module, "k", 1, THREADS, Params::default().pointer(out)).result.unwrap_err();
    assert!(matches!(&report.fault.kind, FaultKind::Trap(text) if text.contains("trap")), "{report}");
    assert_eq!(report.thread, [40, 0, 0], "the first thread that reaches the instruction");
    device.assert_executed_all(&["bra", "call", "ret", "exit", "trap", "nanosleep", "setmaxnreg", "griddepcontrol"]);
}
