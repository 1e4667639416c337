//! Reads and dispatches the messages of a server: replies in the order of their requests, and unsolicited messages. Detects
//! silence and overdue replies, and drives the heartbeat.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::{ByteSource, DueReplies, ReadAhead};
use crate::rpc::transport::{Deadline, Receiver, TransportError};

/// Timeouts of a connection to a server.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc) struct Timeouts {
    /// Longest silence of the server while a reply is outstanding.
    pub(in crate::rpc) silence: Duration,
    /// Longest time for which a reply may be outstanding, whatever else the server sends.
    pub(in crate::rpc) reply: Duration,
    /// Heartbeat interval: after this time of silence the client sends a PING, so that a frozen server is noticed also while no
    /// reply is outstanding. `None`: no heartbeat.
    pub(in crate::rpc) heartbeat: Option<Duration>,
}

impl Timeouts {
    /// Time of silence after which the connection is checked.
    fn idle_check_interval(&self) -> Duration {
        self.heartbeat.unwrap_or(self.silence)
    }
}

/// The requesting end of a connection.
pub(in crate::rpc) trait Requester {
    /// Destination of a reply.
    type Sink;
    /// Failure of the connection.
    type Failure: Clone;

    fn replies(&self) -> &DueReplies<Self::Sink, Self::Failure>;

    fn timeouts(&self) -> Timeouts;

    /// Delivers a reply. `Err` describes why the reply is invalid.
    fn deliver(&self, to: Self::Sink, body: Vec<u8>) -> Result<(), String>;

    /// The oldest outstanding request, and its time.
    fn oldest_request_due(&self) -> Option<(&'static str, Instant)> {
        self.replies().front().map(|(command, _, since)| (command, since))
    }

    /// When the server last accepted a part of a long message. A server that accepts data is alive.
    fn last_write_time(&self) -> Option<Instant> {
        None
    }

    /// Sends the heartbeat.
    fn send_heartbeat(&self) {}

    /// Counts received bytes.
    fn count_received(&self, _bytes: usize) {}
}

