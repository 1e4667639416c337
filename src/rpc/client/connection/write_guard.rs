//! What is said on a connection while nobody else says anything.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::completion_probe::DeviceWriteState;
use super::{ConnectionShared, DeferredSends, MAX_COALESCED_BYTES, ReplySink, WRITE_CHUNK_BYTES, WriterState, lock};
use crate::device::DeviceError;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::{BodySize, Command, FreeBuffer, Request};

/// The right to write messages.
pub(in crate::rpc::client) struct WriteGuard<'a> {
    pub(in crate::rpc::client) shared: &'a ConnectionShared,
    pub(in crate::rpc::client) writer: &'a mut WriterState,
}

impl WriteGuard<'_> {
    /// Puts a message behind those that have yet to leave.
    pub(in crate::rpc::client) fn buffer(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        encode(self.writer.out.buffer());
    }

    /// Sends all that has yet to leave; `command` is the last of it.
    pub(in crate::rpc::client) fn flush(&mut self, command: &'static str) -> Result<(), DeviceError> {
        let bytes = self.buffered_bytes();
        let sent = self.writer.out.flush();
        self.check_sent(command, bytes, sent)
    }

    /// Sends bytes from where they are, behind all that has yet to leave.
    pub(in crate::rpc::client) fn send_with_data(
        &mut self,
        command: &'static str,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        let (first, rest) = data.split_at(data.len().min(MAX_COALESCED_BYTES));
        self.writer.out.buffer().extend_from_slice(first);
        self.flush(command)?;
        for (n, piece) in rest.chunks(WRITE_CHUNK_BYTES).enumerate() {
            let sent = self.writer.out.send_bytes(piece);
            self.check_sent(command, piece.len(), sent)?;
            // Short messages may go on for long into what the system keeps for a server that takes nothing.
            if n > 0 {
                *lock(&self.shared.write_progress) = Instant::now();
            }
        }
        Ok(())
    }

    /// Bytes that have yet to leave.
    pub(in crate::rpc::client) fn buffered_bytes(&mut self) -> usize {
        self.writer.out.buffer().len()
    }

    fn check_sent(
        &self,
        command: &'static str,
        bytes: usize,
        sent: Result<(), TransportError>,
    ) -> Result<(), DeviceError> {
        self.shared.traffic.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        sent.map_err(|e| {
            if e.is_reset()
                && let Some(known) = self.shared.wait_close_reason()
            {
                return known;
            }
            self.shared.fail(match e {
                TransportError::TimedOut { .. } => {
                    format!("the server took nothing of a {command} within {:?}", self.shared.silence_timeout)
                }
                TransportError::Reset(_) | TransportError::Closed => {
                    format!("the server closed the connection before a {command}; its log says why")
                }
                TransportError::Io(e) => format!("sending a {command}: {e}"),
            })
        })
    }

    /// Puts a request of 7.0, in the server's own version, behind those that have yet to leave.
    fn buffer_request(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        let said = self.shared.dialect.encode(request, self.writer.out.buffer());
        said.map_err(|e| DeviceError::Bug(format!("a request that the server does not understand: {e}")))
    }

    /// Sends a request of 7.0 that has no reply there. Where it has an empty one, nobody waits for that.
    pub(in crate::rpc::client) fn send(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        self.buffer_request(request)?;
        self.expect_empty_reply(request.command())?;
        self.flush(request.command().name())
    }

    /// Sends a request of 7.0 whose reply has `len` bytes.
    pub(in crate::rpc::client) fn request(
        &mut self,
        request: &Request<'_>,
        len: u64,
        to: ReplySink,
    ) -> Result<(), DeviceError> {
        self.buffer_request(request)?;
        self.expect(request.command().name(), len..=len, to)?;
        self.flush(request.command().name())
    }

    /// Nothing but an empty reply comes, from servers of versions that have one.
    pub(in crate::rpc::client) fn expect_empty_reply(&mut self, command: Command) -> Result<(), DeviceError> {
        match self.shared.dialect.reply(command) {
            Some(BodySize::Exact(0)) => self.expect(command.name(), 0..=0, ReplySink::Discard),
            _ => Ok(()),
        }
    }

    /// Sends a request that has a reply.
    pub(in crate::rpc::client) fn request_encoded(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        to: ReplySink,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), DeviceError> {
        self.expect(command, len, to)?;
        self.buffer(encode);
        self.flush(command)
    }

    /// A reply is due once the message is sent that is being put together.
    pub(in crate::rpc::client) fn expect(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        to: ReplySink,
    ) -> Result<(), DeviceError> {
        self.shared.replies.expect(command, len, to).map_err(|(failure, to)| {
            // There is nothing that could be wrong with no bytes.
            let _ = to.deliver(Err(failure.clone()));
            failure
        })
    }

    pub(super) fn run_deferred_sends(&mut self) -> Result<(), DeviceError> {
        let DeferredSends { freed_buffers: freed, probes: wanted, sends: said } =
            std::mem::take(&mut *lock(&self.shared.deferred));
        for &remote_ptr in &freed {
            self.buffer_request(&Request::FreeBuffer(FreeBuffer { remote_ptr }))?;
            self.expect_empty_reply(Command::FreeBuffer)?;
            // Graphs go with the buffers that they touch, and from some servers of 7.0 all of them do.
            self.writer.graph_cache.evict_buffer(remote_ptr);
        }
        if !freed.is_empty() {
            self.writer.devices.iter_mut().for_each(DeviceWriteState::forget_graph);
            self.flush("FREE_BUFFER")?;
        }
        if !wanted.is_empty() {
            self.send_probes(&wanted)?;
        }
        said.into_iter().try_for_each(|errand| errand(self))
    }
}
