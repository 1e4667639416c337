//! IM2COL, IM2COL_3D: each worker fills rows of patches, one output after another. IM2COL_BACK, COL2IM_1D: the sums of the
//! copies of each element, by rows of the image.

use super::conv::image::{ImageLayout, inside, position, steps_inside};
use super::{CHUNK, Kernel, RowPieces, bounded, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::im2col::Im2col;
use crate::ops::{ConvAxis, NodeView};
use crate::tensor::DType::{BF16, F16, F32};
use std::ops::Range;

/// Outputs that are gathered together, from the same elements of an image's row.
const OUTPUTS: usize = 16;

/// Elements of the patches that are gathered together.
const DEPTH: usize = 512;

/// Elements of an image's row that are read at a time.
const SPAN: usize = 2048;

/// Most outputs that a piece of an image tries in IM2COL_BACK, and most rows of its kernel.
const MAX_REACH: usize = 1 << 16;

pub(super) fn select(op: Im2col, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(first), dst) = (node.srcs.get(0), node.dst) else { return Err(unsupported_types(node)) };
    let second = node.srcs.get(1).map(|t| t.dtype());
    let supported = match op {
        Im2col::Im2col { .. } => matches!((second, dst.dtype()), (Some(F32), F16 | F32) | (Some(F16), F16)),
        Im2col::Im2col3d { .. } => matches!((second, dst.dtype()), (Some(F32), F16 | F32)),
        Im2col::Im2colBack { .. } => first.dtype() == F32 && matches!(second, Some(F16 | F32)),
        Im2col::Col2im1d { .. } => matches!(first.dtype(), F16 | BF16 | F32),
    };
    if !supported {
        return Err(unsupported_types(node));
    }
    if dst.is_empty() {
        return Ok(Kernel::new(0, |_| ()));
    }
    let columns = dst.elements().saturating_mul(2);
    Ok(match op {
        Im2col::Im2col { axes: [x, y], two_d } => {
            let (layout, kernel) = if two_d {
                (ImageLayout::Plane, [first.ne()[0], first.ne()[1], 1])
            } else {
                (ImageLayout::Line, [first.ne()[0], 1, 1])
            };
            let patches = Patches { axes: [x, y, ConvAxis::PLAIN], kernel, layout };
            Kernel::new(columns, move |ctx| patches.fill(ctx)).with_local(OUTPUTS * DEPTH + SPAN)
        }
        Im2col::Im2col3d { axes, channels } => {
            let [kw, kh, kd, _] = first.ne();
            let layout = ImageLayout::Volume { channels: channels as usize };
            let patches = Patches { axes, kernel: [kw, kh, kd], layout };
            Kernel::new(columns, move |ctx| patches.fill(ctx)).with_local(OUTPUTS * DEPTH + SPAN)
        }
        Im2col::Im2colBack { axes, two_d } => {
            let kernel = node.srcs.get(1).map_or([1; 4], |t| t.ne());
            let kernel = [kernel[0], if two_d { kernel[1] } else { 1 }];
            let reach = kernel[0].saturating_sub(1).saturating_mul(axes[0].dilation.unsigned_abs() as usize);
            bounded(
                node.op.code(),
                "outputs within the reach of a kernel",
                reach / axes[0].stride as usize,
                MAX_REACH,
            )?;
            bounded(node.op.code(), "rows of a kernel", kernel[1], MAX_REACH)?;
            // Each gradient is added once; each row of the image looks for the outputs of each row of the kernel.
            let search =
                RowPieces::new(dst).count().saturating_mul(kernel[1].saturating_add(reach / axes[0].stride as usize));
            let cost = first.elements().saturating_mul(4).saturating_add(dst.elements()).saturating_add(search);
            Kernel::new(cost, move |ctx| add_patches(ctx, &axes, kernel, two_d)).with_local(2 * CHUNK)
        }
        Im2col::Col2im1d { stride, padding, .. } => {
            let cost = first.elements().saturating_mul(2).saturating_add(dst.elements());
            let (stride, padding) = (stride as usize, padding as usize);
            Kernel::new(cost, move |ctx| add_columns(ctx, stride, padding)).with_local(2 * CHUNK)
        }
    })
}

/// The windows of IM2COL and IM2COL_3D.
struct Patches {
    axes: [ConvAxis; 3],
    kernel: [usize; 3],
    layout: ImageLayout,
}

/// Adjacent outputs of a row of dst's dimension 1.
struct Outputs {
    /// Number of the first.
    first: usize,
    count: usize,
    /// Along y and z, and the image.
    y: usize,
    z: usize,
    image: usize,
}

/// Elements of a patch that are adjacent in dst: some taps along x of one line of the kernel.
struct Run {
    taps: Range<usize>,
    y: usize,
    z: usize,
    channel: usize,
}

