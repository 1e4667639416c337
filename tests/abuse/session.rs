//! A session with the server, of protocol 7.0 or of the extension. A server that closes it, or does not reply in time, is an
//! error, not a panic: the suite reports it.

use fanout::rpc::wire::ext::{
    ExtRequest, HelloExt, NOTIFICATION_HEADER, Notification, NotificationHeader, Ping, REVISION,
};
use fanout::rpc::wire::{
    AllocBuffer, BufferGetBase, DeviceCount, Hello, RESPONSE_HEADER, Request, Response, ResponseHeader, RpcCommand,
};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Maximum time to wait for bytes of the server. No correct server needs it.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Largest reply that the suite expects, in bytes.
const MAX_REPLY: u64 = 64 << 20;

pub(crate) struct Session(TcpStream);

pub(crate) fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

pub(crate) fn encode_ext(request: &ExtRequest<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

fn unexpected(what: impl std::fmt::Debug) -> Error {
    Error::new(ErrorKind::InvalidData, format!("unexpected reply: {what:?}"))
}

impl Session {
    /// A connection that has exchanged HELLO.
    pub(crate) fn connect(address: &str) -> Result<Session> {
        Session::start(TcpStream::connect(address)?)
    }

    /// As [`Session::connect`], from an address of loopback.
    pub(crate) fn connect_from(from: Ipv4Addr, address: &str) -> Result<Session> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((from, 0)).into())?;
        let address: SocketAddr = address.parse().map_err(Error::other)?;
        socket.connect(&address.into())?;
        Session::start(socket.into())
    }

    fn start(stream: TcpStream) -> Result<Session> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        let mut session = Session(stream);
        session.request(&Request::Hello(Hello { conn_caps: Some([0; 24]) }))?;
        Ok(session)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes)
    }

    /// The body of the next reply.
    pub(crate) fn read_reply(&mut self) -> Result<Vec<u8>> {
        let mut header = [0; RESPONSE_HEADER];
        self.0.read_exact(&mut header)?;
        self.read_body(ResponseHeader::decode(&header).size)
    }

    fn read_body(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_REPLY {
            return Err(unexpected(size));
        }
        let mut body = vec![0; size as usize];
        self.0.read_exact(&mut body)?;
        Ok(body)
    }

    /// Sends a request and returns the body of its reply.
    pub(crate) fn request(&mut self, request: &Request<'_>) -> Result<Vec<u8>> {
        self.send(&encode(request))?;
        self.read_reply()
    }

    /// A second handle of the connection, with which another thread can end it.
    pub(crate) fn stream(&self) -> Result<TcpStream> {
        self.0.try_clone()
    }

    /// Waits until the server has handled all requests.
    pub(crate) fn synchronise(&mut self) -> Result<()> {
        self.request(&Request::DeviceCount(DeviceCount {})).map(drop)
    }

    /// The handle and the address of a new buffer on device 0. `None`: the server refuses it.
    pub(crate) fn alloc(&mut self, size: u64) -> Result<Option<(u64, u64)>> {
        let handle = allocated(&self.request(&Request::AllocBuffer(AllocBuffer { device: 0, size }))?)?;
        let Some(remote_ptr) = handle else { return Ok(None) };
        Ok(Some((remote_ptr, base_address(&self.request(&Request::BufferGetBase(BufferGetBase { remote_ptr }))?)?)))
    }

    /// As [`Session::alloc`]; a refusal is an error.
    pub(crate) fn alloc_or_fail(&mut self, size: u64) -> Result<(u64, u64)> {
        self.alloc(size)?.ok_or_else(|| unexpected("no memory"))
    }
}

/// The handle in the reply to ALLOC_BUFFER. `None`: the server refuses it.
pub(crate) fn allocated(reply: &[u8]) -> Result<Option<u64>> {
    match Response::decode(RpcCommand::AllocBuffer, reply) {
        Ok(Response::AllocBuffer(reply)) => Ok(Some(reply.remote_ptr).filter(|&handle| handle != 0)),
        other => Err(unexpected(other)),
    }
}

