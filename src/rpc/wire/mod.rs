//! Codec of ggml's RPC protocol 8.0.1 and of fanout's extensions: headers, requests, responses, notifications and tensor
//! records as bytes. It does no I/O.
//!
//! The module is public for other programs that use the protocol, such as a relay, a recorder, a fuzzer or a client of a test:
//! [`Request`] and [`Response`] of 7.0 and 8.0 and the messages of the extensions ([`ext`]), each with encoder and decoder,
//! headers, sizes and [`Limits`]. The codec of older versions (`version_codec`) is private.
//!
//! | from | to | function |
//! |---|---|---|
//! | 9 bytes of a header | command and size | [`RequestHeader::decode`], [`ext::ExtHeader::decode`] |
//! | size and [`Limits`] | length of a body that may be read | [`RequestHeader::body_len`], [`RpcCommand::response_size`] |
//! | body | message that borrows from it | [`Request::decode`], [`Response::decode`] |
//! | message | frame (header and body) | [`Request::encode`], [`Response::encode`] |
//! | recorded stream | body of its next request | [`next_request`] |
//!
//! A receiver decodes in three steps, so that a size or count that a peer claims never allocates memory:
//! 1. Read nine bytes; [`RequestHeader::decode`] rejects unknown commands.
//! 2. [`RequestHeader::body_len`] rejects a length that the command or the receiver's [`Limits`] do not allow. Then read the
//!    body.
//! 3. [`Request::decode`] borrows from the body; its allocations are bounded by the length of the body.
//!
//! Of a SET_TENSOR the receiver decodes only the head of [`SET_TENSOR_HEAD`] bytes ([`SetTensorHead::decode`]) and streams the
//! data after it to the buffer.
//!
//! Decoding checks the *form*: each byte belongs to a field, trailing bytes are an error, flags are 0 or 1, counts match the
//! length of the body. The session and graph validation check the meaning of handles, offsets, types and ops. A [`WireError`]
//! of a decoder always means that the peer sent invalid bytes. Messages are the fields of their structs in order, packed and
//! little-endian; `docs/protocol.md` describes the messages of the extensions.
//!
//! Enums of commands and of messages are `#[non_exhaustive]`, because later versions of the protocol add variants. The structs
//! of single messages are exhaustive: a message with another layout gets another struct.

mod codec;
mod command;
pub mod ext;
mod frame;
mod graph;
mod messages;
mod request;
mod response;
mod tensor;
mod version;
mod version_codec;

pub(crate) use codec::Reader;
pub use codec::WireError;
pub use command::{BodySize, Limits, RpcCommand};
pub use frame::{REQUEST_HEADER, RESPONSE_HEADER, RequestHeader, ResponseHeader, next_request};
pub use graph::{GraphCompute, NodeIds, TensorRecords, graph_cost};
pub use request::{
    AllocBuffer, BufferClear, BufferGetBase, COMM_HOST, CommAllreduce, CommFree, CommInit, CopyTensor, DeviceCount,
    FreeBuffer, GetAlignment, GetAllocSize, GetDeviceMemory, GetMaxSize, GetTensor, GetTensor2d, GraphRecompute, Hello,
    InitTensor, MAX_SRC, MemsetTensor, Request, SET_TENSOR_2D_HEAD, SET_TENSOR_HEAD, SetTensor, SetTensor2d,
    SetTensor2dHead, SetTensorHash, SetTensorHead,
};
pub use response::{AllocBufferReply, DeviceMemoryReply, HelloReply, Response};
pub use tensor::{MAX_NAME, TENSOR_RECORD, TensorRecord};
pub(crate) use version::CAPS_BYTES;
pub use version::{ConnCaps, DEFAULT_PORT, PROTOCOL_VERSION, Version};
#[cfg_attr(not(feature = "client"), allow(unused_imports))]
pub(crate) use version_codec::{
    ClientCodec, HelloForm, MAX_UPLOAD_HEAD, NotExpressible, SUPPORTED_VERSIONS, VersionCodec, VersionDetector,
};

#[cfg(test)]
mod tests;
