//! All kernels of this machine's instruction sets, against f64 dot products of the dequantised values.

use super::packing::{RhsPacking, Rounding};
use super::{GemmKernels, PanelReadClass, PanelReads, RHS_PIECE, TileOutput};
use crate::cpu::panel::PANEL_ROWS;
use crate::tensor::DType;
use crate::tensor::quant::tests::oracle::half_offsets;
use crate::tensor::quant::{dequantiser, quantiser};
use half::{bf16, f16};
use std::collections::HashSet;

fn kernel_variants() -> impl Iterator<Item = (DType, &'static str, GemmKernels)> {
    DType::ALL
        .iter()
        .flat_map(|&t| GemmKernels::available(t).into_iter().map(move |(name, kernels)| (t, name, kernels)))
}

fn values(rng: &mut fastrand::Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..6).map(|_| rng.f32()).sum::<f32>() * 2.0 - 6.0).collect()
}

/// A row of `k` random values in a type: its bytes, and their values.
fn row(rng: &mut fastrand::Rng, dtype: DType, k: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut real) = (vec![0; dtype.row_bytes(k).unwrap()], vec![0.0; k]);
    match quantiser(dtype) {
        Some(quantise) => quantise(&values(rng, k), &mut bytes),
        None => {
            rng.fill(&mut bytes);
            set_unit_scales(dtype, &mut bytes);
        }
    }
    dequantiser(dtype).unwrap()(&bytes, &mut real);
    (bytes, real)
}

/// A packed column, aligned for f32.
fn pack(kernels: &GemmKernels, values: &[f32]) -> Vec<f32> {
    // NaN: the packing must not read old contents.
    let mut column = vec![f32::NAN; kernels.packing().column_bytes(values.len()) / 4];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut column);
    for (i, piece) in values.chunks(RHS_PIECE).enumerate() {
        let write = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        kernels.packing().pack(values.len(), i * RHS_PIECE, piece, write);
    }
    column
}

fn product(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

fn lengths(dtype: DType) -> Vec<usize> {
    if dtype.is_block() {
        [1, 3, 8, 9, 35].iter().map(|n| n * dtype.block_len()).collect()
    } else {
        vec![1, 8, 9, 16, 23, 1100]
    }
}

/// Whether the squared error is small relative to the squared lengths of the vectors. The bound covers the rounding of columns
/// to the partner type.
fn is_close(dtype: DType, got: f32, x: &[f32], y: &[f32]) -> bool {
    let error = f64::from(got) - product(x, y);
    let rounding = match dtype {
        DType::F32 => 1e-12,
        DType::F16 => 3e-7,
        DType::BF16 => 2e-5,
        _ => 4e-4,
    };
    error * error <= product(x, x) * product(y, y) * rounding
}

/// How panels are read changes no bit of a product: prefetches load nothing, and panels do not share sums.
#[test]
fn the_ways_to_read_panels_give_the_same_bits() {
    let mut rng = fastrand::Rng::with_seed(9);
    for (dtype, name, kernels) in kernel_variants() {
        let k = 3 * dtype.block_len().max(32);
        let Some(kernel) = kernels.micro_kernel(k) else { continue };
        let column = pack(&kernels, &values(&mut rng, k));
        let panels: Vec<Vec<u8>> = (0..kernels.panels())
            .map(|_| {
                let rows: Vec<Vec<u8>> = (0..PANEL_ROWS).map(|_| row(&mut rng, dtype, k).0).collect();
                let mut bytes = vec![0; kernels.panel_bytes(k)];
                kernels.pack_panel(&std::array::from_fn(|r| &rows[r][..]), &mut bytes);
                bytes
            })
            .collect();
        let panels: Vec<&[u8]> = panels.iter().map(|panel| &panel[..]).collect();
        // Other tests multiply meanwhile, which must not matter either.
        let products = [(0, false), (0, true), (1024, false), (4096, true)].map(|(prefetch, one_panel)| {
            PanelReadClass::ALL.iter().for_each(|(class, _)| PanelReads { prefetch, one_panel }.set(*class));
            let mut sums = vec![[0f32; PANEL_ROWS]; panels.len()];
            let out = TileOutput { sums: &mut sums, stride: panels.len(), accumulate: false };
            kernel.run(&panels, &[bytemuck::cast_slice(&column)], out);
            sums
        });
        assert!(products.iter().all(|sums| *sums == products[0]), "{dtype}, {name}");
    }
}

#[test]
fn units_of_mxfp4_are_powers_of_two() {
    for e in 0..=255u8 {
        let want = 2f64.powi(i32::from(e) - 128) as f32;
        assert_eq!(super::panel_format::unit_of(e), want, "{e}");
    }
}

#[test]
fn row_dots_match_f64_sums() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut seen = HashSet::new();
    // Several instruction sets share row dot products; each is tested once.
    for (t, name, kernels) in
        kernel_variants().filter(|(t, _, k)| seen.insert((*t, k.dot as usize, format!("{:?}", k.packing))))
    {
        for k in lengths(t) {
            for n in [1, 2, 3, 4, 5, 8] {
                let columns: Vec<_> = (0..n).map(|_| values(&mut rng, k)).collect();
                let packed: Vec<_> = columns.iter().map(|c| pack(&kernels, c)).collect();
                let packed: Vec<_> = packed.iter().map(|c| bytemuck::cast_slice(c)).collect();
                for m in [3, 21] {
                    let rows: Vec<_> = (0..m).map(|_| row(&mut rng, t, k)).collect();
                    let bytes: Vec<_> = rows.iter().map(|(bytes, _)| bytes.as_slice()).collect();
                    let mut out = vec![f32::NAN; m * n];
                    kernels.dot(k, &bytes, &packed, &mut out);
                    for (i, &got) in out.iter().enumerate() {
                        assert!(
                            is_close(t, got, &rows[i % m].1, &columns[i / m]),
                            "{t} {name} k={k} n={n} m={m}: {got}"
                        );
                    }
                }
            }
        }
    }
}

