//! The KV cache of a group of sequences: layout of the key and value tensors of each block, the views through which attention reads
//! them, and the vectors that record the sequence and position of each cell.
//!
//! A cell has the keys and values of one token. Keys have one row per cell. Values have one row per cell for flash attention;
//! otherwise they are stored transposed, one row per channel, as the matrix product with the attention weights needs them.

use super::{ModelError, StoredTensor, copy_name};
use crate::hparams::HParams;
use fanout::tensor::{DType, TensorDesc};
use std::collections::BTreeMap;

/// The number of cells that attention reads is padded to a multiple of this. The padding is masked. Most tokens then reuse
/// the graph of the previous token.
pub const KV_PAD: usize = 256;

/// Number, size, type and layout of the KV caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheOptions {
    /// Groups of sequences: each has a KV cache.
    pub groups: usize,
    /// Capacity in cells: a multiple of [`KV_PAD`].
    pub cells: usize,
    /// Element type of keys and values.
    pub dtype: DType,
    /// Whether attention is one op (FLASH_ATTN_EXT), which reads values row by row. Separate matrix products read them
    /// transposed.
    pub flash_attn: bool,
}

impl CacheOptions {
    /// Type and shape of a block's keys: `[kv_width, cells]`.
    ///
    /// # Errors
    /// The channels of a head are not a whole number of the type's quantisation blocks.
    pub fn keys(&self, hparams: &HParams) -> Result<TensorDesc, ModelError> {
        self.check_head_width(hparams.head_width)?;
        let ne = [hparams.kv_width(), self.cells, 1, 1];
        Ok(TensorDesc::contiguous(self.dtype, ne)?)
    }

    /// Type and shape of a block's values: `[kv_width, cells]` for flash attention, otherwise `[cells, kv_width]`.
    ///
    /// # Errors
    /// As [`CacheOptions::keys`]; also a block-quantised type with the transposed layout, which writes single elements.
    pub fn values(&self, hparams: &HParams) -> Result<TensorDesc, ModelError> {
        let width = hparams.kv_width();
        if self.flash_attn {
            self.check_head_width(hparams.head_width)?;
            return Ok(TensorDesc::contiguous(self.dtype, [width, self.cells, 1, 1])?);
        }
        if self.dtype.is_block() {
            return Err(ModelError::Cache(format!(
                "a cache of {} needs --flash-attn: without it, values are stored element by element",
                self.dtype
            )));
        }
        Ok(TensorDesc::contiguous(self.dtype, [self.cells, width, 1, 1])?)
    }

    /// Type and shape of the vectors of a tensor group that note the writer of each cell: F32 `[1, cells]`.
    ///
    /// # Errors
    /// More cells than memory has addresses.
    pub fn cell_vector(&self) -> Result<TensorDesc, ModelError> {
        Ok(TensorDesc::contiguous(DType::F32, [1, self.cells, 1, 1])?)
    }

