//! The library's descriptors of tensors.
#![allow(dead_code, unused_imports, unused_macros, unreachable_pub, reason = "the library uses what no harness does")]

#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/tensor/desc.rs"]
mod desc;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/tensor/dtype.rs"]
mod dtype;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/tensor/shape.rs"]
mod shape;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/tensor/table.rs"]
mod table;

pub use desc::{DIMS, TensorDesc};
pub use dtype::DType;
pub use shape::Shape;
