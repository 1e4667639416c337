//! ARGSORT and TOP_K: each value and its index are combined to one integer key, so that the order is total.

use super::{CHUNK, Kernel, rows_per_chunk, unsupported, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::sort::Sort;
use crate::tensor::DType::F32;

pub(super) fn select(op: Sort, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(src) = node.srcs.get(0).filter(|s| s.dtype() == F32) else { return Err(unsupported_types(node)) };
    let n = src.ne()[0];
    let local = n.checked_mul(2).ok_or_else(|| unsupported(node.op.code(), "its rows exceed the address space"))?;
    // About log2(n) comparisons for each element, which the processor often predicts wrongly.
    const COMPARISON: usize = 8;
    let levels = n.checked_ilog2().unwrap_or(0) as usize + 1;
    Ok(match op {
        _ if node.dst.is_empty() => Kernel::new(0, |_| ()),
        Sort::Argsort { descending } => {
            let order = move |keys: &mut [u64]| keys.sort_unstable();
            Kernel::new(src.elements().saturating_mul(levels * COMPARISON), move |w| each_row(w, descending, order))
        }
        Sort::TopK => {
            let k = node.dst.ne()[0];
            let order = move |keys: &mut [u64]| {
                if k < keys.len() {
                    keys.select_nth_unstable(k - 1);
                }
            };
            Kernel::new(src.elements().saturating_mul(2 * COMPARISON), move |w| each_row(w, true, order))
        }
    }
    .with_local(local))
}

/// Writes the indices of the first keys of each row, as many as a row of the destination has, after `order` has ordered the
/// keys.
fn each_row(ctx: &mut KernelContext<'_>, descending: bool, order: impl Fn(&mut [u64])) {
    let keys: &mut [u64] = bytemuck::cast_slice_mut(ctx.take_local_scratch());
    let (dst, src) = (ctx.dst(), ctx.src(0));
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(src.desc(), CHUNK)) {
        for r in rows {
            let row = dst.desc().row_index(r);
            load_keys(&src, row, descending, keys);
            order(keys);
            for (i, &key) in keys.iter().take(dst.ne()[0]).enumerate() {
                dst.set_i32([i, row[0], row[1], row[2]], key as u32 as i32);
            }
        }
    }
}

/// Keys of a row: the value as an integer of the same order (negative NaNs, numbers with -0 before 0, positive NaNs) or of the
/// opposite order in the upper half, the index in the lower half.
fn load_keys(src: &View<'_>, [i1, i2, i3]: [usize; 3], descending: bool, keys: &mut [u64]) {
    let mut values = [0.0; CHUNK];
    for (piece, keys) in keys.chunks_mut(CHUNK).enumerate() {
        let (start, values) = (piece * CHUNK, &mut values[..keys.len()]);
        src.load([start, i1, i2, i3], values);
        for (k, (key, value)) in keys.iter_mut().zip(values).enumerate() {
            let bits = value.to_bits();
            let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
            let upper = if descending { !ascending } else { ascending };
            *key = u64::from(upper) << 32 | (start + k) as u64;
        }
    }
}
