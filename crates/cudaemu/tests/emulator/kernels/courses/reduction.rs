//! Reductions: sums of integers as floats, which are exact in any order, and arg max.

use crate::gpu::{Gpu, assert_same, floats, launch, whole_floats};

const SIZES: [usize; 7] = [1, 31, 256, 257, 511, 1000, 5000];

#[test]
fn every_reduction_gives_the_exact_sum() {
    // (kernel, elements per block)
    let kernels = [
        ("reduce_interleaved", 256),
        ("reduce_bank_conflicts", 256),
        ("reduce_sequential", 256),
        ("reduce_first_add", 512),
        ("reduce_shuffle", 1024),
    ];
    let gpu = Gpu::new(80);
    let module = gpu.load("reduction.sm_80");
    for (kernel, per_block) in kernels {
        for n in SIZES {
            let values = whole_floats(n, 100, n as u64);
            let (input, out) = (gpu.upload(&values), gpu.zeros::<f32>(1));
            launch!(gpu, module, kernel, n.div_ceil(per_block) as u32, 256; &input, &out, &(n as i32));
            assert_same(&format!("{kernel} of {n}"), &gpu.download(&out), &[values.iter().sum()]);
        }
    }
    for n in [4, 1000, 4096] {
        let values = whole_floats(n, 100, n as u64);
        let (input, out) = (gpu.upload(&values), gpu.zeros::<f32>(1));
        launch!(gpu, module, "reduce_vector", 2, 256; &input, &out, &(n as i32));
        assert_same(&format!("reduce_vector of {n}"), &gpu.download(&out), &[values.iter().sum()]);
    }
}

#[test]
fn arg_max_finds_the_first_of_equal_maxima() {
    let gpu = Gpu::new(80);
    let module = gpu.load("reduction.sm_80");
    for n in SIZES {
        let mut values = floats(n, n as u64);
        values[n / 2] = values[n / 3].max(2.0); // twice the largest: the first counts
        values[n / 3] = values[n / 2];
        let (input, best) = (gpu.upload(&values), gpu.zeros::<u64>(1));
        launch!(gpu, module, "arg_max", 3, 256; &input, &best, &(n as i32));
        let largest = values.iter().copied().fold(f32::MIN, f32::max);
        let place = values.iter().position(|&value| value == largest).unwrap();
        assert_eq!(!(gpu.download(&best)[0] as u32) as usize, place, "arg_max of {n}");
    }
}
