//! Plain arithmetic in every number type, on every target.

use std::fmt::Debug;

use cudarc::driver::DeviceRepr;

use crate::gpu::{Gpu, assert_same, floats, ints, launch, random};

const FILE: &str = "elementwise.sm_80";
const SIZES: [usize; 5] = [1, 31, 64, 129, 1000];

#[test]
fn vector_sums_and_axpy_agree_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    for n in SIZES {
        let (a, b, grid) = (floats(n, 1), floats(n, 2), n.div_ceil(64) as u32);
        let (x, y, out) = (gpu.upload(&a), gpu.upload(&b), gpu.alloc::<f32>(n));
        launch!(gpu, module, "vector_add", grid, 64; &x, &y, &out, &(n as i32));
        let pairs = || a.iter().zip(&b);
        assert_same(
            &format!("vector_add of {n}"),
            &gpu.download(&out),
            &pairs().map(|(a, b)| a + b).collect::<Vec<_>>(),
        );
        // The compiler fuses a product and a sum.
        let want: Vec<f32> = pairs().map(|(a, b)| 1.7f32.mul_add(*a, *b)).collect();
        launch!(gpu, module, "saxpy", grid, 64; &(n as i32), &1.7f32, &x, &y);
        assert_same(&format!("saxpy of {n}"), &gpu.download(&y), &want);
        for (blocks, threads) in [(1, 32), (3, 96)] {
            let y = gpu.upload(&b);
            launch!(gpu, module, "saxpy_grid_stride", blocks, threads; &n, &1.7f32, &x, &y);
            assert_same(&format!("saxpy_grid_stride of {n}"), &gpu.download(&y), &want);
        }
        let (a, b): (Vec<f64>, Vec<f64>) = pairs().map(|(&a, &b)| (f64::from(a) / 3.0, f64::from(b) / 7.0)).unzip();
        let y = gpu.upload(&b);
        launch!(gpu, module, "daxpy", grid, 64; &(n as i32), &0.3f64, &gpu.upload(&a), &y);
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| 0.3f64.mul_add(*a, *b)).collect();
        assert_same(&format!("daxpy of {n}"), &gpu.download(&y), &want);
    }
}

#[test]
fn gathers_read_the_strided_elements() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let x = ints(1000, -1000..1000, 1);
    let input = gpu.upload(&x);
    for (n, stride, offset) in [(100, 1, 0), (100, 7, 3), (200, -5, 999), (64, 0, 17)] {
        let out = gpu.alloc::<i32>(n);
        launch!(gpu, module, "gather_strided", n.div_ceil(64) as u32, 64; &input, &out, &(n as i32), &stride, &offset);
        let want: Vec<i32> = (0..n as i64).map(|i| x[(i * stride + offset) as usize]).collect();
        assert_same(&format!("gather_strided {stride} {offset}"), &gpu.download(&out), &want);
    }
}

/// Integers to cast to any type: small, extreme and random ones.
fn sample_integers(count: usize, seed: u64) -> Vec<i64> {
    let mut random = random(seed);
    let edges = [
        0,
        1,
        2,
        7,
        -1,
        -2,
        127,
        128,
        255,
        256,
        32767,
        32768,
        i64::from(i32::MAX),
        i64::from(i32::MIN),
        i64::MAX,
        i64::MIN,
    ];
    let mut sample = || match random.u8(..3) {
        0 => edges[random.usize(..edges.len())],
        1 => random.i64(-20..20),
        _ => random.i64(..),
    };
    (0..count).map(|_| sample()).collect()
}

macro_rules! whole_arithmetic {
    ($gpu:ident, $module:ident; $($name:ident),*) => {$({
        let n = 300;
        let cast = |values: Vec<i64>| values.into_iter().map(|value| value as $name).collect::<Vec<_>>();
        let (a, mut b) = (cast(sample_integers(n, 1)), cast(sample_integers(n, 2)));
        for (a, b) in a.iter().zip(&mut b) {
            // Dividing the smallest value by -1 overflows.
            if a.checked_div(*b).is_none() {
                *b = b.wrapping_add(1);
            }
        }
        let results = |(&a, &b): (&$name, &$name)| {
            let (x, y) = (a as i128, b as i128);
            let quotient = x.checked_div(y).unwrap_or(0);
            let rest = x.checked_rem(y).unwrap_or(0);
            [x + y, x - y, x.wrapping_mul(y), quotient, rest, x & y, x ^ !y, (x << (y & 7)) | (x >> (y & 3))].map(|result| result as $name)
        };
        let want: Vec<$name> = a.iter().zip(&b).flat_map(results).collect();
        let name = concat!("arithmetic_", stringify!($name));
        run_and_compare::<$name>(&$gpu, &$module, &format!("{name}"), name, &a, &b, &want);
    })*};
}

/// The kernel for `arithmetic_<Rust type>`: kernels name signed types `s…` instead of `i…`.
fn kernel_name(ty: &str) -> &'static str {
    let all = [
        "arithmetic_s8",
        "arithmetic_u8",
        "arithmetic_s16",
        "arithmetic_u16",
        "arithmetic_s32",
        "arithmetic_u32",
        "arithmetic_s64",
        "arithmetic_u64",
    ];
    all.into_iter().find(|name| name[11..].replace('s', "i") == ty[11..]).unwrap()
}

