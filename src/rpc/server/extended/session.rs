//! A session of the extensions: HELLO_EXT, then the loop that reads requests and dispatches them to their handlers.

use std::collections::HashMap;
use std::sync::Arc;

use super::describe;
use super::error::ExtendedError;
use super::graphs::GraphNumber;
use super::load_by_digest::LoadCounts;
use super::notifier::Notifier;
use super::queues::Queues;

use crate::rpc::server::client_connection::{BodyBuffer, ClientConnection, ClientWriter};
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::groups::{GroupTimeouts, IncomingLink, SessionGroups};
use crate::rpc::server::handshake::HelloError;
use crate::rpc::server::hangup_watch::{CancelOrder, CancellerGuard};
use crate::rpc::server::host_memory::{BASE_REPLY_BYTES, ByteSemaphore};
use crate::rpc::server::peers::{PeerLog, PeerPool};
use crate::rpc::server::resource_requests;
use crate::rpc::server::session::failure::{SessionError, SessionFailure, decoder_bug};
use crate::rpc::server::session::program_cache::CacheLimits;
use crate::rpc::server::session::resources::SessionResources;
use crate::rpc::server::session::watched_queue::WatchedQueue;
use crate::rpc::server::status;
use crate::rpc::server::tenants::Resource;
use crate::rpc::server::transfer_tokens::TokenLedger;
use crate::rpc::transport::{PeerAddr, TransportError};
use crate::rpc::wire::ext::{
    ExtCommand, ExtHeader, ExtRequest, ExtResponse, Notification, REVISION, ServerState, SupportsOp,
};
use crate::rpc::wire::{REQUEST_HEADER, Request, RequestHeader, Response, ResponseHeader};

/// Limit of the bytes that a client has requested and not received, as a multiple of the message limit. A READ beyond it
/// blocks the session.
const MAX_UNSENT_MESSAGES: u64 = 4;

/// A session of the extensions.
pub(super) struct ExtendedSession<'a> {
    /// Must be the first field, so that queues are dropped first: nothing waits for their completions any more.
    pub(super) queues: Queues,
    /// Device queues of the session itself, by device, that read the source of host-staged copies.
    pub(super) staging_queues: HashMap<u32, WatchedQueue>,
    /// The group to which another server has bound the connection.
    pub(super) incoming_link: Option<IncomingLink>,
    pub(super) groups: Arc<SessionGroups>,
    pub(super) tokens: TokenLedger,
    pub(super) peer_pool: PeerPool,
    /// Limits the memory of replies that are not sent yet.
    pub(super) reply_memory: ByteSemaphore,
    pub(super) load_counts: LoadCounts,
    pub(super) notifier: Notifier,
    /// Ends the waits of the session that are not waits for one of its queues, when the client has gone.
    _canceller: CancellerGuard,
    pub(super) connection: ClientConnection,
    pub(super) writer: Arc<ClientWriter>,
    pub(super) resources: SessionResources<'a, GraphNumber>,
}

