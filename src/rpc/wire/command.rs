//! The 18 commands of protocol 7.0 and the sizes of their bodies, in one table.

use std::fmt;

use super::{codec::WireError, tensor::TENSOR_RECORD};
use crate::setters::setters;

/// What a receiver is willing to hold for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Nodes of one graph.
    pub max_nodes: u32,
    /// Tensor records of one graph, leaves included.
    pub max_tensors: u32,
    /// Bytes of one request's body. SET_TENSOR is exempt: its data is not held but streams to its buffer.
    pub max_body: u64,
}

impl Limits {
    /// Limits in the order of the fields: nodes and tensors of a graph, bytes of a body.
    pub const fn new(max_nodes: u32, max_tensors: u32, max_body: u64) -> Limits {
        Limits { max_nodes, max_tensors, max_body }
    }

    /// The longest GRAPH_COMPUTE body in bytes.
    const fn graph_body(&self) -> u64 {
        // At most 12 + 304 * 2^32: far from overflow.
        let counts = GRAPH_FIXED + NODE_ID * self.max_nodes as u64 + T * self.max_tensors as u64;
        if counts < self.max_body { counts } else { self.max_body }
    }
}

setters!(Limits {
    with_max_nodes max_nodes: u32,
    with_max_tensors max_tensors: u32,
    with_max_body max_body: u64,
});

/// The lengths in bytes that a body may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodySize {
    /// This length.
    Exact(u64),
    /// One of two: the older form of the message, and that of 7.0.
    Either(u64, u64),
    /// A head of this length, then any amount of data.
    AtLeast(u64),
    /// Two counts and a device, with an id of 8 bytes per node and a record of 296 per tensor.
    Graph,
}

impl BodySize {
    /// Whether a body of `size` bytes can be well-formed.
    pub const fn admits(self, size: u64) -> bool {
        match self {
            BodySize::Exact(n) => size == n,
            BodySize::Either(old, new) => size == old || size == new,
            BodySize::AtLeast(n) => size >= n,
            // A record is a multiple of a node's id, so that this is all that can be said without the counts.
            BodySize::Graph => size >= GRAPH_FIXED && (size - GRAPH_FIXED).is_multiple_of(NODE_ID),
        }
    }
}

impl fmt::Display for BodySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodySize::Exact(n) => write!(f, "{n} bytes"),
            BodySize::Either(old, new) => write!(f, "{old} or {new} bytes"),
            BodySize::AtLeast(n) => write!(f, "at least {n} bytes"),
            BodySize::Graph => write!(f, "{GRAPH_FIXED} + {NODE_ID} n_nodes + {T} n_tensors bytes"),
        }
    }
}

const T: u64 = TENSOR_RECORD as u64;
const NODE_ID: u64 = 8;
const GRAPH_FIXED: u64 = 4 + 4 + 4;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal: $request:expr => $response:expr;)*) => {
        /// A command. The discriminant is its number on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Command {
            $($(#[$doc])* $name = $number,)*
        }

        impl Command {
            /// Every command, by number.
            pub const ALL: &'static [Command] = &[$(Command::$name),*];

            /// The command with this number.
            ///
            /// # Errors
            /// [`WireError::UnknownCommand`] for numbers that 7.0 does not have.
            pub const fn from_wire(number: u8) -> Result<Command, WireError> {
                match number {
                    $($number => Ok(Command::$name),)*
                    _ => Err(WireError::UnknownCommand(number)),
                }
            }

            /// The command's name in the protocol, for example `ALLOC_BUFFER`.
            pub const fn name(self) -> &'static str {
                match self { $(Command::$name => $text,)* }
            }

            /// The lengths that the request's body may have.
            pub const fn request(self) -> BodySize {
                match self { $(Command::$name => $request,)* }
            }

            /// The lengths that the response's body may have; `None` if nothing is sent back.
            pub const fn response(self) -> Option<BodySize> {
                match self { $(Command::$name => $response,)* }
            }
        }
    };
}

use BodySize::{AtLeast, Either, Exact, Graph};

