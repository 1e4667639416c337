//! `kernels/asm_forms.cu`: instructions that only inline assembly uses.

use half::f16;

use crate::gpu::{Gpu, assert_same, ints, launch, random, whole_floats};

const FILES: [(u32, &str); 2] = [(80, "asm_forms.sm_80"), (90, "asm_forms.sm_90")];

#[test]
fn hints_do_not_change_copies() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let n = 64;
        let values: Vec<u32> = ints(n, 0..i32::MAX, 1).into_iter().map(|x| x as u32).collect();
        let out = gpu.alloc::<u32>(12 * n);
        launch!(gpu, module, "cache_hints", 2, 48; &gpu.upload(&values), &out, &(n as i32));
        assert_same(&format!("{file} cache_hints"), &gpu.download(&out), &values.repeat(12));
    }
}

#[test]
fn red_instructions_combine_the_values_of_all_threads() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let values = ints(96, -1000..1000, 2);
        let words = gpu.upload(&[5u32, 6, 7, 8, u32::MAX, 0, 3, 4, 2, 1]);
        let wide = gpu.upload(&[1u64 << 40, 1 << 63, u64::MAX]);
        let (floats, doubles) = (gpu.upload(&[0.5f32]), gpu.upload(&[0.25f64]));
        launch!(gpu, module, "reductions", 2, 48; &words, &wide, &floats, &doubles, &gpu.upload(&values));
        let sum: i32 = values.iter().sum();
        let all: Vec<u32> = values.iter().map(|&x| x as u32).collect();
        // `inc` from 4 and `dec` from 2 count modulo six, and 96 threads are a multiple of six: both words keep their value.
        let want = [
            5u32.wrapping_add(sum as u32),
            6u32.wrapping_add(sum as u32),
            *values.iter().min().unwrap().min(&7) as u32,
            *all.iter().max().unwrap().max(&8),
            all.iter().fold(u32::MAX, |a, b| a & b),
            all.iter().fold(0, |a, b| a | b),
            all.iter().fold(3, |a, b| a ^ b),
            4,
            2,
            1u32.wrapping_add(sum as u32),
        ];
        assert_same(&format!("{file} words"), &gpu.download(&words), &want);
        let largest = i64::from(*values.iter().max().unwrap()) as u64;
        let and = values.iter().fold(u64::MAX, |a, &b| a & i64::from(b) as u64);
        assert_same(
            &format!("{file} wide"),
            &gpu.download(&wide),
            &[(1u64 << 40).wrapping_add(i64::from(sum) as u64), largest, and],
        );
        assert_same(&format!("{file} floats"), &gpu.download(&floats), &[0.5 + sum as f32]);
        assert_same(&format!("{file} doubles"), &gpu.download(&doubles), &[0.25 + f64::from(sum)]);
    }
}

#[test]
fn packed_atomics_add_both_halves() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let values = whole_floats(2 * 64, 8, 3);
        let pair = |low: f32, high: f32| {
            u32::from(f16::from_f32(low).to_bits()) | u32::from(f16::from_f32(high).to_bits()) << 16
        };
        let words: Vec<u32> = values.chunks(2).map(|both| pair(both[0], both[1])).collect();
        let (cells, out) = (gpu.zeros::<u32>(3), gpu.alloc::<u32>(2 * 64));
        launch!(gpu, module, "packed_atomics", 2, 32; &cells, &gpu.upload(&words), &out);
        let sum = |from: usize| values[from..].iter().step_by(2).sum::<f32>();
        assert_same(
            &format!("{file} packed_atomics"),
            &gpu.download(&cells),
            &[pair(sum(0), sum(1)), pair(sum(0), sum(1)), pair(sum(0), 0.0)],
        );
        let blocks: Vec<u32> =
            words.chunks(32).map(|block| block.iter().fold(0u32, |a, b| a.wrapping_add(*b))).collect();
        let sums: Vec<u32> = gpu.download(&out).iter().skip(1).step_by(2).copied().collect();
        assert_same(&format!("{file} sums of blocks"), &sums, &(0..64).map(|i| blocks[i / 32]).collect::<Vec<_>>());
    }
}

