//! fanout's extensions to the protocol, spoken where both ends are fanout: commands from 128 on, and notices.
//!
//! A server announces them in the byte of its HELLO reply that 7.0 leaves unused ([`Greeting`]); a client takes them up with
//! a GREET. From the reply to that on, whatever the server sends is a [`Notice`]. What each message means: `docs/protocol.md`.

mod answer;
mod command;
mod fault;
mod greet;
mod notice;
mod request;

pub use answer::Answer;
pub use command::{ExtCommand, ExtHeader, TICKET};
pub use fault::{Fault, FaultKind};
pub use greet::{Abilities, DeviceRecord, GreetReply, Greeting, REVISION, State};
pub use notice::{NOTICE_HEADER, Notice, NoticeHeader, NoticeKind};
pub use request::{
    Ask, CloseQueue, Copy, ExtRequest, Fill, Greet, KeepGraph, Load, Mark, NO_TENSOR, OpenQueue, PUT_HEAD, Ping, Put,
    Reach, Read, Receive, RunGraph, Send, Shape, Span, Spans, Support, Ticket, TicketList, Tickets, WRITE_HEAD, Wait,
    WriteHead,
};

use super::codec::{Reader, WireError};

/// Reads a text: its length in bytes as u32, then UTF-8.
fn text<'a>(r: &mut Reader<'a>, what: &'static str) -> Result<&'a str, WireError> {
    let len = r.u32(what)?;
    let bytes = r.bytes(what, usize::try_from(len).unwrap_or(usize::MAX))?;
    str::from_utf8(bytes).map_err(|e| WireError::BadValue {
        what,
        expected: "UTF-8",
        have: bytes.get(e.valid_up_to()).map_or(0, |&byte| byte.into()),
    })
}

/// Writes a text. No sender has one of 4 GiB; its end would be cut off.
fn write_text(text: &str, out: &mut Vec<u8>) {
    let mut end = text.len().min(u32::MAX as usize);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u32).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// Bytes of a text on the wire.
fn text_size(text: &str) -> u64 {
    4 + text.len() as u64
}
