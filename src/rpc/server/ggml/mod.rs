//! Front end of ggml's RPC protocol 7.0, for llama.cpp's clients.
//!
//! Serves one request at a time, with one implicit queue per device. The protocol has no error reply: a failed request ends the
//! session, and one log line names the client, the command and the reason.
//!
//! ```text
//! session         the loop over requests, their dispatch
//! graphs          GRAPH_COMPUTE, GRAPH_RECOMPUTE
//! tensors         requests that read and write tensors, with the tensor cache
//! device_queues   one queue per device, opened on demand
//! prefault        clears pages of the next upload's region while the session is idle
//! ```
//!
//! Not here: HELLO (`handshake`), requests about buffers and memory (`resource_requests`), and resources (`session`). Start
//! reading at `session.rs`.

mod device_queues;
mod error;
mod graphs;
mod prefault;
mod session;
mod tensors;

pub(super) use session::serve_session;
