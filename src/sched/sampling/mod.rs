//! Sampling: nodes that pick a token per sequence on the device that has the logits, so that only the token and its probability
//! travel to the client, and one uniform number per sequence from it.
//!
//! All nodes are ops of ggml's protocol, so that the logits may also be on a llama.cpp server. [`add_sampler`] adds one of several
//! graphs. The table has their ops over the whole vocabulary of n tokens; the other nodes have about √n elements per sequence.
//!
//! | sampling, logits | ops over the vocabulary |
//! |---|---|
//! | greedy | TOP_K of 1, SUM_ROWS |
//! | temperature | SOFT_MAX, SUM_ROWS; a row of padding if the vocabulary has no suitable divisor |
//! | temperature, logits split by vocabulary | TOP_K of 1, SUM_ROWS, SOFT_MAX, CUMSUM, SUB, STEP, SUM_ROWS, by block |
//! | top-k | TOP_K, SUM_ROWS; then as top-p, over k elements |
//! | min-p | as top-p, with SUB, SCALE, STEP and MUL of its own |
//! | top-p | ARGSORT, GET_ROWS, SOFT_MAX (two unless the temperature is 1), CUMSUM, SUB, SUM_ROWS, ADD, SCALE, STEP, MUL, SUM_ROWS |
//!
//! docs/sampling.md has the semantics and the numerical promise.
//!
//! # Logits that are split over ranks
//! In a tensor group, each rank has the logits of a part of the vocabulary. With [`LogitsLayout::SplitByVocabulary`] the
//! vocabulary is divided into blocks of consecutive tokens, and each op over it works on each block alone, which a rank can do for its
//! own blocks (`src/sched/tensor_group/rules.rs`). What is exchanged are a few numbers per block: the mass of each block, by
//! which all ranks choose the same one, and then the token that each block would give. For greedy sampling: the best token of each
//! block. Top-k and top-p gather the logits.
//!
//! # Invalid logits
//! The probability is NaN if a logit is NaN or plus infinity, or if all are minus infinity. SOFT_MAX of all logits already has this
//! property: NaN and `inf - inf` make its sum NaN, and a row of minus infinities is `0 / 0`. The other graphs multiply by
//! `validity`, because TOP_K may leave a NaN out, and because a *block* of minus infinities is valid. Indices are clamped: NaN in
//! a GET_ROWS index would fail the run.

mod draw;
mod nodes;

use crate::graph::{BuildError, TensorId};
use crate::sched::TaskBuilder;
use crate::tensor::DType;
use draw::{Blocks, Drawn, MAX_UNIFORM, draw, draw_rows, nucleus};
use nodes::Nodes;
use std::num::NonZeroUsize;
use thiserror::Error;

/// Largest vocabulary: ids are computed as F32, which has all whole numbers below this.
const MAX_VOCABULARY: usize = 1 << 24;

/// Fewest blocks of a large split vocabulary: as many as a tensor group can have ranks. With fewer than ranks, the group would
/// mirror the output weight.
const MIN_BLOCKS: usize = 64;

/// Most blocks of a split vocabulary: ranks exchange up to three numbers of each.
const MAX_BLOCKS: usize = 2048;

/// Where the vocabulary allows it, blocks have a multiple of this many rows: tensor groups cut weights at such multiples
/// (`Propagation::new_class`), and only between two blocks.
const CUT_ROWS: usize = 64;

/// How tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    temperature: f32,
    top_k: Option<NonZeroUsize>,
    top_p: f32,
    min_p: f32,
}

/// Invalid settings of [`Sampling`] (caller's error).
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SamplingError {
    /// The temperature is negative, too small to divide by, infinite or NaN.
    #[error("the temperature is 0 or a finite number from {min} on, not {0}", min = Sampling::MIN_TEMPERATURE)]
    Temperature(f32),
    /// The probability of top-p is not from 0 to 1.
    #[error("top-p is a probability from 0 to 1, not {0}")]
    TopP(f32),
    /// The part of min-p is not from 0 to 1.
    #[error("min-p is a number from 0 to 1, not {0}")]
    MinP(f32),
}

