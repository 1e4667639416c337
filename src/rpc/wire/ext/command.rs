//! Commands of the extensions (numbers from 128), their headers, and the allowed lengths of their bodies.

use super::super::codec::WireError;
use super::super::command::BodySize::{self, AtLeast, Between, Buffered, Exact};
use super::super::command::Limits;
use super::super::frame::{REQUEST_HEADER, header};
use super::super::messages::commands;

/// Length of the secret of a group in bytes.
pub const GROUP_SECRET_BYTES: usize = 16;

/// Length of a transfer token in bytes.
pub const TRANSFER_TOKEN_BYTES: usize = 16;

/// Bytes of a PEER_WRITE before its data: token and offset.
const PEER_HEAD: u64 = TRANSFER_TOKEN_BYTES as u64 + 8;

commands! {
    /// A command of the extensions. The discriminant is the number on the wire.
    ExtCommand(BodySize);
    /// Enables the extensions.
    HelloExt = 128, "HELLO_EXT", Exact(4);
    /// Opens a queue on a device.
    OpenQueue = 129, "OPEN_QUEUE", Exact(8);
    /// Closes a queue.
    CloseQueue = 130, "CLOSE_QUEUE", Exact(4);
    /// Prepares a graph, bound to buffers, for repeated runs by its id.
    PrepareGraph = 131, "PREPARE_GRAPH", Buffered(8 + 12);
    /// Runs a prepared graph.
    RunGraph = 132, "RUN_GRAPH", Exact(4 + 8);
    /// Writes bytes into a buffer.
    Write = 133, "WRITE", AtLeast(4 + 24 + 20);
    /// Reads bytes of buffers; the server sends them in a READ_DATA notification.
    Read = 134, "READ", Buffered(4 + 8);
    /// Fills a span with one byte value.
    Fill = 135, "FILL", Exact(4 + 24 + 1);
    /// Copies between two spans of this server.
    Copy = 136, "COPY", Exact(4 + 24 + 24);
    /// Places a mark: a numbered point in the work of a queue.
    Mark = 137, "MARK", Exact(4 + 8);
    /// Makes a queue wait for a mark of another queue.
    Wait = 138, "WAIT", Exact(4 + 4 + 8);
    /// Requests a MARK_REACHED notification.
    NotifyReached = 139, "NOTIFY_REACHED", Exact(4 + 8);
    /// Queries whether a device supports a node.
    SupportsOp = 140, "SUPPORTS_OP", Buffered(12);
    /// Fills a span from a model file of the server, by digest.
    Load = 141, "LOAD", Buffered(4 + 24 + 20 + 32 + 8 + 32 + 4);
    /// Requests transfer tokens.
    IssueTokens = 142, "ISSUE_TOKENS", Exact(4);
    /// Assigns a destination to the bytes that a peer sends for a token.
    ReceiveFromPeer = 143, "RECEIVE_FROM_PEER", Exact(4 + 24 + TRANSFER_TOKEN_BYTES as u64);
    /// Sends bytes to the server that issued a token for them.
    SendToPeer = 144, "SEND_TO_PEER", Buffered(4 + 24 + TRANSFER_TOKEN_BYTES as u64 + 4);
    /// Checks whether this server may and can connect to another server.
    ProbePeer = 145, "PROBE_PEER", Buffered(4);
    /// Writes bytes for a token, from server to server.
    PeerWrite = 146, "PEER_WRITE", Between(PEER_HEAD, PEER_HEAD + (256 << 10));
    /// Heartbeat: checks that the server is alive, and queries its state.
    Ping = 147, "PING", Exact(0);
    /// Makes a queue a rank of a group for collectives.
    JoinGroup = 148, "JOIN_GROUP", Buffered(4 + 4 + GROUP_SECRET_BYTES as u64 + 4 + 8);
    /// Binds a connection between two servers to a group, of which the sender has ranks.
    AttachGroup = 149, "ATTACH_GROUP", Exact(GROUP_SECRET_BYTES as u64 + 4 + 4);
    /// Publishes a part of a collective, from server to server.
    PublishPart = 150, "PUBLISH_PART", AtLeast(4 + 8 + 4 + 4 + 20 + 4 + 8);
    /// Reports that a group has failed, from server to server.
    FailGroup = 151, "FAIL_GROUP", Between(4 + 4, 4 + 4 + (4 << 10));
    /// Queries the state of the server, for its operator.
    Status = 152, "STATUS", Exact(0);
}

/// Header of a request of the extensions: `cmd u8 | size u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtHeader {
    /// The command.
    pub command: ExtCommand,
    /// Length of the body in bytes, unchecked; [`ExtHeader::body_len`] checks it.
    pub size: u64,
}

impl ExtHeader {
    /// Whether the header belongs to a command of the extensions.
    pub const fn is_extension(bytes: &[u8; REQUEST_HEADER]) -> bool {
        bytes[0] >= 128
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`WireError::UnknownCommand`].
    pub fn decode(bytes: &[u8; REQUEST_HEADER]) -> Result<ExtHeader, WireError> {
        let [number, size @ ..] = *bytes;
        Ok(ExtHeader { command: ExtCommand::from_wire(number)?, size: u64::from_le_bytes(size) })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; REQUEST_HEADER] {
        header(self.command as u8, self.size)
    }

    /// The checked length of the body. Called before any byte of the body is read, so that an invalid length costs no memory.
    ///
    /// # Errors
    /// [`WireError::BodySize`] if no request of this command can have that length, [`WireError::TooLarge`] if it exceeds
    /// `limits`.
    pub fn body_len(&self, limits: &Limits) -> Result<usize, WireError> {
        self.command.sizes().check_request(self.command.name(), self.size, limits)
    }
}
