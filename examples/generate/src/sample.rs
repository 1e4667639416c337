//! From the logits of the last token to the next one.

use std::collections::BinaryHeap;

use thiserror::Error;

/// How to choose.
#[derive(Clone, Debug)]
pub enum Sampler {
    /// The token with the largest logit; of several, that with the lowest id.
    Greedy,
    /// At random, by probability.
    Random {
        /// Divides the logits: below 1 likely tokens become likelier, above 1 less so. Above 0.
        temperature: f32,
        /// Only the likeliest tokens are left that have this probability together, before the temperature; 1 leaves all.
        top_p: f32,
        /// Where chance comes from.
        rng: fastrand::Rng,
    },
}

/// Logits that say nothing.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SampleError {
    /// A logit that is no number, or infinite.
    #[error("the logit of token {token} is {logit}: the model's weights are damaged, or a device computes wrongly")]
    NotANumber {
        /// Whose.
        token: usize,
        /// NaN or infinity.
        logit: f32,
    },
    /// No logits, or none above minus infinity.
    #[error("no token is possible: none of {0} logits is above minus infinity")]
    Nothing(usize),
}

/// A token with its logit, in the order of choice.
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
        // No NaN gets here.
        self.logit.total_cmp(&other.logit).then(other.token.cmp(&self.token))
    }
}

impl Sampler {
    /// Greedy where the temperature is 0, else at random.
    pub fn new(temperature: f32, top_p: f32, seed: u64) -> Sampler {
        if temperature > 0.0 {
            Sampler::Random { temperature, top_p, rng: fastrand::Rng::with_seed(seed) }
        } else {
            Sampler::Greedy
        }
    }

    /// Chooses a token: its id is its place in `logits`.
    ///
    /// # Errors
    /// [`SampleError`] where the logits cannot be right.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let best = best(logits)?;
        match self {
            Sampler::Greedy => Ok(best.token),
            Sampler::Random { temperature, top_p, rng } => {
                let left = likeliest(logits, best.logit, *top_p);
                let scale = f64::from(*temperature);
                Ok(draw(&left, |logit| (f64::from(logit - best.logit) / scale).exp(), rng).unwrap_or(best.token))
            }
        }
    }
}

fn best(logits: &[f32]) -> Result<Candidate, SampleError> {
    let mut best = Candidate { logit: f32::NEG_INFINITY, token: 0 };
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SampleError::NotANumber { token, logit });
        }
        if logit > best.logit {
            best = Candidate { logit, token: token as u32 };
        }
    }
    if best.logit == f32::NEG_INFINITY { Err(SampleError::Nothing(logits.len())) } else { Ok(best) }
}

/// The likeliest tokens whose probabilities add up to `top_p`, at least one; likelier ones first, unless all are left.
fn likeliest(logits: &[f32], largest: f32, top_p: f32) -> Vec<Candidate> {
    let all = logits.iter().zip(0..).map(|(&logit, token)| Candidate { logit, token });
    if top_p >= 1.0 {
        return all.collect();
    }
    let weight = |logit: f32| f64::from(logit - largest).exp();
    let enough = f64::from(top_p) * logits.iter().map(|&logit| weight(logit)).sum::<f64>();
    // A heap, since few of a hundred thousand tokens are taken: the rest needs no order.
    let mut heap: BinaryHeap<Candidate> = all.collect();
    let (mut left, mut sum) = (Vec::new(), 0.0);
    while let Some(next) = heap.pop() {
        left.push(next);
        sum += weight(next.logit);
        if sum >= enough {
            break;
        }
    }
    left
}

/// One of the candidates, with a chance in proportion to its weight.
fn draw(candidates: &[Candidate], weight: impl Fn(f32) -> f64, rng: &mut fastrand::Rng) -> Option<u32> {
    let total: f64 = candidates.iter().map(|candidate| weight(candidate.logit)).sum();
    let mut rest = rng.f64() * total;
    for candidate in candidates {
        rest -= weight(candidate.logit);
        if rest < 0.0 {
            return Some(candidate.token);
        }
    }
    // Rounding may leave a rest.
    candidates.iter().rev().find(|candidate| weight(candidate.logit) > 0.0).map(|candidate| candidate.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW: f32 = f32::NEG_INFINITY;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let cases: [(&[f32], u32); 5] =
            [(&[1.0], 0), (&[1.0, 3.0, 3.0], 1), (&[-2.0, -1.0, -3.0], 1), (&[LOW, LOW, -9.0], 2), (&[-0.0, 0.0], 0)];
        for (logits, token) in cases {
            assert_eq!(Sampler::new(0.0, 0.5, 1).sample(logits), Ok(token), "{logits:?}");
        }
    }

    #[test]
    fn logits_that_say_nothing_are_refused() {
        for mut sampler in [Sampler::new(0.0, 1.0, 1), Sampler::new(1.0, 0.9, 1)] {
            let error = sampler.sample(&[0.0, f32::NAN]).unwrap_err();
            assert!(matches!(error, SampleError::NotANumber { token: 1, .. }), "{error}");
            let infinite = SampleError::NotANumber { token: 0, logit: f32::INFINITY };
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
    fn chances_are_those_of_the_softmax() {
        // Probabilities 0.1, 0.5, 0.4 and 0.
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.4f32.ln(), LOW];
        let squares = 0.01 + 0.25 + 0.16;
        let cases: [(f32, f32, [f64; 4]); 6] = [
            (1.0, 1.0, [0.1, 0.5, 0.4, 0.0]),
            (0.5, 1.0, [0.01 / squares, 0.25 / squares, 0.16 / squares, 0.0]),
            (1.0, 0.85, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
            // The temperature comes after.
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
    fn a_seed_gives_the_same_tokens_again() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(0.8, 0.95, seed);
            (0..50).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
