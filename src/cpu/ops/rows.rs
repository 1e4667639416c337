//! GET_ROWS gathers the rows that ids name; SET_ROWS scatters rows to the rows that ids name.

use super::copy::ElementCopy;
use super::{CHUNK, Kernel, rows_per_chunk, store_cost, unsupported_types};
use crate::cpu::layout::fits_panels;
use crate::cpu::pool::KernelContext;
use crate::device::{DeviceError, Unsupported};
use crate::ops::rows::Rows;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{F16, F32};
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;

pub(super) fn select(op: Rows, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(src) = node.srcs.get(0).map(TensorDesc::dtype) else { return Err(unsupported_types(node)) };
    let dst = node.dst.dtype();
    match op {
        Rows::GetRows => {
            let element_copy = ElementCopy::of(src, dst).ok_or_else(|| unsupported_types(node))?;
            let kernel = Kernel::new(node.dst.elements(), move |w| get_rows(w, element_copy));
            // An embedding table that products read too (tied embeddings) may be packed into panels.
            Ok(match node.srcs.get(0).filter(|table| element_copy == ElementCopy::ViaF32 && fits_panels(table)) {
                Some(table) => kernel.with_local(table.row_bytes().div_ceil(4)).reads_panels(),
                None => kernel,
            })
        }
        Rows::SetRows => {
            if !matches!(src, F32 | F16) {
                return Err(unsupported_types(node));
            }
            let element_copy = ElementCopy::of(src, dst).ok_or_else(|| unsupported_types(node))?;
            let Some(b) = node.srcs.get(0) else { return Err(unsupported_types(node)) };
            let stored = store_cost(dst);
            let cost = b.elements().saturating_mul(stored).saturating_add(b.rows().saturating_mul(ROW_COST));
            // Rows of one element, as in a transposed KV cache, are written in batches of ids.
            if element_copy == ElementCopy::ViaF32 && node.dst.ne()[0] == 1 {
                let columns = column(b).ok_or_else(|| unsupported_types(node))?;
                let phases = IdPhases::new(b.rows(), ROWS_PER_PHASE);
                return Ok(Kernel::new(cost, move |w| set_elements(w, &columns, phases)).with_syncs(phases.syncs()));
            }
            let phases =
                IdPhases::new(b.rows(), (ROW_ELEMENTS_PER_PHASE / stored / b.ne()[0].max(1)).min(ROWS_PER_PHASE));
            Ok(Kernel::new(cost, move |w| set_rows(w, element_copy, phases)).with_syncs(phases.syncs()))
        }
    }
}

/// Checks that `id` is one of `rows` rows.
pub(super) fn check_row(op: OpCode, id: i64, rows: usize) -> Result<usize, DeviceError> {
    usize::try_from(id)
        .ok()
        .filter(|&row| row < rows)
        .ok_or_else(|| DeviceError::Data { op, reason: format!("index {id} is not one of {rows} rows") })
}

fn get_rows(ctx: &mut KernelContext<'_>, element_copy: ElementCopy) {
    let (dst, table, ids) = (ctx.dst(), ctx.src(0), ctx.src(1));
    if dst.desc().is_empty() {
        return;
    }
    let (mut values, local) = ([0.0; CHUNK], ctx.take_local_scratch());
    let ([n, rows, ..], desc) = (table.ne(), dst.desc());
    for range in ctx.chunks(desc.rows(), rows_per_chunk(desc, 4 * CHUNK)) {
        for r in range {
            let [i, j, l] = desc.row_index(r);
            match check_row(OpCode::GetRows, ids.index([i, j, l, 0]), rows) {
                Ok(row) if table.is_packed() => {
                    let bytes = &mut bytemuck::cast_slice_mut(local)[..table.desc().row_bytes()];
                    table.load_row([row, j, l], bytes);
                    dequantise_row(table.desc().dtype(), bytes, &mut values, |i0, values| {
                        dst.store([i0, i, j, l], values)
                    });
                }
                Ok(row) => element_copy.run((&dst, [0, i, j, l]), (&table, [0, row, j, l]), n, &mut values),
                Err(error) => return ctx.fail(error),
            }
        }
    }
}

