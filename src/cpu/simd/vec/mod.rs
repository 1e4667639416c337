//! Small dense products: the two halves of attention over one block of positions.
//!
//! Two shapes of them. For few queries the rows of k and v are read where they lie, f16 or f32, each once for four queries
//! ([`Products::rows_by_rows`], [`Products::add_rows_by_columns`]). For many the block is f32 and vectors run along the
//! queries ([`Products::outer`]), so that nothing is summed across a vector.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod tiles;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use half::f16;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of floats that are read where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    start: *const u8,
    /// Bytes from one row to the next.
    stride: usize,
    count: usize,
    width: usize,
    /// f16, else f32; at any address.
    half: bool,
    _memory: PhantomData<&'a [u8]>,
}

impl<'a> Rows<'a> {
    /// Rows of f32 or f16 (`half`).
    ///
    /// # Safety
    /// `count` rows of `width` elements lie `stride` bytes apart from `start` on, live for 'a, and nobody writes them
    /// meanwhile.
    pub(crate) unsafe fn new(start: *const u8, stride: usize, count: usize, width: usize, half: bool) -> Rows<'a> {
        Rows { start, stride, count, width, half, _memory: PhantomData }
    }

    /// Packed rows of f32.
    ///
    /// # Panics
    /// When the last one is not whole.
    pub(crate) fn packed(values: &'a [f32], width: usize) -> Rows<'a> {
        assert!(width > 0 && values.len().is_multiple_of(width), "whole rows");
        let (start, count) = (values.as_ptr().cast(), values.len() / width);
        Rows { start, stride: width * 4, count, width, half: false, _memory: PhantomData }
    }
}

/// Element `i` of a row.
///
/// # Safety
/// The row has it, as an f16 if `HALF`.
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

/// The shape of [`Products::outer`].
#[derive(Clone, Copy)]
pub(crate) struct Outer {
    /// Rows and columns of the result, and the length of the sums. Columns come in multiples of [`COLUMNS`].
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Elements from one row of `a` to the next, and from one of its columns to the next.
    pub(crate) row: usize,
    pub(crate) column: usize,
    /// Whether the products are added to what is there.
    pub(crate) add: bool,
}

/// Columns of [`Outer`] come in multiples of this.
pub(crate) const COLUMNS: usize = 16;

/// Products of matrices that fit the caches. Chosen once for the processor; see [`Products::get`].
pub(crate) struct Products {
    rows_by_rows: unsafe fn(&mut [f32], &[f32], &Rows<'_>),
    add_rows_by_columns: unsafe fn(&mut [f32], &[f32], &Rows<'_>),
    outer: unsafe fn(*mut f32, *const f32, *const f32, &Outer),
    widen: unsafe fn(&mut [f32], &Rows<'_>),
}

impl Products {
    /// The fastest variant that this processor runs.
    pub(crate) fn get() -> &'static Products {
        static CHOSEN: OnceLock<Products> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::variants().pop().unwrap_or(Self::PORTABLE))
    }

    const PORTABLE: Products = Products {
        rows_by_rows: portable::rows_by_rows,
        add_rows_by_columns: portable::add_rows_by_columns,
        outer: portable::outer,
        widen: portable::widen,
    };

    /// All variants that this processor runs, the fastest last.
    fn variants() -> Vec<Products> {
        #[allow(unused_mut)]
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                all.push(Products {
                    rows_by_rows: x86::avx2::rows_by_rows,
                    add_rows_by_columns: x86::avx2::add_rows_by_columns,
                    outer: x86::avx2::outer,
                    widen: x86::avx2::widen,
                });
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Products {
                    rows_by_rows: x86::avx512::rows_by_rows,
                    add_rows_by_columns: x86::avx512::add_rows_by_columns,
                    outer: x86::avx512::outer,
                    widen: x86::avx512::widen,
                });
            }
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Products {
            rows_by_rows: arm::neon::rows_by_rows,
            add_rows_by_columns: arm::neon::add_rows_by_columns,
            outer: arm::neon::outer,
            widen: arm::neon::widen,
        });
        all
    }

    /// `out[r, c] = a[r, :] · b[c, :]`: a `[R, width of b]`, out `[R, rows of b]`.
    ///
    /// # Panics
    /// When the lengths are not those of such matrices.
    pub(crate) fn rows_by_rows(&self, out: &mut [f32], a: &[f32], b: &Rows<'_>) {
        assert!(b.width > 0 && a.len().is_multiple_of(b.width), "whole rows");
        assert_eq!(out.len(), (a.len() / b.width) * b.count, "a product per pair of rows");
        // SAFETY: the lengths fit, and the function was put into this value because the processor has what it uses.
        unsafe { (self.rows_by_rows)(out, a, b) }
    }

    /// `acc[r, :] += Σ_c p[r, c] v[c, :]`: p `[R, rows of v]`, acc `[R, width of v]`.
    ///
    /// # Panics
    /// When the lengths are not those of such matrices.
    pub(crate) fn add_rows_by_columns(&self, acc: &mut [f32], p: &[f32], v: &Rows<'_>) {
        assert!(v.width > 0 && acc.len().is_multiple_of(v.width), "whole rows");
        assert_eq!(p.len(), (acc.len() / v.width) * v.count, "a factor per pair of rows");
        // SAFETY: as above.
        unsafe { (self.add_rows_by_columns)(acc, p, v) }
    }

    /// `out[m, n] = Σ_k a[m, k] b[k, n]`, or added to it; `out` and `b` are packed, the strides of `a` are the shape's.
    ///
    /// # Panics
    /// When the lengths are not those of such matrices.
    pub(crate) fn outer(&self, out: &mut [f32], a: &[f32], b: &[f32], shape: &Outer) {
        let Outer { m, n, k, row, column, .. } = *shape;
        assert!(m > 0 && k > 0 && n.is_multiple_of(COLUMNS), "whole vectors");
        assert!(out.len() == m * n && b.len() == k * n && (m - 1) * row + (k - 1) * column < a.len(), "such matrices");
        // SAFETY: as above.
        unsafe { (self.outer)(out.as_mut_ptr(), a.as_ptr(), b.as_ptr(), shape) }
    }

    /// The rows as packed f32.
    ///
    /// # Panics
    /// When `out` is not as long.
    pub(crate) fn widen(&self, out: &mut [f32], rows: &Rows<'_>) {
        assert_eq!(out.len(), rows.count * rows.width, "as many floats");
        // SAFETY: as above.
        unsafe { (self.widen)(out, rows) }
    }
}

