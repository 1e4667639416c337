//! Parser of initialisers (PTX ISA, "Initializers"): a number, or an array of numbers.

use super::Parser;
use super::constant::Value;
use crate::ptx::Error;
use crate::ptx::ast::{Type, Variable};
use crate::ptx::lexer::TokenKind;

impl Parser<'_> {
    /// Parses the initialiser after the `=` of a variable.
    pub(super) fn initialiser(&mut self, variable: &mut Variable) -> Result<(), Error> {
        let extent = match variable.dims[..] {
            [] if variable.vector == 1 => {
                variable.init.push(self.element(variable.ty)?);
                return Ok(());
            }
            [extent] if variable.vector == 1 => extent,
            _ => return self.error("initialisers of arrays with several dimensions and of vectors are not supported"),
        };
        self.need("{")?;
        while !self.is("}") {
            if extent > 0 && variable.init.len() as u64 == extent {
                return self.error(format!("expected at most {extent} elements between these braces, found more"));
            }
            let element = self.element(variable.ty)?;
            variable.init.push(element);
            if !self.eat(",")? {
                break;
            }
            if self.is("}") {
                return self.expected("an element after the comma");
            }
        }
        self.need("}")
    }

    /// The bits of one element.
    fn element(&mut self, ty: Type) -> Result<u64, Error> {
        let start = self.token;
        let bits = match start.kind {
            TokenKind::F32(bits) => {
                self.bump()?;
                matches!(ty, Type::B32 | Type::F32).then_some(u64::from(bits))
            }
            _ => bits(self.constant()?, ty),
        };
        match bits {
            Some(bits) => Ok(bits),
            None => {
                self.token = start;
                self.expected("a number of the variable's type")
            }
        }
    }
}

/// The bits of a constant in an element of this type; `None` if PTX does not allow the constant there.
fn bits(value: Value, ty: Type) -> Option<u64> {
    match (ty, value) {
        (Type::F32, Value::Float(value)) => Some(u64::from((value as f32).to_bits())),
        (Type::F64 | Type::B64, Value::Float(value)) => Some(value.to_bits()),
        (Type::F32 | Type::F64, _) => None,
        (Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 | Type::Pred, _) => None,
        _ => value.bits().map(|bits| bits & u64::MAX >> (64 - 8 * ty.bytes())),
    }
}
