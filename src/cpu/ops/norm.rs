//! NORM, RMS_NORM, L2_NORM: f64 sums over each row, then one scaling pass.

use super::{CHUNK, Kernel, math, rows_of, types};
use crate::cpu::memory::View;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;

/// Rows up to this length are read once and kept; longer ones are read in pieces, once per pass.
const KEPT: usize = 16 * CHUNK;

pub(super) fn select(op: Norm, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(x) = node.srcs.get(0) else { return Err(types(node)) };
    if (x.dtype(), node.dst.dtype()) != (F32, F32) {
        return Err(types(node));
    }
    let count = x.ne()[0] as f64;
    let kernel = match op {
        Norm::Norm { eps } => rows(x.elements() * 3, move |row| {
            let mean = (row.fold(math::sum) / count) as f32;
            let var = (row.fold(|x| math::fold(x, |x| f64::from((x - mean) * (x - mean)))) / count) as f32;
            let scale = 1.0 / (var + eps).sqrt();
            row.finish(|x| (x - mean) * scale);
        }),
        Norm::RmsNorm { eps } => rows(x.elements() * 2, move |row| {
            let mean = (row.fold(math::sum_of_squares) / count) as f32;
            let scale = 1.0 / (mean + eps).sqrt();
            row.finish(|x| x * scale);
        }),
        Norm::L2Norm { eps } => rows(x.elements() * 2, move |row| {
            let scale = 1.0 / (row.fold(math::sum_of_squares) as f32).sqrt().max(eps);
            row.finish(|x| x * scale);
        }),
    };
    Ok(kernel.with_local(x.ne()[0].min(KEPT)))
}

/// A kernel that calls `each` for every row.
fn rows(cost: usize, each: impl Fn(&mut Row<'_>) + Send + Sync + 'static) -> Kernel {
    Kernel::new(cost, move |work| {
        let (dst, src, buffer) = (work.dst(), work.src(0), work.take_local());
        for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
            for r in rows {
                let index = dst.desc().row_index(r);
                if src.ne()[0] <= buffer.len() {
                    src.load([0, index[0], index[1], index[2]], buffer);
                }
                each(&mut Row { src, dst, index, buffer });
            }
        }
    })
}

/// One row in work: `buffer` holds all of it, or is where its pieces pass through.
struct Row<'a> {
    src: View<'a>,
    dst: View<'a>,
    index: [usize; 3],
    buffer: &'a mut [f32],
}

impl Row<'_> {
    /// Calls `each(first, values)` for the pieces of the row.
    fn pieces(&mut self, mut each: impl FnMut(usize, &mut [f32])) {
        let (n, [i1, i2, i3]) = (self.src.ne()[0], self.index);
        if n <= self.buffer.len() {
            return each(0, self.buffer);
        }
        for first in (0..n).step_by(self.buffer.len()) {
            let piece = &mut self.buffer[..KEPT.min(n - first)];
            self.src.load([first, i1, i2, i3], piece);
            each(first, piece);
        }
    }

    /// The sum of `f` over the pieces.
    fn fold(&mut self, f: impl Fn(&[f32]) -> f64) -> f64 {
        let mut total = 0.0;
        self.pieces(|_, x| total += f(x));
        total
    }

    /// Writes `f` of each value; the row's last pass.
    fn finish(&mut self, f: impl Fn(f32) -> f32) {
        let (dst, [i1, i2, i3]) = (self.dst, self.index);
        self.pieces(|first, x| {
            for x in x.iter_mut() {
                *x = f(*x);
            }
            dst.store([first, i1, i2, i3], x);
        });
    }
}
