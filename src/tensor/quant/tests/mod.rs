//! Tests of the conversions: against element-wise f64 formulas ([`oracle`]), against blocks worked out by hand, and by error
//! bounds.

mod golden;
pub(crate) mod oracle;

use super::{dequantiser, quantiser};
use crate::tensor::blocks::{self, BlockQ3K, F16Bits};
use crate::tensor::{Capability, DType};

fn convertible_types() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::Convert)
}

/// The types with bounds on the relative squared error of gaussian values.
fn types_with_error_bounds() -> impl Iterator<Item = (DType, f64)> {
    convertible_types().filter_map(|dtype| Some((dtype, dtype.round_trip_error()?)))
}

fn dequantise(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    dequantiser(dtype).unwrap()(bytes, &mut values);
    values
}

fn quantise(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xAA; dtype.row_bytes(values.len()).unwrap()];
    quantiser(dtype).unwrap()(values, &mut bytes);
    bytes
}

fn round_trip(dtype: DType, values: &[f32]) -> Vec<f32> {
    dequantise(dtype, &quantise(dtype, values))
}

fn gaussian(rng: &mut fastrand::Rng, n: usize) -> Vec<f32> {
    let mut normal = || ((-2.0 * (1.0 - rng.f64()).ln()).sqrt() * (std::f64::consts::TAU * rng.f64()).cos()) as f32;
    (0..n).map(|_| normal()).collect()
}

/// Squared error relative to the squared values.
fn nmse(values: &[f32], approximations: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = values.iter().zip(approximations).map(|(&x, &y)| square(f64::from(x) - f64::from(y))).sum();
    error / values.iter().map(|&x| square(f64::from(x))).sum::<f64>()
}

