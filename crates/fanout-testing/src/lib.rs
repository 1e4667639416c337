//! What fanout's tests share, and what authors of devices may use for theirs.
//!
//! Devices, each a CPU device or a simulation behind the public [`Device`](fanout::device::Device) contract:
//!
//! | module | the device |
//! |---|---|
//! | [`recording_device`] | counts what it is asked for; refuses chosen ops; can be made to fail or to wait |
//! | [`gated_device`] | holds every command back until the host waits, then runs the commands of all queues in a seeded order, and reports data races |
//! | [`delaying_device`] | computes nothing and takes virtual time for it: schedules are compared without a clock |
//! | [`forwarding_device`] | passes everything on, with queues that a test replaces |
//! | [`isolated_device`] | memory of a domain of its own, that no other device copies from |
//!
//! A device that does nothing ships in fanout itself: [`fanout::device::noop`].
//!
//! Networks: [`slow_link`] delays, limits, cuts and freezes TCP connections; [`protocol_relay`] records what one client
//! sends and can hide that a server speaks fanout's extension.
//!
//! Numbers: [`op_case`] runs a graph on any device and checks every byte outside its destinations; [`inputs`] makes seeded
//! values; [`compare`] measures errors.
//!
//! Helpers panic where a test could only fail.
//!
//! This crate depends on fanout, which has it as a development dependency. That works for fanout's integration tests, which
//! link the library as this crate does. Unit tests are compiled into a second copy of fanout, whose types are others: they
//! use what ships in fanout.

pub mod compare;
pub mod delaying_device;
pub mod forwarding_device;
pub mod gated_device;
pub mod inputs;
pub mod isolated_device;
pub mod op_case;
pub mod protocol_relay;
mod races;
pub mod recording_device;
pub mod slow_link;
