//! Exclusive use of a connection's writer: messages are encoded into its buffer, flushed, and their replies registered.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::completion_probe::DeviceWriteState;
use super::{ConnectionShared, DeferredSends, MAX_COALESCED_BYTES, ReplySink, WRITE_CHUNK_BYTES, WriterState};
use crate::device::DeviceError;
use crate::poison::lock;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::{BodySize, FreeBuffer, Request, RpcCommand};

/// Proof of exclusive use of the writer. Lives as long as one call of `ConnectionShared::with_writer`.
pub(in crate::rpc::client) struct WriteGuard<'a> {
    pub(in crate::rpc::client) shared: &'a ConnectionShared,
    pub(in crate::rpc::client) writer: &'a mut WriterState,
}

impl WriteGuard<'_> {
    /// Appends a message to the write buffer.
    pub(in crate::rpc::client) fn buffer(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        encode(self.writer.out.buffer());
    }

    /// Sends the write buffer; `command` names its last message in errors.
    pub(in crate::rpc::client) fn flush(&mut self, command: &'static str) -> Result<(), DeviceError> {
        let bytes = self.buffered_bytes();
        let sent = self.writer.out.flush();
        self.check_sent(command, bytes, sent)
    }

    /// Sends the write buffer and `data` after it. Large data is not copied into the buffer.
    pub(in crate::rpc::client) fn send_with_data(
        &mut self,
        command: &'static str,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        let (first, rest) = data.split_at(data.len().min(MAX_COALESCED_BYTES));
        self.writer.out.buffer().extend_from_slice(first);
        self.flush(command)?;
        for (n, chunk) in rest.chunks(WRITE_CHUNK_BYTES).enumerate() {
            let sent = self.writer.out.send_bytes(chunk);
            self.check_sent(command, chunk.len(), sent)?;
            // Only from the second chunk on: the kernel's send buffer accepts short messages for a long time, even if the
            // server reads nothing.
            if n > 0 {
                *lock(&self.shared.write_progress) = Instant::now();
            }
        }
        Ok(())
    }

    /// Bytes in the write buffer.
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
                && let Some(reason) = self.shared.wait_close_reason()
            {
                return reason;
            }
            self.shared.fail(match e {
                TransportError::TimedOut { .. } => {
                    format!("the server accepted no byte of a {command} within {:?}", self.shared.silence_timeout)
                }
                TransportError::Reset(_) | TransportError::Closed => {
                    format!("the server closed the connection before a {command}; see its log for the reason")
                }
                TransportError::Tls(e) => format!("sending a {command}: {e}"),
                TransportError::Io(e) => format!("sending a {command}: {e}"),
            })
        })
    }

    /// Appends a request of 7.0 to the write buffer, encoded in the server's version.
    fn buffer_request(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        let encoded = self.shared.codec.encode(request, self.writer.out.buffer());
        encoded.map_err(|e| DeviceError::Bug(format!("a request that the server's version cannot express: {e}")))
    }

    /// Sends a request that has no reply in 7.0. Some older versions send an empty reply to it, which is dropped on arrival.
    pub(in crate::rpc::client) fn send(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        self.buffer_request(request)?;
        self.expect_empty_reply(request.command())?;
        self.flush(request.command().name())
    }

    /// Sends a request of 7.0 with a reply of `len` bytes.
    pub(in crate::rpc::client) fn request(
        &mut self,
        request: &Request<'_>,
        len: u64,
        sink: ReplySink,
    ) -> Result<(), DeviceError> {
        self.buffer_request(request)?;
        self.expect(request.command().name(), len..=len, sink)?;
        self.flush(request.command().name())
    }

    /// Registers the empty reply that some older versions send to `command`.
    pub(in crate::rpc::client) fn expect_empty_reply(&mut self, command: RpcCommand) -> Result<(), DeviceError> {
        match self.shared.codec.response_size(command) {
            Some(BodySize::Exact(0)) => self.expect(command.name(), 0..=0, ReplySink::Discard),
            _ => Ok(()),
        }
    }

    /// Sends a request with a reply. `len` limits the length of the reply.
    pub(in crate::rpc::client) fn request_encoded(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        sink: ReplySink,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), DeviceError> {
        self.expect(command, len, sink)?;
        self.buffer(encode);
        self.flush(command)
    }

    /// Registers the reply to the message that is being encoded. Must happen before the message is flushed.
    pub(in crate::rpc::client) fn expect(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        sink: ReplySink,
    ) -> Result<(), DeviceError> {
        self.shared.replies.expect(command, len, sink).map_err(|(failure, sink)| {
            // A failure carries no bytes that could be invalid.
            let _ = sink.deliver(Err(failure.clone()));
            failure
        })
    }

    pub(super) fn run_deferred_sends(&mut self) -> Result<(), DeviceError> {
        let DeferredSends { freed_buffers, probes, sends } = std::mem::take(&mut *lock(&self.shared.deferred));
        for &remote_ptr in &freed_buffers {
            self.buffer_request(&Request::FreeBuffer(FreeBuffer { remote_ptr }))?;
            self.expect_empty_reply(RpcCommand::FreeBuffer)?;
            // The server evicts the graphs that use a freed buffer. Some servers of 7.0 evict all graphs.
            self.writer.graph_cache.evict_buffer(remote_ptr);
        }
        if !freed_buffers.is_empty() {
            self.writer.devices.iter_mut().for_each(DeviceWriteState::forget_graph);
            self.flush("FREE_BUFFER")?;
        }
        if !probes.is_empty() {
            self.send_probes(&probes)?;
        }
        sends.into_iter().try_for_each(|send| send(self))
    }
}
