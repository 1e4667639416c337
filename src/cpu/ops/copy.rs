//! DUP, CPY, CONT: one walk over both tensors for every pair of memory layouts, and one element copy for every pair of types.

use super::{CHUNK, Kernel, store_cost, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::tensor::DType::{F32, I32};
use crate::tensor::quant::{dequantiser, quantiser};
use crate::tensor::{CopyLoop, DIMS, DType, TensorDesc, common_loop_nest};

/// Elements of a tile where both tensors are dense along dimension 0; as wide as possible.
const DENSE_TILE: usize = 8 * CHUNK;
/// Elements along each side of a tile where one tensor is strided: all elements of a cache line are used while it is cached.
const TILE_SIDE: usize = 64;

pub(super) fn select(node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(src) = node.srcs.get(0) else { return Err(unsupported_types(node)) };
    let element_copy = ElementCopy::of(src.dtype(), node.dst.dtype()).ok_or_else(|| unsupported_types(node))?;
    let stored = if element_copy == ElementCopy::Raw { 1 } else { store_cost(node.dst.dtype()) };
    let cost = node.dst.elements().saturating_mul(stored);
    if cost == 0 {
        return Ok(Kernel::new(0, |_| ()));
    }
    Ok(match CopyWalk::new(src, node.dst) {
        CopyWalk::Runs(src, dst) => Kernel::new(cost, move |w| copy_runs(w, element_copy, &src, &dst)),
        CopyWalk::Tiles(src, dst) => match transposed_desc(&src, &dst).filter(|_| element_copy.transposes()) {
            Some(src) => Kernel::new(cost, move |w| copy_transposed(w, element_copy, &src, &dst)),
            None => Kernel::new(cost, move |w| copy_tiles(w, element_copy, &src, &dst)),
        },
    })
}

/// How a run of elements is copied or converted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ElementCopy {
    /// Byte copy, equal types.
    Raw,
    /// From any type with a dequantiser to any type with a quantiser, through f32.
    ViaF32,
    /// Floats to I32, truncated; saturates, NaN gives 0.
    ToI32,
    /// I32 to floats, rounded.
    FromI32,
}

impl ElementCopy {
    pub(super) fn of(src: DType, dst: DType) -> Option<ElementCopy> {
        match (src, dst) {
            _ if src == dst => Some(ElementCopy::Raw),
            (_, I32) if src.is_float() => Some(ElementCopy::ToI32),
            (I32, F32) => Some(ElementCopy::FromI32),
            _ if src.is_float() && quantiser(dst).is_some() => Some(ElementCopy::ViaF32),
            _ if dequantiser(src).is_some() && dst.is_float() => Some(ElementCopy::ViaF32),
            _ => None,
        }
    }

    /// Whether [`copy_transposed`] supports this copy.
    fn transposes(self) -> bool {
        matches!(self, ElementCopy::Raw | ElementCopy::ViaF32)
    }

    /// Copies `n` elements from `i` of `src` to `j` of `dst`, along dimension 0 of both; whole blocks. `values` is the
    /// caller's buffer, because clearing one would take longer than a short run.
    pub(super) fn run(
        self,
        (dst, j): (&View<'_>, [usize; DIMS]),
        (src, i): (&View<'_>, [usize; DIMS]),
        n: usize,
        values: &mut [f32; CHUNK],
    ) {
        if self == ElementCopy::Raw {
            return dst.copy(j, src, i, n);
        }
        for start in (0..n).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(n - start)];
            let along = |at: [usize; DIMS], k: usize| [at[0] + start + k, at[1], at[2], at[3]];
            if self == ElementCopy::FromI32 {
                for (k, v) in values.iter_mut().enumerate() {
                    *v = src.index(along(i, k)) as f32;
                }
            } else {
                src.load(along(i, 0), values);
            }
            if self == ElementCopy::ToI32 {
                for (k, &v) in values.iter().enumerate() {
                    dst.set_i32(along(j, k), v as i32);
                }
            } else {
                dst.store(along(j, 0), values);
            }
        }
    }
}

/// How two tensors with equally many elements are walked together, with descriptions chosen for memory locality.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyWalk {
    /// Equal shapes: tiles over dimensions 0 and 1.
    Tiles(TensorDesc, TensorDesc),
    /// Shapes whose rows end at different elements: runs that end where a row of either tensor ends.
    Runs(TensorDesc, TensorDesc),
}

impl CopyWalk {
    fn new(src: &TensorDesc, dst: &TensorDesc) -> CopyWalk {
        let like = |t: &TensorDesc, ne| TensorDesc::contiguous(t.dtype(), ne).unwrap_or(*t);
        if src.dtype().block_len() == dst.dtype().block_len() {
            return common_shape(src, dst).unwrap_or(CopyWalk::Runs(*src, *dst));
        }
        // Blocks on one side, single elements on the other: dimension 0 stays as it is.
        let (src, dst) = match (src.is_contiguous(), dst.is_contiguous()) {
            (true, true) => (like(src, [src.elements(), 1, 1, 1]), like(dst, [src.elements(), 1, 1, 1])),
            (true, false) if !src.dtype().is_block() => (like(src, dst.ne()), *dst),
            (false, true) if !dst.dtype().is_block() => (*src, like(dst, src.ne())),
            _ => (*src, *dst),
        };
        if src.same_shape(&dst) { CopyWalk::Tiles(src, dst) } else { CopyWalk::Runs(src, dst) }
    }
}

