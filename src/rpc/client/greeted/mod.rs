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
mod graphs;
mod greet;
mod hear;
mod peers;
mod session;
mod speaker;
#[cfg(test)]
mod tests;
mod tickets;
mod track;

pub(super) use device::enumerate;
pub(super) use graphs::Kept;
pub(super) use greet::{LEAST, greet};
pub(super) use hear::notice;
pub(super) use peers::enlist;
pub(super) use session::Session;
