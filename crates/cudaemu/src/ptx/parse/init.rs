//! Parser of initialisers (PTX ISA, "Initializers"): flattens the braces of arrays.

use super::Parser;
use super::expr::{Value, WARP_SIZE};
use crate::ptx::Error;
use crate::ptx::ast::{Init, Type, Variable};
use crate::ptx::lexer::TokenKind;

/// Maximum number of zeros in a file that inner braces may leave out. Compilers write arrays in full.
const MAX_PADDING: u64 = 1 << 20;

impl Parser<'_> {
    /// Parses the initialiser after the `=` of a variable.
    pub(super) fn initialiser(&mut self, variable: &mut Variable) -> Result<(), Error> {
        let mut extents = variable.dims.clone();
        if variable.vector > 1 {
            extents.push(u64::from(variable.vector));
        }
        if !extents.is_empty() {
            self.need("{")?;
            return self.elements(&extents, variable.ty, &mut variable.init);
        }
        let element = self.element(variable.ty)?;
        variable.init.push(element);
        Ok(())
    }

    /// The elements of an array up to and including its `}`. Inner arrays have their own braces and may leave out elements at
    /// the end.
    fn elements(&mut self, extents: &[u64], ty: Type, out: &mut Vec<Init>) -> Result<(), Error> {
        let Some((&extent, inner_extents)) = extents.split_first() else { return self.need("}") };
        let inner: u64 = inner_extents.iter().product();
        let start = out.len() as u64;
        let mut count = 0u64;
        while !self.is("}") {
            if extent > 0 && count == extent {
                return self.error(format!("expected at most {extent} elements between these braces, found more"));
            }
            if inner_extents.is_empty() {
                let element = self.element(ty)?;
                out.push(element);
            } else {
                let missing = (start + count * inner).saturating_sub(out.len() as u64);
                self.padding = self.padding.saturating_add(missing);
                if self.padding > MAX_PADDING {
                    return self.error(format!("inner braces leave out over {MAX_PADDING} elements: write the zeros"));
                }
                out.resize_with(out.len() + missing as usize, || Init::Bits(0));
                self.need("{")?;
                self.elements(inner_extents, ty, out)?;
            }
            count += 1;
            if !self.eat(",")? {
                break;
            }
            if self.is("}") {
                return self.expected("an element after the comma");
            }
        }
        self.need("}")
    }

    /// One element.
    fn element(&mut self, ty: Type) -> Result<Init, Error> {
        let start = self.token;
        let value = match start.kind {
            TokenKind::Name(name) if name != WARP_SIZE => return self.symbol(0),
            TokenKind::F32(bits) => {
                self.bump()?;
                return match ty {
                    Type::B32 | Type::F32 => Ok(Init::Bits(u64::from(bits))),
                    Type::F64 => Ok(Init::Bits(f64::from(f32::from_bits(bits)).to_bits())),
                    _ => {
                        self.token = start;
                        self.expected("a number of the variable's type")
                    }
                };
            }
            TokenKind::Int { bits, unsigned } => {
                self.bump()?;
                if self.is("(") {
                    // 0xFF, 0xFF00, …: mask of one byte of an address.
                    if bits.count_ones() != 8 || bits.trailing_zeros() % 8 != 0 || bits >> bits.trailing_zeros() != 0xFF
                    {
                        self.token = start;
                        return self.expected("a mask of one byte such as 0xFF00");
                    }
                    self.bump()?;
                    let symbol = self.symbol(bits)?;
                    self.need(")")?;
                    return Ok(symbol);
                }
                self.expr_from(if unsigned { Value::Unsigned(bits) } else { Value::Signed(bits as i64) })?
            }
            _ => self.expr()?,
        };
        match bits(value, ty) {
            Some(bits) => Ok(Init::Bits(bits)),
            None => {
                self.token = start;
                self.expected("a number of the variable's type")
            }
        }
    }

    /// `name`, `name+8`, `generic(name)`, `generic(name)+8`; if `mask` is not 0, only the byte of the address in the mask.
    fn symbol(&mut self, mask: u64) -> Result<Init, Error> {
        let mut name = self.name("the name of a variable or function")?;
        let generic = &*name == "generic" && self.eat("(")?;
        if generic {
            name = self.name("the name of a variable")?;
            self.need(")")?;
        }
        let offset = self.offset()?;
        Ok(Init::Symbol { name, offset, generic, mask })
    }
}

/// The bits of a constant in an element of this type; `None` if PTX does not allow the constant there.
fn bits(value: Value, ty: Type) -> Option<u64> {
    match (ty, value) {
        (Type::F32, Value::Float(value)) => Some(u64::from((value as f32).to_bits())),
        (Type::F64 | Type::B64, Value::Float(value)) => Some(value.to_bits()),
        (Type::F32 | Type::F64, _) => None,
        (Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 | Type::B128 | Type::Pred, _) => None,
        _ => value.bits().map(|bits| bits & u64::MAX >> (64 - 8 * ty.bytes())),
    }
}
