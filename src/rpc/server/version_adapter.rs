//! Adapter of a client whose requests may not have the newest version. It stands between the connection and the session:
//! it finds out the client's version, leaves each request to the session as one of the newest version, and sends the replies
//! that only older versions have. It is dropped once the client is known to have the newest version.

use std::time::Duration;

use log::debug;
use thiserror::Error;

use crate::rpc::server::client_connection::{BodyBuffer, ClientConnection};
use crate::rpc::server::handshake::unknown_command;
use crate::rpc::server::session::failure::{SessionError, SessionFailure};
use crate::rpc::server::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::{
    BodySize, Limits, MAX_UPLOAD_HEAD, NotExpressible, REQUEST_HEADER, RequestHeader, RpcCommand, VersionDetector,
};

/// How long the adapter waits for the next request after a GRAPH_COMPUTE, if some of the versions that the client may have
/// reply with a status: clients of these send nothing before it, the others read the result at once. Happens once per session.
const STATUS_WAIT: Duration = Duration::from_millis(200);

/// An invalid request of an older version. The client is at fault.
#[derive(Debug, Error)]
enum AdapterError {
    #[error("{number} is no command of protocol {version}, by which this client is served")]
    NotInVersion { number: u8, version: ServedVersion },
    #[error(
        "the versions that the client may have ({candidates}) number the ops of this graph differently, so it is not \
         computed by a guess; {remedy}"
    )]
    UndecidedVersion { candidates: String, remedy: String },
    #[error("invalid graph: {0}")]
    Node(#[from] NotExpressible),
}

impl From<AdapterError> for SessionError {
    fn from(e: AdapterError) -> SessionError {
        SessionError::front_end(e)
    }
}

/// See the module.
pub(super) struct VersionAdapter<'a> {
    /// The version of the protocol that HELLO was answered with.
    served: ServedVersion,
    /// Which of the versions that `served` stands for the client has.
    detector: VersionDetector,
    /// Where to report that `served` works; `None` once that is done.
    unconfirmed: Option<&'a VersionChoice<'a>>,
}

impl<'a> VersionAdapter<'a> {
    pub(super) fn new(served: ServedVersion, choice: &'a VersionChoice<'a>) -> VersionAdapter<'a> {
        VersionAdapter { served, detector: served.detector(), unconfirmed: Some(choice) }
    }

    /// Whether the client has the newest version, so that the session can read its requests itself.
    pub(super) fn is_unneeded(&self) -> bool {
        self.detector.is_decided() && self.detector.codec().is_newest() && self.unconfirmed.is_none()
    }

    /// Receives the request with this header. Returns its command, and the length of the body that the newest version has for it:
    /// in `body`, or, for an upload, next on the connection.
    pub(super) fn receive(
        &mut self,
        header: [u8; REQUEST_HEADER],
        connection: &mut ClientConnection,
        body: &mut BodyBuffer,
        limits: &Limits,
    ) -> Result<(RpcCommand, usize), SessionFailure> {
        let [number, size @ ..] = header;
        let size = u64::from_le_bytes(size);
        self.detector.observe_header(number, size);
        let codec = self.detector.codec();
        let Some(command) = codec.command(number) else {
            let known = RequestHeader::decode(&header).map_err(|e| unknown_command(header, e))?;
            let error = AdapterError::NotInVersion { number, version: self.served };
            // Without HELLO commands had other numbers, so the name of today would mislead.
            let name = codec.version().has_device_field().then(|| known.command.name());
            return Err(SessionFailure::new(name, error));
        };
        // Only a command of the answered version shows that it is the client's.
        self.unconfirmed.take_if(|choice| choice.report_command(self.served, command));
        let received = codec.body_len(command, size, limits).map_err(SessionError::from);
        let received = received.and_then(|len| match command {
            RpcCommand::SetTensor | RpcCommand::SetTensor2d => self.receive_upload(command, len, connection, limits),
            RpcCommand::GraphCompute => self.receive_graph(len, connection, body, limits),
            _ => {
                let newest = codec.newest_body(command, connection.read_body(len, body)?, 0);
                body.replace(&newest)?;
                Ok(newest.len())
            }
        });
        received.map(|len| (command, len)).map_err(|e| SessionFailure::new(Some(command.name()), e))
    }

    /// Translates the head of an upload, and returns it to the connection: the session reads it there, and then the data.
    fn receive_upload(
        &mut self,
        command: RpcCommand,
        len: usize,
        connection: &mut ClientConnection,
        limits: &Limits,
    ) -> Result<usize, SessionError> {
        let mut bytes = [0; MAX_UPLOAD_HEAD];
        let start = self.detector.upload_start_len(command).min(len);
        connection.read_exact(&mut bytes[..start])?;
        self.detector.observe_upload(command, &bytes[..start], len as u64);
        let codec = self.detector.codec();
        codec.body_len(command, len as u64, limits)?;
        let head = codec.head_len(command);
        let read = start.max(head);
        connection.read_exact(&mut bytes[start..read])?;
        let data = len - head;
        let newest = codec.newest_body(command, &bytes[..head], data as u64);
        connection.unread(&bytes[head..read]);
        connection.unread(&newest);
        Ok(newest.len() + data)
    }

    /// Reads and translates a graph. It may be what tells the version. While several versions are possible, only graphs are
    /// translated that have the same ops in all of them: their cached programs are right whatever is found out later.
    fn receive_graph(
        &mut self,
        len: usize,
        connection: &mut ClientConnection,
        body: &mut BodyBuffer,
        limits: &Limits,
    ) -> Result<usize, SessionError> {
        let assumed = self.detector.codec();
        let gap = assumed.graph_gap();
        connection.read_body_behind(gap, len, body)?;
        let len = gap + len;
        assumed.complete_graph_head(body.message_mut(len));
        let message = body.message(len);
        self.detector.observe_graph_body(message, limits);
        let graph = self.detector.codec().read_graph(message, limits)?;
        self.detector.observe_graph(&graph);
        let codec = self.detector.codec();
        if codec != assumed {
            debug!("{}: the client has protocol {codec}", connection.peer());
        }
        if self.detector.disagrees_on(&graph) {
            let (candidates, remedy) = (self.detector.candidate_names(), self.served.undecided_remedy());
            return Err(AdapterError::UndecidedVersion { candidates, remedy }.into());
        }
        let (n_nodes, newest_len) = (graph.node_count(), codec.newest_graph_len(&graph, len));
        body.reserve(newest_len)?;
        codec
            .translate_graph(body.message_mut(len.max(newest_len)), n_nodes, newest_len)
            .map_err(AdapterError::from)?;
        Ok(newest_len)
    }

    /// Replies to a served request that has a reply in older versions only: with nothing, or with the status 0 (success) of a
    /// graph. A failure closes the connection instead.
    pub(super) fn acknowledge(
        &mut self,
        command: RpcCommand,
        connection: &mut ClientConnection,
    ) -> Result<(), SessionError> {
        if command == RpcCommand::GraphCompute && self.detector.is_graph_status_undecided() {
            let waits = !connection.wait_for_input(STATUS_WAIT)?;
            self.detector.observe_wait_for_status(waits);
        }
        if command.response().is_none()
            && let Some(BodySize::Exact(len)) = self.detector.codec().version().response_size(command)
        {
            connection.begin_response(len, &[0][..usize::from(len > 0)])?;
        }
        Ok(())
    }
}
