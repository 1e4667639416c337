//! A session of the extension: GREET, and the loop over its requests.

use std::collections::HashMap;
use std::sync::Arc;

use super::describe;
use super::error::ExtendedError;
use super::graphs::GraphNumber;
use super::heartbeat::Heartbeat;
use super::load_by_digest::LoadCounts;
use super::queues::Queues;
use crate::device::Queue;
use crate::rpc::server::allowance::Allowance;
use crate::rpc::server::client_connection::{ClientConnection, Writer};
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::handshake::HandshakeError;
use crate::rpc::server::peers::Pool;
use crate::rpc::server::resource_requests;
use crate::rpc::server::session::body_buffer;
use crate::rpc::server::session::failure::{End, Failure, SessionError, decoder_bug};
use crate::rpc::server::session::program_cache::Bound;
use crate::rpc::server::session::resources::SessionResources;
use crate::rpc::server::transfer_tokens::TokenLedger;
use crate::rpc::transport::{PeerAddr, TransportError};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtHeader, ExtRequest, Notice, REVISION, State, Support};
use crate::rpc::wire::{REQUEST_HEADER, Request, RequestHeader, Response, ResponseHeader};

/// Bytes that a session's client may have requested and not received, in the largest messages. The session reads its next request
/// when there are fewer: they are host memory, which no budget pays for.
const MESSAGES_DUE: u64 = 4;

/// A session of the extension.
pub(super) struct ExtendedSession<'a> {
    /// First to be dropped: threads wait for their work.
    pub(super) queues: Queues,
    /// Queues of the session's own, by device, that read the source of host-staged copies.
    pub(super) staging_queues: HashMap<u32, Box<dyn Queue>>,
    pub(super) tokens: TokenLedger,
    pub(super) pool: Pool,
    pub(super) replies_due: Arc<Allowance>,
    pub(super) loads: LoadCounts,
    heartbeat: Heartbeat,
    pub(super) connection: ClientConnection,
    pub(super) writer: Arc<Writer>,
    pub(super) resources: SessionResources<'a, GraphNumber>,
}

/// Serves a connection whose next message has the header of a GREET, to its end.
pub(in crate::rpc::server) fn run(
    server: &ServerContext,
    connection: ClientConnection,
    peer: PeerAddr,
    header: [u8; REQUEST_HEADER],
    mut body: Vec<u8>,
) -> Result<End, Failure> {
    let writer = Arc::clone(connection.writer());
    let resources = SessionResources::new(server, peer, Bound::EVICT_FEWEST);
    let tokens = TokenLedger::new(&server.transfer_tokens, &resources.budget);
    let heartbeat = Heartbeat::start(&server.lifecycle, &writer, tokens.arrivals());
    let mut session = ExtendedSession {
        queues: Queues::default(),
        staging_queues: HashMap::new(),
        tokens,
        pool: Pool::new(&server.peers, &server.config),
        replies_due: Allowance::new(server.config.limits.max_body.saturating_mul(MESSAGES_DUE)),
        loads: LoadCounts::default(),
        heartbeat,
        connection,
        writer: Arc::clone(&writer),
        resources,
    };
    session.greet(&header, &mut body).map_err(|e| Failure::new(Some(ExtCommand::Greet.name()), e))?;
    let served = session.serve(&mut body);
    session.loads.log(peer);
    // All of the client's memory is free before it is notified how its session ended.
    drop(session);
    Failure::of_session(writer, served)
}

