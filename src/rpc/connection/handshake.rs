//! HELLO and GREET: one request at a time, before a thread reads replies.

use thiserror::Error;

use crate::rpc::transport::{Aborter, Connection, Deadline, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Greet, GreetReply, Greeting, REVISION, State};
use crate::rpc::wire::{
    Command, Dialect, Hello, HelloForm, HelloReply, RESPONSE_HEADER, Request, Response, ResponseHeader, SERVED,
    Version, WireError,
};

/// The longest reply to a HELLO: version, padding and capabilities.
const MAX_HELLO_REPLY_BYTES: u64 = 28;

/// The longest reply to a GREET: far more than the devices of one server need.
const MAX_HELLO_EXT_REPLY_BYTES: u64 = 1 << 20;

/// Why a handshake failed.
#[derive(Debug, Error)]
pub(in crate::rpc) enum HandshakeError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Checked before its bytes are read.
    #[error("a reply of {size} bytes, at most {limit} are possible")]
    TooLong { size: u64, limit: u64 },
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the reply of another command")]
    OtherReply,
    /// A version that no dialect describes.
    #[error("it speaks version {0} of the RPC protocol, this end {SERVED}")]
    Version(Version),
    /// The server's version has transport capabilities in HELLO, and its reply has none.
    #[error("a reply to HELLO as before version 4.0")]
    ShortHello,
    /// It has as many clients as it takes.
    #[error("it is full")]
    Full,
    /// It is about to end, and takes no more clients.
    #[error("it is about to end")]
    Draining,
}

/// A server that accepts this end as its client, as its reply to HELLO describes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc) struct ServerHello {
    /// How the server speaks.
    pub(in crate::rpc) dialect: &'static Dialect,
    pub(in crate::rpc) version: Version,
    /// The revision of the extensions, from a fanout server of version 7.0.
    pub(in crate::rpc) revision: Option<u8>,
}

impl ServerHello {
    /// Checks a reply to a HELLO, which had capabilities or not. The byte that holds a greeting is padding in other versions than
    /// 7.0: it is ignored there.
    fn check(reply: &HelloReply, sent_caps: bool) -> Result<ServerHello, HandshakeError> {
        let dialect = Dialect::of(reply.version).ok_or(HandshakeError::Version(reply.version))?;
        if sent_caps && reply.conn_caps.is_none() && dialect.hello() == HelloForm::Caps {
            return Err(HandshakeError::ShortHello);
        }
        let greeting = Greeting::from_byte(reply.greeting).filter(|_| dialect.is_current());
        match greeting.map_or(State::Ready, |greeting| greeting.state) {
            State::Ready => {}
            State::Full => return Err(HandshakeError::Full),
            State::Draining => return Err(HandshakeError::Draining),
        }
        let revision = greeting.map(|greeting| greeting.revision);
        Ok(ServerHello { dialect, version: reply.version, revision })
    }

    /// Whether the server takes GREET, and behind it the extensions of this crate's revision.
    pub(in crate::rpc) fn supports_extensions(&self) -> bool {
        self.revision == Some(REVISION)
    }
}

/// A connection whose server has yet to be met.
#[derive(Debug)]
pub(in crate::rpc) struct Handshake {
    pub(in crate::rpc) aborter: Aborter,
    pub(in crate::rpc) receiver: Receiver,
    pub(in crate::rpc) sender: Sender,
    /// Bytes so far.
    pub(in crate::rpc) sent: u64,
    pub(in crate::rpc) received: u64,
}

impl Handshake {
    pub(in crate::rpc) fn new(connection: Connection) -> Handshake {
        let aborter = connection.aborter();
        let (receiver, sender) = connection.split();
        Handshake { aborter, receiver, sender, sent: 0, received: 0 }
    }

