//! Syntax tree + instruction table → bytecode, once per module.
//!
//! [`decode()`] collects the module's names (`layout` sizes its variables), decodes each function by itself (`function`: scopes
//! and labels; `bind`: operands; `moves`, `call`: the instructions with forms of their own), and then puts them together
//! (`link`): who reaches whom (`graph`) decides where each function's registers and shared variables lie.

mod bind;
mod call;
mod call_graph;
mod diagnostics;
mod error;
mod function;
mod layout;
mod link;
mod liveness;
mod module;
mod moves;
mod names;
mod state;
#[cfg(test)]
mod tests;

pub use error::Error;
pub use module::decode;
