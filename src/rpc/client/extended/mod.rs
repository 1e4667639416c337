//! The client's side of fanout's extensions: what is said to a server that has greeted, and what it says (`docs/protocol.md`).
//!
//! ```text
//! device ──► support (asked once) ─┐
//! speaker (one queue's words) ─────┼─► connection ══► server
//! peers (copies between servers) ──┘   ▲ graphs: which of them the server keeps; tickets: which of them are used
//! track (one queue's marks) ◄── session (queues, reads) ◄── hear (notices) ◄══ server
//! ```
//!
//! - Each queue is a queue of the server's: they are ordered by what is said, WAIT, and go on at the same time.
//! - What nobody waits for yet stays in the writer's buffer until something leaves that somebody does: inputs leave with the
//!   graph that reads them, a mark with the read behind it.
//! - A mark is asked for when somebody wants to know of it, unless a read of the moment is under way, whose bytes say it too.

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
pub(super) use peer_copies::register_connection;
pub(super) use remote_graph_cache::RemoteGraphCache;
pub(super) use session::ClientSession;
