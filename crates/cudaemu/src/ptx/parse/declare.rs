//! Parser of variables, parameters and registers (PTX ISA, "State Spaces, Types, and Variables").

use super::Parser;
use crate::ptx::Error;
use crate::ptx::ast::{Linkage, Name, Space, Statement, Type, Variable};
use crate::ptx::lexer::TokenKind;

/// Maximum size of a variable in bytes: larger than any device's memory, and small enough that sums of sizes do not overflow.
const MAX_BYTES: u64 = 1 << 40;
/// Maximum alignment in bytes.
const MAX_ALIGN: u64 = 1 << 20;
/// Maximum dimensions of an array.
const MAX_DIMS: usize = 16;
/// Maximum registers of one `%r<n>`. The largest compiled kernels have some ten thousand.
const MAX_REGISTERS: u64 = 1 << 20;

/// The part of a declaration between the state space and the name.
#[derive(Clone, Copy, Debug)]
struct Shape {
    ty: Type,
    vector: u32,
    align: u32,
}

fn type_of(word: &str) -> Option<Type> {
    Some(match word {
        "b8" => Type::B8,
        "b16" => Type::B16,
        "b32" => Type::B32,
        "b64" => Type::B64,
        "u8" => Type::U8,
        "u16" => Type::U16,
        "u32" => Type::U32,
        "u64" => Type::U64,
        "s8" => Type::S8,
        "s16" => Type::S16,
        "s32" => Type::S32,
        "s64" => Type::S64,
        "f16" => Type::F16,
        "f16x2" => Type::F16x2,
        "bf16" => Type::BF16,
        "bf16x2" => Type::BF16x2,
        "f32" => Type::F32,
        "f64" => Type::F64,
        "pred" => Type::Pred,
        _ => return None,
    })
}

fn space_of(word: &str) -> Option<Space> {
    Some(match word {
        "reg" => Space::Reg,
        "const" => Space::Const,
        "global" => Space::Global,
        "local" => Space::Local,
        "param" => Space::Param,
        "shared" => Space::Shared,
        _ => return None,
    })
}

