//! The output of `--info`: architecture, sizes and tensor types of a model file.

use std::collections::BTreeMap;
use std::fmt;

use crate::hparams::HParams;
use fanout::gguf::Gguf;

/// Prints a file's architecture, sizes and tensors.
pub struct Summary<'a> {
    /// The parsed file.
    pub gguf: &'a Gguf<'a>,
    /// The model's hyperparameters.
    pub hparams: &'a HParams,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HParams { arch, layers, width, heads, kv_heads, head_width, ff, vocab, context, rope, .. } = self.hparams;
        writeln!(f, "architecture: {arch}, GGUF version {}", self.gguf.version)?;
        writeln!(f, "layers: {layers}, width {width}, {heads} heads of {head_width}, {kv_heads} of keys and values")?;
        match &self.hparams.experts {
            Some(e) => writeln!(f, "feed-forward: {} experts of {}, {} for each token", e.count, e.ff, e.used)?,
            None => writeln!(f, "feed-forward: {ff}")?,
        }
        writeln!(f, "vocabulary: {vocab}, context {context}")?;
        writeln!(f, "RoPE: {:?}, base {}, scale {}", rope.mode, rope.freq_base, rope.freq_scale)?;
        let bytes: usize = self.gguf.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        writeln!(f, "tensors: {}, {:.1} MB", self.gguf.tensors.len(), bytes as f64 / 1e6)?;
        let mut types = BTreeMap::<_, (usize, usize)>::new();
        for tensor in &self.gguf.tensors {
            let (count, bytes) = types.entry(tensor.dtype).or_default();
            (*count, *bytes) = (*count + 1, *bytes + tensor.bytes.len());
        }
        for (dtype, (count, bytes)) in types {
            writeln!(f, "  {dtype}: {count}, {:.1} MB", bytes as f64 / 1e6)?;
        }
        Ok(())
    }
}
