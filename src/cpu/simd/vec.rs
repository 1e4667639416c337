//! Small dense f32 products: the two halves of attention over one block of positions.
#![allow(unsafe_code)] // one of the modules that DESIGN names

use std::sync::OnceLock;

/// Products of row-major f32 matrices that fit the caches. Chosen once for the processor; see [`Products::get`].
pub(crate) struct Products {
    rows_by_rows: unsafe fn(&mut [f32], &[f32], &[f32], usize),
    add_rows_by_columns: unsafe fn(&mut [f32], &[f32], &[f32], usize),
}

impl Products {
    /// The fastest variant that this processor runs.
    pub(crate) fn get() -> &'static Products {
        static CHOSEN: OnceLock<Products> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::variants().pop().unwrap_or(Self::PORTABLE))
    }

    const PORTABLE: Products =
        Products { rows_by_rows: portable::rows_by_rows, add_rows_by_columns: portable::add_rows_by_columns };

    /// All variants that this processor runs, the fastest last.
    fn variants() -> Vec<Products> {
        #[allow(unused_mut)]
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Products { rows_by_rows: avx2::rows_by_rows, add_rows_by_columns: avx2::add_rows_by_columns });
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Products {
                    rows_by_rows: avx512::rows_by_rows,
                    add_rows_by_columns: avx512::add_rows_by_columns,
                });
            }
        }
        all
    }

    /// `out[r, c] = a[r, :] · b[c, :]`: a `[R, depth]`, b `[C, depth]`, out `[R, C]`.
    ///
    /// # Panics
    /// When the lengths are not those of such matrices.
    pub(crate) fn rows_by_rows(&self, out: &mut [f32], a: &[f32], b: &[f32], depth: usize) {
        assert!(depth > 0 && a.len().is_multiple_of(depth) && b.len().is_multiple_of(depth), "whole rows");
        assert_eq!(out.len(), (a.len() / depth) * (b.len() / depth), "a product per pair of rows");
        // SAFETY: the lengths fit, and the function was put into this value because the processor has what it uses.
        unsafe { (self.rows_by_rows)(out, a, b, depth) }
    }

    /// `acc[r, :] += Σ_c p[r, c] v[c, :]`: p `[R, C]`, v `[C, width]`, acc `[R, width]`.
    ///
    /// # Panics
    /// When the lengths are not those of such matrices.
    pub(crate) fn add_rows_by_columns(&self, acc: &mut [f32], p: &[f32], v: &[f32], width: usize) {
        assert!(width > 0 && acc.len().is_multiple_of(width) && v.len().is_multiple_of(width), "whole rows");
        assert_eq!(p.len(), (acc.len() / width) * (v.len() / width), "a factor per pair of rows");
        // SAFETY: as above.
        unsafe { (self.add_rows_by_columns)(acc, p, v, width) }
    }
}

/// For processors without wide vectors: loops that the compiler turns into whatever every one of them has.
mod portable {
    pub(super) fn rows_by_rows(out: &mut [f32], a: &[f32], b: &[f32], depth: usize) {
        let columns = b.len() / depth;
        for (a, out) in a.chunks_exact(depth).zip(out.chunks_exact_mut(columns.max(1))) {
            for (b, out) in b.chunks_exact(depth).zip(out) {
                *out = dot(a, b);
            }
        }
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0; 8];
        let (blocks, rest) = a.as_chunks::<8>();
        let (b_blocks, b_rest) = b.as_chunks::<8>();
        for (a, b) in blocks.iter().zip(b_blocks) {
            for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                *lane += a * b;
            }
        }
        let rest: f32 = rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
        lanes.iter().sum::<f32>() + rest
    }

    pub(super) fn add_rows_by_columns(acc: &mut [f32], p: &[f32], v: &[f32], width: usize) {
        let columns = v.len() / width;
        for (acc, p) in acc.chunks_exact_mut(width).zip(p.chunks_exact(columns.max(1))) {
            for (v, p) in v.chunks_exact(width).zip(p) {
                for (acc, v) in acc.iter_mut().zip(v) {
                    *acc += p * v;
                }
            }
        }
    }
}

