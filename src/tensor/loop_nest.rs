//! A common loop nest over two tensors with the same number of blocks, for copies between layouts.

use super::{DIMS, TensorDesc};

/// A loop over blocks, with the byte stride in each tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyLoop {
    pub(crate) count: usize,
    pub(crate) src_stride: usize,
    pub(crate) dst_stride: usize,
}

/// The loops, innermost first, that visit the blocks of both tensors in logical order. `None` if the dimensions of the two
/// tensors cannot be split at common boundaries. Loops of count 1 are omitted. Both tensors must have the same block length.
pub(crate) fn common_loop_nest(src: &TensorDesc, dst: &TensorDesc) -> Option<Vec<CopyLoop>> {
    let dims = |t: &TensorDesc| {
        let (ne, nb, block) = (t.ne(), t.nb(), t.dtype().block_len());
        [(ne[0] / block, nb[0]), (ne[1], nb[1]), (ne[2], nb[2]), (ne[3], nb[3])].into_iter().filter(|d| d.0 > 1)
    };
    let (mut s, mut d) = (dims(src), dims(dst));
    let (mut from, mut to) = (s.next(), d.next());
    let mut loops = Vec::with_capacity(2 * DIMS);
    while let (Some((sn, ss)), Some((dn, ds))) = (from, to) {
        let count = sn.min(dn);
        if !sn.is_multiple_of(count) || !dn.is_multiple_of(count) {
            return None;
        }
        loops.push(CopyLoop { count, src_stride: ss, dst_stride: ds });
        from = if sn > count { Some((sn / count, ss * count)) } else { s.next() };
        to = if dn > count { Some((dn / count, ds * count)) } else { d.next() };
    }
    Some(loops)
}