    /// HELLO, with capabilities or in the short form of versions before 4.0.
    ///
    /// # Errors
    /// Also where the server speaks a version that this crate does not, or does not accept another client.
    pub(in crate::rpc) fn hello(
        &mut self,
        conn_caps: Option<[u8; 24]>,
        deadline: &Deadline,
    ) -> Result<ServerHello, HandshakeError> {
        let mut out = Vec::new();
        Request::Hello(Hello { conn_caps }).encode(&mut out);
        let body = self.request(&out, Command::Hello, deadline)?;
        match Response::decode(Command::Hello, &body)? {
            Response::Hello(reply) => ServerHello::check(&reply, conn_caps.is_some()),
            _ => Err(HandshakeError::OtherReply),
        }
    }

    /// GREET, which introduces this end to a server that speaks the extensions. Its reply is the last one in a frame of 7.0.
    pub(in crate::rpc) fn hello_ext(&mut self, deadline: &Deadline) -> Result<GreetReply, HandshakeError> {
        let mut out = Vec::new();
        ExtRequest::Greet(Greet { revision: REVISION.into() }).encode(&mut out);
        let allowed = |size| {
            let limit = MAX_HELLO_EXT_REPLY_BYTES;
            if size <= limit { Ok(size as usize) } else { Err(HandshakeError::TooLong { size, limit }) }
        };
        let body = self.exchange(&out, allowed, deadline)?;
        match Answer::decode(ExtCommand::Greet, &body)? {
            Answer::Greet(reply) => Ok(reply),
            _ => Err(HandshakeError::OtherReply),
        }
    }

    /// Sends a request of 7.0 that is encoded already, and reads the body of its reply, which is no longer than that of a HELLO.
    pub(in crate::rpc) fn request(
        &mut self,
        encoded: &[u8],
        command: Command,
        deadline: &Deadline,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.exchange(encoded, |size| Ok(command.response_size(size, MAX_HELLO_REPLY_BYTES)?), deadline)
    }

    /// Sends a request and reads the body of its reply, of a length that is `allowed`.
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
        let mut body = vec![0; allowed(ResponseHeader::decode(&header).size)?];
        self.receiver.read_exact(&mut body, deadline)?;
        self.received += (header.len() + body.len()) as u64;
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::wire::PROTOCOL_VERSION;

    /// The byte of the greeting counts in 7.0 alone: a server of another version may have anything there.
    #[test]
    fn a_reply_to_hello_is_checked_for_version_form_and_state() {
        let version = |major, minor| Version { major, minor, patch: 0 };
        let (caps, ready) = (Some([0; 24]), Greeting { revision: REVISION, state: State::Ready }.to_byte());
        let greeting = |state| Greeting { revision: REVISION, state }.to_byte();
        let check = |version, conn_caps: Option<_>, greeting| {
            ServerHello::check(&HelloReply { version, conn_caps, greeting }, true)
        };
        let hello = check(PROTOCOL_VERSION, caps, ready).unwrap();
        assert!(hello.dialect.is_current() && hello.supports_extensions());
        for other in [0, ready + 1] {
            assert!(!check(PROTOCOL_VERSION, caps, other).unwrap().supports_extensions());
        }
        for state in [State::Ready, State::Full, State::Draining] {
            let hello = check(version(5, 1), caps, greeting(state)).unwrap();
            assert!(!hello.dialect.is_current() && hello.revision.is_none());
        }
        assert!(matches!(check(PROTOCOL_VERSION, caps, greeting(State::Full)), Err(HandshakeError::Full)));
        assert!(matches!(check(PROTOCOL_VERSION, caps, greeting(State::Draining)), Err(HandshakeError::Draining)));
        assert!(matches!(check(PROTOCOL_VERSION, None, 0), Err(HandshakeError::ShortHello)));
        assert!(matches!(check(version(9, 0), caps, ready), Err(HandshakeError::Version(v)) if v == version(9, 0)));
        assert_eq!(check(version(3, 5), None, 0).unwrap().dialect.hello(), HelloForm::Empty);
    }
}
