//! `kernels/courses`: what courses about parallel programming go through.

mod bitonic;
mod gemm;
mod half_axpy;
mod histogram;
mod reduction;
mod scan;
mod softmax;
mod stencil;
mod transpose;
