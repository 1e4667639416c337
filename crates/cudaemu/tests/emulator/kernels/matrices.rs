//! Matrices in the registers of a warp: products in each shape and type, moves, and the corresponding functions of CUDA C++.

use half::{bf16, f16};

use crate::gpu::{Gpu, assert_close, assert_same, launch, random};

/// Element types of matrices.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Type {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
    S4,
    U4,
    B1,
    E4m3,
    E5m2,
}

impl Type {
    fn bits(self) -> usize {
        match self {
            Self::Tf32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::S8 | Self::U8 | Self::E4m3 | Self::E5m2 => 8,
            Self::S4 | Self::U4 => 4,
            Self::B1 => 1,
        }
    }

    /// A bit pattern of a small number, so that sums are exact.
    fn sample(self, random: &mut fastrand::Rng) -> u32 {
        let small = random.i32(-4..=4) as f32;
        match self {
            Self::F16 => f16::from_f32(small).to_bits().into(),
            Self::Bf16 => bf16::from_f32(small).to_bits().into(),
            Self::Tf32 => small.to_bits(),
            // Sign, three or two bits of exponent around the bias, some fraction bits.
            Self::E4m3 => random.u32(..2) << 7 | random.u32(5..9) << 3 | random.u32(..8),
            Self::E5m2 => random.u32(..2) << 7 | random.u32(13..17) << 2 | random.u32(..4),
            _ => random.u32(..) & ((1u64 << self.bits()) - 1) as u32,
        }
    }

    /// The value of a bit pattern.
    fn number(self, pattern: u32) -> f64 {
        let float = |exponent: u32, bias: i32, fraction: u32, bits: u32| {
            (1.0 + f64::from(fraction) / f64::from(1 << bits)) * 2f64.powi(exponent as i32 - bias)
        };
        let sign = if pattern >> 7 & 1 == 1 { -1.0 } else { 1.0 };
        match self {
            Self::F16 => f16::from_bits(pattern as u16).to_f64(),
            Self::Bf16 => bf16::from_bits(pattern as u16).to_f64(),
            Self::Tf32 => f32::from_bits(pattern).into(),
            Self::S8 => f64::from(pattern as i8),
            Self::S4 => f64::from((pattern << 28) as i32 >> 28),
            Self::U8 | Self::U4 | Self::B1 => pattern.into(),
            Self::E4m3 => sign * float(pattern >> 3 & 15, 7, pattern & 7, 3),
            Self::E5m2 => sign * float(pattern >> 2 & 31, 15, pattern & 3, 2),
        }
    }
}

/// Type of C and D; `Saturating` is S32 with `.satfinite`.
#[derive(Clone, Copy, PartialEq)]
enum AccumulatorType {
    F16,
    F32,
    S32,
    Saturating,
}

/// Position of an element: lane, and index among the lane's elements of the matrix (PTX ISA, "Matrix Fragments for mma"). A
/// register holds `per` elements. Rows 8 and up are in the registers after those of rows 0 to 7, then the upper half of k.
fn place_a(row: usize, k: usize, per: usize, rows: usize) -> (usize, usize) {
    let (part, within) = (k / (4 * per), k % (4 * per));
    let register = part * (rows / 8) + row / 8;
    (row % 8 * 4 + within / per, register * per + within % per)
}

fn place_b(k: usize, column: usize, per: usize) -> (usize, usize) {
    let (part, within) = (k / (4 * per), k % (4 * per));
    (column * 4 + within / per, part * per + within % per)
}

fn place_c(row: usize, column: usize) -> (usize, usize) {
    (row % 8 * 4 + column / 2, row / 8 * 2 + column % 2)
}

/// Packs elements of `bits` bits into each lane's registers.
fn pack_registers(bits: usize, count: usize, elements: impl Iterator<Item = ((usize, usize), u32)>) -> Vec<u32> {
    let registers = count * bits / 32 / 32;
    let mut words = vec![0; 32 * registers];
    for ((lane, at), pattern) in elements {
        words[lane * registers + at * bits / 32] |= pattern << (at * bits % 32);
    }
    words
}

