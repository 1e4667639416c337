//! Softmax of rows against double precision.

use crate::gpu::{Gpu, assert_close, launch, random};

fn softmax(row: &[f32]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f32::MIN, f32::max);
    let values: Vec<f64> = row.iter().map(|&value| (f64::from(value) - f64::from(largest)).exp()).collect();
    let sum: f64 = values.iter().sum();
    values.into_iter().map(|value| value / sum).collect()
}

#[test]
fn both_kernels_agree_with_double_precision() {
    let gpu = Gpu::new(80);
    for file in ["softmax.sm_80", "softmax_fast.sm_80"] {
        let module = gpu.load(file);
        for columns in [1, 31, 32, 100, 700] {
            let rows = 5;
            let mut random = random(columns as u64);
            let values: Vec<f32> = (0..rows * columns).map(|_| random.f32() * 24.0 - 12.0).collect();
            let want: Vec<f64> = values.chunks(columns).flat_map(softmax).collect();
            let input = gpu.upload(&values);
            for threads in [32, 96, 256] {
                let out = gpu.alloc::<f32>(values.len());
                launch!(gpu, module, "softmax_block", rows as u32, threads; &input, &out, &(columns as i32));
                assert_close(&format!("{file} softmax_block {columns}"), &gpu.download(&out), &want, 1e-5, 1e-30);
            }
            let out = gpu.alloc::<f32>(values.len());
            launch!(gpu, module, "softmax_online", 2, 96; &input, &out, &(rows as i32), &(columns as i32));
            assert_close(&format!("{file} softmax_online {columns}"), &gpu.download(&out), &want, 1e-5, 1e-30);
        }
    }
}
