//! What a server sends to a client that has greeted: each message says what it is.

use super::super::codec::{Field, Reader, WireError};
use super::greet::State;
use super::{Fault, text, write_text};

/// Bytes of a notice's header: `kind u8 | size u64`.
pub const NOTICE_HEADER: usize = 9;

/// What a notice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum NoticeKind {
    /// The reply to the oldest request that has one and has not got it.
    Reply = 0,
    /// A moment is reached.
    Reached = 1,
    /// The bytes of a READ.
    Data = 2,
    /// A queue has failed.
    Failed = 3,
    /// The client did what it must not: the connection ends.
    Refused = 4,
    /// The server's state has changed.
    State = 5,
}

/// The header before a notice's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoticeHeader {
    /// What it is.
    pub kind: NoticeKind,
    /// Bytes of the body, as the peer says: a reader knows what it asked for.
    pub size: u64,
}

impl NoticeHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// [`WireError::BadValue`] for a kind that is none.
    pub fn decode(bytes: &[u8; NOTICE_HEADER]) -> Result<NoticeHeader, WireError> {
        let [kind, size @ ..] = *bytes;
        let kind = match kind {
            0 => NoticeKind::Reply,
            1 => NoticeKind::Reached,
            2 => NoticeKind::Data,
            3 => NoticeKind::Failed,
            4 => NoticeKind::Refused,
            5 => NoticeKind::State,
            have => return Err(WireError::BadValue { what: "notice", expected: "0 to 5", have: have.into() }),
        };
        Ok(NoticeHeader { kind, size: u64::from_le_bytes(size) })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; NOTICE_HEADER] {
        let mut bytes = [self.kind as u8; NOTICE_HEADER];
        bytes[1..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }
}

/// Any notice.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notice<'a> {
    /// The body of a reply, of 7.0 or of the extensions.
    Reply(&'a [u8]),
    /// All that the queue was sent before its mark `number` is done, and that before earlier marks too.
    Reached {
        /// The queue.
        queue: u32,
        /// The mark.
        number: u64,
    },
    /// What READ `id` asked for, its spans one after the other.
    Data {
        /// The number that the READ had.
        id: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Nothing more of the queue is done, and no more of its marks are reached.
    Failed {
        /// The queue.
        queue: u32,
        /// Why.
        fault: Fault,
    },
    /// Why the connection ends.
    Refused(&'a str),
    /// What the server is now.
    State(State),
}

impl<'a> Notice<'a> {
    /// What it is.
    pub const fn kind(&self) -> NoticeKind {
        match self {
            Notice::Reply(_) => NoticeKind::Reply,
            Notice::Reached { .. } => NoticeKind::Reached,
            Notice::Data { .. } => NoticeKind::Data,
            Notice::Failed { .. } => NoticeKind::Failed,
            Notice::Refused(_) => NoticeKind::Refused,
            Notice::State(_) => NoticeKind::State,
        }
    }

    /// Reads the body of a notice.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing or wrong.
    pub fn decode(kind: NoticeKind, body: &'a [u8]) -> Result<Notice<'a>, WireError> {
        let mut r = Reader::new(body);
        let notice = match kind {
            NoticeKind::Reply => Notice::Reply(r.rest()),
            NoticeKind::Reached => Notice::Reached { queue: r.u32("queue")?, number: r.u64("number")? },
            NoticeKind::Data => Notice::Data { id: r.u64("id")?, bytes: r.rest() },
            NoticeKind::Failed => Notice::Failed { queue: r.u32("queue")?, fault: Fault::read(&mut r)? },
            NoticeKind::Refused => Notice::Refused(text(&mut r, "reason")?),
            NoticeKind::State => Notice::State(State::read(&mut r)?),
        };
        r.finish("notice")?;
        Ok(notice)
    }

    /// Appends the whole frame: header and body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; NOTICE_HEADER]);
        match self {
            Notice::Reply(body) => out.extend_from_slice(body),
            Notice::Reached { queue, number } => {
                queue.write(out);
                number.write(out);
            }
            Notice::Data { id, bytes } => {
                id.write(out);
                out.extend_from_slice(bytes);
            }
            Notice::Failed { queue, fault } => {
                queue.write(out);
                fault.write(out);
            }
            Notice::Refused(reason) => write_text(reason, out),
            Notice::State(state) => out.push(*state as u8),
        }
        let header = NoticeHeader { kind: self.kind(), size: (out.len() - start - NOTICE_HEADER) as u64 };
        out[start..start + NOTICE_HEADER].copy_from_slice(&header.encode());
    }
}
