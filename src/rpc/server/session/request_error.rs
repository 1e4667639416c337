//! What is wrong with a client's request, as far as the session core checks it. The text goes to the log, so it says what was
//! expected and what came. Each front end has an enum of its own for the rest, which becomes a
//! [`SessionError::Refused`](super::failure::SessionError::Refused).

use thiserror::Error;

use crate::graph::validate::GraphError;
use crate::rpc::wire::WireError;
use crate::tensor::DescError;

/// A request that cannot be served: the client's fault.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum RequestError {
    #[error("malformed: {0}")]
    Wire(#[from] WireError),
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
}
