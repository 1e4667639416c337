//! Every op against f64 oracles, on every device of the matrix.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod binary;
mod concat;
mod copy;
mod devices;
mod flash_attn;
mod glu;
mod mul_mat;
mod norm;
mod reduce;
mod rope;
mod rows;
mod softmax;
mod sort;
mod unary;
