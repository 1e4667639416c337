//! Tensor descriptors: type, element counts `ne` and byte strides `nb`, with checked extents.
//!
//! The conventions are ggml's: always four dimensions, dimension 0 fastest, unused
//! dimensions are 1; `nb[0]` of a block type is the size of one block.

use super::{DType, Shape};
use thiserror::Error;

/// Number of dimensions of every tensor.
pub const DIMS: usize = 4;

/// Limit on the bytes that a tensor spans: the sum of two extents fits an `i64`.
const MAX_EXTENT: usize = 1 << 62;

/// Type, shape and strides of a tensor. Valid by construction: whole blocks, and an extent that fits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TensorDesc {
    dtype: DType,
    ne: [usize; DIMS],
    nb: [usize; DIMS],
    extent: usize,
}

/// Type, shape and strides do not describe a valid tensor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DescError {
    /// A row is not a whole number of blocks.
    #[error("a row of {ne0} elements is not a whole number of {dtype} blocks of {block}", block = dtype.block_len())]
    PartialBlock {
        /// Element type.
        dtype: DType,
        /// Elements in a row.
        ne0: usize,
    },
    /// A reshape of a tensor that is not contiguous, or to another number of elements.
    #[error("a tensor of shape {from:?} has no contiguous view of shape {to:?}")]
    Reshape {
        /// Shape of the tensor.
        from: [usize; DIMS],
        /// The requested shape.
        to: [usize; DIMS],
    },
    /// A permutation that moves dimension 0 of a type with blocks, which lie along it.
    #[error("{axes:?} moves dimension 0 of a {dtype} tensor, along which its blocks lie")]
    MovedBlocks {
        /// Element type.
        dtype: DType,
        /// The requested axes.
        axes: [usize; DIMS],
    },
    /// Axes that are no permutation of 0 to 3.
    #[error("{0:?} is not a permutation of the dimensions 0 to 3")]
    Permute([usize; DIMS]),
    /// The byte extent or the number of elements exceeds the limit of 2^62.
    #[error("shape {ne:?} with strides {nb:?} of {dtype} spans more than 2^62 bytes")]
    TooLarge {
        /// Element type.
        dtype: DType,
        /// Element counts.
        ne: [usize; DIMS],
        /// Byte strides.
        nb: [usize; DIMS],
    },
}

impl TensorDesc {
    /// A tensor with the given byte strides.
    ///
    /// # Errors
    /// [`DescError`] when a row is not a whole number of blocks, or when the extent or element count overflows.
    pub fn strided(dtype: DType, ne: [usize; DIMS], nb: [usize; DIMS]) -> Result<Self, DescError> {
        if !ne[0].is_multiple_of(dtype.block_len()) {
            return Err(DescError::PartialBlock { dtype, ne0: ne[0] });
        }
        let too_large = || DescError::TooLarge { dtype, ne, nb };
        let elements = ne.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
        if elements > MAX_EXTENT / 8 {
            return Err(too_large());
        }
        let extent = if elements == 0 {
            0
        } else {
            // From the first byte to the last: the last block of the last row of the last plane.
            let last = [dtype.blocks(ne[0]) - 1, ne[1] - 1, ne[2] - 1, ne[3] - 1];
            let mut end = dtype.block_bytes();
            for d in 0..DIMS {
                let step = last[d].checked_mul(nb[d]).ok_or_else(too_large)?;
                end = end.checked_add(step).ok_or_else(too_large)?;
            }
            end
        };
        if extent > MAX_EXTENT {
            return Err(too_large());
        }
        Ok(TensorDesc { dtype, ne, nb, extent })
    }

    /// A contiguous tensor: dense rows, packed planes.
    ///
    /// # Errors
    /// As [`TensorDesc::strided`].
    pub fn contiguous(dtype: DType, ne: impl Into<Shape>) -> Result<Self, DescError> {
        let ne = ne.into().ne();
        let nb = Self::default_strides(dtype, ne).ok_or(DescError::TooLarge { dtype, ne, nb: [0; DIMS] })?;
        Self::strided(dtype, ne, nb)
    }

