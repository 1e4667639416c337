//! Client handshake: HELLO negotiates the version, HELLO_EXT enables the extensions. The handshake sends one request at a time,
//! before the reader thread starts.

use thiserror::Error;

use crate::rpc::transport::{Aborter, Connection, Deadline, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{
    ExtCommand, ExtRequest, ExtResponse, ExtensionOffer, HelloExt, HelloExtReply, REVISION, ServerState,
};
use crate::rpc::wire::{
    ConnCaps, Hello, HelloForm, HelloReply, RESPONSE_HEADER, Request, Response, ResponseHeader, RpcCommand,
    SUPPORTED_VERSIONS, Version, VersionCodec, WireError,
};

/// Size limit of a reply to HELLO: version (3 bytes), extension byte (1) and capabilities (24).
const MAX_HELLO_REPLY_BYTES: u64 = 28;

/// Size limit of a reply to HELLO_EXT: far more than the devices of one server need.
const MAX_HELLO_EXT_REPLY_BYTES: u64 = 1 << 20;

/// Why a handshake failed.
#[derive(Debug, Error)]
pub(in crate::rpc) enum HandshakeError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The reply begins with this text instead of a length: that of HTTP, SSH, or another protocol of lines.
    #[error("the reply begins with {0:?}, so it is of another protocol")]
    OtherProtocol(String),
    /// Detected before the body is read.
    #[error("the reply has {size} bytes, expected at most {limit}")]
    TooLong { size: u64, limit: u64 },
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the reply belongs to another command")]
    OtherReply,
    /// This crate has no codec for the server's version.
    #[error("the server has version {0} of the RPC protocol; supported: {SUPPORTED_VERSIONS}")]
    Version(Version),
    /// The server's version has transport capabilities in HELLO, but its reply has none.
    #[error("the reply to HELLO has the short form of versions before 4.0")]
    ShortHello,
    /// The server has reached its limit of sessions.
    #[error("the server has reached its limit of sessions; retry later")]
    Full,
    /// The server is draining: it accepts no more clients.
    #[error("the server is shutting down (draining) and accepts no new clients")]
    Draining,
}

/// A server that accepts this client, as described by its reply to HELLO.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc) struct ServerHello {
    /// The server's version of the protocol.
    pub(in crate::rpc) codec: VersionCodec,
    pub(in crate::rpc) version: Version,
    /// The revision of the extensions, from a fanout server.
    pub(in crate::rpc) revision: Option<u8>,
}

impl ServerHello {
    /// Validates a reply to HELLO; `sent_caps`: the request had capabilities. The byte with the state is padding in versions
    /// before 7.0, and ignored there.
    fn validate(reply: &HelloReply, sent_caps: bool) -> Result<ServerHello, HandshakeError> {
        let codec = VersionCodec::for_version(reply.version).ok_or(HandshakeError::Version(reply.version))?;
        if sent_caps && reply.conn_caps.is_none() && codec.hello_form() == HelloForm::Caps {
            return Err(HandshakeError::ShortHello);
        }
        let offer = ExtensionOffer::from_byte(reply.extension_byte).filter(|_| codec.offers_extensions());
        match offer.map_or(ServerState::Ready, |offer| offer.state) {
            ServerState::Ready => {}
            ServerState::Full => return Err(HandshakeError::Full),
            ServerState::Draining => return Err(HandshakeError::Draining),
        }
        let revision = offer.map(|offer| offer.revision);
        // The extensions have one numbering of types and ops, whichever version the server answers to other clients.
        let codec = if revision == Some(REVISION) { VersionCodec::NEWEST } else { codec };
        Ok(ServerHello { codec, version: reply.version, revision })
    }

    /// Whether the server supports the extensions in the revision of this crate.
    pub(in crate::rpc) fn supports_extensions(&self) -> bool {
        self.revision == Some(REVISION)
    }
}

/// A connection before and during its handshake.
#[derive(Debug)]
pub(in crate::rpc) struct Handshake {
    pub(in crate::rpc) aborter: Aborter,
    pub(in crate::rpc) receiver: Receiver,
    pub(in crate::rpc) sender: Sender,
    /// Bytes sent so far.
    pub(in crate::rpc) sent: u64,
    /// Bytes received so far.
    pub(in crate::rpc) received: u64,
}

impl Handshake {
    pub(in crate::rpc) fn new(connection: Connection) -> Handshake {
        let aborter = connection.aborter();
        let (receiver, sender) = connection.split();
        Handshake { aborter, receiver, sender, sent: 0, received: 0 }
    }

    /// Sends HELLO, with capabilities or in the short form of versions before 4.0.
    ///
    /// # Errors
    /// [`HandshakeError`], also if the server's version is unsupported or the server accepts no more clients.
    pub(in crate::rpc) fn hello(
        &mut self,
        conn_caps: Option<ConnCaps>,
        deadline: &Deadline,
    ) -> Result<ServerHello, HandshakeError> {
        let mut out = Vec::new();
        Request::Hello(Hello { conn_caps }).encode(&mut out);
        let body = self.request(&out, RpcCommand::Hello, deadline)?;
        match Response::decode(RpcCommand::Hello, &body)? {
            Response::Hello(reply) => ServerHello::validate(&reply, conn_caps.is_some()),
            _ => Err(HandshakeError::OtherReply),
        }
    }

