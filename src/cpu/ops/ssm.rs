//! SSM_CONV: tiles of channels and tokens, summed along the tokens and transposed. SSM_SCAN: see [`super::recurrence`]; a unit is
//! a row of the state, and a sequence has one state, because heads differ in their decay and their inputs only.

use super::recurrence::{Recurrence, RecurrenceClaim, cost, decay_add_dot, load_flat, store_flat};
use super::rows::check_row;
use super::{Kernel, empty_sum, math, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::{DeviceError, Unsupported};
use crate::ops::ssm::Ssm;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

pub(super) fn select(op: Ssm, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let floats = match op {
        Ssm::Conv => 2,
        Ssm::Scan { .. } => Ssm::IDS,
    };
    let is_f32 = |i| node.srcs.get(i).is_some_and(|t: &TensorDesc| t.dtype() == F32);
    if !(0..floats).all(is_f32) || node.dst.dtype() != F32 {
        return Err(unsupported_types(node));
    }
    if op == Ssm::Conv && node.srcs.get(1).is_some_and(TensorDesc::is_empty) {
        return Ok(empty_sum(node));
    }
    let kernel = match op {
        Ssm::Conv => Conv::new(node).map(Conv::kernel),
        Ssm::Scan { snapshots } => Scan::new(node, snapshots as usize).map(Scan::kernel),
    };
    kernel.ok_or_else(|| unsupported_types(node))
}

/// Most channels and tokens of a tile of SSM_CONV.
const TILE_CHANNELS: usize = 64;
const TILE_TOKENS: usize = 64;

/// Floats of x in a tile with all tokens of a sequence, whose channels lie one after another.
const WHOLE_ROWS: usize = 4096;

/// Products of a tile, unless one element has more.
const TILE_PRODUCTS: usize = 1 << 20;

/// SSM_CONV of a node.
#[derive(Clone, Copy)]
struct Conv {
    /// x with the rows of a sequence as one row.
    x: TensorDesc,
    /// The weights as one row.
    w: TensorDesc,
    window: usize,
    d_conv: usize,
    /// The counts of dst.
    channels: usize,
    tokens: usize,
    sequences: usize,
    tile_channels: usize,
    tile_tokens: usize,
}

impl Conv {
    fn new(node: &NodeView<'_>) -> Option<Conv> {
        let (x, w) = (node.srcs.get(0)?, node.srcs.get(1)?);
        let ([window, channels, sequences, _], d_conv, tokens) = (x.ne(), w.ne()[0], node.dst.ne()[1]);
        let all = window.checked_mul(channels)?;
        let x = TensorDesc::strided(F32, [all, 1, sequences, 1], [4, 0, x.nb()[2], 0]).ok()?;
        let w = w.reshaped([w.elements(), 1, 1, 1]).ok()?;
        let product_limit = (TILE_PRODUCTS / d_conv.max(1)).max(1);
        let (tile_channels, tile_tokens) = if window <= TILE_TOKENS {
            ((WHOLE_ROWS / window.max(1)).min(product_limit / tokens.max(1)).max(1), tokens)
        } else {
            let channels = TILE_CHANNELS.min(product_limit);
            (channels, TILE_TOKENS.min((product_limit / channels).max(1)))
        };
        Some(Conv { x, w, window, d_conv, channels, tokens, sequences, tile_channels, tile_tokens })
    }

    fn kernel(self) -> Kernel {
        let (outputs, row) = (self.tile_channels * self.tile_tokens, self.tile_tokens + self.d_conv);
        let weights = self.tile_channels.saturating_mul(self.d_conv);
        let input = if self.whole_rows() { self.tile_channels * self.window } else { row };
        let local =
            [outputs, self.tile_channels, weights, input].iter().fold(0, |n: usize, &more| n.saturating_add(more));
        let products = self.channels.saturating_mul(self.tokens).saturating_mul(self.sequences);
        let cost = products.saturating_mul(self.d_conv.saturating_add(2));
        Kernel::new(cost, move |w| self.run(w)).with_local(local)
    }

    /// Whether a tile has all tokens of its channels, so that its part of x is one piece of memory.
    fn whole_rows(&self) -> bool {
        self.tile_tokens == self.tokens && self.window <= TILE_TOKENS
    }

    fn run(&self, ctx: &mut KernelContext<'_>) {
        let (dst, x, w) = (ctx.dst(), ctx.src(0).with_desc(&self.x), ctx.src(1).with_desc(&self.w));
        if dst.desc().is_empty() {
            return;
        }
        let local = ctx.take_local_scratch();
        let (tile, local) = local.split_at_mut(self.tile_channels * self.tile_tokens);
        let (line, local) = local.split_at_mut(self.tile_channels);
        let (weights_buffer, input_buffer) = local.split_at_mut(self.tile_channels * self.d_conv);
        let (across, along) = (self.channels.div_ceil(self.tile_channels), self.tokens.div_ceil(self.tile_tokens));
        for claim in ctx.chunks(across * along * self.sequences, 1).flatten() {
            let (c0, rest) = (claim % across * self.tile_channels, claim / across);
            let (t0, sequence) = (rest % along * self.tile_tokens, rest / along);
            let (channels, tokens) =
                (self.tile_channels.min(self.channels - c0), self.tile_tokens.min(self.tokens - t0));
            let weights = w.fetch([c0 * self.d_conv, 0, 0, 0], &mut weights_buffer[..channels * self.d_conv]);
            let tile = &mut tile[..channels * tokens];
            if self.whole_rows() {
                let x = x.fetch([c0 * self.window, 0, sequence, 0], &mut input_buffer[..channels * self.window]);
                conv_tile(tile, x, weights, tokens, self.window, self.d_conv);
            } else {
                let window = tokens + self.d_conv - 1;
                for (c, out) in tile.chunks_exact_mut(tokens).enumerate() {
                    let first = (c0 + c) * self.window + t0;
                    let x = x.fetch([first, 0, sequence, 0], &mut input_buffer[..window]);
                    let weights = &weights[c * self.d_conv..][..self.d_conv];
                    conv_tile(out, x, weights, tokens, window, self.d_conv);
                }
            }
            if tokens == 1 {
                dst.store([c0, t0, sequence, 0], tile);
                continue;
            }
            let line = &mut line[..channels];
            for t in 0..tokens {
                for (to, channel) in line.iter_mut().zip(tile.chunks_exact(tokens)) {
                    *to = channel[t];
                }
                dst.store([c0, t0 + t, sequence, 0], line);
            }
        }
    }
}

multiversion! {
    /// For some channels, `out[t] = Σ_j x[t + j] weights[j]`: `tokens` outputs, `window` inputs and `d_conv` weights per channel.
    fn conv_tile<'a>(
        out: &'a mut [f32],
        x: &'a [f32],
        weights: &'a [f32],
        tokens: usize,
        window: usize,
        d_conv: usize,
    ) {
        if tokens == 1 {
            for ((out, x), weights) in out.iter_mut().zip(x.chunks_exact(window)).zip(weights.chunks_exact(d_conv)) {
                let mut sum = 0.0;
                for (x, w) in x.iter().zip(weights) {
                    sum += x * w;
                }
                *out = sum;
            }
            return;
        }
        let channels = out.chunks_exact_mut(tokens).zip(x.chunks_exact(window)).zip(weights.chunks_exact(d_conv));
        for ((out, x), weights) in channels {
            out.fill(0.0);
            for (j, w) in weights.iter().enumerate() {
                for (out, x) in out.iter_mut().zip(&x[j..]) {
                    *out += x * w;
                }
            }
        }
    }
}

