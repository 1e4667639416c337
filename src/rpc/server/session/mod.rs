//! The core of a session: what both front ends need, ggml's messages ([`super::ggml`]) and fanout's extension
//! ([`super::extended`]). A front end decodes requests, calls this, and encodes replies.
//!
//! ```text
//! resources ── handle_table     buffers by handle and virtual address, charged to one memory budget
//!           └─ program_cache    prepared graphs, LRU, bounded in bytes
//! graph_import                  a graph from the wire → a program that is bound to the session's buffers
//! upload                        bytes of a connection, a file or the tensor cache → a device
//! host_staged_copy              copies between devices that cannot read each other's memory
//! prefault                      pages of the next upload, cleared before it arrives
//! request_error → failure       why a request fails; the one way in which a session ends by a failure
//! ```
//!
//! Nothing here knows a command of either front end, and nothing but [`failure`] and [`upload`] uses the connection.

pub(super) mod body_buffer;
pub(super) mod failure;
pub(super) mod graph_import;
pub(super) mod handle_table;
pub(super) mod host_staged_copy;
pub(super) mod prefault;
pub(super) mod program_cache;
pub(super) mod request_error;
pub(super) mod resources;
pub(super) mod upload;
