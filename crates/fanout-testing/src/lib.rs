//! Test devices, network relays and helpers: shared by fanout's tests, and for the tests of authors of devices.
//!
//! Devices, each a CPU device or a simulation that implements the public [`Device`](fanout::device::Device) contract:
//!
//! | module | the device |
//! |---|---|
//! | [`recording_device`] | counts calls; refuses chosen ops; fails or waits on request |
//! | [`gated_device`] | delays every command until the host waits, then runs the commands of all queues in a seeded order, and reports data races |
//! | [`delaying_device`] | computes nothing, and advances virtual time instead: schedules are compared without a clock |
//! | [`forwarding_device`] | forwards to another device, with a description, preferred ops and queues that a test replaces |
//!
//! A device that does nothing ships in fanout itself: [`fanout::device::noop`].
//!
//! Networks: [`slow_link`] delays, limits, cuts and freezes TCP connections; [`protocol_relay`] records what one client
//! sends and can hide a server's protocol extension.
//!
//! Values: [`op_case`] runs a graph on any device and checks that bytes outside of its destinations do not change; [`inputs`]
//! makes random values from a seed; [`compare`] measures errors; [`transformer`] is a model that runs on groups of devices; [`sampling`] has
//! samplers and their results.
//! `wrong_uses` runs the tables of docs/troubleshooting.md. [`real_gpu`] is the switch between the emulated GPU and one of this machine.
//!
//! Helpers panic on errors on which a test could only fail.
//!
//! This crate depends on fanout, and fanout has it as a development dependency. That works for integration tests, which link
//! the same library. Unit tests of fanout cannot use this crate: they are compiled into a second copy of the library, with
//! distinct types. They use [`fanout::device::noop`].

pub mod compare;
pub mod delaying_device;
pub mod forwarding_device;
pub mod gated_device;
pub mod inputs;
pub mod op_case;
pub mod protocol_relay;
mod races;
pub mod real_gpu;
pub mod recording_device;
pub mod sampling;
pub mod slow_link;
pub mod transformer;
#[cfg(unix)]
pub mod wrong_uses;
