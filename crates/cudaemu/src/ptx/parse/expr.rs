//! Parser of constant expressions (PTX ISA, "Constant Expressions"), which evaluates them in 64 bits while parsing.

use super::Parser;
use crate::ptx::Error;
use crate::ptx::lexer::TokenKind;
use std::cmp::Ordering;

/// The predefined constant for the lanes of a warp.
pub(super) const WARP_SIZE: &str = "WARP_SZ";

/// Precedence of `+` and `-`.
const SUM: u8 = 8;

/// A constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    /// `.s64`
    Signed(i64),
    /// `.u64`
    Unsigned(u64),
    /// `.f64`
    Float(f64),
}

impl Value {
    /// The bits of an integer; `None` for a float.
    pub(super) fn bits(self) -> Option<u64> {
        match self {
            Self::Signed(value) => Some(value as u64),
            Self::Unsigned(value) => Some(value),
            Self::Float(_) => None,
        }
    }

    fn float(self) -> f64 {
        match self {
            Self::Signed(value) => value as f64,
            Self::Unsigned(value) => value as f64,
            Self::Float(value) => value,
        }
    }

    /// `!value`
    pub(super) fn not(self) -> Self {
        Self::from(!self.is_true())
    }

    fn is_true(self) -> bool {
        self.float() != 0.0
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Signed(i64::from(value))
    }
}

/// Text and precedence of a binary operator.
fn precedence(kind: TokenKind<'_>) -> Option<(&'static str, u8)> {
    let TokenKind::Punct(mark) = kind else { return None };
    let precedence = match mark {
        "||" => 0,
        "&&" => 1,
        "|" => 2,
        "^" => 3,
        "&" => 4,
        "==" | "!=" => 5,
        "<" | "<=" | ">" | ">=" => 6,
        "<<" | ">>" => 7,
        "+" | "-" => SUM,
        "*" | "/" | "%" => 9,
        _ => return None,
    };
    Some((mark, precedence))
}

