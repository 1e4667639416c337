//! HELLO and GREET: one request at a time, before a thread reads replies.

use thiserror::Error;

use crate::rpc::transport::{Aborter, Connection, Deadline, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Greet, GreetReply, REVISION};
use crate::rpc::wire::{Command, Hello, HelloReply, RESPONSE_HEADER, Request, Response, ResponseHeader, WireError};

/// The longest reply to a HELLO: version, padding and capabilities.
const HELLO_REPLY: u64 = 28;

/// The longest reply to a GREET: far more than the devices of one server need.
const GREET_REPLY: u64 = 1 << 20;

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
    pub(in crate::rpc) fn hello(
        &mut self,
        conn_caps: Option<[u8; 24]>,
        deadline: &Deadline,
    ) -> Result<HelloReply, HandshakeError> {
        let mut out = Vec::new();
        Request::Hello(Hello { conn_caps }).encode(&mut out);
        let body = self.request(&out, Command::Hello, deadline)?;
        match Response::decode(Command::Hello, &body)? {
            Response::Hello(reply) => Ok(reply),
            _ => Err(HandshakeError::OtherReply),
        }
    }

    /// GREET, which introduces this end to a server that speaks the extensions. Its reply is the last one in a frame of 7.0.
    pub(in crate::rpc) fn greet(&mut self, deadline: &Deadline) -> Result<GreetReply, HandshakeError> {
        let mut out = Vec::new();
        ExtRequest::Greet(Greet { revision: REVISION.into() }).encode(&mut out);
        let allowed = |size| {
            let limit = GREET_REPLY;
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
        self.exchange(encoded, |size| Ok(command.response_size(size, HELLO_REPLY)?), deadline)
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