fn max_magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// No product of a block type's factors needs more than the 24 bits of an f32. So only the last step rounds, and the result is
/// the f64 value rounded once.
#[test]
fn every_type_dequantises_by_its_formula() {
    let mut rng = fastrand::Rng::with_seed(1);
    // Scales: zero of both signs, one, subnormals, the largest, and negative ones; then finite random bits.
    let special = [0, 0x8000, 0x3c00, 1, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0xb800];
    for dtype in DType::with_capability(Capability::Decode) {
        for case in 0..200 {
            let mut block: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(dtype.block_bytes()).collect();
            match case % 4 {
                0 => block.fill(0),
                1 => block.fill(0xff),
                _ => {}
            }
            for &at in oracle::half_offsets(dtype) {
                let bits = if rng.bool() { special[rng.usize(..special.len())] } else { rng.u16(..) & 0xbfff };
                block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
            for (j, y) in dequantise(dtype, &block).into_iter().enumerate() {
                let expected = oracle::element(dtype, &block, j) as f32;
                assert!(
                    y == expected || y.is_nan() && expected.is_nan(),
                    "{dtype}[{j}]: {y} for {expected}, {block:?}"
                );
            }
        }
    }
}

#[test]
fn rows_are_converted_block_by_block_at_any_address() {
    let mut rng = fastrand::Rng::with_seed(2);
    for dtype in convertible_types() {
        // Floats are converted in chunks of 256 elements: 600 is more than one chunk, and not a multiple of it.
        let blocks = if dtype.is_block() { 5 } else { 600 };
        let values = gaussian(&mut rng, blocks * dtype.block_len());
        let bytes = quantise(dtype, &values);
        let mut shifted = vec![0; bytes.len() + 1];
        quantiser(dtype).unwrap()(&values, &mut shifted[1..]);
        assert_eq!(bytes, shifted[1..], "{dtype}");
        for bytes in [&bytes, &shifted[1..]] {
            let expected = bytes
                .chunks(dtype.block_bytes())
                .flat_map(|block| (0..dtype.block_len()).map(move |j| oracle::element(dtype, block, j) as f32));
            assert_eq!(dequantise(dtype, bytes), expected.collect::<Vec<_>>(), "{dtype}");
        }
    }
}

#[test]
fn every_half_converts_exactly() {
    for bits in 0..=u16::MAX {
        let (expected, y) = (oracle::half(bits), F16Bits::from_bits(bits).to_f32());
        assert!(f64::from(y) == expected || y.is_nan() && expected.is_nan(), "{bits:#06x}: {y}");
        assert_eq!(y.is_sign_negative(), bits >> 15 == 1, "{bits:#06x}");
        let back = if expected.is_nan() { bits & 0x8000 | 0x7e00 } else { bits };
        assert_eq!(F16Bits::from_f32(y).to_bits(), back, "{bits:#06x}");
    }
}

#[test]
fn f16_rounds_to_nearest_even() {
    let eps = 2f32.powi(-11); // half a unit in the last place of 1
    let tiny = 2f32.powi(-25); // half the smallest subnormal
    for (x, bits) in [
        (1.0 + eps, 0x3c00u16),
        (1.0 + 3.0 * eps, 0x3c02),
        (1.0 + eps + f32::EPSILON, 0x3c01),
        (-1.0 - 3.0 * eps, 0xbc02),
        (tiny, 0x0000),
        (1.0001 * tiny, 0x0001),
        (-3.0 * tiny, 0x8002),
        (2f32.powi(-14) - tiny, 0x0400), // halfway from the largest subnormal to the smallest normal
        (65504.0, 0x7bff),
        (65519.9, 0x7bff),
        (65520.0, 0x7c00),
        (f32::MAX, 0x7c00),
        (f32::NEG_INFINITY, 0xfc00),
        (-0.0, 0x8000),
        (1e-40, 0x0000),
        (f32::from_bits(0x7f80_0001), 0x7e00),
        (f32::from_bits(0xffff_ffff), 0xfe00),
    ] {
        assert_eq!(F16Bits::from_f32(x).to_bits(), bits, "{x}");
        // Both ways of bulk conversion: whole vectors and the rest.
        assert_eq!(quantise(DType::F16, &[x; 9]), bits.to_le_bytes().repeat(9), "{x}");
    }
}

#[test]
fn bf16_rounds_to_nearest_even() {
    for (from, bits) in [
        (0x3f80_8000u32, 0x3f80u16), // tie, even below
        (0x3f81_8000, 0x3f82),       // tie, even above
        (0x3f80_8001, 0x3f81),
        (0x3f80_7fff, 0x3f80),
        (0xbf81_8000, 0xbf82),
        (0x7f7f_ffff, 0x7f80), // f32::MAX
        (0x7f80_0000, 0x7f80),
        (0xff80_0000, 0xff80),
        (0x7f80_0001, 0x7fc0), // signalling NaN
        (0xffff_ffff, 0xffff),
        (0x0000_8000, 0x0000), // subnormal tie
        (0x0001_8000, 0x0002),
        (0x8000_0000, 0x8000),
    ] {
        assert_eq!(quantise(DType::BF16, &[f32::from_bits(from)]), bits.to_le_bytes(), "{from:#010x}");
    }
}

#[test]
fn every_e4m3_converts_exactly() {
    for bits in 0..=u8::MAX {
        let (expected, y) = (oracle::e4m3(bits), dequantise(DType::F8_E4M3, &[bits])[0]);
        assert!(f64::from(y) == expected || y.is_nan() && expected.is_nan(), "{bits:#04x}: {y}");
        assert_eq!(y.is_sign_negative(), bits >> 7 == 1, "{bits:#04x}");
        assert_eq!(quantise(DType::F8_E4M3, &[y]), [if y.is_nan() { 0x7f } else { bits }], "{bits:#04x}");
    }
}

#[test]
fn e4m3_rounds_to_nearest_even_and_saturates() {
    let up = |x: f32| f32::from_bits(x.to_bits() + 1);
    // Between all neighbours: the even one at the middle, else the nearer one.
    for bits in 0..0x7e_u8 {
        let (low, high) = (oracle::e4m3(bits) as f32, oracle::e4m3(bits + 1) as f32);
        let middle = (low + high) / 2.0;
        let below = f32::from_bits(middle.to_bits() - 1);
        for (x, want) in [(below, bits), (middle, bits + bits % 2), (up(middle), bits + 1)] {
            assert_eq!(quantise(DType::F8_E4M3, &[x, -x]), [want, want | 0x80], "{x} of {low} and {high}");
        }
    }
    for (x, bits) in [
        (447.9, 0x7e_u8),
        (464.0, 0x7e), // where the next number would begin
        (f32::MAX, 0x7e),
        (f32::NEG_INFINITY, 0xfe),
        (f32::NAN, 0x7f),
        (-f32::NAN, 0x7f),
        (f32::from_bits(0xff80_0001), 0x7f),
        (-0.0, 0x80),
        (1e-45, 0x00),
        (-1e-40, 0x80),
    ] {
        assert_eq!(quantise(DType::F8_E4M3, &[x]), [bits], "{x}");
    }
}

/// For each block: the values, and the bytes that the formulas of ggml-quants.c give by hand. In the comments, M is the value
/// of largest magnitude (the first of equals), and T is the table of IQ4_NL.
#[test]
fn blocks_match_bytes_worked_out_by_hand() {
    let block = |first: &[f32]| {
        let mut values = [0f32; 32];
        values[..first.len()].copy_from_slice(first);
        values
    };
    let cases = [
        // M = -8, the first of two of that magnitude: d = 1; codes x + 8: 0, 16 capped to 15, 12, and 8 for zeros.
        (DType::Q4_0, block(&[-8.0, 8.0, 3.5]), vec![0x00, 0x3c, 0x80, 0x8f, 0x8c], vec![0x88; 13]),
        // min = -15, max = 15: d = 2, m = -15; codes 0, 15, then (0 + 15) / 2 + 0.5 = 8.
        (DType::Q4_1, block(&[-15.0, 15.0]), vec![0x00, 0x40, 0x80, 0xcb, 0x80, 0x8f], vec![0x88; 14]),
        // M = 16: d = -1; codes 16 - x: 0, 15, then 16 for zeros: fifth bits of all but elements 0 and 1.
        (DType::Q5_0, block(&[16.0, 1.0]), vec![0x00, 0xbc, 0xfc, 0xff, 0xff, 0xff, 0x00, 0x0f], vec![0x00; 14]),
        // min = 0, max = 31: d = 1, m = 0; codes 31, 16, 3 (2.5 rounds up), then 0.
        (DType::Q5_1, block(&[31.0, 16.0, 2.5]), vec![0x00, 0x3c, 0, 0, 0x03, 0, 0, 0, 0x0f, 0x00, 0x03], vec![0; 13]),
        // d = 127 / 127 = 1; halves away from zero: 3 and -3; 0.49999997 is below a half.
        (DType::Q8_0, block(&[127.0, 2.5, -2.5, 0.499_999_97]), vec![0x00, 0x3c, 127, 3, 0xfd, 0], vec![0; 28]),
        // floor(log2 12) - 2 + 127 = 128: unit 1. 12 -> 7; 5 -> tie of 4 and 6 -> 4 (code 4); -0.5 -> tie -> 0;
        // -6 -> 13; -2.5 -> tie of -2 and -3 -> -2 (code 10).
        (DType::MXFP4, block(&[12.0, 5.0, -0.5, -6.0, -2.5]), vec![128, 7, 4, 0, 13, 10], vec![0; 11]),
        // M = 127: codes are chosen with the scale M / T[0] = -1, so 127 is T[0]; -1 is T[8]; 16 is a tie of -10 and -22 and
        // takes -10 (code 7); -7 is a tie of 1 and 13 and takes 13 (code 9). Zeros: 0 is nearest to 1 (code 8). The fit of d:
        // sum(x^3 T) = -127^4 - 1 - 16^3 * 10 - 7^3 * 13 = -260190161, sum(x^2 T^2) = 127^4 + 1 + 25600 + 8281 = 260178523: the
        // quotient -1.0000447 rounds to the half -1.
        (DType::IQ4_NL, block(&[127.0, -1.0, 16.0, -7.0]), vec![0x00, 0xbc, 0x80, 0x88, 0x87, 0x89], vec![0x88; 12]),
        // Zeros everywhere: scale and codes 0.
        (DType::Q8_0, [0.0; 32], vec![0; 6], vec![0; 28]),
    ];
    for (dtype, values, head, tail) in cases {
        assert_eq!(quantise(dtype, &values), [head, tail].concat(), "{dtype}");
    }
}

#[test]
fn rounding_errors_stay_within_the_bound_of_each_type() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..50 {
        let scale = 2f32.powi(rng.i32(-8..8));
        let values: Vec<f32> = gaussian(&mut rng, 32).into_iter().map(|x| x * scale).collect();
        let amax = max_magnitude(&values);
        let (min, max) = values.iter().fold((0f32, 0f32), |(a, b), &x| (a.min(x), b.max(x)));
        // `bound` is half a step. Q4_0 and Q5_0: a whole step, because one end has one code less. Types with a table: half of
        // the table's widest gap. `slack` covers the rounding of the scale to f16, 2^-11 of the value (twice where a minimum is
        // added).
        for (dtype, bound) in [
            (DType::F32, 0.0),
            (DType::F16, amax / 2048.0),
            (DType::BF16, amax / 256.0),
            (DType::F8_E4M3, (amax / 16.0).max(2f32.powi(-10)).max(amax - 448.0)),
            (DType::Q4_0, amax / 8.0),
            (DType::Q4_1, (max - min) / 30.0),
            (DType::Q5_0, amax / 16.0),
            (DType::Q5_1, (max - min) / 62.0),
            (DType::Q8_0, amax / 254.0),
            (DType::MXFP4, amax / 4.0),
            (DType::IQ4_NL, amax * 0.12),
        ] {
            let slack = if dtype.is_block() { amax / 900.0 } else { 0.0 };
            for (x, y) in values.iter().zip(round_trip(dtype, &values)) {
                assert!((x - y).abs() <= bound + slack, "{dtype}: {x} became {y}, amax {amax}");
            }
        }
    }
}

