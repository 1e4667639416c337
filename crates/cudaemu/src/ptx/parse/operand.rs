//! Parser of instruction operands (PTX ISA, "Instruction Operands").

use super::Parser;
use super::constant::{Value, WARP_SIZE};
use crate::ptx::Error;
use crate::ptx::ast::{Name, Operand};
use crate::ptx::lexer::TokenKind;

impl Parser<'_> {
    /// An operand; in a call, parentheses enclose its arguments or results.
    pub(super) fn operand(&mut self, call: bool) -> Result<Operand, Error> {
        let operand = match self.token.kind {
            TokenKind::Punct("{") => Operand::Vector(self.operands("}")?),
            TokenKind::Punct("(") if call => return Ok(Operand::List(self.operands(")")?)),
            TokenKind::Punct("[") => return self.address(),
            _ => self.scalar()?,
        };
        if !matches!(operand, Operand::Name(_) | Operand::Sink | Operand::Vector(_)) || !self.eat("|")? {
            return Ok(operand);
        }
        match self.scalar()? {
            second @ (Operand::Name(_) | Operand::Sink) => Ok(Operand::Pair(Box::new(operand), Box::new(second))),
            _ => self.error("expected a register after `|`"),
        }
    }

    /// Parses `{a, b}` or `(a, b)` from its opening mark on.
    fn operands(&mut self, close: &str) -> Result<Vec<Operand>, Error> {
        self.bump()?;
        let mut all = Vec::new();
        while !self.is(close) {
            all.push(self.scalar()?);
            if !self.eat(",")? {
                break;
            }
        }
        match self.eat(close)? {
            true => Ok(all),
            false => self.expected(&format!("`,` or `{close}`")),
        }
    }

    /// A name, a constant, `!p`, `_` or `name+8`.
    fn scalar(&mut self) -> Result<Operand, Error> {
        match self.token.kind {
            TokenKind::Name("_") => {
                self.bump()?;
                Ok(Operand::Sink)
            }
            TokenKind::Name(name) if name != WARP_SIZE => {
                let name = self.register()?;
                let adds = self.is("+");
                let offset = self.offset()?;
                Ok(if adds { Operand::Offset(name, offset) } else { Operand::Name(name) })
            }
            TokenKind::Punct("!") => {
                self.bump()?;
                match self.token.kind {
                    TokenKind::Name(name) if name != WARP_SIZE => Ok(Operand::Not(self.register()?)),
                    _ => self.expected("a predicate after `!`"),
                }
            }
            TokenKind::F32(bits) => {
                self.bump()?;
                Ok(Operand::F32(bits))
            }
            TokenKind::Int { .. } | TokenKind::F64(_) | TokenKind::Name(_) | TokenKind::Punct("-") => {
                Ok(constant(self.constant()?))
            }
            _ => self.expected("an operand"),
        }
    }

    /// A name with its optional component: `%tid.x`.
    fn register(&mut self) -> Result<Name, Error> {
        let name = self.name("a name")?;
        match self.token.kind {
            TokenKind::DotWord(component) => {
                self.bump()?;
                Ok(self.intern(&format!("{name}.{component}")))
            }
            _ => Ok(name),
        }
    }

    /// `[base+offset]`
    fn address(&mut self) -> Result<Operand, Error> {
        self.bump()?;
        let base = match self.token.kind {
            TokenKind::Name(name) if name != WARP_SIZE => Some(self.register()?),
            _ => None,
        };
        let offset = match &base {
            Some(_) => self.offset()?,
            None => match self.constant()?.bits() {
                Some(bits) => bits as i64,
                None => return self.error("expected an integer address"),
            },
        };
        if self.is(",") {
            return self.error("addresses of several parts (tensors, textures) are not supported");
        }
        self.need("]")?;
        Ok(Operand::Address { base, offset })
    }
}

fn constant(value: Value) -> Operand {
    match value {
        Value::Int(value) => Operand::Int(value),
        Value::Float(value) => Operand::F64(value.to_bits()),
    }
}
