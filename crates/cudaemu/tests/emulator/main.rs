//! The emulator from outside: its driver API as programs call it (through cudarc), kernels on a device without the driver, and
//! what the manual promises.
//!
//! One program, because each would cost a link. The driver is one for the process: a test holds it for itself from
//! [`cudaemu::test::start`] until it drops the session. A test that needs a process of its own starts this program again
//! (`driver::printing`).

#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, reason = "all of this is tests")]

mod bare_device;
mod control;
mod counts;
mod driver;
mod faults;
mod gpu;
mod graphs;
mod kernels;
mod manual;
mod memory;
mod reference;
mod smoke;
