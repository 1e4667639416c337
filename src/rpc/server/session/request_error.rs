//! Errors of requests that the session core checks. The text goes to the log and names the expected and the received value.
//! Each front end has its own enum for further errors, which becomes a
//! [`SessionError::FrontEnd`](super::failure::SessionError::FrontEnd).

use thiserror::Error;

use crate::graph::validate::GraphError;
use crate::rpc::wire::WireError;
use crate::tensor::DescError;

/// An invalid request. The client is at fault.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum RequestError {
    #[error("malformed: {0}")]
    Malformed(#[from] WireError),
    #[error("no device {device}: there are {count} devices, numbered from 0")]
    NoSuchDevice { device: u32, count: usize },
    #[error("no buffer has the handle {0:#x}, or it was freed")]
    NoSuchBuffer(u64),
    #[error("address {data:#x} is outside its buffer of {size} bytes at {base:#x}")]
    AddressOutsideBuffer { data: u64, base: u64, size: u64 },
    #[error("{len} bytes at offset {offset} of a tensor at {start} reach past its buffer of {size} bytes")]
    RangeOutsideBuffer { start: u64, offset: u64, len: u64, size: u64 },
    #[error("type number {0} is not a tensor type")]
    UnknownType(u32),
    #[error("impossible tensor: {0}")]
    BadTensor(#[from] DescError),
    #[error("tensor {name:?} has the address {data:#x}, but no buffer")]
    AddressWithoutBuffer { name: String, data: u64 },
    #[error("tensor {name:?} lies on device {lies_on}, the graph runs on device {runs_on}")]
    TensorOnOtherDevice { name: String, lies_on: u32, runs_on: u32 },
    #[error("invalid graph: {0}")]
    InvalidGraph(#[from] GraphError),
}