/// Why reading from a connection must end.
#[derive(Debug, Error)]
pub(in crate::rpc) enum ReadError {
    #[error("the server closed the connection")]
    Ended,
    #[error(transparent)]
    Lost(#[from] TransportError),
    #[error("the server sent no byte for {after:?} while the reply to {command} was outstanding")]
    Silent { command: &'static str, after: Duration },
    #[error("no reply to {command} within {after:?}")]
    Overdue { command: &'static str, after: Duration },
    #[error("the server sent a reply without an outstanding request")]
    Unexpected,
    #[error("the reply to {command} has {size} bytes, expected {len:?}")]
    Length { command: &'static str, size: u64, len: RangeInclusive<u64> },
    #[error("no memory for the {len} bytes of a reply to {command}")]
    Memory { command: &'static str, len: u64 },
    #[error("{command}: {reason}")]
    InvalidReply { command: &'static str, reason: String },
    /// An unsolicited message is invalid, or announces the end of the connection.
    #[error("{0}")]
    Notification(String),
}

/// The reading side of a connection; used by one thread.
pub(in crate::rpc) struct ReplyReader<R> {
    requester: Arc<R>,
    incoming: IncomingBytes<R>,
    ahead: ReadAhead,
}

/// Received bytes, and the state of the timeouts.
struct IncomingBytes<R> {
    requester: Arc<R>,
    receiver: Receiver,
    timeouts: Timeouts,
    /// When the server last sent any byte.
    last_received: Instant,
    /// When the server last sent a reply.
    last_reply: Instant,
    /// Whether a heartbeat was sent since the last received byte.
    heartbeat_sent: bool,
}

impl<R: Requester> ReplyReader<R> {
    pub(in crate::rpc) fn new(requester: Arc<R>, receiver: Receiver) -> ReplyReader<R> {
        let (now, timeouts) = (Instant::now(), requester.timeouts());
        let incoming_requester = Arc::clone(&requester);
        let incoming = IncomingBytes {
            requester: incoming_requester,
            receiver,
            timeouts,
            last_received: now,
            last_reply: now,
            heartbeat_sent: false,
        };
        ReplyReader { requester, incoming, ahead: ReadAhead::new() }
    }

    pub(in crate::rpc) fn requester(&self) -> &Arc<R> {
        &self.requester
    }

    /// Reads the body of the next expected reply, and delivers it.
    pub(in crate::rpc) fn read_reply(&mut self, size: u64) -> Result<(), ReadError> {
        let (command, len, _) = self.requester.replies().front().ok_or(ReadError::Unexpected)?;
        if !len.contains(&size) {
            return Err(ReadError::Length { command, size, len });
        }
        let body = self.read_bytes(size, command)?;
        self.record_reply();
        // No reply is outstanding if another thread has failed the connection in the meantime.
        let Some(reply) = self.requester.replies().pop() else { return Ok(()) };
        self.requester.deliver(reply.sink, body).map_err(|reason| ReadError::InvalidReply { command, reason })
    }

    /// Records that the server has replied to a request.
    pub(in crate::rpc) fn record_reply(&mut self) {
        self.incoming.last_reply = self.incoming.last_received;
    }

    /// Fails when the oldest reply is overdue. A server that sends other messages is not silent, but its replies still have a
    /// deadline.
    pub(in crate::rpc) fn check_overdue(&self) -> Result<(), ReadError> {
        self.incoming.check_overdue()
    }

    /// Reads the next `len` bytes into new memory. The caller has compared `len` with the length that its request expects.
    pub(in crate::rpc) fn read_bytes(&mut self, len: u64, command: &'static str) -> Result<Vec<u8>, ReadError> {
        let too_long = |_| ReadError::Memory { command, len };
        let mut body = Vec::new();
        let room = usize::try_from(len).map_err(too_long)?;
        body.try_reserve_exact(room).map_err(|_| ReadError::Memory { command, len })?;
        body.resize(room, 0);
        self.read_exact(&mut body)?;
        Ok(body)
    }

    /// Drops the next bytes.
    pub(in crate::rpc) fn skip(&mut self, len: u64) -> Result<(), ReadError> {
        self.ahead.skip(len, &mut self.incoming)
    }

    pub(in crate::rpc) fn read_exact(&mut self, dst: &mut [u8]) -> Result<(), ReadError> {
        self.ahead.read_exact(dst, &mut self.incoming)
    }
}

impl<R: Requester> ByteSource for IncomingBytes<R> {
    type Error = ReadError;

    fn ended() -> ReadError {
        ReadError::Ended
    }

    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, ReadError> {
        let mut wait = self.timeouts.idle_check_interval();
        loop {
            match self.receiver.read_into(dst, &Deadline::after(wait)) {
                Ok(n) => {
                    self.last_received = Instant::now();
                    self.heartbeat_sent = false;
                    self.requester.count_received(n);
                    return Ok(n);
                }
                Err(TransportError::TimedOut { .. }) => wait = self.handle_silence()?,
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl<R: Requester> IncomingBytes<R> {
    fn check_overdue(&self) -> Result<(), ReadError> {
        let (last_received, after) = (self.last_received, self.timeouts.reply);
        if last_received.duration_since(self.last_reply) < after {
            return Ok(());
        }
        match self.requester.replies().front() {
            Some((command, _, since)) if last_received.duration_since(since.max(self.last_reply)) >= after => {
                Err(ReadError::Overdue { command, after })
            }
            _ => Ok(()),
        }
    }

    /// Handles a silence of the server. Returns how long to wait before the next check; `Err` when the silence was too long.
    fn handle_silence(&mut self) -> Result<Duration, ReadError> {
        let (after, pause) = (self.timeouts.silence, self.timeouts.idle_check_interval());
        let oldest = self.requester.oldest_request_due();
        let alive =
            self.requester.last_write_time().map_or(self.last_received, |written| written.max(self.last_received));
        let silent = oldest.map_or(alive, |(_, since)| since.max(alive)).elapsed();
        if let Some((command, _)) = oldest.filter(|_| silent >= after) {
            return Err(ReadError::Silent { command, after });
        }
        if silent < pause {
            return Ok(pause - silent);
        }
        // Also while no reply is outstanding: another server may wait for this server's work, and no other thread checks this
        // server.
        if !std::mem::replace(&mut self.heartbeat_sent, true) {
            self.requester.send_heartbeat();
        }
        Ok(if oldest.is_some() { after - silent } else { pause })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::transport::memory::{LinkConditions, pair};

    /// A requester with a reply timeout of zero: each reply is overdue at once.
    struct OverdueRequester(DueReplies<(), String>);

    impl Requester for OverdueRequester {
        type Sink = ();
        type Failure = String;

        fn replies(&self) -> &DueReplies<(), String> {
            &self.0
        }

        fn timeouts(&self) -> Timeouts {
            Timeouts { silence: Duration::from_secs(30), reply: Duration::ZERO, heartbeat: None }
        }

        fn deliver(&self, (): (), _: Vec<u8>) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn overdue_replies_are_detected_after_other_messages() {
        let (server, client) = pair(LinkConditions { seed: 1, cut_after: None });
        let (_receiver, mut sender) = server.split();
        sender.write_all(&[&[7; 4]], Duration::from_secs(30)).unwrap();
        let requester = Arc::new(OverdueRequester(DueReplies::new()));
        requester.0.expect("PING", 0..=0, ()).unwrap();
        let mut reader = ReplyReader::new(requester, client.split().0);
        reader.read_exact(&mut [0; 4]).unwrap();
        assert!(matches!(reader.check_overdue(), Err(ReadError::Overdue { command: "PING", .. })));
    }
}
