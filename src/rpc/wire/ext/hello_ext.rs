//! Negotiation of the extensions: the offer in the reply to HELLO, and the server's description in the reply to HELLO_EXT.

use super::super::codec::{Field, Reader, WireError};
use super::{text, write_text};

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

    pub(super) fn read(r: &mut Reader<'_>) -> Result<ServerState, WireError> {
        let have = r.u8("state")?;
        ServerState::from_wire(have).ok_or(WireError::BadValue { what: "state", expected: "0 to 2", have: have.into() })
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

/// Optional capabilities of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServerCapabilities {
    /// It has model files from which LOAD can fill tensors.
    pub load_by_digest: bool,
    /// It may connect to at least one other server, so SEND_TO_PEER can work.
    pub peer_transfers: bool,
}

/// A port on which a server listens, in the reply to HELLO_EXT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerRecord {
    /// The port; 0 for a transport without ports.
    pub port: u32,
    /// Versions of ggml's protocol that the server answers there, for users: `8.0, else 7.0; 3.x; gen0`.
    pub versions: String,
}

/// A client's key with sessions, in the reply to HELLO_EXT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRecord {
    /// Name of the key on the server.
    pub name: String,
    /// Number of its open sessions.
    pub sessions: u32,
    /// Device memory of its sessions, in bytes.
    pub memory: u64,
}

/// Description of a device, in the reply to HELLO_EXT.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRecord {
    /// Name of the device on the server, for example `CUDA0`.
    pub name: String,
    /// Description for users, for example the model of a GPU.
    pub description: String,
    /// Kind: 0 CPU, 1 GPU. Later revisions may add others.
    pub kind: u8,
    /// Capabilities. Bit 0: asynchronous queues, 1: pinned host memory, 2: imports host memory, 3: events.
    pub caps: u32,
    /// Required alignment of the first byte of a tensor, in bytes.
    pub alignment: u64,
    /// Maximum size of a buffer, in bytes.
    pub max_buffer: u64,
    /// Features and settings, as names and values, for users.
    pub features: Vec<(String, String)>,
}

/// Reply to HELLO_EXT: description of the server and of its devices.
#[derive(Clone, Debug, PartialEq)]
pub struct HelloExtReply {
    /// Program and build of the server, for example `rpc-server 0.1.0 (1a2b3c4)`.
    pub build: String,
    /// Maximum length of a request's body, and of the bytes that one READ requests, in bytes.
    pub max_message: u64,
    /// Limit of the total cost of the prepared graphs in bytes, by the estimate of [`graph_cost`](super::super::graph_cost).
    pub graph_budget: u64,
    /// Limit of the number of prepared graphs.
    pub max_graphs: u32,
    /// Optional capabilities.
    pub capabilities: ServerCapabilities,
    /// Number of open sessions, this one included.
    pub sessions: u32,
    /// The ports on which it listens, and their versions of ggml's protocol.
    pub listeners: Vec<ListenerRecord>,
    /// Limits and how far they are used, as names and values, for users.
    pub limits: Vec<(String, String)>,
    /// The keys with sessions, in the order of their names, at most 256. Empty for clients that have proved no key.
    pub tenants: Vec<TenantRecord>,
    /// The devices; requests name them by their index in this list.
    pub devices: Vec<DeviceRecord>,
}

impl HelloExtReply {
    pub(super) fn read(r: &mut Reader<'_>) -> Result<HelloExtReply, WireError> {
        let build = text(r, "build")?.to_owned();
        let max_message = r.u64("max_message")?;
        let graph_budget = r.u64("graph_budget")?;
        let max_graphs = r.u32("max_graphs")?;
        let capabilities =
            ServerCapabilities { load_by_digest: Field::read(r, "loads")?, peer_transfers: Field::read(r, "dials")? };
        let sessions = r.u32("sessions")?;
        let listeners = list(r, "n_listeners", ListenerRecord::read)?;
        let limits = list(r, "n_limits", pair)?;
        let tenants = list(r, "n_tenants", TenantRecord::read)?;
        let devices = list(r, "n_devices", DeviceRecord::read)?;
        Ok(HelloExtReply {
            build,
            max_message,
            graph_budget,
            max_graphs,
            capabilities,
            sessions,
            listeners,
            limits,
            tenants,
            devices,
        })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        write_text(&self.build, out);
        self.max_message.write(out);
        self.graph_budget.write(out);
        self.max_graphs.write(out);
        self.capabilities.load_by_digest.write(out);
        self.capabilities.peer_transfers.write(out);
        self.sessions.write(out);
        (self.listeners.len() as u32).write(out);
        self.listeners.iter().for_each(|listener| listener.write(out));
        write_pairs(&self.limits, out);
        (self.tenants.len() as u32).write(out);
        self.tenants.iter().for_each(|tenant| tenant.write(out));
        (self.devices.len() as u32).write(out); // a list in memory is shorter than 2^32
        self.devices.iter().for_each(|device| device.write(out));
    }
}

/// Decodes a count and that many elements.
fn list<T>(
    r: &mut Reader<'_>,
    what: &'static str,
    element: impl Fn(&mut Reader<'_>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    let count = r.u32(what)?;
    let mut elements = Vec::new();
    // Does not reserve memory for `count`, which is the peer's claim: the list grows only as elements are decoded.
    for _ in 0..count {
        elements.push(element(r)?);
    }
    Ok(elements)
}

/// Decodes a name and a value.
fn pair(r: &mut Reader<'_>) -> Result<(String, String), WireError> {
    Ok((text(r, "name")?.to_owned(), text(r, "value")?.to_owned()))
}

fn write_pairs(pairs: &[(String, String)], out: &mut Vec<u8>) {
    (pairs.len() as u32).write(out); // a list in memory is shorter than 2^32
    for (name, value) in pairs {
        write_text(name, out);
        write_text(value, out);
    }
}

impl ListenerRecord {
    fn read(r: &mut Reader<'_>) -> Result<ListenerRecord, WireError> {
        let port = r.u32("port")?;
        let versions = text(r, "versions")?.to_owned();
        Ok(ListenerRecord { port, versions })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.port.write(out);
        write_text(&self.versions, out);
    }
}

impl TenantRecord {
    fn read(r: &mut Reader<'_>) -> Result<TenantRecord, WireError> {
        let name = text(r, "name")?.to_owned();
        Ok(TenantRecord { name, sessions: r.u32("sessions")?, memory: r.u64("memory")? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_text(&self.name, out);
        self.sessions.write(out);
        self.memory.write(out);
    }
}

impl DeviceRecord {
    fn read(r: &mut Reader<'_>) -> Result<DeviceRecord, WireError> {
        let name = text(r, "name")?.to_owned();
        let description = text(r, "description")?.to_owned();
        let (kind, caps) = (r.u8("kind")?, r.u32("caps")?);
        let (alignment, max_buffer) = (r.u64("alignment")?, r.u64("max_buffer")?);
        let features = list(r, "n_features", pair)?;
        Ok(DeviceRecord { name, description, kind, caps, alignment, max_buffer, features })
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_text(&self.name, out);
        write_text(&self.description, out);
        self.kind.write(out);
        self.caps.write(out);
        self.alignment.write(out);
        self.max_buffer.write(out);
        write_pairs(&self.features, out);
    }
}