impl ExtendedSession<'_> {
    fn greet(&mut self, header: &[u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), SessionError> {
        let server = self.resources.server;
        let limits = &server.config.limits;
        let header = ExtHeader::decode(header)?;
        let message = self.connection.body(header.body_len(limits)?, body)?;
        let ExtRequest::Greet(greet) = ExtRequest::decode(header.command, message, limits)? else {
            return Err(decoder_bug());
        };
        if greet.revision != u32::from(REVISION) {
            return Err(HandshakeError::Revision(greet.revision).into());
        }
        let mut reply = Vec::new();
        Answer::Greet(describe::server(server)).encode(&mut reply);
        let header = ResponseHeader { size: reply.len() as u64 };
        self.writer.send(|out| out.extend_from_slice(&header.encode()), &[reply])?;
        match server.lifecycle.subscribe(&self.writer) {
            State::Ready => Ok(()),
            state => Ok(self.writer.notice(&Notice::State(state))?),
        }
    }

    fn serve(&mut self, body: &mut Vec<u8>) -> Result<(), Failure> {
        while let Some(header) = self.connection.header().map_err(|e| Failure::new(None, e))? {
            self.heartbeat.step();
            self.request(header, body)?;
            self.heartbeat.step();
            body_buffer::trim(body);
        }
        Ok(())
    }

    /// Serves one request; every failure names its command.
    fn request(&mut self, header: [u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), Failure> {
        if ExtHeader::is_one(&header) {
            let header = ExtHeader::decode(&header).map_err(|e| Failure::new(None, e))?;
            self.extension(header, body).map_err(|e| Failure::new(Some(header.command.name()), e))
        } else {
            let header = RequestHeader::decode(&header).map_err(|e| Failure::new(None, e))?;
            self.ggml(header, body).map_err(|e| Failure::new(Some(header.command.name()), e))
        }
    }

    /// One of ggml's requests that the extension keeps.
    fn ggml(&mut self, header: RequestHeader, body: &mut Vec<u8>) -> Result<(), SessionError> {
        if !resource_requests::includes(header.command) {
            return Err(ExtendedError::Superseded.into());
        }
        let limits = &self.resources.server.config.limits;
        let message = self.connection.body(header.body_len(limits)?, body)?;
        let request = Request::decode(header.command, message, limits)?;
        match resource_requests::serve(&mut self.resources, &request)? {
            Some(response) => Ok(self.respond(&response)?),
            None => Ok(()),
        }
    }

    fn extension(&mut self, header: ExtHeader, body: &mut Vec<u8>) -> Result<(), SessionError> {
        let server = self.resources.server;
        let limits = &server.config.limits;
        let len = header.body_len(limits)?;
        if header.command == ExtCommand::Write {
            return self.write(len);
        }
        let message = self.connection.body(len, body)?;
        match ExtRequest::decode(header.command, message, limits)? {
            ExtRequest::Greet(_) => Err(HandshakeError::GreetSecond.into()),
            ExtRequest::OpenQueue(request) => self.open_queue(&request),
            ExtRequest::CloseQueue(request) => Ok(self.queues.close(request.queue)?),
            ExtRequest::KeepGraph(request) => self.keep_graph(&request, len),
            ExtRequest::RunGraph(request) => self.run_graph(&request),
            ExtRequest::Read(request) => self.read(&request),
            ExtRequest::Fill(request) => self.fill(&request),
            ExtRequest::Copy(request) => self.copy(&request),
            ExtRequest::Mark(request) => self.queues.mark(request.queue, request.number),
            ExtRequest::Wait(request) => self.wait(&request),
            ExtRequest::Ask(request) => self.ask(&request),
            ExtRequest::Support(Support { graph }) => {
                let device = self.resources.device(graph.device())?;
                Ok(self.answer(&Answer::Support(describe::support(&graph, &**device)))?)
            }
            ExtRequest::Ping(_) => {
                Ok(self.answer(&Answer::Ping(server.lifecycle.state(), server.lifecycle.sessions()))?)
            }
            ExtRequest::Load(request) => self.load(&request),
            ExtRequest::Tickets(request) => self.tickets(&request),
            ExtRequest::Receive(request) => self.receive(&request),
            ExtRequest::Send(request) => self.send(&request),
            ExtRequest::Reach(request) => self.reach(&request),
            ExtRequest::Put(request) => self.put(&request),
            ExtRequest::WriteHead(_) => Err(decoder_bug()),
        }
    }

    /// Replies to one of ggml's requests.
    fn respond(&self, response: &Response<'_>) -> Result<(), TransportError> {
        let mut framed = Vec::new();
        response.encode(&mut framed);
        self.writer.notice(&Notice::Reply(framed.get(size_of::<u64>()..).unwrap_or_default()))
    }

    /// Replies to a request of the extension.
    pub(super) fn answer(&self, answer: &Answer<'_>) -> Result<(), TransportError> {
        let mut body = Vec::new();
        answer.encode(&mut body);
        self.writer.notice(&Notice::Reply(&body))
    }
}