/// SSM_SCAN of a node.
#[derive(Clone, Copy)]
struct Scan {
    recurrence: Recurrence,
    /// x with its heads as one row, the states and dst as vectors, a as one row.
    x: TensorDesc,
    states: TensorDesc,
    a: TensorDesc,
    dst: TensorDesc,
    snapshots: usize,
    /// Elements of a row of the state.
    n: usize,
    hd: usize,
    heads: usize,
    heads_per_group: usize,
    tokens: usize,
    sequences: usize,
    slots: usize,
    /// Whether each element of a row has its own decay (Mamba-1).
    by_element: bool,
}

impl Scan {
    fn new(node: &NodeView<'_>, snapshots: usize) -> Option<Scan> {
        let [states, x, a, b] = [Ssm::STATES, Ssm::X, Ssm::A, Ssm::B].map(|i| node.srcs.get(i));
        let (states, x, a, b) = (states?, x?, a?, b?);
        let ([n, hd, heads, slots], [_, _, tokens, sequences]) = (states.ne(), x.ne());
        let rows = hd.checked_mul(heads)?;
        Some(Scan {
            recurrence: Recurrence::new(sequences, rows, n, tokens),
            x: TensorDesc::strided(F32, [rows, 1, tokens, sequences], [4, 0, x.nb()[2], x.nb()[3]]).ok()?,
            states: states.reshaped([states.elements(), 1, 1, 1]).ok()?,
            a: a.reshaped([a.elements(), 1, 1, 1]).ok()?,
            dst: node.dst.reshaped([node.dst.elements(), 1, 1, 1]).ok()?,
            snapshots,
            n,
            hd,
            heads,
            heads_per_group: heads / b.ne()[1].max(1),
            tokens,
            sequences,
            slots,
            by_element: a.ne()[0] != 1,
        })
    }

