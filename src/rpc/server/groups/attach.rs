//! What a link receives from the other server: the reply to ATTACH_GROUP, replies to PINGs, and changes of its state.

use crate::sync::{self, Instant};
use std::time::Duration;

use super::MAX_REASON_BYTES;
use crate::printable::breaks_lines;
use crate::rpc::server::peers::{PeerMessage, describe_transport_error, read_message};
use crate::rpc::transport::{Deadline, Receiver, Sender};
use crate::rpc::wire::ext::{AttachGroup, ExtCommand, ExtRequest, ExtResponse, Ping};

/// Messages that are accepted before the reply to ATTACH_GROUP: per second of the timeout, and further ones. A waiting server sends
/// SERVER_STATE once a second.
const MAX_PER_SECOND: u64 = 2;
const MAX_FURTHER: u64 = 64;

/// Interval of PINGs: any idle timeout that is longer leaves the connection open.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Messages that are accepted between two PINGs: the reply to a PING, and SERVER_STATE once a second.
const MAX_PER_HEARTBEAT: usize = 64;

/// Limit of the time in which the rest of a message arrives.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

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
    // A read of bytes that have already arrived ignores the deadline, so a count of messages stops a server that floods.
    for _ in 0..timeout.as_secs() * MAX_PER_SECOND + MAX_FURTHER {
        match read_message(receiver, &deadline, MESSAGE_TIMEOUT)? {
            Some(PeerMessage::Reply(body)) => {
                return match ExtResponse::decode(ExtCommand::AttachGroup, &body) {
                    Ok(ExtResponse::AttachGroup(attached)) => attached.map_err(displayable_reason),
                    _ => Err("it sent an invalid reply".to_owned()),
                };
            }
            Some(PeerMessage::ServerState) if deadline.remaining().is_some() => {}
            _ => return Err("no reply in time".to_owned()),
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
            next: sync::now() + HEARTBEAT,
            unanswered_since: None,
            received: 0,
            counted_since: sync::now(),
            stall,
        }
    }

    /// Time until the next PING.
    pub(super) fn remaining(&self) -> Duration {
        self.next.saturating_duration_since(sync::now())
    }

    /// A PING, if one is due.
    pub(super) fn take_ping(&mut self) -> Option<Vec<u8>> {
        if !self.remaining().is_zero() {
            return None;
        }
        self.next = sync::now() + HEARTBEAT;
        let mut ping = Vec::new();
        ExtRequest::Ping(Ping {}).encode(&mut ping);
        self.unanswered_since.is_none().then_some(ping)
    }

    /// Records that a PING has left.
    pub(super) fn ping_sent(&mut self) {
        self.unanswered_since = Some(sync::now());
    }

    /// Reads the messages that have arrived.
    ///
    /// # Errors
    /// A text for the client: why the connection is of no use.
    pub(super) fn receive(&mut self, receiver: &mut Receiver) -> Result<(), String> {
        let now = sync::now();
        if now.saturating_duration_since(self.counted_since) > HEARTBEAT {
            (self.counted_since, self.received) = (now, 0);
        }
        while receiver.readable() {
            self.received += 1;
            if self.received > MAX_PER_HEARTBEAT {
                return Err("it sends more messages than a server does".to_owned());
            }
            let message = read_message(receiver, &Deadline::after(MESSAGE_TIMEOUT), MESSAGE_TIMEOUT)?;
            if let Some(PeerMessage::Reply(_)) = message {
                self.unanswered_since = None;
            }
        }
        match self.unanswered_since.map(|since| sync::now().saturating_duration_since(since)) {
            Some(late) if late > self.stall => Err(format!("it has not replied to a PING for {late:?}")),
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