#[test]
fn carry_chains_and_vector_moves_agree_with_wide_integers() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let mut random = random(4);
        let mut word = || [0, 1, u32::MAX, random.u32(..)][random.usize(..4)];
        let n = 100;
        let (a, b): (Vec<u32>, Vec<u32>) = (0..4 * n).map(|_| (word(), word())).unzip();
        let out = gpu.alloc::<u32>(3 * 4 * n);
        launch!(gpu, module, "carry_chains", 2, 64; &gpu.upload(&a), &gpu.upload(&b), &out, &(n as i32));
        let number = |words: &[u32]| words.iter().rev().fold(0u128, |value, &word| value << 32 | u128::from(word));
        let words = |value: u128| [0, 32, 64, 96].map(|shift| (value >> shift) as u32);
        let pairs = || a.chunks(4).zip(b.chunks(4)).map(|(a, b)| (number(a), number(b)));
        let mut want: Vec<u32> = pairs().flat_map(|(a, b)| words(a.wrapping_add(b))).collect();
        want.extend(pairs().flat_map(|(a, b)| words(a.wrapping_sub(b))));
        // Two words of the product, with the carry of the middle terms.
        let product = |(a, b): (&[u32], &[u32])| {
            let low = u64::from(a[0]) * u64::from(b[0]);
            let middle = u64::from(a[0].wrapping_mul(b[1])) + (low >> 32);
            let high = (middle as u32).wrapping_add((middle >> 32) as u32);
            [low as u32, high.wrapping_add(a[1].wrapping_mul(b[0])), 0, 0]
        };
        want.extend(a.chunks(4).zip(b.chunks(4)).flat_map(product));
        assert_same(&format!("{file} carry_chains"), &gpu.download(&out), &want);

        let values: Vec<u64> = a.iter().zip(&b).map(|(&a, &b)| u64::from(a) << 32 | u64::from(b)).take(n).collect();
        let out = gpu.alloc::<u32>(4 * n);
        launch!(gpu, module, "vector_moves", 2, 64; &gpu.upload(&values), &out, &(n as i32));
        let mut want: Vec<u32> = values.iter().map(|&x| x as u32).collect();
        want.extend(values.iter().map(|&x| (x >> 32) as u32));
        want.extend(values.iter().map(|&x| (x >> 48) as u32 | (x as u32) << 16));
        want.extend(values.iter().map(|&x| (x >> 32) as u32));
        assert_same(&format!("{file} vector_moves"), &gpu.download(&out), &want);
    }
}

/// Columns for which one line of host code computes the expected value; the other instructions have separate tests.
#[test]
fn bit_operations_agree_with_the_host() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let mut random = random(6);
        let mut word = || [0, 1, 31, 32, 0x8000_0000, 0x7fff_ffff, u32::MAX, random.u32(..)][random.usize(..8)];
        let n = 400;
        let [a, b, c] = [0; 3].map(|_| (0..n).map(|_| word()).collect::<Vec<u32>>());
        let out = gpu.alloc::<u32>(48 * n);
        launch!(gpu, module, "bit_operations", 7, 64; &gpu.upload(&a), &gpu.upload(&b), &gpu.upload(&c), &out, &(n as i32));
        let got = gpu.download(&out);
        for i in 0..n {
            let (x, y, z) = (a[i], b[i], c[i]);
            let (s, t) = (x as i32, y as i32);
            let both = u64::from(y) << 32 | u64::from(x);
            let shift = u64::from(z.min(32));
            let dot = |x: [i64; 4], y: [i64; 4]| x.iter().zip(y).map(|(x, y)| x * y).sum::<i64>() as u32;
            let (signed, unsigned) =
                (|x: u32| x.to_le_bytes().map(|b| i64::from(b as i8)), |x: u32| x.to_le_bytes().map(i64::from));
            let high = ((i64::from(s) * i64::from(t)) >> 32) as i32;
            let want = [
                (0, x ^ y ^ z),
                (1, x & y | !x & z),
                (2, (both << (z & 31) >> 32) as u32),
                (3, (both >> (z & 31)) as u32),
                (4, ((u128::from(both) << shift) >> 32) as u32),
                (5, (both >> shift) as u32),
                (16, if x == 0 { u32::MAX } else { x.ilog2() }),
                (19, u32::from(x == 0)),
                (24, x.abs_diff(y).wrapping_add(z)),
                (28, dot(unsigned(x), signed(y)).wrapping_add(z)),
                (29, dot(signed(x), unsigned(y)).wrapping_add(z)),
                (32, high.wrapping_add(z as i32) as u32),
                (33, high.saturating_add(z as i32) as u32),
                (34, s.saturating_add(t) as u32),
                (35, s.saturating_sub(t) as u32),
                (36, if z as i32 >= 0 { x } else { y }),
                (37, if s < t { u32::MAX } else { 0 }),
                (39, x.checked_shl(y).unwrap_or(0)),
                (40, (s >> y.min(31)) as u32),
                (44, s.clamp(-128, 127) as u32),
                (45, s.clamp(0, 65535) as u32),
                (47, x.abs_diff(y).wrapping_add(z)),
            ];
            for (column, value) in want {
                let found = got[column * n + i];
                assert_eq!(found, value, "{file} bit_operations: column {column} of {x:#x}, {y:#x}, {z:#x}");
            }
        }
    }
}

