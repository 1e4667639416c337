//! NORM, RMS_NORM, L2_NORM, GROUP_NORM: f64 sums over each row or group, then one scaling pass. Also the fused norms of rows:
//! residual add before, weights and bias after (epilogue fusion).

use super::{CHUNK, Kernel, math, rows_per_chunk, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::graph::fuse::NormFusion;
use crate::ops::NodeView;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;
use std::num::NonZeroU32;
use std::ops::Range;

/// Rows up to this length are read once into scratch; longer rows are read in pieces, once per pass.
pub(in crate::cpu) const MAX_BUFFERED_ROW: usize = 16 * CHUNK;

pub(super) fn select(op: Norm, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    match node.srcs.get(0) {
        Some(x) if (x.dtype(), node.dst.dtype()) == (F32, F32) => Ok(match op {
            Norm::GroupNorm { groups, .. } => group_kernel(op, groups, x, node.dst),
            _ => kernel(op, x, NormFusion::default()),
        }),
        _ => Err(unsupported_types(node)),
    }
}

/// The kernel for rows with the shape of `x`. With a fusion, rows have at most [`MAX_BUFFERED_ROW`] elements.
pub(in crate::cpu) fn kernel(op: Norm, x: &TensorDesc, fusion: NormFusion) -> Kernel {
    let passes = if matches!(op, Norm::Norm { .. }) { 3 } else { 2 };
    let passes = passes + [fusion.residual, fusion.weight, fusion.bias].into_iter().map(usize::from).sum::<usize>();
    let local = x.ne()[0].min(MAX_BUFFERED_ROW) * 3;
    let kernel = Kernel::new(x.elements().saturating_mul(passes), move |w| rows(w, op, fusion));
    kernel.with_local(local).with_parts(x.rows().div_ceil(rows_per_chunk(x, 4 * CHUNK)))
}

fn rows(ctx: &mut KernelContext<'_>, op: Norm, fusion: NormFusion) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let sum = fusion.residual.then(|| (ctx.src(1), ctx.src(2)));
    let weights = fusion.weight.then(|| ctx.src(3));
    let bias = fusion.bias.then(|| ctx.src(4));
    let (n, local) = (dst.ne()[0], ctx.take_local_scratch());
    let (x, rest) = local.split_at_mut(n.min(MAX_BUFFERED_ROW));
    let (y, out) = rest.split_at_mut(n.min(MAX_BUFFERED_ROW));
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            let row = NormRegion { src, dst, weights, bias, rows: i1..i1 + 1, planes: i2..i2 + 1, i3 };
            if let Some((b, sum)) = sum {
                let i = [0, i1, i2, i3];
                // Both summands are read before the sum is written, which may lie on either of them.
                math::add(x, src.fetch(i, y), b.fetch(i, out));
                sum.store(i, x);
                NormRegion { src: sum, ..row }.norm(op, x, y, out);
            } else {
                row.norm(op, x, y, out);
            }
        }
    }
}

/// The kernel of a GROUP_NORM.
fn group_kernel(op: Norm, groups: NonZeroU32, x: &TensorDesc, dst: &TensorDesc) -> Kernel {
    if x.is_empty() {
        return Kernel::new(0, |_| ());
    }
    let (src, dst) = match (channels_as_rows(x), channels_as_rows(dst)) {
        (Some(src), Some(dst)) => (src, dst),
        _ => (*x, *dst),
    };
    let [n, _, channels, batches] = src.ne();
    let channels_per_group = channels.div_ceil(groups.get() as usize);
    let kernel =
        Kernel::new(x.elements().saturating_mul(3), move |w| norm_groups(w, op, channels_per_group, &src, &dst));
    // Trailing groups without channels are not counted.
    kernel.with_local(n.min(MAX_BUFFERED_ROW) * 3).with_parts(channels.div_ceil(channels_per_group) * batches)
}

/// The tensor with each channel as one row, if the rows of a channel are contiguous: many images are only a few elements wide.
fn channels_as_rows(t: &TensorDesc) -> Option<TensorDesc> {
    let ([n0, n1, n2, n3], [b0, b1, b2, b3]) = (t.ne(), t.nb());
    // No overflow: a count above 1 times its stride is at most the extent.
    let step = if n0 == 1 { b1 } else { b0 };
    let follow = n0 == 1 || n1 == 1 || b1 == n0 * b0;
    follow.then(|| TensorDesc::strided(t.dtype(), [n0 * n1, 1, n2, n3], [step, 0, b2, b3]).ok()).flatten()
}