    fn kernel(self) -> Kernel {
        let rows = self.recurrence.max_units();
        // The state and the decays have a row of n for each row or head, the decay's logarithms too; x, steps, y, b and c.
        let local = rows.saturating_mul(self.n).saturating_mul(3).saturating_add(4 * rows).saturating_add(2 * self.n);
        let state = self.hd.saturating_mul(self.heads).saturating_mul(self.n).saturating_mul(self.sequences);
        let kernel = Kernel::new(cost(state, self.tokens), move |w| self.run(w));
        kernel.with_local(local).with_syncs(self.recurrence.syncs())
    }

    fn run(&self, ctx: &mut KernelContext<'_>) {
        if self.dst.is_empty() || self.n == 0 {
            return;
        }
        let local = ctx.take_local_scratch();
        let this: &KernelContext<'_> = ctx;
        self.recurrence.each_claim(this, |claim| self.scan(this, claim, local));
    }

    /// A claim: some rows of a sequence, whose heads may be incomplete at both ends.
    fn scan(&self, ctx: &KernelContext<'_>, claim: RecurrenceClaim, local: &mut [f32]) -> Result<(), DeviceError> {
        let RecurrenceClaim { state: sequence, units: rows, tokens } = claim;
        let dst = ctx.dst().with_desc(&self.dst);
        let (states, x_rows) = (ctx.src(Ssm::STATES).with_desc(&self.states), ctx.src(Ssm::X).with_desc(&self.x));
        let (dt, b, c) = (ctx.src(Ssm::DT), ctx.src(Ssm::B), ctx.src(Ssm::C));
        let heads = rows.start / self.hd..(rows.end - 1) / self.hd + 1;
        let (n, max_rows, all_rows) = (self.n, self.recurrence.max_units(), self.hd * self.heads);
        let (state, local) = local.split_at_mut(max_rows * n);
        let (decays, local) = local.split_at_mut(max_rows * n);
        let (a, local) = local.split_at_mut(max_rows * n);
        let (x_buffer, local) = local.split_at_mut(max_rows);
        let (steps, local) = local.split_at_mut(max_rows);
        let (y, local) = local.split_at_mut(max_rows);
        let (b_buffer, c_buffer) = local.split_at_mut(n);
        let (state, y) = (&mut state[..rows.len() * n], &mut y[..rows.len()]);
        let (decays, steps) = (&mut decays[..heads.len() * n], &mut steps[..heads.len()]);
        let per_head = if self.by_element { n } else { 1 };
        let a = &mut a[..heads.len() * per_head];
        load_flat(&ctx.src(Ssm::A).with_desc(&self.a), heads.start * per_head, a);

        let in_block = rows.start * n;
        let block =
            |j: usize| all_rows * (self.tokens * self.sequences + (j * self.sequences + sequence) * n) + in_block;
        if tokens.start == 0 {
            let id = ctx.src(Ssm::IDS).index([sequence, 0, 0, 0]);
            let slot = check_row(OpCode::SsmScan, id, self.slots)?;
            load_flat(&states, slot * all_rows * n + in_block, state);
        } else {
            load_flat(&dst, block(0), state);
        }
        for t in tokens {
            dt.load([heads.start, t, sequence, 0], steps);
            math::update(steps, |x| if x > 20.0 { x } else { x.exp().ln_1p() });
            exp_decays(decays, a, steps, n);
            let x = x_rows.fetch([rows.start, 0, t, sequence], &mut x_buffer[..rows.len()]);
            let mut head = heads.start;
            while head < heads.end {
                let group = head / self.heads_per_group;
                let last = heads.end.min((group + 1) * self.heads_per_group);
                let b = b.fetch([0, group, t, sequence], &mut b_buffer[..n]);
                let c = c.fetch([0, group, t, sequence], &mut c_buffer[..n]);
                let first_row = rows.start.max(head * self.hd);
                let part = first_row - rows.start..rows.end.min(last * self.hd) - rows.start;
                scan_token(
                    &mut state[part.start * n..part.end * n],
                    &decays[(head - heads.start) * n..],
                    &steps[head - heads.start..last - heads.start],
                    &x[part.clone()],
                    &mut y[part],
                    b,
                    c,
                    self.hd,
                    first_row % self.hd,
                );
                head = last;
            }
            store_flat(&dst, (sequence * self.tokens + t) * all_rows + rows.start, y);
            let behind = self.tokens - 1 - t;
            if behind > 0 && behind < self.snapshots {
                store_flat(&dst, block(behind), state);
            }
        }
        store_flat(&dst, block(0), state);
        Ok(())
    }
}

