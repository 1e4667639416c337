//! Commands of the extensions (numbers from 128), their headers, and the allowed lengths of their bodies.

use super::super::codec::WireError;
use super::super::command::Limits;
use super::super::frame::REQUEST_HEADER;
use std::fmt;

/// Length of the secret of a group in bytes.
pub const GROUP_SECRET_BYTES: usize = 16;

/// Length of a transfer token in bytes.
pub const TRANSFER_TOKEN_BYTES: usize = 16;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $min:expr, $max:expr;)*) => {
        /// A command of the extensions. The discriminant is the number on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum ExtCommand {
            $($(#[$doc])* $name = $number,)*
        }

        impl ExtCommand {
            /// All commands in the order of their numbers.
            pub const ALL: &'static [ExtCommand] = &[$(ExtCommand::$name),*];

            /// The command with this number.
            ///
            /// # Errors
            /// [`WireError::UnknownCommand`] if no command has this number.
            pub const fn from_wire(number: u8) -> Result<ExtCommand, WireError> {
                match number {
                    $($number => Ok(ExtCommand::$name),)*
                    _ => Err(WireError::UnknownCommand(number)),
                }
            }

            /// Name of the command in the protocol, for example `OPEN_QUEUE`.
            pub const fn name(self) -> &'static str {
                match self { $(ExtCommand::$name => $text,)* }
            }

            /// Minimum length of the body in bytes, and the rule for its maximum.
            const fn body_sizes(self) -> (u64, MaxBody) {
                match self { $(ExtCommand::$name => ($min, $max),)* }
            }
        }
    };
}

/// Maximum length of a body.
enum MaxBody {
    /// The minimum length: all fields have a fixed size.
    Fixed,
    /// [`Limits::max_body`], because the receiver buffers the body.
    Buffered,
    /// Unlimited, because the receiver streams the body to its destination.
    Streamed,
    /// The minimum length and this many bytes.
    Extra(u64),
}
use MaxBody::{Buffered, Extra, Fixed, Streamed};

commands! {
    /// Enables the extensions.
    HelloExt = 128, "HELLO_EXT", 4, Fixed;
    /// Opens a queue on a device.
    OpenQueue = 129, "OPEN_QUEUE", 8, Fixed;
    /// Closes a queue.
    CloseQueue = 130, "CLOSE_QUEUE", 4, Fixed;
    /// Prepares a graph, bound to buffers, for repeated runs by its id.
    PrepareGraph = 131, "PREPARE_GRAPH", 8 + 12, Buffered;
    /// Runs a prepared graph.
    RunGraph = 132, "RUN_GRAPH", 4 + 8, Fixed;
    /// Writes bytes into a buffer.
    Write = 133, "WRITE", 4 + 24 + 20, Streamed;
    /// Reads bytes of buffers; the server sends them in a READ_DATA notification.
    Read = 134, "READ", 4 + 8, Buffered;
    /// Fills a span with one byte value.
    Fill = 135, "FILL", 4 + 24 + 1, Fixed;
    /// Copies between two spans of this server.
    Copy = 136, "COPY", 4 + 24 + 24, Fixed;
    /// Places a mark: a numbered point in the work of a queue.
    Mark = 137, "MARK", 4 + 8, Fixed;
    /// Makes a queue wait for a mark of another queue.
    Wait = 138, "WAIT", 4 + 4 + 8, Fixed;
    /// Requests a MARK_REACHED notification.
    NotifyReached = 139, "NOTIFY_REACHED", 4 + 8, Fixed;
    /// Queries whether a device supports a node.
    SupportsOp = 140, "SUPPORTS_OP", 12, Buffered;
    /// Fills a span from a model file of the server, by digest.
    Load = 141, "LOAD", 4 + 24 + 20 + 32 + 8 + 32 + 4, Buffered;
    /// Requests transfer tokens.
    IssueTokens = 142, "ISSUE_TOKENS", 4, Fixed;
    /// Assigns a destination to the bytes that a peer sends for a token.
    ReceiveFromPeer = 143, "RECEIVE_FROM_PEER", 4 + 24 + TRANSFER_TOKEN_BYTES as u64, Fixed;
    /// Sends bytes to the server that issued a token for them.
    SendToPeer = 144, "SEND_TO_PEER", 4 + 24 + TRANSFER_TOKEN_BYTES as u64 + 4, Buffered;
    /// Checks whether this server may and can connect to another server.
    ProbePeer = 145, "PROBE_PEER", 4, Buffered;
    /// Writes bytes for a token, from server to server.
    PeerWrite = 146, "PEER_WRITE", TRANSFER_TOKEN_BYTES as u64 + 8, Extra(256 << 10);
    /// Heartbeat: checks that the server is alive, and queries its state.
    Ping = 147, "PING", 0, Fixed;
    /// Makes a queue a rank of a group for collectives.
    JoinGroup = 148, "JOIN_GROUP", 4 + 4 + GROUP_SECRET_BYTES as u64 + 4 + 8, Buffered;
    /// Binds a connection between two servers to a group in which the sender has ranks.
    AttachGroup = 149, "ATTACH_GROUP", GROUP_SECRET_BYTES as u64 + 4 + 4, Fixed;
    /// Publishes a part of a collective, from server to server.
    PublishPart = 150, "PUBLISH_PART", 4 + 8 + 4 + 4 + 20 + 4 + 8, Streamed;
    /// Reports that a group has failed, from server to server.
    FailGroup = 151, "FAIL_GROUP", 4 + 4, Extra(4 << 10);
    /// Queries the state of the server, for its operator.
    Status = 152, "STATUS", 0, Fixed;
}

impl fmt::Display for ExtCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
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
        let mut bytes = [self.command as u8; REQUEST_HEADER];
        bytes[1..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// The checked length of the body. Called before any byte of the body is read, so that an invalid length costs no memory.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if it is too short for its command, [`WireError::TooLarge`] if it is too long for the command
    /// or for `limits`.
    pub fn body_len(&self, limits: &Limits) -> Result<usize, WireError> {
        let (what, have) = (self.command.name(), self.size);
        let (min, max) = self.command.body_sizes();
        if have < min {
            return Err(WireError::Truncated { what, need: min, have });
        }
        let limit = match max {
            Fixed => min,
            Buffered => limits.max_body,
            Streamed => isize::MAX as u64,
            Extra(bytes) => min + bytes,
        };
        let too_large = WireError::TooLarge { what, have, limit };
        if have > limit { Err(too_large) } else { usize::try_from(have).map_err(|_| too_large) }
    }
}
