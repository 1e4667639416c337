//! From an address that may be dialled to a connection whose server knows the extensions.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use socket2::{Domain, Protocol, Socket, Type};

use super::super::listen;
use crate::rpc::socket::{left, read};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Greet, Greeting, REVISION, State};
use crate::rpc::wire::{Command, Hello, RESPONSE_HEADER, Request, Response, ResponseHeader, WireError};

/// The longest reply to a HELLO.
const HELLO_REPLY: u64 = 64;

/// The longest reply to a GREET: some devices with their features.
const GREET_REPLY: u64 = 1 << 20;

/// The first of some addresses that answers, after HELLO and GREET.
pub(super) fn dial(targets: &[SocketAddr], until: Instant) -> Result<TcpStream, String> {
    let mut last = "it has no address".to_owned();
    for addr in targets {
        match open(*addr, until) {
            Ok(stream) => return greet(&stream, until).map(|()| stream),
            Err(e) => last = format!("cannot connect to {addr}: {e}; is a server running there, on that port?"),
        }
    }
    Err(last)
}

fn open(addr: SocketAddr, until: Instant) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&addr.into(), left(until)?)?;
    let stream = TcpStream::from(socket);
    listen::configure(&stream)?;
    Ok(stream)
}

fn greet(stream: &TcpStream, until: Instant) -> Result<(), String> {
    let mut out = Vec::new();
    Request::Hello(Hello { conn_caps: Some([0; 24]) }).encode(&mut out);
    let wire = |e: WireError| format!("it does not answer as a server does: {e}");
    let body = ask(stream, &out, HELLO_REPLY, until)?;
    let greeting = match Response::decode(Command::Hello, &body).map_err(wire)? {
        Response::Hello(reply) => Greeting::from_byte(reply.greeting),
        _ => None,
    };
    match greeting {
        Some(Greeting { revision: REVISION, state: State::Ready }) => {}
        Some(Greeting { revision: REVISION, state: State::Full }) => {
            return Err("it has as many clients as it may".into());
        }
        Some(Greeting { revision: REVISION, state: State::Draining }) => return Err("it takes no more clients".into()),
        _ => return Err(format!("it is no fanout server of revision {REVISION}")),
    }
    out.clear();
    ExtRequest::Greet(Greet { revision: REVISION.into() }).encode(&mut out);
    let body = ask(stream, &out, GREET_REPLY, until)?;
    Answer::decode(ExtCommand::Greet, &body).map_err(wire)?;
    Ok(())
}

/// Sends a request and reads its reply, of at most `limit` bytes.
fn ask(mut stream: &TcpStream, request: &[u8], limit: u64, until: Instant) -> Result<Vec<u8>, String> {
    let io = |e: io::Error| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "no reply in time".to_owned(),
        ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        _ => e.to_string(),
    };
    stream.set_write_timeout(Some(left(until).map_err(io)?)).map_err(io)?;
    stream.write_all(request).map_err(io)?;
    let mut header = [0; RESPONSE_HEADER];
    read(stream, &mut header, until).map_err(io)?;
    let size = ResponseHeader::decode(&header).size;
    if size > limit {
        return Err(format!("it answers with {size} bytes where at most {limit} are expected"));
    }
    let mut body = vec![0; size as usize]; // at most GREET_REPLY
    read(stream, &mut body, until).map_err(io)?;
    Ok(body)
}
