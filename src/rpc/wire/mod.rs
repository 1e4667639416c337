//! The bytes of ggml's RPC protocol 7.0 and of fanout's extensions, without IO: headers, requests, responses, notices,
//! tensor records.
//!
//! This is what a program needs that speaks the protocol besides this crate's server and client, a relay, a recorder, a
//! fuzzer or a test's client: [`Request`], [`Response`] and, for the extensions, [`ext`], in both directions, with their
//! headers, sizes and [`Limits`]. Older versions of the protocol are the client's own affair and not public.
//!
//! | from | to | |
//! |---|---|---|
//! | 9 bytes of a header | a command and a size | [`RequestHeader::decode`], [`ext::ExtHeader::decode`] |
//! | a size and [`Limits`] | the length of a body that may be read | [`RequestHeader::body_len`], [`Command::response_size`] |
//! | a body | a message that borrows from it | [`Request::decode`], [`Response::decode`] |
//! | a message | a frame | [`Request::encode`], [`Response::encode`] |
//! | a recorded stream | the body of its next request | [`next_request`] |
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
//! validation. Every [`WireError`] from a decoder is the peer's fault. Layouts: the fields
//! of each struct in their order, packed and little-endian; of the extensions also `docs/protocol.md`.
//!
//! Commands and messages are `#[non_exhaustive]`: later versions of the protocol add some. The structs of single messages
//! are not, since their fields are a layout of bytes: another layout is another struct.

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

pub(crate) use codec::Reader;
pub use codec::WireError;
pub use command::{BodySize, Command, Limits};
#[cfg_attr(not(feature = "client"), allow(unused_imports))]
pub(crate) use dialect::{Dialect, HelloForm, SERVED};
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

#[cfg(test)]
mod tests;