/// Serves a connection until it ends. `header` is the header of HELLO_EXT, which was read already.
pub(in crate::rpc::server) fn serve_session(
    server: &ServerContext,
    connection: ClientConnection,
    peer: PeerAddr,
    header: [u8; REQUEST_HEADER],
    mut body: BodyBuffer,
) -> Result<(), SessionFailure> {
    let writer = Arc::clone(connection.writer());
    let resources = SessionResources::new(server, peer, connection.memory(), CacheLimits::EVICT_FEWEST);
    connection.audit().set_budget(&resources.budget);
    let threads = Arc::new(server.tenants.budget(peer, Resource::TransferThreads));
    let tokens = TokenLedger::new(&server.transfer_tokens, &resources.budget, connection.memory(), &threads);
    let watch = connection.watch();
    // Shorter than the deadlines of queues, so that their failure names the rank that is late.
    let timeouts = GroupTimeouts { join: server.config.stall_timeout, part: server.config.reply_timeout.mul_f32(0.9) };
    let groups = SessionGroups::new(&server.groups, &resources.budget, connection.memory(), timeouts);
    let receives = tokens.transfers();
    let notifier = Notifier::start((&server.lifecycle, &server.logs), &writer, watch, receives, &groups);
    let notifier = notifier.map_err(|e| SessionFailure::new(Some(ExtCommand::HelloExt.name()), e))?;
    let log = PeerLog::new(&server.logs, peer);
    let peer_pool = PeerPool::new(&server.peers, &server.config, &threads, connection.memory(), log);
    let reply_memory = server.config.limits.max_body.saturating_mul(MAX_UNSENT_MESSAGES);
    let reply_memory = ByteSemaphore::new(reply_memory, connection.memory(), BASE_REPLY_BYTES);
    let receives = Arc::clone(tokens.transfers());
    let canceller = watch.on_hangup(CancelOrder::Wait, move || receives.close());
    let mut session = ExtendedSession {
        queues: Queues::default(),
        staging_queues: HashMap::new(),
        incoming_link: None,
        groups,
        tokens,
        peer_pool,
        reply_memory,
        load_counts: LoadCounts::default(),
        notifier,
        _canceller: canceller,
        connection,
        writer: Arc::clone(&writer),
        resources,
    };
    session.hello_ext(&header, &mut body).map_err(|e| SessionFailure::new(Some(ExtCommand::HelloExt.name()), e))?;
    let served = session.serve_requests(&mut body);
    session.load_counts.log(&server.logs, peer);
    // Frees all of the client's memory before the client is notified how its session ended.
    let groups = Arc::clone(&session.groups);
    drop(session);
    groups.end_all();
    SessionFailure::end_of_session(writer, served)
}

