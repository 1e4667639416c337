//! Transposition of matrices of whole tiles and with partial tiles at the edges.

use crate::gpu::{Gpu, assert_same, launch};

#[test]
fn every_kernel_transposes_whole_and_partial_tiles() {
    let kernels = ["transpose_naive", "transpose_tiled", "transpose_padded", "transpose_swizzled"];
    let gpu = Gpu::new(80);
    let module = gpu.load("transpose.sm_80");
    for kernel in kernels {
        for (rows, columns) in [(1, 1), (32, 32), (33, 65), (64, 96), (7, 100), (100, 3)] {
            let values: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            let (input, out) = (gpu.upload(&values), gpu.alloc::<f32>(values.len()));
            let grid = (columns as u32).div_ceil(32);
            let grid = (grid, (rows as u32).div_ceil(32));
            launch!(gpu, module, kernel, grid, (32, 8); &input, &out, &(rows as i32), &(columns as i32));
            let want: Vec<f32> = (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
            assert_same(&format!("{kernel} {rows} x {columns}"), &gpu.download(&out), &want);
        }
    }
}
