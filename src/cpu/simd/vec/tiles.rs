//! The products over vectors of a few floats, in tiles of a few rows by a few columns that stay in registers.

/// A module of products over vectors of `$lanes` floats with these operations: tiles of `$dots` columns of dot products,
/// `$sums` vectors of sums, `$outer` vectors of outer products.
macro_rules! vector_products {
    ($name:ident, $features:literal, $lanes:literal, $vector:ident, $zero:ident, $load:ident, $store:ident, $splat:ident,
     $fma:ident, $half:ident, $totals:ident, $dots:literal, $sums:literal, $outer:literal) => {
        pub(super) mod $name {
            use super::*;
            use $crate::cpu::simd::vec::{Outer, Rows, element};

            /// Elements `i` and on of a row.
            ///
            /// # Safety
            /// The row has a vector of them, of f16 if `HALF`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load<const HALF: bool>(row: *const u8, i: usize) -> $vector {
                // SAFETY: as the caller promises; both loads take any address.
                unsafe { if HALF { $half(row.add(2 * i)) } else { $load(row.add(4 * i).cast()) } }
            }

            /// # Safety
            /// The processor has the features; `a` holds whole rows as wide as those of `b`, `out` one float per pair.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn rows_by_rows(out: &mut [f32], a: &[f32], b: &Rows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if b.half { all_dots::<true>(out, a, b) } else { all_dots::<false>(out, a, b) } }
            }

            /// # Safety
            /// As `rows_by_rows`.
            #[target_feature(enable = $features)]
            unsafe fn all_dots<const HALF: bool>(out: &mut [f32], a: &[f32], b: &Rows<'_>) {
                let (rows, columns) = (a.len() / b.width, b.count);
                let mut r = 0;
                while r < rows {
                    let tall = match rows - r {
                        4.. => 4,
                        2.. => 2,
                        _ => 1,
                    };
                    let mut c = 0;
                    while c < columns {
                        // SAFETY: each tile lies within rows r.. of `a` and c.. of `b`, by the conditions around it.
                        unsafe {
                            let a = a.as_ptr().add(r * b.width);
                            let out = out.as_mut_ptr().add(r * columns + c);
                            c += match (tall, columns - c >= $dots) {
                                (4, true) => dots::<HALF, 4, $dots>(out, a, b, c),
                                (4, _) => dots::<HALF, 4, 1>(out, a, b, c),
                                (2, true) => dots::<HALF, 2, $dots>(out, a, b, c),
                                (2, _) => dots::<HALF, 2, 1>(out, a, b, c),
                                (_, true) => dots::<HALF, 1, $dots>(out, a, b, c),
                                _ => dots::<HALF, 1, 1>(out, a, b, c),
                            };
                        }
                    }
                    r += tall;
                }
            }

            /// A tile of `R` by `C` dot products; returns `C`.
            ///
            /// # Safety
            /// `a` points to `R` rows, `b` has `C` from row `first` on; `out` points to `R` rows as long as `b` has rows,
            /// with room for `C`.
            #[target_feature(enable = $features)]
            unsafe fn dots<const HALF: bool, const R: usize, const C: usize>(
                out: *mut f32,
                a: *const f32,
                b: &Rows<'_>,
                first: usize,
            ) -> usize {
                // SAFETY: `$lanes` elements from d on lie within each row, as d + $lanes ≤ width; r and c are below R and C.
                unsafe {
                    let (start, width) = (b.start.add(first * b.stride), b.width);
                    let mut sums = [[$zero(); C]; R];
                    let whole = width - width % $lanes;
                    let mut d = 0;
                    while d < whole {
                        let mut column = [$zero(); C];
                        for c in 0..C {
                            column[c] = load::<HALF>(start.add(c * b.stride), d);
                        }
                        for r in 0..R {
                            let a = $load(a.add(r * width + d));
                            for c in 0..C {
                                sums[r][c] = $fma(a, column[c], sums[r][c]);
                            }
                        }
                        d += $lanes;
                    }
                    let mut totals = $totals(sums);
                    for r in 0..R {
                        for c in 0..C {
                            for d in whole..width {
                                totals[r][c] += *a.add(r * width + d) * element::<HALF>(start.add(c * b.stride), d);
                            }
                            *out.add(r * b.count + c) = totals[r][c];
                        }
                    }
                }
                C
            }

            /// # Safety
            /// The processor has the features; `acc` holds whole rows as wide as those of `v`, `p` one float per pair.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn add_rows_by_columns(acc: &mut [f32], p: &[f32], v: &Rows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if v.half { all_sums::<true>(acc, p, v) } else { all_sums::<false>(acc, p, v) } }
            }

            /// # Safety
            /// As `add_rows_by_columns`.
            #[target_feature(enable = $features)]
            unsafe fn all_sums<const HALF: bool>(acc: &mut [f32], p: &[f32], v: &Rows<'_>) {
                let rows = acc.len() / v.width;
                let mut r = 0;
                while r < rows {
                    let tall = match rows - r {
                        4.. => 4,
                        2.. => 2,
                        _ => 1,
                    };
                    let mut d = 0;
                    while d < v.width {
                        // SAFETY: each tile lies within rows r.. of `acc` and `p` and elements d.. of the rows of `acc` and
                        // `v`, by the conditions around it.
                        unsafe {
                            let acc = acc.as_mut_ptr().add(r * v.width + d);
                            let p = p.as_ptr().add(r * v.count);
                            d += match (tall, (v.width - d) / $lanes) {
                                (4, $sums..) => add::<HALF, 4, $sums>(acc, p, v, d),
                                (4, 1..) => add::<HALF, 4, 1>(acc, p, v, d),
                                (4, _) => add_single::<HALF, 4>(acc, p, v, d),
                                (2, $sums..) => add::<HALF, 2, $sums>(acc, p, v, d),
                                (2, 1..) => add::<HALF, 2, 1>(acc, p, v, d),
                                (2, _) => add_single::<HALF, 2>(acc, p, v, d),
                                (_, $sums..) => add::<HALF, 1, $sums>(acc, p, v, d),
                                (_, 1..) => add::<HALF, 1, 1>(acc, p, v, d),
                                _ => add_single::<HALF, 1>(acc, p, v, d),
                            };
                        }
                    }
                    r += tall;
                }
            }

            /// A tile of `R` rows by `W` vectors of the sum, from element `d` on; returns its width in floats.
            ///
            /// # Safety
            /// `acc` points to `R` rows as wide as those of `v` with room for the tile, `p` to `R` rows of a float per row
            /// of `v`; rows of `v` have the tile's width from `d` on.
            #[target_feature(enable = $features)]
            unsafe fn add<const HALF: bool, const R: usize, const W: usize>(
                acc: *mut f32,
                p: *const f32,
                v: &Rows<'_>,
                d: usize,
            ) -> usize {
                // SAFETY: c is below the rows of `v`, r below R, w below W.
                unsafe {
                    let mut sums = [[$zero(); W]; R];
                    for c in 0..v.count {
                        let mut row = [$zero(); W];
                        for w in 0..W {
                            row[w] = load::<HALF>(v.start.add(c * v.stride), d + w * $lanes);
                        }
                        for r in 0..R {
                            let p = $splat(*p.add(r * v.count + c));
                            for w in 0..W {
                                sums[r][w] = $fma(p, row[w], sums[r][w]);
                            }
                        }
                    }
                    let one = $splat(1.0);
                    for r in 0..R {
                        for w in 0..W {
                            let at = acc.add(r * v.width + w * $lanes);
                            $store(at, $fma(one, sums[r][w], $load(at)));
                        }
                    }
                }
                W * $lanes
            }

            /// One element of `R` rows; returns 1.
            ///
            /// # Safety
            /// As `add`, for one float instead of `W` vectors.
            #[target_feature(enable = $features)]
            unsafe fn add_single<const HALF: bool, const R: usize>(
                acc: *mut f32,
                p: *const f32,
                v: &Rows<'_>,
                d: usize,
            ) -> usize {
                for r in 0..R {
                    // SAFETY: c is below the rows of `v`, r below R.
                    unsafe {
                        let mut sum = 0.0;
                        for c in 0..v.count {
                            sum += *p.add(r * v.count + c) * element::<HALF>(v.start.add(c * v.stride), d);
                        }
                        *acc.add(r * v.width) += sum;
                    }
                }
                1
            }

            /// # Safety
            /// The processor has the features; the matrices are those of the shape.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn outer(out: *mut f32, a: *const f32, b: *const f32, s: &Outer) {
                let mut n = 0;
                while n < s.n {
                    // SAFETY: the columns from n on are within `b` and `out`, by the conditions.
                    unsafe {
                        let (out, b) = (out.add(n), b.add(n));
                        n += match (s.n - n) / $lanes {
                            vectors if vectors >= $outer => panel::<$outer>(out, a, b, s),
                            vectors if vectors >= 2 => panel::<2>(out, a, b, s),
                            _ => panel::<1>(out, a, b, s),
                        };
                    }
                }
            }

            /// `W` vectors of columns of all rows; returns how many columns.
            ///
            /// # Safety
            /// As `outer`; `out` and `b` point to columns with `W` vectors.
            #[target_feature(enable = $features)]
            unsafe fn panel<const W: usize>(out: *mut f32, a: *const f32, b: *const f32, s: &Outer) -> usize {
                let mut m = 0;
                while m < s.m {
                    // SAFETY: the rows from m on are within `a` and `out`, by the conditions.
                    unsafe {
                        let (out, a) = (out.add(m * s.n), a.add(m * s.row));
                        m += match s.m - m {
                            6.. => block::<6, W>(out, a, b, s),
                            2.. => block::<2, W>(out, a, b, s),
                            _ => block::<1, W>(out, a, b, s),
                        };
                    }
                }
                W * $lanes
            }

            /// `M` rows by `W` vectors; returns `M`.
            ///
            /// # Safety
            /// As `panel`; `out` and `a` point to `M` rows.
            #[target_feature(enable = $features)]
            unsafe fn block<const M: usize, const W: usize>(
                out: *mut f32,
                a: *const f32,
                b: *const f32,
                s: &Outer,
            ) -> usize {
                // SAFETY: k is below the shape's, m below M, w below W.
                unsafe {
                    let mut sums = [[$zero(); W]; M];
                    if s.add {
                        for m in 0..M {
                            for w in 0..W {
                                sums[m][w] = $load(out.add(m * s.n + w * $lanes));
                            }
                        }
                    }
                    for k in 0..s.k {
                        let mut row = [$zero(); W];
                        for w in 0..W {
                            row[w] = $load(b.add(k * s.n + w * $lanes));
                        }
                        for m in 0..M {
                            let a = $splat(*a.add(m * s.row + k * s.column));
                            for w in 0..W {
                                sums[m][w] = $fma(a, row[w], sums[m][w]);
                            }
                        }
                    }
                    for m in 0..M {
                        for w in 0..W {
                            $store(out.add(m * s.n + w * $lanes), sums[m][w]);
                        }
                    }
                }
                M
            }

            /// # Safety
            /// The processor has the features; `out` has a float for each element.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn widen(out: &mut [f32], rows: &Rows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if rows.half { all_wide::<true>(out, rows) } else { all_wide::<false>(out, rows) } }
            }

            /// # Safety
            /// As `widen`.
            #[target_feature(enable = $features)]
            unsafe fn all_wide<const HALF: bool>(out: &mut [f32], rows: &Rows<'_>) {
                let whole = rows.width - rows.width % $lanes;
                for c in 0..rows.count {
                    // SAFETY: d is below the width, c below the count; `out` is as long as all rows.
                    unsafe {
                        let (row, out) = (rows.start.add(c * rows.stride), out.as_mut_ptr().add(c * rows.width));
                        for d in (0..whole).step_by($lanes) {
                            $store(out.add(d), load::<HALF>(row, d));
                        }
                        for d in whole..rows.width {
                            *out.add(d) = element::<HALF>(row, d);
                        }
                    }
                }
            }
        }
    };
}
pub(super) use vector_products;
