//! What is said on a connection while nobody else says anything.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::proof::Lane;
use super::{Errands, JOINED, Shared, TAKEN, To, Writer, lock};
use crate::device::DeviceError;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::{BodySize, Command, FreeBuffer, Request};

/// The right to write messages.
pub(in crate::rpc::client) struct Turn<'a> {
    pub(in crate::rpc::client) shared: &'a Shared,
    pub(in crate::rpc::client) writer: &'a mut Writer,
}

impl Turn<'_> {
    /// Puts a message behind those that have yet to leave.
    pub(in crate::rpc::client) fn put(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        encode(self.writer.out.buffer());
    }

    /// Sends all that has yet to leave; `command` is the last of it.
    pub(in crate::rpc::client) fn leave(&mut self, command: &'static str) -> Result<(), DeviceError> {
        let bytes = self.waiting();
        let sent = self.writer.out.flush();
        self.sent(command, bytes, sent)
    }

    /// Sends bytes from where they are, behind all that has yet to leave.
    pub(in crate::rpc::client) fn stream(&mut self, command: &'static str, data: &[u8]) -> Result<(), DeviceError> {
        let (first, rest) = data.split_at(data.len().min(JOINED));
        self.writer.out.buffer().extend_from_slice(first);
        self.leave(command)?;
        for (n, piece) in rest.chunks(TAKEN).enumerate() {
            let sent = self.writer.out.send_bytes(piece);
            self.sent(command, piece.len(), sent)?;
            // Short messages may go on for long into what the system keeps for a server that takes nothing.
            if n > 0 {
                *lock(&self.shared.taken) = Instant::now();
            }
        }
        Ok(())
    }

    /// Bytes that have yet to leave.
    pub(in crate::rpc::client) fn waiting(&mut self) -> usize {
        self.writer.out.buffer().len()
    }

    fn sent(&self, command: &'static str, bytes: usize, sent: Result<(), TransportError>) -> Result<(), DeviceError> {
        self.shared.traffic.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        sent.map_err(|e| {
            if e.is_reset()
                && let Some(known) = self.shared.last_words()
            {
                return known;
            }
            self.shared.fail(match e {
                TransportError::TimedOut { .. } => {
                    format!("the server took nothing of a {command} within {:?}", self.shared.patience)
                }
                TransportError::Reset(_) | TransportError::Closed => {
                    format!("the server closed the connection before a {command}; its log says why")
                }
                TransportError::Io(e) => format!("sending a {command}: {e}"),
            })
        })
    }

    /// Puts a request of 7.0, in the server's own version, behind those that have yet to leave.
    fn put_request(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        let said = self.shared.dialect.encode(request, self.writer.out.buffer());
        said.map_err(|e| DeviceError::Bug(format!("a request that the server does not understand: {e}")))
    }

    /// Sends a request of 7.0 that has no reply there. Where it has an empty one, nobody waits for that.
    pub(in crate::rpc::client) fn tell(&mut self, request: &Request<'_>) -> Result<(), DeviceError> {
        self.put_request(request)?;
        self.acknowledged(request.command())?;
        self.leave(request.command().name())
    }

    /// Sends a request of 7.0 whose reply has `len` bytes.
    pub(in crate::rpc::client) fn request(
        &mut self,
        request: &Request<'_>,
        len: u64,
        to: To,
    ) -> Result<(), DeviceError> {
        self.put_request(request)?;
        self.expect(request.command().name(), len..=len, to)?;
        self.leave(request.command().name())
    }

    /// Nothing but an empty reply comes, from servers of versions that have one.
    pub(in crate::rpc::client) fn acknowledged(&mut self, command: Command) -> Result<(), DeviceError> {
        match self.shared.dialect.reply(command) {
            Some(BodySize::Exact(0)) => self.expect(command.name(), 0..=0, To::Nobody),
            _ => Ok(()),
        }
    }

    /// Sends a request that has a reply.
    pub(in crate::rpc::client) fn ask(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        to: To,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), DeviceError> {
        self.expect(command, len, to)?;
        self.put(encode);
        self.leave(command)
    }

    /// A reply is due once the message is sent that is being put together.
    pub(in crate::rpc::client) fn expect(
        &mut self,
        command: &'static str,
        len: RangeInclusive<u64>,
        to: To,
    ) -> Result<(), DeviceError> {
        self.shared.replies.expect(command, len, to).map_err(|(failure, to)| {
            // There is nothing that could be wrong with no bytes.
            let _ = to.give(Err(failure.clone()));
            failure
        })
    }

    pub(super) fn run_errands(&mut self) -> Result<(), DeviceError> {
        let Errands { freed, wanted, said } = std::mem::take(&mut *lock(&self.shared.errands));
        for &remote_ptr in &freed {
            self.put_request(&Request::FreeBuffer(FreeBuffer { remote_ptr }))?;
            self.acknowledged(Command::FreeBuffer)?;
            // Graphs go with the buffers that they touch, and from some servers of 7.0 all of them do.
            self.writer.kept.free(remote_ptr);
        }
        if !freed.is_empty() {
            self.writer.lanes.iter_mut().for_each(Lane::forget);
            self.leave("FREE_BUFFER")?;
        }
        if !wanted.is_empty() {
            self.prove(&wanted)?;
        }
        said.into_iter().try_for_each(|errand| errand(self))
    }
}