impl Patches {
    fn fill(&self, ctx: &mut KernelContext<'_>) {
        let (dst, image) = (ctx.dst(), ctx.src(1));
        let ([patch, width, height, planes], [kw, kh, kd]) = (dst.ne(), self.kernel);
        // Planes of dst for each image.
        let depth = match self.layout {
            ImageLayout::Volume { channels } => planes / (image.ne()[3] / channels),
            _ => 1,
        };
        // In one dimension, dst's dimension 2 is the image.
        let (height, images) = if self.layout == ImageLayout::Line { (1, height) } else { (height, planes / depth) };
        let (rows, span) = ctx.take_local_scratch().split_at_mut(OUTPUTS * DEPTH);
        let (tiles, blocks) = (width.div_ceil(OUTPUTS), patch.div_ceil(DEPTH));
        let grain = 4 * CHUNK / (OUTPUTS * patch.min(DEPTH));
        for item in ctx.chunks(images * depth * height * tiles * blocks, grain).flatten() {
            let (block, rest) = (item % blocks, item / blocks);
            let (tile, line) = (rest % tiles, rest / tiles);
            let first = tile * OUTPUTS;
            let outputs = Outputs {
                first,
                count: OUTPUTS.min(width - first),
                y: line % height,
                z: line / height % depth,
                image: line / height / depth,
            };
            let start = block * DEPTH;
            let end = patch.min(start + DEPTH);
            let mut next = start;
            while next < end {
                let (tap, line) = (next % kw, next / kw);
                let len = (kw - tap).min(end - next);
                let run = Run { taps: tap..tap + len, y: line % kh, z: line / kh % kd, channel: line / kh / kd };
                self.fill_run(&image, &outputs, &run, &mut rows[next - start..], span);
                next += len;
            }
            for (k, row) in rows.chunks_exact(DEPTH).take(outputs.count).enumerate() {
                let at = if self.layout == ImageLayout::Line {
                    [start, first + k, outputs.image, 0]
                } else {
                    [start, first + k, outputs.y, outputs.image * depth + outputs.z]
                };
                dst.store(at, &row[..end - start]);
            }
        }
    }

    /// Fills a run of each output; the rows in `rows` are [`DEPTH`] apart.
    fn fill_run(&self, image: &View<'_>, outputs: &Outputs, run: &Run, rows: &mut [f32], span: &mut [f32]) {
        let ([ax, ay, az], [w, h, d], len) = (&self.axes, self.layout.extents(image.desc()), run.taps.len());
        let line = inside(ay, outputs.y, run.y, h).zip(inside(az, outputs.z, run.z, d));
        let Some((y, z)) = line else {
            for row in rows.chunks_mut(DEPTH).take(outputs.count) {
                row[..len].fill(0.0);
            }
            return;
        };
        let at = |x: i64| self.layout.index([x as usize, y, z], run.channel, outputs.image);
        let dilation = i64::from(ax.dilation);
        if dilation < 1 {
            for (o, row) in rows.chunks_mut(DEPTH).take(outputs.count).enumerate() {
                for (value, tap) in row[..len].iter_mut().zip(run.taps.clone()) {
                    *value = 0.0;
                    if let Some(x) = inside(ax, outputs.first + o, tap, w) {
                        image.load(at(x as i64), std::slice::from_mut(value));
                    }
                }
            }
            return;
        }
        // All elements from the first tap of the first output to the last tap of the last one, if they are few.
        let low = position(ax, outputs.first, run.taps.start).clamp(0, w as i64);
        let high = position(ax, outputs.first + outputs.count - 1, run.taps.end - 1).clamp(low - 1, w as i64 - 1);
        let span = span.get_mut(..(high + 1 - low) as usize).map(|span| image.fetch(at(low), span));
        for (o, row) in rows.chunks_mut(DEPTH).take(outputs.count).enumerate() {
            let start = position(ax, outputs.first + o, run.taps.start);
            let range = steps_inside(start, dilation, len, w);
            let row = &mut row[..len];
            if range.len() < len {
                row.fill(0.0);
            }
            if range.is_empty() {
                continue;
            }
            let first = start + range.start as i64 * dilation;
            let row = &mut row[range];
            match span {
                Some(span) => {
                    let span = &span[(first - low) as usize..];
                    if dilation == 1 {
                        row.iter_mut().zip(span).for_each(|(value, x)| *value = *x);
                    } else {
                        row.iter_mut().zip(span.iter().step_by(dilation as usize)).for_each(|(value, x)| *value = *x);
                    }
                }
                None => image.load_every(at(first), dilation as usize, row),
            }
        }
    }
}

