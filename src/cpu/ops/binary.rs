//! ADD, SUB, MUL, DIV with broadcast, computed in f32, ADD and ADD1 also of quantised rows; ADD_ID.

use super::{CHUNK, Kernel, RowPieces, math, store_cost, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::{DeviceError, Unsupported};
use crate::ops::binary::Binary;
use crate::ops::mul_mat::NO_EXPERT;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::F32;
use crate::tensor::quant::{dequantiser, quantiser};

pub(super) fn select(op: Binary, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let dtype = |i| node.srcs.get(i).map(|s| s.dtype());
    let (a, b, dst) = (dtype(0), dtype(1), node.dst.dtype());
    let (Some(a), Some(b)) = (a, b) else { return Err(unsupported_types(node)) };
    let cost = node.dst.elements();
    if op == Binary::AddId {
        let fits = (a, b, dst) == (F32, F32, F32);
        return if fits { Ok(Kernel::new(cost, add_id).with_local(3 * CHUNK)) } else { Err(unsupported_types(node)) };
    }
    // ggml's table lists equal types, and F16 or BF16 with F32. The other pairs of float types need no extra code here.
    let floats = a.is_float() && b.is_float() && dst.is_float();
    let converts = !a.is_float() && dequantiser(a).is_some() && quantiser(dst).is_some();
    if !(floats || converts && b == F32 && matches!(op, Binary::Add | Binary::Add1)) {
        return Err(unsupported_types(node));
    }
    let cost = cost.saturating_mul(store_cost(dst));
    Ok(Kernel::new(cost, move |w| each(w, op)).with_local(3 * CHUNK))
}

multiversion! {
    /// The op on two rows.
    fn apply<'a>(op: Binary, out: &'a mut [f32], x: &'a [f32], y: &'a [f32]) {
        match op {
            Binary::Add | Binary::Add1 | Binary::AddId => math::zip(out, x, y, |x, y| x + y),
            Binary::Sub => math::zip(out, x, y, |x, y| x - y),
            Binary::Mul => math::zip(out, x, y, |x, y| x * y),
            Binary::Div => math::zip(out, x, y, |x, y| x / y),
        }
    }
}

fn each(ctx: &mut KernelContext<'_>, op: Binary) {
    let (dst, a, b) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let bne = b.ne();
    // A row of b that is shorter than dst's repeats: no piece is longer than it. A piece of quantised rows is whole blocks,
    // since b is as long as they are, or one element.
    let piece = if bne[0] == 1 { CHUNK } else { CHUNK.min(bne[0]) };
    let [x, y, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::with_len(dst.desc(), piece).share(ctx, |i, n| {
        let row = [i[1] % bne[1], i[2] % bne[2], i[3] % bne[3]];
        let start = i[0] % bne[0];
        let (at, y) = ([start, row[0], row[1], row[2]], &mut y[..n]);
        let y = if bne[0] == 1 {
            b.load(at, &mut y[..1]);
            y.fill(y[0]);
            y
        } else if start + n <= bne[0] {
            b.fetch(at, y)
        } else {
            // The piece wraps around the end of b's row.
            let first = bne[0] - start;
            b.load(at, &mut y[..first]);
            b.load([0, row[0], row[1], row[2]], &mut y[first..]);
            y
        };
        let (x, out) = (a.fetch(i, &mut x[..n]), &mut out[..n]);
        apply(op, out, x, y);
        dst.store(i, out);
    });
}

fn add_id(ctx: &mut KernelContext<'_>) {
    let (dst, a, b, ids) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2));
    let experts = b.ne()[1];
    let [x, y, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let id = ids.index([i[1], i[2], 0, 0]);
        if id == NO_EXPERT {
            return dst.copy(i, &a, i, n);
        }
        let Some(expert) = usize::try_from(id).ok().filter(|&e| e < experts) else {
            let reason = format!("expert id {id} is not one of the {experts} rows of the bias");
            return ctx.fail(DeviceError::Data { op: OpCode::AddId, reason });
        };
        let (x, y, out) = (a.fetch(i, &mut x[..n]), b.fetch([i[0], expert, 0, 0], &mut y[..n]), &mut out[..n]);
        math::add(out, x, y);
        dst.store(i, out);
    });
}
