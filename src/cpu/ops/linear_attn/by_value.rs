//! States whose rows belong to values: RWKV_WKV7 and GATED_DELTA_NET.

use super::{HeadShape, Kernel, vector};
use crate::cpu::ops::math;
use crate::cpu::ops::recurrence::{
    Recurrence, RecurrenceClaim, decay_add_dot, decay_add_two_dot, dot, load_flat, store_flat,
};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;

/// Positions of the sources of RWKV_WKV7.
mod wkv7_source {
    pub(super) const R: usize = 0;
    pub(super) const DECAY: usize = 1;
    pub(super) const K: usize = 2;
    pub(super) const V: usize = 3;
    pub(super) const A: usize = 4;
    pub(super) const B: usize = 5;
    pub(super) const STATE: usize = 6;
}

/// Vectors of a head in scratch, beside its rows.
const VECTORS: usize = 6;

/// A kernel over the rows of values. `run` is called with the division of its recurrence.
fn kernel(shape: HeadShape, run: impl Fn(&mut KernelContext<'_>, &Recurrence) + Send + Sync + 'static) -> Kernel {
    let recurrence = shape.recurrence(shape.size, shape.size);
    // The state, the vectors, and the values and outputs of the rows.
    let rows = recurrence.max_units();
    let local = rows.saturating_mul(shape.size).saturating_add(VECTORS * shape.size).saturating_add(2 * rows);
    let kernel = Kernel::new(shape.cost(), move |w| {
        if !shape.is_empty() {
            run(w, &recurrence);
        }
    });
    kernel.with_local(local).with_syncs(recurrence.syncs())
}

/// The parts of a worker's scratch.
struct Scratch<'a> {
    state: &'a mut [f32],
    vectors: [&'a mut [f32]; VECTORS],
    values: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    fn new(local: &'a mut [f32], size: usize, rows: usize) -> Scratch<'a> {
        let (state, local) = local.split_at_mut(rows * size);
        let (values, local) = local.split_at_mut(rows);
        let (out, mut local) = local.split_at_mut(rows);
        let vectors = std::array::from_fn(|_| {
            let (vector, rest) = std::mem::take(&mut local).split_at_mut(size);
            local = rest;
            vector
        });
        Scratch { state, vectors, values, out }
    }
}

pub(super) fn wkv7(shape: HeadShape) -> Kernel {
    kernel(shape, move |ctx, recurrence| {
        use wkv7_source::{A, B, DECAY, K, R, STATE, V};
        let (size, local) = (shape.size, ctx.take_local_scratch());
        let Scratch { state: matrix, mut vectors, values, out } = Scratch::new(local, size, recurrence.max_units());
        let sources = [R, DECAY, K, A, B].map(|i| ctx.src(i));
        let (v_source, old) = (ctx.src(V), ctx.src(STATE).with_desc(&shape.state));
        let dst = ctx.dst().with_desc(&shape.dst);
        recurrence.each_claim(ctx, |claim| {
            let RecurrenceClaim { state, units: rows, tokens } = claim;
            let matrix = &mut matrix[..rows.len() * size];
            let new = shape.in_block(0, state) + rows.start * size;
            match tokens.start {
                0 => load_flat(&old, shape.in_state(state) + rows.start * size, matrix),
                _ => load_flat(&dst, new, matrix),
            }
            let (values, out) = (&mut values[..rows.len()], &mut out[..rows.len()]);
            for t in tokens {
                let [r, decay, k, a, b, _] = &mut vectors;
                let [r, decay, k, a, b] = [
                    vector(&sources[0], &shape, state, t, r),
                    vector(&sources[1], &shape, state, t, decay),
                    vector(&sources[2], &shape, state, t, k),
                    vector(&sources[3], &shape, state, t, a),
                    vector(&sources[4], &shape, state, t, b),
                ];
                let (head, sequence) = (state % shape.heads, state / shape.heads);
                v_source.load([rows.start, head, t + shape.tokens * sequence, 0], values);
                wkv7_token(matrix, r, decay, k, a, b, values, out);
                store_flat(&dst, shape.in_output(state, t) + rows.start, out);
            }
            store_flat(&dst, new, matrix);
            Ok(())
        });
    })
}

multiversion! {
    /// A token of RWKV_WKV7: some rows of a head.
    fn wkv7_token<'a>(
        state: &'a mut [f32],
        r: &'a [f32],
        decay: &'a [f32],
        k: &'a [f32],
        a: &'a [f32],
        b: &'a [f32],
        values: &'a [f32],
        out: &'a mut [f32],
    ) {
        for ((row, v), out) in state.chunks_exact_mut(k.len()).zip(values).zip(out) {
            let removed = dot(row, a);
            *out = decay_add_two_dot(row, decay, (*v, k), (removed, b), r);
        }
    }
}

pub(super) fn delta_net(shape: HeadShape, snapshots: usize) -> Kernel {
    kernel(shape, move |ctx, recurrence| {
        let (size, local) = (shape.size, ctx.take_local_scratch());
        let Scratch { state: matrix, mut vectors, values, out } = Scratch::new(local, size, recurrence.max_units());
        let [q_source, k_source, v_source, gate_source, beta_source, old] = std::array::from_fn(|i| ctx.src(i));
        let (old, dst) = (old.with_desc(&shape.state), ctx.dst().with_desc(&shape.dst));
        let scale = 1.0 / (size as f32).sqrt();
        recurrence.each_claim(ctx, |claim| {
            let RecurrenceClaim { state, units: rows, tokens } = claim;
            let (head, sequence) = (state % shape.heads, state / shape.heads);
            // Where q or k has the head: heads repeat, sequences are shared by consecutive ones.
            let place = |ne: [usize; 4]| (head % ne[1], sequence / (shape.sequences / ne[3]));
            let ((q_head, q_sequence), (k_head, k_sequence)) = (place(q_source.ne()), place(k_source.ne()));
            let matrix = &mut matrix[..rows.len() * size];
            let block = |j: usize| shape.in_block(j, state) + rows.start * size;
            match tokens.start {
                0 => load_flat(&old, shape.in_state(state) + rows.start * size, matrix),
                _ => load_flat(&dst, block(0), matrix),
            }
            let (values, out) = (&mut values[..rows.len()], &mut out[..rows.len()]);
            for t in tokens {
                let [q, k, decay, probe, ..] = &mut vectors;
                let q = q_source.fetch([0, q_head, t, q_sequence], q);
                let k = k_source.fetch([0, k_head, t, k_sequence], k);
                v_source.load([rows.start, head, t, sequence], values);
                let mut beta = [0.0];
                beta_source.load([0, head, t, sequence], &mut beta);
                let gates = gate_source.ne()[0];
                gate_source.load([0, head, t, sequence], &mut decay[..gates]);
                decay_and_probe(decay, gates, k, probe);
                delta_token(matrix, q, k, decay, probe, values, beta[0], scale, out);
                store_flat(&dst, shape.in_output(state, t) + rows.start, out);
                let behind = shape.tokens - 1 - t;
                if behind > 0 && behind < snapshots {
                    store_flat(&dst, block(behind), matrix);
                }
            }
            store_flat(&dst, block(0), matrix);
            Ok(())
        });
    })
}

multiversion! {
    /// `decay = exp(gate)`, where `decay` has one gate or all, and `probe = decay k`: its product with the old state is that of k
    /// with the decayed state.
    fn decay_and_probe<'a>(decay: &'a mut [f32], gates: usize, k: &'a [f32], probe: &'a mut [f32]) {
        if gates == 1 {
            let factor = math::exp(decay[0]);
            decay.fill(factor);
        } else {
            math::update(decay, math::exp);
        }
        math::zip(probe, decay, k, |decay, k| decay * k);
    }
}

multiversion! {
    /// A token of GATED_DELTA_NET: some rows of a head.
    fn delta_token<'a>(
        state: &'a mut [f32],
        q: &'a [f32],
        k: &'a [f32],
        decay: &'a [f32],
        probe: &'a [f32],
        values: &'a [f32],
        beta: f32,
        scale: f32,
        out: &'a mut [f32],
    ) {
        for ((row, v), out) in state.chunks_exact_mut(k.len()).zip(values).zip(out) {
            let delta = (v - dot(row, probe)) * beta;
            *out = decay_add_dot(row, decay, (delta, k), q) * scale;
        }
    }
}
