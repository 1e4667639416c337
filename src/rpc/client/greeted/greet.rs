//! GREET: the first message of the extensions, still answered in a frame of 7.0.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::super::connect::ConnectError;
use crate::rpc::socket::{left, read};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Greet, GreetReply, REVISION};
use crate::rpc::wire::{RESPONSE_HEADER, ResponseHeader};

/// The longest reply: far more than the devices of one server need.
const LONGEST: u64 = 1 << 20;

/// The least that a server must take in one message, and bring in one read: less is of no use.
pub(in super::super) const LEAST: u64 = 4 << 10;

/// Introduces this client to a server that speaks the extensions. `passed` counts bytes sent and received.
pub(in super::super) fn greet(
    endpoint: &str,
    mut stream: &TcpStream,
    patience: Duration,
    passed: &mut (u64, u64),
) -> Result<GreetReply, ConnectError> {
    let failed = |reason: String| ConnectError::Handshake { endpoint: endpoint.to_owned(), reason };
    let io = |e: io::Error| ConnectError::unheard(endpoint, ExtCommand::Greet.name(), patience, &e);
    let until = Instant::now() + patience;
    let mut out = Vec::new();
    ExtRequest::Greet(Greet { revision: REVISION.into() }).encode(&mut out);
    stream.set_write_timeout(Some(left(until).map_err(io)?)).map_err(io)?;
    stream.write_all(&out).map_err(io)?;
    let mut header = [0; RESPONSE_HEADER];
    read(stream, &mut header, until).map_err(io)?;
    let size = ResponseHeader::decode(&header).size;
    if size > LONGEST {
        return Err(failed(format!("it answered GREET with {size} bytes, at most {LONGEST} are possible")));
    }
    let mut body = vec![0; size as usize];
    read(stream, &mut body, until).map_err(io)?;
    *passed = (passed.0 + out.len() as u64, passed.1 + RESPONSE_HEADER as u64 + size);
    let reply = match Answer::decode(ExtCommand::Greet, &body) {
        Ok(Answer::Greet(reply)) => reply,
        Ok(_) => return Err(failed("it answered GREET as another command".to_owned())),
        Err(e) => return Err(failed(format!("it answered GREET with nonsense: {e}"))),
    };
    if reply.devices.is_empty() || reply.max_message < LEAST {
        let (devices, bytes) = (reply.devices.len(), reply.max_message);
        return Err(failed(format!("it has {devices} devices and takes messages of {bytes} bytes")));
    }
    Ok(reply)
}
