//! Why a message is not served. Its text goes to the log, for whoever has to find out what the client did.

use thiserror::Error;

use super::connection::Broken;
use super::tickets::TicketError;
use crate::device::DeviceError;
use crate::graph::validate::GraphError;
use crate::rpc::wire::ext::REVISION;
use crate::rpc::wire::{Command, PROTOCOL_VERSION, WireError};
use crate::tensor::DescError;

#[derive(Debug, Error)]
pub(super) enum Refusal {
    /// The connection's end, not the message's fault.
    #[error("{}", lost(.0))]
    Broken(#[from] Broken),
    #[error("malformed: {0}")]
    Wire(#[from] WireError),
    #[error("expected HELLO as the first message, got {0}")]
    HelloFirst(Command),
    #[error("the connection has had its HELLO")]
    HelloAgain,
    #[error("the client speaks a protocol before 4.0, this server {PROTOCOL_VERSION}: update llama.cpp there")]
    OldClient,
    #[error("this server is about to end and takes no more clients")]
    Draining,
    #[error("no device {device}: there are {count}")]
    Device { device: u32, count: usize },
    #[error("no buffer has the handle {0:#x}, or it was freed")]
    Buffer(u64),
    #[error("address {data:#x} is outside its buffer of {size} bytes at {base:#x}")]
    Address { data: u64, base: u64, size: u64 },
    #[error("bytes {offset} + {len} of a tensor at {start} reach past its buffer of {size}")]
    Range { start: u64, offset: u64, len: u64, size: u64 },
    #[error("type number {0} is no tensor type")]
    Type(u32),
    #[error("impossible tensor: {0}")]
    Desc(#[from] DescError),
    #[error("tensor {name:?} has the address {data:#x} and no buffer")]
    Stray { name: String, data: u64 },
    #[error("tensor {name:?} lies on device {lies_on}, the graph runs on device {runs_on}")]
    OtherDevice { name: String, lies_on: u32, runs_on: u32 },
    #[error("invalid graph: {0}")]
    Graph(#[from] GraphError),
    #[error("device {0} has no last graph: none was computed, or a buffer of it was freed")]
    NoGraph(u32),
    #[error(transparent)]
    Ticket(#[from] TicketError),
    #[error("device: {0}")]
    Failed(#[from] DeviceError),
    #[error("it comes right after HELLO, and once")]
    GreetSecond,
    #[error("the client greets in revision {0} of the extensions, this server speaks {REVISION}")]
    Revision(u32),
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

/// The end of a connection, in the words of the log.
fn lost(broken: &Broken) -> String {
    match broken {
        Broken::Closed => "the client went away in the middle of a message".to_owned(),
        other => other.to_string(),
    }
}