/// For processors without wide vectors: loops that the compiler turns into whatever every one of them has.
mod portable {
    use super::{Outer, Rows, element};

    /// Calls `each(c, d, value)` for the elements of `rows`.
    fn each(rows: &Rows<'_>, mut each: impl FnMut(usize, usize, f32)) {
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

    pub(super) fn rows_by_rows(out: &mut [f32], a: &[f32], b: &Rows<'_>) {
        out.fill(0.0);
        each(b, |c, d, value| {
            for (a, out) in a.chunks_exact(b.width).zip(out.chunks_exact_mut(b.count)) {
                out[c] += a[d] * value;
            }
        });
    }

    pub(super) fn add_rows_by_columns(acc: &mut [f32], p: &[f32], v: &Rows<'_>) {
        each(v, |c, d, value| {
            for (acc, p) in acc.chunks_exact_mut(v.width).zip(p.chunks_exact(v.count)) {
                acc[d] += p[c] * value;
            }
        });
    }

    pub(super) fn widen(out: &mut [f32], rows: &Rows<'_>) {
        each(rows, |c, d, value| out[c * rows.width + d] = value);
    }

    /// # Safety
    /// The matrices are those of the shape.
    pub(super) unsafe fn outer(out: *mut f32, a: *const f32, b: *const f32, s: &Outer) {
        // SAFETY: the length of the shape's matrix.
        let out = unsafe { std::slice::from_raw_parts_mut(out, s.m * s.n) };
        // SAFETY: likewise.
        let b = unsafe { std::slice::from_raw_parts(b, s.k * s.n) };
        for (m, out) in out.chunks_exact_mut(s.n).enumerate() {
            if !s.add {
                out.fill(0.0);
            }
            for (k, b) in b.chunks_exact(s.n).enumerate() {
                // SAFETY: m and k are below the shape's.
                let a = unsafe { *a.add(m * s.row + k * s.column) };
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
        // Values that f16 has too.
        (0..n).map(|_| f16::from_f32(rng.f32() * 2.0 - 1.0).to_f32()).collect()
    }

    /// The values as rows of f16 with a gap between them.
    fn halves(values: &[f32], width: usize) -> Vec<u8> {
        let row = |row: &[f32]| row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).chain([0xff; 6]).collect();
        values.chunks(width).flat_map(|values| -> Vec<u8> { row(values) }).collect()
    }

    #[test]
    fn every_variant_gives_the_sums() {
        for variant in Products::variants() {
            for rows in [1, 2, 3, 4, 5, 9] {
                for columns in [1, 2, 3, 4, 7, 64] {
                    for depth in [1, 7, 8, 15, 16, 33, 48, 80, 128] {
                        let (a, b) = (values(1, rows * depth), values(2, columns * depth));
                        let bytes = halves(&b, depth);
                        // SAFETY: the rows that `halves` made, 6 bytes apart.
                        let half = unsafe { Rows::new(bytes.as_ptr(), depth * 2 + 6, columns, depth, true) };
                        let mut wide = vec![f32::NAN; b.len()];
                        variant.widen(&mut wide, &half);
                        assert_eq!(wide, b);
                        for b_rows in [Rows::packed(&b, depth), half] {
                            sums(&variant, &a, &b, &b_rows, depth);
                        }
                    }
                }
            }
        }
    }

    fn sums(variant: &Products, a: &[f32], b: &[f32], b_rows: &Rows<'_>, depth: usize) {
        let (rows, columns) = (a.len() / depth, b.len() / depth);
        let mut out = vec![f32::NAN; rows * columns];
        variant.rows_by_rows(&mut out, a, b_rows);
        let mut acc = a.to_vec();
        variant.add_rows_by_columns(&mut acc, &out, b_rows);
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
    fn every_variant_gives_outer_products() {
        for variant in Products::variants() {
            for m in [1, 2, 5, 6, 7, 13] {
                for n in [16, 32, 48, 64, 80] {
                    for k in [1, 3, 40] {
                        for (row, column) in [(k, 1), (1, m)] {
                            let (a, b) = (values(3, m * k), values(4, k * n));
                            let mut out = vec![f32::NAN; m * n];
                            let shape = Outer { m, n, k, row, column, add: false };
                            variant.outer(&mut out, &a, &b, &shape);
                            variant.outer(&mut out, &a, &b, &Outer { add: true, ..shape });
                            for (i, got) in out.iter().enumerate() {
                                let term = |d| f64::from(a[i / n * row + d * column]) * f64::from(b[d * n + i % n]);
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
    fn lengths_are_checked() {
        Products::get().rows_by_rows(&mut [0.0; 3], &[0.0; 4], &Rows::packed(&[0.0; 4], 2));
    }
}
