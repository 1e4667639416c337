//! `kernels/basics/calls.cu`: device functions that are not inlined. The functions below mirror the device functions and
//! kernels there.

use crate::gpu::{Gpu, assert_close, assert_same, floats, ints, launch};

#[test]
fn functions_return_their_value() {
    let gpu = Gpu::new(80);
    let module = gpu.load("calls.sm_80");
    let x = floats(96, 1);
    let out = gpu.alloc::<f32>(96);
    launch!(gpu, module, "call_plain", 2, 48; &gpu.upload(&x), &out);
    let value = |(i, &x): (usize, &f32)| {
        let (x, i) = (f64::from(x), i as f64);
        // polynomial(x, 2, 3) + polynomial(-x, 1, i), with polynomial(x, a, b) = (a x + b) x
        (2.0 * x + 3.0) * x - (i - x) * x
    };
    assert_close("call_plain", &gpu.download(&out), &x.iter().enumerate().map(value).collect::<Vec<_>>(), 1e-6, 1e-5);
}

/// As the device function of the same name in calls.cu.
fn sum_digits(depth: i32, seed: i32) -> i32 {
    let digit = |k: i32| (seed + k * depth) % 10;
    let below = if depth > 0 { sum_digits(depth - 1, digit(seed % 10) + depth) } else { 0 };
    below + digit((seed + depth) % 10)
}

#[test]
fn lanes_recurse_to_different_depths() {
    let gpu = Gpu::new(80);
    let module = gpu.load("calls.sm_80");
    let out = gpu.alloc::<u32>(4 * 80);
    launch!(gpu, module, "call_recursive", 2, 40; &out);
    let fibonacci = |n: u32| (0..n).fold((0, 1), |(a, b), _| (b, a + b)).0;
    let values = |i: u32| {
        // factorial, fibonacci, is_even and sum_digits of calls.cu
        let factorial = (1..=i % 13).product();
        [factorial, fibonacci(i % 9), u32::from(i.is_multiple_of(2)), sum_digits(i as i32 % 7, i as i32) as u32]
    };
    assert_same("call_recursive", &gpu.download(&out), &(0..80).flat_map(values).collect::<Vec<_>>());
}

#[test]
fn structures_are_passed_and_returned() {
    let gpu = Gpu::new(80);
    let module = gpu.load("calls.sm_80");
    let x: Vec<f64> = floats(64, 2).into_iter().map(f64::from).collect();
    let out = gpu.alloc::<f64>(4 * 64);
    launch!(gpu, module, "call_with_structure", 1, 64; &gpu.upload(&x), &out);
    // Low, high, count and tag after widening [x, x + 1] by 0.5 and by x. Two XORs with 0x55 leave the tag unchanged.
    let values = |(i, &x): (usize, &f64)| [x - 0.5 - x, x + 1.0 + 0.5 + x, i as f64 + 2.0, i as f64];
    assert_close(
        "call_with_structure",
        &gpu.download(&out),
        &x.iter().enumerate().flat_map(values).collect::<Vec<_>>(),
        0.0,
        1e-15,
    );
}

#[test]
fn functions_write_through_pointers_to_every_space() {
    let gpu = Gpu::new(80);
    let module = gpu.load("calls.sm_80");
    let before = ints(64, -100..100, 3);
    let memory = gpu.upload(&before);
    launch!(gpu, module, "call_by_reference", 1, 64; &memory);
    // The kernel adds 5 in local memory to i, 7 in shared memory to 2 i, and both sums in global memory.
    let want: Vec<i32> = before.iter().zip(0..).map(|(value, i)| value + 3 * i + 12).collect();
    assert_same("call_by_reference", &gpu.download(&memory), &want);
}
