//! Transposition of small squares of 2-byte or 4-byte units by shuffles that every x86-64 or AArch64 processor has. The
//! compiler does not find these shuffles: its code for the portable version is two to five times slower (measured on x86-64).

/// A vector that every processor has: 16 bytes.
pub(crate) type Vector = [u8; 16];

/// Transposes four rows of four 4-byte units.
#[inline(always)]
pub(crate) fn transpose_4x4_u32(rows: [&Vector; 4]) -> [Vector; 4] {
    #[cfg(target_arch = "x86_64")]
    return x86::transpose_4x4_u32(rows.map(x86::load)).map(x86::store);
    #[cfg(target_arch = "aarch64")]
    return arm::transpose_4x4_u32(rows.map(arm::load)).map(arm::store);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    portable::<4, 4>(rows)
}

/// Transposes eight rows of eight 2-byte units.
#[inline(always)]
pub(crate) fn transpose_8x8_u16(rows: [&Vector; 8]) -> [Vector; 8] {
    #[cfg(target_arch = "x86_64")]
    return x86::transpose_8x8_u16(rows.map(x86::load)).map(x86::store);
    #[cfg(target_arch = "aarch64")]
    return arm::transpose_8x8_u16(rows.map(arm::load)).map(arm::store);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    portable::<8, 2>(rows)
}

#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
fn portable<const N: usize, const UNIT: usize>(rows: [&Vector; N]) -> [Vector; N] {
    std::array::from_fn(|u| std::array::from_fn(|i| rows[i / UNIT][u * UNIT + i % UNIT]))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    #[inline(always)]
    pub(super) fn load(bytes: &Vector) -> __m128i {
        // SAFETY: SSE2 belongs to the architecture; sixteen bytes at any address.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    pub(super) fn store(vector: __m128i) -> Vector {
        let mut bytes = [0; 16];
        // SAFETY: as above.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), vector) };
        bytes
    }

    #[inline(always)]
    pub(super) fn transpose_4x4_u32([a, b, c, d]: [__m128i; 4]) -> [__m128i; 4] {
        // SAFETY: SSE2 belongs to the architecture.
        unsafe {
            let (ab_low, cd_low) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
            [
                _mm_unpacklo_epi64(ab_low, cd_low),
                _mm_unpackhi_epi64(ab_low, cd_low),
                _mm_unpacklo_epi64(ab_high, cd_high),
                _mm_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    pub(super) fn transpose_8x8_u16([a, b, c, d, e, f, g, h]: [__m128i; 8]) -> [__m128i; 8] {
        // Interleaving pairs of rows gives four rows of 4-byte units for each half of the columns.
        // SAFETY: SSE2 belongs to the architecture.
        let (low, high) = unsafe {
            (
                [
                    _mm_unpacklo_epi16(a, b),
                    _mm_unpacklo_epi16(c, d),
                    _mm_unpacklo_epi16(e, f),
                    _mm_unpacklo_epi16(g, h),
                ],
                [
                    _mm_unpackhi_epi16(a, b),
                    _mm_unpackhi_epi16(c, d),
                    _mm_unpackhi_epi16(e, f),
                    _mm_unpackhi_epi16(g, h),
                ],
            )
        };
        let ([a, b, c, d], [e, f, g, h]) = (transpose_4x4_u32(low), transpose_4x4_u32(high));
        [a, b, c, d, e, f, g, h]
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::Vector;
    use std::arch::aarch64::*;

    #[inline(always)]
    pub(super) fn load(bytes: &Vector) -> uint16x8_t {
        // SAFETY: NEON belongs to the architecture; sixteen bytes at any address.
        unsafe { vreinterpretq_u16_u8(vld1q_u8(bytes.as_ptr())) }
    }

    #[inline(always)]
    pub(super) fn store(vector: uint16x8_t) -> Vector {
        let mut bytes = [0; 16];
        // SAFETY: as above.
        unsafe { vst1q_u8(bytes.as_mut_ptr(), vreinterpretq_u8_u16(vector)) };
        bytes
    }

    #[inline(always)]
    pub(super) fn transpose_4x4_u32(rows: [uint16x8_t; 4]) -> [uint16x8_t; 4] {
        // SAFETY: NEON belongs to the architecture.
        unsafe {
            let [a, b, c, d] = rows.map(|row| vreinterpretq_u32_u16(row));
            // Interleaves the even and the odd columns of two rows, then pairs of them.
            let [ab, cd] = [vtrn1q_u32(a, b), vtrn1q_u32(c, d)].map(|pair| vreinterpretq_u64_u32(pair));
            let [ab_odd, cd_odd] = [vtrn2q_u32(a, b), vtrn2q_u32(c, d)].map(|pair| vreinterpretq_u64_u32(pair));
            [vtrn1q_u64(ab, cd), vtrn1q_u64(ab_odd, cd_odd), vtrn2q_u64(ab, cd), vtrn2q_u64(ab_odd, cd_odd)]
                .map(|column| vreinterpretq_u16_u64(column))
        }
    }

    #[inline(always)]
    pub(super) fn transpose_8x8_u16([a, b, c, d, e, f, g, h]: [uint16x8_t; 8]) -> [uint16x8_t; 8] {
        // Interleaving pairs of rows gives four rows of 4-byte units for each half of the columns.
        // SAFETY: as above.
        let (low, high) = unsafe {
            (
                [vzip1q_u16(a, b), vzip1q_u16(c, d), vzip1q_u16(e, f), vzip1q_u16(g, h)],
                [vzip2q_u16(a, b), vzip2q_u16(c, d), vzip2q_u16(e, f), vzip2q_u16(g, h)],
            )
        };
        let ([a, b, c, d], [e, f, g, h]) = (transpose_4x4_u32(low), transpose_4x4_u32(high));
        [a, b, c, d, e, f, g, h]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_match_the_portable_code() {
        let mut rng = fastrand::Rng::with_seed(3);
        let rows: [Vector; 8] = std::array::from_fn(|_| std::array::from_fn(|_| rng.u8(..)));
        let [a, b, c, d, ..] = rows.each_ref();
        assert_eq!(transpose_4x4_u32([a, b, c, d]), portable::<4, 4>([a, b, c, d]));
        assert_eq!(transpose_8x8_u16(rows.each_ref()), portable::<8, 2>(rows.each_ref()));
        // Unit 2 of row 3 must be in column 2.
        assert_eq!(transpose_4x4_u32([a, b, c, d])[2][12..], rows[3][8..12]);
        assert_eq!(transpose_8x8_u16(rows.each_ref())[2][6..8], rows[3][4..6]);
    }
}
