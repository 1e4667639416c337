//! Server side of fanout's extensions of the RPC protocol (`docs/protocol.md`): several queues per client, asynchronous
//! notifications when work completes, and failures that are reported per queue.
//!
//! ```text
//! session (reads requests) ─► queues, synchronization  OPEN_QUEUE, CLOSE_QUEUE, MARK, WAIT, NOTIFY_REACHED
//!                          ─► transfers, graphs        WRITE, READ, FILL, COPY, PREPARE_GRAPH, RUN_GRAPH
//!                          ─► load_by_digest           LOAD
//!                          ─► peer_transfer            ISSUE_TOKENS, RECEIVE_FROM_PEER, SEND_TO_PEER, PROBE_PEER, PEER_WRITE
//!                          ─► groups                   JOIN_GROUP, ATTACH_GROUP, PUBLISH_PART, FAIL_GROUP
//!                          ─► describe                 reply to HELLO_EXT, SUPPORTS_OP
//! notifier (a second thread) ─► completions            MARK_REACHED, READ_DATA, QUEUE_FAILED
//!                            ─► heartbeat              SERVER_STATE
//! ```
//!
//! The session's thread reads requests and submits their work. The [`notifier`] waits for devices. Submitting can still block:
//! until the queue has room, and for a large WRITE until the queue's earlier work is done. The client receives a heartbeat
//! meanwhile.
//!
//! The commands that ggml's protocol and the extensions share are in `resource_requests`, and the state that both front ends
//! share is in `session`. Start reading at `session.rs`.

mod completions;
mod describe;
mod error;
mod graphs;
mod groups;
mod load_by_digest;
mod notifier;
mod peer_transfer;
mod queues;
mod session;
mod spans;
mod synchronization;
mod transfers;

pub(super) use session::serve_session;
