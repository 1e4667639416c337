//! Errors of requests of the extensions, in addition to the errors of the session core.

use thiserror::Error;

use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::transfer_tokens::TokenError;
use crate::tensor::ByteRunsError;

/// A protocol error of the client: the request cannot be served, and the connection is closed.
#[derive(Debug, Error)]
pub(super) enum ExtendedError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("not served after HELLO_EXT: the extensions have their own command for it")]
    Superseded,
    #[error("no queue {0} is open")]
    NoSuchQueue(u32),
    #[error("queue {0} is open already")]
    QueueAlreadyOpen(u32),
    #[error("{0} queues are open already: close unused ones")]
    TooManyQueues(usize),
    #[error("queue {queue} is of device {device}, the buffer lies on device {buffer_device}")]
    WrongQueueDevice { queue: u32, device: u32, buffer_device: u32 },
    #[error("bytes {offset} + {len} reach past the buffer of {size} bytes")]
    SpanOutOfBounds { offset: u64, len: u64, size: u64 },
    #[error("malformed: a span of {span} bytes with {data} bytes of data")]
    WriteLength { span: u64, data: u64 },
    #[error("malformed: the tensor has {tensor} bytes, the span {span}")]
    ShapeSize { tensor: u64, span: u64 },
    #[error("malformed: the slice has {slice} bytes, the span {span}")]
    SliceLength { slice: u64, span: u64 },
    #[error("malformed: {0}")]
    SliceOutOfBounds(#[from] ByteRunsError),
    #[error("malformed: copy from {src} bytes to {dst} bytes")]
    CopySizes { src: u64, dst: u64 },
    #[error("mark {number} comes after mark {last}: mark numbers must increase")]
    MarkOrder { number: u64, last: u64 },
    #[error("queue {queue} has no mark {number}")]
    NoMark { queue: u32, number: u64 },
    #[error("{0} marks are not reached yet: wait for some of them first")]
    TooManyMarks(usize),
    #[error("graph {0} is prepared already: a graph number can be used once")]
    GraphExists(u64),
    #[error("no graph {0} is prepared: it never was, or it was evicted")]
    NoSuchGraph(u64),
    #[error("queue {queue} is of device {device}, graph {graph} of device {graph_device}")]
    WrongGraphDevice { queue: u32, device: u32, graph: u64, graph_device: u32 },
    #[error("rank {rank} of a group of {ranks}: a group has 1 to 64 ranks, and the queue is one of them")]
    GroupRanks { rank: u32, ranks: usize },
    #[error("the connection is bound to a group already")]
    AttachedAlready,
    #[error("the connection is not bound to a group: ATTACH_GROUP comes first")]
    NotAttached,
    #[error("rank {0} is not one of those for which the connection was bound to the group")]
    NotARankOfSender(u32),
    #[error("the group has no rank {0}")]
    NoSuchRank(u32),
    #[error("malformed: there is no such collective")]
    InvalidPart,
    #[error("malformed: the part has {part} bytes, with {data} bytes of data")]
    PartLength { part: u64, data: u64 },
}

impl From<ExtendedError> for SessionError {
    fn from(e: ExtendedError) -> SessionError {
        SessionError::front_end(e)
    }
}

impl From<TokenError> for SessionError {
    fn from(e: TokenError) -> SessionError {
        ExtendedError::from(e).into()
    }
}
