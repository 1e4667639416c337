//! Writes whole messages: small ones joined into one write, large data from where it lies.

use std::time::Duration;

use crate::rpc::transport::{Deadline, Sender, TransportError};

/// Data of at most so many bytes is copied behind the head of its message and leaves in one write.
pub(in crate::rpc) const MAX_COALESCED_BYTES: usize = 64 << 10;

/// The sending half of a connection with the messages that have yet to leave.
#[derive(Debug)]
pub(in crate::rpc) struct MessageWriter {
    sender: Sender,
    /// How long the peer may take nothing.
    stall: Duration,
    buffer: Vec<u8>,
    /// A message was cut off: nothing that came after it could be understood.
    broken: bool,
}

impl MessageWriter {
    /// Writes to a peer that takes something at least every `stall`.
    pub(in crate::rpc) fn new(sender: Sender, stall: Duration) -> MessageWriter {
        MessageWriter { sender, stall, buffer: Vec::new(), broken: false }
    }

    /// Messages that leave with the next flush: encode further ones behind them.
    pub(in crate::rpc) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Sends the buffered messages.
    pub(in crate::rpc) fn flush(&mut self) -> Result<(), TransportError> {
        self.flush_with(&[] as &[&[u8]])
    }

    /// Sends the buffered messages with `parts` behind them: in one write, or without copying what is large.
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

    /// Sends the rest of a message, from where it lies.
    pub(in crate::rpc) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        self.send(&[bytes])
    }

    /// Lingering close, as HTTP servers do it: nothing more is sent, the peer sees the end behind what was, and what it sends until
    /// the deadline, or its own end, is dropped. Nobody else may receive meanwhile.
    pub(in crate::rpc) fn linger(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        self.finish(deadline)?;
        self.sender.drain(deadline)
    }

    /// Nothing more is sent, and the peer sees the end behind what was, if there is room for it by the deadline.
    pub(in crate::rpc) fn finish(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        self.broken = true;
        self.sender.finish(deadline)
    }

    fn send(&mut self, parts: &[&[u8]]) -> Result<(), TransportError> {
        if self.broken {
            return Err(TransportError::cut());
        }
        // Also where a panic ends this.
        self.broken = true;
        self.sender.write_all(parts, self.stall)?;
        self.broken = false;
        Ok(())
    }
}
