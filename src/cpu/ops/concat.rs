//! CONCAT and REPEAT: rows of blocks are copied without conversion, so every type works.

use super::{CHUNK, Kernel, rows_per_chunk, unsupported};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::concat::Concat;

pub(super) fn select(op: Concat, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let cost = node.dst.elements();
    match op {
        _ if cost == 0 => Ok(Kernel::new(0, |_| ())),
        Concat::Concat { dim: dim @ 0..=3 } => Ok(Kernel::new(cost, move |w| concat(w, usize::from(dim)))),
        Concat::Concat { dim } => Err(unsupported(node.op.code(), format!("dimension {dim}"))),
        Concat::Repeat => Ok(Kernel::new(cost, repeat)),
    }
}

fn concat(ctx: &mut KernelContext<'_>, dim: usize) {
    let (dst, a, b) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let first = a.ne()[dim];
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            let mut i = [0, i1, i2, i3];
            if dim == 0 {
                dst.copy(i, &a, i, first);
                dst.copy([first, i1, i2, i3], &b, i, b.ne()[0]);
            } else if i[dim] < first {
                dst.copy(i, &a, i, a.ne()[0]);
            } else {
                i[dim] -= first;
                dst.copy([0, i1, i2, i3], &b, i, b.ne()[0]);
            }
        }
    }
}

fn repeat(ctx: &mut KernelContext<'_>) {
    let (dst, a) = (ctx.dst(), ctx.src(0));
    let (n, [len, n1, n2, n3]) = (dst.ne()[0], a.ne());
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            dst.copy([0, i1, i2, i3], &a, [0, i1 % n1, i2 % n2, i3 % n3], len);
            // Doubles the written part: a single value fills a row in a few copies.
            let mut done = len;
            while done < n {
                let more = done.min(n - done);
                dst.copy([done, i1, i2, i3], &dst, [0, i1, i2, i3], more);
                done += more;
            }
        }
    }
}
