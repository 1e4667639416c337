//! Macros that make the kernels of an instruction set: tiles of panels, of quantised and of float weights, and row dot products.

/// A module of micro-kernels for block types, over the instruction set `$ops`, called with `$panels` panels. The list gives the
/// register tiles, largest first: columns `by` the panels for which the registers suffice at once. `$target` enables the
/// instructions.
macro_rules! quant_tiles {
    ($name:ident, $ops:ty, $panels:literal, [$($columns:literal by $at_once:literal),*] $(, #[$target:meta])?) => {
        mod $name {
            use $crate::cpu::simd::panel_format::PanelFormat;
            use $crate::cpu::simd::simd_ops::SimdOps;
            use $crate::cpu::simd::packing::{RhsPacking, PackedColumn};
            use $crate::cpu::simd::{PanelReadClass, PanelReads, TileOutput, MicroKernelFn, quant_dot};
            use $crate::tensor::DType;

            /// The micro-kernel of a block type. It needs the instruction set.
            pub(in crate::cpu::simd) fn micro_kernel_of(dtype: DType) -> Option<MicroKernelFn> {
                if $crate::cpu::simd::expands_panels(dtype) {
                    return Some(micro_kernel::<$crate::cpu::simd::expanded::ExpandedPanels>);
                }
                // In this file the macro is in textual scope, elsewhere it needs this import.
                #[allow(unused_imports)]
                use $crate::{cpu::simd::with_panel_format, tensor::table::for_each_panel};
                for_each_panel!(with_panel_format!(dtype micro_kernel))
            }

            /// # Safety
            /// As [`quant_dot::micro_kernel`].
            $(#[$target])?
            unsafe fn micro_kernel<F: PanelFormat>(panels: &[*const u8], columns: &[&[u8]], k: usize, mut out: TileOutput<'_>) {
                let padded = RhsPacking::codes::<F>(<$ops>::I32_DOT).padded(k);
                let mut done = 0;
                while done < columns.len() {
                    $(if columns.len() - done >= $columns {
                        let mut parts = [PackedColumn::NONE; $columns];
                        for c in 0..$columns {
                            parts[c] = PackedColumn::new(columns[done + c], padded, F::SUB);
                        }
                        let panel_reads = PanelReads::of(PanelReadClass::of::<F>());
                        let distance = panel_reads.prefetch as usize;
                        // Other tiles have no second form, which the compiler would have to translate for nothing.
                        const ONE: usize = if $columns == 1 { 1 } else { $at_once };
                        if $columns == 1 && panel_reads.one_panel {
                            for (s, panels) in panels[..$panels].as_chunks().0.iter().enumerate() {
                                let out = out.offset(done, s * ONE);
                                // SAFETY: the caller meets this function's requirements, and this function is compiled with
                                // the instructions.
                                unsafe { quant_dot::micro_kernel::<$ops, F, ONE, $columns>(*panels, parts, k, distance, out) };
                            }
                        } else {
                            for (s, panels) in panels[..$panels].as_chunks().0.iter().enumerate() {
                                let out = out.offset(done, s * $at_once);
                                // SAFETY: as above.
                                unsafe { quant_dot::micro_kernel::<$ops, F, $at_once, $columns>(*panels, parts, k, distance, out) };
                            }
                        }
                        done += $columns;
                        continue;
                    })*
                }
            }
        }
    };
}
pub(super) use quant_tiles;

/// As [`quant_tiles`], for the float types in the first list, each with its [`float_dot::FloatProduct`].
macro_rules! float_tiles {
    ($name:ident, $ops:ty, [$($dtype:ident: $float:ident),*], $panels:literal,
     [$($columns:literal by $at_once:literal),*] $(, #[$target:meta])?) => {
        mod $name {
            use $crate::cpu::simd::{PanelReadClass, PanelReads, TileOutput, MicroKernelFn, float_dot};
            use $crate::tensor::DType;

            /// The micro-kernel of a float type. It needs the instruction set.
            pub(in crate::cpu::simd) fn micro_kernel_of(dtype: DType) -> Option<MicroKernelFn> {
                match dtype {
                    $(DType::$dtype => Some(micro_kernel::<float_dot::$float>),)*
                    _ => None,
                }
            }

            /// # Safety
            /// As [`float_dot::micro_kernel`].
            $(#[$target])?
            unsafe fn micro_kernel<F: float_dot::FloatProduct<$ops>>(
                panels: &[*const u8],
                columns: &[&[u8]],
                k: usize,
                mut out: TileOutput<'_>,
            ) {
                let mut done = 0;
                while done < columns.len() {
                    $(if columns.len() - done >= $columns {
                        let mut starts = [std::ptr::null(); $columns];
                        for c in 0..$columns {
                            starts[c] = columns[done + c].as_ptr().cast();
                        }
                        let panel_reads = PanelReads::of(PanelReadClass::Floats);
                        let distance = panel_reads.prefetch as usize;
                        // Other tiles have no second form, which the compiler would have to translate for nothing.
                        const ONE: usize = if $columns == 1 { 1 } else { $at_once };
                        if $columns == 1 && panel_reads.one_panel {
                            for (s, panels) in panels[..$panels].as_chunks().0.iter().enumerate() {
                                let out = out.offset(done, s * ONE);
                                // SAFETY: the caller meets this function's requirements, and this function is compiled with
                                // the instructions.
                                unsafe { float_dot::micro_kernel::<$ops, F, ONE, $columns>(*panels, starts, k, distance, out) };
                            }
                        } else {
                            for (s, panels) in panels[..$panels].as_chunks().0.iter().enumerate() {
                                let out = out.offset(done, s * $at_once);
                                // SAFETY: as above.
                                unsafe { float_dot::micro_kernel::<$ops, F, $at_once, $columns>(*panels, starts, k, distance, out) };
                            }
                        }
                        done += $columns;
                        continue;
                    })*
                }
            }
        }
    };
}
pub(super) use float_tiles;

/// A module of row dot products for block types, compiled for one instruction set: by the dot instruction `$dot`, the
/// `quant_row_dot` of the architecture's module, and the formats in its `rows`; the types of
/// `for_each_row_in_place!` need not be expanded for it.
macro_rules! row_kernels {
    ($module:ident, $dot:ident, $features:literal) => {
        mod $module {
            use super::row_format::{RowFormat, $dot};
            use super::expanded::ExpandedRows;
            use super::expansions;
            use super::quant_row_dot;
            use super::rows::*;
            use $crate::cpu::simd::{RowDotFn, expanded};
            use $crate::tensor::quant::expand::{Expand, Expanded};
            use $crate::tensor::DType;

            /// The row dot product of a block type. It needs the instruction set.
            pub(super) fn dot_of(dtype: DType) -> Option<RowDotFn> {
                use $crate::cpu::simd::{with_expansion, with_row_format};
                use $crate::tensor::table::{for_each_expanded, for_each_simd};
                let in_place: Option<RowDotFn> = for_each_row_in_place!(with_row_format!(dtype dot));
                let expanded: Option<RowDotFn> = for_each_expanded!(with_expansion!(dtype expanded_dot));
                in_place.or(for_each_simd!(with_row_format!(dtype dot))).or(expanded)
            }

            /// # Safety
            /// As [`expanded::dot`].
            #[target_feature(enable = $features)]
            unsafe fn expanded_dot<B: Expand<N>, const N: usize>(
                rows: &[&[u8]],
                columns: &[&[u8]],
                padded: usize,
                out: &mut [f32],
            ) {
                // SAFETY: the caller meets this function's requirements.
                unsafe { any_expanded_dot(rows, columns, padded, out, (256 / N * B::DTYPE.block_bytes(), expand::<B, N>)) }
            }

            /// Not generic over the type, so that it is compiled once.
            ///
            /// # Safety
            /// As [`expanded::dot`].
            #[target_feature(enable = $features)]
            unsafe fn any_expanded_dot(
                rows: &[&[u8]],
                columns: &[&[u8]],
                padded: usize,
                out: &mut [f32],
                expansion: (usize, expanded::ExpandFn),
            ) {
                // SAFETY: the caller meets this function's requirements, and this function is compiled with the instructions.
                unsafe { expanded::dot::<ExpandedRows<$dot>>(rows, columns, padded, out, expansion) }
            }

            /// # Safety
            /// The processor has the instruction set.
            #[target_feature(enable = $features)]
            unsafe fn expand<B: Expand<N>, const N: usize>(bytes: &[u8], out: &mut Expanded) {
                // SAFETY: the caller meets this function's requirements, and this function is compiled with the instructions.
                unsafe { expansions::expand::<B, N>(bytes, out) }
            }

            /// # Safety
            /// As [`quant_row_dot::dot`].
            #[target_feature(enable = $features)]
            unsafe fn dot<F: RowFormat>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
                // SAFETY: the caller meets this function's requirements, and this function is compiled with the instructions.
                unsafe { quant_row_dot::dot::<F, $dot>(rows, columns, padded, out) }
            }
        }
    };
}
pub(super) use row_kernels;