/// The address in the reply to BUFFER_GET_BASE.
pub(crate) fn base_address(reply: &[u8]) -> Result<u64> {
    match Response::decode(RpcCommand::BufferGetBase, reply) {
        Ok(Response::BufferGetBase(base)) => Ok(base),
        other => Err(unexpected(other)),
    }
}

/// A session of the extension.
pub(crate) struct ExtendedSession(Session);

impl ExtendedSession {
    pub(crate) fn connect(address: &str) -> Result<ExtendedSession> {
        ExtendedSession::upgrade(Session::connect(address)?)
    }

    /// Changes to the extension, as the first request of a session.
    pub(crate) fn upgrade(mut session: Session) -> Result<ExtendedSession> {
        session.send(&encode_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() })))?;
        session.read_reply()?;
        Ok(ExtendedSession(session))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.send(bytes)
    }

    /// The body of the next reply. Other notifications before it are skipped: failures of queues, the server's state.
    pub(crate) fn read_reply(&mut self) -> Result<Vec<u8>> {
        self.read_until(|notification| match notification {
            Notification::Reply(body) => Ok(Some(body.to_vec())),
            _ => Ok(None),
        })
    }

    /// Waits until a mark of a queue is reached. A queue that fails is an error.
    pub(crate) fn wait_for_mark(&mut self, queue: u32, number: u64) -> Result<()> {
        let reached = Notification::MarkReached { queue, number };
        self.read_until(|notification| match notification {
            Notification::QueueFailed { .. } => Err(unexpected(notification)),
            notification => Ok((*notification == reached).then_some(())),
        })
    }

    /// Queue and number of the next mark that is reached. A queue that fails is an error.
    pub(crate) fn next_mark(&mut self) -> Result<(u32, u64)> {
        self.read_until(|notification| match *notification {
            Notification::MarkReached { queue, number } => Ok(Some((queue, number))),
            Notification::QueueFailed { .. } => Err(unexpected(notification)),
            _ => Ok(None),
        })
    }

    /// Reads notifications until `wanted` returns a value or an error.
    fn read_until<T>(&mut self, wanted: impl Fn(&Notification<'_>) -> Result<Option<T>>) -> Result<T> {
        loop {
            let mut header = [0; NOTIFICATION_HEADER];
            self.0.0.read_exact(&mut header)?;
            let NotificationHeader { kind, size } = NotificationHeader::decode(&header).map_err(unexpected)?;
            let body = self.0.read_body(size)?;
            let notification = Notification::decode(kind, &body).map_err(unexpected)?;
            if let Notification::ProtocolError(reason) = notification {
                return Err(unexpected(reason));
            }
            if let Some(found) = wanted(&notification)? {
                return Ok(found);
            }
        }
    }

    /// Sends a request and returns the body of its reply.
    pub(crate) fn request(&mut self, request: &ExtRequest<'_>) -> Result<Vec<u8>> {
        self.send(&encode_ext(request))?;
        self.read_reply()
    }

    /// The connection, whose writes do not block from now on.
    pub(crate) fn into_nonblocking(self) -> Result<TcpStream> {
        self.0.0.set_nonblocking(true)?;
        Ok(self.0.0)
    }

    /// The handle of a new buffer on device 0.
    pub(crate) fn alloc(&mut self, size: u64) -> Result<u64> {
        self.send(&encode(&Request::AllocBuffer(AllocBuffer { device: 0, size })))?;
        allocated(&self.read_reply()?)?.ok_or_else(|| unexpected("no memory"))
    }

    /// The address of a buffer.
    pub(crate) fn base(&mut self, remote_ptr: u64) -> Result<u64> {
        self.send(&encode(&Request::BufferGetBase(BufferGetBase { remote_ptr })))?;
        base_address(&self.read_reply()?)
    }
}

/// A PING, whose reply shows that the server has handled all requests before it.
pub(crate) fn ping() -> Vec<u8> {
    encode_ext(&ExtRequest::Ping(Ping {}))
}
