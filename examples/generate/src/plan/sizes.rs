//! Sizes of a model for the planner, from its file.

use crate::args::Args;
use crate::hparams::HParams;
use crate::model::CacheOptions;
use crate::tensor_names::ModelPart;
use anyhow::Context;
use fanout::gguf::{Gguf, TensorInfo};
use fanout::sched::planner::{BlockSizes, ModelSizes};
use fanout::tensor::DType;
use std::collections::BTreeMap;

/// Nodes of a block that compute: norms, products, RoPE, attention, the feed-forward network and the residuals.
const NODES: u32 = 24;

/// Nodes of a block with a mixture of experts: the router, the choice and the weighted sum are added.
const EXPERT_NODES: u32 = 36;

/// Bytes per token and cell while the mask is made: its differences and their sum, in F32.
const MASK_BYTES: usize = 12;

/// Bytes per token, cell and head without flash attention: scores, and the shares that follow from them. Beside them is the mask.
const SCORE_BYTES: usize = 8;
const F32_MASK_BYTES: usize = 4;

/// The sizes of a model with a KV cache of this layout, sampled with the options of `args`, and the type of most bytes of its blocks.
///
/// # Errors
/// A model without blocks, or a cache whose layout is invalid for the model.
pub(super) fn model_sizes(
    gguf: &Gguf<'_>,
    hparams: &HParams,
    cache: &CacheOptions,
    args: &Args,
) -> anyhow::Result<(ModelSizes, DType)> {
    let cache_bytes = cache.keys(hparams)?.extent() + cache.values(hparams)?.extent();
    let nodes = if hparams.experts.is_some() { EXPERT_NODES } else { NODES };
    let block = BlockSizes { kv_bytes: (cache_bytes / cache.cells) as u64, nodes, ..BlockSizes::default() };
    let mut sizes = ModelSizes {
        blocks: vec![block; hparams.layers],
        width: hparams.width as u64,
        heads: hparams.heads as u64,
        kv_heads: hparams.kv_heads as u64,
        vocabulary: hparams.vocab as u64,
        scratch_bytes: scratch_bytes(hparams),
        cell_scratch_bytes: cell_scratch_bytes(hparams, cache.flash_attn),
        output_scratch_bytes: (4 * hparams.vocab * (1 + sampler_rows(args))) as u64,
        tied: true,
        ..ModelSizes::default()
    };
    let mut types = BTreeMap::<DType, u64>::new();
    for tensor in &gguf.tensors {
        let bytes = tensor.bytes.len() as u64;
        match ModelPart::of(&tensor.name, hparams) {
            Some(ModelPart::Embedding) => sizes.embedding_bytes += bytes,
            Some(ModelPart::Output) => {
                sizes.output_bytes += bytes;
                sizes.tied &= tensor.name != "output.weight";
            }
            Some(ModelPart::Block(at)) => {
                *types.entry(tensor.dtype).or_default() += bytes;
                add_weight(&mut sizes.blocks[at], tensor, hparams);
            }
            Some(ModelPart::EveryBlock) | None => {}
        }
    }
    if sizes.tied {
        sizes.output_bytes += sizes.embedding_bytes;
    }
    let most = types.into_iter().max_by_key(|&(_, bytes)| bytes).context("the model has no weights")?;
    Ok((sizes, most.0))
}

fn add_weight(block: &mut BlockSizes, tensor: &TensorInfo, hparams: &HParams) {
    let (bytes, elements) = (tensor.bytes.len() as u64, tensor.ne.iter().product::<usize>() as f64);
    block.weight_bytes += bytes;
    match &hparams.experts {
        // Weights of all experts are one tensor of three dimensions.
        Some(experts) if tensor.ne[2] > 1 => {
            let used = experts.used as f64 / experts.count as f64;
            block.expert_bytes += bytes;
            block.routed_bytes += (bytes as f64 * used) as u64;
            block.multiply_adds += elements * used;
        }
        _ => block.multiply_adds += elements,
    }
}

/// Bytes of results that are alive at a time, per token: hidden states, gate and up.
fn scratch_bytes(hparams: &HParams) -> u64 {
    let hidden = hparams.experts.map_or(hparams.ff, |experts| experts.ff * experts.used);
    4 * (6 * hparams.width + 3 * hidden) as u64
}

/// The same per token and cell of the KV cache. The mask is finished before the first scores.
fn cell_scratch_bytes(hparams: &HParams, flash_attn: bool) -> u64 {
    let scores = if flash_attn { 0 } else { F32_MASK_BYTES + SCORE_BYTES * hparams.heads };
    scores.max(MASK_BYTES) as u64
}

/// Rows of the vocabulary's length that a sampler has at a time, beside the logits: see the table of [`fanout::sched::sampling`].
fn sampler_rows(args: &Args) -> usize {
    match (args.top_k, args.top_p) {
        _ if args.temp == 0.0 => 0,
        (Some(_), _) => 1,
        (None, None) => 2,
        (None, Some(_)) => 6,
    }
}