commands! {
    /// Allocates a buffer on a device.
    AllocBuffer = 0, "ALLOC_BUFFER": Exact(4 + 8) => Some(Exact(8 + 8));
    /// Asks for a device's alignment in bytes.
    GetAlignment = 1, "GET_ALIGNMENT": Exact(4) => Some(Exact(8));
    /// Asks for the largest buffer of a device.
    GetMaxSize = 2, "GET_MAX_SIZE": Exact(4) => Some(Exact(8));
    /// Asks for a buffer's address.
    BufferGetBase = 3, "BUFFER_GET_BASE": Exact(8) => Some(Exact(8));
    /// Gives a buffer back.
    FreeBuffer = 4, "FREE_BUFFER": Exact(8) => None;
    /// Fills a buffer with one byte value.
    BufferClear = 5, "BUFFER_CLEAR": Exact(8 + 1) => None;
    /// Writes bytes into a tensor.
    SetTensor = 6, "SET_TENSOR": AtLeast(T + 1 + 8) => None;
    /// Asks the server to fill a tensor from its cache.
    SetTensorHash = 7, "SET_TENSOR_HASH": Exact(T + 8 + 8) => Some(Exact(1));
    /// Reads bytes of a tensor.
    GetTensor = 8, "GET_TENSOR": Exact(T + 8 + 8) => Some(AtLeast(0));
    /// Copies between two tensors of this server.
    CopyTensor = 9, "COPY_TENSOR": Exact(T + T) => Some(Exact(1));
    /// Runs a graph and stores it for GRAPH_RECOMPUTE.
    GraphCompute = 10, "GRAPH_COMPUTE": Graph => None;
    /// Asks for a device's free and total memory.
    GetDeviceMemory = 11, "GET_DEVICE_MEMORY": Exact(4) => Some(Exact(8 + 8));
    /// Prepares a tensor whose rows end in padding.
    InitTensor = 12, "INIT_TENSOR": Exact(T) => None;
    /// Asks how many bytes a tensor takes on a device.
    GetAllocSize = 13, "GET_ALLOC_SIZE": Exact(4 + T + 10 * T) => Some(Exact(8));
    /// Opens every connection.
    Hello = 14, "HELLO": Either(0, 24) => Some(Either(3, 3 + 1 + 24));
    /// Asks how many devices the endpoint has.
    DeviceCount = 15, "DEVICE_COUNT": Exact(0) => Some(Exact(4));
    /// Runs a device's last graph again.
    GraphRecompute = 16, "GRAPH_RECOMPUTE": Exact(4) => None;
    /// Fills a part of a tensor with one byte value.
    MemsetTensor = 17, "MEMSET_TENSOR": Exact(T + 8 + 8 + 1) => None;
}

impl Command {
    /// The length of a request's body, from the size in its header: refuses before any byte of the body is read.
    ///
    /// # Errors
    /// [`WireError::BodySize`] if no request of this command has that length, [`WireError::TooLarge`] if it is
    /// over `limits`.
    pub fn request_size(self, size: u64, limits: &Limits) -> Result<usize, WireError> {
        let limit = match self.request() {
            // No buffer is larger than the address space, and sums with a head or an offset in it stay in range.
            AtLeast(_) => isize::MAX as u64,
            Graph => limits.graph_body(),
            Exact(_) | Either(..) => limits.max_body,
        };
        self.checked_size(self.request(), size, limit)
    }

    /// The length of a response's body, from the size in its header. `limit` is the most that the caller has room
    /// for: what it asked GET_TENSOR for.
    ///
    /// # Errors
    /// As [`Command::request_size`]; [`WireError::NoResponse`] if the command has none.
    pub fn response_size(self, size: u64, limit: u64) -> Result<usize, WireError> {
        let expected = self.response().ok_or(WireError::NoResponse(self))?;
        self.checked_size(expected, size, limit)
    }

    fn checked_size(self, expected: BodySize, have: u64, limit: u64) -> Result<usize, WireError> {
        if !expected.admits(have) {
            return Err(WireError::BodySize { command: self, expected, have });
        }
        let too_large = WireError::TooLarge { what: self.name(), have, limit };
        if have > limit { Err(too_large) } else { usize::try_from(have).map_err(|_| too_large) }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
