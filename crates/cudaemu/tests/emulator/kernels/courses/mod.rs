//! `kernels/courses`: classic exercises of courses on parallel programming. Each file tests the kernels of the .cu file of its
//! name (`gemm` also those of gemm_mma.cu).

mod bitonic;
mod gemm;
mod half_axpy;
mod histogram;
mod reduction;
mod scan;
mod softmax;
mod stencil;
mod transpose;