/// A panel of these rows of `k` elements.
fn panel(kernels: &GemmKernels, k: usize, rows: &[&[u8]; PANEL_ROWS]) -> Vec<u8> {
    let mut panel = vec![0; kernels.panel_bytes(k)];
    kernels.pack_panel(rows, &mut panel);
    panel
}

/// Micro-kernels and row dot products read the same packed columns and give the same results.
#[test]
fn micro_kernels_match_row_dots() {
    let mut rng = fastrand::Rng::with_seed(2);
    for (t, name, kernels) in kernel_variants() {
        for k in lengths(t).into_iter().filter(|&k| kernels.micro_kernel(k).is_some()) {
            let (rows, other_rows): (Vec<_>, Vec<_>) =
                (0..PANEL_ROWS).map(|_| (row(&mut rng, t, k), row(&mut rng, t, k))).unzip();
            let rows = [rows, other_rows];
            let panels = [0, 1].map(|s| panel(&kernels, k, &std::array::from_fn(|r| rows[s][r].0.as_slice())));
            // With 50, at equal distances as in a product: kernels by tiles read such columns in place.
            for n in (1..=kernels.tile_columns()).chain([19]).chain(cfg!(target_arch = "x86_64").then_some(50)) {
                let columns: Vec<_> = (0..n).map(|_| values(&mut rng, k)).collect();
                let packed: Vec<_> = columns.iter().map(|c| pack(&kernels, c)).collect();
                let side_by_side = packed.concat();
                let packed: Vec<&[u8]> = if n == 50 {
                    side_by_side.chunks(packed[0].len()).map(bytemuck::cast_slice).collect()
                } else {
                    packed.iter().map(|c| bytemuck::cast_slice(c)).collect()
                };
                let at_once = kernels.panels();
                // Two calls: overwriting, then accumulating. The output has a gap for other panels, which must stay unwritten.
                let stride = at_once + 1;
                let mut out = vec![[f32::NAN; PANEL_ROWS]; n * stride];
                for accumulate in [false, true] {
                    let into = TileOutput { sums: &mut out, stride, accumulate };
                    kernels.micro_kernel(k).unwrap().run(&[&panels[0][..], &panels[1]][..at_once], &packed, into);
                }
                assert!(
                    out.chunks(stride).all(|sums| sums[at_once].iter().all(|x| x.is_nan())),
                    "{t} {name}: wrote sums of other panels"
                );
                for (i, (bytes, real)) in rows[..at_once].iter().flatten().enumerate() {
                    let (s, r, mut dots) = (i / PANEL_ROWS, i % PANEL_ROWS, vec![0.0; n]);
                    kernels.dot(k, &[bytes], &packed, &mut dots);
                    for c in 0..n {
                        let (micro_kernel, dot) = (out[c * stride + s][r] / 2.0, dots[c]);
                        assert!(
                            is_close(t, micro_kernel, real, &columns[c]),
                            "{t} {name} k={k} n={n} s={s} r={r} c={c}: {micro_kernel}"
                        );
                        let scale = product(real, real).sqrt() * product(&columns[c], &columns[c]).sqrt();
                        let difference = f64::from(micro_kernel - dot).abs();
                        assert!(difference <= 1e-5 * scale, "{t} {name} k={k} n={n}: {micro_kernel} and {dot}");
                    }
                }
            }
        }
    }
}

