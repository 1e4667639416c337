//! The server over loopback: what it serves, what it refuses, and that one client never feels another.
#![allow(clippy::panic)] // how a helper says that a test has failed

mod cache;
mod client;
mod client_extended;
mod client_faults;
mod client_notifications;
mod client_peers;
mod commands;
mod foresight;
#[cfg(target_os = "linux")]
mod gpus;
mod graphs;
mod greeted;
mod greeted_graphs;
mod greeted_queues;
mod greeted_refusals;
mod greeted_support;
mod hostile;
mod limits;
mod models;
mod models_unseen;
mod old_servers;
mod peers;
mod program;
#[cfg(target_os = "linux")]
mod program_ends;
mod recorded_commands;
mod sessions;
mod states;
mod support;