multiversion! {
    /// `exp(step a)` for each head: rows of `n`, with one `a` for each element or for all.
    fn exp_decays<'a>(out: &'a mut [f32], a: &'a [f32], steps: &'a [f32], n: usize) {
        if a.len() == steps.len() {
            for ((out, a), step) in out.chunks_exact_mut(n).zip(a).zip(steps) {
                out.fill(math::exp(step * a));
            }
            return;
        }
        // Two passes: the second one has no boundaries between rows, which may be as short as one vector.
        for ((out, a), step) in out.chunks_exact_mut(n).zip(a.chunks_exact(n)).zip(steps) {
            math::zip(out, a, a, |a, _| a * step);
        }
        math::update(out, math::exp);
    }
}

multiversion! {
    /// A token of consecutive rows, whose heads share b and c.
    fn scan_token<'a>(
        state: &'a mut [f32],
        // A row for each head.
        decays: &'a [f32],
        steps: &'a [f32],
        x: &'a [f32],
        y: &'a mut [f32],
        b: &'a [f32],
        c: &'a [f32],
        hd: usize,
        // The first row's number in its head.
        first_in_head: usize,
    ) {
        let (n, mut in_head) = (b.len(), hd - first_in_head);
        let mut rows = state.chunks_exact_mut(n).zip(x).zip(y);
        for (decay, step) in decays.chunks_exact(n).zip(steps) {
            for ((row, x), y) in rows.by_ref().take(in_head) {
                *y = decay_add_dot(row, decay, (x * step, b), c);
            }
            in_head = hd;
        }
    }
}