    /// The strides of a contiguous tensor of this shape; `None` if they overflow.
    pub fn default_strides(dtype: DType, ne: [usize; DIMS]) -> Option<[usize; DIMS]> {
        let nb0 = dtype.block_bytes();
        let nb1 = nb0.checked_mul(dtype.blocks(ne[0]))?;
        let nb2 = nb1.checked_mul(ne[1])?;
        let nb3 = nb2.checked_mul(ne[2])?;
        Some([nb0, nb1, nb2, nb3])
    }

    /// The same contiguous memory with another shape.
    ///
    /// # Errors
    /// [`DescError::Reshape`] when the number of elements differs or the tensor is not contiguous; as
    /// [`TensorDesc::strided`].
    pub fn reshaped(&self, ne: impl Into<Shape>) -> Result<Self, DescError> {
        let ne = ne.into().ne();
        let desc = Self::contiguous(self.dtype, ne)?;
        let fits = desc.elements() == self.elements() && self.is_contiguous();
        if fits { Ok(desc) } else { Err(DescError::Reshape { from: self.ne, to: ne }) }
    }

    /// The tensor with permuted dimensions: dimension `i` becomes dimension `axes[i]`, as in ggml's `permute`.
    ///
    /// # Errors
    /// [`DescError::Permute`] when `axes` is not a permutation; [`DescError::MovedBlocks`] when dimension 0 of a type with blocks
    /// would become another dimension.
    pub fn permuted(&self, axes: [usize; DIMS]) -> Result<Self, DescError> {
        let (mut ne, mut nb) = ([0; DIMS], [usize::MAX; DIMS]);
        for (from, &to) in axes.iter().enumerate() {
            if to >= DIMS || nb[to] != usize::MAX {
                return Err(DescError::Permute(axes));
            }
            (ne[to], nb[to]) = (self.ne[from], self.nb[from]);
        }
        if self.dtype.is_block() && axes[0] != 0 {
            return Err(DescError::MovedBlocks { dtype: self.dtype, axes });
        }
        Self::strided(self.dtype, ne, nb)
    }

    /// The first `rows` rows of heads that lie side by side, as a matrix for each head: what attention reads of a KV cache. A tensor
    /// `[width * heads, n, sequences]` becomes `[width, rows, heads, sequences]`.
    ///
    /// # Errors
    /// [`DescError::Reshape`] when a row is not a whole number of heads, or when there are fewer rows; as [`TensorDesc::strided`].
    pub fn heads(&self, width: usize, rows: usize) -> Result<Self, DescError> {
        let heads = self.ne[0].checked_div(width).unwrap_or(0);
        let ne = [width, rows, heads, self.ne[2]];
        if width.checked_mul(heads) != Some(self.ne[0]) || rows > self.ne[1] || self.ne[3] != 1 {
            return Err(DescError::Reshape { from: self.ne, to: ne });
        }
        let head = self.nb[0].checked_mul(width / self.dtype.block_len());
        let head = head.ok_or(DescError::TooLarge { dtype: self.dtype, ne, nb: self.nb })?;
        Self::strided(self.dtype, ne, [self.nb[0], self.nb[1], head, self.nb[2]])
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Element counts per dimension, fastest first.
    pub fn ne(&self) -> [usize; DIMS] {
        self.ne
    }

    /// Byte strides per dimension; `nb()[0]` is the stride between blocks.
    pub fn nb(&self) -> [usize; DIMS] {
        self.nb
    }

    /// Extent: bytes from the first byte to the end of the last; 0 for an empty tensor.
    pub fn extent(&self) -> usize {
        self.extent
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.ne.iter().product()
    }

    /// Number of rows: `ne1 * ne2 * ne3`.
    pub fn rows(&self) -> usize {
        self.ne[1] * self.ne[2] * self.ne[3]
    }

    /// Bytes of the elements of one row, without gaps.
    pub fn row_bytes(&self) -> usize {
        self.dtype.blocks(self.ne[0]) * self.dtype.block_bytes()
    }

    /// Bytes of all elements, without gaps. The extent of a strided view can be larger, or smaller if elements overlap.
    pub fn dense_bytes(&self) -> usize {
        self.dtype.blocks(self.elements()) * self.dtype.block_bytes()
    }

    /// Whether some dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.elements() == 0
    }