/// Both tensors in a common shape of at most four dimensions, ordered for memory locality. The destination's densest dimension
/// comes first; the source's densest comes second, unless it is the same. `None` if there is no common shape. Both have equal
/// block lengths.
fn common_shape(src: &TensorDesc, dst: &TensorDesc) -> Option<CopyWalk> {
    let mut loops = common_loop_nest(src, dst)?;
    loops.sort_by_key(|l| (l.dst_stride, l.src_stride));
    let mut merged: Vec<CopyLoop> = Vec::with_capacity(loops.len());
    for next in loops {
        match merged.last_mut() {
            // A loop of count > 1 spans less than 2^62 bytes, so the step past its end fits.
            Some(last)
                if next.src_stride == last.src_stride * last.count
                    && next.dst_stride == last.dst_stride * last.count =>
            {
                last.count *= next.count;
            }
            _ => merged.push(next),
        }
    }
    if merged.len() > DIMS {
        return None;
    }
    if let Some(densest) = (1..merged.len()).min_by_key(|&k| merged[k].src_stride)
        && merged[0].src_stride > src.dtype().block_bytes().max(merged[densest].src_stride)
    {
        merged[1..=densest].rotate_right(1);
    }
    let describe = |t: &TensorDesc, step: fn(&CopyLoop) -> usize| {
        let (mut ne, mut nb) = ([t.dtype().block_len(), 1, 1, 1], [t.dtype().block_bytes(), 0, 0, 0]);
        for (d, l) in merged.iter().enumerate() {
            (ne[d], nb[d]) = (ne[d] * l.count, step(l));
        }
        TensorDesc::strided(t.dtype(), ne, nb).ok()
    };
    Some(CopyWalk::Tiles(describe(src, |l| l.src_stride)?, describe(dst, |l| l.dst_stride)?))
}

fn copy_tiles(ctx: &mut KernelContext<'_>, element_copy: ElementCopy, src: &TensorDesc, dst: &TensorDesc) {
    let mut values = [0.0; CHUNK];
    let [n0, n1, n2, n3] = dst.ne();
    let (wide, high) = if src.rows_dense() && dst.rows_dense() {
        let wide = n0.min(DENSE_TILE);
        (wide, (DENSE_TILE / wide).min(n1))
    } else {
        (TILE_SIDE.max(src.dtype().block_len()).max(dst.dtype().block_len()), TILE_SIDE.min(n1))
    };
    let (columns, bands) = (n0.div_ceil(wide), n1.div_ceil(high));
    let (to, from) = (ctx.dst().with_desc(dst), ctx.src(0).with_desc(src));
    for tiles in ctx.chunks(columns * bands * n2 * n3, (DENSE_TILE / (wide * high)).max(1)) {
        for tile in tiles {
            let (i0, band) = (tile % columns * wide, tile / columns % bands);
            let (i2, i3) = (tile / columns / bands % n2, tile / columns / bands / n2);
            for i1 in band * high..n1.min((band + 1) * high) {
                let i = [i0, i1, i2, i3];
                element_copy.run((&to, i), (&from, i), wide.min(n0 - i0), &mut values);
            }
        }
    }
}

/// The source with dimensions 0 and 1 exchanged, if it is dense along dimension 1 and the destination is dense along dimension
/// 0 (no block types).
fn transposed_desc(src: &TensorDesc, dst: &TensorDesc) -> Option<TensorDesc> {
    let ([n0, n1, n2, n3], [b0, b1, b2, b3]) = (src.ne(), src.nb());
    let plain = !src.dtype().is_block() && !dst.dtype().is_block();
    let crossed = plain && dst.rows_dense() && !src.rows_dense() && b1 == src.dtype().block_bytes();
    crossed.then(|| TensorDesc::strided(src.dtype(), [n1, n0, n2, n3], [b1, b0, b2, b3]).ok()).flatten()
}

/// Transposed copy through tiles: reads along the source's rows, writes along the destination's rows, and transposes in
/// between. Strides that are a power of two map to few cache sets; this way they cost one access per cache line and not one
/// per element. `src` is described with dimensions 0 and 1 exchanged.
fn copy_transposed(ctx: &mut KernelContext<'_>, element_copy: ElementCopy, src: &TensorDesc, dst: &TensorDesc) {
    let (to, from) = (ctx.dst().with_desc(dst), ctx.src(0).with_desc(src));
    match (element_copy, dst.dtype().block_bytes()) {
        (ElementCopy::Raw, 1) => {
            copy_through_tile::<[u8; 1]>(ctx, dst, |i, v| from.load_raw(i, v), |i, v| to.store_raw(i, v))
        }
        (ElementCopy::Raw, 2) => {
            copy_through_tile::<[u8; 2]>(ctx, dst, |i, v| from.load_raw(i, v), |i, v| to.store_raw(i, v))
        }
        (ElementCopy::Raw, 4) => {
            copy_through_tile::<[u8; 4]>(ctx, dst, |i, v| from.load_raw(i, v), |i, v| to.store_raw(i, v))
        }
        (ElementCopy::Raw, _) => {
            copy_through_tile::<[u8; 8]>(ctx, dst, |i, v| from.load_raw(i, v), |i, v| to.store_raw(i, v))
        }
        _ => copy_through_tile::<f32>(ctx, dst, |i, v| from.load(i, v), |i, v| to.store(i, v)),
    }
}

