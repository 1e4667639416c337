//! Buffered writer of whole messages: small messages are coalesced into one write, large data is sent without a copy.

use std::time::Duration;

use crate::rpc::transport::{Deadline, Sender, TransportError};

/// Coalescing limit: data up to this size is copied after the head of its message and sent in one write.
pub(in crate::rpc) const MAX_COALESCED_BYTES: usize = 64 << 10;

/// The sending half of a connection, with its write buffer.
#[derive(Debug)]
pub(in crate::rpc) struct MessageWriter {
    sender: Sender,
    /// Stall timeout: how long the peer may accept no byte.
    stall: Duration,
    buffer: Vec<u8>,
    /// A message was sent incompletely, so the peer cannot parse any bytes after it.
    broken: bool,
}

impl MessageWriter {
    /// Creates a writer that fails when the peer accepts no byte for `stall`.
    pub(in crate::rpc) fn new(sender: Sender, stall: Duration) -> MessageWriter {
        MessageWriter { sender, stall, buffer: Vec::new(), broken: false }
    }

    /// The write buffer: messages that the next flush sends. Encode further messages after them.
    pub(in crate::rpc) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Sends the buffered messages.
    pub(in crate::rpc) fn flush(&mut self) -> Result<(), TransportError> {
        self.flush_with(&[] as &[&[u8]])
    }

    /// Sends the buffered messages and `parts` after them: in one write if they are small, else without copying `parts`.
    pub(in crate::rpc) fn flush_with(&mut self, parts: &[impl AsRef<[u8]>]) -> Result<(), TransportError> {
        let bytes: usize = parts.iter().map(|part| part.as_ref().len()).sum();
        let mut buffer = std::mem::take(&mut self.buffer);
        let sent = if bytes <= MAX_COALESCED_BYTES {
            parts.iter().for_each(|part| buffer.extend_from_slice(part.as_ref()));
            self.send(&[&buffer])
        } else {
            let all: Vec<&[u8]> = [&buffer[..]].into_iter().chain(parts.iter().map(AsRef::as_ref)).collect();
            self.send(&all)
        };
        buffer.clear();
        buffer.shrink_to(2 * MAX_COALESCED_BYTES);
        self.buffer = buffer;
        sent
    }

    /// Sends the rest of a message without a copy.
    pub(in crate::rpc) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        self.send(&[bytes])
    }

    /// Lingering close, as in HTTP servers: ends the sending direction, then reads and drops the peer's data until the end of
    /// the stream or the deadline. A close with unread input would reset the connection and could destroy data that the peer
    /// has not read yet. No other thread may receive meanwhile.
    pub(in crate::rpc) fn linger(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        self.finish(deadline)?;
        self.sender.drain(deadline)
    }

    /// Half close: the peer sees the end of the stream after the data sent so far, provided there is room for it by the
    /// deadline.
    pub(in crate::rpc) fn finish(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        self.broken = true;
        self.sender.finish(deadline)
    }

    fn send(&mut self, parts: &[&[u8]]) -> Result<(), TransportError> {
        if self.broken {
            return Err(TransportError::cut());
        }
        // Set before the write, so that it also holds after a panic in it.
        self.broken = true;
        self.sender.write_all(parts, self.stall)?;
        self.broken = false;
        Ok(())
    }
}
