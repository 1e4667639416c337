//! Client side of fanout's extensions of the RPC protocol (`docs/protocol.md`): server-side queues with marks, peer copies,
//! cached graphs, and notifications from the server.
//!
//! ```text
//! device ──► support (cached) ──────────┐
//! extended_protocol (one queue) ────────┼─► connection ══► server
//! peer_copies (server to server) ───────┘   ▲ remote_graph_cache: cached graphs; transfer_tokens: unused tokens
//! mark_tracker (one queue's marks) ◄── session (queues, reads) ◄── notifications ◄══ server
//! ```
//!
//! - Each client queue has its own queue on the server. Server queues run concurrently; WAIT messages order them.
//! - **Coalescing**: a message without a waiting caller stays in the write buffer until a message with one is sent. Inputs
//!   leave together with the graph that reads them, and a mark together with the read after it.
//! - **Marks** are requested (NOTIFY_REACHED) when a caller waits for them, unless a read is under way whose data
//!   also proves the mark.
//!
//! Start reading at `extended_protocol.rs`. The handshake of the extensions is in `hello_ext.rs`.

mod device;
mod extended_protocol;
mod hello_ext;
mod mark_tracker;
mod notifications;
mod peer_copies;
mod remote_graph_cache;
mod session;
#[cfg(test)]
mod tests;
mod transfer_tokens;

pub(super) use device::enumerate;
pub(super) use hello_ext::{MIN_MESSAGE_LIMIT_BYTES, hello_ext};
pub(super) use notifications::read_notification;
pub(crate) use peer_copies::is_sending_queue;
pub(super) use peer_copies::register_connection;
pub(super) use remote_graph_cache::RemoteGraphCache;
pub(super) use session::ClientSession;
