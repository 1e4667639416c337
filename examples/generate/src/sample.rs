//! Token sampling: how the devices sample, the uniform numbers that they get, and the same on the host for logits that a device
//! could not sample from.

use crate::args::Args;
use fanout::sched::sampling::{Sampling, SamplingError};
use std::collections::{BinaryHeap, HashSet};
use std::num::NonZeroUsize;
use thiserror::Error;

/// How the tokens of all sequences are sampled.
#[derive(Clone, Debug)]
pub struct Sampler {
    /// Divisor of the logits; 0 takes the largest one.
    temperature: f32,
    top_k: Option<NonZeroUsize>,
    top_p: f32,
    min_p: f32,
    /// 1: no penalty.
    repeat_penalty: f32,
    /// Tokens at the end of a sequence to which the penalty applies.
    penalised_tokens: usize,
    seed: u64,
}

/// The logits are invalid.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SampleError {
    /// A logit is NaN or plus infinity.
    #[error("the logit of token {token} is {logit}: the model's weights are damaged, or a device computes wrongly")]
    InvalidLogit {
        /// Id of the token.
        token: usize,
        /// NaN or plus infinity.
        logit: f32,
    },
    /// There are no logits, or all are minus infinity.
    #[error("no token is possible: none of {0} logits is above minus infinity")]
    Nothing(usize),
}

/// A token with its logit, ordered by logit and then by descending id, so that the maximum is the likeliest token with the
/// lowest id. -0 is below 0, as on fanout's devices.
#[derive(Clone, Copy, PartialEq)]
struct Candidate {
    logit: f32,
    token: u32,
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // `best` has rejected NaN before.
        self.logit.total_cmp(&other.logit).then(other.token.cmp(&self.token))
    }
}

impl Sampler {
    /// As [`Sampling::new`]. The uniform numbers follow from `seed`.
    pub fn new(temperature: f32, top_k: Option<NonZeroUsize>, top_p: f32, seed: u64) -> Sampler {
        Sampler { temperature, top_k, top_p, min_p: 0.0, repeat_penalty: 1.0, penalised_tokens: 64, seed }
    }

    /// By the options of a run.
    pub fn from_args(args: &Args, seed: u64) -> Sampler {
        let (min_p, repeat_penalty) = (args.min_p.unwrap_or_default(), args.repeat_penalty.unwrap_or(1.0));
        let sampler = Sampler::new(args.temp, args.top_k, args.top_p.unwrap_or(1.0), seed);
        Sampler { min_p, repeat_penalty, penalised_tokens: args.penalised_tokens, ..sampler }
    }

    /// For the nodes of the graph.
    ///
    /// # Errors
    /// A number out of its range.
    pub fn sampling(&self) -> Result<Sampling, SamplingError> {
        Sampling::new(self.temperature, self.top_k, self.top_p)?.with_min_p(self.min_p)
    }

    /// Whether tokens depend on earlier ones, so that the host must sample.
    pub fn penalises(&self) -> bool {
        self.repeat_penalty != 1.0 && self.penalised_tokens > 0
    }

