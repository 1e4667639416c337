//! Every op against its formula in f64 (the oracle), on all devices of `devices.rs`.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod assign;
mod backward;
mod binary;
mod collective;
mod concat;
mod conv;
mod copy;
mod devices;
mod diag;
mod dsv4;
mod flash_attn;
mod glu;
mod im2col;
mod layouts;
mod linear_attn;
mod mul_mat;
mod norm;
mod out_prod;
mod pad;
mod pool;
mod reduce;
mod rope;
mod rows;
mod self_test;
mod sequence;
mod softmax;
mod solve_tri;
mod sort;
mod ssm;
mod topk_mask;
mod training;
mod unary;
mod upscale;
mod window;
