//! How the two ends come to know each other.

use super::super::codec::{Field, Reader, WireError};
use super::{text, write_text};

/// The revision of the extensions that this crate speaks. A server of another one is spoken to in 7.0.
pub const REVISION: u8 = 1;

/// Whether a server takes clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum State {
    /// It does.
    Ready = 0,
    /// It has as many as it may have, and closes the connection.
    Full = 1,
    /// It is about to end: it serves those that it has and takes no more.
    Draining = 2,
}

impl State {
    const fn from_wire(number: u8) -> Option<State> {
        match number {
            0 => Some(State::Ready),
            1 => Some(State::Full),
            2 => Some(State::Draining),
            _ => None,
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<State, WireError> {
        let have = r.u8("state")?;
        State::from_wire(have).ok_or(WireError::BadValue { what: "state", expected: "0 to 2", have: have.into() })
    }
}

/// What a fanout server says in the byte of its HELLO reply that 7.0 leaves 0 and ignores: the revision of the extensions in
/// the low four bits, its state in the two above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The revision, 1 to 15.
    pub revision: u8,
    /// Whether the server takes this client.
    pub state: State,
}

impl Greeting {
    /// Reads the byte; `None` from a server that is not fanout's, or says what this crate does not know.
    pub const fn from_byte(byte: u8) -> Option<Greeting> {
        match (byte & 15, State::from_wire(byte >> 4)) {
            (revision @ 1.., Some(state)) => Some(Greeting { revision, state }),
            _ => None,
        }
    }

    /// The byte.
    pub const fn to_byte(self) -> u8 {
        (self.revision & 15) | (self.state as u8) << 4
    }
}

/// What a server does for those that it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Abilities {
    /// It looks on its own disk for tensors (LOAD).
    pub loads: bool,
    /// It dials some other servers (SEND).
    pub dials: bool,
}

/// A device as its server describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRecord {
    /// Its name there: `CUDA0`.
    pub name: String,
    /// For people.
    pub description: String,
    /// What it is: 0 a CPU, 1 a GPU; others may come.
    pub kind: u8,
    /// What it can do: bit 0 asynchronous, 1 pinned, 2 imports host memory, 3 events.
    pub caps: u32,
    /// Every tensor's first byte lies at a multiple of this.
    pub alignment: u64,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
    /// What it has or is set to: names and values.
    pub features: Vec<(String, String)>,
}

/// The answer to GREET.
#[derive(Clone, Debug, PartialEq)]
pub struct GreetReply {
    /// The server's program and build: `rpc-server 0.1.0 (1a2b3c4)`.
    pub build: String,
    /// The longest body that it takes, and the most bytes that one READ may ask for.
    pub max_message: u64,
    /// Bytes that the graphs which it keeps may cost altogether ([`graph_cost`](super::super::graph_cost)).
    pub graph_budget: u64,
    /// How many graphs it keeps.
    pub max_graphs: u32,
    /// What it does beyond computing.
    pub abilities: Abilities,
    /// Sessions that it serves, this one included.
    pub sessions: u32,
    /// Its devices, in the order of their numbers.
    pub devices: Vec<DeviceRecord>,
}

impl GreetReply {
    pub(super) fn read(r: &mut Reader<'_>) -> Result<GreetReply, WireError> {
        let build = text(r, "build")?.to_owned();
        let max_message = r.u64("max_message")?;
        let graph_budget = r.u64("graph_budget")?;
        let max_graphs = r.u32("max_graphs")?;
        let abilities = Abilities { loads: Field::read(r, "loads")?, dials: Field::read(r, "dials")? };
        let sessions = r.u32("sessions")?;
        let count = r.u32("n_devices")?;
        // Nothing is reserved for a count: the list grows with the bytes that are there.
        let devices = (0..count).map(|_| DeviceRecord::read(r)).collect::<Result<_, _>>()?;
        Ok(GreetReply { build, max_message, graph_budget, max_graphs, abilities, sessions, devices })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        write_text(&self.build, out);
        self.max_message.write(out);
        self.graph_budget.write(out);
        self.max_graphs.write(out);
        self.abilities.loads.write(out);
        self.abilities.dials.write(out);
        self.sessions.write(out);
        (self.devices.len() as u32).write(out); // their count came from memory
        self.devices.iter().for_each(|device| device.write(out));
    }
}

impl DeviceRecord {
    fn read(r: &mut Reader<'_>) -> Result<DeviceRecord, WireError> {
        let name = text(r, "name")?.to_owned();
        let description = text(r, "description")?.to_owned();
        let (kind, caps) = (r.u8("kind")?, r.u32("caps")?);
        let (alignment, max_buffer) = (r.u64("alignment")?, r.u64("max_buffer")?);
        let mut features = Vec::new();
        for _ in 0..r.u32("n_features")? {
            features.push((text(r, "feature")?.to_owned(), text(r, "value")?.to_owned()));
        }
        Ok(DeviceRecord { name, description, kind, caps, alignment, max_buffer, features })
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_text(&self.name, out);
        write_text(&self.description, out);
        self.kind.write(out);
        self.caps.write(out);
        self.alignment.write(out);
        self.max_buffer.write(out);
        (self.features.len() as u32).write(out); // a handful
        for (name, value) in &self.features {
            write_text(name, out);
            write_text(value, out);
        }
    }
}
