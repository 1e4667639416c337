//! Small GEMMs of attention: scores = Q Kᵀ and output += weights V, over one block of positions.
//!
//! There are two forms. For few queries, the rows of K and V are read in place, as f16 or f32, each once for four queries
//! ([`AttentionGemm::mul_transposed`], [`AttentionGemm::mul_add`]). For many queries, the block is converted to f32 and
//! vectors run along the queries ([`AttentionGemm::mul_columns`]), so that no sum crosses vector lanes. Convolutions and the
//! lightning indexer use that form too.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod register_tiles;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use half::f16;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of floats, read in place.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows<'a> {
    start: *const u8,
    /// Bytes from one row to the next.
    stride: usize,
    count: usize,
    width: usize,
    /// Whether elements are f16, otherwise f32; unaligned.
    half: bool,
    _memory: PhantomData<&'a [u8]>,
}

impl<'a> FloatRows<'a> {
    /// Rows of f16 (`half`) or f32.
    ///
    /// # Safety
    /// `count` rows of `width` elements lie `stride` bytes apart from `start` on, live for 'a, and no thread writes them
    /// meanwhile.
    pub(crate) unsafe fn new(start: *const u8, stride: usize, count: usize, width: usize, half: bool) -> FloatRows<'a> {
        FloatRows { start, stride, count, width, half, _memory: PhantomData }
    }

    /// Contiguous rows of f32.
    ///
    /// # Panics
    /// If the last row is incomplete.
    pub(crate) fn contiguous(values: &'a [f32], width: usize) -> FloatRows<'a> {
        assert!(width > 0 && values.len().is_multiple_of(width), "whole rows");
        let (start, count) = (values.as_ptr().cast(), values.len() / width);
        FloatRows { start, stride: width * 4, count, width, half: false, _memory: PhantomData }
    }
}

/// How many rows ahead of its loads a kernel prefetches.
const PREFETCH_ROWS: usize = 16;

impl FloatRows<'_> {
    /// Bytes from the row that is read to the one that is prefetched meanwhile: 0 for rows side by side, which hardware prefetchers
    /// follow, but not the rows of one head of a KV cache, between which other heads lie. Past the last row, that is usually the next
    /// block of the head.
    fn prefetch_distance(&self) -> usize {
        let row = self.width * if self.half { 2 } else { 4 };
        if self.stride > row { PREFETCH_ROWS * self.stride } else { 0 }
    }
}

/// Element `i` of a row.
///
/// # Safety
/// The row has the element, as f16 if `HALF`.
#[inline]
unsafe fn element<const HALF: bool>(row: *const u8, i: usize) -> f32 {
    // SAFETY: as the caller promises.
    unsafe {
        if HALF {
            f16::from_bits(row.cast::<u16>().add(i).read_unaligned()).to_f32()
        } else {
            row.cast::<f32>().add(i).read_unaligned()
        }
    }
}

/// Shape of [`AttentionGemm::mul_columns`].
#[derive(Clone, Copy)]
pub(crate) struct GemmShape {
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result: a multiple of [`COLUMN_MULTIPLE`].
    pub(crate) n: usize,
    /// Length of the sums.
    pub(crate) k: usize,
    /// Elements from one row of `a` to the next.
    pub(crate) row_stride: usize,
    /// Elements from one column of `a` to the next.
    pub(crate) column_stride: usize,
    /// Adds the products to `out` instead of overwriting it.
    pub(crate) add: bool,
}

/// The columns of a [`GemmShape`] are a multiple of this: a whole number of vectors of every instruction set.
pub(crate) const COLUMN_MULTIPLE: usize = 16;