fn run_and_compare<T: DeviceRepr + PartialEq + Debug>(
    gpu: &Gpu,
    module: &std::sync::Arc<cudarc::driver::CudaModule>,
    what: &str,
    name: &str,
    a: &[T],
    b: &[T],
    want: &[T],
) {
    let out = gpu.alloc::<T>(want.len());
    let n = a.len();
    launch!(gpu, module, kernel_name(name), n.div_ceil(64) as u32, 64; &gpu.upload(a), &gpu.upload(b), &out, &(n as i32));
    assert_same(what, &gpu.download(&out), want);
}

#[test]
fn integer_arithmetic_agrees_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    whole_arithmetic!(gpu, module; i8, u8, i16, u16, i32, u32, i64, u64);
}

/// Special, small and random floats.
fn sample_floats(count: usize, seed: u64) -> Vec<f32> {
    let edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
        -1e-45,
        0.1,
    ];
    let mut random = random(seed);
    let mut sample = || match random.u8(..3) {
        0 => edges[random.usize(..edges.len())],
        1 => random.f32() * 20.0 - 10.0,
        _ => f32::from_bits(random.u32(..)),
    };
    (0..count).map(|_| sample()).collect()
}

macro_rules! float_arithmetic {
    ($gpu:ident, $module:ident, $kernel:literal, $float:ident, $bits:ident, $a:expr, $b:expr) => {{
        let (a, b): (Vec<$float>, Vec<$float>) = ($a, $b);
        let n = a.len();
        let out = $gpu.alloc::<$float>(7 * n);
        launch!($gpu, $module, $kernel, n.div_ceil(64) as u32, 64; &$gpu.upload(&a), &$gpu.upload(&b), &out, &(n as i32));
        let results = |(&x, &y): (&$float, &$float)| [x + y, x - y, x * y, x / y, x.mul_add(y, x), x.min(y), x.max(y)];
        let want: Vec<$float> = a.iter().zip(&b).flat_map(results).collect();
        for (i, (got, want)) in $gpu.download(&out).iter().zip(&want).enumerate() {
            let (x, y) = (a[i / 7], b[i / 7]);
            // For zeros of both signs, min and max may return either.
            let zeros = i % 7 >= 5 && *got == 0.0 && *want == 0.0;
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan() || zeros;
            assert!(same, "{} result {} of {x:e} and {y:e} is {got:e}, expected {want:e}", $kernel, i % 7);
        }
    }};
}

#[test]
fn float_arithmetic_agrees_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    float_arithmetic!(gpu, module, "arithmetic_f32", f32, u32, sample_floats(400, 1), sample_floats(400, 2));
    let wide = |seed| sample_floats(400, seed).into_iter().map(|x| f64::from(x) / 3.0).collect();
    float_arithmetic!(gpu, module, "arithmetic_f64", f64, u64, wide(3), wide(4));
}

macro_rules! compare {
    ($gpu:ident, $module:ident, $kernel:literal, $a:expr, $b:expr, $nan:expr, $infinite:expr) => {{
        let (a, mut b) = ($a, $b);
        for i in (0..b.len()).step_by(5) {
            b[i] = a[i];
        }
        let n = a.len();
        let out = $gpu.alloc::<u32>(n);
        launch!($gpu, $module, $kernel, n.div_ceil(64) as u32, 64; &$gpu.upload(&a), &$gpu.upload(&b), &out, &(n as i32));
        let bits = |(x, y)| {
            let all = [x < y, x <= y, x == y, x != y, x > y, x >= y, $nan(x), $infinite(x)];
            all.iter().enumerate().map(|(bit, &holds)| u32::from(holds) << bit).sum()
        };
        let want: Vec<u32> = a.iter().copied().zip(b.iter().copied()).map(bits).collect();
        assert_same($kernel, &$gpu.download(&out), &want);
    }};
}

#[test]
fn comparisons_agree_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let cast = |seed| sample_integers(300, seed);
    macro_rules! whole {
        ($($kernel:literal $ty:ident),*) => {$({
            let values = |seed| cast(seed).into_iter().map(|value| value as $ty).collect::<Vec<_>>();
            compare!(gpu, module, $kernel, values(1), values(2), |_: $ty| false, |_: $ty| false);
        })*};
    }
    whole!("compare_s32" i32, "compare_u32" u32, "compare_s64" i64, "compare_u64" u64, "compare_s16" i16, "compare_u8" u8);
    compare!(gpu, module, "compare_f32", sample_floats(300, 1), sample_floats(300, 2), f32::is_nan, f32::is_infinite);
    let wide = |seed| sample_floats(300, seed).into_iter().map(f64::from).collect::<Vec<_>>();
    compare!(gpu, module, "compare_f64", wide(1), wide(2), f64::is_nan, f64::is_infinite);
}
