//! Building blocks of a connection.
#![allow(dead_code, reason = "the library uses what no harness does")]

#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/connection/due_replies.rs"]
mod due_replies;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/connection/message_writer.rs"]
mod message_writer;

pub(in crate::rpc) use due_replies::{DueReplies, DueReply};
pub(in crate::rpc) use message_writer::MessageWriter;

use super::transport::{Aborter, Connection, Receiver, Sender};

/// A connection whose handshake is complete.
pub(in crate::rpc) struct Handshake {
    pub(in crate::rpc) aborter: Aborter,
    pub(in crate::rpc) receiver: Receiver,
    pub(in crate::rpc) sender: Sender,
    /// As in the library, whose users match the fields that they need, and the others by `..`.
    pub(in crate::rpc) sent: u64,
}

impl Handshake {
    pub(in crate::rpc) fn new(connection: Connection) -> Handshake {
        let aborter = connection.aborter();
        let (receiver, sender) = connection.split();
        Handshake { aborter, receiver, sender, sent: 0 }
    }
}
