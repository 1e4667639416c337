//! Parser: tokens → syntax tree, by recursive descent with one token of look-ahead.

mod constant;
mod declare;
mod function;
mod init;
mod module;
mod operand;
mod statement;

use super::Error;
use super::ast::{Module, Name};
use super::lexer::{Lexer, Token, TokenKind};
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum nesting of blocks and expressions. Compilers nest a few levels; the limit protects the stack from malicious files.
const MAX_DEPTH: u32 = 100;

/// Parses a PTX file.
///
/// # Errors
/// The first construct that is not PTX, or not in the supported subset, with its line.
pub fn parse(text: &str) -> Result<Module, Error> {
    let mut lexer = Lexer::new(text);
    let token = lexer.next()?;
    Parser { lexer, token, names: HashSet::new(), depth: 0 }.module()
}

/// State of the parser on one text.
struct Parser<'a> {
    lexer: Lexer<'a>,
    /// The next token.
    token: Token<'a>,
    /// Interned names and opcodes, so that each is stored once.
    names: HashSet<Arc<str>>,
    /// Current nesting of blocks and expressions.
    depth: u32,
}

impl<'a> Parser<'a> {
    /// Consumes the next token and returns it.
    fn bump(&mut self) -> Result<Token<'a>, Error> {
        let next = self.lexer.next()?;
        Ok(std::mem::replace(&mut self.token, next))
    }

    /// An error at the next token.
    fn error<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(self.lexer.text, self.token.start, self.token.line, message))
    }

    /// An error: expected `what` at the next token.
    fn expected<T>(&self, what: &str) -> Result<T, Error> {
        self.error(format!("expected {what}, found {}", self.token.kind))
    }

    fn is(&self, mark: &str) -> bool {
        matches!(self.token.kind, TokenKind::Punct(found) if found == mark)
    }

    /// Consumes the next token if it is `mark`.
    fn eat(&mut self, mark: &str) -> Result<bool, Error> {
        let found = self.is(mark);
        if found {
            self.bump()?;
        }
        Ok(found)
    }

    /// Consumes `mark`; fails if the next token is another one.
    fn need(&mut self, mark: &str) -> Result<(), Error> {
        match self.eat(mark)? {
            true => Ok(()),
            false => self.expected(&format!("`{mark}`")),
        }
    }

    /// Consumes the next token if it is the word `.word`.
    fn eat_word(&mut self, word: &str) -> Result<bool, Error> {
        let found = self.token.kind == TokenKind::DotWord(word);
        if found {
            self.bump()?;
        }
        Ok(found)
    }

    /// The interned copy of a name.
    fn intern(&mut self, name: &str) -> Name {
        if let Some(known) = self.names.get(name) {
            return known.clone();
        }
        let name = Name::from(name);
        self.names.insert(name.clone());
        name
    }

    /// Consumes a name; fails with `what` as the expected item if the next token is none.
    fn name(&mut self, what: &str) -> Result<Name, Error> {
        match self.token.kind {
            TokenKind::Name(name) if name != "_" && name != constant::WARP_SIZE => {
                self.bump()?;
                Ok(self.intern(name))
            }
            _ => self.expected(what),
        }
    }

    /// Runs `inner` one nesting level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth >= MAX_DEPTH {
            return self.error(format!("expected at most {MAX_DEPTH} levels of nesting, found more"));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }
}
