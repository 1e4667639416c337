//! Convolutions with a filter in constant memory, and a step of the heat equation.

use crate::gpu::{Gpu, assert_close, floats, launch};

const RADIUS: i32 = 3;

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn one_dimensional_convolutions_agree_with_double_precision() {
    let gpu = Gpu::new(80);
    let module = gpu.load("stencil.sm_80");
    let filter = floats(7, 1);
    gpu.set_global(&module, "filter_1d", &le_bytes(&filter));
    for n in [1, 2, 128, 131, 500] {
        let values = floats(n, n as u64);
        let input = gpu.upload(&values);
        let at = |i: i32| if (0..n as i32).contains(&i) { f64::from(values[i as usize]) } else { 0.0 };
        let want: Vec<f64> = (0..n as i32)
            .map(|i| (-RADIUS..=RADIUS).map(|k| f64::from(filter[(k + RADIUS) as usize]) * at(i + k)).sum())
            .collect();
        for kernel in ["convolve_1d_naive", "convolve_1d_tiled"] {
            let out = gpu.alloc::<f32>(n);
            launch!(gpu, module, kernel, n.div_ceil(128) as u32, 128; &input, &out, &(n as i32));
            assert_close(&format!("{kernel} of {n}"), &gpu.download(&out), &want, 0.0, 1e-6);
        }
    }
}

#[test]
fn two_dimensional_convolution_agrees_with_double_precision() {
    let gpu = Gpu::new(80);
    let module = gpu.load("stencil.sm_80");
    let filter = floats(49, 2);
    gpu.set_global(&module, "filter_2d", &le_bytes(&filter));
    for (width, height) in [(1u32, 1u32), (16, 16), (17, 5), (40, 33)] {
        let values = floats((width * height) as usize, 3);
        let out = gpu.alloc::<f32>(values.len());
        let grid = (width.div_ceil(16), height.div_ceil(16));
        launch!(gpu, module, "convolve_2d_tiled", grid, (16, 16); &gpu.upload(&values), &out, &(width as i32), &(height as i32));
        let (columns, rows) = (i64::from(width), i64::from(height));
        let at = |x: i64, y: i64| {
            let inside = (0..columns).contains(&x) && (0..rows).contains(&y);
            if inside { f64::from(values[(y * columns + x) as usize]) } else { 0.0 }
        };
        let sum = |x, y| {
            let part = |k: i64| f64::from(filter[k as usize]) * at(x + k % 7 - 3, y + k / 7 - 3);
            (0..49).map(part).sum()
        };
        let want: Vec<f64> = (0..columns * rows).map(|i| sum(i % columns, i / columns)).collect();
        assert_close(&format!("convolve_2d_tiled {width} x {height}"), &gpu.download(&out), &want, 0.0, 3e-6);
    }
}

#[test]
fn a_heat_step_in_three_dimensions_agrees_with_double_precision() {
    let gpu = Gpu::new(80);
    let module = gpu.load("stencil.sm_80");
    for [nx, ny, nz] in [[3, 3, 3], [18, 17, 5], [40, 20, 4]] {
        let values = floats(nx * ny * nz, 4);
        let (input, out) = (gpu.upload(&values), gpu.upload(&values));
        let grid = (nx.div_ceil(16) as u32, ny.div_ceil(16) as u32);
        let extents = [nx, ny, nz].map(|extent| extent as i32);
        launch!(gpu, module, "heat_3d", grid, (16, 16); &input, &out, &extents[0], &extents[1], &extents[2], &0.1f32);
        let at = |x: usize, y: usize, z: usize| f64::from(values[(z * ny + y) * nx + x]);
        let step = |x: usize, y: usize, z: usize| {
            let edge = [(x, nx), (y, ny), (z, nz)].iter().any(|&(i, n)| i == 0 || i == n - 1);
            if edge {
                return at(x, y, z);
            }
            let around = at(x - 1, y, z) + at(x + 1, y, z) + at(x, y - 1, z) + at(x, y + 1, z);
            let around = around + at(x, y, z - 1) + at(x, y, z + 1);
            at(x, y, z) + f64::from(0.1f32) * (around - 6.0 * at(x, y, z))
        };
        let want: Vec<f64> = (0..values.len()).map(|i| step(i % nx, i / nx % ny, i / nx / ny)).collect();
        assert_close(&format!("heat_3d {nx} x {ny} x {nz}"), &gpu.download(&out), &want, 0.0, 1e-6);
    }
}
