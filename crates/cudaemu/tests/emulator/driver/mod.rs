//! The driver API as programs call it: through cudarc, from the loaded shared library.
#![allow(unsafe_code, reason = "the driver's C functions are unsafe")]

mod arguments;
mod contexts;
mod devices;
mod faults;
mod memory;
mod modules;
mod outputs;
mod peers;
mod streams;
pub(crate) mod support;
