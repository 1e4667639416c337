//! ADD, SUB, MUL, DIV with broadcast, computed in f32; ADD_ID.

use super::{CHUNK, Kernel, Pieces, math, types};
use crate::cpu::pool::Work;
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::{DeviceError, Unsupported};
use crate::ops::binary::Binary;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::F32;

pub(super) fn select(op: Binary, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let dtype = |i| node.srcs.get(i).map(|s| s.dtype());
    let (a, b, dst) = (dtype(0), dtype(1), node.dst.dtype());
    let (Some(a), Some(b)) = (a, b) else { return Err(types(node)) };
    let cost = node.dst.elements();
    if op == Binary::AddId {
        let fits = (a, b, dst) == (F32, F32, F32);
        return if fits { Ok(Kernel::new(cost, add_id).with_local(3 * CHUNK)) } else { Err(types(node)) };
    }
    // ggml's table has the equal types and F16 or BF16 with F32; the rest costs nothing more here.
    if !(a.is_float() && b.is_float() && dst.is_float()) {
        return Err(types(node));
    }
    Ok(Kernel::new(cost, move |w| each(w, op)).with_local(3 * CHUNK))
}

/// Two rows through the op.
struct Zip<'a> {
    op: Binary,
    out: &'a mut [f32],
    x: &'a [f32],
    y: &'a [f32],
}

impl Wide for Zip<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        let Zip { op, out, x, y } = self;
        match op {
            Binary::Add | Binary::AddId => math::zip(out, x, y, |x, y| x + y),
            Binary::Sub => math::zip(out, x, y, |x, y| x - y),
            Binary::Mul => math::zip(out, x, y, |x, y| x * y),
            Binary::Div => math::zip(out, x, y, |x, y| x / y),
        }
    }
}

fn each(work: &mut Work<'_>, op: Binary) {
    let (dst, a, b) = (work.dst(), work.src(0), work.src(1));
    let bne = b.ne();
    // A row of b that is shorter than dst's repeats: short pieces then end where it does.
    let piece = if bne[0] == 1 { CHUNK } else { CHUNK.min(bne[0]) };
    let [x, y, out, ..] = work.take_local().as_chunks_mut::<CHUNK>().0 else { return };
    Pieces::by(dst.desc(), piece).share(work, |i, n| {
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
        widest(Zip { op, out, x, y });
        dst.store(i, out);
    });
}

fn add_id(work: &mut Work<'_>) {
    let (dst, a, b, ids) = (work.dst(), work.src(0), work.src(1), work.src(2));
    let experts = b.ne()[1];
    let [x, y, out, ..] = work.take_local().as_chunks_mut::<CHUNK>().0 else { return };
    Pieces::of(dst.desc()).share(work, |i, n| {
        let id = ids.index([i[1], i[2], 0, 0]);
        let Some(expert) = usize::try_from(id).ok().filter(|&e| e < experts) else {
            let reason = format!("expert id {id} is not one of the {experts} rows of the bias");
            return work.fail(DeviceError::Data { op: OpCode::AddId, reason });
        };
        let (x, y, out) = (a.fetch(i, &mut x[..n]), b.fetch([i[0], expert, 0, 0], &mut y[..n]), &mut out[..n]);
        math::add(out, x, y);
        dst.store(i, out);
    });
}
