//! A session of ggml's messages: the loop over its requests.

use super::device_queues::DeviceQueues;
use super::graphs::GraphBody;
use super::prefault::Prefault;
use crate::rpc::server::client_connection::ClientConnection;
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::handshake::{HandshakeError, decode_header};
use crate::rpc::server::resource_requests;
use crate::rpc::server::session::body_buffer;
use crate::rpc::server::session::failure::{End, Failure, SessionError, decoder_bug};
use crate::rpc::server::session::program_cache::Bound;
use crate::rpc::server::session::resources::SessionResources;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::{Command, REQUEST_HEADER, Request, Response};

/// A session of ggml's messages.
pub(super) struct GgmlSession<'a> {
    pub(super) connection: ClientConnection,
    pub(super) resources: SessionResources<'a, GraphBody>,
    pub(super) queues: DeviceQueues<'a>,
    pub(super) prefault: Prefault,
}

/// Serves a connection after its HELLO, whose next message has this header, to its end.
pub(in crate::rpc::server) fn run(
    server: &ServerContext,
    connection: ClientConnection,
    peer: PeerAddr,
    mut header: [u8; REQUEST_HEADER],
    mut body: Vec<u8>,
) -> Result<End, Failure> {
    let resources = SessionResources::new(server, peer, Bound::EVICT_HALF);
    let queues = DeviceQueues::new(&server.devices, &resources.budget);
    let mut session = GgmlSession { connection, resources, queues, prefault: Prefault::default() };
    loop {
        session.request(header, &mut body)?;
        session.prefault();
        match session.connection.header().map_err(|e| Failure::new(None, e))? {
            Some(next) => header = next,
            None => return Ok(End::Closed),
        }
    }
}

impl GgmlSession<'_> {
    /// Serves one request; every failure names its command.
    fn request(&mut self, header: [u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), Failure> {
        let header = decode_header(header)?;
        let len = header.body_len(&self.resources.server.config.limits).map_err(SessionError::from);
        let done = len.and_then(|len| self.command(header.command, len, body));
        body_buffer::trim(body);
        done.map_err(|e| Failure::new(Some(header.command.name()), e))
    }

    fn command(&mut self, command: Command, len: usize, body: &mut Vec<u8>) -> Result<(), SessionError> {
        if command == Command::SetTensor {
            return self.set_tensor(len);
        }
        self.connection.body(len, body)?;
        if command == Command::GraphCompute {
            return self.graph_compute(len, body);
        }
        match Request::decode(command, &body[..len], &self.resources.server.config.limits)? {
            Request::Hello(_) => Err(HandshakeError::HelloAgain.into()),
            // No server has more devices than fit: their count came from memory.
            Request::DeviceCount(_) => {
                let count = self.resources.server.devices.len() as u32;
                self.reply(&Response::DeviceCount(count))
            }
            Request::GetAlignment(request) => {
                let alignment = self.resources.device(request.device)?.info().alignment;
                self.reply(&Response::GetAlignment(alignment))
            }
            Request::GetMaxSize(request) => {
                let max = self.resources.device(request.device)?.info().max_buffer;
                self.reply(&Response::GetMaxSize(max))
            }
            Request::BufferClear(request) => {
                let entry = self.resources.handles.get(request.remote_ptr)?;
                let (device, region) = (entry.device, entry.buffer.whole());
                self.fill(device, region, request.value)
            }
            Request::InitTensor(request) => self.init_tensor(&request),
            Request::MemsetTensor(request) => self.memset_tensor(&request),
            Request::SetTensorHash(request) => self.set_tensor_hash(&request),
            Request::GetTensor(request) => self.get_tensor(&request),
            Request::CopyTensor(request) => self.copy_tensor(&request),
            Request::GraphRecompute(request) => self.graph_recompute(request.device),
            Request::SetTensor(_) | Request::GraphCompute(_) => Err(decoder_bug()),
            request => match resource_requests::serve(&mut self.resources, &request)? {
                Some(response) => self.reply(&response),
                None => Ok(()),
            },
        }
    }

    pub(super) fn reply(&mut self, response: &Response<'_>) -> Result<(), SessionError> {
        Ok(self.connection.send(response)?)
    }

    /// Uses the time until the next request.
    fn prefault(&mut self) {
        let Some((device, region)) = self.prefault.next() else { return };
        if let Ok(queue) = self.queues.get(device) {
            self.prefault.run(&region, queue, || self.connection.is_due());
        }
    }
}
