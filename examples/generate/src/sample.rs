//! Token sampling: picks the next token from logits, greedily or at random with temperature and top-p.

use std::collections::BinaryHeap;

use thiserror::Error;

/// A sampling method.
#[derive(Clone, Debug)]
pub enum Sampler {
    /// The token with the largest logit; ties go to the lowest id.
    Greedy,
    /// A random token, drawn by probability.
    Random {
        /// Divisor of the logits, above 0: values below 1 make likely tokens likelier, values above 1 flatten the distribution.
        temperature: f32,
        /// Top-p (nucleus) sampling: keeps only the smallest set of likely tokens with this total probability. Applied before
        /// the temperature; 1 keeps all tokens.
        top_p: f32,
        /// The seeded random number generator.
        rng: fastrand::Rng,
    },
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
/// lowest id. -0 is below 0 here, while [`best`] takes them as equal.
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
    /// Greedy if the temperature is 0, else random.
    pub fn new(temperature: f32, top_p: f32, seed: u64) -> Sampler {
        if temperature > 0.0 {
            Sampler::Random { temperature, top_p, rng: fastrand::Rng::with_seed(seed) }
        } else {
            Sampler::Greedy
        }
    }

    /// Picks a token; returns its id, the index in `logits`.
    ///
    /// # Errors
    /// [`SampleError`] if a logit is NaN or plus infinity, and when no logit is above minus infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let best = best(logits)?;
        match self {
            Sampler::Greedy => Ok(best.token),
            Sampler::Random { temperature, top_p, rng } => {
                let kept = likeliest(logits, best.logit, *top_p);
                let scale = f64::from(*temperature);
                Ok(draw(&kept, |logit| (f64::from(logit - best.logit) / scale).exp(), rng).unwrap_or(best.token))
            }
        }
    }
}

fn best(logits: &[f32]) -> Result<Candidate, SampleError> {
    let mut best = Candidate { logit: f32::NEG_INFINITY, token: 0 };
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SampleError::InvalidLogit { token, logit });
        }
        if logit > best.logit {
            best = Candidate { logit, token: token as u32 };
        }
    }
    if best.logit == f32::NEG_INFINITY { Err(SampleError::Nothing(logits.len())) } else { Ok(best) }
}

/// The smallest set of likely tokens with the total probability `top_p`, at least one token, in descending order. If `top_p` is
/// 1, all tokens in the order of their ids.
fn likeliest(logits: &[f32], largest: f32, top_p: f32) -> Vec<Candidate> {
    let all = logits.iter().zip(0..).map(|(&logit, token)| Candidate { logit, token });
    if top_p >= 1.0 {
        return all.collect();
    }
    let weight = |logit: f32| f64::from(logit - largest).exp();
    let enough = f64::from(top_p) * logits.iter().map(|&logit| weight(logit)).sum::<f64>();
    // A heap instead of a sort: usually only a few of some 100,000 tokens are popped.
    let mut heap: BinaryHeap<Candidate> = all.collect();
    let (mut kept, mut sum) = (Vec::new(), 0.0);
    while let Some(next) = heap.pop() {
        kept.push(next);
        sum += weight(next.logit);
        if sum >= enough {
            break;
        }
    }
    kept
}

/// Draws a candidate with probability proportional to its weight.
fn draw(candidates: &[Candidate], weight: impl Fn(f32) -> f64, rng: &mut fastrand::Rng) -> Option<u32> {
    let total: f64 = candidates.iter().map(|candidate| weight(candidate.logit)).sum();
    let mut rest = rng.f64() * total;
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

    #[test]
    fn greedy_sampling_breaks_ties_by_lowest_id() {
        let cases: [(&[f32], u32); 5] =
            [(&[1.0], 0), (&[1.0, 3.0, 3.0], 1), (&[-2.0, -1.0, -3.0], 1), (&[LOW, LOW, -9.0], 2), (&[-0.0, 0.0], 0)];
        for (logits, token) in cases {
            assert_eq!(Sampler::new(0.0, 0.5, 1).sample(logits), Ok(token), "{logits:?}");
        }
    }

    #[test]
    fn invalid_logits_are_rejected() {
        for mut sampler in [Sampler::new(0.0, 1.0, 1), Sampler::new(1.0, 0.9, 1)] {
            let error = sampler.sample(&[0.0, f32::NAN]).unwrap_err();
            assert!(matches!(error, SampleError::InvalidLogit { token: 1, .. }), "{error}");
            let infinite = SampleError::InvalidLogit { token: 0, logit: f32::INFINITY };
            assert_eq!(sampler.sample(&[f32::INFINITY, 0.0]), Err(infinite));
            assert_eq!(sampler.sample(&[]), Err(SampleError::Nothing(0)));
            assert_eq!(sampler.sample(&[LOW, LOW]), Err(SampleError::Nothing(2)));
        }
    }

    fn counts(temperature: f32, top_p: f32, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut sampler = Sampler::new(temperature, top_p, 7);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(logits).unwrap() as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn draw_frequencies_match_the_softmax() {
        // Probabilities 0.1, 0.5, 0.4 and 0.
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.4f32.ln(), LOW];
        let squares = 0.01 + 0.25 + 0.16;
        let cases: [(f32, f32, [f64; 4]); 6] = [
            (1.0, 1.0, [0.1, 0.5, 0.4, 0.0]),
            (0.5, 1.0, [0.01 / squares, 0.25 / squares, 0.16 / squares, 0.0]),
            (1.0, 0.85, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
            // The temperature is applied after top-p.
            (0.5, 0.85, [0.0, 0.25 / 0.41, 0.16 / 0.41, 0.0]),
            (1.0, 0.3, [0.0, 1.0, 0.0, 0.0]),
            (1.0, 0.0, [0.0, 1.0, 0.0, 0.0]),
        ];
        for (temperature, top_p, expected) in cases {
            let counts = counts(temperature, top_p, &logits);
            for (got, want) in counts.iter().zip(expected) {
                assert!((got - want).abs() < 0.015 && (want > 0.0 || *got == 0.0), "{temperature} {top_p}: {counts:?}");
            }
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(0.8, 0.95, seed);
            (0..50).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
