//! Scheduler tests: results, schedules, failures and traffic over CPU devices, test devices and RPC servers.
//!
//! Start with `domains`, which runs a small network over several devices. `interleavings` and `pipeline` use devices with
//! controlled order and virtual time; `test_devices` tests these devices. `rpc_servers`, `slow_links` and `server_loss` use
//! servers. `tensor_group` splits transformers over groups of devices, `server_groups` over groups of servers; `crossed_groups`
//! runs two clients whose groups have the same devices in another order. `sampling` draws tokens, also from logits that a group
//! has split. `futures` awaits results on each kind of device. The cost of scheduling is measured in `tests/sched_cost`.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod crossed_groups;
mod domains;
mod experts;
mod futures;
mod interleavings;
mod invalid_tasks;
mod pipeline;
mod rpc_servers;
mod sampling;
mod server_groups;
mod server_loss;
mod slow_links;
mod tensor_group;
mod test_devices;
