//! GET_ROWS and SET_ROWS.

use super::copy::Step;
use super::{CHUNK, Kernel, rows_of, types};
use crate::cpu::layout::in_strips;
use crate::cpu::pool::Work;
use crate::device::{DeviceError, Unsupported};
use crate::ops::rows::Rows;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{F16, F32};
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};

pub(super) fn select(op: Rows, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(src) = node.srcs.get(0).map(TensorDesc::dtype) else { return Err(types(node)) };
    let dst = node.dst.dtype();
    match op {
        Rows::GetRows => {
            let step = Step::of(src, dst).ok_or_else(|| types(node))?;
            let kernel = Kernel::new(node.dst.elements(), move |w| get(w, step));
            // A table that products read too: tied embeddings.
            Ok(match node.srcs.get(0).filter(|table| step == Step::ViaF32 && in_strips(table)) {
                Some(table) => kernel.with_local(table.row_bytes().div_ceil(4)).reads_strips(),
                None => kernel,
            })
        }
        Rows::SetRows => {
            if !matches!(src, F32 | F16) {
                return Err(types(node));
            }
            let step = Step::of(src, dst).ok_or_else(|| types(node))?;
            let cost = node.srcs.get(0).map_or(0, TensorDesc::elements);
            // One element to a row: a transposed cache.
            if step == Step::ViaF32 && node.dst.ne()[0] == 1 {
                let columns = node.srcs.get(0).and_then(column).ok_or_else(|| types(node))?;
                return Ok(Kernel::new(cost, move |w| set_elements(w, &columns)));
            }
            Ok(Kernel::new(cost, move |w| set(w, step)))
        }
    }
}

/// The row that an index names.
pub(super) fn row_of(op: OpCode, id: i64, rows: usize) -> Result<usize, DeviceError> {
    usize::try_from(id)
        .ok()
        .filter(|&row| row < rows)
        .ok_or_else(|| DeviceError::Data { op, reason: format!("index {id} is not one of {rows} rows") })
}

fn get(work: &mut Work<'_>, step: Step) {
    let (dst, table, ids) = (work.dst(), work.src(0), work.src(1));
    if dst.desc().is_empty() {
        return;
    }
    let (mut values, local) = ([0.0; CHUNK], work.take_local());
    let ([n, rows, ..], desc) = (table.ne(), dst.desc());
    for range in work.chunks(desc.rows(), rows_of(desc, 4 * CHUNK)) {
        for r in range {
            let [i, j, l] = desc.row_index(r);
            match row_of(OpCode::GetRows, ids.index([i, j, l, 0]), rows) {
                Ok(row) if table.packed() => {
                    let bytes = &mut bytemuck::cast_slice_mut(local)[..table.desc().row_bytes()];
                    table.load_row([row, j, l], bytes);
                    expand(table.desc().dtype(), bytes, &mut values, |i0, values| dst.store([i0, i, j, l], values));
                }
                Ok(row) => step.run((&dst, [0, i, j, l]), (&table, [0, row, j, l]), n, &mut values),
                Err(error) => return work.fail(error),
            }
        }
    }
}

/// Calls `each` for the values of a row, some whole blocks at a time, with the index of the first one.
fn expand(dtype: DType, row: &[u8], values: &mut [f32; CHUNK], mut each: impl FnMut(usize, &[f32])) {
    let convert = dequantiser(dtype).expect("a type that select has accepted");
    for (k, blocks) in row.chunks(dtype.blocks(CHUNK) * dtype.block_bytes()).enumerate() {
        let values = &mut values[..blocks.len() / dtype.block_bytes() * dtype.block_len()];
        convert(blocks, values);
        each(k * CHUNK, values);
    }
}

/// Bytes of the destination, at least, that one worker writes alone: two cache lines, which processors fetch together.
const OWNED: usize = 128;