/// Dequantises a row chunk by chunk and calls `each` with the values and the index of the first one.
fn dequantise_row(dtype: DType, row: &[u8], values: &mut [f32; CHUNK], mut each: impl FnMut(usize, &[f32])) {
    let convert = dequantiser(dtype).expect("a type that select has accepted");
    for (k, blocks) in row.chunks(dtype.blocks(CHUNK) * dtype.block_bytes()).enumerate() {
        let values = &mut values[..blocks.len() / dtype.block_bytes() * dtype.block_len()];
        convert(blocks, values);
        each(k * CHUNK, values);
    }
}

/// Smallest piece of the destination, in bytes, that belongs to one part: two cache lines, which processors fetch together.
const OWNED_BYTES: usize = 128;

/// Elements of rows that SET_ROWS writes between two barriers at most: about a millisecond for one worker.
const ROW_ELEMENTS_PER_PHASE: usize = 1 << 21;

/// Most rows that SET_ROWS writes between two barriers. To random places in a large destination a row takes up to 0.2 µs, however
/// short it is.
const ROWS_PER_PHASE: usize = 1 << 15;

/// Cost of a row of SET_ROWS, beside its elements.
const ROW_COST: usize = 64;

/// Division of a list of ids, several of which may name one row of the destination, so that the later id's row remains.
///
/// The ids are not shared among the workers. Each worker claims *parts* of the destination, as [`owner`] assigns rows to parts,
/// reads all ids in order and writes the rows of its parts. There are as many parts as workers: reading ids costs little
/// compared with writing rows. A run can only pause between two parts, so a long list is divided into phases, with a barrier
/// between two.
#[derive(Clone, Copy)]
pub(super) struct IdPhases {
    ids: usize,
    per_phase: usize,
}

impl IdPhases {
    pub(super) fn new(ids: usize, per_phase: usize) -> IdPhases {
        IdPhases { ids, per_phase: per_phase.max(1) }
    }

    /// Barriers of [`IdPhases::each_part`].
    pub(super) fn syncs(self) -> usize {
        self.ids.div_ceil(self.per_phase).saturating_sub(1)
    }

    /// Calls `each(ids, part)` for the parts that this worker claims, phase by phase, with the phase's ids. An error of `each`
    /// ends the run.
    pub(super) fn each_part(
        self,
        ctx: &KernelContext<'_>,
        mut each: impl FnMut(Range<usize>, usize) -> Result<(), DeviceError>,
    ) {
        for first in (0..self.ids).step_by(self.per_phase) {
            if first > 0 {
                ctx.sync();
            }
            let ids = first..self.ids.min(first + self.per_phase);
            for part in ctx.chunks(ctx.dividing_workers(), 1).flatten() {
                if let Err(error) = each(ids.clone(), part) {
                    return ctx.fail(error);
                }
            }
        }
    }
}

fn set_rows(ctx: &mut KernelContext<'_>, element_copy: ElementCopy, phases: IdPhases) {
    let (dst, b, ids) = (ctx.dst(), ctx.src(0), ctx.src(1));
    if b.desc().is_empty() {
        return;
    }
    let mut values = [0.0; CHUNK];
    let ([n, r, planes2, _], [_, rows, ..]) = (b.ne(), dst.ne());
    let [_, c1, c2, _] = ids.ne();
    let parts = ctx.dividing_workers();
    let (rows_per_group, pieces) = ((OWNED_BYTES / dst.desc().row_bytes().max(1)).max(1), n.div_ceil(CHUNK));
    phases.each_part(ctx, |mut range, part| {
        while !range.is_empty() {
            let (plane, first) = (range.start / r, range.start % r);
            let end = r.min(first + range.len());
            let (i2, i3) = (plane % planes2, plane / planes2);
            for i in first..end {
                let row = check_row(OpCode::SetRows, ids.index([i, i2 % c1, i3 % c2, 0]), rows)?;
                let group = plane.wrapping_mul(rows.div_ceil(rows_per_group)).wrapping_add(row / rows_per_group);
                for piece in 0..pieces {
                    if owner(group.wrapping_mul(pieces).wrapping_add(piece), parts) == part {
                        let i0 = piece * CHUNK;
                        let to = (&dst, [i0, row, i2, i3]);
                        element_copy.run(to, (&b, [i0, i, i2, i3]), CHUNK.min(n - i0), &mut values);
                    }
                }
            }
            range.start += end - first;
        }
        Ok(())
    });
}

