//! ROPE: one table of angles per token, used for all its heads.

use super::{CHUNK, Kernel, rows_of, types};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::rope::{Rope, RopeMode};
use crate::tensor::DType::{F16, F32};
use std::f32::consts::PI;

pub(super) fn select(op: Rope, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if !matches!(node.dst.dtype(), F32 | F16) {
        return Err(types(node));
    }
    // Cosines and sines of all pairs, then the pairs' factors.
    let local = 3 * op.pairs();
    Ok(Kernel::new(node.dst.elements().saturating_mul(4), move |w| rope(w, &op)).with_local(local))
}

fn rope(work: &mut Work<'_>, op: &Rope) {
    let (dst, x, positions) = (work.dst(), work.src(0), work.src(1));
    let (tables, factors) = work.take_local().split_at_mut(2 * op.pairs());
    factors.fill(1.0);
    let angles = Angles::new(op);
    let tokens = dst.ne()[2];
    let mut current = None;
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 16 * CHUNK)) {
        for r in rows {
            let i = dst.desc().row_index(r);
            let (cos, sin) = tables.split_at_mut(op.pairs());
            // Factors too are only read by whoever has rows to write: a dst of one row may lie on them.
            if current.is_none()
                && let Some(view) = work.optional(2)
            {
                view.load([0; 4], factors);
            }
            if current != Some(i[1]) {
                // Time, height, width, extra; only the first without sections.
                let count = if op.mode.sections().is_some() { 4 } else { 1 };
                let mut at = [0.0; 4];
                for (k, at) in at[..count].iter_mut().enumerate() {
                    *at = positions.index([k * tokens + i[1], 0, 0, 0]) as f32;
                }
                angles.fill(at, factors, cos, sin);
                current = Some(i[1]);
            }
            rotate_row(op, &dst, &x, i, cos, sin);
        }
    }
}

/// The part of the angles that does not depend on the token.
struct Angles<'a> {
    op: &'a Rope,
    /// From one pair's frequency to the next one's.
    step: f32,
    /// YaRN: pairs before the first keep the unscaled angle, those after the second take the scaled one.
    ramp: (f32, f32),
    /// Factor on cosines and sines.
    magnitude: f32,
}

impl<'a> Angles<'a> {
    fn new(op: &'a Rope) -> Angles<'a> {
        let n = op.n_dims as f32;
        // The pair that makes so many turns over the training context.
        let pair_of = |turns: f32| n * (op.n_ctx_orig as f32 / (turns * 2.0 * PI)).ln() / (2.0 * op.freq_base.ln());
        let ramp = (pair_of(op.beta_fast).floor().max(0.0), pair_of(op.beta_slow).ceil().min(n - 1.0));
        let yarn = if op.ext_factor == 0.0 { 1.0 } else { 1.0 + 0.1 * (1.0 / op.freq_scale).ln() };
        Angles { op, step: op.freq_base.powf(-2.0 / n), ramp, magnitude: op.attn_factor * yarn }
    }

    /// Cosines and sines of a token's pairs, magnitude included. The angles are running f32 products, as ggml's are: at
    /// late positions a power per pair gives visibly different ones.
    fn fill(&self, at: [f32; 4], factors: &[f32], cos: &mut [f32], sin: &mut [f32]) {
        let mut running = at;
        let sections = self.op.mode.sections().map(|s| s.map(|n| n as usize));
        let period = sections.map_or(0, |s| s.iter().sum());
        let mut sector = 0;
        for (j, ((cos, sin), factor)) in cos.iter_mut().zip(sin).zip(factors).enumerate() {
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
            let angle = self.corrected(j, running[axis] / factor);
            (*cos, *sin) = (angle.cos() * self.magnitude, angle.sin() * self.magnitude);
            for angle in &mut running {
                *angle *= self.step;
            }
        }
    }

    /// The scaled angle, or YaRN's mix of both.
    fn corrected(&self, j: usize, unscaled: f32) -> f32 {
        let scaled = self.op.freq_scale * unscaled;
        if self.op.ext_factor == 0.0 {
            return scaled;
        }
        let (low, high) = self.ramp;
        let ramp = 1.0 - ((j as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let mix = ramp * self.op.ext_factor;
        scaled * (1.0 - mix) + unscaled * mix
    }
}

/// Rotates one row's pairs and copies the channels outside. Both channels of a pair are read before either is written,
/// for x may lie where dst does.
fn rotate_row(op: &Rope, dst: &View<'_>, x: &View<'_>, [i1, i2, i3]: [usize; 3], cos: &[f32], sin: &[f32]) {
    let (pairs, start, n) = (op.pairs(), op.n_offs as usize, dst.ne()[0]);
    let end = start + 2 * pairs;
    let (mut a, mut b) = ([0.0; CHUNK], [0.0; CHUNK]);
    for first in (0..pairs).step_by(CHUNK / 2) {
        let len = (pairs - first).min(CHUNK / 2);
        let (cos, sin) = (&cos[first..first + len], &sin[first..first + len]);
        if op.mode == RopeMode::Normal {
            let (at, ab) = ([start + 2 * first, i1, i2, i3], &mut a[..2 * len]);
            x.load(at, ab);
            for ((pair, cos), sin) in ab.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                *pair = [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos];
            }
            dst.store(at, ab);
        } else {
            let (at, bt) = ([start + first, i1, i2, i3], [start + pairs + first, i1, i2, i3]);
            let (a, b) = (&mut a[..len], &mut b[..len]);
            x.load(at, a);
            x.load(bt, b);
            for (((a, b), cos), sin) in a.iter_mut().zip(b.iter_mut()).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
            dst.store(at, a);
            dst.store(bt, b);
        }
    }
    dst.copy([0, i1, i2, i3], x, [0, i1, i2, i3], start);
    if end < n {
        dst.copy([end, i1, i2, i3], x, [end, i1, i2, i3], n - end);
    }
}