/// (name, shape, element types, accumulator type, first target)
type Row = (&'static str, [usize; 3], Type, Type, AccumulatorType, u32);

#[test]
fn products_of_every_shape_and_type_are_exact() {
    use Type::*;
    let rows: [Row; 23] = [
        ("m16n8k8_f16_f16", [16, 8, 8], F16, F16, AccumulatorType::F16, 75),
        ("m16n8k8_f32_f16", [16, 8, 8], F16, F16, AccumulatorType::F32, 75),
        ("m8n8k16_s32_s8", [8, 8, 16], S8, S8, AccumulatorType::S32, 75),
        ("m8n8k16_s32_u8", [8, 8, 16], U8, U8, AccumulatorType::S32, 75),
        ("m8n8k16_s32_s8_satfinite", [8, 8, 16], S8, S8, AccumulatorType::Saturating, 75),
        ("m8n8k32_s32_s4", [8, 8, 32], S4, S4, AccumulatorType::S32, 75),
        ("m16n8k16_f16_f16", [16, 8, 16], F16, F16, AccumulatorType::F16, 80),
        ("m16n8k16_f32_f16", [16, 8, 16], F16, F16, AccumulatorType::F32, 80),
        ("m16n8k16_f32_bf16", [16, 8, 16], Bf16, Bf16, AccumulatorType::F32, 80),
        ("m16n8k8_f32_bf16", [16, 8, 8], Bf16, Bf16, AccumulatorType::F32, 80),
        ("m16n8k4_f32_tf32", [16, 8, 4], Tf32, Tf32, AccumulatorType::F32, 80),
        ("m16n8k8_f32_tf32", [16, 8, 8], Tf32, Tf32, AccumulatorType::F32, 80),
        ("m16n8k16_s32_s8", [16, 8, 16], S8, S8, AccumulatorType::S32, 80),
        ("m16n8k16_s32_u8_s8", [16, 8, 16], U8, S8, AccumulatorType::S32, 80),
        ("m16n8k32_s32_s8", [16, 8, 32], S8, S8, AccumulatorType::S32, 80),
        ("m16n8k32_s32_u8", [16, 8, 32], U8, U8, AccumulatorType::S32, 80),
        ("m16n8k32_s32_s8_u8_satfinite", [16, 8, 32], S8, U8, AccumulatorType::Saturating, 80),
        ("m16n8k32_s32_s4", [16, 8, 32], S4, S4, AccumulatorType::S32, 80),
        ("m16n8k64_s32_u4", [16, 8, 64], U4, U4, AccumulatorType::S32, 80),
        ("m16n8k128_s32_b1", [16, 8, 128], B1, B1, AccumulatorType::S32, 80),
        ("m16n8k32_f32_e4m3", [16, 8, 32], E4m3, E4m3, AccumulatorType::F32, 89),
        ("m16n8k32_f32_e5m2", [16, 8, 32], E5m2, E5m2, AccumulatorType::F32, 89),
        ("m16n8k32_f32_e4m3_e5m2", [16, 8, 32], E4m3, E5m2, AccumulatorType::F32, 89),
    ];
    for target in [75, 80, 89] {
        let gpu = Gpu::new(target);
        let module = gpu.load(&format!("mma_shapes.sm_{target}"));
        for (name, [m, n, k], left, right, sum, first) in rows {
            if target < first {
                continue;
            }
            let mut random = random((m * n * k) as u64);
            let mut sample = |ty: Type, count| (0..count).map(|_| ty.sample(&mut random)).collect::<Vec<u32>>();
            let (a, b) = (sample(left, m * k), sample(right, k * n));
            let mut random = fastrand::Rng::with_seed(1);
            let c: Vec<i32> = (0..m * n)
                .map(|i| match sum {
                    AccumulatorType::Saturating => [i32::MAX - 5, i32::MIN + 5][i % 2],
                    _ => random.i32(-100..100),
                })
                .collect();
            let per = 32 / left.bits();
            let left_words =
                pack_registers(left.bits(), m * k, (0..m * k).map(|i| (place_a(i / k, i % k, per, m), a[i])));
            let right_words =
                pack_registers(right.bits(), k * n, (0..k * n).map(|i| (place_b(i / n, i % n, per), b[i])));
            let pattern = |value: f64| match sum {
                AccumulatorType::F16 => f16::from_f64(value).to_bits().into(),
                AccumulatorType::F32 => (value as f32).to_bits(),
                AccumulatorType::S32 => value as i64 as u32,
                AccumulatorType::Saturating => value as i32 as u32,
            };
            let bits = if sum == AccumulatorType::F16 { 16 } else { 32 };
            let sums = |values: &[f64]| {
                pack_registers(bits, m * n, (0..m * n).map(|i| (place_c(i / n, i % n), pattern(values[i]))))
            };
            let c: Vec<f64> = c.into_iter().map(f64::from).collect();
            let dot = |row: usize, column: usize| -> f64 {
                let term = |i: usize| {
                    let (a, b) = (a[row * k + i], b[i * n + column]);
                    if left == B1 { f64::from(a ^ b) } else { left.number(a) * right.number(b) }
                };
                (0..k).map(term).sum()
            };
            let want: Vec<f64> = (0..m * n).map(|i| c[i] + dot(i / n, i % n)).collect();
            let addend = sums(&c);
            let out = gpu.alloc::<u32>(addend.len());
            launch!(gpu, module, &format!("mma_{name}"), 1, 32; &gpu.upload(&left_words), &gpu.upload(&right_words), &gpu.upload(&addend), &out);
            assert_same(&format!("sm_{target} {name}"), &gpu.download(&out), &sums(&want));
        }
        if target < 80 {
            continue;
        }
        let mut random = random(2);
        let [a, b, c] = [32, 32, 64].map(|count| (0..count).map(|_| random.f64()).collect::<Vec<_>>());
        let out = gpu.alloc::<f64>(64);
        launch!(gpu, module, "mma_m8n8k4_f64", 1, 32; &gpu.upload(&a), &gpu.upload(&b), &gpu.upload(&c), &out);
        // Lane 4 row + k holds A, lane 4 column + k holds B; C has the same layout as in the other shapes.
        let value = |i: usize| {
            let (row, column) = (i / 8, i % 8 / 2 * 2 + i % 2);
            c[i] + (0..4).map(|k| a[4 * row + k] * b[4 * column + k]).sum::<f64>()
        };
        assert_close(
            &format!("sm_{target} m8n8k4_f64"),
            &gpu.download(&out),
            &(0..64).map(value).collect::<Vec<_>>(),
            1e-15,
            0.0,
        );
    }
}

#[test]
fn matrix_moves_put_every_element_in_its_lane() {
    for target in [75, 80, 90] {
        let gpu = Gpu::new(target);
        let module = gpu.load(&format!("matrix_moves.sm_{target}"));
        let mut random = random(3);
        let cells: Vec<u16> = (0..256).map(|_| random.u16(..)).collect();
        let element = |matrix: usize, row: usize, column: usize| u32::from(cells[matrix * 64 + row * 8 + column]);
        // Lane l's part of a matrix: two adjacent elements of row l / 4, or, transposed, of column l / 4.
        let pair = |matrix: usize, lane: usize, transposed: bool| {
            let (row, column) = (lane / 4, lane % 4 * 2);
            let [low, high] = [0, 1].map(|i| match transposed {
                false => element(matrix, row, column + i),
                true => element(matrix, column + i, row),
            });
            low | high << 16
        };
        for (count, name) in [(1, "x1"), (2, "x2"), (4, "x4")] {
            for transposed in [false, true] {
                let kernel = format!("load_matrix_{name}{}", if transposed { "_transposed" } else { "" });
                let out = gpu.alloc::<u32>(32 * count);
                launch!(gpu, module, &kernel, 1, 32; &gpu.upload(&cells), &out);
                let want: Vec<u32> = (0..32 * count).map(|i| pair(i % count, i / count, transposed)).collect();
                assert_same(&format!("sm_{target} {kernel}"), &gpu.download(&out), &want);
            }
        }
        let words: Vec<u32> = (0..32).map(|lane| pair(0, lane, false)).collect();
        let out = gpu.alloc::<u32>(32);
        launch!(gpu, module, "move_matrix", 1, 32; &gpu.upload(&words), &out);
        assert_same(
            &format!("sm_{target} move_matrix"),
            &gpu.download(&out),
            &(0..32).map(|lane| pair(0, lane, true)).collect::<Vec<_>>(),
        );
        if target < 90 {
            continue;
        }
        for (kernel, count, transposed) in [
            ("x1", 1, false),
            ("x2", 2, false),
            ("x4", 4, false),
            ("x2_transposed", 2, true),
            ("x4_transposed", 4, true),
        ] {
            let words: Vec<u32> = (0..32 * count).map(|i| pair(i % count, i / count, transposed)).collect();
            let out = gpu.alloc::<u16>(256);
            launch!(gpu, module, &format!("store_matrix_{kernel}"), 1, 32; &gpu.upload(&words), &out);
            let want: Vec<u16> = (0..256).map(|i| if i < 64 * count { cells[i] } else { 0 }).collect();
            assert_same(&format!("sm_{target} store_matrix_{kernel}"), &gpu.download(&out), &want);
        }
    }
}

/// `d[m × n]` from functions of row and column.
fn exact_product(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|j| a(i / n, j) * b(j, i % n)).sum()).collect()
}