    /// Whether the blocks of each row are adjacent.
    pub fn rows_dense(&self) -> bool {
        self.ne[0] == self.dtype.block_len() || self.nb[0] == self.dtype.block_bytes()
    }

    /// Whether the elements are packed in order (strides of dimensions of size 1 do not matter).
    pub fn is_contiguous(&self) -> bool {
        self.is_contiguous_from(0)
    }

    /// ggml's `contiguous_k`: as [`TensorDesc::is_contiguous`], but the strides of dimensions 1 to `k` are free
    /// and the later ones are packed on them.
    pub fn is_contiguous_from(&self, k: usize) -> bool {
        let mut next = self.dtype.block_bytes();
        if self.ne[0] != self.dtype.block_len() && self.nb[0] != next {
            return false;
        }
        next *= self.dtype.blocks(self.ne[0]);
        for d in 1..DIMS {
            if d > k {
                if self.ne[d] != 1 && self.nb[d] != next {
                    return false;
                }
                next = next.saturating_mul(self.ne[d]);
            } else {
                next = self.ne[d].saturating_mul(self.nb[d]);
            }
        }
        true
    }

    /// Whether all elements are at multiples of [`DType::alignment`], given that the first element is at `offset` from such an
    /// address.
    pub fn is_aligned_at(&self, offset: usize) -> bool {
        let align = self.dtype.alignment();
        let blocks = [self.dtype.blocks(self.ne[0]), self.ne[1], self.ne[2], self.ne[3]];
        offset.is_multiple_of(align) && (0..DIMS).all(|d| blocks[d] <= 1 || self.nb[d].is_multiple_of(align))
    }

    /// Whether no two elements share a byte. Tests sorted strides, which is conservative: false for some layouts without
    /// overlap that ggml's builders do not make.
    pub fn is_injective(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let blocks = [self.dtype.blocks(self.ne[0]), self.ne[1], self.ne[2], self.ne[3]];
        let mut dims: Vec<(usize, usize)> =
            (0..DIMS).filter(|&d| blocks[d] > 1).map(|d| (self.nb[d], blocks[d])).collect();
        dims.sort_unstable();
        let mut span = self.dtype.block_bytes();
        for (stride, count) in dims {
            if stride < span {
                return false;
            }
            span += stride * (count - 1);
        }
        true
    }

    /// Whether type, element counts and strides are equal.
    pub fn same_layout(&self, other: &TensorDesc) -> bool {
        self == other
    }

    /// Whether the element counts are equal.
    pub fn same_shape(&self, other: &TensorDesc) -> bool {
        self.ne == other.ne
    }

    /// Whether `self` can be broadcast to `to` by repetition: each element count of `to` is a multiple of that of `self`.
    pub fn can_repeat_to(&self, to: &TensorDesc) -> bool {
        if self.is_empty() {
            return to.is_empty();
        }
        (0..DIMS).all(|d| to.ne[d].is_multiple_of(self.ne[d]))
    }

