//! Front end of ggml's RPC protocol, for llama.cpp's clients: of the newest version, and of each older one behind a
//! `version_adapter`.
//!
//! Serves one request at a time, with one implicit queue per device. The protocol has no error reply: a failed request ends the
//! session, and one log line names the client, the command and the reason.
//!
//! ```text
//! session         the loop over requests, their dispatch
//! graphs          GRAPH_COMPUTE, GRAPH_RECOMPUTE
//! graph_store     bodies of the graphs that a client of 8.0 has numbered
//! tensors         requests that read and write tensors, with the tensor cache
//! tensors_2d      SET_TENSOR_2D, GET_TENSOR_2D
//! collectives     COMM_INIT, COMM_ALLREDUCE, COMM_FREE
//! device_queues   one queue per device, opened on demand
//! prefault        clears pages of the next upload's region while the session is idle
//! ```
//!
//! Not here: HELLO (`handshake`), requests about buffers and memory (`resource_requests`), and resources (`session`). Start
//! reading at `session.rs`.

mod collectives;
mod device_queues;
mod error;
mod graph_store;
mod graphs;
mod prefault;
mod session;
mod tensors;
mod tensors_2d;

pub(super) use session::serve_session;