/// GEMM kernels for matrices that fit the caches, for one instruction set. [`AttentionGemm::get`] chooses them once.
pub(crate) struct AttentionGemm {
    mul_transposed: unsafe fn(&mut [f32], &[f32], &FloatRows<'_>),
    mul_add: unsafe fn(&mut [f32], &[f32], &FloatRows<'_>),
    mul_columns: unsafe fn(*mut f32, *const f32, *const f32, &GemmShape),
    to_f32: unsafe fn(&mut [f32], &FloatRows<'_>),
}

impl AttentionGemm {
    /// The fastest kernels of this processor.
    pub(crate) fn get() -> &'static AttentionGemm {
        static CHOSEN: OnceLock<AttentionGemm> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::variants().pop().unwrap_or(Self::PORTABLE))
    }

    const PORTABLE: AttentionGemm = AttentionGemm {
        mul_transposed: portable::mul_transposed,
        mul_add: portable::mul_add,
        mul_columns: portable::mul_columns,
        to_f32: portable::to_f32,
    };

    /// The kernels of all instruction sets of this processor, the fastest last.
    fn variants() -> Vec<AttentionGemm> {
        #[allow(unused_mut)]
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                all.push(AttentionGemm {
                    mul_transposed: x86::avx2::mul_transposed,
                    mul_add: x86::avx2::mul_add,
                    mul_columns: x86::avx2::mul_columns,
                    to_f32: x86::avx2::to_f32,
                });
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(AttentionGemm {
                    mul_transposed: x86::avx512::mul_transposed,
                    mul_add: x86::avx512::mul_add,
                    mul_columns: x86::avx512::mul_columns,
                    to_f32: x86::avx512::to_f32,
                });
            }
        }
        #[cfg(target_arch = "aarch64")]
        all.push(AttentionGemm {
            mul_transposed: arm::neon::mul_transposed,
            mul_add: arm::neon::mul_add,
            mul_columns: arm::neon::mul_columns,
            to_f32: arm::neon::to_f32,
        });
        all
    }

    /// `out[r, c] = a[r, :] · b[c, :]`: a has `[R, width of b]`, out `[R, rows of b]` (row-major).
    ///
    /// # Panics
    /// If the lengths do not fit these shapes.
    pub(crate) fn mul_transposed(&self, out: &mut [f32], a: &[f32], b: &FloatRows<'_>) {
        assert!(b.width > 0 && a.len().is_multiple_of(b.width), "whole rows");
        assert_eq!(out.len(), (a.len() / b.width) * b.count, "a product per pair of rows");
        // SAFETY: the lengths fit, and the function was put into this value because the processor has what it uses.
        unsafe { (self.mul_transposed)(out, a, b) }
    }

    /// `acc[r, :] += Σ_c p[r, c] v[c, :]`: p has `[R, rows of v]`, acc `[R, width of v]` (row-major).
    ///
    /// # Panics
    /// If the lengths do not fit these shapes.
    pub(crate) fn mul_add(&self, acc: &mut [f32], p: &[f32], v: &FloatRows<'_>) {
        assert!(v.width > 0 && acc.len().is_multiple_of(v.width), "whole rows");
        assert_eq!(p.len(), (acc.len() / v.width) * v.count, "a factor per pair of rows");
        // SAFETY: as above.
        unsafe { (self.mul_add)(acc, p, v) }
    }

    /// `out[m, n] = Σ_k a[m, k] b[k, n]`, or added to `out`. `out` and `b` are contiguous; the shape gives the strides of `a`.
    ///
    /// # Panics
    /// If the lengths do not fit the shape.
    pub(crate) fn mul_columns(&self, out: &mut [f32], a: &[f32], b: &[f32], shape: &GemmShape) {
        let GemmShape { m, n, k, row_stride, column_stride, .. } = *shape;
        assert!(m > 0 && k > 0 && n.is_multiple_of(COLUMN_MULTIPLE), "whole vectors");
        assert!(out.len() == m * n && b.len() == k * n, "the lengths of the result and of b fit the shape");
        assert!((m - 1) * row_stride + (k - 1) * column_stride < a.len(), "a has the elements of the shape");
        // SAFETY: as above.
        unsafe { (self.mul_columns)(out.as_mut_ptr(), a.as_ptr(), b.as_ptr(), shape) }
    }

    /// Converts the rows to contiguous f32.
    ///
    /// # Panics
    /// If `out` has another length.
    pub(crate) fn to_f32(&self, out: &mut [f32], rows: &FloatRows<'_>) {
        assert_eq!(out.len(), rows.count * rows.width, "one float for each element");
        // SAFETY: as above.
        unsafe { (self.to_f32)(out, rows) }
    }
}

/// Baseline for processors without these instruction sets: loops that the compiler vectorises.
mod portable {
    use super::{FloatRows, GemmShape, element};

    /// Calls `each(c, d, value)` for the elements of `rows`.
    fn each(rows: &FloatRows<'_>, mut each: impl FnMut(usize, usize, f32)) {
        for c in 0..rows.count {
            for d in 0..rows.width {
                // SAFETY: `rows` has the element, by its construction.
                let value = unsafe {
                    let row = rows.start.add(c * rows.stride);
                    if rows.half { element::<true>(row, d) } else { element::<false>(row, d) }
                };
                each(c, d, value);
            }
        }
    }

    pub(super) fn mul_transposed(out: &mut [f32], a: &[f32], b: &FloatRows<'_>) {
        out.fill(0.0);
        each(b, |c, d, value| {
            for (a, out) in a.chunks_exact(b.width).zip(out.chunks_exact_mut(b.count)) {
                out[c] += a[d] * value;
            }
        });
    }

    pub(super) fn mul_add(acc: &mut [f32], p: &[f32], v: &FloatRows<'_>) {
        each(v, |c, d, value| {
            for (acc, p) in acc.chunks_exact_mut(v.width).zip(p.chunks_exact(v.count)) {
                acc[d] += p[c] * value;
            }
        });
    }

    pub(super) fn to_f32(out: &mut [f32], rows: &FloatRows<'_>) {
        each(rows, |c, d, value| out[c * rows.width + d] = value);
    }

