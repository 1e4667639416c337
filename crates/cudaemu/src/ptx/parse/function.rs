//! Parser of kernels and functions (PTX ISA, "Kernel Entry Point and Function Directives", "Performance-Tuning Directives").

use super::Parser;
use crate::ptx::Error;
use crate::ptx::ast::{Function, Linkage, Space};
use crate::ptx::lexer::TokenKind;

impl Parser<'_> {
    /// Parses from `.entry` or `.func` to the end of the body or declaration.
    pub(super) fn function(&mut self, linkage: Linkage, line: u32) -> Result<Function, Error> {
        let entry = self.bump()?.kind == TokenKind::DotWord("entry");
        let mut function = Function {
            name: self.intern(""),
            entry,
            returns: Vec::new(),
            params: Vec::new(),
            body: None,
            max_threads: None,
            required_threads: false,
            cluster: None,
            max_registers: 0,
            noreturn: false,
            linkage,
            line,
        };
        if !entry && self.is("(") {
            function.returns = self.parameters()?;
        }
        function.name = self.name("the name of a function")?;
        if self.is("(") {
            let start = self.token;
            function.params = self.parameters()?;
            if entry && function.params.iter().any(|param| param.space != Space::Param) {
                return Err(Error::new(
                    self.lexer.text,
                    start.start,
                    start.line,
                    "the parameters of a kernel must be `.param`",
                ));
            }
        }
        self.function_directives(&mut function)?;
        if self.is("{") {
            function.body = Some(self.block()?);
        } else if !self.eat(";")? {
            return self.expected("`{`, `;` or a directive of the function");
        }
        Ok(function)
    }

    fn function_directives(&mut self, function: &mut Function) -> Result<(), Error> {
        while let TokenKind::DotWord(word) = self.token.kind {
            if word == "pragma" {
                self.skip_directive()?;
                continue;
            }
            let start = self.token;
            self.bump()?;
            match word {
                "maxntid" => function.max_threads = Some(self.extents()?),
                "reqntid" => {
                    function.max_threads = Some(self.extents()?);
                    function.required_threads = true;
                }
                "reqnctapercluster" => function.cluster = Some(self.extents()?),
                "maxnreg" => function.max_registers = self.extent()?,
                "noreturn" => function.noreturn = true,
                // Hints for the compiler about resident blocks and cluster sizes, without effect in the emulator.
                "minnctapersm" | "maxnctapersm" | "maxclusterrank" | "abi_preserve" | "abi_preserve_control" => {
                    self.extent()?;
                }
                // A launch must specify the cluster size, or its grid counts clusters of .reqnctapercluster. The launch is
                // checked, not the module.
                "explicitcluster" | "blocksareclusters" => {}
                _ => {
                    self.token = start;
                    return self.expected("a directive of the function, its body or `;`");
                }
            }
        }
        Ok(())
    }

    /// One to three extents; absent ones are 1.
    fn extents(&mut self) -> Result<[u32; 3], Error> {
        let mut extents = [self.extent()?, 1, 1];
        for extent in extents.iter_mut().skip(1) {
            if !self.eat(",")? {
                break;
            }
            *extent = self.extent()?;
        }
        Ok(extents)
    }

    fn extent(&mut self) -> Result<u32, Error> {
        let start = self.token;
        match u32::try_from(self.count()?) {
            Ok(extent) => Ok(extent),
            Err(_) => {
                self.token = start;
                self.expected("a number of 32 bits")
            }
        }
    }
}
