//! Every op against its formula in f64 (the oracle), on all devices of `devices.rs`.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod binary;
mod concat;
mod conv;
mod copy;
mod devices;
mod dsv4;
mod flash_attn;
mod glu;
mod im2col;
mod layouts;
mod linear_attn;
mod mul_mat;
mod norm;
mod pool;
mod reduce;
mod rope;
mod rows;
mod softmax;
mod solve_tri;
mod sort;
mod ssm;
mod topk_mask;
mod unary;
mod upscale;
mod window;
