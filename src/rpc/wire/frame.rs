//! The headers before a request's and a response's body.

use super::{
    codec::{Reader, WireError},
    command::{Command, Limits},
};

/// Bytes of a request's header.
pub const REQUEST_HEADER: usize = 9;

/// Bytes of a response's header.
pub const RESPONSE_HEADER: usize = 8;

/// `cmd u8 | size u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The command.
    pub command: Command,
    /// Bytes of the body, as the peer says: see [`RequestHeader::body_len`].
    pub size: u64,
}

impl RequestHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// [`WireError::UnknownCommand`].
    pub fn decode(bytes: &[u8; REQUEST_HEADER]) -> Result<RequestHeader, WireError> {
        let [number, size @ ..] = *bytes;
        Ok(RequestHeader { command: Command::from_wire(number)?, size: u64::from_le_bytes(size) })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; REQUEST_HEADER] {
        let mut bytes = [self.command as u8; REQUEST_HEADER];
        bytes[1..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// The length of the body, once it is known to be acceptable: see [`Command::request_size`].
    pub fn body_len(&self, limits: &Limits) -> Result<usize, WireError> {
        self.command.request_size(self.size, limits)
    }
}

/// `size u64`: a response does not name its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Bytes of the body, as the peer says: see [`Command::response_size`].
    pub size: u64,
}

impl ResponseHeader {
    /// Reads a header.
    pub const fn decode(bytes: &[u8; RESPONSE_HEADER]) -> ResponseHeader {
        ResponseHeader { size: u64::from_le_bytes(*bytes) }
    }

    /// The header's bytes.
    pub const fn encode(&self) -> [u8; RESPONSE_HEADER] {
        self.size.to_le_bytes()
    }
}

/// Splits the next request off a recorded stream: its command and its body. `stream` then begins behind it.
///
/// # Errors
/// Those of the header and of its size, and [`WireError::Truncated`] if the stream ends inside the request.
pub fn next_request<'a>(stream: &mut &'a [u8], limits: &Limits) -> Result<(Command, &'a [u8]), WireError> {
    let mut r = Reader::new(stream);
    let header = RequestHeader::decode(r.array("header")?)?;
    let body = r.bytes("body", header.body_len(limits)?)?;
    *stream = r.rest();
    Ok((header.command, body))
}