    /// Makes those tokens less likely that are among the last ones of a sequence.
    pub fn penalise(&self, logits: &mut [f32], sequence: &[u32]) {
        let last: HashSet<u32> = sequence.iter().rev().take(self.penalised_tokens).copied().collect();
        for token in last {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / self.repeat_penalty } else { *logit * self.repeat_penalty };
            }
        }
    }

    /// The number from 0 to below 1 by which the token after `position` of a sequence is drawn. It depends on nothing else, so
    /// that a sequence has the same tokens alone, beside others, and after a loss.
    pub fn uniform(&self, sequence: u64, position: usize) -> f32 {
        let mut rng = fastrand::Rng::with_seed(self.seed);
        for number in [sequence, position as u64] {
            rng = fastrand::Rng::with_seed(rng.u64(..) ^ number);
        }
        rng.f32()
    }

    /// Picks a token on the host; returns its id, the index in `logits`.
    ///
    /// # Errors
    /// [`SampleError`] if a logit is NaN or plus infinity, and when no logit is above minus infinity.
    pub fn sample_on_host(&self, logits: &[f32], uniform: f32) -> Result<u32, SampleError> {
        let best = best(logits)?;
        if self.temperature == 0.0 {
            return Ok(best.token);
        }
        let kept = self.likeliest(logits, best.logit);
        let scale = f64::from(self.temperature);
        Ok(draw(&kept, |logit| (f64::from(logit - best.logit) / scale).exp(), uniform).unwrap_or(best.token))
    }

    /// The tokens that top-k, top-p and min-p keep, at least one, in descending order; all tokens in the order of their ids without them.
    fn likeliest(&self, logits: &[f32], largest: f32) -> Vec<Candidate> {
        let all = logits.iter().zip(0..).map(|(&logit, token)| Candidate { logit, token });
        let top_k = self.top_k.map_or(usize::MAX, NonZeroUsize::get);
        let (top_p, min_p) = (self.top_p, self.min_p);
        if top_p >= 1.0 && min_p <= 0.0 && top_k >= logits.len() {
            return all.collect();
        }
        // A heap instead of a sort: usually only a few of some 100,000 tokens are popped.
        let mut heap: BinaryHeap<Candidate> = all.collect();
        let weight = |logit: f32| f64::from(logit - largest).exp();
        let mut kept: Vec<Candidate> = Vec::new();
        if top_k < logits.len() {
            kept.extend(std::iter::from_fn(|| heap.pop()).take(top_k));
            heap = std::mem::take(&mut kept).into();
        }
        let enough = f64::from(top_p) * heap.iter().map(|candidate| weight(candidate.logit)).sum::<f64>();
        let mut sum = 0.0;
        while let Some(next) = heap.pop() {
            if weight(next.logit) < f64::from(min_p) {
                break;
            }
            kept.push(next);
            sum += weight(next.logit);
            if sum >= enough && top_p < 1.0 {
                break;
            }
        }
        kept
    }
}

fn best(logits: &[f32]) -> Result<Candidate, SampleError> {
    let mut best = Candidate { logit: f32::NEG_INFINITY, token: 0 };
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SampleError::InvalidLogit { token, logit });
        }
        let candidate = Candidate { logit, token: token as u32 };
        best = best.max(candidate);
    }
    if best.logit == f32::NEG_INFINITY { Err(SampleError::Nothing(logits.len())) } else { Ok(best) }
}

