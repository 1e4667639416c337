//! Negotiation of the extensions: the offer in the reply to HELLO, and the server's description in the reply to HELLO_EXT.

use super::super::codec::{Field, Reader, WireError};
use super::super::messages::messages;

/// Revision of the extensions in this crate. With a server of another revision the client uses ggml's protocol, in the
/// version that the server answered.
pub const REVISION: u8 = 7;

/// State of a server: whether it accepts new clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum ServerState {
    /// It accepts new clients.
    Ready = 0,
    /// It has reached its limit of sessions, and closes new connections.
    Full = 1,
    /// It is shutting down: it serves its present sessions to their end, and closes new connections.
    Draining = 2,
}

impl ServerState {
    const fn from_wire(number: u8) -> Option<ServerState> {
        match number {
            0 => Some(ServerState::Ready),
            1 => Some(ServerState::Full),
            2 => Some(ServerState::Draining),
            _ => None,
        }
    }
}

impl Field<'_> for ServerState {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        let have = r.u8(what)?;
        ServerState::from_wire(have).ok_or(WireError::BadValue { what, expected: "0 to 2", have: have.into() })
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }
}

/// Offer of the extensions, in the padding byte of a fanout server's HELLO reply. llama.cpp's server sends 0 there, and its
/// client ignores the byte. Bits 0 to 3: revision of the extensions. Bits 4 and 5: state of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtensionOffer {
    /// Revision of the extensions, 1 to 15.
    pub revision: u8,
    /// State of the server. Unless it is ready, the server closes the connection after this reply.
    pub state: ServerState,
}

impl ExtensionOffer {
    /// Decodes the byte. `None` for 0, as from llama.cpp's server, and for unknown states.
    pub const fn from_byte(byte: u8) -> Option<ExtensionOffer> {
        match (byte & 15, ServerState::from_wire(byte >> 4)) {
            (revision @ 1.., Some(state)) => Some(ExtensionOffer { revision, state }),
            _ => None,
        }
    }

    /// Encodes the byte.
    pub const fn to_byte(self) -> u8 {
        (self.revision & 15) | (self.state as u8) << 4
    }
}

messages! {
    derive(Clone, Copy, Debug, PartialEq, Eq, Default)

    /// Optional capabilities of a server.
    ServerCapabilities {
        /// It has model files from which LOAD can fill tensors.
        load_by_digest: bool,
        /// It may connect to at least one other server, so SEND_TO_PEER can work.
        peer_transfers: bool,
    }
}

messages! {
    derive(Clone, Debug, PartialEq, Eq)

    /// Description of a device, in the reply to HELLO_EXT.
    DeviceRecord {
        /// Name of the device on the server, for example `CUDA0`.
        name: String,
        /// Description for users, for example the model of a GPU.
        description: String,
        /// Kind: 0 CPU, 1 GPU. Later revisions may add others.
        kind: u8,
        /// Capabilities. Bit 0: asynchronous queues, 1: pinned host memory, 2: imports host memory, 3: events.
        caps: u32,
        /// Required alignment of the first byte of a tensor, in bytes.
        alignment: u64,
        /// Maximum size of a buffer, in bytes.
        max_buffer: u64,
        /// Features and settings, as names and values, for users.
        features: Vec<(String, String)>,
    }

    /// Reply to HELLO_EXT: what a client needs to use the server. STATUS has what users see.
    HelloExtReply {
        /// Program and build of the server, for example `rpc-server 0.1.0 (1a2b3c4)`.
        build: String,
        /// Maximum length of a request's body, and of the bytes that one READ requests, in bytes.
        max_message: u64,
        /// Limit of the total cost of the prepared graphs in bytes, by the estimate of [`graph_cost`](super::super::graph_cost).
        graph_budget: u64,
        /// Limit of the number of prepared graphs.
        max_graphs: u32,
        /// Optional capabilities.
        capabilities: ServerCapabilities,
        /// The devices; requests name them by their index in this list.
        devices: Vec<DeviceRecord>,
    }
}
