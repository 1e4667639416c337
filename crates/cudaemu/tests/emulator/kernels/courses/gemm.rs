//! Matrix products against double precision.

use half::f16;

use crate::gpu::{Gpu, assert_close, floats, launch};

fn product(a: &[f64], b: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    (0..m * n).map(|at| (0..k).map(|i| a[at / n * k + i] * b[i * n + at % n]).sum()).collect()
}

#[test]
fn f32_products_agree_with_double_precision() {
    // Kernel, rows and columns of a block's tile, threads, shapes.
    type Row = (&'static str, u32, (u32, u32), &'static [[usize; 3]]);
    let rows: [Row; 3] = [
        ("gemm_naive", 16, (16, 16), &[[1, 1, 1], [17, 5, 33], [48, 32, 20]]),
        ("gemm_tiled", 16, (16, 16), &[[1, 1, 1], [16, 16, 16], [17, 33, 5], [50, 20, 70]]),
        ("gemm_registers", 64, (256, 1), &[[64, 64, 16], [128, 64, 48], [64, 192, 32]]),
    ];
    let gpu = Gpu::new(80);
    let module = gpu.load("gemm.sm_80");
    for (kernel, tile, threads, shapes) in rows {
        for &[m, n, k] in shapes {
            let (a, b) = (floats(m * k, 1), floats(k * n, 2));
            let out = gpu.alloc::<f32>(m * n);
            let grid = ((n as u32).div_ceil(tile), (m as u32).div_ceil(tile));
            let extents = [m, n, k].map(|extent| extent as i32);
            launch!(gpu, module, kernel, grid, threads; &gpu.upload(&a), &gpu.upload(&b), &out, &extents[0], &extents[1], &extents[2]);
            let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
            let want = product(&wide(&a), &wide(&b), [m, n, k]);
            assert_close(&format!("{kernel} {m} x {n} x {k}"), &gpu.download(&out), &want, 1e-6, k as f64 * 1.2e-7);
        }
    }
}

#[test]
fn tensor_core_products_agree_with_double_precision() {
    let gpu = Gpu::new(80);
    let module = gpu.load("gemm_mma.sm_80");
    for kernel in ["gemm_mma", "gemm_mma_async"] {
        for [m, n, k] in [[64, 64, 32], [128, 64, 96], [64, 128, 64]] {
            let halves = |count, seed| floats(count, seed).into_iter().map(f16::from_f32).collect::<Vec<_>>();
            let (a, b) = (halves(m * k, 3), halves(k * n, 4));
            let bits = |values: &[f16]| gpu.upload(&values.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
            let out = gpu.alloc::<f32>(m * n);
            let extents = [m, n, k].map(|extent| extent as i32);
            let grid = (n as u32 / 64, m as u32 / 64);
            launch!(gpu, module, kernel, grid, 128; &bits(&a), &bits(&b), &out, &extents[0], &extents[1], &extents[2]);
            let wide = |values: &[f16]| values.iter().map(|value| value.to_f64()).collect::<Vec<_>>();
            let want = product(&wide(&a), &wide(&b), [m, n, k]);
            assert_close(&format!("{kernel} {m} x {n} x {k}"), &gpu.download(&out), &want, 1e-6, k as f64 * 2.4e-7);
        }
    }
}
