//! Scheduler tests: results, schedules, failures and traffic over CPU devices, test devices and RPC servers.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod domains;
mod experts;
mod interleavings;
mod invalid_tasks;
mod pipeline;
mod rpc_servers;
mod server_loss;
mod slow_links;
mod test_devices;
