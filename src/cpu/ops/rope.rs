//! ROPE: one table of angles per token, used for all its heads.

use super::rows::{owner, row_of};
use super::{CHUNK, Kernel, math, rows_of, types};
use crate::cpu::pool::Work;
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::Unsupported;
use crate::ops::rope::{self, Rope, RopeMode};
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{F16, F32};

pub(super) fn select(op: Rope, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if !matches!(node.dst.dtype(), F32 | F16) {
        return Err(types(node));
    }
    let kernel = Kernel::new(node.dst.elements().saturating_mul(4), move |w| rope(w, &op));
    let parts = node.dst.rows().div_ceil(rows_of(node.dst, 4 * CHUNK));
    Ok(kernel.with_local(scratch(&op, node.dst.ne()[0])).with_parts(parts))
}

/// Floats that rotating rows of `n` takes.
fn scratch(op: &Rope, n: usize) -> usize {
    n.saturating_add(Turns::scratch(op, n))
}

fn rope(work: &mut Work<'_>, op: &Rope) {
    let (dst, local) = (work.dst(), work.take_local());
    let (out, rest) = local.split_at_mut(dst.ne()[0]);
    let mut turns = Turns::new(work, op, rest);
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            turns.turn(work, [i1, i2, i3], out);
            dst.store([0, i1, i2, i3], out);
        }
    }
}

/// The kernel of ROPE and a SET_ROWS of its result, all heads of a token as one row of `row` floats: sources as ROPE's,
/// then the ids of the rows; `elements` are turned. All F32, one batch; the destination has its own type.
pub(in crate::cpu) fn onto_rows(op: Rope, elements: usize, row: usize) -> Kernel {
    let local = row.saturating_add(Turns::scratch(&op, row));
    let kernel = Kernel::new(elements.saturating_mul(4), move |w| rope_rows(w, &op, row));
    kernel.with_local(local).with_parts(elements / row.max(1))
}

/// As SET_ROWS, every worker looks at all ids in order and writes the rows that it owns: two may name one row.
fn rope_rows(work: &mut Work<'_>, op: &Rope, row: usize) {
    let (dst, ids, local) = (work.dst(), work.src(3), work.take_local());
    let (out, rest) = local.split_at_mut(row);
    let mut turns = Turns::new(work, op, rest);
    let [d, _, tokens, _] = work.src(0).ne();
    for token in 0..tokens {
        let to = match row_of(OpCode::SetRows, ids.index([token, 0, 0, 0]), dst.ne()[1]) {
            Ok(to) => to,
            Err(error) => return work.fail(error),
        };
        if owner(to, work.workers()) == work.worker() {
            for (head, out) in out.chunks_exact_mut(d).enumerate() {
                turns.turn(work, [head, token, 0], out);
            }
            dst.store([0, to, 0, 0], out);
        }
    }
}

/// Turns rows of source 0 by the positions of source 1.
struct Turns<'a> {
    op: &'a Rope,
    angles: Angles<'a>,
    /// The token that cosines and sines are those of.
    token: Option<usize>,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    factors: &'a mut [f32],
    angle: &'a mut [f32],
    row: &'a mut [f32],
}

impl<'a> Turns<'a> {
    /// Floats of scratch for rows of `n`.
    fn scratch(op: &Rope, n: usize) -> usize {
        n.saturating_add(op.pairs().saturating_mul(4))
    }

