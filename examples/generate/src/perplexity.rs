//! Perplexity of a text: how well the model predicts each of its tokens from those before. `scripts/real-models.sh` compares it with
//! llama.cpp's.

use crate::session::Session;
use anyhow::ensure;
use std::io::Write;

/// Evaluates the tokens one by one, and writes the perplexity of all but the first.
///
/// # Errors
/// As [`Session::append`], fewer than two tokens, a logit that is NaN, and a failed write to `out`.
pub fn write(session: &mut Session<'_>, tokens: &[u32], out: &mut dyn Write) -> anyhow::Result<()> {
    ensure!(tokens.len() > 1, "a text of {} tokens has no perplexity: give a longer one", tokens.len());
    let mut sum = 0.0;
    for pair in tokens.windows(2) {
        let log = log_probability(&session.append_for_logits(&pair[..1])?, pair[1]);
        log::debug!("token {} has the log probability {log:.5}", pair[1]);
        sum -= log;
    }
    ensure!(!sum.is_nan(), "a logit is NaN: the model's weights are damaged, or a device computes wrongly");
    let count = tokens.len() - 1;
    Ok(writeln!(out, "perplexity {:.4} of {count} tokens", (sum / count as f64).exp())?)
}

/// The logarithm of a token's probability; minus infinity for an id outside the vocabulary.
fn log_probability(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    logits.get(token as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit) - largest - sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let parts = [0.1f32, 0.5, 0.4];
        // A constant does not change the softmax.
        for shift in [0.0, 300.0, -300.0] {
            let logits = parts.map(|part| part.ln() + shift);
            for (token, part) in (0..).zip(parts) {
                let found = log_probability(&logits, token).exp();
                assert!((found - f64::from(part)).abs() < 1e-4, "{shift} {token}: {found}");
            }
        }
        assert_eq!(log_probability(&[0.0], 1), f64::NEG_INFINITY);
    }
}