    /// Sends HELLO_EXT, which starts the extensions. Its reply is the last one in a frame of 7.0.
    pub(in crate::rpc) fn hello_ext(&mut self, deadline: &Deadline) -> Result<HelloExtReply, HandshakeError> {
        let mut out = Vec::new();
        ExtRequest::HelloExt(HelloExt { revision: REVISION.into() }).encode(&mut out);
        let allowed = |size| {
            let limit = MAX_HELLO_EXT_REPLY_BYTES;
            if size <= limit { Ok(size as usize) } else { Err(HandshakeError::TooLong { size, limit }) }
        };
        let body = self.exchange(&out, allowed, deadline)?;
        match ExtResponse::decode(ExtCommand::HelloExt, &body)? {
            ExtResponse::HelloExt(reply) => Ok(reply),
            _ => Err(HandshakeError::OtherReply),
        }
    }

    /// Sends an encoded request of 7.0, and reads the body of its reply, which must not be longer than that of HELLO.
    pub(in crate::rpc) fn request(
        &mut self,
        encoded: &[u8],
        command: RpcCommand,
        deadline: &Deadline,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.exchange(encoded, |size| Ok(command.response_size(size, MAX_HELLO_REPLY_BYTES)?), deadline)
    }

    /// Sends a request and reads the body of its reply. `allowed` checks the length of the body.
    fn exchange(
        &mut self,
        encoded: &[u8],
        allowed: impl FnOnce(u64) -> Result<usize, HandshakeError>,
        deadline: &Deadline,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.sender.write_by(encoded, deadline)?;
        self.sent += encoded.len() as u64;
        let mut header = [0; RESPONSE_HEADER];
        self.receiver.read_exact(&mut header, deadline)?;
        let length = allowed(ResponseHeader::decode(&header).size);
        let length = length.map_err(|e| text_of(&header).map_or(e, HandshakeError::OtherProtocol))?;
        let mut body = vec![0; length];
        self.receiver.read_exact(&mut body, deadline)?;
        self.received += (header.len() + body.len()) as u64;
        Ok(body)
    }
}

/// The text of a header that consists of printable ASCII characters. As a length it would exceed 2^61 bytes.
fn text_of(header: &[u8; RESPONSE_HEADER]) -> Option<String> {
    let is_printable = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    header.iter().all(is_printable).then(|| String::from_utf8_lossy(header).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::wire::PROTOCOL_VERSION;

    #[test]
    fn the_first_bytes_of_other_protocols_are_recognised() {
        assert_eq!(text_of(b"HTTP/1.1").as_deref(), Some("HTTP/1.1"));
        assert_eq!(text_of(b"220 mail").as_deref(), Some("220 mail"));
        for header in [28u64.to_le_bytes(), [0; 8], *b"HTTP/1.\0", [0x15, 3, 3, 0, 2, 2, 10, 0]] {
            assert_eq!(text_of(&header), None, "{header:?}");
        }
    }

    /// From 7.0 on fanout defines the byte with the state; a server of an older version may send anything there.
    #[test]
    fn a_reply_to_hello_is_checked_for_version_form_and_state() {
        let version = |major, minor| Version { major, minor, patch: 0 };
        let (caps, ready) = (Some([0; 24]), ExtensionOffer { revision: REVISION, state: ServerState::Ready }.to_byte());
        let offer = |state| ExtensionOffer { revision: REVISION, state }.to_byte();
        let check = |version, conn_caps: Option<_>, extension_byte| {
            ServerHello::validate(&HelloReply { version, conn_caps, extension_byte }, true)
        };
        let hello = check(PROTOCOL_VERSION, caps, ready).unwrap();
        assert!(hello.codec.is_newest() && hello.supports_extensions());
        let hello = check(version(7, 0), caps, ready).unwrap();
        assert!(hello.codec.is_newest() && hello.supports_extensions());
        assert!(!check(version(7, 0), caps, 0).unwrap().codec.is_newest());
        for other in [0, ready - 1, ready + 1] {
            assert!(!check(PROTOCOL_VERSION, caps, other).unwrap().supports_extensions());
        }
        for state in [ServerState::Ready, ServerState::Full, ServerState::Draining] {
            let hello = check(version(5, 1), caps, offer(state)).unwrap();
            assert!(!hello.codec.is_newest() && hello.revision.is_none());
        }
        assert!(matches!(check(PROTOCOL_VERSION, caps, offer(ServerState::Full)), Err(HandshakeError::Full)));
        assert!(matches!(check(PROTOCOL_VERSION, caps, offer(ServerState::Draining)), Err(HandshakeError::Draining)));
        assert!(matches!(check(PROTOCOL_VERSION, None, 0), Err(HandshakeError::ShortHello)));
        assert!(matches!(check(version(9, 0), caps, ready), Err(HandshakeError::Version(v)) if v == version(9, 0)));
        assert_eq!(check(version(3, 5), None, 0).unwrap().codec.hello_form(), HelloForm::Empty);
    }
}
