//! NORM, RMS_NORM, L2_NORM: f64 sums over each row, then one scaling pass; with what stands around them, fused.

use super::{CHUNK, Kernel, math, rows_of, types};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

/// Rows up to this length are read once and kept; longer ones are read in pieces, once per pass.
pub(in crate::cpu) const KEPT: usize = 16 * CHUNK;

pub(super) fn select(op: Norm, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    match node.srcs.get(0) {
        Some(x) if (x.dtype(), node.dst.dtype()) == (F32, F32) => Ok(kernel(op, x, Around::default())),
        _ => Err(types(node)),
    }
}

/// What a kernel does beside its norm, with sources of their own.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::cpu) struct Around {
    /// Source 1 is added to the row first, and the sum written to "source" 2.
    pub(in crate::cpu) add: bool,
    /// The result is multiplied by source 3, which repeats to the row's tensor.
    pub(in crate::cpu) mul: bool,
}

/// The kernel for rows like those of `x`. With anything around the norm, rows are at most [`KEPT`] long, all tensors are
/// F32 with dense rows, and the summands and the sum have `x`'s shape.
pub(in crate::cpu) fn kernel(op: Norm, x: &TensorDesc, around: Around) -> Kernel {
    let passes = if matches!(op, Norm::Norm { .. }) { 3 } else { 2 };
    let passes = passes + usize::from(around.add) + usize::from(around.mul);
    let local = x.ne()[0].min(KEPT) * 3;
    let kernel = Kernel::new(x.elements().saturating_mul(passes), move |w| rows(w, op, around));
    kernel.with_local(local).with_parts(x.rows().div_ceil(rows_of(x, 4 * CHUNK)))
}

fn rows(work: &mut Work<'_>, op: Norm, around: Around) {
    let (dst, src) = (work.dst(), work.src(0));
    let plus = around.add.then(|| (work.src(1), work.src(2)));
    let factors = around.mul.then(|| work.src(3));
    let (n, local) = (dst.ne()[0], work.take_local());
    let (x, rest) = local.split_at_mut(n.min(KEPT));
    let (y, out) = rest.split_at_mut(n.min(KEPT));
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let index = dst.desc().row_index(r);
            if let Some((plus, sum)) = plus {
                let i = [0, index[0], index[1], index[2]];
                // Both summands are read before the sum, which may lie on either, is written.
                math::add(x, src.fetch(i, y), plus.fetch(i, out));
                sum.store(i, x);
                row(op, &Row { src: sum, dst, factors, index }, x, y, out);
            } else {
                row(op, &Row { src, dst, factors, index }, x, y, out);
            }
        }
    }
}

/// A row to be normed.
struct Row<'a> {
    src: View<'a>,
    dst: View<'a>,
    factors: Option<View<'a>>,
    index: [usize; 3],
}

fn row(op: Norm, row: &Row<'_>, x: &mut [f32], y: &mut [f32], out: &mut [f32]) {
    let count = row.src.ne()[0] as f64;
    let (shift, scale) = match op {
        Norm::Norm { eps } => {
            let mean = (row.fold(x, math::sum) / count) as f32;
            let var = (row.fold(x, |x| math::sum_of_squares(x, mean)) / count) as f32;
            (mean, 1.0 / (var + eps).sqrt())
        }
        Norm::RmsNorm { eps } => {
            let mean = (row.fold(x, |x| math::sum_of_squares(x, 0.0)) / count) as f32;
            (0.0, 1.0 / (mean + eps).sqrt())
        }
        Norm::L2Norm { eps } => (0.0, 1.0 / (row.fold(x, |x| math::sum_of_squares(x, 0.0)) as f32).sqrt().max(eps)),
    };
    for (i, n) in row.pieces(x.len()) {
        let (x, out) = (row.src.fetch(i, &mut x[..n]), &mut out[..n]);
        let factors = row.factors.map(|factors| {
            let ne = factors.ne();
            factors.fetch([i[0], i[1] % ne[1], i[2] % ne[2], i[3] % ne[3]], &mut y[..n])
        });
        widest(Scale { out, x, factors, shift, scale });
        row.dst.store(i, out);
    }
}

impl Row<'_> {
    /// Index of the first element of each piece of at most `most`, and its length.
    fn pieces(&self, most: usize) -> impl Iterator<Item = ([usize; 4], usize)> {
        let (n, [i1, i2, i3]) = (self.src.ne()[0], self.index);
        (0..n).step_by(most).map(move |first| ([first, i1, i2, i3], most.min(n - first)))
    }

    /// The sum of `f` over the pieces.
    fn fold(&self, buffer: &mut [f32], f: impl Fn(&[f32]) -> f64) -> f64 {
        self.pieces(buffer.len()).map(|(i, n)| f(self.src.fetch(i, &mut buffer[..n]))).sum()
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
