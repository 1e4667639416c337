//! Tensor types and descriptors: what every other room speaks of.

pub mod blocks;
mod desc;
mod dtype;
mod loops;
pub mod quant;
pub(crate) mod table;

pub use desc::{DIMS, DescError, TensorDesc};
pub use dtype::{Capability, DType};
pub(crate) use loops::{Loop, common_loops};
