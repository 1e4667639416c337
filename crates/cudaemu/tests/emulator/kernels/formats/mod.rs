//! `kernels/formats.cu`: conversions, rounding, math functions and intrinsics. A kernel writes one
//! column per operation.

mod bits;
mod floats;
mod integers;
mod math;
mod narrow;

use std::fmt::Debug;
use std::sync::Arc;

use cudarc::driver::{CudaModule, DeviceRepr};

use crate::gpu::{Gpu, launch, random};

/// The compiled file.
const FILE: &str = "formats.sm_80";

/// Runs a kernel with one input; returns its results by element, then column.
#[track_caller]
fn run_unary<T: DeviceRepr, R: DeviceRepr + Copy>(
    gpu: &Gpu,
    module: &Arc<CudaModule>,
    kernel: &str,
    input: &[T],
    columns: usize,
) -> Vec<Vec<R>> {
    let n = input.len();
    let out = gpu.alloc::<R>(n * columns);
    launch!(gpu, module, kernel, n.div_ceil(64) as u32, 64; &gpu.upload(input), &out, &(n as i32));
    by_element(&gpu.download(&out), n)
}

/// Runs a kernel with two inputs; returns its results by element, then column.
#[track_caller]
fn run_binary<T: DeviceRepr, R: DeviceRepr + Copy>(
    gpu: &Gpu,
    module: &Arc<CudaModule>,
    kernel: &str,
    a: &[T],
    b: &[T],
    columns: usize,
) -> Vec<Vec<R>> {
    let n = a.len();
    let out = gpu.alloc::<R>(n * columns);
    launch!(gpu, module, kernel, n.div_ceil(64) as u32, 64; &gpu.upload(a), &gpu.upload(b), &out, &(n as i32));
    by_element(&gpu.download(&out), n)
}

/// Regroups `n` elements per column into columns per element.
fn by_element<R: Copy>(columns: &[R], n: usize) -> Vec<Vec<R>> {
    (0..n).map(|i| columns.iter().skip(i).step_by(n).copied().collect()).collect()
}

/// Fails if an element's results differ from the expected ones; `None` accepts any value.
#[track_caller]
fn assert_columns<T: Debug, R: Copy + Debug>(
    what: &str,
    input: T,
    got: &[R],
    want: &[Option<R>],
    equal: fn(R, R) -> bool,
) {
    assert_eq!(got.len(), want.len(), "{what}: columns");
    for (column, (&got, want)) in got.iter().zip(want).enumerate() {
        if let Some(want) = *want {
            assert!(equal(got, want), "{what}: column {column} of {input:?} is {got:?}, expected {want:?}");
        }
    }
}

/// Bitwise equality, except that all NaNs are equal.
fn same_f32(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn same_f64(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Floats of all kinds: special values, ties, subnormals, values near the limits of integer types, and random bits.
fn sample_floats(count: usize, seed: u64) -> Vec<f32> {
    let mut random = random(seed);
    let edges = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        1e-40,
        -1e-45,
        2147483520.0,
        2147483648.0,
        -2147483648.0,
        4294967040.0,
        4294967296.0,
        9.223372e18,
        1.8446743e19,
        65504.0,
        65519.996,
        65520.0,
        6e-8,
        5.9604645e-8,
        2.9802322e-8,
        448.0,
        464.0,
        465.0,
        57344.0,
        61440.0,
        3.3895314e38,
        16777216.0,
        8388607.5,
    ];
    let mut all = edges.to_vec();
    while all.len() < count {
        all.push(match random.u8(..5) {
            0 => random.f32() * 8.0 - 4.0,
            // Halves, which are ties, and values around f16's places.
            1 => random.i32(-2000..2000) as f32 / 2.0,
            2 => f32::from_bits(half::f16::from_bits(random.u16(..)).to_f32().to_bits() ^ random.u32(..2) << 12),
            3 => f32::from_bits(random.u32(..1 << 16) << 16 | [0, 0x8000, 0x7fff, 0x8001][random.usize(..4)]),
            _ => f32::from_bits(random.u32(..)),
        });
    }
    all
}

/// Integers of all sizes.
fn sample_integers(count: usize, seed: u64) -> Vec<u64> {
    let mut random = random(seed);
    let edges = [
        0,
        1,
        2,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        1 << 24,
        (1 << 24) + 1,
        (1 << 53) + 1,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
        u64::MAX - 1,
    ];
    let mut all = edges.to_vec();
    while all.len() < count {
        let value = random.u64(..) >> random.u32(..64);
        all.push(if random.bool() { value } else { value.wrapping_neg() });
    }
    all
}