    /// Cells that attention reads to see the first `seen`: padded to a multiple of [`KV_PAD`].
    pub fn padded_cells(&self, seen: usize) -> usize {
        seen.max(1).next_multiple_of(KV_PAD).min(self.cells)
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

/// The KV cache of a group of sequences.
#[derive(Clone, Debug)]
pub struct SequenceCache {
    /// By block.
    pub layers: Vec<LayerCache>,
    /// By tensor group with a block: the writer of each cell.
    pub cells: BTreeMap<usize, CellVectors>,
}

/// The KV cache of one block.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Keys, one row per cell.
    pub keys: StoredTensor,
    /// Values, one row per cell, or transposed.
    pub values: StoredTensor,
}

/// The tag of each cell's writer, see [`fanout::sched::batching::mask`].
#[derive(Clone, Debug)]
pub struct CellVectors {
    /// Tags of sequences.
    pub tags: StoredTensor,
    /// Positions.
    pub positions: StoredTensor,
}

const KEYS: &str = "cache_k_l";
const VALUES: &str = "cache_v_l";
const TAGS: &str = "cell_tags";
const POSITIONS: &str = "cell_positions";

/// The names of a block's keys and values in the graph.
pub fn cache_names(layer: usize) -> [String; 2] {
    [KEYS, VALUES].map(|prefix| format!("{prefix}{layer}"))
}

/// The names of the tags and positions of the cells on a tensor group.
pub(super) fn cell_names(group: usize) -> [String; 2] {
    [TAGS, POSITIONS].map(|name| copy_name(name, group))
}

impl SequenceCache {
    /// A cache without memory yet, for blocks on these tensor groups; `stored` makes a tensor on a group.
    ///
    /// # Errors
    /// As [`CacheOptions::keys`] and [`CacheOptions::values`].
    pub fn new(
        hparams: &HParams,
        options: &CacheOptions,
        blocks: &[usize],
        stored: &dyn Fn(TensorDesc, usize) -> StoredTensor,
    ) -> Result<SequenceCache, ModelError> {
        let (keys, values, cell) = (options.keys(hparams)?, options.values(hparams)?, options.cell_vector()?);
        let layer = |&group: &usize| LayerCache { keys: stored(keys, group), values: stored(values, group) };
        let vectors =
            |&group: &usize| (group, CellVectors { tags: stored(cell, group), positions: stored(cell, group) });
        Ok(SequenceCache { layers: blocks.iter().map(layer).collect(), cells: blocks.iter().map(vectors).collect() })
    }

    /// The tensor with a name of the graph.
    pub(super) fn get(&self, name: &str) -> Option<&StoredTensor> {
        let layer = |number: &str| self.layers.get(number.parse::<usize>().ok()?);
        let vectors = |number: &str| self.cells.get(&number.parse::<usize>().ok()?);
        if let Some(number) = name.strip_prefix(KEYS) {
            return Some(&layer(number)?.keys);
        }
        if let Some(number) = name.strip_prefix(VALUES) {
            return Some(&layer(number)?.values);
        }
        match name.split_once('@')? {
            (TAGS, group) => Some(&vectors(group)?.tags),
            (POSITIONS, group) => Some(&vectors(group)?.positions),
            _ => None,
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        let layers = (0..self.layers.len()).flat_map(cache_names);
        layers.chain(self.cells.keys().flat_map(|&group| cell_names(group))).collect()
    }

    /// All tensors with their names.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = (String, &mut StoredTensor)> {
        let layers = self.layers.iter_mut().enumerate().flat_map(|(number, layer)| {
            let [keys, values] = cache_names(number);
            [(keys, &mut layer.keys), (values, &mut layer.values)]
        });
        let cells = self.cells.iter_mut().flat_map(|(&group, vectors)| {
            let [tags, positions] = cell_names(group);
            [(tags, &mut vectors.tags), (positions, &mut vectors.positions)]
        });
        layers.chain(cells)
    }
}

/// View of the values for attention: `[head_width, cells, kv_heads]` for flash attention, `[cells, head_width,
/// kv_heads]` for a matrix product.
pub(super) fn values_view(
    values: &TensorDesc,
    hparams: &HParams,
    cells: usize,
    flash_attn: bool,
) -> Result<TensorDesc, ModelError> {
    if flash_attn {
        return Ok(values.heads(hparams.head_width, cells)?);
    }
    let [element, column, ..] = values.nb();
    let head = column * hparams.head_width;
    let ne = [cells, hparams.head_width, hparams.kv_heads, 1];
    Ok(TensorDesc::strided(values.dtype(), ne, [element, column, head, head * hparams.kv_heads])?)
}

/// View of a transposed value cache for SET_ROWS, which can then write single elements as rows of length 1:
/// `[1, cells, kv_width]`.
pub(super) fn columns(values: &TensorDesc) -> Result<TensorDesc, ModelError> {
    let ([cells, width, ..], [element, column, ..]) = (values.ne(), values.nb());
    let nb = [element, element, column, column * width];
    Ok(TensorDesc::strided(values.dtype(), [1, cells, width, 1], nb)?)
}
