//! The exported C functions of the CUDA driver API, one module per topic. They only translate: [`ffi_guard`] turns raw pointers
//! and numbers into typed values, the [`driver`](crate::driver) executes the call, and its error becomes the returned
//! `CUresult`. A panic never leaves a function. Open `ffi_guard.rs` first.
//!
//! A function that a program looks up by name and that is not here is missing, as in an older driver.
//!
//! Every `unsafe` block in this folder relies on one promise of the C caller: a pointer argument that is not null points to the
//! memory that the driver API documents, for as long as it documents. Handles are not pointers ([`crate::handle`]), so an
//! invalid handle is safe.

#![allow(unsafe_code, reason = "this is the C boundary; see above")]
#![allow(non_snake_case, reason = "the names are the driver's")]

mod context;
mod device;
mod extension;
mod ffi_guard;
mod graph;
mod jit;
mod launch;
mod memcpy;
mod memory;
mod module;
mod stream;
