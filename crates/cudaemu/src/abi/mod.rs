//! The C functions of the driver API, by topic. They only translate: raw pointers and numbers become typed values ([`door`]), the
//! [`driver`](crate::driver) decides, and its error becomes the returned code. A panic never leaves a function.
//!
//! `unsafe` in this folder rests on one promise, the C caller's: a pointer argument that is not null points to what the driver API's
//! documentation says, for as long as it says. Handles are not pointers ([`crate::handle`]) and need no promise.

#![allow(unsafe_code, reason = "this is the C boundary; see above")]
#![allow(non_snake_case, reason = "the names are the driver's")]

mod capture;
mod context;
mod copies;
mod device;
mod extension;
mod ffi_guard;
mod graph;
mod jit;
mod launch;
mod library;
mod memory;
mod module;
mod physical;
mod pool;
mod proc_address;
mod stream;
mod stubs;