/// Rows of one element, described as the elements of one row.
fn column(b: &TensorDesc) -> Option<TensorDesc> {
    let ([_, r, n2, n3], [_, b1, b2, b3]) = (b.ne(), b.nb());
    TensorDesc::strided(b.dtype(), [r, 1, n2, n3], [b1, 0, b2, b3]).ok()
}

/// Ids that [`set_elements`] processes together.
const ID_BATCH: usize = 256;

/// As [`set_rows`], for rows of one element; `b` is described by [`column()`], so that values are converted together.
fn set_elements(ctx: &mut KernelContext<'_>, b: &TensorDesc, phases: IdPhases) {
    let (dst, ids) = (ctx.dst(), ctx.src(1));
    if b.is_empty() {
        return;
    }
    let b = ctx.src(0).with_desc(b);
    let ([r, _, planes2, _], [_, rows, ..]) = (b.ne(), dst.ne());
    let [_, c1, c2, _] = ids.ne();
    let parts = ctx.dividing_workers();
    // A power of two, as elements have 1, 2 or 4 bytes.
    let rows_per_group = OWNED_BYTES / dst.desc().row_bytes();
    let groups = rows.div_ceil(rows_per_group);
    let (dtype, size) = (dst.desc().dtype(), dst.desc().dtype().block_bytes());
    let narrow = quantiser(dtype).filter(|_| size < 4);
    let (mut values, mut converted, mut batch_ids, mut own_rows) =
        ([0.0; ID_BATCH], [0u16; ID_BATCH], [0; ID_BATCH], [0; ID_BATCH]);
    phases.each_part(ctx, |mut range, part| {
        while !range.is_empty() {
            let (plane, start) = (range.start / r, range.start % r);
            let (i2, i3) = (plane % planes2, plane / planes2);
            let first = plane.wrapping_mul(groups);
            let n = ID_BATCH.min(r - start).min(range.len());
            b.load([start, 0, i2, i3], &mut values[..n]);
            ids.indices([start, i2 % c1, i3 % c2, 0], &mut batch_ids[..n]);
            let mut kept = 0;
            for (k, &id) in batch_ids[..n].iter().enumerate() {
                let row = check_row(OpCode::SetRows, id, rows)?;
                (own_rows[kept], values[kept]) = (row, values[k]);
                let group = first.wrapping_add(row >> rows_per_group.trailing_zeros());
                kept += usize::from(owner(group, parts) == part);
            }
            let (own_rows, values) = (&own_rows[..kept], &values[..kept]);
            match narrow {
                Some(convert) => {
                    let bytes = &mut bytemuck::cast_slice_mut::<_, u8>(&mut converted)[..size * kept];
                    convert(values, bytes);
                    if size == 1 {
                        dst.scatter([i2, i3], own_rows, bytes)
                    } else {
                        dst.scatter([i2, i3], own_rows, &converted[..kept])
                    }
                }
                None => dst.scatter([i2, i3], own_rows, values),
            }
            range.start += n;
        }
        Ok(())
    });
}

/// The part to which some bytes of the destination belong: a multiplicative hash, which distributes consecutive rows and rows a
/// power of two apart (a transposed cache) evenly.
pub(super) fn owner(bytes: usize, parts: usize) -> usize {
    let hash = (bytes as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((hash * parts as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::owner;

    #[test]
    fn owner_spreads_parts_over_all_workers() {
        for workers in [1, 2, 3, 8, 60] {
            for stride in [1, 2, 32, 4096] {
                let mut load = vec![0; workers];
                (0..100 * workers).for_each(|k| load[owner(k * stride, workers)] += 1);
                assert!(load.iter().all(|&n| (50..200).contains(&n)), "{workers} workers, every {stride}: {load:?}");
            }
        }
    }
}