impl Parser<'_> {
    /// The state space at the next token, which is not consumed.
    pub(super) fn space(&self) -> Option<Space> {
        match self.token.kind {
            TokenKind::DotWord(word) => space_of(word),
            _ => None,
        }
    }

    /// `.global .align 4 .u32 a, b[2] = {1, 2};`: parses from its state space `space` (the next token) to the `;`.
    pub(super) fn variables(
        &mut self,
        space: Space,
        linkage: Linkage,
        mut push: impl FnMut(Variable),
    ) -> Result<(), Error> {
        self.bump()?;
        let shape = self.shape(space)?;
        loop {
            let line = self.token.line;
            let name = self.name("the name of a variable")?;
            let mut variable = self.variable(name, space, shape, line)?;
            variable.linkage = linkage;
            if self.is("=") {
                if !matches!(space, Space::Global | Space::Const) {
                    return self.error("only variables in .global and .const may have an initialiser");
                }
                self.bump()?;
                self.initialiser(&mut variable)?;
            }
            push(variable);
            if !self.eat(",")? {
                return self.need(";");
            }
        }
    }

    /// `.reg .b32 a, %r<10>;`
    pub(super) fn registers(&mut self, out: &mut Vec<Statement>) -> Result<(), Error> {
        self.bump()?;
        let Shape { ty, vector, .. } = self.shape(Space::Reg)?;
        if vector > 1 {
            return self.error("vector registers are not supported");
        }
        loop {
            let line = self.token.line;
            let name = self.name("the name of a register")?;
            let mut count = None;
            if self.eat("<")? {
                let start = self.token;
                let number = self.count()?;
                if number > MAX_REGISTERS {
                    self.token = start;
                    return self.error(format!("expected at most {MAX_REGISTERS} registers, found {number}"));
                }
                count = u32::try_from(number).ok();
                self.need(">")?;
            }
            out.push(Statement::Registers { ty, name, count, line });
            if !self.eat(",")? {
                return self.need(";");
            }
        }
    }

    /// `(.param .b32 a, .reg .u64 b)`
    pub(super) fn parameters(&mut self) -> Result<Vec<Variable>, Error> {
        self.need("(")?;
        let mut all = Vec::new();
        while !self.is(")") {
            let Some(space @ (Space::Param | Space::Reg)) = self.space() else {
                return self.expected("`.param`, `.reg` or `)`");
            };
            self.bump()?;
            let shape = self.shape(space)?;
            let line = self.token.line;
            let name = self.name("the name of a parameter")?;
            all.push(self.variable(name, space, shape, line)?);
            if !self.eat(",")? {
                break;
            }
        }
        self.need(")")?;
        Ok(all)
    }

    /// `.align 16 .v4 .f32`; for a parameter also the attributes of its pointer (`.ptr .global .align 4`), which have no
    /// effect.
    fn shape(&mut self, space: Space) -> Result<Shape, Error> {
        let (mut ty, mut vector, mut align) = (None, None, None);
        while let TokenKind::DotWord(word) = self.token.kind {
            match (word, type_of(word)) {
                ("align", _) if align.is_none() && ty.is_none() => {
                    self.bump()?;
                    align = Some(self.alignment()?);
                    continue;
                }
                ("ptr", _) if space == Space::Param && ty.is_some() => {
                    self.bump()?;
                    if matches!(self.space(), Some(Space::Const | Space::Global | Space::Local | Space::Shared)) {
                        self.bump()?;
                    }
                    if self.eat_word("align")? {
                        self.alignment()?;
                    }
                    continue;
                }
                ("v2", _) if vector.is_none() && ty.is_none() => vector = Some(2),
                ("v4", _) if vector.is_none() && ty.is_none() => vector = Some(4),
                (_, Some(found)) if ty.is_none() => ty = Some(found),
                ("texref" | "samplerref" | "surfref", _) => {
                    return self.error("textures, samplers and surfaces are not supported");
                }
                _ => return self.expected("a type, `.align` or a name"),
            }
            self.bump()?;
        }
        let Some(ty) = ty else { return self.expected("the type of a declaration") };
        let vector = vector.unwrap_or(1);
        if vector > 1 && !(1..=16).contains(&(ty.bytes() * vector)) {
            return self.error("expected a vector of at most 128 bits whose elements are not predicates");
        }
        if ty == Type::Pred && space != Space::Reg {
            return self.error("expected a type that memory can hold, found `.pred` (only `.reg` may have it)");
        }
        Ok(Shape { ty, vector, align: align.unwrap_or(0) })
    }

    /// The number after `.align`.
    fn alignment(&mut self) -> Result<u32, Error> {
        let start = self.token;
        match self.count()? {
            bytes @ 1..=MAX_ALIGN if bytes.is_power_of_two() => Ok(bytes as u32),
            bytes => {
                self.token = start;
                self.error(format!("expected an alignment that is a power of two up to {MAX_ALIGN}, found {bytes}"))
            }
        }
    }

    /// A variable after its name: parses its array extents.
    fn variable(&mut self, name: Name, space: Space, shape: Shape, line: u32) -> Result<Variable, Error> {
        let Shape { ty, vector, align } = shape;
        let mut bytes = u64::from(ty.bytes()) * u64::from(vector);
        let mut dims = Vec::new();
        while self.is("[") {
            if space == Space::Reg {
                return self.error("expected a register, found an array");
            }
            if dims.len() == MAX_DIMS {
                return self.error(format!("expected at most {MAX_DIMS} dimensions"));
            }
            self.bump()?;
            let extent = if self.is("]") { 0 } else { self.count()? };
            if extent == 0 && !dims.is_empty() {
                return self.error("expected the extent of an inner dimension, which must not be zero");
            }
            self.need("]")?;
            dims.push(extent);
            bytes = match bytes.checked_mul(extent.max(1)) {
                Some(bytes) if bytes <= MAX_BYTES => bytes,
                _ => {
                    return self.error(format!("expected a variable of at most {MAX_BYTES} bytes, found a larger one"));
                }
            };
        }
        Ok(Variable { name, space, ty, vector, align, dims, init: Vec::new(), linkage: Linkage::Internal, line })
    }
}
