//! Tensor types and descriptors: what every other room speaks of.

pub mod blocks;
mod desc;
mod dtype;
mod loop_nest;
pub mod quant;
pub(crate) mod table;

pub use desc::{DIMS, DescError, TensorDesc};
pub use dtype::{Capability, DType};
pub(crate) use loop_nest::{CopyLoop, common_loop_nest};
