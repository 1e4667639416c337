//! Table of the 18 commands of protocol 7.0: numbers, names, and allowed lengths of request and response bodies.

use std::fmt;

use super::{codec::WireError, messages::commands, tensor::TENSOR_RECORD};
use crate::setters::setters;

/// Limits of a receiver for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of nodes of a graph.
    pub max_nodes: u32,
    /// Maximum number of tensor records of a graph, leaves included.
    pub max_tensors: u32,
    /// Maximum length of a request's body in bytes. SET_TENSOR is exempt, because its data is streamed and not buffered.
    pub max_body: u64,
}

impl Limits {
    /// Creates limits: nodes of a graph, tensors of a graph, bytes of a body.
    pub const fn new(max_nodes: u32, max_tensors: u32, max_body: u64) -> Limits {
        Limits { max_nodes, max_tensors, max_body }
    }

    /// Maximum length of a GRAPH_COMPUTE body in bytes.
    const fn graph_body(&self) -> u64 {
        // Cannot overflow: at most 12 + 304 * 2^32.
        let counts = GRAPH_FIXED + GRAPH_UID + NODE_ID * self.max_nodes as u64 + T * self.max_tensors as u64;
        if counts < self.max_body { counts } else { self.max_body }
    }
}

setters!(Limits {
    with_max_nodes max_nodes: u32,
    with_max_tensors max_tensors: u32,
    with_max_body max_body: u64,
});

/// Allowed lengths of a body, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodySize {
    /// Exactly this length.
    Exact(u64),
    /// One of two lengths: of the older form of the message, and of 7.0.
    Either(u64, u64),
    /// A head of this length and any amount of data after it, which the receiver streams to its destination.
    AtLeast(u64),
    /// At least this length, and no more than the receiver's [`Limits::max_body`].
    Buffered(u64),
    /// At least the first length, at most the second one.
    Between(u64, u64),
    /// A graph: device and two counts, 8 bytes per node (its id) and 296 bytes per tensor (its record).
    Graph,
}

impl BodySize {
    /// Whether the protocol allows a body of `size` bytes.
    pub const fn admits(self, size: u64) -> bool {
        match self {
            BodySize::Exact(n) => size == n,
            BodySize::Either(old, new) => size == old || size == new,
            BodySize::AtLeast(n) | BodySize::Buffered(n) => size >= n,
            BodySize::Between(min, max) => min <= size && size <= max,
            // The length of a record is a multiple of that of an id, so without the counts nothing more can be checked.
            BodySize::Graph => size >= GRAPH_FIXED && (size - GRAPH_FIXED).is_multiple_of(NODE_ID),
        }
    }

    /// Maximum length of the body of a request at a receiver with these limits.
    const fn limit(self, limits: &Limits) -> u64 {
        match self {
            // No buffer is larger than the address space; sums of this limit and a head or an offset cannot overflow.
            BodySize::AtLeast(_) => isize::MAX as u64,
            BodySize::Graph => limits.graph_body(),
            BodySize::Between(_, max) => max,
            BodySize::Exact(_) | BodySize::Either(..) | BodySize::Buffered(_) => limits.max_body,
        }
    }

    /// The checked length of a body, given the size in its header. Called before any byte of the body is read, so that an invalid
    /// length costs no memory.
    fn check(self, command: &'static str, have: u64, limit: u64) -> Result<usize, WireError> {
        if !self.admits(have) {
            return Err(WireError::BodySize { command, expected: self, have });
        }
        let too_large = WireError::TooLarge { what: command, have, limit };
        if have > limit { Err(too_large) } else { usize::try_from(have).map_err(|_| too_large) }
    }

    /// [`BodySize::check`] of a request.
    pub(super) fn check_request(self, command: &'static str, have: u64, limits: &Limits) -> Result<usize, WireError> {
        self.check(command, have, self.limit(limits))
    }
}

impl fmt::Display for BodySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodySize::Exact(n) => write!(f, "{n} bytes"),
            BodySize::Either(old, new) => write!(f, "{old} or {new} bytes"),
            BodySize::AtLeast(n) | BodySize::Buffered(n) => write!(f, "at least {n} bytes"),
            BodySize::Between(min, max) => write!(f, "{min} to {max} bytes"),
            BodySize::Graph => write!(f, "{GRAPH_FIXED} + {NODE_ID} n_nodes + {T} n_tensors bytes"),
        }
    }
}

const T: u64 = TENSOR_RECORD as u64;
const NODE_ID: u64 = 8;
/// Bytes of a GRAPH_COMPUTE beside its ids and records: device, two counts. From 8.0 on a uid of 8 bytes is added.
const GRAPH_FIXED: u64 = 4 + 4 + 4;
const GRAPH_UID: u64 = 8;

use BodySize::{AtLeast, Either, Exact, Graph};