/// The smallest and the largest output, as far as there are `count`, for which some tap reads an element of `elements`: taps are
/// `reach` apart from the first to the last.
fn outputs_reading(axis: &ConvAxis, reach: i64, elements: &Range<usize>, count: usize) -> Range<usize> {
    let stride = i64::from(axis.stride);
    let shifted = |element: usize, tap: i64| element as i64 + i64::from(axis.padding) - tap;
    let low = shifted(elements.start, reach.max(0));
    let high = shifted(elements.end - 1, reach.min(0));
    let first = low.max(0).div_euclid(stride) + i64::from(low.max(0).rem_euclid(stride) > 0);
    let end = (high.div_euclid(stride) + 1).clamp(0, count as i64);
    first.min(end) as usize..end as usize
}

/// The taps of an output that read elements of `elements`, a range.
fn taps_reading(axis: &ConvAxis, output: usize, kernel: usize, elements: &Range<usize>) -> Range<usize> {
    let (start, step) = (position(axis, output, 0) - elements.start as i64, i64::from(axis.dilation));
    match step {
        1.. => steps_inside(start, step, kernel, elements.len()),
        0 if (0..elements.len() as i64).contains(&start) => 0..kernel,
        0 => 0..0,
        _ => {
            // From the last tap to the first.
            let last = start + (kernel as i64 - 1) * step;
            let range = steps_inside(last, -step, kernel, elements.len());
            kernel - range.end..kernel - range.start
        }
    }
}

/// IM2COL_BACK: each piece of a row of the image is the sum of the gradients of its copies, in the order of the taps.
fn add_patches(ctx: &mut KernelContext<'_>, [ax, ay]: &[ConvAxis; 2], [kw, kh]: [usize; 2], two_d: bool) {
    let (dst, gradient) = (ctx.dst(), ctx.src(0));
    let [_, width, height, _] = gradient.ne();
    let reach = (kw as i64 - 1) * i64::from(ax.dilation);
    let [sums, values, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let cost = gradient.desc().elements() / dst.desc().elements() + kh / dst.ne()[0].min(CHUNK);
    RowPieces::with_cost(dst.desc(), cost, 1, CHUNK).share(ctx, |i, n| {
        let (elements, sums) = (i[0]..i[0] + n, &mut sums[..n]);
        let (y, channel, image) = if two_d { (i[1], i[2], i[3]) } else { (0, i[1], i[2]) };
        sums.fill(0.0);
        let outputs = outputs_reading(ax, reach, &elements, width);
        for ky in 0..kh {
            let oy = if two_d {
                let distance = y as i64 - position(ay, 0, ky);
                let is_output = distance >= 0 && distance % i64::from(ay.stride) == 0;
                let oy = (distance / i64::from(ay.stride)) as usize;
                if !is_output || oy >= height {
                    continue;
                }
                oy
            } else {
                0
            };
            let mut add = |ox: usize| {
                let taps = taps_reading(ax, ox, kw, &elements);
                for first in taps.clone().step_by(CHUNK) {
                    let values = &mut values[..CHUNK.min(taps.end - first)];
                    let column = (channel * kh + ky) * kw + first;
                    let at = if two_d { [column, ox, oy, image] } else { [column, ox, image, 0] };
                    for (k, value) in gradient.fetch(at, values).iter().enumerate() {
                        sums[(position(ax, ox, first + k) - elements.start as i64) as usize] += value;
                    }
                }
            };
            // An element's copies in ascending order of the taps.
            if ax.dilation >= 0 {
                outputs.clone().rev().for_each(&mut add);
            } else {
                outputs.clone().for_each(&mut add);
            }
        }
        dst.store(i, sums);
    });
}

/// COL2IM_1D: each piece of a channel is the sum of the samples of the columns that reach it.
fn add_columns(ctx: &mut KernelContext<'_>, stride: usize, padding: usize) {
    let (dst, columns) = (ctx.dst(), ctx.src(0));
    let ([rows, count, ..], [_, channels, ..]) = (columns.ne(), dst.ne());
    let samples = rows / channels;
    let [sums, values, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let cost = columns.desc().elements() / dst.desc().elements();
    RowPieces::with_cost(dst.desc(), cost, 1, CHUNK).share(ctx, |i, n| {
        let ([first, channel, ..], sums) = (i, &mut sums[..n]);
        // In the signal with both ends.
        let (start, end) = (first + padding, first + padding + n);
        sums.fill(0.0);
        let earliest = (start + 1).saturating_sub(samples).div_ceil(stride);
        for column in earliest..count.min((end - 1) / stride + 1) {
            let at = column * stride;
            let taps = start.saturating_sub(at)..samples.min(end - at);
            for tap in taps.clone().step_by(CHUNK) {
                let values = &mut values[..CHUNK.min(taps.end - tap)];
                let values = columns.fetch([channel * samples + tap, column, 0, 0], values);
                for (sum, value) in sums[at + tap - start..].iter_mut().zip(values) {
                    *sum += value;
                }
            }
        }
        dst.store(i, sums);
    });
}
