//! The sampling of a run: the options, then for a chat what the file of the model recommends, then llama.cpp's defaults.

use super::{Args, Sampling, penalty};
use fanout::gguf::Metadata;
use std::num::NonZeroUsize;

impl Args {
    /// With all sampling options set. Without `--temp`, a text is greedy and a chat is sampled.
    ///
    /// A recommendation that is out of range has the meaning that llama.cpp gives it; one that has none is ignored with a
    /// warning, because the model can be used without it.
    pub fn with_sampling(self, metadata: &Metadata<'_>) -> Args {
        if !self.chat {
            return Args { temp: self.temperature.unwrap_or_default(), ..self };
        }
        let recommended = |name, default: f32| {
            let number = metadata.float(&format!("general.sampling.{name}"));
            number.inspect_err(|e| ignored(&e.to_string())).ok().flatten().unwrap_or(default)
        };
        // Below the smallest temperature, llama.cpp's sampling takes the likeliest token, as ours does at 0.
        let temperature = |t: f32| if t < Sampling::MIN_TEMPERATURE { 0.0 } else { t };
        // Converts a negative number to 0.
        let top_k = |k: f32| NonZeroUsize::new(k as usize).unwrap_or(NonZeroUsize::MAX);
        let repeat_penalty = |x: f32| {
            let valid = penalty(&x.to_string());
            valid.inspect_err(|e| ignored(&format!("general.sampling.penalty_repeat: {e}, found {x}"))).unwrap_or(1.0)
        };
        // llama.cpp's -1: all tokens.
        let penalised_tokens = |n: f32| if n < 0.0 { usize::MAX } else { n as usize };
        Args {
            temp: self.temperature.unwrap_or_else(|| temperature(recommended("temp", 0.8))),
            top_k: self.top_k.or_else(|| Some(top_k(recommended("top_k", 40.0)))),
            top_p: self.top_p.or_else(|| Some(recommended("top_p", 0.95).clamp(f32::MIN_POSITIVE, 1.0))),
            min_p: self.min_p.or_else(|| Some(recommended("min_p", 0.05).clamp(0.0, 1.0))),
            repeat_penalty: self.repeat_penalty.or_else(|| Some(repeat_penalty(recommended("penalty_repeat", 1.0)))),
            penalised_tokens: penalised_tokens(recommended("penalty_last_n", self.penalised_tokens as f32)),
            ..self
        }
    }
}

/// Logs why a recommendation of the model is ignored.
fn ignored(problem: &str) {
    log::warn!("{problem}: this recommendation of the model is ignored");
}
