//! Tensor types and descriptors: what every other room speaks of.

pub mod blocks;
mod desc;
mod dtype;
pub mod quant;

pub use desc::{DIMS, DescError, TensorDesc};
pub use dtype::DType;
