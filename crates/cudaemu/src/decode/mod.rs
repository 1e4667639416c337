//! Decoder: syntax tree + instruction table → bytecode, once per module. Open `module.rs` first.
//!
//! [`decode()`] collects the module's names (`layout` sizes its variables) and decodes each function separately (`function`:
//! scopes and labels; `bind`: operands; `moves`, `call`: instructions with special forms). `link` then puts them together: the
//! call graph (`call_graph`) determines where each function's registers and shared variables are placed. `liveness` computes
//! register counts.

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