impl Sampling {
    /// The token with the largest logit.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0 };

    /// The least temperature above 0: logits divided by a smaller one could overflow.
    pub const MIN_TEMPERATURE: f32 = 1e-6;

    /// Random sampling. The filters are applied in this order:
    ///
    /// 1. `top_k`: only the k tokens with the largest logits. `None`, or a k of at least the vocabulary: all.
    /// 2. `top_p`: of the softmax of the remaining logits, the smallest set of the likeliest tokens with at least this probability, at
    ///    least one token. 1: all.
    /// 3. `temperature`: divisor of the logits. 0 is [`Sampling::GREEDY`], whatever the filters.
    ///
    /// # Errors
    /// [`SamplingError`] for a number out of its range.
    pub fn new(temperature: f32, top_k: Option<NonZeroUsize>, top_p: f32) -> Result<Sampling, SamplingError> {
        if temperature != 0.0 && !(Sampling::MIN_TEMPERATURE..=f32::MAX).contains(&temperature) {
            return Err(SamplingError::Temperature(temperature));
        }
        if !(0.0..=1.0).contains(&top_p) {
            return Err(SamplingError::TopP(top_p));
        }
        Ok(Sampling { temperature, top_k, top_p, min_p: 0.0 })
    }

    /// The same with min-p: only tokens whose probability, before the temperature, is at least this part of the likeliest token's. 0: all.
    ///
    /// # Errors
    /// [`SamplingError::MinP`] for a number that is not from 0 to 1.
    pub fn with_min_p(self, min_p: f32) -> Result<Sampling, SamplingError> {
        if !(0.0..=1.0).contains(&min_p) {
            return Err(SamplingError::MinP(min_p));
        }
        Ok(Sampling { min_p, ..self })
    }

    /// Whether the token with the largest logit is taken: no uniform number is needed.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// Where the logits are. A wrong value gives the same tokens, more slowly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsLayout {
    /// On one device.
    Whole,
    /// Split by vocabulary over the ranks of a tensor group, as the product of activations with a weight that is split by rows.
    SplitByVocabulary,
}

/// What [`add_sampler`] adds to a task: contiguous tensors with one element per sequence, which are no views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledTokens {
    /// Input, F32: a number from 0 to below 1 for each sequence. `None` for greedy sampling.
    pub uniform: Option<TensorId>,
    /// Output, I32: the tokens, from 0 to below the vocabulary.
    pub tokens: TensorId,
    /// Output, F32: the probability of each token in the distribution that it was drawn from, which is 1 for greedy sampling. NaN
    /// if the token must not be used: a logit is NaN or plus infinity, all are minus infinity, or (rarely) rounding has led to a token
    /// of probability 0.
    pub probabilities: TensorId,
}

