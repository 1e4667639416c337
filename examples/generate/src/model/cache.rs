//! The cache of keys and values: two tensors per layer, one row of keys and one of values per position.

use super::{ModelError, StoredTensor};
use crate::hparams::HParams;
use fanout::tensor::{DType, TensorDesc};

/// Positions that attention sees are padded to a multiple of this (and masked), so that most tokens find the graph of the
/// one before.
pub const KV_PAD: usize = 256;

/// How the cache is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheOptions {
    /// Positions that it holds: a multiple of [`PAD`].
    pub context: usize,
    /// Type of keys and values.
    pub dtype: DType,
    /// Whether attention is one op, which reads values in rows. Products read them transposed.
    pub flash_attn: bool,
}

impl CacheOptions {
    /// Type and shape of a layer's keys: `[context, kv_width]`.
    ///
    /// # Errors
    /// When heads are no whole number of the type's blocks.
    pub fn keys(&self, hyper: &HParams) -> Result<TensorDesc, ModelError> {
        self.check_head_width(hyper.head_width)?;
        let ne = [hyper.kv_width(), self.context, 1, 1];
        Ok(TensorDesc::contiguous(self.dtype, ne)?)
    }

    /// Type and shape of a layer's values: `[context, kv_width]` for flash attention, otherwise transposed.
    ///
    /// # Errors
    /// As [`CacheOptions::keys`], and when the values of a type with blocks would be transposed.
    pub fn values(&self, hyper: &HParams) -> Result<TensorDesc, ModelError> {
        let width = hyper.kv_width();
        if self.flash_attn {
            self.check_head_width(hyper.head_width)?;
            return Ok(TensorDesc::contiguous(self.dtype, [width, self.context, 1, 1])?);
        }
        if self.dtype.is_block() {
            return Err(ModelError::Cache(format!(
                "a cache of {} needs --flash-attn: without it values are stored one by one",
                self.dtype
            )));
        }
        Ok(TensorDesc::contiguous(self.dtype, [self.context, width, 1, 1])?)
    }

    /// Positions that a batch attends to, padded.
    ///
    /// # Errors
    /// When the batch ends beyond the cache.
    pub fn padded_positions(&self, end: usize) -> Result<usize, ModelError> {
        if end > self.context {
            return Err(ModelError::Cache(format!(
                "position {} is beyond a context of {}: give a larger --ctx",
                end - 1,
                self.context
            )));
        }
        Ok(end.max(1).next_multiple_of(KV_PAD).min(self.context))
    }

    fn check_head_width(&self, dim: usize) -> Result<(), ModelError> {
        if dim.is_multiple_of(self.dtype.block_len()) {
            return Ok(());
        }
        Err(ModelError::Cache(format!(
            "a head of {dim} is no whole number of blocks of {}: choose another type of the cache",
            self.dtype
        )))
    }
}

/// The cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Rows of keys.
    pub keys: StoredTensor,
    /// Rows of values, or their columns.
    pub values: StoredTensor,
}

/// The keys as attention reads them: `[kv_heads, positions, head_width]`.
pub(super) fn keys_view(keys: &TensorDesc, hyper: &HParams, positions: usize) -> Result<TensorDesc, ModelError> {
    rows_view(keys, hyper.head_width, hyper.kv_heads, positions)
}

/// The values as attention reads them: `[kv_heads, positions, head_width]` in one op, `[kv_heads, head_width, positions]` in a
/// product.
pub(super) fn values_view(
    values: &TensorDesc,
    hyper: &HParams,
    positions: usize,
    flash_attn: bool,
) -> Result<TensorDesc, ModelError> {
    if flash_attn {
        return rows_view(values, hyper.head_width, hyper.kv_heads, positions);
    }
    let [element, column, ..] = values.nb();
    let head = column * hyper.head_width;
    let ne = [positions, hyper.head_width, hyper.kv_heads, 1];
    Ok(TensorDesc::strided(values.dtype(), ne, [element, column, head, head * hyper.kv_heads])?)
}

fn rows_view(cache: &TensorDesc, dim: usize, heads: usize, positions: usize) -> Result<TensorDesc, ModelError> {
    let dtype = cache.dtype();
    let [block, row, ..] = cache.nb();
    let head = dim / dtype.block_len() * block;
    Ok(TensorDesc::strided(dtype, [dim, positions, heads, 1], [block, row, head, head * heads])?)
}

/// A transposed cache seen as one column per value, into which rows of one element are set: `[width, context, 1]`.
pub(super) fn columns(values: &TensorDesc) -> Result<TensorDesc, ModelError> {
    let ([context, width, ..], [element, column, ..]) = (values.ne(), values.nb());
    let nb = [element, element, column, column * width];
    Ok(TensorDesc::strided(values.dtype(), [1, context, width, 1], nb)?)
}
