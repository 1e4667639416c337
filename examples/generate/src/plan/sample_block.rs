//! A transformer block of a model's shape, whose time on a device the planner's rates are derived from.

use crate::hparams::HParams;
use crate::model::CacheOptions;
use anyhow::Context;
use fanout::device::Device;
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::{MulMat, Precision};
use fanout::ops::norm::Norm;
use fanout::ops::softmax::SoftMax;
use fanout::ops::{Op, OutputSpec};
use fanout::tensor::{DType, TensorDesc};

/// Channels of a feed-forward network that was made narrower are a multiple of this: whole blocks of every type.
const MULTIPLE: usize = 256;

/// Shapes and types of the block. All products have weights of one type; a mixture of experts counts as a feed-forward network with the
/// channels of the experts that a token uses. Nothing writes the KV cache.
#[derive(Clone, Debug)]
pub(super) struct SampleBlock {
    hparams: HParams,
    weight: DType,
    ff: usize,
    kv: DType,
    flash_attn: bool,
}

/// The tokens of a run, and the positions of the KV cache that each attends to.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleBatch {
    pub(super) sequences: usize,
    /// Tokens of each sequence.
    pub(super) tokens: usize,
    pub(super) positions: usize,
}

impl SampleBatch {
    pub(super) fn columns(&self) -> usize {
        self.sequences * self.tokens
    }
}

impl SampleBlock {
    /// A block of the model, with at most `limit` bytes of weights: its feed-forward network has fewer channels if need be.
    ///
    /// # Errors
    /// Too little memory for any.
    pub(super) fn new(
        hparams: &HParams,
        cache: &CacheOptions,
        weight: DType,
        limit: u64,
    ) -> anyhow::Result<SampleBlock> {
        let ff = hparams.experts.map_or(hparams.ff, |experts| experts.ff * experts.used);
        let block = SampleBlock { hparams: hparams.clone(), weight, ff, kv: cache.dtype, flash_attn: cache.flash_attn };
        let block = block.narrowed(limit);
        anyhow::ensure!(
            block.weight_bytes()? as u64 <= limit,
            "the device has no free memory to measure a block of the model"
        );
        Ok(block)
    }

    /// The block with at most `limit` bytes of weights, as far as its feed-forward network can be narrower.
    pub(super) fn narrowed(&self, limit: u64) -> SampleBlock {
        let mut block = self.clone();
        while block.ff > MULTIPLE && block.weight_bytes().is_ok_and(|bytes| bytes as u64 > limit) {
            block.ff = (block.ff / 2 / MULTIPLE).max(1) * MULTIPLE;
        }
        block
    }

    /// Rows and columns of each weight: queries, keys, values, output; gate, up, down.
    fn weights(&self) -> [(usize, usize); 7] {
        let (width, kv_width) = (self.hparams.width, self.hparams.kv_width());
        let q_width = self.hparams.heads * self.hparams.head_width;
        let [to_q, to_kv, from_q] = [(width, q_width), (width, kv_width), (q_width, width)];
        [to_q, to_kv, to_kv, from_q, (width, self.ff), (width, self.ff), (self.ff, width)]
    }

    /// The type of a weight with rows of `k` elements: F16 if they are no whole blocks, as in quantised models.
    fn weight_type(&self, k: usize) -> DType {
        if k.is_multiple_of(self.weight.block_len()) { self.weight } else { DType::F16 }
    }