#[test]
fn wmma_functions_give_the_exact_product() {
    for target in [75, 80] {
        let gpu = Gpu::new(target);
        let module = gpu.load(&format!("wmma.sm_{target}"));
        let mut random = random(4);
        let [a, b, c] = [0, 1, 2].map(|_| (0..512).map(|_| f64::from(random.i32(-4..=4))).collect::<Vec<f64>>());
        let halves = |values: &[f64]| {
            gpu.upload(&values.iter().map(|&value| f16::from_f64(value).to_bits()).collect::<Vec<_>>())
        };

        let out = gpu.alloc::<f32>(256);
        let addend = gpu.upload(&c[..256].iter().map(|&value| value as f32).collect::<Vec<_>>());
        launch!(gpu, module, "wmma_f16_f32", 1, 32; &halves(&a), &halves(&b), &addend, &out);
        let want = exact_product(16, 16, 16, |row, k| a[row * 16 + k], |k, column| b[column * 16 + k]);
        let want: Vec<f64> = want.iter().zip(&c).map(|(product, c)| (product + c) * 2.0).collect();
        assert_close(&format!("sm_{target} wmma_f16_f32"), &gpu.download(&out), &want, 0.0, 0.0);

        let out = gpu.alloc::<u16>(256);
        launch!(gpu, module, "wmma_f16_f16", 1, 32; &halves(&a), &halves(&b), &out);
        let want = exact_product(16, 16, 16, |row, k| a[k * 16 + row], |k, column| b[k * 16 + column]);
        let got = gpu.download(&out);
        let got: Vec<f64> = (0..256).map(|i| f16::from_bits(got[i % 16 * 16 + i / 16]).to_f64()).collect();
        assert_close(&format!("sm_{target} wmma_f16_f16"), &got, &want, 0.0, 0.0);

        let bytes = |values: &[f64]| gpu.upload(&values.iter().map(|&value| value as i8).collect::<Vec<_>>());
        let out = gpu.alloc::<i32>(256);
        launch!(gpu, module, "wmma_s8", 1, 32; &bytes(&a), &bytes(&b), &out);
        let want = exact_product(32, 8, 16, |row, k| a[row * 16 + k], |k, column| b[column * 16 + k]);
        assert_close(
            &format!("sm_{target} wmma_s8"),
            &gpu.download(&out),
            &want.iter().map(|value| value + 7.0).collect::<Vec<_>>(),
            0.0,
            0.0,
        );
        if target < 80 {
            continue;
        }
        let shorts = |values: &[f64]| {
            gpu.upload(&values.iter().map(|&value| bf16::from_f64(value).to_bits()).collect::<Vec<_>>())
        };
        let out = gpu.alloc::<f32>(256);
        launch!(gpu, module, "wmma_bf16", 1, 32; &shorts(&a), &shorts(&b), &out);
        let want = exact_product(8, 32, 16, |row, k| a[row * 16 + k], |k, column| b[k * 32 + column]);
        assert_close("wmma_bf16", &gpu.download(&out), &want, 0.0, 0.0);

        let singles = |values: &[f64]| gpu.upload(&values.iter().map(|&value| value as f32).collect::<Vec<_>>());
        let out = gpu.alloc::<f32>(256);
        launch!(gpu, module, "wmma_tf32", 1, 32; &singles(&a), &singles(&b), &out);
        let want = exact_product(16, 16, 8, |row, k| a[row * 8 + k], |k, column| b[column * 8 + k]);
        assert_close("wmma_tf32", &gpu.download(&out), &want, 0.0, 0.0);
    }
}