fn copy_through_tile<T: Copy + bytemuck::Zeroable>(
    ctx: &KernelContext<'_>,
    dst: &TensorDesc,
    load: impl Fn([usize; DIMS], &mut [T]),
    store: impl Fn([usize; DIMS], &[T]),
) {
    let [n0, n1, n2, n3] = dst.ne();
    let (mut tile, mut row) = ([[T::zeroed(); TILE_SIDE]; TILE_SIDE], [T::zeroed(); TILE_SIDE]);
    let (columns, bands) = (n0.div_ceil(TILE_SIDE), n1.div_ceil(TILE_SIDE));
    for tiles in ctx.chunks(columns * bands * n2 * n3, DENSE_TILE / (TILE_SIDE * TILE_SIDE)) {
        for t in tiles {
            let (i0, i1) = (t % columns * TILE_SIDE, t / columns % bands * TILE_SIDE);
            let (i2, i3) = (t / columns / bands % n2, t / columns / bands / n2);
            let (wide, high) = (TILE_SIDE.min(n0 - i0), TILE_SIDE.min(n1 - i1));
            for (x, column) in tile[..wide].iter_mut().enumerate() {
                load([i1, i0 + x, i2, i3], &mut column[..high]);
            }
            for y in 0..high {
                for (value, column) in row.iter_mut().zip(&tile) {
                    *value = column[y];
                }
                store([i0, i1 + y, i2, i3], &row[..wide]);
            }
        }
    }
}

fn copy_runs(ctx: &mut KernelContext<'_>, element_copy: ElementCopy, src: &TensorDesc, dst: &TensorDesc) {
    let mut values = [0.0; CHUNK];
    let (to, from) = (ctx.dst().with_desc(dst), ctx.src(0).with_desc(src));
    let block = src.dtype().block_len().max(dst.dtype().block_len());
    let index = |t: &TensorDesc, k: usize| {
        let n = t.ne()[0];
        let [i1, i2, i3] = t.row_index(k / n);
        [k % n, i1, i2, i3]
    };
    for blocks in ctx.chunks(dst.elements() / block, DENSE_TILE / block) {
        let (mut k, end) = (blocks.start * block, blocks.end * block);
        while k < end {
            let (i, j) = (index(src, k), index(dst, k));
            let n = (src.ne()[0] - i[0]).min(dst.ne()[0] - j[0]).min(end - k);
            element_copy.run((&to, j), (&from, i), n, &mut values);
            k += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(src: ([usize; 4], [usize; 4]), dst: [usize; 4]) -> CopyWalk {
        let src = TensorDesc::strided(F32, src.0, src.1).unwrap();
        CopyWalk::new(&src, &TensorDesc::contiguous(F32, dst).unwrap())
    }

    #[test]
    fn copies_are_walked_in_a_common_shape() {
        let shape = |w: CopyWalk| match w {
            CopyWalk::Tiles(src, dst) => Some((src.ne(), src.nb(), dst.nb())),
            CopyWalk::Runs(..) => None,
        };
        // Contiguous to contiguous: a single row for any shapes.
        assert_eq!(shape(walk(([6, 4, 5, 1], [4, 24, 96, 480]), [3, 8, 1, 5])).unwrap().0, [120, 1, 1, 1]);
        // Heads merged: [64, 7 tokens, 3 heads] permuted from [64, 3, 7] into [192, 7].
        let (ne, src, _) = shape(walk(([64, 3, 7, 1], [4, 1792, 256, 5376]), [192, 7, 1, 1])).unwrap();
        assert_eq!((ne, src[..3].to_vec()), ([64, 3, 7, 1], vec![4, 1792, 256]));
        // Transposed: the source's dense dimension comes second; the other two are merged.
        let (ne, src, dst) = shape(walk(([5, 3, 7, 1], [28, 140, 4, 420]), [5, 3, 7, 1])).unwrap();
        assert_eq!((ne, src[..2].to_vec(), dst[..2].to_vec()), ([15, 7, 1, 1], vec![28, 4], vec![4, 60]));
        let (ne, src, _) = shape(walk(([5, 3, 7, 1], [84, 28, 4, 420]), [5, 3, 7, 1])).unwrap();
        assert_eq!((ne, src[..3].to_vec()), ([5, 7, 3, 1], vec![84, 4, 28]));
        // No common end of a row before the last one.
        assert_eq!(shape(walk(([6, 4, 1, 1], [4, 32, 128, 128]), [8, 3, 1, 1])), None);
    }
}
