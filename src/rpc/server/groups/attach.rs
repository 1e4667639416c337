//! What a link receives from the other server: the reply to ATTACH_GROUP, replies to PINGs, and changes of its state.

use std::time::{Duration, Instant};

use log::debug;

use super::MAX_REASON_BYTES;
use crate::printable::breaks_lines;
use crate::rpc::server::peers::describe_transport_error;
use crate::rpc::transport::{Deadline, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{
    AttachGroup, ExtCommand, ExtRequest, ExtResponse, NOTIFICATION_HEADER, Notification, NotificationHeader,
    NotificationKind, Ping,
};

/// Longest message that is read.
const MAX_MESSAGE_BYTES: u64 = 64 << 10;

/// Limit of the messages of each second before the reply to ATTACH_GROUP, and of further ones: a server that waits for its queues
/// sends SERVER_STATE once a second.
const MAX_PER_SECOND: u64 = 2;
const MAX_FURTHER: u64 = 64;

/// Time between two PINGs, so that an idle timeout above it does not end the connection.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Limit of the messages of one such time: the reply to a PING, and SERVER_STATE once a second.
const MAX_PER_HEARTBEAT: usize = 64;

/// Limit of the time in which the rest of a message arrives.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// A message of the other server.
enum Received {
    /// The body of a reply.
    Reply(Vec<u8>),
    ServerState,
}

/// Reads a message.
///
/// # Errors
/// A text for the client: it quotes nothing that was read, since the other end may be a service that is no business of the
/// client.
fn read_message(receiver: &mut Receiver, deadline: &Deadline) -> Result<Received, String> {
    let lost = |e: TransportError| match e {
        e if e.is_timeout() => "no reply in time".to_owned(),
        e => describe_transport_error(&e),
    };
    let invalid = || "it sent an invalid message".to_owned();
    let mut header = [0; NOTIFICATION_HEADER];
    receiver.read_exact(&mut header, deadline).map_err(lost)?;
    let NotificationHeader { kind, size } = NotificationHeader::decode(&header).map_err(|_| invalid())?;
    if size > MAX_MESSAGE_BYTES {
        return Err(invalid());
    }
    let mut body = vec![0; size as usize];
    receiver.read_exact(&mut body, deadline).map_err(lost)?;
    if kind == NotificationKind::Reply {
        return Ok(Received::Reply(body));
    }
    match Notification::decode(kind, &body).map_err(|_| invalid())? {
        Notification::ServerState(_) => Ok(Received::ServerState),
        Notification::ProtocolError(why) => {
            debug!("a server of a group reports a protocol error: {}", displayable_reason(why));
            Err("it reports a protocol error".to_owned())
        }
        _ => Err(invalid()),
    }
}

/// Sends ATTACH_GROUP and waits for the reply.
///
/// # Errors
/// A text for the client. It quotes only the reason of a fanout server.
pub(super) fn attach(
    sender: &mut Sender,
    receiver: &mut Receiver,
    request: AttachGroup,
    timeout: Duration,
) -> Result<(), String> {
    let deadline = Deadline::after(timeout);
    let mut message = Vec::new();
    ExtRequest::AttachGroup(request).encode(&mut message);
    sender.write_by(&message, &deadline).map_err(|e| describe_transport_error(&e))?;
    // Messages that have arrived are read without a wait, so the deadline of a read is not enough.
    for _ in 0..timeout.as_secs() * MAX_PER_SECOND + MAX_FURTHER {
        if let Received::Reply(body) = read_message(receiver, &deadline)? {
            return match ExtResponse::decode(ExtCommand::AttachGroup, &body) {
                Ok(ExtResponse::AttachGroup(attached)) => attached.map_err(displayable_reason),
                _ => Err("it sent an invalid reply".to_owned()),
            };
        }
        if deadline.remaining().is_none() {
            return Err("no reply in time".to_owned());
        }
    }
    Err("it sends messages, but no reply".to_owned())
}

/// The reason of another server, of limited length and on one line.
pub(super) fn displayable_reason(reason: &str) -> String {
    let end = reason.floor_char_boundary(MAX_REASON_BYTES);
    let printable = |c: char| if breaks_lines(c) { ' ' } else { c };
    reason.get(..end).unwrap_or_default().chars().map(printable).collect()
}

/// The heartbeat of a link: PINGs, and the messages of the other server.
pub(super) struct Heartbeat {
    next: Instant,
    /// When the oldest PING without a reply had left.
    unanswered_since: Option<Instant>,
    /// Messages since then.
    received: usize,
    counted_since: Instant,
    stall: Duration,
}

impl Heartbeat {
    /// `stall`: limit of the time without a reply to a PING.
    pub(super) fn new(stall: Duration) -> Heartbeat {
        Heartbeat {
            next: Instant::now() + HEARTBEAT,
            unanswered_since: None,
            received: 0,
            counted_since: Instant::now(),
            stall,
        }
    }

    /// Time until the next PING.
    pub(super) fn remaining(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// A PING, if one is due.
    pub(super) fn take_ping(&mut self) -> Option<Vec<u8>> {
        if !self.remaining().is_zero() {
            return None;
        }
        self.next = Instant::now() + HEARTBEAT;
        let mut ping = Vec::new();
        ExtRequest::Ping(Ping {}).encode(&mut ping);
        self.unanswered_since.is_none().then_some(ping)
    }

    /// Records that a PING has left.
    pub(super) fn ping_sent(&mut self) {
        self.unanswered_since = Some(Instant::now());
    }

    /// Reads the messages that have arrived.
    ///
    /// # Errors
    /// A text for the client: why the connection is of no use.
    pub(super) fn receive(&mut self, receiver: &mut Receiver) -> Result<(), String> {
        if self.counted_since.elapsed() > HEARTBEAT {
            (self.counted_since, self.received) = (Instant::now(), 0);
        }
        while receiver.readable() {
            self.received += 1;
            if self.received > MAX_PER_HEARTBEAT {
                return Err("it sends more messages than a server does".to_owned());
            }
            if let Received::Reply(_) = read_message(receiver, &Deadline::after(MESSAGE_TIMEOUT))? {
                self.unanswered_since = None;
            }
        }
        match self.unanswered_since {
            Some(since) if since.elapsed() > self.stall => {
                Err(format!("it has not replied to a PING for {:?}", since.elapsed()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_short_line() {
        assert_eq!(displayable_reason("a\u{200f}\u{feff}\nb"), "a   b");
        assert_eq!(displayable_reason(&"é".repeat(2000)).len(), MAX_REASON_BYTES);
    }
}
