//! Row formats: decoding of block types in place, and the instructions that multiply codes.
//!
//! These kernels use no closures around instructions: a closure that is not inlined is compiled without the target
//! features, and each intrinsic becomes a function call. Loops whose counters select instructions are unrolled by [`crate::cpu::simd::unroll`].

use crate::cpu::simd::packing::PackedColumn;
use crate::tensor::DType;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Software prefetch distance of rows in bytes: longer than memory latency needs, far smaller than a cache. Not calibrated.
pub(super) const PREFETCH_DISTANCE: usize = 2048;

/// Reads a block type in ggml's layout, without repacking, 256 elements at a time: a [`BlockFormat`] or a [`SuperblockFormat`].
pub(super) trait RowFormat {
    /// The type.
    const DTYPE: DType;

    /// Bytes of 256 elements.
    const BYTES: usize = Self::DTYPE.block_bytes() * (256 / Self::DTYPE.block_len());

    /// Elements of a sub-block, which share a scale: 16 or 32.
    const SUB: usize;

    /// The dot products of one row with `C` columns.
    ///
    /// # Safety
    /// The processor has the instructions of `P`, AVX2, FMA and F16C. The columns are packed for this format with `padded`
    /// elements. `row` points to `whole` times 256 elements. If `padded` has 256 more, `last` points to those.
    unsafe fn dot_row<P: QuantDot, const C: usize>(
        row: *const u8,
        whole: usize,
        last: *const u8,
        columns: [PackedColumn; C],
        padded: usize,
    ) -> [f32; C];
}

/// A format with blocks of 32 elements, `scale * code + bias` with an f32 scale and bias per block. Columns have a scale per 32
/// elements too.
///
/// # Safety
/// All functions need AVX2, FMA and F16C, and `p` must point to [`RowFormat::BYTES`] readable bytes.
pub(super) trait BlockFormat: RowFormat {
    /// Whether codes are unsigned and at most 128. Otherwise they are i8 and have no bias.
    const UNSIGNED: bool;

    /// Scales and biases of the eight blocks from `p` on.
    unsafe fn scales(p: *const u8) -> Affine;

    /// The codes of elements `32 * j` and following, in order.
    unsafe fn codes(p: *const u8, j: usize) -> __m256i;
}

/// How a [`SuperblockFormat`] gives its codes.
#[derive(PartialEq, Eq)]
pub(super) enum CodeKind {
    /// Unsigned, at most 63, so that the sum of two products with bytes fits 16 bits; the scales have minima.
    Unsigned,
    /// i8, of magnitude up to 127, without minima.
    Signed,
    /// Magnitudes up to 127, and a word whose bit k is set if code k is negative; without minima.
    SignWords,
}

/// A format with superblocks of 256 elements: `d * scale * code + m * min`, with an integer scale and a min per sub-block. Columns have one
/// scale per superblock.
///
/// # Safety
/// As [`BlockFormat`].
pub(super) trait SuperblockFormat: RowFormat {
    /// The kind of the codes.
    const CODES: CodeKind;

    /// Whether all scales are 1.
    const ONE_SCALE: bool;

    /// Fields of all codes of a superblock, taken apart: they are stored once and read part by part.
    type Head;

    /// Scales and minima of the superblock at `p`.
    unsafe fn scales(p: *const u8) -> SuperblockScales;

    /// The head of the superblock at `p`.
    unsafe fn head(p: *const u8) -> Self::Head;

    /// The codes of elements `32 * j` and following, in order, and their signs.
    unsafe fn codes(p: *const u8, head: &Self::Head, j: usize) -> (__m256i, u32);
}

/// Scales and minima of a superblock.
#[derive(Clone, Copy)]
pub(super) struct SuperblockScales {
    /// Factor of the scales, in all lanes.
    pub(super) d: __m256,
    /// Scales as i16. Element j of the lower half belongs to the lower half of the codes `32 * j` and following, element j of the
    /// upper half to the upper half.
    pub(super) scales: __m256i,
    /// Factor of the minima, in all lanes.
    pub(super) m: __m256,
    /// Minima. Sub-blocks of 32 use only the first entry, in order. Sub-blocks of 16 use two entries of eight, each in the order
    /// 0 2 4 6 1 3 5 7, as the sums of a column.
    pub(super) mins: [__m256; 2],
}

/// Scales and biases of eight blocks.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: __m256,
    pub(super) bias: __m256,
}

impl Affine {
    /// The biases of codes with a zero offset: `-zero * scale`.
    #[inline(always)]
    pub(super) unsafe fn offset(scale: __m256, zero: f32) -> Affine {
        // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
        unsafe { Affine { scale, bias: _mm256_mul_ps(scale, _mm256_set1_ps(-zero)) } }
    }
}

/// A dot-product instruction for codes.
///
/// # Safety
/// The functions need the instruction set that the type names.
pub(super) trait QuantDot {
    /// Whether products of any unsigned byte with any signed byte are accumulated in 32 bits.
    const I32_DOT: bool;

    /// `sums[l] + sum of u[4l..4l + 4] * s[4l..4l + 4]`; without `I32_DOT` for `u` up to 128 only.
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i;

    /// The bytes of `y`, negated where a bit of the word is set. None is -128.
    #[inline(always)]
    unsafe fn negate(y: __m256i, word: u32) -> __m256i {
        // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
        unsafe {
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(word as i32), spread);
            let signs = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
            _mm256_sub_epi8(_mm256_xor_si256(y, signs), signs)
        }
    }
}

/// AVX2 without VNNI: pairs of products in 16 bits. `u` up to 128 cannot overflow them, as `s` is at least -127.
pub(super) struct Avx2;

impl QuantDot for Avx2 {
    const I32_DOT: bool = false;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1))) }
    }
}

/// AVX512-VNNI with AVX512-VL and AVX512-BW.
pub(super) struct VnniVl;

impl QuantDot for VnniVl {
    const I32_DOT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: uses registers only; the caller guarantees that the processor has the instruction.
        unsafe { _mm256_dpbusd_epi32(sums, u, s) }
    }

    #[inline(always)]
    unsafe fn negate(y: __m256i, word: u32) -> __m256i {
        // SAFETY: as above; the processor has AVX512-BW too.
        unsafe { _mm256_mask_sub_epi8(y, word, _mm256_setzero_si256(), y) }
    }
}

/// AVX-VNNI: the same instruction on processors without AVX-512.
pub(super) struct Vnni;

impl QuantDot for Vnni {
    const I32_DOT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_dpbusd_avx_epi32(sums, u, s) }
    }
}

/// VNNI's results computed by AVX2: tests the VNNI kernels on processors without the instruction.
#[cfg(test)]
pub(super) struct EmulatedVnni;

#[cfg(test)]
impl QuantDot for EmulatedVnni {
    const I32_DOT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
        unsafe {
            let low = _mm256_set1_epi16(0xff);
            let even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(s)));
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(u), _mm256_srai_epi16::<8>(s));
            _mm256_add_epi32(sums, _mm256_add_epi32(even, odd))
        }
    }
}

/// The same vector, by way of the stack. With AVX-512 the compiler would merge pairs of vectors into one of 512 bits; then port 1 of Intel's
/// cores computes no vectors, and a product takes a third longer.
#[inline(always)]
pub(super) fn opaque(mut vector: __m256i) -> __m256i {
    black_box(&mut vector);
    vector
}

/// The sum of eight lanes.
#[inline(always)]
pub(super) unsafe fn horizontal_sum(x: __m256) -> f32 {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
    }
}
