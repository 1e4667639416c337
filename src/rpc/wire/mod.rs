//! The bytes of ggml's RPC protocol 7.0, without IO: headers, requests, responses, tensor records.
//!
//! A receiver works in three steps, so that a peer's promise never costs memory:
//! 1. nine bytes → [`RequestHeader::decode`]: is the command known?
//! 2. [`RequestHeader::body_len`]: may its body be this long, under our [`Limits`]? Only now is the body read.
//! 3. [`Request::decode`] borrows from the body; what it allocates is bounded by the bytes that are there.
//!
//! SET_TENSOR stops after a head of [`SET_TENSOR_HEAD`] bytes ([`SetTensorHead::decode`]): the data behind it
//! streams to its buffer.
//!
//! Decoding checks *form*: every byte is accounted for, trailing ones are an error, flags are 0 or 1, counts agree
//! with the body. Whether a handle, an offset, a type or an op makes sense is for the session and for graph
//! validation. Every [`WireError`] from a decoder is the peer's fault. Layouts: `wire/PROTOCOL.md`.

mod codec;
mod command;
mod dialect;
pub mod ext;
mod frame;
mod graph;
mod request;
mod response;
mod tensor;
mod version;

pub use codec::{Reader, WireError};
pub use command::{BodySize, Command, Limits};
pub use dialect::{Dialect, HelloForm, SERVED, Unsayable};
pub use frame::{REQUEST_HEADER, RESPONSE_HEADER, RequestHeader, ResponseHeader, next_request};
pub use graph::{GraphCompute, NodeIds, TensorRecords, graph_cost};
pub use request::{
    AllocBuffer, BufferClear, BufferGetBase, CopyTensor, DeviceCount, FreeBuffer, GetAlignment, GetAllocSize,
    GetDeviceMemory, GetMaxSize, GetTensor, GraphRecompute, Hello, InitTensor, MAX_SRC, MemsetTensor, Request,
    SET_TENSOR_HEAD, SetTensor, SetTensorHash, SetTensorHead,
};
pub use response::{AllocBufferReply, DeviceMemoryReply, HelloReply, Response};
pub use tensor::{MAX_NAME, TENSOR_RECORD, TensorRecord};
pub use version::{ConnCaps, PROTOCOL_VERSION, Version};