commands! {
    /// A command of ggml's protocol. The discriminant is its number from 3.0 on.
    RpcCommand((BodySize, Option<BodySize>));
    /// Allocates a buffer on a device.
    AllocBuffer = 0, "ALLOC_BUFFER", (Exact(4 + 8), Some(Exact(8 + 8)));
    /// Queries the alignment that a device requires, in bytes.
    GetAlignment = 1, "GET_ALIGNMENT", (Exact(4), Some(Exact(8)));
    /// Queries the maximum size of a buffer of a device.
    GetMaxSize = 2, "GET_MAX_SIZE", (Exact(4), Some(Exact(8)));
    /// Queries the base address of a buffer.
    BufferGetBase = 3, "BUFFER_GET_BASE", (Exact(8), Some(Exact(8)));
    /// Frees a buffer.
    FreeBuffer = 4, "FREE_BUFFER", (Exact(8), None);
    /// Fills a buffer with one byte value.
    BufferClear = 5, "BUFFER_CLEAR", (Exact(8 + 1), None);
    /// Writes bytes into a tensor.
    SetTensor = 6, "SET_TENSOR", (AtLeast(T + 1 + 8), None);
    /// Fills a tensor from the cache of the server, if the cache has data with this hash.
    SetTensorHash = 7, "SET_TENSOR_HASH", (Exact(T + 8 + 8), Some(Exact(1)));
    /// Reads bytes of a tensor.
    GetTensor = 8, "GET_TENSOR", (Exact(T + 8 + 8), Some(AtLeast(0)));
    /// Copies between two tensors of this server.
    CopyTensor = 9, "COPY_TENSOR", (Exact(T + T), Some(Exact(1)));
    /// Runs a graph and stores it for GRAPH_RECOMPUTE.
    GraphCompute = 10, "GRAPH_COMPUTE", (Graph, None);
    /// Queries the free and the total memory of a device.
    GetDeviceMemory = 11, "GET_DEVICE_MEMORY", (Exact(4), Some(Exact(8 + 8)));
    /// Initialises a tensor, for example the padding at the ends of its rows.
    InitTensor = 12, "INIT_TENSOR", (Exact(T), None);
    /// Queries how many bytes a tensor takes on a device.
    GetAllocSize = 13, "GET_ALLOC_SIZE", (Exact(4 + T + 10 * T), Some(Exact(8)));
    /// Negotiates the version; the first request of a connection.
    Hello = 14, "HELLO", (Either(0, 24), Some(Either(3, 3 + 1 + 24)));
    /// Queries the number of devices of the server.
    DeviceCount = 15, "DEVICE_COUNT", (Exact(0), Some(Exact(4)));
    /// Runs a stored graph again: the last one of the device up to 7.0, a numbered one from 8.0 on.
    GraphRecompute = 16, "GRAPH_RECOMPUTE", (Either(4, 4 + 8), None);
    /// Fills a part of a tensor with one byte value.
    MemsetTensor = 17, "MEMSET_TENSOR", (Exact(T + 8 + 8 + 1), None);
    /// Writes rows of equal length into a tensor, at a stride.
    SetTensor2d = 18, "SET_TENSOR_2D", (AtLeast(T + 4 * 8), None);
    /// Reads rows of equal length from a tensor, at a stride.
    GetTensor2d = 19, "GET_TENSOR_2D", (Exact(T + 4 * 8), Some(AtLeast(0)));
    /// Connects a device to the device of another server, for collectives.
    CommInit = 20, "COMM_INIT", (Exact(4 * 4 + 64), Some(Exact(1)));
    /// Adds a tensor and that of the connected device, on both.
    CommAllreduce = 21, "COMM_ALLREDUCE", (Exact(4 + T), None);
    /// Closes the connection for collectives of a device.
    CommFree = 22, "COMM_FREE", (Exact(4), None);
}

impl RpcCommand {
    /// Allowed lengths of the request's body.
    pub const fn request(self) -> BodySize {
        self.sizes().0
    }

    /// Allowed lengths of the response's body; `None` if the command has no response.
    pub const fn response(self) -> Option<BodySize> {
        self.sizes().1
    }

    /// The checked length of a request's body, given the size in its header. Called before any byte of the body is read.
    ///
    /// # Errors
    /// [`WireError::BodySize`] if no request of this command can have that length, [`WireError::TooLarge`] if it exceeds
    /// `limits`.
    pub fn request_size(self, size: u64, limits: &Limits) -> Result<usize, WireError> {
        self.request_size_of_form(self.request(), size, limits)
    }

    /// As [`RpcCommand::request_size`], where `expected` are the lengths that the client's version of the protocol allows.
    pub(super) fn request_size_of_form(
        self,
        expected: BodySize,
        size: u64,
        limits: &Limits,
    ) -> Result<usize, WireError> {
        expected.check(self.name(), size, self.request().limit(limits))
    }

    /// The checked length of a response's body, given the size in its header. `limit`: maximum that the caller accepts, for
    /// example the size that it requested with GET_TENSOR.
    ///
    /// # Errors
    /// As [`RpcCommand::request_size`]; [`WireError::NoResponse`] if the command has no response.
    pub fn response_size(self, size: u64, limit: u64) -> Result<usize, WireError> {
        self.response().ok_or(WireError::NoResponse(self.name()))?.check(self.name(), size, limit)
    }
}
