//! Convolutions as products of a matrix of kernels and a matrix of patches.
//!
//! The kernels are converted to f32 once per node: a row for each output channel, with the taps of an input channel one after
//! another. Workers then claim *units*: a *tile* of [`TILE`] outputs by some output channels. A unit gathers the patches of its
//! tile in cache blocks of [`DEPTH`] taps (im2col into scratch), a line of outputs for each tap, and multiplies them. So the
//! matrix of all patches, many times as large as the image, is never written to memory.
//!
//! A transposed convolution of stride s is split into s *phases* along each dimension: the outputs whose index leaves the
//! remainder r when divided by s. They depend only on taps `r + j * s`, and output `r + o * s` is the sum over j of these taps
//! times input `o - j`: a convolution of stride 1 with dilation -1, whose outputs are s apart.

use super::image::{ImageLayout, inside, position, steps_inside};
use crate::cpu::memory::View;
use crate::cpu::ops::{CHUNK, Kernel, MathMode, RowPieces};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::attention_gemm::{AttentionGemm, COLUMN_MULTIPLE, GemmShape};
use crate::ops::ConvAxis;
use crate::ops::conv::Conv;
use crate::tensor::TensorDesc;
use std::ops::Range;

/// Outputs of a tile: a few vectors of every instruction set.
const TILE: usize = 4 * COLUMN_MULTIPLE;

/// Taps of a cache block. Two vectors of each of its lines fit the L1 cache.
const DEPTH: usize = 256;

/// Most output channels of a unit: its sums fit the L2 cache beside the patches.
const MAX_ROWS: usize = 384;

/// Output channels of a unit are a multiple of this, where there are enough: the rows of the widest register tile.
const ROW_MULTIPLE: usize = 6;

/// Most output channels of a unit in exact mode, whose f64 sums lie on the stack.
const EXACT_ROWS: usize = 8;

/// Units per worker, if there are enough output channels: limits the wait for the slowest worker to part of a unit.
const UNITS_PER_WORKER: usize = 4;

/// Multiplications of a unit, if it then has enough output channels: about a millisecond, as a run can only pause between two
/// units.
const UNIT_PRODUCTS: usize = 1 << 26;

/// Floats of scratch for each worker: the patches of a cache block and the sums of a unit.
const SCRATCH: usize = (DEPTH + MAX_ROWS) * TILE;

/// Sizes of a node, computed from its op and its shapes.
struct ConvPlan {
    math_mode: MathMode,
    /// Along x, y and z; in a transposed convolution, the taps of a phase.
    axes: [ConvAxis; 3],
    /// Distance between the outputs of a phase, along x, y and z; 1 unless the convolution is transposed.
    steps: [usize; 3],
    transposed: bool,
    image: ImageLayout,
    dst: ImageLayout,
    /// Elements of an image and outputs along x, y and z.
    extents: [usize; 3],
    outputs: [usize; 3],
    /// Taps of a kernel along x, y and z.
    taps: [usize; 3],
    in_channels: usize,
    out_channels: usize,
    images: usize,
}

/// The kernel of a convolution or of its transpose.
pub(super) fn kernel(
    op: Conv,
    kernel: &TensorDesc,
    image: &TensorDesc,
    dst: &TensorDesc,
    math_mode: MathMode,
) -> Kernel {
    let plan = ConvPlan::new(op, kernel, image, dst, math_mode);
    // Cost: as in MUL_MAT, a multiplication costs a quarter of an element-wise op.
    let taps = plan.row() / plan.steps.iter().product::<usize>().max(1);
    let products = dst.elements().saturating_mul(taps.max(1)) / 4;
    // A tile of few outputs, as the tiles of a transposed convolution with a large stride, costs as much as hundreds of them.
    let phases = plan.phases(0) * plan.phases(1);
    let tiles = dst.elements().div_ceil(TILE).max(phases.saturating_mul(plan.images)).saturating_mul(256);
    let cost = products.saturating_add(dst.elements()).saturating_add(kernel.elements()).saturating_add(tiles);
    let shared = kernel.elements().saturating_mul(size_of::<f32>());
    Kernel::new(cost, move |ctx| plan.run(ctx)).with_local(SCRATCH).with_shared(shared).with_syncs(1)
}

/// Outputs of a tile that are adjacent along x.
#[derive(Clone, Copy, Default)]
struct Segment {
    /// The first output, within its phase.
    at: [usize; 3],
    /// Its place in the tile.
    start: usize,
    len: usize,
}

/// A tile: the segments of its outputs, of one phase and one image.
struct Tile {
    segments: [Segment; TILE],
    count: usize,
    /// Remainder of the outputs' index along x, y and z.
    phase: [usize; 3],
    image: usize,
    /// Outputs, rounded up to whole vectors.
    columns: usize,
}

