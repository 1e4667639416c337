//! Branches, loops, locks and clocks.

use crate::gpu::{Gpu, assert_same, ints, launch};

const FILE: &str = "control.sm_80";

fn switch(i: i32, what: i32, before: i32) -> i32 {
    match what {
        0 => i * 3 + 1,
        1 => i / 7,
        2 => i.count_ones() as i32,
        3 => -i ^ 0x5555,
        4 => i ^ 0x5555,
        5 => (0..i % 5).fold(i, |value, k| value.wrapping_add(k.wrapping_mul(value))),
        6 => i % 11,
        7 => before + 1,
        8 => i << (i & 3),
        9 => before,
        _ => -1,
    }
}

#[test]
fn switches_select_the_right_case() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let (what, before) = (ints(160, -2..12, 1), ints(160, -100..100, 2));
    let memory = gpu.upload(&before);
    launch!(gpu, module, "switch_dense", 2, 80; &gpu.upload(&what), &memory);
    let want: Vec<i32> = (0..160).map(|i| switch(i as i32, what[i], before[i])).collect();
    assert_same("switch_dense", &gpu.download(&memory), &want);
}

#[test]
fn loops_with_different_trip_counts_end_for_every_lane() {
    let collatz = |i: u64| {
        let (mut value, mut steps) = (i + 1, 0);
        while value != 1 {
            value = if value % 2 == 1 { 3 * value + 1 } else { value / 2 };
            steps += 1;
        }
        steps
    };
    let prime = |n: i32| (2..n).all(|divisor| n % divisor != 0);
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let out = gpu.alloc::<u32>(200);
    launch!(gpu, module, "collatz", 4, 64; &out, &200);
    assert_same("collatz", &gpu.download(&out), &(0..200).map(collatz).collect::<Vec<u32>>());
    let limits = ints(64, -3..120, 3);
    let out = gpu.alloc::<i32>(64);
    launch!(gpu, module, "count_primes", 1, 64; &gpu.upload(&limits), &out);
    let want: Vec<i32> = limits.iter().map(|&limit| (2..limit).filter(|&n| prime(n)).count() as i32).collect();
    assert_same("count_primes", &gpu.download(&out), &want);
}

#[test]
fn short_circuits_skip_the_second_operand_and_lanes_exit_early() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let (values, indices) = (ints(20, -5..5, 4), ints(64, -10..40, 5));
    let out = gpu.alloc::<i32>(64);
    launch!(gpu, module, "short_circuit", 2, 32; &gpu.upload(&values), &gpu.upload(&indices), &20, &out);
    let holds = |&at: &i32| i32::from(usize::try_from(at).is_ok_and(|at| at < 20 && values[at] > 0) || at == -7);
    assert_same("short_circuit", &gpu.download(&out), &indices.iter().map(holds).collect::<Vec<_>>());
    launch!(gpu, module, "trap_on_negative", 2, 32; &gpu.upload(&ints(64, 0..9, 6)));
    let out = gpu.zeros::<i32>(64);
    launch!(gpu, module, "exit_odd", 1, 64; &out);
    assert_same("exit_odd", &gpu.download(&out), &(0..64).map(|i| 1 - i % 2).collect::<Vec<_>>());
}

#[test]
fn clocks_advance_and_spinning_lanes_and_blocks_make_progress() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let out = gpu.alloc::<i32>(32);
    launch!(gpu, module, "clocks", 1, 32; &out);
    assert_same("clocks", &gpu.download(&out), &[1; 32]);
    let (lock, total) = (gpu.zeros::<i32>(1), gpu.zeros::<i32>(1));
    launch!(gpu, module, "lock_per_thread", 3, 64; &lock, &total);
    assert_same("lock_per_thread", &gpu.download(&total), &[192]);
    let (flag, value, out) = (gpu.zeros::<i32>(1), gpu.zeros::<i32>(1), gpu.alloc::<i32>(1));
    launch!(gpu, module, "wait_for_other_block", 2, 32; &flag, &value, &out);
    assert_same("wait_for_other_block", &gpu.download(&out), &[42]);
}
