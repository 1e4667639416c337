//! Session of ggml's protocol: the loop over the client's requests, and their dispatch.

use std::time::Duration;

use super::collectives::Communicators;
use super::device_queues::DeviceQueues;
use super::error::GgmlError;
use super::graph_store::GraphStore;
use super::graphs::GraphKey;
use super::prefault::Prefault;
use crate::device::Region;
use crate::rpc::server::client_connection::{BodyBuffer, ClientConnection};
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::handshake::{HelloError, reject_hello_ext};
use crate::rpc::server::resource_requests;
use crate::rpc::server::session::failure::{SessionError, SessionFailure, decoder_bug};
use crate::rpc::server::session::program_cache::CacheLimits;
use crate::rpc::server::session::resources::SessionResources;
use crate::rpc::server::tensor_cache::CacheOwner;
use crate::rpc::server::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::{
    BodySize, REQUEST_HEADER, Request, RequestHeader, Response, RpcCommand, VersionCodec, VersionDetector,
};

/// How long the session waits for the next request after a GRAPH_COMPUTE, if some of the versions that the client may have
/// reply with a status: clients of these send nothing before it, the others read the result at once. Happens once per session.
const STATUS_WAIT: Duration = Duration::from_millis(200);

/// A session of ggml's protocol.
pub(super) struct GgmlSession<'a> {
    /// Dropped before the connection is closed: a client that connects again finds its address unclaimed.
    pub(super) communicators: Communicators,
    pub(super) connection: ClientConnection,
    pub(super) resources: SessionResources<'a, GraphKey>,
    pub(super) queues: DeviceQueues<'a>,
    pub(super) prefault: Prefault,
    /// Whose entries of the tensor cache the client finds.
    pub(super) cache_owner: CacheOwner,
    /// Where to report that `version` works; `None` once that is done.
    unconfirmed: Option<&'a VersionChoice<'a>>,
    /// The version of the protocol that HELLO was answered with.
    pub(super) version: ServedVersion,
    /// Which of the versions that `version` stands for the client has.
    pub(super) detector: VersionDetector,
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
        unconfirmed: Some(versions),
        version,
        detector: version.detector(),
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

impl GgmlSession<'_> {
    /// Serves one request. A failure contains the name of its command.
    fn serve_request(&mut self, header: [u8; REQUEST_HEADER], body: &mut BodyBuffer) -> Result<(), SessionFailure> {
        reject_hello_ext(header)?;
        let [number, size @ ..] = header;
        let size = u64::from_le_bytes(size);
        self.detector.observe_header(number, size);
        let Some(command) = self.codec().command(number) else {
            let known = RequestHeader::decode(&header).map_err(|e| SessionFailure::new(None, e))?;
            let error = GgmlError::NotInVersion { number, version: self.version };
            // Without HELLO commands had other numbers, so the name of today would mislead.
            let name = self.codec().has_device_field().then(|| known.command.name());
            return Err(SessionFailure::new(name, error));
        };
        // Only a command of the answered version shows that it is the client's.
        self.unconfirmed.take_if(|versions| versions.report_command(self.version, command));
        let len =
            self.codec().body_len(command, size, &self.resources.server.config.limits).map_err(SessionError::from);
        let done = len.and_then(|len| {
            if command == RpcCommand::SetTensor {
                self.set_tensor(len)?;
            } else {
                let served = self.serve_command(command, len, body);
                body.trim();
                served?;
            }
            self.acknowledge(command)
        });
        done.map_err(|e| SessionFailure::new(Some(command.name()), e))
    }

    /// The codec of the client's version, as far as it is known.
    pub(super) fn codec(&self) -> &'static VersionCodec {
        self.detector.codec()
    }

    /// Replies to a request that has a reply in older versions only: with nothing, or with the status 0 (success) of a graph. A
    /// failure closes the connection instead.
    fn acknowledge(&mut self, command: RpcCommand) -> Result<(), SessionError> {
        if command == RpcCommand::GraphCompute && self.detector.is_graph_status_undecided() {
            let waits = !self.connection.wait_for_input(STATUS_WAIT)?;
            self.detector.observe_wait_for_status(waits);
        }
        if command.response().is_none()
            && let Some(BodySize::Exact(len)) = self.codec().response_size(command)
        {
            self.connection.begin_response(len, &[0][..usize::from(len > 0)])?;
        }
        Ok(())
    }

    /// Serves a request other than SET_TENSOR with `len` bytes of body. SET_TENSOR_2D streams them to the device; all others read
    /// them into `body`.
    fn serve_command(&mut self, command: RpcCommand, len: usize, body: &mut BodyBuffer) -> Result<(), SessionError> {
        if command == RpcCommand::SetTensor2d {
            return self.set_tensor_2d(len, body);
        }
        self.connection.read_body(len, body)?;
        if command == RpcCommand::GraphCompute {
            return self.graph_compute(len, body);
        }
        match self.codec().decode(command, body.message(len), &self.resources.server.config.limits)? {
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
