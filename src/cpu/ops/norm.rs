//! NORM, RMS_NORM, L2_NORM, GROUP_NORM: f64 sums over each row or group, then one scaling pass; the norms of rows with
//! what stands around them, fused.

use super::{CHUNK, Kernel, math, rows_of, types};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::Unsupported;
use crate::graph::fuse::NormFusion;
use crate::ops::NodeView;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;
use std::num::NonZeroU32;
use std::ops::Range;

/// Rows up to this length are read once and kept; longer ones are read in pieces, once per pass.
pub(in crate::cpu) const KEPT: usize = 16 * CHUNK;

pub(super) fn select(op: Norm, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    match node.srcs.get(0) {
        Some(x) if (x.dtype(), node.dst.dtype()) == (F32, F32) => Ok(match op {
            Norm::GroupNorm { groups, .. } => group_kernel(op, groups, x, node.dst),
            _ => kernel(op, x, NormFusion::default()),
        }),
        _ => Err(types(node)),
    }
}

/// The kernel for rows like those of `x`. With anything around the norm, rows are at most [`KEPT`] long.
pub(in crate::cpu) fn kernel(op: Norm, x: &TensorDesc, around: NormFusion) -> Kernel {
    let passes = if matches!(op, Norm::Norm { .. }) { 3 } else { 2 };
    let passes = passes + [around.residual, around.weight, around.bias].into_iter().map(usize::from).sum::<usize>();
    let local = x.ne()[0].min(KEPT) * 3;
    let kernel = Kernel::new(x.elements().saturating_mul(passes), move |w| rows(w, op, around));
    kernel.with_local(local).with_parts(x.rows().div_ceil(rows_of(x, 4 * CHUNK)))
}

fn rows(work: &mut Work<'_>, op: Norm, around: NormFusion) {
    let (dst, src) = (work.dst(), work.src(0));
    let sum = around.residual.then(|| (work.src(1), work.src(2)));
    let factors = around.weight.then(|| work.src(3));
    let plus = around.bias.then(|| work.src(4));
    let (n, local) = (dst.ne()[0], work.take_local());
    let (x, rest) = local.split_at_mut(n.min(KEPT));
    let (y, out) = rest.split_at_mut(n.min(KEPT));
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            let row = Part { src, dst, factors, plus, rows: i1..i1 + 1, planes: i2..i2 + 1, i3 };
            if let Some((b, sum)) = sum {
                let i = [0, i1, i2, i3];
                // Both summands are read before the sum, which may lie on either, is written.
                math::add(x, src.fetch(i, y), b.fetch(i, out));
                sum.store(i, x);
                Part { src: sum, ..row }.norm(op, x, y, out);
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
    let (src, dst) = match (flat(x), flat(dst)) {
        (Some(src), Some(dst)) => (src, dst),
        _ => (*x, *dst),
    };
    let [n, _, channels, batches] = src.ne();
    let together = channels.div_ceil(groups.get() as usize);
    let kernel = Kernel::new(x.elements().saturating_mul(3), move |w| norm_groups(w, op, together, &src, &dst));
    // Empty groups are none.
    kernel.with_local(n.min(KEPT) * 3).with_parts(channels.div_ceil(together) * batches)
}

/// The tensor with each channel as one row, where the rows of a channel follow each other: many images are only a few
/// elements wide.
fn flat(t: &TensorDesc) -> Option<TensorDesc> {
    let ([n0, n1, n2, n3], [b0, b1, b2, b3]) = (t.ne(), t.nb());
    // A count of more than 1 times its stride fits, as the extent does.
    let step = if n0 == 1 { b1 } else { b0 };
    let follow = n0 == 1 || n1 == 1 || b1 == n0 * b0;
    follow.then(|| TensorDesc::strided(t.dtype(), [n0 * n1, 1, n2, n3], [step, 0, b2, b3]).ok()).flatten()
}

/// Norms groups of `together` channels, each on one worker.
fn norm_groups(work: &mut Work<'_>, op: Norm, together: usize, src: &TensorDesc, dst: &TensorDesc) {
    let (src, dst) = (work.src(0).described(src), work.dst().described(dst));
    let ([n, rows, channels, batches], local) = (src.ne(), work.take_local());
    let (x, rest) = local.split_at_mut(n.min(KEPT));
    let (y, out) = rest.split_at_mut(n.min(KEPT));
    let groups = channels.div_ceil(together);
    for range in work.chunks(groups * batches, 4 * CHUNK / (n * rows * together)) {
        for group in range {
            let first = group % groups * together;
            let planes = first..channels.min(first + together);
            Part { src, dst, factors: None, plus: None, rows: 0..rows, planes, i3: group / groups }.norm(op, x, y, out);
        }
    }
}

/// What has one statistic: a row, or all rows of a group of planes.
struct Part<'a> {
    src: View<'a>,
    dst: View<'a>,
    factors: Option<View<'a>>,
    plus: Option<View<'a>>,
    rows: Range<usize>,
    planes: Range<usize>,
    i3: usize,
}

impl Part<'_> {
    /// Norms it. The buffers have equal lengths, at most that of a row.
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
            // The row of one that repeats.
            let row = |ne: [usize; 4]| [i[0], i[1] % ne[1], i[2] % ne[2], i[3] % ne[3]];
            let factors = self.factors.map(|factors| factors.fetch(row(factors.ne()), &mut y[..n]));
            widest(Scale { out, x, factors, shift, scale });
            if let Some(plus) = self.plus {
                let plus = plus.fetch(row(plus.ne()), &mut y[..n]);
                out.iter_mut().zip(plus).for_each(|(out, plus)| *out += plus);
            }
            self.dst.store(i, out);
        });
    }

    /// Calls `each` with the index of the first element of each piece of at most `most`, and its length.
    fn pieces(&self, most: usize, mut each: impl FnMut([usize; 4], usize)) {
        let n = self.src.ne()[0];
        for i2 in self.planes.clone() {
            for i1 in self.rows.clone() {
                for first in (0..n).step_by(most) {
                    each([first, i1, i2, self.i3], most.min(n - first));
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

/// `out = (x - shift) scale`, times the factors. A shift of 0 changes nothing.
struct Scale<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    factors: Option<&'a [f32]>,
    shift: f32,
    scale: f32,
}

impl Wide for Scale<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        let Scale { out, x, factors, shift, scale } = self;
        match factors {
            Some(factors) => math::zip(out, x, factors, |x, factor| (x - shift) * scale * factor),
            None => math::zip(out, x, x, |x, _| (x - shift) * scale),
        }
    }
}
