//! Session core: the resources and operations that both front ends use. [`super::ggml`] is the front end of ggml's protocol,
//! [`super::extended`] that of fanout's extension. A front end decodes requests, calls the core, and encodes replies.
//!
//! ```text
//! resources ── handle_table     buffers by handle and virtual address, charged to one memory budget
//!           └─ program_cache    compiled graphs, LRU, limited in entries and bytes
//! graph_import                  graph from the wire → program that is bound to the session's buffers
//! watched_queue                 device queue that ends when the client has gone
//! host_staged_copy              copies between devices that cannot access each other's memory
//! request_error → failure       why a request fails; how a failure ends the session
//! ```
//!
//! Not here: the loop over requests and their decoding, which the front ends do. Of the wire, the core uses only the types in
//! requests of both front ends: tensor records, and the graph of ggml's GRAPH_COMPUTE, which is also the graph of the
//! extension's PREPARE_GRAPH. Only [`failure`] uses the connection. `tests/layout/layer_table.rs` checks these
//! dependencies. Start reading at `resources.rs`.

pub(super) mod failure;
pub(super) mod graph_import;
pub(super) mod handle_table;
pub(super) mod host_staged_copy;
pub(super) mod program_cache;
pub(super) mod request_error;
pub(super) mod resources;
pub(super) mod watched_queue;
