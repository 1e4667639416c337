//! The core of a session: what both front ends need, ggml's messages ([`super::ggml`]) and fanout's extension
//! ([`super::extended`]). A front end decodes requests, calls this, and encodes replies.
//!
//! ```text
//! resources ── handle_table     buffers by handle and virtual address, charged to one memory budget
//!           └─ program_cache    prepared graphs, LRU, bounded in bytes
//! graph_import                  a graph from the wire → a program that is bound to the session's buffers
//! upload                        bytes of the client's connection → a device
//! host_staged_copy              copies between devices that cannot read each other's memory
//! request_error → failure       why a request fails; the one way in which a session ends by a failure
//! ```
//!
//! Nothing here names a front end or decodes a request. Of the wire it knows the types that requests of both front ends carry:
//! tensor records, and the graph of ggml's GRAPH_COMPUTE, which is also the graph of the extension's KEEP_GRAPH. Nothing but
//! [`failure`] and [`upload`] uses the connection. `tests/layout/rooms.rs` holds the core and the front ends to this.

pub(super) mod body_buffer;
pub(super) mod failure;
pub(super) mod graph_import;
pub(super) mod handle_table;
pub(super) mod host_staged_copy;
pub(super) mod program_cache;
pub(super) mod request_error;
pub(super) mod resources;
pub(super) mod upload;