/// The same two products over vectors of `$lanes` floats, in tiles of a few rows by a few columns that stay in registers.
#[cfg(target_arch = "x86_64")]
macro_rules! vector_products {
    ($name:ident, $features:literal, $lanes:literal, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident,
     $total:path) => {
        mod $name {
            use std::arch::x86_64::*;

            /// # Safety
            /// The processor has the features; `a` and `b` hold whole rows of `depth` > 0, `out` one float per pair.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn rows_by_rows(out: &mut [f32], a: &[f32], b: &[f32], depth: usize) {
                let (rows, columns) = (a.len() / depth, b.len() / depth);
                let mut r = 0;
                while r < rows {
                    // SAFETY: each tile lies within rows r.. of `a` and c.. of `b`, by the conditions around it.
                    unsafe {
                        let (a, out) = (a.as_ptr().add(r * depth), out.as_mut_ptr().add(r * columns));
                        let tall = rows - r >= 4;
                        let mut c = 0;
                        while c < columns {
                            let (b, out, left) = (b.as_ptr().add(c * depth), out.add(c), columns - c);
                            c += match (tall, left) {
                                (true, 2..) => dots::<4, 2>(out, columns, a, b, depth),
                                (true, _) => dots::<4, 1>(out, columns, a, b, depth),
                                (false, 4..) => dots::<1, 4>(out, columns, a, b, depth),
                                (false, _) => dots::<1, 1>(out, columns, a, b, depth),
                            };
                        }
                        r += if tall { 4 } else { 1 };
                    }
                }
            }

            /// A tile of `R` by `C` dot products; returns `C`.
            ///
            /// # Safety
            /// `a` and `b` point to `R` and `C` rows of `depth`, `out` to `R` rows `stride` apart with room for `C`.
            #[target_feature(enable = $features)]
            unsafe fn dots<const R: usize, const C: usize>(
                out: *mut f32,
                stride: usize,
                a: *const f32,
                b: *const f32,
                depth: usize,
            ) -> usize {
                let mut sums = [[$zero(); C]; R];
                let whole = depth - depth % $lanes;
                let mut d = 0;
                while d < whole {
                    // SAFETY: `$lanes` floats from d on lie within each row, as d + $lanes ≤ depth.
                    unsafe {
                        let mut column = [$zero(); C];
                        for c in 0..C {
                            column[c] = $load(b.add(c * depth + d));
                        }
                        for r in 0..R {
                            let a = $load(a.add(r * depth + d));
                            for c in 0..C {
                                sums[r][c] = $fma(a, column[c], sums[r][c]);
                            }
                        }
                    }
                    d += $lanes;
                }
                for r in 0..R {
                    for c in 0..C {
                        let mut sum: f32 = $total(sums[r][c]);
                        for d in whole..depth {
                            // SAFETY: d < depth; r and c are below R and C.
                            sum += unsafe { *a.add(r * depth + d) * *b.add(c * depth + d) };
                        }
                        // SAFETY: `out` has R rows with room for C.
                        unsafe { *out.add(r * stride + c) = sum };
                    }
                }
                C
            }

            /// # Safety
            /// The processor has the features; `acc` and `v` hold whole rows of `width` > 0, `p` one float per pair.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn add_rows_by_columns(acc: &mut [f32], p: &[f32], v: &[f32], width: usize) {
                let (rows, columns) = (acc.len() / width, v.len() / width);
                let mut r = 0;
                while r < rows {
                    // SAFETY: each tile lies within rows r.. of `acc` and `p` and columns d.. of `acc` and `v`, by the
                    // conditions around it.
                    unsafe {
                        let (acc, p) = (acc.as_mut_ptr().add(r * width), p.as_ptr().add(r * columns));
                        let tall = rows - r >= 4;
                        let mut d = 0;
                        while d < width {
                            let (acc, v, left) = (acc.add(d), v.as_ptr().add(d), (width - d) / $lanes);
                            d += match (tall, left) {
                                (true, 2..) => add::<4, 2>(acc, p, v, columns, width),
                                (true, 1) => add::<4, 1>(acc, p, v, columns, width),
                                (true, 0) => add_single::<4>(acc, p, v, columns, width),
                                (false, 4..) => add::<1, 4>(acc, p, v, columns, width),
                                (false, 1..) => add::<1, 1>(acc, p, v, columns, width),
                                (false, 0) => add_single::<1>(acc, p, v, columns, width),
                            };
                        }
                        r += if tall { 4 } else { 1 };
                    }
                }
            }

            /// A tile of `R` rows by `W` vectors of the sum; returns its width in floats.
            ///
            /// # Safety
            /// `acc` points to `R` rows and `v` to `columns` rows, both `width` apart and holding `W` vectors; `p` to
            /// `R` rows of `columns`.
            #[target_feature(enable = $features)]
            unsafe fn add<const R: usize, const W: usize>(
                acc: *mut f32,
                p: *const f32,
                v: *const f32,
                columns: usize,
                width: usize,
            ) -> usize {
                let mut sums = [[$zero(); W]; R];
                for c in 0..columns {
                    // SAFETY: c is below `columns`, r below R, w below W.
                    unsafe {
                        let mut row = [$zero(); W];
                        for w in 0..W {
                            row[w] = $load(v.add(c * width + w * $lanes));
                        }
                        for r in 0..R {
                            let p = $splat(*p.add(r * columns + c));
                            for w in 0..W {
                                sums[r][w] = $fma(p, row[w], sums[r][w]);
                            }
                        }
                    }
                }
                let one = $splat(1.0);
                for r in 0..R {
                    for w in 0..W {
                        // SAFETY: as above.
                        unsafe {
                            let at = acc.add(r * width + w * $lanes);
                            $store(at, $fma(one, sums[r][w], $load(at)));
                        }
                    }
                }
                W * $lanes
            }

            /// One column of `R` rows; returns 1.
            ///
            /// # Safety
            /// As `add`, for one float instead of `W` vectors.
            #[target_feature(enable = $features)]
            unsafe fn add_single<const R: usize>(
                acc: *mut f32,
                p: *const f32,
                v: *const f32,
                columns: usize,
                width: usize,
            ) -> usize {
                for r in 0..R {
                    let mut sum = 0.0;
                    for c in 0..columns {
                        // SAFETY: c is below `columns`, r below R.
                        sum += unsafe { *p.add(r * columns + c) * *v.add(c * width) };
                    }
                    // SAFETY: r is below R.
                    unsafe { *acc.add(r * width) += sum };
                }
                1
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector_products!(
    avx2,
    "avx2,fma",
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    super::total_of_8
);

#[cfg(target_arch = "x86_64")]
vector_products!(
    avx512,
    "avx512f",
    16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_reduce_add_ps
);

/// The sum of eight lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn total_of_8(v: std::arch::x86_64::__m256) -> f32 {
    use std::arch::x86_64::*;
    let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, n: usize) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..n).map(|_| rng.f32() * 2.0 - 1.0).collect()
    }

    #[test]
    fn every_variant_gives_the_sums() {
        for variant in Products::variants() {
            for rows in [1, 2, 4, 5, 9] {
                for columns in [1, 2, 3, 4, 7, 64] {
                    for depth in [1, 7, 8, 15, 16, 33, 48, 80] {
                        let (a, b) = (values(1, rows * depth), values(2, columns * depth));
                        let mut out = vec![f32::NAN; rows * columns];
                        variant.rows_by_rows(&mut out, &a, &b, depth);
                        let v = b;
                        let start = a;
                        let mut acc = start.clone();
                        variant.add_rows_by_columns(&mut acc, &out, &v, depth);
                        for r in 0..rows {
                            for c in 0..columns {
                                let dot: f64 = (0..depth)
                                    .map(|d| f64::from(start[r * depth + d]) * f64::from(v[c * depth + d]))
                                    .sum();
                                let got = f64::from(out[r * columns + c]);
                                assert!((got - dot).abs() < 1e-5, "{rows} {columns} {depth}: {got} {dot}");
                            }
                            for d in 0..depth {
                                let sum: f64 = (0..columns)
                                    .map(|c| f64::from(out[r * columns + c]) * f64::from(v[c * depth + d]))
                                    .sum();
                                let want = f64::from(start[r * depth + d]) + sum;
                                let got = f64::from(acc[r * depth + d]);
                                assert!((got - want).abs() < 1e-4, "{rows} {columns} {depth}: {got} {want}");
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
        Products::get().rows_by_rows(&mut [0.0; 3], &[0.0; 4], &[0.0; 4], 2);
    }
}
