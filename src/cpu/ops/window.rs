//! WIN_PART, WIN_UNPART, GET_REL_POS: copies of rows. ADD_REL_POS: adds two embeddings to each row of scores.

use super::{CHUNK, Kernel, RowPieces, rows_per_chunk, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::window::Window;
use crate::tensor::DType::{BF16, F16, F32};
use crate::tensor::TensorDesc;

pub(super) fn select(op: Window, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(src), dst) = (node.srcs.get(0), node.dst) else { return Err(unsupported_types(node)) };
    let types = (src.dtype(), dst.dtype());
    let supported = if op == Window::GetRelPos { matches!(types, (F16 | BF16, F16)) } else { types == (F32, F32) };
    if !supported {
        return Err(unsupported_types(node));
    }
    let cost = dst.elements();
    if cost == 0 {
        return Ok(Kernel::new(0, |_| ()));
    }
    Ok(match op {
        Window::Part { columns, size, .. } => {
            let (columns, size) = (columns as usize, size as usize);
            Kernel::new(cost, move |ctx| part(ctx, columns, size))
        }
        Window::Unpart { size } => Kernel::new(cost, move |ctx| unpart(ctx, size as usize)),
        Window::GetRelPos => {
            // The elements have two bytes in both types, and their bits are copied.
            let Ok(table) = TensorDesc::strided(F16, src.ne(), src.nb()) else { return Err(unsupported_types(node)) };
            Kernel::new(cost, move |ctx| relative_positions(ctx, &table))
        }
        Window::AddRelPos => Kernel::new(cost.saturating_mul(2), add_relative_positions).with_local(3 * CHUNK),
    })
}

fn part(ctx: &mut KernelContext<'_>, columns: usize, size: usize) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let ([n, w, h, _], zeros) = (src.ne(), [0.0; CHUNK]);
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [x, y, window] = dst.desc().row_index(r);
            let (at, from) = ([0, x, y, window], [window % columns * size + x, window / columns * size + y]);
            if from[0] < w && from[1] < h {
                dst.copy(at, &src, [0, from[0], from[1], 0], n);
                continue;
            }
            for start in (0..n).step_by(CHUNK) {
                dst.store([start, x, y, window], &zeros[..CHUNK.min(n - start)]);
            }
        }
    }
}

fn unpart(ctx: &mut KernelContext<'_>, size: usize) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let [n, w, ..] = dst.ne();
    let columns = w.div_ceil(size);
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [x, y, _] = dst.desc().row_index(r);
            dst.copy([0, x, y, 0], &src, [0, x % size, y % size, y / size * columns + x / size], n);
        }
    }
}

/// GET_REL_POS. `table` describes the source as F16.
fn relative_positions(ctx: &mut KernelContext<'_>, table: &TensorDesc) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let (src, [n, k, ..]) = (src.with_desc(table), dst.ne());
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [x, y, _] = dst.desc().row_index(r);
            dst.copy([0, x, y, 0], &src, [0, k - 1 - x + y, 0, 0], n);
        }
    }
}

fn add_relative_positions(ctx: &mut KernelContext<'_>) {
    let (dst, scores, pw, ph) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2));
    let [n, a, ..] = pw.ne();
    let [buffer, sums, wide] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::new(dst.desc()).share(ctx, |[i0, i1, i2, i3], len| {
        let (at, sums) = ([i0, i1, i2, i3], &mut sums[..len]);
        sums.copy_from_slice(scores.fetch(at, &mut buffer[..len]));
        // ggml's embeddings end with dimension 2 of the scores.
        if i3 > 0 {
            return dst.store(at, sums);
        }
        let (p1, p2) = (i1 % a, i1 / a);
        // The piece, in parts of a row of the n by n scores.
        let mut done = 0;
        while done < len {
            let (j, i) = ((i0 + done) % n, (i0 + done) / n);
            let part = (n - j).min(len - done);
            let wide = pw.fetch([j, p1, p2, i2], &mut wide[..part]);
            let mut high = 0.0;
            ph.load([i, p1, p2, i2], std::slice::from_mut(&mut high));
            for (k, (sum, wide)) in sums[done..done + part].iter_mut().zip(wide).enumerate() {
                // In the order of ggml's loop over i and j.
                *sum = if i <= j + k { *sum + high + wide } else { *sum + wide + high };
            }
            done += part;
        }
        dst.store(at, sums);
    });
}
