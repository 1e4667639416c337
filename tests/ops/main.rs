//! Every op against f64 oracles, on every device of the matrix.
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod binary;
