//! The macro that makes the attention GEMM kernels of one instruction set: register tiles of a few rows by a few columns.

/// A module of kernels over vectors of `$lanes` floats with these operations. `$load_halves` loads `$lanes` f16 as f32;
/// `$prefetch` prefetches a cache line, `$horizontal_sums` returns the sum of the lanes of each vector. Register tiles have `$dots` columns in `mul_transposed`,
/// `$sums` vectors in `mul_add` and `$column_vectors` vectors in `mul_columns`.
macro_rules! attention_gemm_kernels {
    ($name:ident, $features:literal, lanes: $lanes:literal, vector: $vector:ident, zero: $zero:ident, load: $load:ident,
     store: $store:ident, splat: $splat:ident, fma: $fma:ident, load_halves: $load_halves:ident, prefetch: $prefetch:ident,
     horizontal_sums: $horizontal_sums:ident, dots: $dots:literal, sums: $sums:literal,
     column_vectors: $column_vectors:literal) => {
        pub(super) mod $name {
            use super::*;
            use $crate::cpu::simd::attention_gemm::{FloatRows, GemmShape, element};

            /// Elements from `i` on of a row, one vector.
            ///
            /// # Safety
            /// The row has these elements, as f16 if `HALF`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load<const HALF: bool>(row: *const u8, i: usize) -> $vector {
                // SAFETY: as the caller promises; both loads take any address.
                unsafe { if HALF { $load_halves(row.add(2 * i)) } else { $load(row.add(4 * i).cast()) } }
            }

            /// Prefetches `count` elements from `i` on of the row that lies `distance` bytes after this one; nothing for 0. Not
            /// all of these addresses need to be readable.
            #[inline(always)]
            fn prefetch_row<const HALF: bool>(row: *const u8, distance: usize, i: usize, count: usize) {
                const LINE: usize = 64;
                let size = if HALF { 2 } else { 4 };
                if distance > 0 {
                    for at in (0..count * size).step_by(LINE) {
                        $prefetch(row.wrapping_add(distance + i * size + at));
                    }
                }
            }

            /// [`AttentionGemm::mul_transposed`](super::super::AttentionGemm::mul_transposed).
            ///
            /// # Safety
            /// The processor has the features; `a` holds whole rows with the width of `b`, `out` one float per pair of rows.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn mul_transposed(out: &mut [f32], a: &[f32], b: &FloatRows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if b.half { all_dots::<true>(out, a, b) } else { all_dots::<false>(out, a, b) } }
            }

            /// All dot products, register tile by register tile.
            ///
            /// # Safety
            /// As `mul_transposed`.
            #[target_feature(enable = $features)]
            unsafe fn all_dots<const HALF: bool>(out: &mut [f32], a: &[f32], b: &FloatRows<'_>) {
                let (rows, columns) = (a.len() / b.width, b.count);
                let mut r = 0;
                while r < rows {
                    let tile_rows = match rows - r {
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
                            c += match (tile_rows, columns - c >= $dots) {
                                (4, true) => dots::<HALF, 4, $dots>(out, a, b, c),
                                (4, _) => dots::<HALF, 4, 1>(out, a, b, c),
                                (2, true) => dots::<HALF, 2, $dots>(out, a, b, c),
                                (2, _) => dots::<HALF, 2, 1>(out, a, b, c),
                                (_, true) => dots::<HALF, 1, $dots>(out, a, b, c),
                                _ => dots::<HALF, 1, 1>(out, a, b, c),
                            };
                        }
                    }
                    r += tile_rows;
                }
            }

            /// A register tile of `R` by `C` dot products; returns `C`.
            ///
            /// # Safety
            /// `a` points to `R` rows, `b` has `C` rows from row `first` on; `out` points to `R` rows of `b.count` floats with
            /// space for `C`.
            #[target_feature(enable = $features)]
            unsafe fn dots<const HALF: bool, const R: usize, const C: usize>(
                out: *mut f32,
                a: *const f32,
                b: &FloatRows<'_>,
                first: usize,
            ) -> usize {
                // SAFETY: `$lanes` elements from d on lie within each row, as d + $lanes ≤ width; r and c are below R and C.
                unsafe {
                    let (start, width) = (b.start.add(first * b.stride), b.width);
                    let mut sums = [[$zero(); C]; R];
                    let whole = width - width % $lanes;
                    for c in 0..C {
                        prefetch_row::<HALF>(start.add(c * b.stride), b.prefetch_distance(), 0, width);
                    }
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
                    let mut totals = $horizontal_sums(sums);
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

            /// [`AttentionGemm::mul_add`](super::super::AttentionGemm::mul_add).
            ///
            /// # Safety
            /// The processor has the features; `acc` holds whole rows with the width of `v`, `p` one float per pair of rows.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn mul_add(acc: &mut [f32], p: &[f32], v: &FloatRows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if v.half { all_sums::<true>(acc, p, v) } else { all_sums::<false>(acc, p, v) } }
            }

            /// All weighted sums, register tile by register tile.
            ///
            /// # Safety
            /// As `mul_add`.
            #[target_feature(enable = $features)]
            unsafe fn all_sums<const HALF: bool>(acc: &mut [f32], p: &[f32], v: &FloatRows<'_>) {
                let rows = acc.len() / v.width;
                let mut r = 0;
                while r < rows {
                    let tile_rows = match rows - r {
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
                            d += match (tile_rows, (v.width - d) / $lanes) {
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
                    r += tile_rows;
                }
            }

            /// A register tile of `R` rows by `W` vectors of the sum, from element `d` on; returns its width in floats.
            ///
            /// # Safety
            /// `acc` points to `R` rows with the width of `v` and space for the tile, `p` to `R` rows of one float per row of
            /// `v`; the rows of `v` have the tile's width from `d` on.
            #[target_feature(enable = $features)]
            unsafe fn add<const HALF: bool, const R: usize, const W: usize>(
                acc: *mut f32,
                p: *const f32,
                v: &FloatRows<'_>,
                d: usize,
            ) -> usize {
                // SAFETY: c is below the rows of `v`, r below R, w below W.
                unsafe {
                    let mut sums = [[$zero(); W]; R];
                    let distance = v.prefetch_distance();
                    for c in 0..v.count {
                        let start = v.start.add(c * v.stride);
                        prefetch_row::<HALF>(start, distance, d, W * $lanes);
                        let mut row = [$zero(); W];
                        for w in 0..W {
                            row[w] = load::<HALF>(start, d + w * $lanes);
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

            /// One element of `R` rows: the tail of a row. Returns 1.
            ///
            /// # Safety
            /// As `add`, for one float instead of `W` vectors.
            #[target_feature(enable = $features)]
            unsafe fn add_single<const HALF: bool, const R: usize>(
                acc: *mut f32,
                p: *const f32,
                v: &FloatRows<'_>,
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

            /// [`AttentionGemm::mul_columns`](super::super::AttentionGemm::mul_columns).
            ///
            /// # Safety
            /// The processor has the features; the matrices have the shape `s`.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn mul_columns(out: *mut f32, a: *const f32, b: *const f32, s: &GemmShape) {
                let mut n = 0;
                while n < s.n {
                    // SAFETY: the columns from n on are within `b` and `out`, by the conditions.
                    unsafe {
                        let (out, b) = (out.add(n), b.add(n));
                        n += match (s.n - n) / $lanes {
                            vectors if vectors >= $column_vectors => column_block::<$column_vectors>(out, a, b, s),
                            vectors if vectors >= 2 => column_block::<2>(out, a, b, s),
                            _ => column_block::<1>(out, a, b, s),
                        };
                    }
                }
            }

            /// All rows by `W` vectors of columns; returns the number of columns.
            ///
            /// # Safety
            /// As `mul_columns`; `out` and `b` point to columns with `W` vectors.
            #[target_feature(enable = $features)]
            unsafe fn column_block<const W: usize>(
                out: *mut f32,
                a: *const f32,
                b: *const f32,
                s: &GemmShape,
            ) -> usize {
                let mut m = 0;
                while m < s.m {
                    // SAFETY: the rows from m on are within `a` and `out`, by the conditions.
                    unsafe {
                        let (out, a) = (out.add(m * s.n), a.add(m * s.row_stride));
                        m += match s.m - m {
                            6.. => tile::<6, W>(out, a, b, s),
                            2.. => tile::<2, W>(out, a, b, s),
                            _ => tile::<1, W>(out, a, b, s),
                        };
                    }
                }
                W * $lanes
            }

            /// A register tile of `M` rows by `W` vectors; returns `M`.
            ///
            /// # Safety
            /// As `column_block`; `out` and `a` point to `M` rows.
            #[target_feature(enable = $features)]
            unsafe fn tile<const M: usize, const W: usize>(
                out: *mut f32,
                a: *const f32,
                b: *const f32,
                s: &GemmShape,
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
                            let a = $splat(*a.add(m * s.row_stride + k * s.column_stride));
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

            /// [`AttentionGemm::to_f32`](super::super::AttentionGemm::to_f32).
            ///
            /// # Safety
            /// The processor has the features; `out` has a float for each element.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn to_f32(out: &mut [f32], rows: &FloatRows<'_>) {
                // SAFETY: as the caller promises.
                unsafe { if rows.half { convert_rows::<true>(out, rows) } else { convert_rows::<false>(out, rows) } }
            }

            /// Converts all rows, vector by vector.
            ///
            /// # Safety
            /// As `to_f32`.
            #[target_feature(enable = $features)]
            unsafe fn convert_rows<const HALF: bool>(out: &mut [f32], rows: &FloatRows<'_>) {
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
pub(super) use attention_gemm_kernels;
