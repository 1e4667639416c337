//! Arithmetic on packed 16-bit floats: axpy, sums, activations.

use half::{bf16, f16};

use crate::gpu::{Gpu, assert_close, assert_same, floats, launch, whole_floats};
use crate::reference::{BF16, F16, Format, Round, rounded_sum};

const FILES: [(u32, &str); 3] = [(75, "half_axpy.sm_75"), (80, "half_axpy.sm_80"), (90, "half_axpy.sm_90")];
const SIZES: [usize; 3] = [2, 254, 1000];

fn f16_bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| f16::from_f32(value).to_bits()).collect()
}

fn bf16_bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect()
}

/// `alpha x + y` with one rounding: products of two such numbers and sums of them are exact in f64 at these magnitudes.
fn axpy(number: fn(u16) -> f64, format: Format, alpha: u16, x: &[u16], y: &[u16]) -> Vec<f64> {
    let value = |(&x, &y)| rounded_sum(number(alpha) * number(x), number(y), format, Round::Near);
    x.iter().zip(y).map(value).collect()
}

#[test]
fn axpy_rounds_each_element_once() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        for n in SIZES {
            let (x, y, grid) = (floats(n, 1), floats(n, 2), (n as u32 / 2).div_ceil(64));
            let (hx, hy, alpha) = (f16_bits(&x), f16_bits(&y), f16::from_f32(1.7).to_bits());
            let memory = gpu.upload(&hy);
            launch!(gpu, module, "axpy_half2", grid, 64; &(n as i32), &alpha, &gpu.upload(&hx), &memory);
            let number = |bits| f16::from_bits(bits).to_f64();
            let got: Vec<f64> = gpu.download(&memory).into_iter().map(number).collect();
            assert_same(&format!("{file} axpy_half2 of {n}"), &got, &axpy(number, F16, alpha, &hx, &hy));
            if target < 80 {
                continue;
            }
            let (bx, by, alpha) = (bf16_bits(&x), bf16_bits(&y), bf16::from_f32(1.7).to_bits());
            let memory = gpu.upload(&by);
            launch!(gpu, module, "axpy_bfloat162", grid, 64; &(n as i32), &alpha, &gpu.upload(&bx), &memory);
            let number = |bits| bf16::from_bits(bits).to_f64();
            let got: Vec<f64> = gpu.download(&memory).into_iter().map(number).collect();
            assert_same(&format!("{file} axpy_bfloat162 of {n}"), &got, &axpy(number, BF16, alpha, &bx, &by));
        }
    }
}

#[test]
fn sums_of_whole_numbers_are_exact() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        for n in SIZES {
            let (x, y) = (whole_floats(n, 8, 3), whole_floats(n, 8, 4));
            let (hx, hy) = (gpu.upload(&f16_bits(&x)), gpu.upload(&f16_bits(&y)));
            let out = gpu.zeros::<f32>(1);
            launch!(gpu, module, "dot_half2", 2, 64; &(n as i32), &hx, &hy, &out);
            assert_same(
                &format!("{file} dot_half2 of {n}"),
                &gpu.download(&out),
                &[x.iter().zip(&y).map(|(x, y)| x * y).sum()],
            );
            let out = gpu.zeros::<u16>(2);
            launch!(gpu, module, "sum_half2", 2, 64; &(n as i32), &hx, &out);
            let want = [0, 1].map(|i| f16::from_f32(x[i..].iter().step_by(2).sum()).to_bits());
            assert_same(&format!("{file} sum_half2 of {n}"), &gpu.download(&out), &want);
        }
    }
}

#[test]
fn activations_agree_with_double_precision() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let n = 500;
        let x: Vec<f32> = floats(n, 5).iter().map(|x| x * 8.0).collect();
        let hx = f16_bits(&x);
        let out = gpu.alloc::<u16>(n);
        launch!(gpu, module, "gelu_half", 4, 128; &(n as i32), &gpu.upload(&hx), &out);
        let gelu = |v: f64| 0.5 * v * (1.0 + (0.7978845608 * (v + 0.044715 * v * v * v)).tanh());
        let want: Vec<f64> = hx.iter().map(|&bits| gelu(f16::from_bits(bits).to_f64())).collect();
        let got: Vec<f64> = gpu.download(&out).iter().map(|&bits| f16::from_bits(bits).to_f64()).collect();
        assert_close(&format!("{file} gelu_half"), &got, &want, 6e-4, 2e-6);
        if target < 80 {
            continue;
        }
        let bx = bf16_bits(&x);
        let out = gpu.alloc::<u16>(n);
        launch!(gpu, module, "silu_bfloat16", 4, 128; &(n as i32), &gpu.upload(&bx), &out);
        let want: Vec<f64> =
            bx.iter().map(|&bits| bf16::from_bits(bits).to_f64()).map(|v| v / (1.0 + (-v).exp())).collect();
        let got: Vec<f64> = gpu.download(&out).iter().map(|&bits| bf16::from_bits(bits).to_f64()).collect();
        assert_close(&format!("{file} silu_bfloat16"), &got, &want, 4e-3, 1e-6);
    }
}
