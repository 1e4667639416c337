//! PTX parser: text → [`ast::Module`]. Unsupported or malformed input is an error with its line; nothing panics.
//!
//! [`parse()`] reads a file in one pass with one token of look-ahead: `lexer` produces the tokens, `parse` the tree, with one
//! file per part of the grammar. Time and memory are linear in the length of the text; nesting is limited.

pub mod ast;
mod error;
mod lexer;
mod parse;
#[cfg(test)]
mod tests;

pub use error::Error;
pub use parse::parse;