#[test]
fn gaussian_values_round_trip_within_the_error_bound() {
    let mut rng = fastrand::Rng::with_seed(4);
    for scale in [1.0, 0.02, 30.0] {
        let values: Vec<f32> = gaussian(&mut rng, 8192).into_iter().map(|x| x * scale).collect();
        for (dtype, bound) in types_with_error_bounds() {
            let error = nmse(&values, &round_trip(dtype, &values));
            assert!(error < bound, "{dtype} at {scale}: {error}");
        }
    }
}

#[test]
fn sub_blocks_of_different_sizes_and_signs_round_trip_within_the_error_bound() {
    let mut rng = fastrand::Rng::with_seed(5);
    let mut values = gaussian(&mut rng, 4096);
    for (s, sub) in values.chunks_mut(32).enumerate() {
        // All positive, all negative, shifted, small.
        let (scale, offset) = [(1.0, 3.0), (1.0, -3.0), (0.3, -0.5), (0.05, 0.0)][s % 4];
        sub.iter_mut().for_each(|x| *x = *x * scale + offset);
    }
    for (dtype, bound) in types_with_error_bounds() {
        let error = nmse(&values, &round_trip(dtype, &values));
        assert!(error < bound, "{dtype}: {error}");
    }
}

#[test]
fn constant_and_zero_rows_keep_their_value() {
    for dtype in convertible_types() {
        for x in [0f32, 1.0, -1.0, 0.037, -500.0] {
            // 0.004: half a unit of BF16's 8-bit significand. f16 scales are more precise. MXFP4: a scale covers values up to
            // 16 units, but the largest code is 12 units, so a quarter of the value may be lost.
            // F8_E4M3 has a 4-bit significand, and ends at 448.
            let tolerance = match dtype {
                DType::MXFP4 => 0.25,
                DType::F8_E4M3 => 0.11,
                // Scales with 4 bits of significand, 2 of them below a block's value of 0.09.
                DType::NVFP4 => 0.11,
                _ => 0.004,
            };
            for y in round_trip(dtype, &[x; 256]) {
                assert!((y - x).abs() <= tolerance * x.abs(), "{dtype}: {x} became {y}");
            }
        }
    }
}