/// Two indices may name one row, so work is not shared by rows of b: every worker looks at every index, in order, and
/// writes what [`owner`] gives it of the destination. Reading indices is little beside writing rows.
fn set(work: &mut Work<'_>, step: Step) {
    let (dst, b, ids) = (work.dst(), work.src(0), work.src(1));
    if b.desc().is_empty() {
        return;
    }
    let mut values = [0.0; CHUNK];
    let ([n, r, planes2, planes3], [_, rows, ..]) = (b.ne(), dst.ne());
    let [_, c1, c2, _] = ids.ne();
    let (worker, workers) = (work.worker(), work.workers());
    let (together, pieces) = ((OWNED / dst.desc().row_bytes().max(1)).max(1), n.div_ceil(CHUNK));
    for plane in 0..planes2 * planes3 {
        let (i2, i3) = (plane % planes2, plane / planes2);
        for i in 0..r {
            let row = match row_of(OpCode::SetRows, ids.index([i, i2 % c1, i3 % c2, 0]), rows) {
                Ok(row) => row,
                Err(error) => return work.fail(error),
            };
            let group = plane.wrapping_mul(rows.div_ceil(together)).wrapping_add(row / together);
            for piece in 0..pieces {
                if owner(group.wrapping_mul(pieces).wrapping_add(piece), workers) == worker {
                    let i0 = piece * CHUNK;
                    let to = (&dst, [i0, row, i2, i3]);
                    step.run(to, (&b, [i0, i, i2, i3]), CHUNK.min(n - i0), &mut values);
                }
            }
        }
    }
}

/// Rows of one element, seen as the elements of one row.
fn column(b: &TensorDesc) -> Option<TensorDesc> {
    let ([_, r, n2, n3], [_, b1, b2, b3]) = (b.ne(), b.nb());
    TensorDesc::strided(b.dtype(), [r, 1, n2, n3], [b1, 0, b2, b3]).ok()
}

/// Elements that [`set_elements`] looks at together.
const SOME: usize = 256;

/// As [`set`] for rows of one element; `b` is described by [`column()`], so that values are converted together.
fn set_elements(work: &mut Work<'_>, b: &TensorDesc) {
    let (dst, ids) = (work.dst(), work.src(1));
    if b.is_empty() {
        return;
    }
    let b = work.src(0).described(b);
    let ([r, _, planes2, planes3], [_, rows, ..]) = (b.ne(), dst.ne());
    let [_, c1, c2, _] = ids.ne();
    let (worker, workers) = (work.worker(), work.workers());
    // A power of two, as an element has 2 or 4 bytes.
    let together = OWNED / dst.desc().row_bytes();
    let groups = rows.div_ceil(together);
    let halves = quantiser(dst.desc().dtype()).filter(|_| dst.desc().dtype().block_bytes() == 2);
    let (mut values, mut converted, mut found, mut own) = ([0.0; SOME], [0u16; SOME], [0; SOME], [0; SOME]);
    for plane in 0..planes2 * planes3 {
        let (i2, i3) = (plane % planes2, plane / planes2);
        let first = plane.wrapping_mul(groups);
        for start in (0..r).step_by(SOME) {
            let n = SOME.min(r - start);
            b.load([start, 0, i2, i3], &mut values[..n]);
            ids.indices([start, i2 % c1, i3 % c2, 0], &mut found[..n]);
            let mut kept = 0;
            for (k, &id) in found[..n].iter().enumerate() {
                let row = match row_of(OpCode::SetRows, id, rows) {
                    Ok(row) => row,
                    Err(error) => return work.fail(error),
                };
                (own[kept], values[kept]) = (row, values[k]);
                let group = first.wrapping_add(row >> together.trailing_zeros());
                kept += usize::from(owner(group, workers) == worker);
            }
            let (own, values) = (&own[..kept], &values[..kept]);
            match halves {
                Some(convert) => {
                    let converted = &mut converted[..kept];
                    convert(values, bytemuck::cast_slice_mut(converted));
                    dst.scatter([i2, i3], own, converted);
                }
                None => dst.scatter([i2, i3], own, values),
            }
        }
    }
}

/// The worker that writes a part of the destination: a multiplicative hash, so that neither consecutive rows nor rows
/// a power of two apart (a transposed cache) gather on few workers.
pub(super) fn owner(part: usize, workers: usize) -> usize {
    let hash = (part as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((hash * workers as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::owner;

    #[test]
    fn parts_spread_over_all_workers() {
        for workers in [1, 2, 3, 8, 60] {
            for stride in [1, 2, 32, 4096] {
                let mut load = vec![0; workers];
                (0..100 * workers).for_each(|k| load[owner(k * stride, workers)] += 1);
                assert!(load.iter().all(|&n| (50..200).contains(&n)), "{workers} workers, every {stride}: {load:?}");
            }
        }
    }
}
