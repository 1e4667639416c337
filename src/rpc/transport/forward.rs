//! Forwarding of one direction of a connection to another connection, as a relay does it.

use std::io::IoSlice;
use std::time::Duration;

use thiserror::Error;

use super::{Deadline, Interest, Receiver, Sender, TransportError};

/// Buffer for bytes of a transport that lends none: as many as TLS seals in one write.
const BUFFER: usize = 64 << 10;

/// Reads without a copy: the reader borrows received bytes from the transport's own memory.
pub(crate) trait LendReceived {
    /// Passes received bytes to `sink`, which returns how many it has taken; the others stay for the next read. Returns how many
    /// bytes were passed, 0 at the end of the stream; `None`: no byte is available. `wanted`: how many bytes the reader expects,
    /// for the size of the input buffer.
    ///
    /// `sink` runs under the lock of the receiving direction, so it must neither block nor read this connection.
    fn try_lend(&self, wanted: usize, sink: &mut dyn FnMut(&[u8]) -> usize) -> Result<Option<usize>, TransportError>;
}

/// Why forwarding ended before the end of the stream, and on which of the two connections.
#[derive(Debug, Error)]
pub(crate) enum ForwardError {
    #[error(transparent)]
    Receive(TransportError),
    #[error(transparent)]
    Send(TransportError),
}

impl Receiver {
    /// Sends everything that arrives here to `to`, until the end of the stream. Returns the number of bytes. The end itself is
    /// not forwarded: [`Sender::finish`] does that.
    ///
    /// Blocks without a time limit: on this connection while nothing arrives, and on `to` while it has no room. So a message costs
    /// one wake-up of the thread, and a peer that does not read stops the sender by TCP's flow control.
    ///
    /// # Errors
    /// [`ForwardError`]. Neither connection is ended then.
    pub(crate) fn forward_to(&mut self, to: &mut Sender) -> Result<u64, ForwardError> {
        if self.0.lender().is_some() { self.forward_lent(to) } else { self.forward_copied(to) }
    }

    /// Writes received bytes from the memory of the transport.
    fn forward_lent(&mut self, to: &mut Sender) -> Result<u64, ForwardError> {
        let (mut total, mut wanted) = (0, 0);
        while let Some(lender) = self.0.lender() {
            let mut sent = Ok(None);
            let mut sink = |bytes: &[u8]| {
                sent = to.0.try_write(&[IoSlice::new(bytes)]);
                sent.as_ref().ok().copied().flatten().unwrap_or(0)
            };
            match lender.try_lend(wanted, &mut sink).map_err(ForwardError::Receive)? {
                Some(0) => break,
                Some(lent) => {
                    // The next record is probably of the same size: a large input buffer for large ones only.
                    wanted = lent;
                    match sent.map_err(ForwardError::Send)? {
                        Some(taken) => total += taken as u64,
                        None => _ = to.0.wait(Interest::Write, &no_deadline()).map_err(ForwardError::Send)?,
                    }
                }
                None => {
                    to.flush(Duration::MAX).map_err(ForwardError::Send)?;
                    self.0.wait(Interest::Read, &no_deadline()).map_err(ForwardError::Receive)?;
                }
            }
        }
        Ok(total)
    }

    /// Reads into a buffer, and writes from there.
    fn forward_copied(&mut self, to: &mut Sender) -> Result<u64, ForwardError> {
        let (mut total, mut buffer) = (0, vec![0; BUFFER]);
        loop {
            let read = self.read_into(&mut buffer, &no_deadline()).map_err(ForwardError::Receive)?;
            if read == 0 {
                return Ok(total);
            }
            let bytes = buffer.get(..read).unwrap_or_default();
            to.write_all(&[bytes], Duration::MAX).map_err(ForwardError::Send)?;
            total += read as u64;
        }
    }
}

/// Idle connections may stay open.
fn no_deadline() -> Deadline {
    Deadline::after(Duration::MAX)
}
