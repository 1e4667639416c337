//! The emulator from outside: its driver API as programs call it (through cudarc), kernels on a device without the driver, and
//! the statements of the manual.
//!
//! A single test program, because each one would cost a link. The process has one driver: a test holds it exclusively from
//! [`cudaemu::test::start`] until it drops the session. A test that needs its own process starts this program again
//! (`driver::outputs`).

#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, reason = "all of this is tests")]

mod bare_device;
mod control;
mod counts;
mod driver;
mod faults;
mod gpu;
mod graphs;
mod hardware;
mod kernels;
mod manual;
mod memory;
mod reference;
mod smoke;
