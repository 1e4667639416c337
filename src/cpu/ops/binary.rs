//! ADD, SUB, MUL, DIV with broadcast, computed in f32; ADD_ID.

use super::{CHUNK, Kernel, is_float, pieces, rows_of, types};
use crate::cpu::pool::Work;
use crate::device::{DeviceError, Unsupported};
use crate::ops::binary::Binary;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{BF16, F16, F32};

pub(super) fn select(op: Binary, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let dtype = |i| node.srcs.get(i).map(|s| s.dtype());
    let (a, b, dst) = (dtype(0), dtype(1), node.dst.dtype());
    let (Some(a), Some(b)) = (a, b) else { return Err(types(node)) };
    let cost = node.dst.elements();
    if op == Binary::AddId {
        return if (a, b, dst) == (F32, F32, F32) { Ok(Kernel::new(cost, add_id)) } else { Err(types(node)) };
    }
    // ggml's table has the equal types and F16 or BF16 with F32; the rest costs nothing more here.
    if !(is_float(a) && is_float(b) && is_float(dst)) {
        return Err(types(node));
    }
    debug_assert!([F32, F16, BF16].contains(&dst));
    Ok(match op {
        Binary::Sub => Kernel::new(cost, |w| each(w, |a, b| a - b)),
        Binary::Mul => Kernel::new(cost, |w| each(w, |a, b| a * b)),
        Binary::Div => Kernel::new(cost, |w| each(w, |a, b| a / b)),
        Binary::Add | Binary::AddId => Kernel::new(cost, |w| each(w, |a, b| a + b)),
    })
}

fn each(work: &mut Work<'_>, f: impl Fn(f32, f32) -> f32) {
    let (dst, a, b) = (work.dst(), work.src(0), work.src(1));
    let bne = b.ne();
    // A row of b that is shorter than dst's repeats: pieces then end where it does. A single value is read once.
    let piece = if bne[0] == dst.ne()[0] || bne[0] == 1 { CHUNK } else { CHUNK.min(bne[0]) };
    let (mut x, mut y) = ([0.0; CHUNK], [0.0; CHUNK]);
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
        pieces(dst.desc(), rows, piece, |i, n| {
            let row = [i[1] % bne[1], i[2] % bne[2], i[3] % bne[3]];
            let x = &mut x[..n];
            a.load(i, x);
            if bne[0] == 1 {
                b.load([0, row[0], row[1], row[2]], &mut y[..1]);
                for x in x.iter_mut() {
                    *x = f(*x, y[0]);
                }
            } else {
                // The piece may wrap around the end of b's row: load it in two parts.
                let start = i[0] % bne[0];
                let first = n.min(bne[0] - start);
                b.load([start, row[0], row[1], row[2]], &mut y[..first]);
                b.load([0, row[0], row[1], row[2]], &mut y[first..n]);
                for (x, y) in x.iter_mut().zip(&y) {
                    *x = f(*x, *y);
                }
            }
            dst.store(i, x);
        });
    }
}

fn add_id(work: &mut Work<'_>) {
    let (dst, a, b, ids) = (work.dst(), work.src(0), work.src(1), work.src(2));
    let experts = b.ne()[1];
    let (mut x, mut y) = ([0.0; CHUNK], [0.0; CHUNK]);
    for rows in work.chunks(dst.desc().rows(), rows_of(dst.desc(), 4 * CHUNK)) {
        for r in rows {
            let [i1, i2, i3] = dst.desc().row_index(r);
            let id = ids.index([i1, i2, 0, 0]);
            let Some(expert) = usize::try_from(id).ok().filter(|&e| e < experts) else {
                let reason = format!("expert id {id} is not one of the {experts} rows of the bias");
                return work.fail(DeviceError::Data { op: OpCode::AddId, reason });
            };
            pieces(dst.desc(), r..r + 1, CHUNK, |i, n| {
                let (x, y) = (&mut x[..n], &mut y[..n]);
                a.load(i, x);
                b.load([i[0], expert, 0, 0], y);
                for (x, y) in x.iter_mut().zip(y) {
                    *x += *y;
                }
                dst.store([i[0], i1, i2, i3], x);
            });
        }
    }
}
