//! op_params: the encoded parameters of an op, 16 words of 32 bits in each tensor record of ggml's protocol.

use super::OpCode;
use thiserror::Error;

/// The encoded parameters of a node; each word is an i32 or the bit pattern of an f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpParams(pub [i32; 16]);

impl OpParams {
    /// Word `k` as an integer.
    pub fn int(&self, k: usize) -> i32 {
        self.0[k]
    }

    /// Word `k` as a float.
    pub fn float(&self, k: usize) -> f32 {
        f32::from_bits(self.0[k] as u32)
    }

    /// Sets word `k` to an integer.
    #[must_use]
    pub fn with_int(mut self, k: usize, value: i32) -> OpParams {
        self.0[k] = value;
        self
    }

    /// Sets word `k` to a float's bit pattern.
    #[must_use]
    pub fn with_float(mut self, k: usize, value: f32) -> OpParams {
        self.0[k] = value.to_bits() as i32;
        self
    }
}

/// A parameter has a value that its op does not define: an error of the peer that sent it.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{op}: parameter word {word} ({name}) is {got}, expected {expected}")]
pub struct ParamError {
    /// The op.
    pub op: OpCode,
    /// Index of the word in op_params.
    pub word: usize,
    /// The parameter's name.
    pub name: &'static str,
    /// The received value, as text.
    pub got: String,
    /// The values that the op defines.
    pub expected: &'static str,
}

impl ParamError {
    /// An error for the parameter `name` in word `word`.
    pub fn new(op: OpCode, word: usize, name: &'static str, got: impl ToString, expected: &'static str) -> ParamError {
        ParamError { op, word, name, got: got.to_string(), expected }
    }
}
