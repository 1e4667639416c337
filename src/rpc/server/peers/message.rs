//! The messages of another server on a connection that this server has dialled: replies, and changes of its state.

use std::time::Duration;

use log::debug;

use super::dial::describe_transport_error;
use crate::rpc::transport::{Deadline, Receiver, TransportError};
use crate::rpc::wire::ext::{NOTIFICATION_HEADER, Notification, NotificationHeader, NotificationKind};

/// Longest message that is read: only PROTOCOL_ERROR, which contains a reason text, has a variable size.
pub(super) const MAX_MESSAGE_BYTES: u64 = 64 << 10;

/// A message of another server.
pub(in crate::rpc::server) enum PeerMessage {
    /// The body of a reply.
    Reply(Vec<u8>),
    ServerState,
}

/// Reads a message whose first byte arrives by `start`, and whose others follow within `rest`. `None`: no byte has arrived.
///
/// # Errors
/// A text for the client: it quotes nothing that was read, since the other end may be a service that is no business of the
/// client.
pub(in crate::rpc::server) fn read_message(
    receiver: &mut Receiver,
    start: &Deadline,
    rest: Duration,
) -> Result<Option<PeerMessage>, String> {
    let lost = |e: TransportError| match e {
        TransportError::Closed => "it closed the connection".to_owned(),
        e => describe_transport_error(&e),
    };
    let invalid = || "it sent an invalid message".to_owned();
    let mut header = [0; NOTIFICATION_HEADER];
    let (first, others) = header.split_at_mut(1);
    match receiver.read_into(first, start) {
        Ok(0) => return Err(lost(TransportError::Closed)),
        Ok(_) => {}
        Err(e) if e.is_timeout() => return Ok(None),
        Err(e) => return Err(lost(e)),
    }
    let deadline = Deadline::after(rest);
    receiver.read_exact(others, &deadline).map_err(lost)?;
    let NotificationHeader { kind, size } = NotificationHeader::decode(&header).map_err(|_| invalid())?;
    if size > MAX_MESSAGE_BYTES {
        return Err(invalid());
    }
    let mut body = vec![0; size as usize];
    receiver.read_exact(&mut body, &deadline).map_err(lost)?;
    if kind == NotificationKind::Reply {
        return Ok(Some(PeerMessage::Reply(body)));
    }
    match Notification::decode(kind, &body).map_err(|_| invalid())? {
        Notification::ServerState(_) => Ok(Some(PeerMessage::ServerState)),
        Notification::ProtocolError(why) => {
            debug!("a server to which this one has connected reports a protocol error: {why:?}");
            Err("it reports a protocol error".to_owned())
        }
        _ => Err("it sent a notification about a queue, but no queue was opened on this connection".to_owned()),
    }
}
