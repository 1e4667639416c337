//! Parser of constants (PTX ISA, "Constants"): numbers with a sign. Constant expressions are not supported, because compilers
//! evaluate them.

use super::Parser;
use crate::ptx::Error;
use crate::ptx::lexer::TokenKind;

/// The predefined constant for the lanes of a warp.
pub(super) const WARP_SIZE: &str = "WARP_SZ";

/// A constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    /// `.s64` or `.u64`
    Int(i128),
    /// `.f64`
    Float(f64),
}

impl Value {
    /// The bits of an integer; `None` for a float.
    pub(super) fn bits(self) -> Option<u64> {
        match self {
            Self::Int(value) => Some(value as u64),
            Self::Float(_) => None,
        }
    }
}

impl Parser<'_> {
    /// A number, which may have a sign.
    pub(super) fn constant(&mut self) -> Result<Value, Error> {
        let negative = self.eat("-")?;
        let value = match self.token.kind {
            TokenKind::Int { bits, unsigned } => {
                Value::Int(if unsigned { i128::from(bits) } else { i128::from(bits as i64) })
            }
            TokenKind::F64(value) => Value::Float(value),
            TokenKind::Name(WARP_SIZE) => Value::Int(32),
            _ => return self.expected("a number"),
        };
        self.bump()?;
        Ok(match value {
            Value::Int(value) if negative => Value::Int(-value),
            Value::Float(value) if negative => Value::Float(-value),
            value => value,
        })
    }

    /// An integer that is not negative.
    pub(super) fn count(&mut self) -> Result<u64, Error> {
        let start = self.token;
        match self.constant()? {
            Value::Int(value @ 0..) => Ok(value as u64),
            _ => {
                self.token = start;
                self.error("expected an integer that is not negative")
            }
        }
    }

    /// `+4`, `+-8` or nothing, after a name.
    pub(super) fn offset(&mut self) -> Result<i64, Error> {
        if !self.eat("+")? {
            return Ok(0);
        }
        match self.constant()?.bits() {
            Some(bits) => Ok(bits as i64),
            None => self.error("expected an integer offset before this, found a floating-point number"),
        }
    }
}
