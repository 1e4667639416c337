//! Every op against its formula in f64 (the oracle), on all devices of `devices.rs`.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

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
mod topk_mask;
mod unary;
