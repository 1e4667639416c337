//! Reads what a server sends: replies in the order of their requests, and what it sends unasked. Finds out what is overdue.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::{ByteSource, DueReplies, ReadAhead};
use crate::rpc::transport::{Deadline, Receiver, TransportError};

/// How long a server may take.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc) struct Timeouts {
    /// The longest that it may send nothing while something is due.
    pub(in crate::rpc) silence: Duration,
    /// The longest that it may owe a reply, whatever else it sends.
    pub(in crate::rpc) reply: Duration,
    /// Heartbeat: a server that has been silent for so long is asked whether it is there, so that a frozen one is noticed while
    /// nothing else is due. `None`: it is not asked.
    pub(in crate::rpc) heartbeat: Option<Duration>,
}

impl Timeouts {
    /// How long the server may be silent before it is looked after.
    fn idle_check_interval(&self) -> Duration {
        self.heartbeat.unwrap_or(self.silence)
    }
}

/// The end of a connection that sends the requests.
pub(in crate::rpc) trait Requester {
    /// Where a reply goes.
    type Sink;
    /// Why there are no more replies.
    type Failure: Clone;

    fn replies(&self) -> &DueReplies<Self::Sink, Self::Failure>;

    fn timeouts(&self) -> Timeouts;

    /// Hands a reply over. `Err` is what is wrong with it.
    fn deliver(&self, to: Self::Sink, body: Vec<u8>) -> Result<(), String>;

    /// What has been due for longest, and since when.
    fn oldest_request_due(&self) -> Option<(&'static str, Instant)> {
        self.replies().front().map(|(command, _, since)| (command, since))
    }

    /// When the server last took more of a long message: a server that takes what is sent is there.
    fn last_write_time(&self) -> Option<Instant> {
        None
    }

    /// Sends the heartbeat.
    fn send_heartbeat(&self) {}

    /// Whether all that the server sends here is short, so that a reply that is overdue is so in the middle of a message too.
    fn takes_short_messages_only(&self) -> bool {
        false
    }

    /// Bytes have come.
    fn count_received(&self, _bytes: usize) {}
}