    /// Whether the device runs every node of the block. A server may refuse a node only when it is submitted, or not survive it.
    pub(super) fn is_supported(&self, device: &dyn Device) -> anyhow::Result<bool> {
        let (graph, _) = self.graph(1, SampleBatch { sequences: 1, tokens: 1, positions: 64 })?;
        let views = graph.nodes().iter().map(|node| graph.node_view(node).context("a node of this graph"));
        for view in views {
            if !device.support(view?).runs() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Bytes of the weights.
    pub(super) fn weight_bytes(&self) -> anyhow::Result<usize> {
        let bytes = |(k, rows): (usize, usize)| self.weight_type(k).row_bytes(k)?.checked_mul(rows);
        let bytes = self.weights().into_iter().map(bytes).sum::<Option<usize>>();
        bytes.context("the model is too wide")
    }

    /// Multiply-adds of the products with weights, per token.
    pub(super) fn multiply_adds(&self) -> f64 {
        self.weights().iter().map(|&(k, rows)| k as f64 * rows as f64).sum()
    }

    /// Bytes of keys and values per position.
    pub(super) fn kv_bytes(&self) -> anyhow::Result<usize> {
        Ok(2 * self.kv.row_bytes(self.hparams.kv_width()).context("the KV cache is too wide")?)
    }

    /// A graph of `blocks` such blocks, each with weights and a KV cache of its own, and the bytes at its beginning that must be 0: the
    /// positions of the rotary embedding, whose sines take longer for large ones.
    pub(super) fn graph(&self, blocks: usize, batch: SampleBatch) -> anyhow::Result<(Graph, u64)> {
        let mut b = Builder::new();
        let columns = batch.columns();
        let positions = b.leaf(DType::I32, [columns, 1, 1, 1])?;
        let norm = b.leaf(DType::F32, [self.hparams.width, 1, 1, 1])?;
        let mut x = b.leaf(DType::F32, [self.hparams.width, columns, 1, 1])?;
        for _ in 0..blocks {
            x = BlockBuilder { b: &mut b, block: self, batch, positions, norm }.block(x)?;
        }
        Ok((b.build(), 4 * columns as u64))
    }
}

struct BlockBuilder<'a> {
    b: &'a mut Builder,
    block: &'a SampleBlock,
    batch: SampleBatch,
    positions: TensorId,
    norm: TensorId,
}

impl BlockBuilder<'_> {
    fn node<const N: usize>(&mut self, op: impl Into<Op>, srcs: [TensorId; N]) -> anyhow::Result<TensorId> {
        Ok(self.b.node(op, &srcs.map(Some))?)
    }

    fn view(&mut self, of: TensorId, ne: [usize; 4]) -> anyhow::Result<TensorId> {
        let desc = self.b.tensor(of).context("a tensor of this graph")?.desc.reshaped(ne)?;
        Ok(self.b.view(of, desc, 0)?)
    }

    fn product(&mut self, (k, rows): (usize, usize), x: TensorId) -> anyhow::Result<TensorId> {
        let weight = self.b.leaf(self.block.weight_type(k), [k, rows, 1, 1])?;
        self.node(MulMat::PLAIN, [weight, x])
    }

    fn normed(&mut self, x: TensorId) -> anyhow::Result<TensorId> {
        let normed = self.node(Norm::RmsNorm { eps: self.block.hparams.rms_epsilon }, [x])?;
        self.node(Binary::Mul, [normed, self.norm])
    }

    fn rotated(&mut self, x: TensorId, heads: usize) -> anyhow::Result<TensorId> {
        let x = self.view(x, [self.block.hparams.head_width, heads, self.batch.columns(), 1])?;
        self.node(self.block.hparams.rope, [x, self.positions])
    }

    fn block(&mut self, x: TensorId) -> anyhow::Result<TensorId> {
        let [q, k, v, output, gate, up, down] = self.block.weights();
        let HParams { heads, kv_heads, .. } = self.block.hparams;
        let normed = self.normed(x)?;
        let q = self.product(q, normed)?;
        let q = self.rotated(q, heads)?;
        let k = self.product(k, normed)?;
        self.rotated(k, kv_heads)?;
        self.product(v, normed)?;
        let attended = self.attention(q)?;
        let attended = self.product(output, attended)?;
        let x = self.node(Binary::Add, [attended, x])?;
        let normed = self.normed(x)?;
        let (gate, up) = (self.product(gate, normed)?, self.product(up, normed)?);
        let gated = self.node(Glu { kind: GluKind::Swiglu, swapped: false }, [gate, up])?;
        let out = self.product(down, gated)?;
        self.node(Binary::Add, [out, x])
    }

