//! The KV cache: layout of the key and value tensors of each block, and the views through which attention reads them.
//!
//! Keys have one row per position. Values have one row per position for flash attention; otherwise they are stored transposed,
//! one row per channel, as the matrix product with the attention weights needs them.

use super::{ModelError, StoredTensor};
use crate::hparams::HParams;
use fanout::tensor::{DType, TensorDesc};

/// The number of positions that attention reads is padded to a multiple of this. The padding is masked. Most tokens then reuse
/// the graph of the previous token.
pub const KV_PAD: usize = 256;

/// Size, type and layout of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheOptions {
    /// Capacity in positions: a multiple of [`KV_PAD`].
    pub context: usize,
    /// Element type of keys and values.
    pub dtype: DType,
    /// Whether attention is one op (FLASH_ATTN_EXT), which reads values row by row. Separate matrix products read them
    /// transposed.
    pub flash_attn: bool,
}

impl CacheOptions {
    /// Type and shape of a block's keys: `[kv_width, context]`.
    ///
    /// # Errors
    /// The channels of a head are not a whole number of the type's quantisation blocks.
    pub fn keys(&self, hparams: &HParams) -> Result<TensorDesc, ModelError> {
        self.check_head_width(hparams.head_width)?;
        let ne = [hparams.kv_width(), self.context, 1, 1];
        Ok(TensorDesc::contiguous(self.dtype, ne)?)
    }

    /// Type and shape of a block's values: `[kv_width, context]` for flash attention, otherwise `[context, kv_width]`.
    ///
    /// # Errors
    /// As [`CacheOptions::keys`]; also a block-quantised type with the transposed layout, which writes single elements.
    pub fn values(&self, hparams: &HParams) -> Result<TensorDesc, ModelError> {
        let width = hparams.kv_width();
        if self.flash_attn {
            self.check_head_width(hparams.head_width)?;
            return Ok(TensorDesc::contiguous(self.dtype, [width, self.context, 1, 1])?);
        }
        if self.dtype.is_block() {
            return Err(ModelError::Cache(format!(
                "a cache of {} needs --flash-attn: without it, values are stored element by element",
                self.dtype
            )));
        }
        Ok(TensorDesc::contiguous(self.dtype, [self.context, width, 1, 1])?)
    }

    /// Positions that a batch which ends before position `end` attends to, padded to a multiple of [`KV_PAD`].
    ///
    /// # Errors
    /// A batch that ends beyond the capacity of the cache.
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
            "a head of {dim} channels is not a whole number of {} blocks: choose another cache type",
            self.dtype
        )))
    }
}

/// The KV cache of one block.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Keys, one row per position.
    pub keys: StoredTensor,
    /// Values, one row per position, or transposed.
    pub values: StoredTensor,
}

/// View of the keys for attention: `[head_width, positions, kv_heads]`.
pub(super) fn keys_view(keys: &TensorDesc, hparams: &HParams, positions: usize) -> Result<TensorDesc, ModelError> {
    rows_view(keys, hparams.head_width, hparams.kv_heads, positions)
}

/// View of the values for attention: `[head_width, positions, kv_heads]` for flash attention, `[positions, head_width,
/// kv_heads]` for a matrix product.
pub(super) fn values_view(
    values: &TensorDesc,
    hparams: &HParams,
    positions: usize,
    flash_attn: bool,
) -> Result<TensorDesc, ModelError> {
    if flash_attn {
        return rows_view(values, hparams.head_width, hparams.kv_heads, positions);
    }
    let [element, column, ..] = values.nb();
    let head = column * hparams.head_width;
    let ne = [positions, hparams.head_width, hparams.kv_heads, 1];
    Ok(TensorDesc::strided(values.dtype(), ne, [element, column, head, head * hparams.kv_heads])?)
}

fn rows_view(cache: &TensorDesc, dim: usize, heads: usize, positions: usize) -> Result<TensorDesc, ModelError> {
    let dtype = cache.dtype();
    let [block, row, ..] = cache.nb();
    let head = dim / dtype.block_len() * block;
    Ok(TensorDesc::strided(dtype, [dim, positions, heads, 1], [block, row, head, head * heads])?)
}

/// View of a transposed value cache for SET_ROWS, which can then write single elements as rows of length 1:
/// `[1, context, kv_width]`.
pub(super) fn columns(values: &TensorDesc) -> Result<TensorDesc, ModelError> {
    let ([context, width, ..], [element, column, ..]) = (values.ne(), values.nb());
    let nb = [element, element, column, column * width];
    Ok(TensorDesc::strided(values.dtype(), [1, context, width, 1], nb)?)
}
