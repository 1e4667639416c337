//! States whose rows belong to keys: RWKV_WKV6 and GATED_LINEAR_ATTN.

use super::{HeadShape, Kernel, vector};
use crate::cpu::ops::recurrence::{Recurrence, RecurrenceClaim, load_flat, store_flat};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;

/// Values of a unit: four vectors of eight, because an addition waits four cycles for the one before it. The last unit of a head
/// is filled up with values of 0.
const WIDTH: usize = 32;

/// How the state and the output change with a token.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    Wkv6,
    Gated { scale: f32 },
}

impl Rule {
    /// Positions of k, v, r (or q) and the decay (or gate).
    fn positions(self) -> [usize; 4] {
        match self {
            Rule::Wkv6 => [0, 1, 2, 4],
            Rule::Gated { .. } => [0, 1, 2, 3],
        }
    }
}

/// Position of the bonus of RWKV_WKV6.
const BONUS: usize = 3;

pub(super) fn kernel(shape: HeadShape, rule: Rule) -> Kernel {
    let unit = shape.size.saturating_mul(WIDTH);
    let recurrence = shape.recurrence(shape.size.div_ceil(WIDTH), unit);
    // The state, the vectors of k, r, decay, bonus and v, and the output, filled up.
    let units = recurrence.max_units();
    let local = units.saturating_mul(unit).saturating_add(4 * shape.size).saturating_add(2 * units * WIDTH);
    let kernel = Kernel::new(shape.cost(), move |w| run(w, &shape, &recurrence, rule));
    kernel.with_local(local).with_syncs(recurrence.syncs())
}

fn run(ctx: &mut KernelContext<'_>, shape: &HeadShape, recurrence: &Recurrence, rule: Rule) {
    if shape.is_empty() {
        return;
    }
    let (size, local) = (shape.size, ctx.take_local_scratch());
    let (states, local) = local.split_at_mut(recurrence.max_units() * size * WIDTH);
    let (v, local) = local.split_at_mut(recurrence.max_units() * WIDTH);
    let (out, local) = local.split_at_mut(recurrence.max_units() * WIDTH);
    let (k_buffer, local) = local.split_at_mut(size);
    let (r_buffer, local) = local.split_at_mut(size);
    let (decay_buffer, bonus) = local.split_at_mut(size);
    let sources = rule.positions().map(|i| ctx.src(i));
    let old = ctx.src(if matches!(rule, Rule::Wkv6) { 5 } else { 4 }).with_desc(&shape.state);
    let dst = ctx.dst().with_desc(&shape.dst);
    let ctx: &KernelContext<'_> = ctx;
    let bonus_source = matches!(rule, Rule::Wkv6).then(|| ctx.src(BONUS));
    let bonus_desc = bonus_source.and_then(|b| b.desc().reshaped([b.desc().elements(), 1, 1, 1]).ok());
    recurrence.each_claim(ctx, |claim| {
        let RecurrenceClaim { state, units, tokens } = claim;
        let columns = units.start * WIDTH..size.min(units.end * WIDTH);
        let width = |unit: usize| WIDTH.min(columns.len() - unit * WIDTH);
        let states = &mut states[..units.len() * size * WIDTH];
        let (from, start) =
            if tokens.start == 0 { (&old, shape.in_state(state)) } else { (&dst, shape.in_block(0, state)) };
        for (unit, rows) in states.chunks_exact_mut(size * WIDTH).enumerate() {
            for (i, row) in rows.chunks_exact_mut(WIDTH).enumerate() {
                let (row, fill) = row.split_at_mut(width(unit));
                load_flat(from, start + i * size + columns.start + unit * WIDTH, row);
                fill.fill(0.0);
            }
        }
        if let (Some(source), Some(desc)) = (&bonus_source, &bonus_desc) {
            load_flat(&source.with_desc(desc), state % shape.heads * size, &mut bonus[..size]);
        }
        let (v, out) = (&mut v[..units.len() * WIDTH], &mut out[..units.len() * WIDTH]);
        v.fill(0.0);
        for t in tokens {
            let [k_source, v_source, r_source, decay_source] = &sources;
            let k = vector(k_source, shape, state, t, k_buffer);
            let r = vector(r_source, shape, state, t, r_buffer);
            let decay = vector(decay_source, shape, state, t, decay_buffer);
            let (head, sequence) = (state % shape.heads, state / shape.heads);
            let token = t + shape.tokens * sequence;
            v_source.load([columns.start, head, token, 0], &mut v[..columns.len()]);
            match rule {
                Rule::Wkv6 => wkv6_token(states, k, v, r, decay, &bonus[..size], out),
                Rule::Gated { scale } => gated_token(states, k, v, r, decay, scale, out),
            }
            store_flat(&dst, shape.in_output(state, t) + columns.start, &out[..columns.len()]);
        }
        for (unit, rows) in states.chunks_exact(size * WIDTH).enumerate() {
            for (i, row) in rows.chunks_exact(WIDTH).enumerate() {
                let start = shape.in_block(0, state) + i * size + columns.start + unit * WIDTH;
                store_flat(&dst, start, &row[..width(unit)]);
            }
        }
        Ok(())
    });
}

multiversion! {
    /// A token of RWKV_WKV6: some units of a head.
    fn wkv6_token<'a>(
        // A matrix of `[WIDTH, keys]` for each unit.
        states: &'a mut [f32],
        k: &'a [f32],
        v: &'a [f32],
        r: &'a [f32],
        decay: &'a [f32],
        bonus: &'a [f32],
        out: &'a mut [f32],
    ) {
        let (units, out) = (v.as_chunks::<WIDTH>().0, out.as_chunks_mut::<WIDTH>().0);
        for ((state, v), out) in states.chunks_exact_mut(k.len() * WIDTH).zip(units).zip(out) {
            let (rows, mut sums) = (state.as_chunks_mut::<WIDTH>().0, [0.0; WIDTH]);
            for ((((row, k), r), decay), bonus) in rows.iter_mut().zip(k).zip(r).zip(decay).zip(bonus) {
                for j in 0..WIDTH {
                    let (kv, old) = (k * v[j], row[j]);
                    sums[j] += r * (kv * bonus + old);
                    row[j] = old * decay + kv;
                }
            }
            *out = sums;
        }
    }
}

multiversion! {
    /// A token of GATED_LINEAR_ATTN, as [`wkv6_token`].
    fn gated_token<'a>(
        states: &'a mut [f32],
        k: &'a [f32],
        v: &'a [f32],
        q: &'a [f32],
        gate: &'a [f32],
        scale: f32,
        out: &'a mut [f32],
    ) {
        let (units, out) = (v.as_chunks::<WIDTH>().0, out.as_chunks_mut::<WIDTH>().0);
        for ((state, v), out) in states.chunks_exact_mut(k.len() * WIDTH).zip(units).zip(out) {
            let (rows, mut sums) = (state.as_chunks_mut::<WIDTH>().0, [0.0; WIDTH]);
            for (((row, k), q), gate) in rows.iter_mut().zip(k).zip(q).zip(gate) {
                let q = q * scale;
                for j in 0..WIDTH {
                    let new = row[j] * gate + k * v[j];
                    row[j] = new;
                    sums[j] += new * q;
                }
            }
            *out = sums;
        }
    }
}
