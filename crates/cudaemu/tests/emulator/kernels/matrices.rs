//! Matrices in the registers of a warp: products in each shape and type, and moves.

use half::{bf16, f16};

use crate::gpu::{Gpu, assert_same, launch, random};

/// Element types of matrices.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Type {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
}

impl Type {
    fn bits(self) -> usize {
        match self {
            Self::Tf32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::S8 | Self::U8 => 8,
        }
    }

    /// A bit pattern of a small number, so that sums are exact.
    fn sample(self, random: &mut fastrand::Rng) -> u32 {
        let small = random.i32(-4..=4) as f32;
        match self {
            Self::F16 => f16::from_f32(small).to_bits().into(),
            Self::Bf16 => bf16::from_f32(small).to_bits().into(),
            Self::Tf32 => small.to_bits(),
            _ => random.u32(..) & ((1u64 << self.bits()) - 1) as u32,
        }
    }

    /// The value of a bit pattern.
    fn number(self, pattern: u32) -> f64 {
        match self {
            Self::F16 => f16::from_bits(pattern as u16).to_f64(),
            Self::Bf16 => bf16::from_bits(pattern as u16).to_f64(),
            Self::Tf32 => f32::from_bits(pattern).into(),
            Self::S8 => f64::from(pattern as i8),
            Self::U8 => pattern.into(),
        }
    }
}

/// Type of C and D.
#[derive(Clone, Copy, PartialEq)]
enum AccumulatorType {
    F16,
    F32,
    S32,
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
    let rows: [Row; 12] = [
        ("m16n8k8_f16_f16", [16, 8, 8], F16, F16, AccumulatorType::F16, 75),
        ("m16n8k8_f32_f16", [16, 8, 8], F16, F16, AccumulatorType::F32, 75),
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
    ];
    for target in [75, 80] {
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
            let c: Vec<i32> = (0..m * n).map(|_| random.i32(-100..100)).collect();
            let per = 32 / left.bits();
            let left_words =
                pack_registers(left.bits(), m * k, (0..m * k).map(|i| (place_a(i / k, i % k, per, m), a[i])));
            let right_words =
                pack_registers(right.bits(), k * n, (0..k * n).map(|i| (place_b(i / n, i % n, per), b[i])));
            let pattern = |value: f64| match sum {
                AccumulatorType::F16 => f16::from_f64(value).to_bits().into(),
                AccumulatorType::F32 => (value as f32).to_bits(),
                AccumulatorType::S32 => value as i64 as u32,
            };
            let bits = if sum == AccumulatorType::F16 { 16 } else { 32 };
            let sums = |values: &[f64]| {
                pack_registers(bits, m * n, (0..m * n).map(|i| (place_c(i / n, i % n), pattern(values[i]))))
            };
            let c: Vec<f64> = c.into_iter().map(f64::from).collect();
            let dot = |row: usize, column: usize| -> f64 {
                let term = |i: usize| {
                    let (a, b) = (a[row * k + i], b[i * n + column]);
                    left.number(a) * right.number(b)
                };
                (0..k).map(term).sum()
            };
            let want: Vec<f64> = (0..m * n).map(|i| c[i] + dot(i / n, i % n)).collect();
            let addend = sums(&c);
            let out = gpu.alloc::<u32>(addend.len());
            launch!(gpu, module, &format!("mma_{name}"), 1, 32; &gpu.upload(&left_words), &gpu.upload(&right_words), &gpu.upload(&addend), &out);
            assert_same(&format!("sm_{target} {name}"), &gpu.download(&out), &sums(&want));
        }
    }
}

#[test]
fn matrix_moves_put_every_element_in_its_lane() {
    let gpu = Gpu::new(75);
    let module = gpu.load("matrix_moves.sm_75");
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
            assert_same(&kernel, &gpu.download(&out), &want);
        }
    }
}