/// Adds nodes that sample a token of each sequence from `logits`, F32 `[vocabulary, sequences]` and contiguous.
///
/// # Errors
/// [`BuildError::Tensor`] unless the logits are such a matrix with 1 to 2^24 tokens.
pub fn add_sampler(
    builder: &mut TaskBuilder,
    logits: TensorId,
    sampling: &Sampling,
    layout: LogitsLayout,
) -> Result<SampledTokens, BuildError> {
    let desc = builder.desc(logits)?;
    let [vocabulary, sequences, planes, more] = desc.ne();
    if desc.dtype() != DType::F32 || !desc.is_contiguous() || desc.is_empty() || planes * more != 1 {
        return Err(BuildError::Tensor("logits to sample from are not a contiguous matrix of F32"));
    }
    if vocabulary > MAX_VOCABULARY {
        return Err(BuildError::Tensor("logits to sample from have more than 2^24 tokens"));
    }
    let blocks = match layout {
        LogitsLayout::SplitByVocabulary => blocks_of_vocabulary(vocabulary),
        LogitsLayout::Whole => None,
    };
    let uniform = match sampling.is_greedy() {
        true => None,
        false => Some(builder.input("uniform numbers", DType::F32, [1, sequences, 1, 1])?),
    };
    let mut nodes = Nodes(builder);
    let clamped = uniform.map(|numbers| nodes.clamp(numbers, 0.0, MAX_UNIFORM)).transpose()?;
    let top_k = sampling.top_k.map(NonZeroUsize::get).filter(|&k| k < vocabulary);
    let scale = sampling.temperature.recip();
    let (tokens, probabilities) = match (clamped, blocks) {
        (None, blocks) => {
            let one = Blocks { length: vocabulary, count: 1 };
            greedy(&mut nodes, logits, blocks.unwrap_or(one))?
        }
        (Some(uniform), _) if top_k.is_some() || sampling.top_p < 1.0 || sampling.min_p > 0.0 => {
            filtered(&mut nodes, logits, (top_k, sampling.top_p, sampling.min_p), scale, uniform)?
        }
        (Some(uniform), Some(blocks)) => by_block(&mut nodes, logits, blocks, scale, uniform)?,
        (Some(uniform), None) => {
            let weights = nodes.soft_max(logits, scale)?;
            let drawn = draw(&mut nodes, weights, vocabulary, uniform)?;
            (drawn.ids, nan_unless_positive(&mut nodes, drawn.probability)?)
        }
    };
    for (tensor, name) in [(tokens, "sampled tokens"), (probabilities, "probabilities of sampled tokens")] {
        builder.name(tensor, name);
        builder.output(tensor)?;
    }
    Ok(SampledTokens { uniform, tokens, probabilities })
}

/// Blocks of a vocabulary that is split over the ranks of a tensor group: a divisor near the square root, such that ranks that get a
/// whole number of [`CUT_ROWS`] rows also get whole blocks. `None` if there is none: the logits are then gathered.
fn blocks_of_vocabulary(vocabulary: usize) -> Option<Blocks> {
    let unit = CUT_ROWS.min(1 << vocabulary.trailing_zeros().min(usize::BITS - 1));
    let fewest = if vocabulary < MIN_BLOCKS * CUT_ROWS { 2 } else { MIN_BLOCKS };
    let lengths = (1..=vocabulary / fewest / unit).map(|units| units * unit);
    let divisors = lengths.filter(|&length| vocabulary.is_multiple_of(length) && vocabulary / length <= MAX_BLOCKS);
    let blocks = divisors.map(|length| Blocks { length, count: vocabulary / length });
    blocks.min_by_key(|blocks| blocks.length + blocks.count)
}

/// The token and the probability of each sequence. They are no views: a task for ranks (`RankTask`) finds outputs by the tensors
/// that nodes write.
type Tokens = (TensorId, TensorId);

/// The largest logit of each block, then the largest of these. Both take the lowest of equal ids if TOP_K does, as fanout's devices.
fn greedy(nodes: &mut Nodes<'_>, logits: TensorId, blocks: Blocks) -> Result<Tokens, BuildError> {
    let Blocks { length, count } = blocks;
    let [_, s, _] = nodes.shape(logits)?;
    let rows = nodes.reshape(logits, [length, count, s])?;
    let best = nodes.top_k(rows, 1)?;
    let largest = nodes.elements(rows, best)?;
    let largest = nodes.reshape(largest, [count, s, 1])?;
    let valid = validity(nodes, rows)?;
    let largest = nodes.mul(largest, valid)?;
    if count == 1 {
        // The softmax of one element: 1, or NaN.
        return Ok((best, nodes.soft_max(largest, 1.0)?));
    }
    let best = nodes.as_f32(best, [count, s, 1])?;
    let both = nodes.join(largest, best)?;
    let largest = nodes.part(both, 0, [count, s, 1])?;
    let best = nodes.part(both, count * s, [count, 1, s])?;
    let soft = nodes.soft_max(largest, 1.0)?;
    let largest = nodes.reshape(largest, [count, 1, s])?;
    let chosen = nodes.top_k(largest, 1)?;
    let soft = nodes.reshape(soft, [count, 1, s])?;
    // NaN if the softmax is NaN, else 1.
    let soft = nodes.elements(soft, chosen)?;
    let probabilities = nodes.div(soft, soft)?;
    let within = nodes.elements(best, chosen)?;
    let chosen = nodes.as_f32(chosen, [1, 1, s])?;
    let first = nodes.scale(chosen, length as f32, 0.0)?;
    let token = nodes.add(first, within)?;
    Ok((nodes.as_i32(token, [1, s, 1])?, probabilities))
}