/// Forms with flushing, saturation and directed rounding, on values with normal results.
#[test]
fn float_modifiers_give_exactly_rounded_results() {
    use crate::reference::{Exact, F32, Round, rounded_sum};
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let [a, b, c] = [7, 8, 9].map(|seed| crate::gpu::floats(300, seed));
        let out = gpu.alloc::<f32>(28 * 300);
        launch!(gpu, module, "float_forms", 5, 64; &gpu.upload(&a), &gpu.upload(&b), &gpu.upload(&c), &out, &300);
        let got = gpu.download(&out);
        for i in 0..300 {
            let [x, y, z] = [a[i], b[i], c[i]].map(f64::from);
            let near = |exact: Exact| exact.round(F32, Round::Near);
            let saturated = |value: f64| value.clamp(0.0, 1.0) + 0.0;
            let want = [
                (0, rounded_sum(x, y, F32, Round::Near)),
                (1, saturated(rounded_sum(x, y, F32, Round::Zero))),
                (2, rounded_sum(x, -y, F32, Round::Up)),
                (3, saturated(near(Exact(x * y, 0.0)))),
                (4, rounded_sum(x * y, z, F32, Round::Near)),
                (5, saturated(rounded_sum(x * y, z, F32, Round::Down))),
                (6, rounded_sum(x * y, z, F32, Round::Near)),
                (7, near(Exact::quotient(x, y))),
                (8, x.min(y)),
                (9, x.max(y)),
                // The sign of the first operand with the magnitude of the second.
                (11, y.copysign(x)),
                (12, x.abs()),
                (13, -x),
                (14, x.round_ties_even()),
                (16, saturated(x)),
                (17, near(Exact::quotient(1.0, x))),
                (20, if z >= 0.0 { x } else { y }),
                (21, if x <= y { 1.0 } else { 0.0 }),
            ];
            for (column, value) in want {
                let found = f64::from(got[column * 300 + i]);
                assert_eq!(found, value, "{file} float_forms: column {column} of {x:e}, {y:e}, {z:e}");
            }
        }
    }
}

#[test]
fn forms_of_sm_90_give_the_expected_results() {
    let gpu = Gpu::new(90);
    let module = gpu.load("asm_forms.sm_90");
    let (cells, out) = (gpu.alloc::<i32>(64), gpu.alloc::<i32>(64));
    launch!(gpu, module, "produce_and_release", 2, 32; &cells, &41);
    launch!(gpu, module, "wait_and_consume", 2, 32; &cells, &out);
    assert_same("wait_and_consume", &gpu.download(&out), &[42; 64]);

    let out = gpu.alloc::<u32>(64);
    launch!(gpu, module, "elected", 1, 64; &out);
    let got = gpu.download(&out);
    for warp in got.chunks(32) {
        let leader = (warp[0] >> 8) as usize;
        let want: Vec<u32> = (0..32).map(|lane| u32::from(lane == leader) | (leader as u32) << 8).collect();
        assert_same("elected", warp, &want);
    }

    let values = whole_floats(64, 100, 5);
    let (cells, packed) = (gpu.zeros::<f32>(8), gpu.zeros::<u32>(1));
    launch!(gpu, module, "vector_atomics", 2, 32; &cells, &gpu.upload(&values), &packed);
    let sum: f32 = values.iter().sum();
    assert_same("vector_atomics", &gpu.download(&cells), &[sum, 64.0, -sum, 32.0, sum, 128.0, 0.0, 0.0]);
    assert_same("packed", &gpu.download(&packed), &[0x4280_4280]);
}
