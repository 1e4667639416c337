//! The driver API, called as programs call it: through cudarc, from the library that they load.
#![allow(unsafe_code, reason = "the driver's C functions are unsafe")]

mod arguments;
mod contexts;
mod devices;
mod faults;
mod memory;
mod modules;
mod peers;
mod printing;
mod streams;
mod support;
