//! The front end of fanout's extension, as `docs/protocol.md` says: many queues, replies as work completes, failures that are
//! reported.
//!
//! The session's thread reads requests and submits their work. What has to wait for a device is left to a thread of its queue
//! ([`completions`]). As for any user of a [`Queue`](crate::device::Queue), submitting waits for room among the queue's earlier
//! work, and a large WRITE for all of that; meanwhile the client receives a [`heartbeat`].

mod completions;
mod describe;
mod error;
mod graphs;
mod heartbeat;
mod load_by_digest;
mod peer_transfer;
mod queues;
mod session;
mod spans;
mod synchronization;
mod transfers;

pub(super) use session::run;