#[test]
fn extreme_and_non_finite_values_never_panic() {
    let extreme = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-45, -1e-40, 1e5, 0.0, -0.0, 1.0];
    let mut rng = fastrand::Rng::with_seed(6);
    for dtype in convertible_types() {
        for &x in &extreme {
            assert_eq!(round_trip(dtype, &[x; 256]).len(), 256);
        }
        for _ in 0..50 {
            let values: Vec<f32> = (0..256).map(|_| extreme[rng.usize(..extreme.len())]).collect();
            assert_eq!(round_trip(dtype, &values).len(), 256);
        }
        // Values too small for the scale become 0 or stay tiny.
        let lost = round_trip(dtype, &[1e-41; 256]);
        assert!(max_magnitude(&lost) <= 1e-38, "{dtype}: {}", max_magnitude(&lost));
    }
}

#[test]
fn packed_scales_round_trip() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..100 {
        let (scales, mins) = (std::array::from_fn(|_| rng.u8(..64)), std::array::from_fn(|_| rng.u8(..64)));
        assert_eq!(blocks::unpack_scales_mins(&blocks::pack_scales_mins(&scales, &mins)), (scales, mins));
        let scales = std::array::from_fn(|_| rng.i8(-32..32));
        let block = BlockQ3K { scales: BlockQ3K::pack_scales(&scales), ..bytemuck::Zeroable::zeroed() };
        assert_eq!(block.scales(), scales);
    }
}

