//! `kernels/courses`: classic exercises of courses on parallel programming.

mod bitonic;
mod gemm;
mod half_axpy;
mod histogram;
mod reduction;
mod scan;
mod softmax;
mod stencil;
mod transpose;
