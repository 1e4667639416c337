//! The sampling of a run: the options, then for a chat what the file of the model recommends, then llama.cpp's defaults.

use super::{Args, part, penalty, probability, temperature, top_k};
use fanout::gguf::{KeyError, Metadata};
use std::num::NonZeroUsize;

impl Args {
    /// With all sampling options set. Without `--temp`, a text is greedy and a chat is sampled.
    ///
    /// # Errors
    /// The model recommends a value that the option does not accept.
    pub fn with_sampling(self, metadata: &Metadata<'_>) -> Result<Args, KeyError> {
        if !self.chat {
            return Ok(Args { temp: self.temperature.unwrap_or_default(), ..self });
        }
        let float = |option: Option<f32>, key, parse: fn(&str) -> Result<f32, String>, default| {
            let recommended = || recommended(key, metadata.float(key)?, parse);
            option.map_or_else(|| Ok(recommended()?.unwrap_or(default)), Ok)
        };
        let top_k = || {
            let key = "general.sampling.top_k";
            Ok(recommended(key, metadata.int(key)?, top_k)?.or(NonZeroUsize::new(40)))
        };
        Ok(Args {
            temp: float(self.temperature, "general.sampling.temp", temperature, 0.8)?,
            top_k: self.top_k.map_or_else(top_k, |k| Ok(Some(k)))?,
            top_p: Some(float(self.top_p, "general.sampling.top_p", probability, 0.95)?),
            min_p: Some(float(self.min_p, "general.sampling.min_p", part, 0.05)?),
            repeat_penalty: Some(float(self.repeat_penalty, "general.sampling.penalty_repeat", penalty, 1.0)?),
            ..self
        })
    }
}

/// The value of a key of the file, parsed as that of the option.
fn recommended<T>(
    key: &str,
    value: Option<impl ToString>,
    parse: fn(&str) -> Result<T, String>,
) -> Result<Option<T>, KeyError> {
    let parse = |text: String| {
        let wrong = |error: String| KeyError::WrongType {
            key: key.to_owned(),
            expected: error.trim_start_matches("expected ").to_owned(),
            found: text.clone(),
        };
        parse(&text).map_err(wrong)
    };
    value.map(|value| parse(value.to_string())).transpose()
}
