//! op_params: the 16 words of 32 bits in which a tensor record carries an op's parameters.

use super::OpCode;
use thiserror::Error;

/// The parameter words of a node, read as i32 or as f32 bit patterns.
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

/// A parameter outside what its op defines: the peer's fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{op}: parameter word {word} ({name}) is {got}, expected {expected}")]
pub struct ParamError {
    /// The op whose parameter it is.
    pub op: OpCode,
    /// Index of the word in op_params.
    pub word: usize,
    /// The parameter's name.
    pub name: &'static str,
    /// The value that came, as text.
    pub got: String,
    /// What the op defines.
    pub expected: &'static str,
}

impl ParamError {
    /// An error about word `word`, called `name`.
    pub fn new(op: OpCode, word: usize, name: &'static str, got: impl ToString, expected: &'static str) -> ParamError {
        ParamError { op, word, name, got: got.to_string(), expected }
    }
}
