//! Parser of statements in a function body (PTX ISA, "Statements").

use super::Parser;
use crate::ptx::Error;
use crate::ptx::ast::{Instruction, Name, Space, Statement};
use crate::ptx::lexer::TokenKind;

impl Parser<'_> {
    /// `{ … }`
    pub(super) fn block(&mut self) -> Result<Vec<Statement>, Error> {
        self.deeper(|p| {
            let line = p.token.line;
            p.need("{")?;
            let mut statements = Vec::new();
            while !p.is("}") {
                if p.token.kind == TokenKind::End {
                    return p.expected(&format!("`}}` for the `{{` of line {line}"));
                }
                p.statement(&mut statements)?;
            }
            p.bump()?;
            Ok(statements)
        })
    }

    fn statement(&mut self, out: &mut Vec<Statement>) -> Result<(), Error> {
        match self.token.kind {
            TokenKind::Punct("{") => out.push(Statement::Block(self.block()?)),
            TokenKind::Punct("@") => {
                self.bump()?;
                let negated = self.eat("!")?;
                let predicate = self.name("a predicate")?;
                self.instruction(Some((predicate, negated)), out)?;
            }
            TokenKind::Name(name) => {
                let first = self.bump()?;
                if self.eat(":")? {
                    let label = self.intern(name);
                    out.push(Statement::Label(label, first.line));
                    return Ok(());
                }
                self.opcode(None, name, first.line, out)?;
            }
            TokenKind::DotWord(_) => self.directive(out)?,
            _ => return self.expected("an instruction, a label, a declaration or `}`"),
        }
        Ok(())
    }

    fn directive(&mut self, out: &mut Vec<Statement>) -> Result<(), Error> {
        if self.token.kind == TokenKind::DotWord("pragma") {
            return self.pragma(|p, text| {
                if let Some(mask) = text.strip_prefix("used_bytes_mask") {
                    out.push(Statement::UsedBytes(p.used_bytes(mask)?));
                }
                Ok(())
            });
        }
        if self.skip_directive()? {
            return Ok(());
        }
        let linkage = self.linkage()?;
        match self.space() {
            Some(Space::Reg) => self.registers(out),
            Some(space) => self.variables(space, linkage, |variable| out.push(Statement::Variable(variable))),
            None => self.expected("a declaration or directive of a function's body"),
        }
    }

    /// The mask of `used_bytes_mask` (PTX ISA, "Pragma Strings"): a 32-bit number in C's notation. The current token is the
    /// string.
    fn used_bytes(&self, mask: &str) -> Result<u32, Error> {
        let digits = mask.trim();
        let parsed = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => digits.parse(),
        };
        parsed.or_else(|_| self.expected("a number of 32 bits after `used_bytes_mask`"))
    }

    /// An instruction after its guard.
    fn instruction(&mut self, guard: Option<(Name, bool)>, out: &mut Vec<Statement>) -> Result<(), Error> {
        let TokenKind::Name(name) = self.token.kind else { return self.expected("an instruction") };
        let line = self.bump()?.line;
        self.opcode(guard, name, line, out)
    }

    /// An instruction whose first name is already consumed.
    fn opcode(
        &mut self,
        guard: Option<(Name, bool)>,
        name: &str,
        line: u32,
        out: &mut Vec<Statement>,
    ) -> Result<(), Error> {
        if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return self.expected(&format!("`:` after the label `{name:.60}`"));
        }
        let mut opcode = name.to_owned();
        while let TokenKind::DotWord(word) = self.token.kind {
            opcode.push('.');
            opcode.push_str(word);
            self.bump()?;
        }
        let call = name == "call";
        let mut operands = Vec::new();
        if !self.is(";") {
            operands.push(self.operand(call)?);
            while self.eat(",")? {
                operands.push(self.operand(call)?);
            }
            if !self.is(";") {
                return self.expected("`,` or `;` after an operand");
            }
        }
        self.bump()?;
        out.push(Statement::Instruction(Instruction { guard, opcode: self.intern(&opcode), operands, line }));
        Ok(())
    }
}
