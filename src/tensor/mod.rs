//! Tensors: element types, descriptors (type, shape, strides), and conversion between types.
//!
//! Start with `desc.rs` for [`TensorDesc`] and `dtype.rs` for [`DType`]. `table.rs` lists the element types, `blocks.rs` has
//! the layout of quantisation blocks, `quant/` the conversions to and from f32, `byte_runs.rs` slices as ranges of bytes, and
//! `loop_nest.rs` the loops of copies between layouts. Memory for tensors is in `device/`, kernels are in `cpu/` and `cuda/`.

pub mod blocks;
mod byte_runs;
mod desc;
mod dtype;
mod loop_nest;
mod plain_data;
pub mod quant;
mod shape;
pub(crate) mod table;

#[cfg(feature = "server")]
pub(crate) use byte_runs::RunCursor;
pub use byte_runs::{ByteRuns, ByteRunsError, RunReader};
pub use desc::{DIMS, DescError, TensorDesc};
pub use dtype::{Capability, DType};
pub(crate) use loop_nest::{CopyLoop, common_loop_nest};
pub(crate) use plain_data::bytes_of_mut;
pub use plain_data::{PlainData, bytes_of};
pub use shape::Shape;