/// The largest codes and column values: no accumulator may saturate or overflow.
#[test]
fn extreme_codes_do_not_overflow() {
    for (t, name, kernels) in kernel_variants().filter(|(t, ..)| t.is_block()) {
        let k = 512;
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            let mut bytes = vec![fill; t.row_bytes(k).unwrap()];
            set_unit_scales(t, &mut bytes);
            let mut real = vec![0.0; k];
            dequantiser(t).unwrap()(&bytes, &mut real);
            for y in [1.0, -1.0] {
                let column = vec![y; k];
                let packed = pack(&kernels, &column);
                let packed: &[u8] = bytemuck::cast_slice(&packed);
                let (mut dot, mut out) = ([f32::NAN], vec![[f32::NAN; PANEL_ROWS]; kernels.panels()]);
                kernels.dot(k, &[&bytes], &[packed], &mut dot);
                let panel = panel(&kernels, k, &[&bytes; PANEL_ROWS]);
                let into = TileOutput { sums: &mut out, stride: kernels.panels(), accumulate: false };
                kernels.micro_kernel(k).unwrap().run(&vec![&panel[..]; kernels.panels()], &[packed], into);
                let want = product(&real, &column);
                // With a code offset large terms cancel: the rest is exact to f32 rounding of the largest term.
                let size = 256.0 * real.iter().fold(1.0, |max: f32, x| max.max(x.abs())) * k as f32;
                for got in [dot[0], out[0][0], out[0][15]] {
                    let error = (f64::from(got) - want).abs();
                    assert!(error <= 1e-6 * f64::from(size), "{t} {name} {fill:#x} {y}: {got}, wanted {want}");
                }
            }
        }
    }
}

/// Sets the scales of blocks to 1.
fn set_unit_scales(dtype: DType, bytes: &mut [u8]) {
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in half_offsets(dtype) {
            block[at..at + 2].copy_from_slice(&[0x00, 0x3c]);
        }
        match dtype {
            DType::MXFP4 => block[0] = 128,
            // The top nibbles of four words.
            DType::IQ1_M => {
                for (at, nibble) in [(49, 0x00), (51, 0x00), (53, 0xc0), (55, 0x30)] {
                    block[at] = block[at] & 15 | nibble;
                }
            }
            _ => {}
        }
    }
}

/// Packed float columns equal a conversion to the weights' type and back, for every exponent and near every tie.
#[test]
fn packing_rounds_as_the_type_conversion() {
    let mut rng = fastrand::Rng::with_seed(7);
    let near = |bits: u32| [-1i32, 0, 1].map(|by| f32::from_bits(bits.wrapping_add_signed(by)));
    let ties = (0..1 << 19).step_by(5).flat_map(|high: u32| near(high << 13 | 0x1000)).chain(near(0x7f80_0000));
    let values: Vec<f32> =
        ties.chain((0..1 << 18).map(|_| f32::from_bits(rng.u32(..)))).flat_map(|x| [x, -x]).collect();
    for (rounding, convert) in [
        (Rounding::F16, (|x| f16::from_f32(x).to_f32()) as fn(f32) -> f32),
        (Rounding::BF16, |x| bf16::from_f32(x).to_f32()),
        (Rounding::F32, |x| x),
    ] {
        for piece in values.chunks(RHS_PIECE) {
            let mut rounded = vec![0f32; piece.len().next_multiple_of(8)];
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut rounded);
            let write = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
            RhsPacking::Floats(rounding).pack(piece.len(), 0, piece, write);
            for (&x, &got) in piece.iter().zip(&rounded) {
                let want = convert(x);
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{x:e} becomes {got:e}, not {want:e}, as {rounding:?}");
            }
        }
    }
    for piece in values.chunks(RHS_PIECE) {
        let mut bits = vec![0u16; piece.len().next_multiple_of(16)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bits);
        let write = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        RhsPacking::Bf16.pack(piece.len(), 0, piece, write);
        for (&x, &got) in piece.iter().zip(&bits) {
            let (want, got) = (bf16::from_f32(x), bf16::from_bits(got));
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{x:e} becomes {got:e}, not {want:e}");
        }
    }
}
