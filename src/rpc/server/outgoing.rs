//! The writing half of a client's socket: whole messages, from whichever thread of the session has one.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Broken, positive};
use crate::rpc::wire::ext::Notice;

/// A message with at most so many bytes of data is copied behind its header and leaves in one write.
const JOINED: usize = 64 << 10;

/// How long a client that is refused may take to read why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a client of the socket has to be able to take.
const UNREAD: &str = "the client took none of its reply";

/// Writes messages one at a time.
pub(super) struct Outgoing {
    stream: Arc<TcpStream>,
    stall: Duration,
    sending: Mutex<Sending>,
}

#[derive(Default)]
struct Sending {
    buffer: Vec<u8>,
    /// A message was cut off: nothing that came after it could be understood.
    cut: bool,
    /// Why a thread that is not the session's could send nothing more.
    given_up: Option<(&'static str, Broken)>,
}

impl Outgoing {
    /// The writing half of a socket, whose client takes something at least every `stall`.
    pub(super) fn new(stream: &Arc<TcpStream>, stall: Duration) -> io::Result<Arc<Outgoing>> {
        stream.set_write_timeout(Some(positive(stall)))?;
        Ok(Arc::new(Outgoing { stream: Arc::clone(stream), stall, sending: Mutex::default() }))
    }

    /// Sends what `head` puts into the empty buffer, and `parts` behind it, with nothing of another thread between: in one
    /// write, or without copying what is large. Nothing is sent where `head` puts nothing there.
    pub(super) fn send(&self, head: impl FnOnce(&mut Vec<u8>), parts: &[impl AsRef<[u8]>]) -> Result<(), Broken> {
        let mut sending = self.lock();
        let Sending { buffer, cut, .. } = &mut *sending;
        if *cut {
            return Err(Broken::Io(ErrorKind::BrokenPipe.into()));
        }
        buffer.clear();
        head(buffer);
        if buffer.is_empty() {
            return Ok(());
        }
        let bytes: usize = parts.iter().map(|part| part.as_ref().len()).sum();
        let joined = bytes <= JOINED;
        if joined {
            parts.iter().for_each(|part| buffer.extend_from_slice(part.as_ref()));
        }
        let mut sent = (&*self.stream).write_all(buffer);
        if !joined {
            sent = sent.and_then(|()| parts.iter().try_for_each(|part| (&*self.stream).write_all(part.as_ref())));
        }
        *cut = sent.is_err();
        sent.map_err(|e| Broken::of(e, UNREAD, self.stall))
    }

    /// Sends bytes as they are.
    pub(super) fn send_bytes(&self, bytes: &[u8]) -> Result<(), Broken> {
        let mut sending = self.lock();
        let sent = (&*self.stream).write_all(bytes);
        sending.cut |= sent.is_err();
        sent.map_err(|e| Broken::of(e, UNREAD, self.stall))
    }

    /// Sends a notice that has no large data.
    pub(super) fn notice(&self, notice: &Notice<'_>) -> Result<(), Broken> {
        self.send(|out| notice.encode(out), &[] as &[&[u8]])
    }

    /// Ends the connection for a thread that could not send what it had to; the session, which may wait for the client,
    /// finds out by that. A client that left without waiting for it is no reason.
    pub(super) fn give_up(&self, what: &'static str, broken: Broken) {
        if !broken.is_leaving() {
            self.lock().given_up.get_or_insert((what, broken));
        }
        self.close();
    }

    /// What some thread gave up for, once.
    pub(super) fn given_up(&self) -> Option<(&'static str, Broken)> {
        self.lock().given_up.take()
    }

    /// Ends the connection, whichever thread has it open yet.
    pub(super) fn close(&self) {
        // Fails where the client was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says why the connection ends, and ends it. What the client has sent meanwhile is read for a moment: a system that is
    /// left with unread bytes may throw away what the client has not read either.
    pub(super) fn refuse(&self, reason: &str) {
        if self.notice(&Notice::Refused(reason)).is_ok() && self.stream.shutdown(Shutdown::Write).is_ok() {
            let until = Instant::now() + LAST_WORDS;
            let mut rest = [0; 4096];
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let set = self.stream.set_read_timeout(Some(left));
                if left.is_zero() || set.is_err() || !matches!((&*self.stream).read(&mut rest), Ok(1..)) {
                    break;
                }
            }
        }
        self.close();
    }

    fn lock(&self) -> MutexGuard<'_, Sending> {
        // Whoever panics while it writes leaves a message cut off: it is the session's end either way.
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