    /// Attention of queries `[head_width, heads, columns]`; the result is `[heads * head_width, columns]`. Each sequence has a cache of
    /// its own, so that there is no mask.
    fn attention(&mut self, q: TensorId) -> anyhow::Result<TensorId> {
        let HParams { heads, kv_heads, head_width: width, .. } = self.block.hparams;
        let (SampleBatch { sequences, tokens, positions }, kv) = (self.batch, self.block.kv);
        let q_desc = TensorDesc::contiguous(DType::F32, [width, heads, tokens, sequences])?.permuted([0, 2, 1, 3])?;
        let q = self.b.view(q, q_desc, 0)?;
        let rows = TensorDesc::contiguous(kv, [width * kv_heads, positions, sequences])?;
        let keys = self.b.leaf_with_desc(rows)?;
        let keys = self.b.view(keys, rows.heads(width, positions)?, 0)?;
        let scale = (width as f32).sqrt().recip();
        let flat = [heads * width, self.batch.columns(), 1, 1];
        if self.block.flash_attn {
            let values = self.b.leaf_with_desc(rows)?;
            let values = self.b.view(values, rows.heads(width, positions)?, 0)?;
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let attended = self.node(op, [q, keys, values])?;
            return self.view(attended, flat);
        }
        let values = self.b.leaf(kv, [positions, width, kv_heads, sequences])?;
        let scores = self.node(MulMat { accumulate: Precision::F32, ..MulMat::PLAIN }, [keys, q])?;
        let shares = self.node(SoftMax { scale, max_bias: 0.0 }, [scores])?;
        let attended = self.node(MulMat::PLAIN, [values, shares])?;
        let desc = self.b.tensor(attended).context("a tensor of this graph")?.desc.permuted([0, 2, 1, 3])?;
        let attended = self.b.view(attended, desc, 0)?;
        Ok(self.b.node_with_output(CopyOp::Cont, &[Some(attended)], OutputSpec { dtype: DType::F32, ne: flat })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hparams::Arch;
    use crate::model::tests::toy::ToyModel;
    use fanout::device::DeviceKind;
    use fanout::device::noop::NoopDevice;
    use fanout::ops::OpCode;

    fn cache(flash_attn: bool) -> CacheOptions {
        CacheOptions { groups: 1, cells: 256, dtype: DType::F16, flash_attn }
    }

    /// As a 70B model: its attention alone has 85 MB of weights.
    fn large() -> HParams {
        HParams {
            width: 8192,
            heads: 64,
            kv_heads: 8,
            head_width: 128,
            ff: 28672,
            ..ToyModel::new(Arch::Llama).hparams
        }
    }

    #[test]
    fn a_block_is_whole_unless_memory_is_short() {
        let block = |limit| SampleBlock::new(&large(), &cache(true), DType::Q4_0, limit);
        let whole = block(1 << 30).unwrap();
        assert_eq!((whole.ff, whole.weight_bytes().unwrap()), (28672, 481_296_384));
        assert_eq!(block(256 << 20).unwrap().ff, 28672 / 4);
        assert!(block(1 << 10).unwrap_err().to_string().contains("no free memory"));
    }

    #[test]
    fn a_device_without_an_op_of_the_block_does_not_support_it() {
        let hparams = ToyModel::new(Arch::Llama).hparams;
        let device = NoopDevice::new("noop", DeviceKind::Gpu).without_ops(&[OpCode::FlashAttnExt]).shared();
        for (flash_attn, supported) in [(true, false), (false, true)] {
            let block = SampleBlock::new(&hparams, &cache(flash_attn), DType::F16, 1 << 30).unwrap();
            assert_eq!(block.is_supported(&*device).unwrap(), supported, "{flash_attn}");
        }
    }

    /// The positions, which must be 0, lie at the beginning; weights and caches have the bytes that the rates are computed from.
    #[test]
    fn a_graph_has_the_weights_and_caches_of_its_blocks() {
        for (arch, flash_attn) in [(Arch::Llama, true), (Arch::Llama, false), (Arch::Qwen3Moe, true)] {
            let hparams = ToyModel::new(arch).hparams;
            let block = SampleBlock::new(&hparams, &cache(flash_attn), DType::F16, 1 << 30).unwrap();
            let batch = SampleBatch { sequences: 2, tokens: 3, positions: 32 };
            let (graph, zeros) = block.graph(2, batch).unwrap();
            let first = &graph.tensors()[0];
            assert_eq!((first.desc.dtype(), first.desc.extent() as u64), (DType::I32, zeros), "{arch}");
            assert_eq!(first.place.map(|place| place.offset), Some(0), "{arch}");
            // All computed tensors are F32.
            let leaves =
                graph.tensors().iter().filter(|tensor| tensor.desc.dtype() == DType::F16 && tensor.view_of.is_none());
            let bytes: usize = leaves.map(|tensor| tensor.desc.extent()).sum();
            let want = block.weight_bytes().unwrap() + 2 * 32 * block.kv_bytes().unwrap();
            assert_eq!(bytes, 2 * want, "{arch} {flash_attn}");
        }
    }
}
