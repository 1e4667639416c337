//! The commands from 128 on, and the sizes of their bodies.

use super::super::codec::WireError;
use super::super::command::Limits;
use super::super::frame::REQUEST_HEADER;
use std::fmt;

/// Bytes of a ticket.
pub const TICKET: usize = 16;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $least:expr, $most:expr;)*) => {
        /// A command of the extensions. The discriminant is its number on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum ExtCommand {
            $($(#[$doc])* $name = $number,)*
        }

        impl ExtCommand {
            /// Every command, by number.
            pub const ALL: &'static [ExtCommand] = &[$(ExtCommand::$name),*];

            /// The command with this number.
            ///
            /// # Errors
            /// [`WireError::UnknownCommand`] for numbers that are none.
            pub const fn from_wire(number: u8) -> Result<ExtCommand, WireError> {
                match number {
                    $($number => Ok(ExtCommand::$name),)*
                    _ => Err(WireError::UnknownCommand(number)),
                }
            }

            /// The command's name in the protocol, for example `OPEN_QUEUE`.
            pub const fn name(self) -> &'static str {
                match self { $(ExtCommand::$name => $text,)* }
            }

            /// The least bytes of a body, and the most where that is fixed.
            const fn sizes(self) -> (u64, Most) {
                match self { $(ExtCommand::$name => ($least, $most),)* }
            }
        }
    };
}

/// The most bytes of a body.
enum Most {
    /// As many as the least.
    Fixed,
    /// As [`Limits::max_body`] says: it is held.
    Held,
    /// Any number: it streams to its place.
    Any,
    /// So many more.
    Plus(u64),
}
use Most::{Any, Fixed, Held, Plus};

commands! {
    /// Takes the extensions up.
    Greet = 128, "GREET", 4, Fixed;
    /// Opens a queue on a device.
    OpenQueue = 129, "OPEN_QUEUE", 8, Fixed;
    /// Ends a queue.
    CloseQueue = 130, "CLOSE_QUEUE", 4, Fixed;
    /// Keeps a graph, bound to buffers, to be run by its number.
    KeepGraph = 131, "KEEP_GRAPH", 8 + 12, Held;
    /// Runs a kept graph.
    RunGraph = 132, "RUN_GRAPH", 4 + 8, Fixed;
    /// Writes bytes into a buffer.
    Write = 133, "WRITE", 4 + 24 + 20, Any;
    /// Reads bytes of buffers.
    Read = 134, "READ", 4 + 8, Held;
    /// Fills a part of a buffer with one byte value.
    Fill = 135, "FILL", 4 + 24 + 1, Fixed;
    /// Copies between two buffers of this server.
    Copy = 136, "COPY", 4 + 24 + 24, Fixed;
    /// Gives a number to a moment of a queue.
    Mark = 137, "MARK", 4 + 8, Fixed;
    /// Makes a queue wait for a moment of another one.
    Wait = 138, "WAIT", 4 + 4 + 8, Fixed;
    /// Asks to be told when a moment is reached.
    Ask = 139, "ASK", 4 + 8, Fixed;
    /// Asks whether a device runs a node.
    Support = 140, "SUPPORT", 12, Held;
    /// Fills a tensor from the server's own disk.
    Load = 141, "LOAD", 4 + 24 + 20 + 32 + 4, Held;
    /// Asks for tickets.
    Tickets = 142, "TICKETS", 4, Fixed;
    /// Says where the bytes of tickets go.
    Receive = 143, "RECEIVE", 4 + 24 + 4, Held;
    /// Sends bytes to the server that issued tickets for them.
    Send = 144, "SEND", 4 + 24 + 4 + 4, Held;
    /// Asks whether this server may dial another one.
    Reach = 145, "REACH", 4, Held;
    /// Hands bytes over, for a ticket: from server to server.
    Put = 146, "PUT", TICKET as u64, Plus(256 << 10);
    /// Asks whether the server is alive, and how it is.
    Ping = 147, "PING", 0, Fixed;
}

impl fmt::Display for ExtCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `cmd u8 | size u64`, with a command of the extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtHeader {
    /// The command.
    pub command: ExtCommand,
    /// Bytes of the body, as the peer says: see [`ExtHeader::body_len`].
    pub size: u64,
}

impl ExtHeader {
    /// Whether a header is one of the extensions.
    pub const fn is_one(bytes: &[u8; REQUEST_HEADER]) -> bool {
        bytes[0] >= 128
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`WireError::UnknownCommand`].
    pub fn decode(bytes: &[u8; REQUEST_HEADER]) -> Result<ExtHeader, WireError> {
        let [number, size @ ..] = *bytes;
        Ok(ExtHeader { command: ExtCommand::from_wire(number)?, size: u64::from_le_bytes(size) })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; REQUEST_HEADER] {
        let mut bytes = [self.command as u8; REQUEST_HEADER];
        bytes[1..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// The length of the body, once it is known to be acceptable: refuses before any byte of it is read.
    ///
    /// # Errors
    /// [`WireError::Truncated`] when it is too short for its command, [`WireError::TooLarge`] when it is too long for it or
    /// for `limits`.
    pub fn body_len(&self, limits: &Limits) -> Result<usize, WireError> {
        let (what, have) = (self.command.name(), self.size);
        let (least, most) = self.command.sizes();
        if have < least {
            return Err(WireError::Truncated { what, need: least, have });
        }
        let limit = match most {
            Fixed => least,
            Held => limits.max_body,
            Any => isize::MAX as u64,
            Plus(more) => least + more,
        };
        let too_large = WireError::TooLarge { what, have, limit };
        if have > limit { Err(too_large) } else { usize::try_from(have).map_err(|_| too_large) }
    }
}
