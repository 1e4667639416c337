//! ROPE and ROPE_BACK: one table of angles per token, used for all its heads. Also ROPE fused with SET_ROWS.

use super::rows::{IdPhases, check_row, owner};
use super::{CHUNK, Kernel, math, rows_per_chunk, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::rope::{self, Rope, RopeMode};
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{F16, F32};

pub(super) fn select(op: Rope, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if !matches!(node.dst.dtype(), F32 | F16) {
        return Err(unsupported_types(node));
    }
    let kernel = Kernel::new(node.dst.elements().saturating_mul(4), move |w| rope(w, &op));
    let parts = node.dst.rows().div_ceil(rows_per_chunk(node.dst, 4 * CHUNK));
    Ok(kernel.with_local(scratch(&op, node.dst.ne()[0])).with_parts(parts))
}

/// Floats of scratch for rotating rows of `n` elements.
fn scratch(op: &Rope, n: usize) -> usize {
    n.saturating_add(Rotator::scratch(op, n))
}

fn rope(ctx: &mut KernelContext<'_>, op: &Rope) {
    let (dst, local) = (ctx.dst(), ctx.take_local_scratch());
    let (out, rest) = local.split_at_mut(dst.ne()[0]);
    let mut rotator = Rotator::new(ctx, op, rest);
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            rotator.rotate_row(ctx, [i1, i2, i3], out);
            dst.store([0, i1, i2, i3], out);
        }
    }
}

/// The kernel of ROPE fused with a SET_ROWS of its result: all heads of a token are one row of `row` floats. Sources: those of
/// ROPE, then the row ids. `elements` values are rotated. Sources are F32 with one batch; the destination may have another
/// type.
pub(in crate::cpu) fn kernel_with_set_rows(op: Rope, elements: usize, row: usize) -> Kernel {
    let local = row.saturating_add(Rotator::scratch(&op, row));
    let tokens = elements / row.max(1);
    let phases = IdPhases::new(tokens, ELEMENTS_PER_PHASE / row.max(1));
    let kernel = Kernel::new(elements.saturating_mul(4), move |w| rope_rows(w, &op, row, phases));
    kernel.with_local(local).with_parts(tokens).with_syncs(phases.syncs())
}

/// Elements that ROPE fused with SET_ROWS writes between two barriers: about a millisecond for one worker.
const ELEMENTS_PER_PHASE: usize = 1 << 19;

/// Divided as SET_ROWS, because two ids may name one row.
fn rope_rows(ctx: &mut KernelContext<'_>, op: &Rope, row: usize, phases: IdPhases) {
    let (dst, ids, local) = (ctx.dst(), ctx.src(3), ctx.take_local_scratch());
    let (out, rest) = local.split_at_mut(row);
    let mut rotator = Rotator::new(ctx, op, rest);
    let (d, parts) = (ctx.src(0).ne()[0], ctx.dividing_workers());
    phases.each_part(ctx, |tokens, part| {
        for token in tokens {
            let to = check_row(OpCode::SetRows, ids.index([token, 0, 0, 0]), dst.ne()[1])?;
            if owner(to, parts) == part {
                for (head, out) in out.chunks_exact_mut(d).enumerate() {
                    rotator.rotate_row(ctx, [head, token, 0], out);
                }
                dst.store([0, to, 0, 0], out);
            }
        }
        Ok(())
    });
}

/// Rotates rows of source 0 by the positions of source 1.
struct Rotator<'a> {
    op: &'a Rope,
    angles: AngleTable<'a>,
    /// The token of the current cosines and sines.
    token: Option<usize>,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    factors: &'a mut [f32],
    angle: &'a mut [f32],
    row: &'a mut [f32],
}

impl<'a> Rotator<'a> {
    /// Floats of scratch for rows of `n` elements.
    fn scratch(op: &Rope, n: usize) -> usize {
        n.saturating_add(op.pairs().saturating_mul(4))
    }

    fn new(ctx: &KernelContext<'_>, op: &'a Rope, scratch: &'a mut [f32]) -> Rotator<'a> {
        let (row, rest) = scratch.split_at_mut(ctx.src(0).ne()[0]);
        let (cos, rest) = rest.split_at_mut(op.pairs());
        let (sin, rest) = rest.split_at_mut(op.pairs());
        let (factors, angle) = rest.split_at_mut(op.pairs());
        Rotator { op, angles: AngleTable::new(op), token: None, cos, sin, factors, angle, row }
    }

    /// Writes row `i` of source 0, rotated, to `out`. The source row is read completely before this returns: dst may lie on
    /// it.
    fn rotate_row(&mut self, ctx: &KernelContext<'_>, i: [usize; 3], out: &mut [f32]) {
        let op = self.op;
        if self.token.is_none() {
            // Only workers with rows to write read the factors: a dst of one row may lie on them.
            self.factors.fill(1.0);
            if let Some(view) = ctx.optional_src(2) {
                view.load([0; 4], self.factors);
            }
        }
        if self.token != Some(i[1]) {
            // Positions of time, height, width and extra; only the first without sections.
            let (positions, tokens) = (ctx.src(1), ctx.src(0).ne()[2]);
            let count = if op.mode.sections().is_some() { 4 } else { 1 };
            let mut at = [0.0; 4];
            for (k, at) in at[..count].iter_mut().enumerate() {
                *at = positions.index([k * tokens + i[1], 0, 0, 0]) as f32;
            }
            self.angles.fill(at, self.factors, self.angle);
            math::cos_sin(self.angle, self.angles.base.mscale, self.cos, self.sin);
            if op.backward {
                self.sin.iter_mut().for_each(|sin| *sin = -*sin);
            }
            self.token = Some(i[1]);
        }
        let x = ctx.src(0).fetch([0, i[0], i[1], i[2]], self.row);
        rotate_pairs(op, x, out, self.cos, self.sin);
    }
}

/// The angles of a token; `base` is the part that does not depend on it.
struct AngleTable<'a> {
    op: &'a Rope,
    base: rope::RopeAngles,
}

impl<'a> AngleTable<'a> {
    fn new(op: &'a Rope) -> AngleTable<'a> {
        AngleTable { op, base: op.angles() }
    }

    /// The angles of a token's pairs: running f32 products as in ggml, since a power per pair gives visibly different angles
    /// at late positions.
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

    /// The angle scaled by `freq_scale`, or YaRN's mix of scaled and unscaled.
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

multiversion! {
    /// Rotates the pairs of one row and copies the channels outside.
    fn rotate_pairs<'a>(op: &'a Rope, x: &'a [f32], out: &'a mut [f32], cos: &'a [f32], sin: &'a [f32]) {
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
