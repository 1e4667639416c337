//! The workload: the sizes of a model, and its sequences and tokens.

use super::PlannerError;

/// Sizes of one transformer block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockSizes {
    /// Bytes of all weights, with all experts.
    pub weight_bytes: u64,
    /// Bytes of the experts among them; 0 without a mixture of experts.
    pub expert_bytes: u64,
    /// Bytes of the experts that one token uses; 0 without a mixture of experts.
    pub routed_bytes: u64,
    /// Multiply-adds of the products with weights, per token.
    pub multiply_adds: f64,
    /// Bytes of the KV cache per position.
    pub kv_bytes: u64,
    /// Nodes of the graph.
    pub nodes: u32,
}

/// Sizes of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelSizes {
    /// The blocks, in order.
    pub blocks: Vec<BlockSizes>,
    /// Bytes of the token embedding.
    pub embedding_bytes: u64,
    /// Bytes of the output weights; the size of the embedding if the model ties the two.
    pub output_bytes: u64,
    /// Whether the output weights are the embedding: a device with both holds them once.
    pub tied: bool,
    /// Channels of a token's hidden state.
    pub width: u64,
    /// Query heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Tokens in the vocabulary.
    pub vocabulary: u64,
    /// Bytes of intermediate results per token of a micro-batch, on each device.
    pub scratch_bytes: u64,
    /// Bytes of intermediate results per token of a micro-batch and cell of a KV cache, on each device: the mask, and without flash
    /// attention the scores of all heads.
    pub cell_scratch_bytes: u64,
    /// Bytes of intermediate results per sequence on devices with the output: logits, and what sampling computes from them.
    pub output_scratch_bytes: u64,
}

/// The goal of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The most decoded tokens per second.
    DecodeRate,
    /// The shortest time for the prompt and the decoded tokens.
    Request,
}

/// Sequences, tokens, and how they are batched. The default is one sequence with a prompt of 512 tokens, 128 decoded tokens, and
/// logits that return to the client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Sequences decoded at the same time.
    pub sequences: u32,
    /// The most groups of sequences in flight, each on another stage of the pipeline.
    pub max_groups: u32,
    /// Tokens of each prompt.
    pub prompt_tokens: u32,
    /// Tokens decoded after each prompt.
    pub decode_tokens: u32,
    /// Capacity of the KV cache in positions per sequence.
    pub context: u32,
    /// Tokens per micro-batch of a prompt. Memory is reserved for so many, also if the prompt is shorter.
    pub micro_batch: u32,
    /// Micro-batches of a prompt in flight.
    pub depth: u32,
    /// Bytes that the client sends to each server per sequence and decoded token: its id, its position, masks.
    pub input_bytes: f64,
    /// Bytes that the last stage returns per sequence and decoded token: the logits, or a sampled token.
    pub result_bytes: f64,
    /// The goal of the placement.
    pub goal: Goal,
}

impl Default for Workload {
    fn default() -> Workload {
        Workload {
            sequences: 1,
            max_groups: 1,
            prompt_tokens: 512,
            decode_tokens: 128,
            context: 640,
            micro_batch: 512,
            depth: 4,
            input_bytes: 16.0,
            result_bytes: 512_000.0,
            goal: Goal::DecodeRate,
        }
    }
}

impl Workload {
    pub(super) fn check(&self, model: &ModelSizes) -> Result<(), PlannerError> {
        let counts = [self.sequences, self.max_groups, self.prompt_tokens, self.micro_batch, self.depth];
        if counts.contains(&0) {
            return Err(PlannerError::Workload);
        }
        let is_model = !model.blocks.is_empty() && model.width > 0 && model.heads > 0 && model.kv_heads > 0;
        if is_model { Ok(()) } else { Err(PlannerError::Model) }
    }

    /// Positions of the KV cache that a decoded token reads, on average.
    pub(super) fn decode_positions(&self) -> f64 {
        f64::from(self.prompt_tokens) + f64::from(self.decode_tokens) / 2.0
    }

    /// The most groups of sequences that can be of use in a pipeline of `stages`: one for each stage.
    pub(super) fn groups_of(&self, stages: usize) -> u32 {
        let stages = u32::try_from(stages).unwrap_or(u32::MAX);
        self.max_groups.min(self.sequences).min(stages)
    }

    /// The number of micro-batches of a prompt, and the mean number of their tokens.
    pub(super) fn micro_batches(&self) -> (f64, f64) {
        let batches = f64::from(self.prompt_tokens.div_ceil(self.micro_batch));
        (batches, f64::from(self.prompt_tokens) / batches)
    }
}