impl Parser<'_> {
    /// An expression.
    pub(super) fn expr(&mut self) -> Result<Value, Error> {
        self.deeper(|p| {
            let first = p.unary()?;
            p.expr_from(first)
        })
    }

    /// The rest of an expression whose first number is already consumed.
    pub(super) fn expr_from(&mut self, first: Value) -> Result<Value, Error> {
        let value = self.binary_from(first, 0)?;
        if !self.eat("?")? {
            return Ok(value);
        }
        let yes = self.expr()?;
        self.need(":")?;
        let no = self.expr()?;
        // The result has the common type of both branches.
        let (chosen, other) = if value.is_true() { (yes, no) } else { (no, yes) };
        Ok(match (chosen, other) {
            (_, Value::Float(_)) => Value::Float(chosen.float()),
            (Value::Signed(value), Value::Unsigned(_)) => Value::Unsigned(value as u64),
            _ => chosen,
        })
    }

    /// An integer expression without comparisons, so that a `>` ends it.
    pub(super) fn count(&mut self) -> Result<u64, Error> {
        let start = self.token;
        let first = self.unary()?;
        let value = self.binary_from(first, SUM)?;
        match value {
            Value::Signed(0..) | Value::Unsigned(_) => Ok(value.bits().unwrap_or(0)),
            Value::Signed(_) | Value::Float(_) => {
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
        let first = self.unary()?;
        match self.binary_from(first, SUM)?.bits() {
            Some(bits) => Ok(bits as i64),
            None => self.error("expected an integer offset before this, found a floating-point number"),
        }
    }

    /// Parses operators of at least this precedence after `left`.
    fn binary_from(&mut self, mut left: Value, lowest: u8) -> Result<Value, Error> {
        while let Some((operator, precedence)) = precedence(self.token.kind) {
            if precedence < lowest {
                break;
            }
            self.bump()?;
            let first = self.unary()?;
            let right = self.binary_from(first, precedence + 1)?;
            left = match binary(operator, left, right) {
                Ok(value) => value,
                Err(why) => return self.error(why),
            };
        }
        Ok(left)
    }

    /// A number, or an operator with its number.
    pub(super) fn unary(&mut self) -> Result<Value, Error> {
        let kind = self.token.kind;
        if !matches!(
            kind,
            TokenKind::Punct("+" | "-" | "!" | "~" | "(")
                | TokenKind::Int { .. }
                | TokenKind::F64(_)
                | TokenKind::Name(WARP_SIZE)
        ) {
            return self.expected("a number");
        }
        self.bump()?;
        match kind {
            TokenKind::Int { bits, unsigned: true } => Ok(Value::Unsigned(bits)),
            TokenKind::Int { bits, .. } => Ok(Value::Signed(bits as i64)),
            TokenKind::F64(value) => Ok(Value::Float(value)),
            TokenKind::Name(_) => Ok(Value::Signed(32)),
            TokenKind::Punct("(") if self.eat_word("s64")? => {
                self.need(")")?;
                let value = self.deeper(Self::unary)?;
                Ok(Value::Signed(value.bits().map_or_else(|| value.float() as i64, |bits| bits as i64)))
            }
            TokenKind::Punct("(") if self.eat_word("u64")? => {
                self.need(")")?;
                let value = self.deeper(Self::unary)?;
                Ok(Value::Unsigned(value.bits().unwrap_or_else(|| value.float() as u64)))
            }
            TokenKind::Punct("(") => {
                let value = self.expr()?;
                self.need(")")?;
                Ok(value)
            }
            TokenKind::Punct(operator) => {
                let value = self.deeper(Self::unary)?;
                match (operator, value) {
                    ("+", value) => Ok(value),
                    ("-", Value::Float(value)) => Ok(Value::Float(-value)),
                    // The most negative integer is written as minus its magnitude, and the magnitude alone is unsigned.
                    ("-", Value::Unsigned(0x8000_0000_0000_0000)) => Ok(Value::Signed(i64::MIN)),
                    ("-", Value::Unsigned(value)) => Ok(Value::Unsigned(value.wrapping_neg())),
                    ("-", Value::Signed(value)) => Ok(Value::Signed(value.wrapping_neg())),
                    ("!", value) => Ok(value.not()),
                    (_, value) => match value.bits() {
                        Some(bits) => Ok(Value::Unsigned(!bits)),
                        None => {
                            self.error(format!("expected an integer after `{operator}`, found a floating-point number"))
                        }
                    },
                }
            }
            _ => self.expected("a number"),
        }
    }
}

/// PTX ISA, "Summary of Constant Expression Evaluation Rules".
fn binary(operator: &str, a: Value, b: Value) -> Result<Value, String> {
    let order = |order: Option<Ordering>| match operator {
        "==" => order == Some(Ordering::Equal),
        "!=" => order != Some(Ordering::Equal),
        "<" => order == Some(Ordering::Less),
        "<=" => matches!(order, Some(Ordering::Less | Ordering::Equal)),
        ">" => order == Some(Ordering::Greater),
        _ => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
    };
    let compares = matches!(operator, "==" | "!=" | "<" | "<=" | ">" | ">=");
    match operator {
        "&&" => return Ok(Value::from(a.is_true() && b.is_true())),
        "||" => return Ok(Value::from(a.is_true() || b.is_true())),
        _ => {}
    }
    let (Some(x), Some(y)) = (a.bits(), b.bits()) else {
        let (x, y) = (a.float(), b.float());
        return Ok(Value::Float(match operator {
            "+" => x + y,
            "-" => x - y,
            "*" => x * y,
            "/" => x / y,
            _ if compares => return Ok(Value::from(order(x.partial_cmp(&y)))),
            _ => return Err(format!("expected integers around `{operator}`, found a floating-point number")),
        }));
    };
    let signed = matches!((a, b), (Value::Signed(_), Value::Signed(_)));
    let number = |bits: u64| if signed { Value::Signed(bits as i64) } else { Value::Unsigned(bits) };
    Ok(match operator {
        "+" => number(x.wrapping_add(y)),
        "-" => number(x.wrapping_sub(y)),
        "*" => number(x.wrapping_mul(y)),
        "/" | "%" if y == 0 => return Err(format!("expected a number that is not zero after `{operator}`")),
        "/" if signed => Value::Signed((x as i64).wrapping_div(y as i64)),
        "%" if signed => Value::Signed((x as i64).wrapping_rem(y as i64)),
        "/" => Value::Unsigned(x / y),
        "%" => Value::Unsigned(x % y),
        // Shifts keep the type of the left operand; the count is unsigned.
        "<<" | ">>" => match (operator, a) {
            ("<<", Value::Signed(_)) => Value::Signed(if y < 64 { x << y } else { 0 } as i64),
            ("<<", _) => Value::Unsigned(if y < 64 { x << y } else { 0 }),
            (_, Value::Signed(value)) => Value::Signed(value >> y.min(63)),
            _ => Value::Unsigned(if y < 64 { x >> y } else { 0 }),
        },
        "&" => Value::Unsigned(x & y),
        "|" => Value::Unsigned(x | y),
        "^" => Value::Unsigned(x ^ y),
        _ if compares && signed => Value::from(order((x as i64).partial_cmp(&(y as i64)))),
        _ => Value::from(order(x.partial_cmp(&y))),
    })
}
