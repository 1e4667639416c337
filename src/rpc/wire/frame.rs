//! Headers of requests and responses.

use super::{
    codec::{Reader, WireError},
    command::{Limits, RpcCommand},
};

/// Length of a request's header in bytes.
pub const REQUEST_HEADER: usize = 9;

/// Length of a response's header in bytes.
pub const RESPONSE_HEADER: usize = 8;

/// Header of a request: `cmd u8 | size u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The command.
    pub command: RpcCommand,
    /// Length of the body in bytes, unchecked; [`RequestHeader::body_len`] checks it.
    pub size: u64,
}

impl RequestHeader {
    /// Decodes a header.
    ///
    /// # Errors
    /// [`WireError::UnknownCommand`].
    pub fn decode(bytes: &[u8; REQUEST_HEADER]) -> Result<RequestHeader, WireError> {
        let [number, size @ ..] = *bytes;
        Ok(RequestHeader { command: RpcCommand::from_wire(number)?, size: u64::from_le_bytes(size) })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; REQUEST_HEADER] {
        header(self.command as u8, self.size)
    }

    /// The checked length of the body: see [`RpcCommand::request_size`].
    pub fn body_len(&self, limits: &Limits) -> Result<usize, WireError> {
        self.command.request_size(self.size, limits)
    }
}

/// Header of a response: `size u64`. A response does not name its command; responses have the order of their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Length of the body in bytes, unchecked; [`RpcCommand::response_size`] checks it.
    pub size: u64,
}

impl ResponseHeader {
    /// Decodes a header.
    pub const fn decode(bytes: &[u8; RESPONSE_HEADER]) -> ResponseHeader {
        ResponseHeader { size: u64::from_le_bytes(*bytes) }
    }

    /// Encodes the header.
    pub const fn encode(&self) -> [u8; RESPONSE_HEADER] {
        self.size.to_le_bytes()
    }
}

/// The header of a request or a notification: `number u8 | size u64`.
pub(super) fn header(number: u8, size: u64) -> [u8; REQUEST_HEADER] {
    let mut bytes = [number; REQUEST_HEADER];
    bytes[1..].copy_from_slice(&size.to_le_bytes());
    bytes
}

/// Appends a frame: the header, and the body that `write` appends. `streamed`: bytes of the body that the caller sends later.
pub(super) fn write_frame(number: u8, streamed: u64, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[number; REQUEST_HEADER]);
    write(out);
    write_body_size(out, start, streamed);
}

/// Writes the length of a body into the header at `start`: the bytes after the header, and `streamed` bytes that the caller sends
/// later. Returns the length; it saturates, because no receiver has a buffer that is as large.
pub(super) fn write_body_size(out: &mut [u8], start: usize, streamed: u64) -> u64 {
    let size = streamed.saturating_add((out.len() - start - REQUEST_HEADER) as u64);
    out[start + 1..start + REQUEST_HEADER].copy_from_slice(&size.to_le_bytes());
    size
}

/// Splits the next request off a recorded stream and returns its command and its body. `stream` then starts behind the request.
///
/// # Errors
/// Errors of the header and of its size; [`WireError::Truncated`] if the stream ends within the request.
pub fn next_request<'a>(stream: &mut &'a [u8], limits: &Limits) -> Result<(RpcCommand, &'a [u8]), WireError> {
    let mut r = Reader::new(stream);
    let header = RequestHeader::decode(r.array("header")?)?;
    let body = r.bytes("body", header.body_len(limits)?)?;
    *stream = r.rest();
    Ok((header.command, body))
}
