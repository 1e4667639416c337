//! Matrix times vector over q4_0 weights, and the quantisation of the vector.

use half::f16;

use crate::gpu::{Gpu, assert_close, assert_same, floats, launch, random};

/// Bytes of 32 weights, and of 32 values of the vector.
const WEIGHT_BLOCK_BYTES: usize = 18;
const VALUE_BLOCK_BYTES: usize = 36;

fn random_weights(blocks: usize, seed: u64) -> Vec<u8> {
    let mut random = random(seed);
    let block = |_| {
        let scale = f16::from_f32(random.f32() * 0.1 - 0.05).to_le_bytes();
        scale.into_iter().chain((0..16).map(|_| random.u8(..)).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    (0..blocks).flat_map(block).collect()
}

fn dequantise(bytes: &[u8]) -> Vec<f64> {
    let block = |block: &[u8]| {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f64();
        let weight = |j: usize| (block[2 + j % 16] >> (j / 16 * 4) & 15) as f64 - 8.0;
        (0..32).map(|j| scale * weight(j)).collect::<Vec<_>>()
    };
    bytes.chunks(WEIGHT_BLOCK_BYTES).flat_map(block).collect()
}

fn product(matrix: &[f64], vector: &[f64]) -> Vec<f64> {
    matrix.chunks(vector.len()).map(|row| row.iter().zip(vector).map(|(a, x)| a * x).sum()).collect()
}

#[test]
fn both_products_agree_with_double_precision() {
    let gpu = Gpu::new(80);
    let module = gpu.load("matvec_q4_0.sm_80");
    for (rows, columns, threads) in [(1, 32, 32), (8, 64, 128), (8, 1024, 64), (12, 3104, 128)] {
        let (bytes, x) = (random_weights(rows * columns / 32, columns as u64), floats(columns, 1));
        let (matrix, grid) = (dequantise(&bytes), rows as u32 * 32 / threads);
        let (a, vector) = (gpu.upload(&bytes), gpu.upload(&x));
        let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let out = gpu.alloc::<f32>(rows);
        launch!(gpu, module, "matvec_q4_0_f32", grid, threads; &a, &vector, &out, &(columns as i32));
        assert_close(
            &format!("matvec_q4_0_f32 {rows} x {columns}"),
            &gpu.download(&out),
            &product(&matrix, &wide),
            1e-6,
            1e-6 * columns as f64,
        );

        let quantised = gpu.alloc::<u8>(columns / 32 * VALUE_BLOCK_BYTES);
        launch!(gpu, module, "quantize_q8", columns.div_ceil(128) as u32, 128; &vector, &quantised, &(columns as i32));
        let bytes = gpu.download(&quantised);
        for (block, values) in bytes.chunks(VALUE_BLOCK_BYTES).zip(x.chunks(32)) {
            let d = values.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
            let quants: Vec<i8> = values.iter().map(|x| (x / d).round_ties_even() as i8).collect();
            assert_same("quants", &block[4..], &quants.iter().map(|&quant| quant as u8).collect::<Vec<_>>());
            let total: i32 = quants.iter().map(|&quant| i32::from(quant)).sum();
            let head = [d, d * total as f32].map(|value| f16::from_f32(value).to_le_bytes()).concat();
            assert_same("scale and sum", &block[..4], &head);
        }
        let out = gpu.alloc::<f32>(rows);
        launch!(gpu, module, "matvec_q4_0_q8", grid, threads; &a, &quantised, &out, &(columns as i32));
        // The kernel subtracts 8 d_weight × sum, whose sum is rounded to f16: an error of up to 8 d_weight × sum × 2^-11 per
        // block.
        let value = |(i, _): (usize, &f64)| {
            let block = &bytes[i / 32 * VALUE_BLOCK_BYTES..];
            f16::from_le_bytes([block[0], block[1]]).to_f64() * f64::from(block[4 + i % 32] as i8)
        };
        let vector: Vec<f64> = wide.iter().enumerate().map(value).collect();
        let slack = columns as f64 / 32.0 * 8.0 * 0.05 * 8.0 / 2048.0;
        assert_close(
            &format!("matvec_q4_0_q8 {rows} x {columns}"),
            &gpu.download(&out),
            &product(&matrix, &vector),
            1e-5,
            slack,
        );
    }
}