/// Draws a candidate with probability proportional to its weight.
fn draw(candidates: &[Candidate], weight: impl Fn(f32) -> f64, uniform: f32) -> Option<u32> {
    let total: f64 = candidates.iter().map(|candidate| weight(candidate.logit)).sum();
    let mut rest = f64::from(uniform) * total;
    for candidate in candidates {
        rest -= weight(candidate.logit);
        if rest < 0.0 {
            return Some(candidate.token);
        }
    }
    // Rounding errors may leave `rest` at or above 0 after the loop: take the last candidate with a weight.
    candidates.iter().rev().find(|candidate| weight(candidate.logit) > 0.0).map(|candidate| candidate.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW: f32 = f32::NEG_INFINITY;

    fn sampler(temperature: f32, top_k: usize, top_p: f32) -> Sampler {
        Sampler::new(temperature, NonZeroUsize::new(top_k), top_p, 7)
    }

    /// llama.cpp's rule, once for each of the last 64 tokens.
    #[test]
    fn repeated_tokens_are_less_likely() {
        let sampler = Sampler { repeat_penalty: 2.0, ..sampler(0.0, 0, 1.0) };
        let mut logits = [4.0, 3.0, -1.0, 0.5, LOW];
        let long: Vec<u32> = [1].into_iter().chain([0, 2, 4, 9].into_iter().cycle().take(64)).collect();
        sampler.penalise(&mut logits, &long);
        assert_eq!(logits, [2.0, 3.0, -2.0, 0.5, LOW]);
        assert_eq!(sampler.sample_on_host(&logits, 0.0), Ok(1));
    }

    #[test]
    fn greedy_sampling_breaks_ties_by_lowest_id() {
        let cases: [(&[f32], u32); 5] =
            [(&[1.0], 0), (&[1.0, 3.0, 3.0], 1), (&[-2.0, -1.0, -3.0], 1), (&[LOW, LOW, -9.0], 2), (&[-0.0, 0.0], 1)];
        for (logits, token) in cases {
            assert_eq!(sampler(0.0, 0, 0.5).sample_on_host(logits, 0.9), Ok(token), "{logits:?}");
        }
    }

    #[test]
    fn invalid_logits_are_rejected() {
        for sampler in [sampler(0.0, 0, 1.0), sampler(1.0, 0, 0.9)] {
            let error = sampler.sample_on_host(&[0.0, f32::NAN], 0.5).unwrap_err();
            assert!(matches!(error, SampleError::InvalidLogit { token: 1, .. }), "{error}");
            let infinite = SampleError::InvalidLogit { token: 0, logit: f32::INFINITY };
            assert_eq!(sampler.sample_on_host(&[f32::INFINITY, 0.0], 0.5), Err(infinite));
            assert_eq!(sampler.sample_on_host(&[], 0.5), Err(SampleError::Nothing(0)));
            assert_eq!(sampler.sample_on_host(&[LOW, LOW], 0.5), Err(SampleError::Nothing(2)));
        }
    }

    #[test]
    fn draw_frequencies_match_the_softmax() {
        const DRAWS: usize = 20_000;
        // Probabilities 0.1, 0.5, 0.4 and 0.
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.4f32.ln(), LOW];
        let squares = 0.01 + 0.25 + 0.16;
        let cases: [(f32, usize, f32, [f64; 4]); 8] = [
            (1.0, 0, 1.0, [0.1, 0.5, 0.4, 0.0]),
            (0.5, 0, 1.0, [0.01 / squares, 0.25 / squares, 0.16 / squares, 0.0]),
            (1.0, 0, 0.85, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
            // The temperature is applied after top-p.
            (0.5, 0, 0.85, [0.0, 0.25 / 0.41, 0.16 / 0.41, 0.0]),
            (1.0, 0, 0.3, [0.0, 1.0, 0.0, 0.0]),
            (1.0, 2, 1.0, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
            // Top-p counts what top-k has left.
            (1.0, 2, 0.55, [0.0, 1.0, 0.0, 0.0]),
            (1.0, 1, 1.0, [0.0, 1.0, 0.0, 0.0]),
        ];
        let cases = cases.map(|(temperature, top_k, top_p, expected)| (sampler(temperature, top_k, top_p), expected));
        let min_p = [
            (Sampler { min_p: 0.7, ..sampler(1.0, 0, 1.0) }, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
            (Sampler { min_p: 0.7, ..sampler(0.5, 3, 0.99) }, [0.0, 0.25 / 0.41, 0.16 / 0.41, 0.0]),
            (Sampler { min_p: 1.0, ..sampler(1.0, 0, 1.0) }, [0.0, 1.0, 0.0, 0.0]),
        ];
        for (sampler, expected) in cases.into_iter().chain(min_p) {
            let mut counts = [0.0; 4];
            for position in 0..DRAWS {
                let token = sampler.sample_on_host(&logits, sampler.uniform(0, position)).unwrap();
                counts[token as usize] += 1.0 / DRAWS as f64;
            }
            for (got, want) in counts.into_iter().zip(expected) {
                assert!((got - want).abs() < 0.015 && (want > 0.0 || got == 0.0), "{sampler:?}: {counts:?}");
            }
        }
    }

    #[test]
    fn uniform_numbers_depend_on_seed_sequence_and_position() {
        let number = |seed, sequence, position| Sampler::new(1.0, None, 1.0, seed).uniform(sequence, position);
        assert_eq!(number(3, 1, 2), number(3, 1, 2));
        for (seed, sequence, position) in [(4, 1, 2), (3, 2, 2), (3, 1, 3), (3, 2, 1)] {
            assert_ne!(number(3, 1, 2), number(seed, sequence, position));
        }
    }
}