    fn new(work: &Work<'_>, op: &'a Rope, scratch: &'a mut [f32]) -> Turns<'a> {
        let (row, rest) = scratch.split_at_mut(work.src(0).ne()[0]);
        let (cos, rest) = rest.split_at_mut(op.pairs());
        let (sin, rest) = rest.split_at_mut(op.pairs());
        let (factors, angle) = rest.split_at_mut(op.pairs());
        Turns { op, angles: Angles::new(op), token: None, cos, sin, factors, angle, row }
    }

    /// Row `i` of x, turned, into `out`. All of it is read before anything is returned: dst may lie where x does.
    fn turn(&mut self, work: &Work<'_>, i: [usize; 3], out: &mut [f32]) {
        let op = self.op;
        if self.token.is_none() {
            // Factors too are only read by whoever has rows to write: a dst of one row may lie on them.
            self.factors.fill(1.0);
            if let Some(view) = work.optional(2) {
                view.load([0; 4], self.factors);
            }
        }
        if self.token != Some(i[1]) {
            // Time, height, width, extra; only the first without sections.
            let (positions, tokens) = (work.src(1), work.src(0).ne()[2]);
            let count = if op.mode.sections().is_some() { 4 } else { 1 };
            let mut at = [0.0; 4];
            for (k, at) in at[..count].iter_mut().enumerate() {
                *at = positions.index([k * tokens + i[1], 0, 0, 0]) as f32;
            }
            self.angles.fill(at, self.factors, self.angle);
            math::cos_sin(self.angle, self.angles.base.mscale, self.cos, self.sin);
            self.token = Some(i[1]);
        }
        let x = work.src(0).fetch([0, i[0], i[1], i[2]], self.row);
        widest(Rotate { op, x, out, cos: self.cos, sin: self.sin });
    }
}

/// The part of the angles that does not depend on the token.
struct Angles<'a> {
    op: &'a Rope,
    base: rope::RopeAngles,
}

impl<'a> Angles<'a> {
    fn new(op: &'a Rope) -> Angles<'a> {
        Angles { op, base: op.angles() }
    }

    /// Angles of a token's pairs. They are running f32 products, as ggml's are: at late positions a power per pair gives
    /// visibly different ones.
    fn fill(&self, at: [f32; 4], factors: &[f32], angles: &mut [f32]) {
        let mut running = at;
        let sections = self.op.mode.sections().map(|s| s.map(|n| n as usize));
        let period = sections.map_or(0, |s| s.iter().sum());
        let mut sector = 0;
        for (j, (out, factor)) in angles.iter_mut().zip(factors).enumerate() {
            let mut axis = 0;
            if let Some([t, h, w, _]) = sections {
                let starts = [0, t, t + h, t + h + w];
                if matches!(self.op.mode, RopeMode::Vision(_))
                    && let Some(k) = starts.iter().position(|&start| start == sector)
                {
                    running[k] = at[k];
                }
                axis = match self.op.mode {
                    RopeMode::Imrope(_) => match sector % 3 {
                        0 if sector < 3 * t => 0,
                        1 if sector < 3 * h => 1,
                        2 if sector < 3 * w => 2,
                        _ => 3,
                    },
                    _ => starts[1..].iter().filter(|&&start| sector >= start).count(),
                };
                sector = (sector + 1) % period;
            }
            *out = self.corrected(j, running[axis] / factor);
            for angle in &mut running {
                *angle *= self.base.theta_scale;
            }
        }
    }

    /// The scaled angle, or YaRN's mix of both.
    fn corrected(&self, j: usize, unscaled: f32) -> f32 {
        let scaled = self.op.freq_scale * unscaled;
        if self.op.ext_factor == 0.0 {
            return scaled;
        }
        let (low, high) = self.base.corr_dims;
        let ramp = 1.0 - ((j as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let mix = ramp * self.op.ext_factor;
        scaled * (1.0 - mix) + unscaled * mix
    }
}

/// Rotates one row's pairs and copies the channels outside.
struct Rotate<'a> {
    op: &'a Rope,
    x: &'a [f32],
    out: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Wide for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        let Rotate { op, x, out, cos, sin } = self;
        let (pairs, start) = (op.pairs(), op.n_offs as usize);
        let end = start + 2 * pairs;
        out[..start].copy_from_slice(&x[..start]);
        out[end..].copy_from_slice(&x[end..]);
        let (x, out) = (&x[start..end], &mut out[start..end]);
        if op.mode == RopeMode::Normal {
            let (x, out) = (x.as_chunks::<2>().0, out.as_chunks_mut::<2>().0);
            for (((out, x), cos), sin) in out.iter_mut().zip(x).zip(cos).zip(sin) {
                *out = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
            }
        } else {
            let ((a, b), (p, q)) = (x.split_at(pairs), out.split_at_mut(pairs));
            let (cos, sin) = (&cos[..pairs], &sin[..pairs]);
            for j in 0..pairs {
                (p[j], q[j]) = (a[j] * cos[j] - b[j] * sin[j], a[j] * sin[j] + b[j] * cos[j]);
            }
        }
    }
}
