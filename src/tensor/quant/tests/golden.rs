//! Checksums of what ggml's own conversions give (libggml-base of llama.cpp: `dequantize_row_*` and `quantize_row_*_ref`) for
//! numbers that anyone can generate again. A wrong bit anywhere changes them; the other tests tell which.

use super::{dequantise, oracle, quantise};
use crate::tensor::DType;

/// A linear congruential generator of numbers of 24 bits.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as u32
    }
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Blocks of random bytes with finite scales.
fn blocks(dtype: DType, count: usize) -> Vec<u8> {
    let (mut rng, mut bytes) = (Lcg(1), Vec::new());
    for _ in 0..count {
        let start = bytes.len();
        bytes.extend((0..dtype.block_bytes()).map(|_| rng.next() as u8));
        for at in oracle::half_offsets(dtype) {
            bytes[start + at + 1] &= 0xbf;
        }
        match dtype {
            DType::IQ1_M => bytes[start + 55] &= 0xbf,
            DType::Q8_K => bytes[start + 3] &= 0xbf,
            _ => {}
        }
    }
    bytes
}

/// Values between -1 and 1, times a power of two for each sixteen.
fn values(count: usize) -> Vec<f32> {
    let (mut rng, mut scale) = (Lcg(2), 1.0);
    let value = |i: usize| {
        if i.is_multiple_of(16) {
            scale = 2f32.powi((rng.next() % 16) as i32 - 8);
        }
        (rng.next() as i32 - (1 << 23)) as f32 / (1 << 23) as f32 * scale
    };
    (0..count).map(value).collect()
}

/// Type, checksum of the f32 of 16,384 elements, and checksum of the blocks of as many values; without it where ggml has a
/// search or no quantiser.
const GOLDEN: [(DType, u64, Option<u64>); 27] = [
    (DType::Q4_0, 0x7bf8_69ed_9082_ddc5, Some(0x535b_bb4e_7a08_ff0e)),
    (DType::Q4_1, 0x05a6_ee29_799d_4397, Some(0x467b_b227_62a1_1903)),
    (DType::Q5_0, 0xed3f_2e6e_dad8_64fb, Some(0x8993_6f9f_8c5d_55cc)),
    (DType::Q5_1, 0x4408_22cc_1ae0_ecaf, Some(0xda61_7d9c_d005_fbb9)),
    (DType::Q8_0, 0xff75_fe63_d95a_bd99, Some(0xc1a5_913c_d7c6_c28b)),
    (DType::Q8_1, 0x90cf_18d7_f539_6c58, Some(0xf23f_a93d_c081_5a63)),
    (DType::Q8_K, 0xf15c_548e_b018_e014, Some(0x6306_4c7f_a23f_b1c6)),
    (DType::MXFP4, 0x47d6_0a4f_b7e8_e847, Some(0xbf7b_c090_0b13_63d6)),
    (DType::IQ4_NL, 0x98a1_74c2_e010_d3a5, Some(0xbfd1_40c5_179e_e870)),
    (DType::Q2_K, 0x5cbf_01fc_b70b_d7c6, None),
    (DType::Q3_K, 0xbc9c_07f5_24e8_c3d5, None),
    (DType::Q4_K, 0xeb85_74f5_fe1b_f136, None),
    (DType::Q5_K, 0xf207_1863_16ff_162d, None),
    (DType::Q6_K, 0x0dc8_448d_13a8_359a, None),
    (DType::IQ2_XXS, 0x2b15_e003_deb1_723a, None),
    (DType::IQ2_XS, 0x46ec_9946_a7af_4d2d, None),
    (DType::IQ3_XXS, 0x469b_fbd2_934e_1d5d, None),
    (DType::IQ1_S, 0x9bd1_5f1f_6892_7b53, None),
    (DType::IQ3_S, 0x1b57_9983_0b9c_6c3f, None),
    (DType::IQ2_S, 0x31a4_7453_7fab_2869, None),
    (DType::IQ4_XS, 0xe794_9991_d9e9_a8bd, None),
    (DType::IQ1_M, 0x5a58_a62c_22ee_5387, None),
    (DType::TQ1_0, 0x1efc_dacb_0fd6_6b68, Some(0xf14b_4c66_a2b1_99c0)),
    (DType::TQ2_0, 0x927a_63da_49e2_46a1, Some(0x8fdc_6b66_6658_4cc3)),
    (DType::NVFP4, 0x2bd7_21d0_b104_0232, Some(0xc854_62f9_0eb1_ece8)),
    (DType::Q1_0, 0x71dd_b138_1f43_19a5, Some(0x7e47_4de8_b7fa_b367)),
    (DType::Q2_0, 0x2757_8b3f_509f_1063, Some(0xc72d_5e62_c341_6d92)),
];

#[test]
fn conversions_give_the_numbers_of_ggml() {
    for (dtype, dequantised, quantised) in GOLDEN {
        let values_of_blocks = dequantise(dtype, &blocks(dtype, 16384 / dtype.block_len()));
        assert_eq!(checksum(bytemuck::cast_slice(&values_of_blocks)), dequantised, "{dtype}: values");
        if let Some(sum) = quantised {
            assert_eq!(checksum(&quantise(dtype, &values(16384))), sum, "{dtype}: blocks");
        }
    }
}

/// The relative squared error of ggml's IQ4_XS for [`values`] is 0.0044404.
#[test]
fn iq4_xs_is_no_worse_than_ggml() {
    let values = values(65536);
    let error = super::nmse(&values, &super::round_trip(DType::IQ4_XS, &values));
    assert!(error < 1.02 * 0.004_440_4, "{error}");
}