impl ConvPlan {
    fn new(op: Conv, kernel: &TensorDesc, image: &TensorDesc, dst: &TensorDesc, math_mode: MathMode) -> ConvPlan {
        let ([kw, kh, kd, _], plane) = (kernel.ne(), ImageLayout::Plane);
        let plain = ConvAxis::PLAIN;
        // A phase of a transposed convolution.
        let phase = ConvAxis { dilation: -1, ..plain };
        let (axes, steps, taps, layouts) = match op {
            Conv::Conv2d { axes: [x, y] } | Conv::Conv2dDw { axes: [x, y] } => {
                ([x, y, plain], [1; 3], [kw, kh, 1], [plane; 2])
            }
            Conv::Conv3d { axes, channels, outputs, .. } => {
                let volume = |channels: i32| ImageLayout::Volume { channels: channels as usize };
                (axes, [1; 3], [kw, kh, kd], [volume(channels), volume(outputs)])
            }
            Conv::Transpose1d { stride } => {
                ([phase, plain, plain], [stride as usize, 1, 1], [kw, 1, 1], [ImageLayout::Line; 2])
            }
            Conv::Transpose2d { stride } => {
                ([phase, phase, plain], [stride as usize, stride as usize, 1], [kw, kh, 1], [plane; 2])
            }
        };
        let [i, d] = [image.ne(), dst.ne()];
        let (in_channels, out_channels, images) = match op {
            Conv::Conv3d { channels, batches, outputs, .. } => (channels as usize, outputs as usize, batches as usize),
            Conv::Transpose1d { .. } => (i[1], d[1], 1),
            _ => (i[2], d[2], i[3]),
        };
        ConvPlan {
            math_mode,
            axes,
            steps,
            transposed: matches!(op, Conv::Transpose1d { .. } | Conv::Transpose2d { .. }),
            image: layouts[0],
            dst: layouts[1],
            extents: layouts[0].extents(image),
            outputs: layouts[1].extents(dst),
            taps,
            in_channels,
            out_channels,
            images,
        }
    }

    /// Taps of an output channel, of all phases together.
    fn row(&self) -> usize {
        self.taps.iter().product::<usize>() * self.in_channels
    }

    /// Number of phases along dimension `d`.
    fn phases(&self, d: usize) -> usize {
        self.steps[d].min(self.outputs[d])
    }

    /// Taps of phase `r` along dimension `d`.
    fn phase_taps(&self, d: usize, r: usize) -> usize {
        self.taps[d].saturating_sub(r).div_ceil(self.steps[d])
    }

    /// Taps of the phases before phase `r` along dimension `d`.
    fn taps_before(&self, d: usize, r: usize) -> usize {
        r * (self.taps[d] / self.steps[d]) + r.min(self.taps[d] % self.steps[d])
    }

    /// Where the taps of phase `[rx, ry, 0]` begin in the row of an output channel. The phases are ordered by y, then by x.
    fn phase_start(&self, [rx, ry, _]: [usize; 3]) -> usize {
        let before = self.taps_before(1, ry) * self.taps[0] + self.phase_taps(1, ry) * self.taps_before(0, rx);
        before * self.in_channels
    }

    /// Outputs of phase `r` along dimension `d`.
    fn phase_outputs(&self, d: usize, r: usize) -> usize {
        (self.outputs[d] - r).div_ceil(self.steps[d])
    }

    fn run(&self, ctx: &mut KernelContext<'_>) {
        if self.transposed {
            self.pack_transposed(ctx);
        } else {
            self.pack(ctx);
        }
        ctx.sync();
        let (phases_x, phases_y) = (self.phases(0), self.phases(1));
        // Phase 0 has the most outputs.
        let tiles = (0..3).map(|d| self.phase_outputs(d, 0)).product::<usize>().div_ceil(TILE);
        let all_tiles = tiles * phases_x * phases_y * self.images;
        let rows = self.unit_rows(ctx.dividing_workers(), all_tiles);
        let blocks = self.out_channels.div_ceil(rows);
        let products = rows.saturating_mul(TILE).saturating_mul(self.row() / (phases_x * phases_y));
        let grain = (UNIT_PRODUCTS / 256 / products.max(1)).clamp(1, 64);
        let (patches, sums) = ctx.take_local_scratch().split_at_mut(DEPTH * TILE);
        for unit in ctx.chunks(all_tiles * blocks, grain).flatten() {
            // Units of the same output channels are adjacent: they share kernels in the cache.
            let (block, rest) = (unit / all_tiles, unit % all_tiles);
            let (tile, rest) = (rest % tiles, rest / tiles);
            let phase = [rest % phases_x, rest / phases_x % phases_y, 0];
            let Some(tile) = self.tile(phase, rest / phases_x / phases_y, tile * TILE) else { continue };
            let first = block * rows;
            let channels = first..(first + rows).min(self.out_channels);
            match self.math_mode {
                MathMode::Fast => self.multiply(ctx, &tile, channels, patches, sums),
                MathMode::Exact => self.multiply_exactly(ctx, &tile, channels, patches),
            }
        }
    }