    /// The index `[i1, i2, i3]` of row `r` (0 ≤ r < `rows()`), rows counted with dimension 1 fastest.
    pub fn row_index(&self, r: usize) -> [usize; 3] {
        [r % self.ne[1], r / self.ne[1] % self.ne[2], r / self.ne[1] / self.ne[2]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_reach_the_last_byte() {
        let t = TensorDesc::contiguous(DType::Q4_0, [64, 3, 2, 1]).unwrap();
        assert_eq!((t.nb(), t.extent(), t.row_bytes()), ([18, 36, 108, 216], 216, 36));
        let v = TensorDesc::strided(DType::F32, [2, 3, 1, 1], [8, 100, 7, 7]).unwrap();
        assert_eq!(v.extent(), 4 + 8 + 200);
        assert_eq!(TensorDesc::contiguous(DType::F32, [0, 3, 1, 1]).unwrap().extent(), 0);
    }

    #[test]
    fn oversized_tensors_and_partial_blocks_are_rejected() {
        for (ne, nb) in [
            ([usize::MAX, 2, 1, 1], [4, 4, 4, 4]),
            ([2, 2, 1, 1], [usize::MAX, 4, 4, 4]),
            ([1 << 32, 1 << 32, 1, 1], [0, 0, 0, 0]),
            ([2, 2, 2, 2], [1 << 62, 1 << 62, 1 << 62, 1 << 62]),
        ] {
            assert!(
                matches!(TensorDesc::strided(DType::F32, ne, nb), Err(DescError::TooLarge { .. })),
                "{ne:?} {nb:?}"
            );
        }
        assert!(matches!(TensorDesc::contiguous(DType::Q4_K, [128, 1, 1, 1]), Err(DescError::PartialBlock { .. })));
    }

    #[test]
    fn heads_are_those_of_the_permuted_tensor() {
        for dtype in [DType::F16, DType::Q8_0] {
            let cache = TensorDesc::contiguous(dtype, [64 * 3, 5, 2]).unwrap();
            let all = TensorDesc::contiguous(dtype, [64, 3, 5, 2]).unwrap().permuted([0, 2, 1, 3]).unwrap();
            assert_eq!(cache.heads(64, 5), Ok(all));
            let first = cache.heads(64, 4).unwrap();
            assert_eq!((first.ne(), first.nb()), ([64, 4, 3, 2], all.nb()));
            for (width, rows) in [(0, 5), (128, 5), (64, 6)] {
                assert!(matches!(cache.heads(width, rows), Err(DescError::Reshape { .. })), "{width} {rows}");
            }
        }
        let cache = TensorDesc::contiguous(DType::Q8_0, [64, 5]).unwrap();
        assert_eq!(cache.heads(16, 5), Err(DescError::PartialBlock { dtype: DType::Q8_0, ne0: 16 }));
    }

    #[test]
    fn contiguity_ignores_strides_of_single_dims() {
        let t = TensorDesc::strided(DType::F32, [4, 1, 3, 1], [4, 999, 16, 5]).unwrap();
        assert!(t.is_contiguous());
        let padded = TensorDesc::strided(DType::F32, [4, 2, 3, 1], [4, 32, 64, 192]).unwrap();
        assert!(!padded.is_contiguous() && padded.is_contiguous_from(1));
    }

    #[test]
    fn tensor_is_aligned_if_its_offset_and_strides_are() {
        let t = |dtype, ne, nb| TensorDesc::strided(dtype, ne, nb).unwrap();
        let rows = t(DType::F32, [4, 2, 1, 1], [4, 20, 3, 3]);
        assert!(rows.is_aligned_at(8) && !rows.is_aligned_at(2), "strides of single dimensions do not matter");
        assert!(!t(DType::F32, [4, 2, 1, 1], [4, 18, 36, 36]).is_aligned_at(0));
        assert!(t(DType::Q4_0, [64, 2, 1, 1], [18, 36, 72, 72]).is_aligned_at(2));
        assert!(!t(DType::Q4_0, [64, 2, 1, 1], [18, 37, 74, 74]).is_aligned_at(0));
        assert!(t(DType::MXFP4, [64, 2, 1, 1], [17, 35, 70, 70]).is_aligned_at(1));
    }

    #[test]
    fn injective_means_no_shared_bytes() {
        let t = |ne, nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
        assert!(t([4, 3, 1, 1], [4, 16, 0, 0]).is_injective());
        assert!(t([4, 3, 1, 1], [12, 4, 0, 0]).is_injective(), "transposed");
        assert!(!t([4, 3, 1, 1], [4, 0, 0, 0]).is_injective(), "broadcast");
        assert!(!t([4, 3, 1, 1], [4, 12, 0, 0]).is_injective(), "sliding window");
    }
}