/// Temperature alone, with ops that work on each block of the vocabulary alone.
fn by_block(
    nodes: &mut Nodes<'_>,
    logits: TensorId,
    blocks: Blocks,
    scale: f32,
    uniform: TensorId,
) -> Result<Tokens, BuildError> {
    let Blocks { length, count } = blocks;
    let [_, s, _] = nodes.shape(logits)?;
    let rows = nodes.reshape(logits, [length, count, s])?;
    let within = nodes.soft_max(rows, scale)?;
    // The logarithm of a block's mass, from any of its tokens: that of the token minus that of its part of the block. With the
    // largest logit neither is lost to underflow.
    let best = nodes.top_k(rows, 1)?;
    let largest = nodes.elements(rows, best)?;
    let largest = nodes.reshape(largest, [count, s, 1])?;
    let largest = nodes.scale(largest, scale, 0.0)?;
    let part = nodes.elements(within, best)?;
    let part = nodes.reshape(part, [count, s, 1])?;
    // At least 1 / length. In a block of minus infinities it is NaN, which CLAMP replaces by a bound, so that its mass is 0.
    let part = nodes.clamp(part, 0.5 / length as f32, 1.0)?;
    let part = nodes.log(part)?;
    let mass = nodes.sub(largest, part)?;
    let valid = validity(nodes, rows)?;
    let mass = nodes.mul(mass, valid)?;
    // Ranks exchange this, and all choose the same block.
    let mass = nodes.soft_max(mass, 1.0)?;
    let block = draw(nodes, mass, count, uniform)?;
    let rest = block.rest(nodes)?;
    // Each block draws a token as if it were chosen.
    let drawn = draw_rows(nodes, within, rest)?;
    let both = nodes.join(drawn.index, drawn.weight)?;
    let index = nodes.part(both, 0, [count, 1, s])?;
    let index = nodes.elements(index, block.ids)?;
    let weight = nodes.part(both, count * s, [count, 1, s])?;
    let weight = nodes.elements(weight, block.ids)?;
    let first = nodes.scale(block.index, length as f32, 0.0)?;
    let index = nodes.reshape(index, [1, s, 1])?;
    let token = nodes.add(first, index)?;
    let weight = nodes.reshape(weight, [1, s, 1])?;
    let probabilities = nodes.mul(weight, block.probability)?;
    Ok((nodes.as_i32(token, [1, s, 1])?, nan_unless_positive(nodes, probabilities)?))
}