    /// Output channels of a unit, if there are `tiles` tiles.
    fn unit_rows(&self, workers: usize, tiles: usize) -> usize {
        if self.math_mode == MathMode::Exact {
            return EXACT_ROWS;
        }
        let blocks = (UNITS_PER_WORKER * workers).div_ceil(tiles.max(1));
        let short = (UNIT_PRODUCTS / TILE / self.row().max(1)).clamp(ROW_MULTIPLE, MAX_ROWS);
        let blocks = blocks.max(self.out_channels.div_ceil(short));
        self.out_channels.div_ceil(blocks).next_multiple_of(ROW_MULTIPLE).min(MAX_ROWS)
    }

    /// Converts the kernels to f32. A row of the product is the part of an output channel, in the kernel's own order.
    fn pack(&self, ctx: &KernelContext<'_>) {
        let (kernel, shared) = (ctx.src(Conv::KERNEL), ctx.shared());
        let flat = kernel.desc().reshaped([kernel.desc().elements(), 1, 1, 1]);
        let kernel = flat.as_ref().map_or(kernel, |flat| kernel.with_desc(flat));
        let ([n0, n1, n2, _], mut buffer) = (kernel.ne(), [0.0; CHUNK]);
        RowPieces::new(kernel.desc()).share(ctx, |[i0, i1, i2, i3], n| {
            let at = ((i3 * n2 + i2) * n1 + i1) * n0 + i0;
            shared.write(at * size_of::<f32>(), kernel.fetch([i0, i1, i2, i3], &mut buffer[..n]));
        });
    }

    /// As [`ConvPlan::pack`], for a transposed convolution: the taps of an output channel are ordered by phase, then by input
    /// channel.
    fn pack_transposed(&self, ctx: &KernelContext<'_>) {
        let (kernel, shared) = (ctx.src(Conv::KERNEL), ctx.shared());
        let (mut buffer, mut taps) = ([0.0; CHUNK], [0.0; CHUNK]);
        let ([step, step_y, _], line) = (self.steps, self.image == ImageLayout::Line);
        RowPieces::new(kernel.desc()).share(ctx, |i, n| {
            // [K, OC, IC] or [KW, KH, OC, IC].
            let (first, ky, out, channel) = if line { (i[0], 0, i[1], i[2]) } else { (i[0], i[1], i[2], i[3]) };
            let values = kernel.fetch(i, &mut buffer[..n]);
            for kx in first..first + n.min(step) {
                let phase = [kx % step, ky % step_y, 0];
                let count = (first + n - kx).div_ceil(step);
                for (tap, value) in taps.iter_mut().zip(values[kx - first..].iter().step_by(step)) {
                    *tap = *value;
                }
                let lines = channel * self.phase_taps(1, phase[1]) + ky / step_y;
                let at = self.phase_start(phase) + lines * self.phase_taps(0, phase[0]) + kx / step;
                shared.write((out * self.row() + at) * size_of::<f32>(), &taps[..count]);
            }
        });
    }

    /// The outputs from number `first` on of a phase of an image; `None` if there are none.
    fn tile(&self, phase: [usize; 3], image: usize, first: usize) -> Option<Tile> {
        let [width, height, depth] = [0, 1, 2].map(|d| self.phase_outputs(d, phase[d]));
        let end = (first + TILE).min(width * height * depth);
        let mut tile = Tile { segments: [Segment::default(); TILE], count: 0, phase, image, columns: 0 };
        let mut next = first;
        while next < end {
            let (x, line) = (next % width, next / width);
            let len = (width - x).min(end - next);
            tile.segments[tile.count] = Segment { at: [x, line % height, line / height], start: next - first, len };
            tile.count += 1;
            next += len;
        }
        tile.columns = end.saturating_sub(first).next_multiple_of(COLUMN_MULTIPLE);
        (tile.count > 0).then_some(tile)
    }

    /// Taps of a tile's phase along x, y and z.
    fn tile_taps(&self, tile: &Tile) -> [usize; 3] {
        [0, 1, 2].map(|d| self.phase_taps(d, tile.phase[d]))
    }

