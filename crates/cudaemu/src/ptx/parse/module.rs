//! Parser of a file's head and its module scope (PTX ISA, "PTX Module Directives").

use super::Parser;
use crate::ptx::Error;
use crate::ptx::ast::{Linkage, Module, Space};
use crate::ptx::lexer::TokenKind;

impl Parser<'_> {
    /// The whole file.
    pub(super) fn module(mut self) -> Result<Module, Error> {
        let mut module = Module { address_size: 64, ..Module::default() };
        self.version(&mut module)?;
        self.target(&mut module)?;
        if self.eat_word("address_size")? {
            module.address_size = match self.token.kind {
                TokenKind::Int { bits: 32, .. } => 32,
                TokenKind::Int { bits: 64, .. } => 64,
                _ => return self.expected("an address size of 32 or 64"),
            };
            self.bump()?;
        }
        while self.token.kind != TokenKind::End {
            self.module_item(&mut module)?;
        }
        Ok(module)
    }

    /// `.version 8.7`
    fn version(&mut self, module: &mut Module) -> Result<(), Error> {
        if !self.eat_word("version")? {
            return self.expected("`.version`, with which a PTX file begins");
        }
        // Uses the token's text, because as a float 8.1 and 8.10 are equal.
        let text = self.lexer.text.get(self.token.start..self.token.end).unwrap_or_default();
        let Some((Ok(major), Ok(minor))) = text.split_once('.').map(|(a, b)| (a.parse(), b.parse())) else {
            return self.expected("a version such as 8.0");
        };
        self.bump()?;
        module.version = (major, minor);
        Ok(())
    }

    /// `.target sm_90a, texmode_independent, debug`
    fn target(&mut self, module: &mut Module) -> Result<(), Error> {
        if !self.eat_word("target")? {
            return self.expected("`.target`");
        }
        loop {
            let TokenKind::Name(name) = self.token.kind else { return self.expected("a target such as sm_80") };
            match name.strip_prefix("sm_") {
                Some(number) => {
                    let suffix = number.trim_start_matches(|c: char| c.is_ascii_digit());
                    let Ok(target) = number.trim_end_matches(suffix).parse() else {
                        return self.expected("a target such as sm_80");
                    };
                    if !matches!(suffix, "" | "a" | "f") {
                        return self.expected("a target such as sm_80 or sm_90a");
                    }
                    module.target = target;
                    suffix.clone_into(&mut module.target_suffix);
                }
                None if matches!(name, "debug" | "texmode_unified" | "texmode_independent") => {}
                None => {
                    return self
                        .expected("a target such as sm_80, `debug` or `texmode_unified` or `texmode_independent`");
                }
            }
            self.bump()?;
            if !self.eat(",")? {
                break;
            }
        }
        match module.target {
            0 => self.error("expected a target such as sm_80 in `.target`, found none"),
            _ => Ok(()),
        }
    }

    /// One declaration or directive.
    fn module_item(&mut self, module: &mut Module) -> Result<(), Error> {
        let line = self.token.line;
        if self.skip_directive()? {
            return Ok(());
        }
        let linkage = self.linkage()?;
        match self.token.kind {
            TokenKind::DotWord("entry" | "func") => module.functions.push(self.function(linkage, line)?),
            _ => match self.space() {
                Some(Space::Reg) => return self.error("registers at module scope are not supported"),
                Some(space) => self.variables(space, linkage, |variable| module.variables.push(variable))?,
                None => return self.expected("a variable, function or directive of module scope"),
            },
        }
        Ok(())
    }

    /// `.visible` and similar directives, if one is next.
    pub(super) fn linkage(&mut self) -> Result<Linkage, Error> {
        let linkage = match self.token.kind {
            TokenKind::DotWord("visible") => Linkage::Visible,
            TokenKind::DotWord("extern") => Linkage::Extern,
            TokenKind::DotWord("weak") => Linkage::Weak,
            TokenKind::DotWord("common") => Linkage::Common,
            _ => return Ok(Linkage::Internal),
        };
        self.bump()?;
        Ok(linkage)
    }

    /// Skips a directive without effect: `.file`, `.loc`, `.section`, `.pragma`. Returns whether there was one.
    pub(super) fn skip_directive(&mut self) -> Result<bool, Error> {
        match self.token.kind {
            TokenKind::DotWord("file") => {
                self.bump()?;
                self.skip_numbers(1)?;
                self.skip_string()?;
                while self.eat(",")? {
                    self.skip_numbers(1)?;
                }
            }
            TokenKind::DotWord("loc") => self.skip_location()?,
            TokenKind::DotWord("pragma") => {
                self.pragma(|_, _| Ok(()))?;
            }
            TokenKind::DotWord("section") => self.skip_section()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// `.pragma "a", "b";`: calls `visit` for each string while it is the current token.
    pub(super) fn pragma(&mut self, mut visit: impl FnMut(&Self, &str) -> Result<(), Error>) -> Result<(), Error> {
        self.bump()?;
        loop {
            if let TokenKind::Text(text) = self.token.kind {
                visit(self, text)?;
            }
            self.skip_string()?;
            if !self.eat(",")? {
                return self.need(";");
            }
        }
    }

    /// `.loc 1 25 9, function_name $L__info_string0 + 4, inlined_at 1 10 5`
    fn skip_location(&mut self) -> Result<(), Error> {
        self.bump()?;
        self.skip_numbers(3)?;
        while self.eat(",")? {
            match self.token.kind {
                TokenKind::Name("function_name") => {
                    self.bump()?;
                    match self.token.kind {
                        TokenKind::DotWord(_) => _ = self.bump()?,
                        _ => _ = self.name("a label of the debug data")?,
                    }
                    self.offset()?;
                }
                TokenKind::Name("inlined_at") => {
                    self.bump()?;
                    self.skip_numbers(3)?;
                }
                _ => return self.expected("`function_name` or `inlined_at`"),
            }
        }
        Ok(())
    }

    /// `.section .debug_info { … }`
    fn skip_section(&mut self) -> Result<(), Error> {
        let line = self.bump()?.line;
        match self.token.kind {
            TokenKind::DotWord(_) | TokenKind::Name(_) => _ = self.bump()?,
            _ => return self.expected("the name of a section"),
        }
        self.need("{")?;
        let mut open = 1u64;
        while open > 0 {
            match self.token.kind {
                TokenKind::Punct("{") => open += 1,
                TokenKind::Punct("}") => open -= 1,
                TokenKind::End => return self.expected(&format!("`}}` at the end of the section of line {line}")),
                _ => {}
            }
            self.bump()?;
        }
        Ok(())
    }

    /// Skips this many integers.
    fn skip_numbers(&mut self, count: usize) -> Result<(), Error> {
        for _ in 0..count {
            match self.token.kind {
                TokenKind::Int { .. } => self.bump()?,
                _ => return self.expected("a number"),
            };
        }
        Ok(())
    }

    /// Skips a string.
    fn skip_string(&mut self) -> Result<(), Error> {
        match self.token.kind {
            TokenKind::Text(_) => _ = self.bump()?,
            _ => return self.expected("a string"),
        }
        Ok(())
    }
}
