//! Tests of the RPC client and server over loopback connections, and of the `rpc-server` program.
//!
//! `support` starts servers and sends requests of protocol 7.0; `extended_support` adds the extended protocol. `commands`,
//! `graphs`, `sessions`, `limits`, `tensor_cache` and `hostile` test the server through protocol 7.0, and `extended*`,
//! `load_*`, `peer_transfer`, `server_groups` and `prefault` through the extended protocol. `protocol_versions` tests which version a server
//! answers, `protocol_8` and `collectives*` the messages of 8.0, `old_clients` the server's clients of older versions, and `long_names`
//! those with longer records.
//! `client*` and `old_servers` test the client; `http` tests the state of the server over HTTP.
//! `server_program*`, `connect_program`, `gpus` and `lost_device` run the program. Recorded sessions are replayed by `tests/replay`.
#![allow(clippy::panic)] // a helper fails its test by a panic

mod audit;
mod client;
mod client_extended;
mod client_faults;
mod client_notifications;
mod client_peer_copies;
mod collectives;
mod collectives_hostile;
mod commands;
#[cfg(target_os = "linux")]
mod connect_program;
mod departed_clients;
mod extended;
mod extended_graphs;
mod extended_invalid_requests;
mod extended_queues;
mod extended_support;
#[cfg(target_os = "linux")]
mod gpus;
mod graphs;
mod host_memory;
mod hostile;
mod http;
mod limits;
mod load_by_digest;
mod load_confidentiality;
mod load_slices;
mod log_floods;
mod long_names;
#[cfg(target_os = "linux")]
mod lost_device;
mod old_clients;
mod old_servers;
mod peer_transfer;
mod prefault;
mod protocol_8;
mod protocol_versions;
mod recorded_commands;
mod server_groups;
mod server_program;
#[cfg(target_os = "linux")]
mod server_program_allow;
#[cfg(target_os = "linux")]
mod server_program_certificates;
#[cfg(target_os = "linux")]
mod server_program_doctor;
#[cfg(target_os = "linux")]
mod server_program_http;
#[cfg(target_os = "linux")]
mod server_program_key_limits;
#[cfg(target_os = "linux")]
mod server_program_keys;
mod server_program_lifecycle;
#[cfg(target_os = "linux")]
mod server_program_peer_keys;
#[cfg(target_os = "linux")]
mod server_program_sandbox;
#[cfg(target_os = "linux")]
mod server_program_supervisor;
#[cfg(target_os = "linux")]
mod server_program_wrong_uses;
mod server_states;
mod sessions;
mod support;
mod tensor_cache;