    /// Gathers the patches of a tile for the taps from number `first` on: a line of `tile.columns` for each tap.
    fn gather(&self, image: &View<'_>, tile: &Tile, first: usize, lines: &mut [f32]) {
        let ([nx, ny, nz], [w, h, d], [ax, ay, az]) = (self.tile_taps(tile), self.extents, &self.axes);
        let step = i64::from(ax.stride);
        for (k, line) in lines.chunks_exact_mut(tile.columns).enumerate() {
            let (tap, rest) = ((first + k) % nx, (first + k) / nx);
            let (tap_y, tap_z, channel) = (rest % ny, rest / ny % nz, rest / ny / nz);
            for segment in &tile.segments[..tile.count] {
                let part = &mut line[segment.start..segment.start + segment.len];
                let [x, y, z] = segment.at;
                let (Some(y), Some(z)) = (inside(ay, y, tap_y, h), inside(az, z, tap_z, d)) else {
                    part.fill(0.0);
                    continue;
                };
                let start = position(ax, x, tap);
                let range = steps_inside(start, step, part.len(), w);
                part[..range.start].fill(0.0);
                part[range.end..].fill(0.0);
                if !range.is_empty() {
                    let x = (start + range.start as i64 * step) as usize;
                    image.load_every(self.image.index([x, y, z], channel, tile.image), step as usize, &mut part[range]);
                }
            }
            let last = &tile.segments[tile.count - 1];
            line[last.start + last.len..].fill(0.0);
        }
    }

    /// Calls `each(first, taps, lines)` for each cache block of a tile's taps: the place of the first tap in the row of an output
    /// channel, the number of taps, and their patches.
    fn for_each_block(
        &self,
        ctx: &KernelContext<'_>,
        tile: &Tile,
        patches: &mut [f32],
        mut each: impl FnMut(usize, usize, &[f32]),
    ) {
        let (image, phase_start) = (ctx.src(Conv::IMAGE), self.phase_start(tile.phase));
        let taps = self.tile_taps(tile).iter().product::<usize>() * self.in_channels;
        for first in (0..taps).step_by(DEPTH) {
            let depth = DEPTH.min(taps - first);
            let lines = &mut patches[..depth * tile.columns];
            self.gather(&image, tile, first, lines);
            each(phase_start + first, depth, lines);
        }
    }

    /// Computes a unit by SIMD kernels.
    fn multiply(
        &self,
        ctx: &KernelContext<'_>,
        tile: &Tile,
        channels: Range<usize>,
        patches: &mut [f32],
        sums: &mut [f32],
    ) {
        let (gemm, row, rows, columns) = (AttentionGemm::get(), self.row(), channels.len(), tile.columns);
        let (sums, mut add) = (&mut sums[..rows * columns], false);
        self.for_each_block(ctx, tile, patches, |first, depth, lines| {
            let at = channels.start * row + first;
            let kernels = ctx.shared().read::<f32>(at * size_of::<f32>(), (rows - 1) * row + depth);
            let shape = GemmShape { m: rows, n: columns, k: depth, row_stride: row, column_stride: 1, add };
            gemm.mul_columns(sums, kernels, lines, &shape);
            add = true;
        });
        if !add {
            // A phase without taps: the stride is larger than the kernel.
            sums.fill(0.0);
        }
        for (channel, sums) in channels.zip(sums.chunks_exact(columns)) {
            self.store(ctx, tile, channel, sums);
        }
    }

    /// Computes a unit by f32 products that are accumulated in f64.
    fn multiply_exactly(&self, ctx: &KernelContext<'_>, tile: &Tile, channels: Range<usize>, patches: &mut [f32]) {
        let (row, columns) = (self.row(), tile.columns);
        let mut sums = [[0f64; TILE]; EXACT_ROWS];
        self.for_each_block(ctx, tile, patches, |first, depth, lines| {
            for (sums, channel) in sums.iter_mut().zip(channels.clone()) {
                let kernel = ctx.shared().read::<f32>((channel * row + first) * size_of::<f32>(), depth);
                for (line, weight) in lines.chunks_exact(columns).zip(kernel) {
                    for (sum, x) in sums.iter_mut().zip(line) {
                        *sum += f64::from(x * weight);
                    }
                }
            }
        });
        for (channel, sums) in channels.zip(&sums) {
            self.store(ctx, tile, channel, &sums.map(|sum| sum as f32));
        }
    }

    /// Writes the outputs of a tile and an output channel.
    fn store(&self, ctx: &KernelContext<'_>, tile: &Tile, channel: usize, sums: &[f32]) {
        let dst = ctx.dst();
        for segment in &tile.segments[..tile.count] {
            let at = std::array::from_fn(|d| segment.at[d] * self.steps[d] + tile.phase[d]);
            let sums = &sums[segment.start..segment.start + segment.len];
            dst.store_every(self.dst.index(at, channel, tile.image), self.steps[0], sums);
        }
    }
}