/// With lengths that do not match, debug builds panic, and release builds convert the whole blocks that both sides have.
#[test]
fn mismatched_lengths_panic_only_in_debug_builds() {
    for dtype in convertible_types() {
        let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
        let cases = [(3 * len, 2 * bytes), (2 * len, 3 * bytes), (3 * len - 1, 3 * bytes - 1)];
        // The third case is a whole row of a type whose elements are single bytes.
        for (values, size) in cases.into_iter().filter(|&(values, size)| dtype.row_bytes(values) != Some(size)) {
            let result = std::panic::catch_unwind(|| {
                let mut row = vec![0; size];
                quantiser(dtype).unwrap()(&vec![1.0; values], &mut row);
                let mut back = vec![-7.0; values];
                dequantiser(dtype).unwrap()(&row, &mut back);
                back
            });
            assert_eq!(result.is_err(), cfg!(debug_assertions), "{dtype}: {values} values, {size} bytes");
            if let Ok(back) = result {
                let whole = (values / len).min(size / bytes) * len;
                assert!(back[..whole].iter().all(|y| (y - 1.0).abs() < 0.13), "{dtype}: {back:?}");
                assert!(back[whole..].iter().all(|&y| y == -7.0), "{dtype}: {back:?}");
            }
        }
    }
}

#[test]
fn only_types_with_the_capability_have_converters() {
    for &dtype in DType::ALL {
        assert_eq!(dequantiser(dtype).is_some(), dtype.can(Capability::Decode), "{dtype}");
        assert_eq!(quantiser(dtype).is_some(), dtype.can(Capability::Convert), "{dtype}");
    }
}
