//! Building blocks of a connection, shared by the client, the server and peer connections. On a peer connection, one server is
//! the client of another. Start with `handshake`.
//!
//! ```text
//! handshake: HELLO and HELLO_EXT             (client, peer connections)
//!   ↓
//! message_writer in a mutex              (all: whole messages, one thread at a time)
//! due_replies ◄── reply_reader           (client, peer connections: replies in the order of their requests; timeouts)
//!                 read_ahead             (all: input buffer)
//! ```

mod due_replies;
mod handshake;
mod message_writer;
mod read_ahead;
mod reply_reader;

pub(in crate::rpc) use due_replies::{DueReplies, DueReply};
pub(in crate::rpc) use handshake::{Handshake, HandshakeError, ServerHello};
pub(in crate::rpc) use message_writer::{MAX_COALESCED_BYTES, MessageWriter};
pub(in crate::rpc) use read_ahead::{ByteSource, MAX_UNREAD, ReadAhead};
pub(in crate::rpc) use reply_reader::{ReadError, ReplyReader, Requester, Timeouts};
