//! Session of ggml's protocol: the loop over the client's requests, and their dispatch.

use super::collectives::Communicators;
use super::device_queues::DeviceQueues;
use super::graph_store::GraphStore;
use super::graphs::GraphKey;
use super::prefault::Prefault;
use crate::device::Region;
use crate::rpc::server::client_connection::{BodyBuffer, ClientConnection};
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::handshake::{HelloError, unknown_command};
use crate::rpc::server::resource_requests;
use crate::rpc::server::session::failure::{SessionError, SessionFailure, decoder_bug};
use crate::rpc::server::session::program_cache::CacheLimits;
use crate::rpc::server::session::resources::SessionResources;
use crate::rpc::server::tensor_cache::CacheOwner;
use crate::rpc::server::version_adapter::VersionAdapter;
use crate::rpc::server::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::{Limits, REQUEST_HEADER, Request, RequestHeader, Response, RpcCommand};

/// A session of ggml's protocol.
pub(super) struct GgmlSession<'a> {
    /// Dropped before the connection is closed: a client that connects again finds its address unclaimed.
    pub(super) communicators: Communicators,
    pub(super) connection: ClientConnection,
    pub(super) resources: SessionResources<'a, GraphKey>,
    pub(super) queues: DeviceQueues<'a>,
    pub(super) prefault: Prefault,
    /// The tenant whose entries of the tensor cache the client finds.
    pub(super) cache_owner: CacheOwner,
    /// `None` once the client is known to have the newest version.
    adapter: Option<VersionAdapter<'a>>,
    /// Bodies of the graphs that a client of 8.0 has numbered.
    pub(super) graph_store: GraphStore,
}

/// Serves a connection after its HELLO, if `version` has one, until it ends. `header` is the header of the next message. `body`
/// is a reused buffer.
pub(in crate::rpc::server) fn serve_session(
    server: &ServerContext,
    connection: ClientConnection,
    versions: &VersionChoice<'_>,
    version: ServedVersion,
    mut header: [u8; REQUEST_HEADER],
    mut body: BodyBuffer,
) -> Result<(), SessionFailure> {
    let resources = SessionResources::new(server, versions.peer(), connection.memory(), CacheLimits::EVICT_HALF);
    connection.audit().set_budget(&resources.budget);
    let queues =
        DeviceQueues::new(resources.devices.clone(), &resources.budget, connection.watch(), connection.memory());
    let graph_store = GraphStore::new(server.config.max_graph_memory, connection.memory());
    let mut session = GgmlSession {
        connection,
        resources,
        queues,
        prefault: Prefault::default(),
        cache_owner: CacheOwner::new(&server.tenants.identity(versions.peer())),
        adapter: Some(VersionAdapter::new(version, versions)),
        graph_store,
        communicators: Communicators::default(),
    };
    loop {
        session.serve_request(header, &mut body)?;
        if let Some((device, region)) = session.prefault.pending.take() {
            session.prefault_while_idle(device, &region);
        }
        match session.connection.read_header().map_err(|e| SessionFailure::new(None, e))? {
            Some(next) => header = next,
            None => {
                versions.end_session();
                return Ok(());
            }
        }
    }
}

/// Reads the body of a request of the newest version, except for an upload, and returns its length.
fn receive(
    header: RequestHeader,
    connection: &mut ClientConnection,
    body: &mut BodyBuffer,
    limits: &Limits,
) -> Result<usize, SessionError> {
    let len = header.body_len(limits)?;
    if !matches!(header.command, RpcCommand::SetTensor | RpcCommand::SetTensor2d) {
        connection.read_body(len, body)?;
    }
    Ok(len)
}

impl GgmlSession<'_> {
    /// Serves one request. A failure contains the name of its command.
    fn serve_request(&mut self, header: [u8; REQUEST_HEADER], body: &mut BodyBuffer) -> Result<(), SessionFailure> {
        let limits = &self.resources.server.config.limits;
        let (command, received) = match &mut self.adapter {
            None => {
                let header = RequestHeader::decode(&header).map_err(|e| unknown_command(header, e))?;
                (header.command, receive(header, &mut self.connection, body, limits))
            }
            Some(adapter) => {
                let (command, len) = adapter.receive(header, &mut self.connection, body, limits)?;
                (command, Ok(len))
            }
        };
        let done = received.and_then(|len| self.serve_command(command, len, body)).and_then(|()| {
            let Some(adapter) = &mut self.adapter else { return Ok(()) };
            adapter.acknowledge(command, &mut self.connection)?;
            self.adapter.take_if(|adapter| adapter.is_unneeded());
            Ok(())
        });
        if command != RpcCommand::SetTensor {
            body.trim();
            self.graph_store.trim();
        }
        done.map_err(|e| SessionFailure::new(Some(command.name()), e))
    }

    /// Serves a request with `len` bytes of body: next on the connection for SET_TENSOR and SET_TENSOR_2D, which stream them to
    /// the device, and in `body` for all others.
    fn serve_command(&mut self, command: RpcCommand, len: usize, body: &mut BodyBuffer) -> Result<(), SessionError> {
        match command {
            RpcCommand::SetTensor => return self.set_tensor(len),
            RpcCommand::SetTensor2d => return self.set_tensor_2d(len, body),
            RpcCommand::GraphCompute => return self.graph_compute(len, body),
            _ => {}
        }
        match Request::decode(command, body.message(len), &self.resources.server.config.limits)? {
            Request::Hello(_) => Err(HelloError::RepeatedHello.into()),
            // The list of devices is in memory, so its length fits.
            Request::DeviceCount(_) => {
                let count = self.resources.devices.len() as u32;
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
            Request::GraphRecompute(request) => self.graph_recompute(&request),
            Request::GetTensor2d(request) => self.get_tensor_2d(&request),
            Request::CommInit(request) => self.comm_init(&request),
            Request::CommAllreduce(request) => self.comm_allreduce(&request),
            Request::CommFree(request) => self.comm_free(&request),
            Request::SetTensor(_) | Request::SetTensor2d(_) | Request::GraphCompute(_) => Err(decoder_bug()),
            request => {
                let on_free = |buffer| self.graph_store.remove_graphs_of_buffer(buffer);
                match resource_requests::serve(&mut self.resources, &request, on_free)? {
                    Some(response) => self.reply(&response),
                    None => Ok(()),
                }
            }
        }
    }

    pub(super) fn reply(&mut self, response: &Response<'_>) -> Result<(), SessionError> {
        Ok(self.connection.send_response(response)?)
    }

    /// Prefaults the region of the next upload until the next request arrives.
    fn prefault_while_idle(&mut self, device: u32, region: &Region) {
        if let Ok(queue) = self.queues.get(device) {
            self.prefault.prefault_until(region, &mut **queue, || self.connection.has_unread_input());
        }
    }
}
