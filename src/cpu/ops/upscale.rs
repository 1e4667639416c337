//! UPSCALE: for each piece of a row of the destination, a table of the elements along x that each value is interpolated from, and
//! their weights; then the rows. With antialiasing, the weights of all elements under the filter.

use super::{CHUNK, Kernel, RowPieces, bounded, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::upscale::{ScaleMode, Upscale};
use crate::tensor::DType::F32;
use std::ops::Range;

/// Values that are interpolated together.
const VALUES: usize = 256;

/// Elements of a row that are read at a time.
const SPAN: usize = 2 * CHUNK;

/// Most elements along a dimension from which a value is interpolated, without antialiasing.
const MAX_TAPS: usize = 4;

/// Most elements from which a value is interpolated, with antialiasing.
const MAX_FILTERED: usize = 1 << 22;

/// Floats of scratch for each worker: a row of the source for each tap along y, and values.
const SCRATCH: usize = MAX_TAPS * SPAN + VALUES;

pub(super) fn select(op: Upscale, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(src) = node.srcs.get(0).filter(|t| t.dtype() == F32 && node.dst.dtype() == F32) else {
        return Err(unsupported_types(node));
    };
    if node.dst.is_empty() {
        return Ok(Kernel::new(0, |_| ()));
    }
    let axes = [0, 1].map(|d| ScaleAxis::new(op, src.ne()[d], node.dst.ne()[d]));
    let per_value = if op.antialias {
        axes.map(|axis| (2.0 * axis.support()).ceil() as usize + 1).iter().fold(1, |n: usize, &k| n.saturating_mul(k))
    } else {
        taps(op.mode) * taps(op.mode) + 2
    };
    bounded(node.op.code(), "elements for a value", per_value, MAX_FILTERED)?;
    let planes = [2, 3].map(|d| src.ne()[d]);
    let cost = node.dst.elements().saturating_mul(per_value);
    Ok(Kernel::new(cost, move |ctx| {
        let scale = Scale { mode: op.mode, axes, planes };
        if op.antialias { scale.filter(ctx, per_value) } else { scale.interpolate(ctx, per_value) }
    })
    .with_local(SCRATCH))
}

fn taps(mode: ScaleMode) -> usize {
    match mode {
        ScaleMode::Nearest => 1,
        ScaleMode::Bilinear => 2,
        ScaleMode::Bicubic => MAX_TAPS,
    }
}

/// The coordinates of dimension 0 or 1. All arithmetic is f32, in ggml's order.
#[derive(Clone, Copy)]
struct ScaleAxis {
    /// Elements of the source.
    n: usize,
    /// Elements of the destination for each element of the source.
    factor: f32,
    /// Distance of an element's centre from its index.
    offset: f32,
}

impl ScaleAxis {
    fn new(op: Upscale, n: usize, out: usize) -> ScaleAxis {
        ScaleAxis { n, factor: op.factor(n, out), offset: op.offset() }
    }

    /// The nearest element to value `i`.
    fn nearest(&self, i: usize) -> usize {
        ((i as f32 / self.factor) as usize).min(self.n - 1)
    }

    /// The coordinate of value `i` in the source.
    fn coordinate(&self, i: usize) -> f32 {
        (i as f32 + self.offset) / self.factor - self.offset
    }

    /// The elements and the weights of value `i`, as many as `mode` uses.
    fn taps(&self, mode: ScaleMode, i: usize) -> ([usize; MAX_TAPS], [f32; MAX_TAPS]) {
        let clamp = |x: i64| x.clamp(0, self.n as i64 - 1) as usize;
        match mode {
            ScaleMode::Nearest => ([self.nearest(i), 0, 0, 0], [1.0, 0.0, 0.0, 0.0]),
            ScaleMode::Bilinear => {
                let x = self.coordinate(i);
                let low = x.floor() as i64;
                let (low, high) = (clamp(low), clamp(low.saturating_add(1)));
                let weight = (x - low as f32).clamp(0.0, 1.0);
                ([low, high, 0, 0], [1.0 - weight, weight, 0.0, 0.0])
            }
            ScaleMode::Bicubic => {
                let x = self.coordinate(i);
                let low = x.floor();
                let (at, from) = (x - low, low as i64);
                let elements = [-1, 0, 1, 2].map(|k| clamp(from.saturating_add(k)));
                (elements, [cubic_outer(at + 1.0), cubic_inner(at), cubic_inner(1.0 - at), cubic_outer(2.0 - at)])
            }
        }
    }

    /// Half the width of the antialiasing filter, in elements.
    fn support(&self) -> f32 {
        Upscale::support(self.factor)
    }

    /// The elements under the filter of value `i`, and the coordinate of its centre.
    fn filtered(&self, i: usize) -> (Range<usize>, f32) {
        let (x, support) = ((i as f32 + self.offset) / self.factor, self.support());
        // `as` truncates toward zero and saturates: negative values become 0.
        let low = ((x - support + self.offset) as usize).min(self.n);
        let high = ((x + support + self.offset) as usize).min(self.n);
        (low..high.max(low), x)
    }

    /// The weight of an element for a filter with its centre at `x`.
    fn weight(&self, element: usize, x: f32) -> f32 {
        (1.0 - ((element as f32 - x + self.offset) * (1.0 / self.support())).abs()).max(0.0)
    }
}

/// The parameter of cubic convolution, as in PyTorch.
const CUBIC: f32 = -0.75;

/// The kernel of cubic convolution for distances up to 1.
fn cubic_inner(x: f32) -> f32 {
    ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
}

/// The kernel of cubic convolution for distances from 1 to 2.
fn cubic_outer(x: f32) -> f32 {
    ((CUBIC * x - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC
}

/// The scaling of a node.
struct Scale {
    mode: ScaleMode,
    axes: [ScaleAxis; 2],
    /// Counts of the source's dimensions 2 and 3.
    planes: [usize; 2],
}

impl Scale {
    /// The plane of the source for a plane of the destination: always the nearest.
    fn plane(&self, dst: &View<'_>, i: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| {
            let (n, out) = (self.planes[d], dst.ne()[2 + d]);
            ((i[d] as f32 / (out as f32 / n as f32)) as usize).min(n - 1)
        })
    }

    fn interpolate(&self, ctx: &mut KernelContext<'_>, cost: usize) {
        let (dst, src, count) = (ctx.dst(), ctx.src(0), taps(self.mode));
        let (rows, out) = ctx.take_local_scratch().split_at_mut(MAX_TAPS * SPAN);
        let mut table = TapTable::default();
        RowPieces::with_cost(dst.desc(), cost, 1, VALUES).share(ctx, |i, n| {
            let [ax, ay] = &self.axes;
            table.select(self.mode, ax, i[0], n);
            let ([i2, i3], (ys, wy)) = (self.plane(&dst, [i[2], i[3]]), ay.taps(self.mode, i[1]));
            let mut lines: [&[f32]; MAX_TAPS] = [&[]; MAX_TAPS];
            for ((line, buffer), y) in lines.iter_mut().zip(rows.chunks_exact_mut(SPAN)).zip(&ys[..count]) {
                *line = table.read(&src, [*y, i2, i3], buffer);
            }
            let out = &mut out[..n];
            for (k, out) in out.iter_mut().enumerate() {
                let ([a, b, c, d], w) = (table.places[k], &table.weights[k]);
                *out = match self.mode {
                    ScaleMode::Nearest => lines[0][a],
                    ScaleMode::Bilinear => {
                        let ([low, high, ..], wy) = (lines, &wy);
                        low[a] * w[0] * wy[0] + low[b] * w[1] * wy[0] + high[a] * w[0] * wy[1] + high[b] * w[1] * wy[1]
                    }
                    ScaleMode::Bicubic => {
                        let [p, q, r, s] =
                            lines.map(|line| line[a] * w[0] + line[b] * w[1] + line[c] * w[2] + line[d] * w[3]);
                        p * wy[0] + q * wy[1] + r * wy[2] + s * wy[3]
                    }
                };
            }
            dst.store(i, out);
        });
    }

    /// Bilinear scaling with antialiasing: the mean of all elements under a triangle filter, weighted.
    fn filter(&self, ctx: &mut KernelContext<'_>, cost: usize) {
        let (dst, src) = (ctx.dst(), ctx.src(0));
        let (buffers, out) = ctx.take_local_scratch().split_at_mut(MAX_TAPS * SPAN);
        let (row, weights) = buffers.split_at_mut(SPAN);
        RowPieces::with_cost(dst.desc(), cost, 1, VALUES).share(ctx, |i, n| {
            let ([ax, ay], [i2, i3]) = (&self.axes, self.plane(&dst, [i[2], i[3]]));
            let (ys, y) = ay.filtered(i[1]);
            for (k, out) in out[..n].iter_mut().enumerate() {
                let (xs, x) = ax.filtered(i[0] + k);
                let (mut sum, mut total) = (0f32, 0f32);
                for line in ys.clone() {
                    let weight_y = ay.weight(line, y);
                    for start in xs.clone().step_by(SPAN) {
                        let len = SPAN.min(xs.end - start);
                        let weights = &mut weights[..len];
                        // A filter that fits is evaluated once.
                        if line == ys.start || xs.len() > SPAN {
                            for (j, weight) in weights.iter_mut().enumerate() {
                                *weight = ax.weight(start + j, x);
                            }
                        }
                        let elements = src.fetch([start, line, i2, i3], &mut row[..len]);
                        for (element, weight_x) in elements.iter().zip(&*weights) {
                            let weight = weight_x * weight_y;
                            // Elements without weight do not count, not even infinite ones.
                            if weight > 0.0 {
                                sum += element * weight;
                                total += weight;
                            }
                        }
                    }
                }
                *out = if total > 0.0 { sum / total } else { sum };
            }
            dst.store(i, &out[..n]);
        });
    }
}

/// The elements and weights along x of a piece.
struct TapTable {
    /// The first value of the piece, and their number; 0 before the first piece.
    values: (usize, usize),
    /// Elements of a row that [`TapTable::read`] reads: if there are few between the first and the last, all of these.
    span: Option<Range<usize>>,
    /// For each value the elements, and their places in what [`TapTable::read`] returns.
    elements: [[usize; MAX_TAPS]; VALUES],
    places: [[usize; MAX_TAPS]; VALUES],
    weights: [[f32; MAX_TAPS]; VALUES],
}

impl Default for TapTable {
    fn default() -> TapTable {
        let (elements, places, weights) = ([[0; MAX_TAPS]; VALUES], [[0; MAX_TAPS]; VALUES], [[0.0; MAX_TAPS]; VALUES]);
        TapTable { values: (0, 0), span: None, elements, places, weights }
    }
}

impl TapTable {
    /// Computes the table for `n` values from value `first` on, unless the piece before has the same one.
    fn select(&mut self, mode: ScaleMode, axis: &ScaleAxis, first: usize, n: usize) {
        if self.values == (first, n) {
            return;
        }
        self.values = (first, n);
        let (mut low, mut high) = (usize::MAX, 0);
        for k in 0..n {
            (self.elements[k], self.weights[k]) = axis.taps(mode, first + k);
            for &element in &self.elements[k][..taps(mode)] {
                (low, high) = (low.min(element), high.max(element));
            }
        }
        self.span = (high - low < SPAN).then_some(low..high + 1);
        for k in 0..n {
            let elements = &self.elements[k];
            self.places[k] = match &self.span {
                Some(span) => elements.map(|element| element.saturating_sub(span.start)),
                None => std::array::from_fn(|t| k * MAX_TAPS + t),
            };
        }
    }

    /// The elements of a row.
    fn read<'a>(&self, src: &View<'a>, [i1, i2, i3]: [usize; 3], buffer: &'a mut [f32]) -> &'a [f32] {
        if let Some(span) = &self.span {
            return src.fetch([span.start, i1, i2, i3], &mut buffer[..span.len()]);
        }
        for (elements, buffer) in self.elements[..self.values.1].iter().zip(buffer.chunks_exact_mut(MAX_TAPS)) {
            for (&element, value) in elements.iter().zip(buffer) {
                src.load([element, i1, i2, i3], std::slice::from_mut(value));
            }
        }
        buffer
    }
}