/// Why a connection cannot be read on.
#[derive(Debug, Error)]
pub(in crate::rpc) enum ReadError {
    #[error("the server sends no more")]
    Ended,
    #[error(transparent)]
    Lost(#[from] TransportError),
    #[error("nothing came for {after:?} while {command} was due")]
    Silent { command: &'static str, after: Duration },
    #[error("no reply to {command} within {after:?}")]
    Overdue { command: &'static str, after: Duration },
    #[error("a reply that nothing had asked for")]
    Unexpected,
    #[error("{size} bytes for {command}, {len:?} are possible")]
    Length { command: &'static str, size: u64, len: RangeInclusive<u64> },
    #[error("no memory for the {len} bytes of a reply to {command}")]
    Memory { command: &'static str, len: u64 },
    #[error("{command}: {reason}")]
    InvalidReply { command: &'static str, reason: String },
    /// What the server sent unasked makes no sense, or says that it ends the connection.
    #[error("{0}")]
    Notification(String),
}

/// The reading side of a connection, for one thread.
pub(in crate::rpc) struct ReplyReader<R> {
    requester: Arc<R>,
    incoming: IncomingBytes<R>,
    ahead: ReadAhead,
}

/// What the server sends, and how long it may be silent.
struct IncomingBytes<R> {
    requester: Arc<R>,
    receiver: Receiver,
    timeouts: Timeouts,
    /// When the server last sent anything.
    last_received: Instant,
    /// When the server last brought what it was asked for.
    last_answered: Instant,
    /// Whether it was sent a heartbeat since.
    heartbeat_sent: bool,
}

impl<R: Requester> ReplyReader<R> {
    pub(in crate::rpc) fn new(requester: Arc<R>, receiver: Receiver) -> ReplyReader<R> {
        let (now, timeouts) = (Instant::now(), requester.timeouts());
        let own = Arc::clone(&requester);
        let incoming = IncomingBytes {
            requester: own,
            receiver,
            timeouts,
            last_received: now,
            last_answered: now,
            heartbeat_sent: false,
        };
        ReplyReader { requester, incoming, ahead: ReadAhead::new() }
    }

    pub(in crate::rpc) fn requester(&self) -> &Arc<R> {
        &self.requester
    }

    /// Reads the body of the reply that comes next, and hands it over.
    pub(in crate::rpc) fn read_reply(&mut self, size: u64) -> Result<(), ReadError> {
        let (command, len, _) = self.requester.replies().front().ok_or(ReadError::Unexpected)?;
        if !len.contains(&size) {
            return Err(ReadError::Length { command, size, len });
        }
        let body = self.read_bytes(size, command)?;
        self.record_answer();
        // Nothing is due where another thread has failed the connection meanwhile.
        let Some(reply) = self.requester.replies().pop() else { return Ok(()) };
        self.requester.deliver(reply.sink, body).map_err(|reason| ReadError::InvalidReply { command, reason })
    }

    /// The server has brought what it was asked for.
    pub(in crate::rpc) fn record_answer(&mut self) {
        self.incoming.last_answered = self.incoming.last_received;
    }

    /// A server that sends other things all the while is not silent, but a reply that is due has a deadline too.
    pub(in crate::rpc) fn check_overdue(&self) -> Result<(), ReadError> {
        self.incoming.check_overdue()
    }

    /// The next bytes: no more than a request of this process asked for, which has room for them.
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
        let whole = self.ahead.skip(len, &mut self.incoming)?;
        whole.then_some(()).ok_or(ReadError::Ended)
    }

    pub(in crate::rpc) fn read_exact(&mut self, dst: &mut [u8]) -> Result<(), ReadError> {
        let whole = self.ahead.read_exact(dst, &mut self.incoming)?;
        whole.then_some(()).ok_or(ReadError::Ended)
    }
}

impl<R: Requester> ByteSource for IncomingBytes<R> {
    type Error = ReadError;

    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, ReadError> {
        let mut wait = self.timeouts.idle_check_interval();
        loop {
            match self.receiver.read_into(dst, &Deadline::after(wait)) {
                Ok(n) => {
                    self.last_received = Instant::now();
                    self.heartbeat_sent = false;
                    self.requester.count_received(n);
                    if self.requester.takes_short_messages_only() {
                        self.check_overdue()?;
                    }
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
        let (heard, after) = (self.last_received, self.timeouts.reply);
        if heard.duration_since(self.last_answered) < after {
            return Ok(());
        }
        match self.requester.replies().front() {
            Some((command, _, since)) if heard.duration_since(since.max(self.last_answered)) >= after => {
                Err(ReadError::Overdue { command, after })
            }
            _ => Ok(()),
        }
    }

    /// The server has sent nothing for a while: how long it may go on so. `Err` when that was too long.
    fn handle_silence(&mut self) -> Result<Duration, ReadError> {
        let (after, pause) = (self.timeouts.silence, self.timeouts.idle_check_interval());
        let oldest = self.requester.oldest_request_due();
        let alive = self.requester.last_write_time().map_or(self.last_received, |taken| taken.max(self.last_received));
        let silent = oldest.map_or(alive, |(_, since)| since.max(alive)).elapsed();
        if let Some((command, _)) = oldest.filter(|_| silent >= after) {
            return Err(ReadError::Silent { command, after });
        }
        if silent < pause {
            return Ok(pause - silent);
        }
        // Also where nothing is due: its work may be what another server waits for, and nobody else asks this one.
        if !std::mem::replace(&mut self.heartbeat_sent, true) {
            self.requester.send_heartbeat();
        }
        Ok(if oldest.is_some() { after - silent } else { pause })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::transport::memory::{Weather, pair};

    /// An end that owes a deadline of nothing.
    struct Impatient {
        replies: DueReplies<(), String>,
        short: bool,
    }

    impl Requester for Impatient {
        type Sink = ();
        type Failure = String;

        fn replies(&self) -> &DueReplies<(), String> {
            &self.replies
        }

        fn timeouts(&self) -> Timeouts {
            Timeouts { silence: Duration::from_secs(30), reply: Duration::ZERO, heartbeat: None }
        }

        fn deliver(&self, (): (), _: Vec<u8>) -> Result<(), String> {
            Ok(())
        }

        fn takes_short_messages_only(&self) -> bool {
            self.short
        }
    }

    #[test]
    fn a_reply_is_overdue_within_a_message_where_all_are_short() {
        for short in [false, true] {
            let (server, client) = pair(Weather { seed: 1, cut_after: None });
            let (_receiver, mut sender) = server.split();
            sender.write_all(&[&[7; 4]], Duration::from_secs(30)).unwrap();
            let requester = Arc::new(Impatient { replies: DueReplies::new(), short });
            requester.replies.expect("PING", 0..=0, ()).unwrap();
            let mut reader = ReplyReader::new(requester, client.split().0);
            let read = reader.read_exact(&mut [0; 4]);
            assert_eq!(matches!(read, Err(ReadError::Overdue { command: "PING", .. })), short, "{read:?}");
            assert!(
                matches!(reader.check_overdue(), Err(ReadError::Overdue { .. })),
                "behind a message it is so in any case"
            );
        }
    }
}
