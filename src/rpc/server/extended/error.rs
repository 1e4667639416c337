//! What is wrong with a request of the extension, beyond what the session core checks.

use thiserror::Error;

use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::transfer_tokens::TokenError;

/// A request that cannot be served: the client's fault.
#[derive(Debug, Error)]
pub(super) enum ExtendedError {
    #[error(transparent)]
    Ticket(#[from] TokenError),
    #[error("not served after GREET, which has another word for it")]
    Superseded,
    #[error("no queue {0} is open")]
    Queue(u32),
    #[error("queue {0} is open already")]
    QueueOpen(u32),
    #[error("{0} queues are open already: close those that are not needed")]
    Queues(usize),
    #[error("queue {queue} is of device {device}, the buffer lies on device {lies_on}")]
    QueueDevice { queue: u32, device: u32, lies_on: u32 },
    #[error("bytes {offset} + {len} reach past the buffer of {size}")]
    Span { offset: u64, len: u64, size: u64 },
    #[error("malformed: a span of {span} bytes with {data} bytes of data")]
    Data { span: u64, data: u64 },
    #[error("malformed: the shape is that of {tensor} bytes, the span has {span}")]
    Shape { tensor: u64, span: u64 },
    #[error("malformed: from {src} bytes to {dst} bytes")]
    Copy { src: u64, dst: u64 },
    #[error("mark {number} comes after mark {last}: numbers grow")]
    MarkOrder { number: u64, last: u64 },
    #[error("queue {queue} has no mark {number}")]
    NoMark { queue: u32, number: u64 },
    #[error("{0} marks are not reached yet: wait for some")]
    Marks(usize),
    #[error("graph {0} is kept already: numbers are used once")]
    GraphKept(u64),
    #[error("no graph {0} is kept: it never was, or it was dropped")]
    NoKept(u64),
    #[error("queue {queue} is of device {device}, graph {graph} of device {made_for}")]
    GraphDevice { queue: u32, device: u32, graph: u64, made_for: u32 },
}

impl From<ExtendedError> for SessionError {
    fn from(e: ExtendedError) -> SessionError {
        SessionError::refused(e)
    }
}

impl From<TokenError> for SessionError {
    fn from(e: TokenError) -> SessionError {
        ExtendedError::from(e).into()
    }
}
