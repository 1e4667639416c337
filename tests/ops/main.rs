//! Every op against f64 oracles, on every device of the matrix.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

#[path = "../common/mod.rs"]
mod common;

mod binary;
mod concat;
mod copy;
mod glu;
mod mul_mat;
mod norm;
mod reduce;
mod rows;
mod sort;
mod unary;
mod flash_attn;
mod rope;
mod softmax;
