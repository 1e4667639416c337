//! Building blocks of a connection that the client, the server and the links between servers share. On a link, one server is
//! the client of another.
//!
//! ```text
//! handshake: HELLO and GREET             (client, links between servers)
//!   ↓
//! message_writer in a write_slot         (all: whole messages, one thread at a time)
//! due_replies ◄── reply_reader           (client, links: replies in the order of their requests; timeouts)
//!                 read_ahead             (all: input buffer)
//! ```

mod due_replies;
mod handshake;
mod message_writer;
mod read_ahead;
mod reply_reader;
mod write_slot;

pub(in crate::rpc) use due_replies::{DueReplies, DueReply};
pub(in crate::rpc) use handshake::{Handshake, HandshakeError, ServerHello};
pub(in crate::rpc) use message_writer::{MAX_COALESCED_BYTES, MessageWriter};
pub(in crate::rpc) use read_ahead::{ByteSource, ReadAhead};
pub(in crate::rpc) use reply_reader::{ReadError, ReplyReader, Requester, Timeouts};
pub(in crate::rpc) use write_slot::{Poisoned, WriteSlot};