impl ExtendedSession<'_> {
    /// Serves HELLO_EXT, and sends the server's state if it is not ready.
    fn hello_ext(&mut self, header: &[u8; REQUEST_HEADER], body: &mut BodyBuffer) -> Result<(), SessionError> {
        let server = self.resources.server;
        let limits = &server.config.limits;
        let header = ExtHeader::decode(header)?;
        let message = self.connection.read_body(header.body_len(limits)?, body)?;
        let ExtRequest::HelloExt(hello) = ExtRequest::decode(header.command, message, limits)? else {
            return Err(decoder_bug());
        };
        if hello.revision != u32::from(REVISION) {
            return Err(HelloError::UnsupportedRevision(hello.revision).into());
        }
        let mut reply = Vec::new();
        ExtResponse::HelloExt(describe::hello_ext_reply(server, &self.resources.devices)).encode_body(&mut reply);
        let header = ResponseHeader { size: reply.len() as u64 };
        self.writer.send(|out| out.extend_from_slice(&header.encode()), &[reply])?;
        self.connection.audit().set_extended();
        match server.lifecycle.subscribe(&self.writer) {
            ServerState::Ready => Ok(()),
            state => Ok(self.writer.send_notification(&Notification::ServerState(state))?),
        }
    }

    /// Serves requests until the client closes the connection.
    fn serve_requests(&mut self, body: &mut BodyBuffer) -> Result<(), SessionFailure> {
        while let Some(header) = self.connection.read_header().map_err(|e| SessionFailure::new(None, e))? {
            self.serve_request(header, body)?;
            body.trim();
        }
        Ok(())
    }

    /// Serves one request. Every failure names the command.
    fn serve_request(&mut self, header: [u8; REQUEST_HEADER], body: &mut BodyBuffer) -> Result<(), SessionFailure> {
        if ExtHeader::is_extension(&header) {
            let header = ExtHeader::decode(&header).map_err(|e| SessionFailure::new(None, e))?;
            self.serve_ext_request(header, body).map_err(|e| SessionFailure::new(Some(header.command.name()), e))
        } else {
            let header = RequestHeader::decode(&header).map_err(|e| SessionFailure::new(None, e))?;
            self.serve_ggml_request(header, body).map_err(|e| SessionFailure::new(Some(header.command.name()), e))
        }
    }

    /// Serves a command of ggml's protocol. After HELLO_EXT, only its resource requests are valid.
    fn serve_ggml_request(&mut self, header: RequestHeader, body: &mut BodyBuffer) -> Result<(), SessionError> {
        if !resource_requests::is_resource_request(header.command) {
            return Err(ExtendedError::Superseded.into());
        }
        let limits = &self.resources.server.config.limits;
        let message = self.connection.read_body(header.body_len(limits)?, body)?;
        let request = Request::decode(header.command, message, limits)?;
        match resource_requests::serve(&mut self.resources, &request, |_| {})? {
            Some(response) => Ok(self.reply_ggml(&response)?),
            None => Ok(()),
        }
    }

    /// Serves a command of the extensions.
    fn serve_ext_request(&mut self, header: ExtHeader, body: &mut BodyBuffer) -> Result<(), SessionError> {
        let server = self.resources.server;
        let limits = &server.config.limits;
        let len = header.body_len(limits)?;
        if header.command == ExtCommand::Write {
            return self.write(len);
        }
        if header.command == ExtCommand::PublishPart {
            return self.publish_part(len);
        }
        let message = self.connection.read_body(len, body)?;
        match ExtRequest::decode(header.command, message, limits)? {
            ExtRequest::HelloExt(_) => Err(HelloError::MisplacedHelloExt.into()),
            ExtRequest::OpenQueue(request) => self.open_queue(&request),
            ExtRequest::CloseQueue(request) => Ok(self.queues.close(request.queue)?),
            ExtRequest::PrepareGraph(request) => self.prepare_graph(&request, len),
            ExtRequest::RunGraph(request) => self.run_graph(&request),
            ExtRequest::ReadSpans(request) => self.read(&request),
            ExtRequest::Fill(request) => self.fill(&request),
            ExtRequest::CopySpan(request) => self.copy(&request),
            ExtRequest::Mark(request) => self.queues.mark(request.queue, request.number),
            ExtRequest::Wait(request) => self.wait_for_mark(&request),
            ExtRequest::NotifyReached(request) => self.notify_reached(&request),
            ExtRequest::SupportsOp(SupportsOp { graph }) => {
                let device = self.resources.device(graph.device())?;
                Ok(self.reply(&ExtResponse::SupportsOp(describe::supports_op(&graph, &**device)))?)
            }
            ExtRequest::Ping(_) => {
                Ok(self.reply(&ExtResponse::Ping(server.lifecycle.state(), server.lifecycle.session_count()))?)
            }
            ExtRequest::Status(_) => self.status(),
            ExtRequest::Load(request) => self.load_by_digest(&request),
            ExtRequest::IssueTokens(request) => self.issue_tokens(&request),
            ExtRequest::ReceiveFromPeer(request) => self.receive_from_peer(&request),
            ExtRequest::SendToPeer(request) => self.send_to_peer(&request),
            ExtRequest::ProbePeer(request) => self.probe_peer(&request),
            ExtRequest::PeerWrite(request) => self.peer_write(&request),
            ExtRequest::JoinGroup(request) => self.join_group(&request),
            ExtRequest::AttachGroup(request) => self.attach_group(&request),
            ExtRequest::FailGroup(request) => self.fail_group(&request),
            ExtRequest::WriteHead(_) | ExtRequest::PublishPartHead(_) => Err(decoder_bug()),
        }
    }

    /// Sends the state of the server.
    fn status(&self) -> Result<(), SessionError> {
        let own = self.connection.audit().number();
        let status = status::of(self.resources.server, self.resources.peer, Some(own));
        // Texts and numbers have a form in JSON. An empty reply is one that the client cannot read.
        let json = serde_json::to_string(&status).unwrap_or_default();
        Ok(self.reply(&ExtResponse::Status(&json))?)
    }

    /// Sends the reply to a command of ggml's protocol, as the body of a REPLY notification.
    fn reply_ggml(&self, response: &Response<'_>) -> Result<(), TransportError> {
        let mut body = Vec::new();
        response.encode_body(&mut body);
        self.writer.send_notification(&Notification::Reply(&body))
    }

    /// Sends the reply to a command of the extensions.
    pub(super) fn reply(&self, response: &ExtResponse<'_>) -> Result<(), TransportError> {
        let mut body = Vec::new();
        response.encode_body(&mut body);
        self.writer.send_notification(&Notification::Reply(&body))
    }
}
