//! POOL_1D, POOL_2D: windows over rows of an image, by pieces of rows of the destination. POOL_2D_BACK: by pieces of rows of the
//! image, from the windows that cover them.

use super::{CHUNK, Kernel, RowPieces, bounded, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::pool::{Pool, PoolAxis, PoolKind};
use crate::tensor::DType::{F16, F32};
use std::ops::Range;

/// Most elements of a window.
const MAX_WINDOW: usize = 1 << 20;

/// Most work for one element of POOL_2D_BACK: with wide padding, any number of windows covers it.
const MAX_ELEMENT_COST: usize = 1 << 24;

/// Most elements of a window whose maximum POOL_2D_BACK searches, once for each element that it covers.
const MAX_SEARCHED: usize = 1 << 11;

pub(super) fn select(op: Pool, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (dst, dtype) = (node.dst, |i| node.srcs.get(i).map(|t| t.dtype()));
    let supported = match op {
        Pool::Pool2dBack { .. } => dtype(0) == Some(F32) && matches!(dtype(1), Some(F16 | F32)),
        _ => matches!(dtype(0), Some(F16 | F32)),
    };
    let (true, F32, Some(src)) = (supported, dst.dtype(), node.srcs.get(0)) else {
        return Err(unsupported_types(node));
    };
    if dst.is_empty() {
        return Ok(Kernel::new(0, |_| ()));
    }
    let [w, h, ..] = src.ne();
    let (code, most) = (node.op.code(), MAX_WINDOW);
    Ok(match op {
        Pool::Pool1d { kind, axis } => {
            let window = axis.window(w);
            bounded(code, "elements of a window", window, most)?;
            let pool = Forward { kind, axes: [axis, PoolAxis::SINGLE], whole: false };
            Kernel::new(dst.elements().saturating_mul(window), move |ctx| pool.run(ctx, window)).with_local(2 * CHUNK)
        }
        Pool::Pool2d { kind, axes } => {
            let window = axes[0].window(w).saturating_mul(axes[1].window(h));
            bounded(code, "elements of a window", window, most)?;
            let pool = Forward { kind, axes, whole: true };
            Kernel::new(dst.elements().saturating_mul(window), move |ctx| pool.run(ctx, window)).with_local(2 * CHUNK)
        }
        Pool::Pool2dBack { kind, axes } => {
            let [w, h, ..] = dst.ne();
            let window = axes[0].window(w).saturating_mul(axes[1].window(h));
            bounded(code, "elements of a window", window, if kind == PoolKind::Max { MAX_SEARCHED } else { most })?;
            // Each row of a window adds its part, and the maximum is searched for each row.
            let per_gradient = if kind == PoolKind::Max { window.saturating_mul(axes[1].window(h)) } else { window };
            let cost = src.elements().saturating_mul(per_gradient).saturating_add(dst.elements());
            let per_element = cost / dst.elements();
            bounded(code, "products of an element", per_element, MAX_ELEMENT_COST)?;
            Kernel::new(cost, move |ctx| backward(ctx, kind, &axes, per_element)).with_local(2 * CHUNK)
        }
    })
}

impl PoolAxis {
    /// A window of one element.
    const SINGLE: PoolAxis = PoolAxis { kernel: 1, stride: 1, padding: 0 };

    /// Most elements of a window inside of an image of `extent`.
    fn window(&self, extent: usize) -> usize {
        extent.min(self.kernel as usize)
    }

    /// The elements of an image of `extent` in the window of an output.
    fn inside(&self, output: usize, extent: usize) -> Range<usize> {
        let start = output as i64 * i64::from(self.stride) - i64::from(self.padding);
        let at = |i: i64| i.clamp(0, extent as i64) as usize;
        at(start)..at(start + i64::from(self.kernel))
    }

    /// The outputs whose windows cover one of `elements`, as far as there are `count`.
    fn covering(&self, elements: &Range<usize>, count: usize) -> Range<usize> {
        let (stride, padding) = (i64::from(self.stride), i64::from(self.padding));
        // The window of output o covers elements o * stride - padding to o * stride - padding + kernel - 1.
        let low = (elements.start as i64 + padding - i64::from(self.kernel) + 1).max(0);
        let high = elements.end as i64 - 1 + padding;
        let first = low.div_euclid(stride) + i64::from(low % stride > 0);
        let end = (high.div_euclid(stride) + 1).clamp(0, count as i64);
        first.min(end) as usize..end as usize
    }
}

/// POOL_1D and POOL_2D.
struct Forward {
    kind: PoolKind,
    axes: [PoolAxis; 2],
    /// Means are divided by the size of the whole window, not by the number of elements inside of the image.
    whole: bool,
}

impl Forward {
    fn run(&self, ctx: &mut KernelContext<'_>, window: usize) {
        let (dst, src, [ax, ay]) = (ctx.dst(), ctx.src(0), &self.axes);
        let [w, h, ..] = src.ne();
        let [values, row, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
        RowPieces::with_cost(dst.desc(), window, 1, CHUNK).share(ctx, |i, n| {
            let values = &mut values[..n];
            values.fill(if self.kind == PoolKind::Max { -f32::MAX } else { 0.0 });
            // POOL_1D does not pool along dimension 1, whose index then is the window.
            for iy in ay.inside(i[1], h) {
                self.add_row(&src, [iy, i[2], i[3]], i[0], values, row);
            }
            if self.kind == PoolKind::Average {
                let whole = (i64::from(ax.kernel) * i64::from(ay.kernel)) as f32;
                for (k, value) in values.iter_mut().enumerate() {
                    *value = match ax.inside(i[0] + k, w).len() {
                        _ if self.whole => *value / whole,
                        0 => 0.0,
                        inside => *value / inside as f32,
                    };
                }
            }
            dst.store(i, values);
        });
    }

    /// Adds a row of the image to the values of the outputs from `first` on, or takes the maximum.
    fn add_row(
        &self,
        src: &View<'_>,
        [i1, i2, i3]: [usize; 3],
        first: usize,
        values: &mut [f32],
        row: &mut [f32; CHUNK],
    ) {
        let (ax, w) = (&self.axes[0], src.ne()[0]);
        // As many outputs at a time as read no more elements than the buffer holds; of longer windows one, in parts.
        let stride = ax.stride as usize;
        let at_once = CHUNK.saturating_sub(ax.window(w)) / stride + 1;
        for (group, values) in values.chunks_mut(at_once).enumerate() {
            let first = first + group * at_once;
            let all = ax.inside(first, w).start..ax.inside(first + values.len() - 1, w).end;
            for start in all.clone().step_by(CHUNK) {
                let part = start..all.end.min(start + CHUNK);
                let elements = src.fetch([part.start, i1, i2, i3], &mut row[..part.len()]);
                for (k, value) in values.iter_mut().enumerate() {
                    let window = ax.inside(first + k, w);
                    let window = window.start.max(part.start)..window.end.min(part.end);
                    if window.is_empty() {
                        continue;
                    }
                    let elements = elements[window.start - part.start..window.end - part.start].iter();
                    *value = match self.kind {
                        PoolKind::Average => elements.fold(*value, |sum, x| sum + x),
                        // Of an element and a smaller or unordered maximum, the element counts: as in ggml, a NaN is
                        // replaced by the element after it.
                        PoolKind::Max => elements.fold(*value, |max, &x| if x < max { max } else { x }),
                    };
                }
            }
        }
    }
}

/// The first maximum of a window: its index along x and y. `None` if all elements are at most `-f32::MAX`.
fn first_maximum(
    forward: &View<'_>,
    [x, y]: [Range<usize>; 2],
    [i2, i3]: [usize; 2],
    row: &mut [f32; CHUNK],
) -> Option<[usize; 2]> {
    let (mut max, mut found) = (-f32::MAX, None);
    for iy in y {
        for start in x.clone().step_by(CHUNK) {
            let elements = forward.fetch([start, iy, i2, i3], &mut row[..CHUNK.min(x.end - start)]);
            for (k, &value) in elements.iter().enumerate() {
                // As in ggml, a NaN counts, and the element after it too.
                if value <= max {
                    continue;
                }
                (max, found) = (value, Some([start + k, iy]));
            }
        }
    }
    found
}

/// POOL_2D_BACK: each piece of a row of the image is the sum of the gradients of the windows that cover it, in the order of the
/// windows.
fn backward(ctx: &mut KernelContext<'_>, kind: PoolKind, [ax, ay]: &[PoolAxis; 2], cost: usize) {
    let (dst, gradient, forward) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let ([w, h, ..], [width, height, ..]) = (dst.ne(), gradient.ne());
    let [sums, row, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let whole = (i64::from(ax.kernel) * i64::from(ay.kernel)) as f32;
    RowPieces::with_cost(dst.desc(), cost, 1, CHUNK).share(ctx, |i, n| {
        let ([x, y, i2, i3], piece, sums) = (i, i[0]..i[0] + n, &mut sums[..n]);
        sums.fill(0.0);
        for oy in ay.covering(&(y..y + 1), height) {
            for ox in ax.covering(&piece, width) {
                let mut value = [0.0];
                gradient.load([ox, oy, i2, i3], &mut value);
                let (window, [value]) = (ax.inside(ox, w), value);
                match kind {
                    PoolKind::Average => {
                        let part = window.start.max(x) - x..window.end.min(piece.end) - x;
                        sums[part].iter_mut().for_each(|sum| *sum += value / whole);
                    }
                    PoolKind::Max => {
                        let found = first_maximum(&forward, [window, ay.inside(oy, h)], [i2, i3], row);
                        if let Some([at, _]) = found.filter(|&[at, line]| line == y && piece.contains(&at)) {
                            sums[at - x] += value;
                        }
                    }
                }
            }
        }
        dst.store(i, sums);
    });
}