/// Normalises groups of `channels_per_group` channels, each group on one worker.
fn norm_groups(ctx: &mut KernelContext<'_>, op: Norm, channels_per_group: usize, src: &TensorDesc, dst: &TensorDesc) {
    let (src, dst) = (ctx.src(0).with_desc(src), ctx.dst().with_desc(dst));
    let ([n, rows, channels, batches], local) = (src.ne(), ctx.take_local_scratch());
    let (x, rest) = local.split_at_mut(n.min(MAX_BUFFERED_ROW));
    let (y, out) = rest.split_at_mut(n.min(MAX_BUFFERED_ROW));
    let groups = channels.div_ceil(channels_per_group);
    for range in ctx.chunks(groups * batches, 4 * CHUNK / (n * rows * channels_per_group)) {
        for group in range {
            let first = group % groups * channels_per_group;
            let planes = first..channels.min(first + channels_per_group);
            NormRegion { src, dst, weights: None, bias: None, rows: 0..rows, planes, i3: group / groups }
                .norm(op, x, y, out);
        }
    }
}

/// The elements that share one mean and variance: a row, or all rows of a group of planes.
struct NormRegion<'a> {
    src: View<'a>,
    dst: View<'a>,
    weights: Option<View<'a>>,
    bias: Option<View<'a>>,
    rows: Range<usize>,
    planes: Range<usize>,
    i3: usize,
}

impl NormRegion<'_> {
    /// Normalises the region. The buffers have equal lengths, at most that of a row.
    fn norm(&self, op: Norm, x: &mut [f32], y: &mut [f32], out: &mut [f32]) {
        let count = (self.src.ne()[0] * self.rows.len() * self.planes.len()) as f64;
        let (shift, scale) = match op {
            Norm::Norm { eps } | Norm::GroupNorm { eps, .. } => {
                let mean = (self.sum(x, math::sum) / count) as f32;
                let var = (self.sum(x, |x| math::sum_of_squares(x, mean)) / count) as f32;
                (mean, 1.0 / (var + eps).sqrt())
            }
            Norm::RmsNorm { eps } => {
                let mean = (self.sum(x, |x| math::sum_of_squares(x, 0.0)) / count) as f32;
                (0.0, 1.0 / (mean + eps).sqrt())
            }
            Norm::L2Norm { eps } => (0.0, 1.0 / (self.sum(x, |x| math::sum_of_squares(x, 0.0)) as f32).sqrt().max(eps)),
        };
        self.pieces(x.len(), |i, n| {
            let (x, out) = (self.src.fetch(i, &mut x[..n]), &mut out[..n]);
            // The index in a broadcast operand.
            let row = |ne: [usize; 4]| [i[0], i[1] % ne[1], i[2] % ne[2], i[3] % ne[3]];
            let weights = self.weights.map(|weights| weights.fetch(row(weights.ne()), &mut y[..n]));
            shift_and_scale(out, x, weights, shift, scale);
            if let Some(bias) = self.bias {
                let bias = bias.fetch(row(bias.ne()), &mut y[..n]);
                out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            }
            self.dst.store(i, out);
        });
    }

    /// Calls `each` with the index and the length of each piece of at most `max_len` elements.
    fn pieces(&self, max_len: usize, mut each: impl FnMut([usize; 4], usize)) {
        let n = self.src.ne()[0];
        for i2 in self.planes.clone() {
            for i1 in self.rows.clone() {
                for first in (0..n).step_by(max_len) {
                    each([first, i1, i2, self.i3], max_len.min(n - first));
                }
            }
        }
    }

    /// The sum of `f` over the pieces.
    fn sum(&self, buffer: &mut [f32], f: impl Fn(&[f32]) -> f64) -> f64 {
        let mut total = 0.0;
        self.pieces(buffer.len(), |i, n| total += f(self.src.fetch(i, &mut buffer[..n])));
        total
    }
}

multiversion! {
    /// `out = (x - shift) scale`, times `weights` if present. A shift of 0 changes nothing.
    fn shift_and_scale<'a>(out: &'a mut [f32], x: &'a [f32], weights: Option<&'a [f32]>, shift: f32, scale: f32) {
        match weights {
            Some(weights) => math::zip(out, x, weights, |x, factor| (x - shift) * scale * factor),
            None => math::zip(out, x, x, |x, _| (x - shift) * scale),
        }
    }
}