/// Top-k, top-p and min-p: sorted logits, then a draw from those that are kept.
fn filtered(
    nodes: &mut Nodes<'_>,
    logits: TensorId,
    (top_k, top_p, min_p): (Option<usize>, f32, f32),
    scale: f32,
    uniform: TensorId,
) -> Result<Tokens, BuildError> {
    let [vocabulary, s, _] = nodes.shape(logits)?;
    let n = top_k.unwrap_or(vocabulary);
    let (order, sorted) = match top_k {
        None => {
            let order = nodes.argsort(logits, true)?;
            (order, nodes.elements(logits, order)?)
        }
        Some(k) => {
            // TOP_K has no order. Sorted by id first, equal logits keep that order in the second sort.
            let ids = nodes.top_k(logits, k)?;
            let numbers = nodes.as_f32(ids, [k, s, 1])?;
            let by_id = nodes.argsort(numbers, false)?;
            let ids = nodes.elements(ids, by_id)?;
            let largest = nodes.elements(logits, ids)?;
            let by_logit = nodes.argsort(largest, true)?;
            (nodes.elements(ids, by_logit)?, nodes.elements(largest, by_logit)?)
        }
    };
    let padded = Blocks::of_row(n).elements();
    let mut weights = nodes.soft_max(sorted, scale)?;
    if top_p < 1.0 {
        let plain = if scale == 1.0 { weights } else { nodes.soft_max(sorted, 1.0)? };
        let plain = nodes.pad(plain, padded)?;
        let kept = nucleus(nodes, plain, top_p)?;
        let all = if scale == 1.0 { plain } else { nodes.pad(weights, padded)? };
        weights = nodes.mul(all, kept)?;
    }
    if min_p > 0.0 {
        // By the difference to the largest logit, which min-p bounds. Above 0, so that the largest one is kept.
        let largest = nodes.first_of_rows(sorted)?;
        let below = nodes.sub(sorted, largest)?;
        let left = nodes.scale(below, 1.0, (-min_p.ln()).max(f32::MIN_POSITIVE))?;
        let kept = nodes.step(left)?;
        let kept = if top_p < 1.0 { nodes.pad(kept, padded)? } else { kept };
        weights = nodes.mul(weights, kept)?;
    }
    let Drawn { ids, mut probability, .. } = draw(nodes, weights, n, uniform)?;
    let ids = nodes.reshape(ids, [1, s, 1])?;
    let tokens = nodes.lookup(order, ids)?;
    if top_k.is_some() {
        let rows = nodes.reshape(logits, [vocabulary, 1, s])?;
        let valid = validity(nodes, rows)?;
        probability = nodes.mul(probability, valid)?;
    }
    Ok((tokens, nan_unless_positive(nodes, probability)?))
}

/// 1 for each row of x `[n, a, s]` without NaN and plus infinity, else NaN: `[a, s]`. The sum of such a row is finite or minus infinity
/// (unless its logits are near the largest f32); `v / v` is 1 for 1 and NaN for 0.
fn validity(nodes: &mut Nodes<'_>, x: TensorId) -> Result<TensorId, BuildError> {
    let sums = nodes.row_sums(x)?;
    let below = nodes.scale(sums, -1.0, f32::MAX)?;
    let valid = nodes.step(below)?;
    nodes.div(valid, valid)
}

/// The probability where it is above 0, else NaN: `0 / 0`.
fn nan_unless_positive(nodes: &mut Nodes<'_>, probability: TensorId) -> Result<TensorId, BuildError> {
    let positive = nodes.step(probability)?;
    nodes.div(probability, positive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocabularies_are_cut_into_blocks_that_ranks_can_share() {
        let cases = [
            (1, None),
            (2, None),
            (7, Some((1, 7))),
            (256, Some((64, 4))),
            (32_000, Some((128, 250))),
            // A prime, and a divisor that gives too few blocks beside one that does not.
            (32_003, None),
            (50_257, Some((29, 1733))),
            (128_256, Some((384, 334))),
            (151_936, Some((128, 1187))),
        ];
        for (vocabulary, want) in cases {
            let want = want.map(|(length, count)| Blocks { length, count });
            assert_eq!(blocks_of_vocabulary(vocabulary), want, "{vocabulary} tokens");
        }
    }

    #[test]
    fn long_rows_are_cut_near_the_root() {
        for (n, length, count) in [(1, 1, 1), (256, 256, 1), (257, 16, 17), (32_000, 160, 200), (32_003, 178, 180)] {
            let blocks = Blocks::of_row(n);
            assert_eq!(blocks, Blocks { length, count }, "{n} elements");
            assert!(blocks.elements() - n < length);
            // The same blocks for the padded row.
            assert_eq!(Blocks::of_row(blocks.elements()).elements(), blocks.elements());
        }
    }
}