    /// # Safety
    /// The matrices have the shape `s`.
    pub(super) unsafe fn mul_columns(out: *mut f32, a: *const f32, b: *const f32, s: &GemmShape) {
        // SAFETY: the caller guarantees that the result has this shape.
        let out = unsafe { std::slice::from_raw_parts_mut(out, s.m * s.n) };
        // SAFETY: the caller guarantees that `b` has this shape.
        let b = unsafe { std::slice::from_raw_parts(b, s.k * s.n) };
        for (m, out) in out.chunks_exact_mut(s.n).enumerate() {
            if !s.add {
                out.fill(0.0);
            }
            for (k, b) in b.chunks_exact(s.n).enumerate() {
                // SAFETY: m and k are below the shape's.
                let a = unsafe { *a.add(m * s.row_stride + k * s.column_stride) };
                for (out, b) in out.iter_mut().zip(b) {
                    *out += a * b;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, n: usize) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Values that f16 represents exactly.
        (0..n).map(|_| f16::from_f32(rng.f32() * 2.0 - 1.0).to_f32()).collect()
    }

    /// The values as rows of f16 with a gap between rows.
    fn halves(values: &[f32], width: usize) -> Vec<u8> {
        let row = |row: &[f32]| row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).chain([0xff; 6]).collect();
        values.chunks(width).flat_map(|values| -> Vec<u8> { row(values) }).collect()
    }

    #[test]
    fn row_products_match_f64_sums() {
        for variant in AttentionGemm::variants() {
            for rows in [1, 2, 3, 4, 5, 9] {
                for columns in [1, 2, 3, 4, 7, 64] {
                    for depth in [1, 7, 8, 15, 16, 33, 48, 80, 128] {
                        let (a, b) = (values(1, rows * depth), values(2, columns * depth));
                        let bytes = halves(&b, depth);
                        // SAFETY: `halves` made these rows, with a gap of 6 bytes between them.
                        let half = unsafe { FloatRows::new(bytes.as_ptr(), depth * 2 + 6, columns, depth, true) };
                        let mut wide = vec![f32::NAN; b.len()];
                        variant.to_f32(&mut wide, &half);
                        assert_eq!(wide, b);
                        for b_rows in [FloatRows::contiguous(&b, depth), half] {
                            check_row_products(&variant, &a, &b, &b_rows, depth);
                        }
                    }
                }
            }
        }
    }

    fn check_row_products(variant: &AttentionGemm, a: &[f32], b: &[f32], b_rows: &FloatRows<'_>, depth: usize) {
        let (rows, columns) = (a.len() / depth, b.len() / depth);
        let mut out = vec![f32::NAN; rows * columns];
        variant.mul_transposed(&mut out, a, b_rows);
        let mut acc = a.to_vec();
        variant.mul_add(&mut acc, &out, b_rows);
        for r in 0..rows {
            for c in 0..columns {
                let dot: f64 = (0..depth).map(|d| f64::from(a[r * depth + d]) * f64::from(b[c * depth + d])).sum();
                let got = f64::from(out[r * columns + c]);
                assert!((got - dot).abs() < 2e-5, "{rows} {columns} {depth}: {got} {dot}");
            }
            for d in 0..depth {
                let sum: f64 =
                    (0..columns).map(|c| f64::from(out[r * columns + c]) * f64::from(b[c * depth + d])).sum();
                let (got, want) = (f64::from(acc[r * depth + d]), f64::from(a[r * depth + d]) + sum);
                assert!((got - want).abs() < 1e-4, "{rows} {columns} {depth}: {got} {want}");
            }
        }
    }

    #[test]
    fn column_products_match_f64_sums() {
        for variant in AttentionGemm::variants() {
            for m in [1, 2, 5, 6, 7, 13] {
                for n in [16, 32, 48, 64, 80] {
                    for k in [1, 3, 40] {
                        for (row_stride, column_stride) in [(k, 1), (1, m)] {
                            let (a, b) = (values(3, m * k), values(4, k * n));
                            let mut out = vec![f32::NAN; m * n];
                            let shape = GemmShape { m, n, k, row_stride, column_stride, add: false };
                            variant.mul_columns(&mut out, &a, &b, &shape);
                            variant.mul_columns(&mut out, &a, &b, &GemmShape { add: true, ..shape });
                            for (i, got) in out.iter().enumerate() {
                                let term = |d| {
                                    f64::from(a[i / n * row_stride + d * column_stride]) * f64::from(b[d * n + i % n])
                                };
                                let want = 2.0 * (0..k).map(term).sum::<f64>();
                                assert!((f64::from(*got) - want).abs() < 2e-5, "{m} {n} {k}: {got} {want}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a product per pair")]
    fn mismatched_lengths_panic() {
        AttentionGemm::get().mul_transposed(&mut [0.0; 3], &[0.0; 4], &FloatRows::contiguous(&[0.0; 4], 2));
    }
}
