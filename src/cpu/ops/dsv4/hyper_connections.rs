//! DSV4_HC_COMB, DSV4_HC_PRE and DSV4_HC_POST.

use super::super::{CHUNK, Kernel, RowPieces, math};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::ops::NodeView;
use crate::ops::dsv4::STREAMS;

/// Normalisations of a phase of DSV4_HC_COMB: a pause is possible between claims only, and the number of normalisations is a
/// parameter of the peer. Models use 20.
const ITERATIONS_PER_PHASE: usize = 256;

/// Tokens of a claim of DSV4_HC_COMB.
const COMB_TOKENS: usize = 16;

/// Where the matrices begin in a token's mixes and in the base.
const MATRIX: usize = 2 * STREAMS;

/// Cost of a stream in a piece: of short rows, finding the row costs more than its products.
const STREAM_COST: usize = 16;

type Matrix = [[f32; STREAMS]; STREAMS];

pub(super) fn comb(node: &NodeView<'_>, eps: f32, iterations: usize) -> Kernel {
    let phases = iterations.div_ceil(ITERATIONS_PER_PHASE);
    let cost = node.dst.elements().saturating_mul(iterations.saturating_mul(4).saturating_add(16));
    let kernel = Kernel::new(cost, move |w| run_comb(w, eps, iterations));
    kernel.with_syncs(phases.saturating_sub(1))
}

fn run_comb(ctx: &mut KernelContext<'_>, eps: f32, iterations: usize) {
    let (dst, mixes, scale, base) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2));
    let tokens = dst.ne()[2];
    if tokens == 0 {
        return;
    }
    for first in (0..iterations).step_by(ITERATIONS_PER_PHASE) {
        if first > 0 {
            ctx.sync();
        }
        let last = iterations.min(first + ITERATIONS_PER_PHASE);
        for t in ctx.chunks(tokens, COMB_TOKENS).flatten() {
            let mut matrix = [[0.0; STREAMS]; STREAMS];
            if first == 0 {
                let mut factor = [0.0];
                scale.load([2, 0, 0, 0], &mut factor);
                for (s, row) in matrix.iter_mut().enumerate() {
                    let mut bias = [0.0; STREAMS];
                    mixes.load([MATRIX + s * STREAMS, t, 0, 0], row);
                    base.load([MATRIX + s * STREAMS, 0, 0, 0], &mut bias);
                    row.iter_mut().zip(bias).for_each(|(m, bias)| *m = *m * factor[0] + bias);
                    softmax(row, eps);
                }
            } else {
                matrix.iter_mut().enumerate().for_each(|(s, row)| dst.load([0, s, t, 0], row));
            }
            for iteration in first..last {
                if iteration > 0 {
                    normalise_rows(&mut matrix, eps);
                }
                normalise_columns(&mut matrix, eps);
            }
            matrix.iter().enumerate().for_each(|(s, row)| dst.store([0, s, t, 0], row));
        }
    }
}

/// Softmax of a row, plus eps on each weight.
fn softmax(row: &mut [f32; STREAMS], eps: f32) {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|m| *m = (*m - top).exp());
    let factor = 1.0 / row.iter().sum::<f32>();
    row.iter_mut().for_each(|m| *m = *m * factor + eps);
}

fn normalise_rows(matrix: &mut Matrix, eps: f32) {
    for row in matrix {
        let factor = 1.0 / row.iter().fold(eps, |sum, m| sum + m);
        row.iter_mut().for_each(|m| *m *= factor);
    }
}

fn normalise_columns(matrix: &mut Matrix, eps: f32) {
    let mut sums = [eps; STREAMS];
    for row in matrix.iter() {
        sums.iter_mut().zip(row).for_each(|(sum, m)| *sum += m);
    }
    let factors = sums.map(|sum| 1.0 / sum);
    for row in matrix {
        row.iter_mut().zip(factors).for_each(|(m, factor)| *m *= factor);
    }
}

pub(super) fn pre(node: &NodeView<'_>, scale: f32, gated: bool) -> Option<Kernel> {
    let x = node.srcs.get(0)?;
    let cost =
        x.elements().saturating_mul(if gated { 6 } else { 2 }).saturating_add(x.rows().saturating_mul(STREAM_COST));
    Some(Kernel::new(cost, move |w| run_pre(w, scale, gated)))
}

fn run_pre(ctx: &mut KernelContext<'_>, scale: f32, gated: bool) {
    let (dst, x, weights) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let streams = x.ne()[1];
    if dst.desc().is_empty() {
        return;
    }
    let (mut x_buffer, mut gate_buffer, mut sums) = ([0.0; CHUNK], [0.0; CHUNK], [0.0; CHUNK]);
    RowPieces::with_cost(dst.desc(), streams.saturating_mul(STREAM_COST), 1, CHUNK).share(ctx, |[first, t, ..], n| {
        let sums = &mut sums[..n];
        sums.fill(0.0);
        for h in 0..streams {
            let x = x.fetch([first, h, t, 0], &mut x_buffer[..n]);
            if gated {
                let gates = &mut gate_buffer[..n];
                weights.load([first, h, t, 0], gates);
                add_gated(sums, x, gates);
            } else {
                let mut factor = [0.0];
                weights.load([h, t, 0, 0], &mut factor);
                math::add_scaled(sums, x, factor[0]);
            }
        }
        math::scale(sums, scale);
        dst.store([first, t, 0, 0], sums);
    });
}

pub(super) fn post(node: &NodeView<'_>) -> Option<Kernel> {
    let residual = node.srcs.get(1)?;
    let streams = if node.srcs.get(3).is_some() { residual.ne()[1] } else { 1 };
    Some(Kernel::new(residual.elements().saturating_mul(streams.saturating_add(2)), run_post))
}

fn run_post(ctx: &mut KernelContext<'_>) {
    let (dst, x, residual, post, comb) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2), ctx.optional_src(3));
    let streams = residual.ne()[1];
    if dst.desc().is_empty() {
        return;
    }
    let (mut buffer, mut sums) = ([0.0; CHUNK], [0.0; CHUNK]);
    let streams_read = if comb.is_some() { streams } else { 1 };
    let cost = streams_read.saturating_add(2).saturating_mul(STREAM_COST);
    RowPieces::with_cost(dst.desc(), cost, 1, CHUNK).share(ctx, |[first, d, t, _], n| {
        let (sums, buffer) = (&mut sums[..n], &mut buffer[..n]);
        let mut factor = [0.0];
        post.load([d, t, 0, 0], &mut factor);
        x.load([first, t, 0, 0], sums);
        math::scale(sums, factor[0]);
        let Some(comb) = &comb else {
            let kept = residual.fetch([first, d, t, 0], buffer);
            math::add_scaled(sums, kept, 1.0);
            return dst.store([first, d, t, 0], sums);
        };
        for s in 0..streams {
            let from = residual.fetch([first, s, t, 0], buffer);
            comb.load([d, s, t, 0], &mut factor);
            math::add_scaled(sums, from, factor[0]);
        }
        dst.store([first, d, t, 0], sums);
    });
}

multiversion! {
    /// `sums += x sigmoid(gates)`; the gates are overwritten.
    fn add_gated<'a>(sums: &'a mut [f32], x: &'a [f32], gates: &'a mut [f32]) {
        math::update(gates, math::sigmoid);
        for ((sum, x), gate) in sums.iter_mut().zip(x).zip(gates) {
            *sum += x * *gate;
        }
    }
}
