//! No peer can crash, hang or corrupt: seeded graphs of every op, and seeded byte streams, half right and half wrong.
#![allow(clippy::panic)] // how a helper says that a test has failed

mod kernels;
mod maker;
mod mutate;
