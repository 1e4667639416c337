//! Notifications: the messages that a server with the extensions sends (`docs/protocol.md`). Replies and read data are
//! notifications too.

use std::sync::Arc;

use super::super::connection::{ConnectionShared, ReplySink};
use super::super::reader::ConnectionReader;
use super::session::ClientSession;
use crate::rpc::connection::ReadError;
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{
    ExtCommand, ExtRequest, NOTIFICATION_HEADER, Notification, NotificationHeader, NotificationKind, Ping, ServerState,
};

/// Longest text of a failure or protocol error that is read.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// Reads and handles one notification.
pub(in super::super) fn read_notification(reader: &mut ConnectionReader) -> Result<(), ReadError> {
    let mut header = [0; NOTIFICATION_HEADER];
    reader.read_exact(&mut header)?;
    let invalid =
        |e: WireError| ReadError::Notification(format!("the server sent an invalid notification header: {e}"));
    let header = NotificationHeader::decode(&header).map_err(invalid)?;
    let max_size = match header.kind {
        NotificationKind::Reply => return reader.read_reply(header.size),
        NotificationKind::ReadData => return read_data(reader, header.size),
        NotificationKind::MarkReached => 12,
        NotificationKind::ServerState => 1,
        NotificationKind::QueueFailed | NotificationKind::ProtocolError => MAX_REASON_BYTES,
    };
    if header.size > max_size {
        let reason = format!(
            "the server sent a notification ({:?}) of {} bytes, expected at most {max_size}",
            header.kind, header.size
        );
        return Err(ReadError::Notification(reason));
    }
    let body = reader.read_bytes(header.size, "a notification")?;
    let notification = Notification::decode(header.kind, &body);
    let invalid = |e: WireError| ReadError::Notification(format!("the server sent an invalid notification: {e}"));
    reader.requester().handle_notification(notification.map_err(invalid)?).map_err(ReadError::Notification)
}

/// Handles READ_DATA. Its size must be that of the READ, so a server cannot make the client allocate more than it requested.
fn read_data(reader: &mut ConnectionReader, size: u64) -> Result<(), ReadError> {
    let mut id = [0; 8];
    let too_short = || {
        ReadError::Notification(format!(
            "the server sent READ_DATA of {size} bytes, which is less than its id of 8 bytes"
        ))
    };
    let size = size.checked_sub(id.len() as u64).ok_or_else(too_short)?;
    reader.read_exact(&mut id)?;
    let id = u64::from_le_bytes(id);
    let shared = Arc::clone(reader.requester());
    let session = shared.session_of_notification().map_err(ReadError::Notification)?;
    let Some(lengths) = session.span_lengths(id).map_err(ReadError::Notification)? else {
        // The queue was closed or has failed in the meantime: the data is dropped.
        let max_size = session.server.max_message;
        if size > max_size {
            let reason = format!("the server sent {size} bytes for READ {id}, expected at most {max_size}");
            return Err(ReadError::Notification(reason));
        }
        return reader.skip(size);
    };
    let expected: u64 = lengths.iter().sum();
    if size != expected {
        let reason = format!("the server sent {size} bytes for READ {id}, expected {expected}");
        return Err(ReadError::Notification(reason));
    }
    let bytes = lengths.iter().map(|&len| reader.read_bytes(len, ExtCommand::Read.name())).collect::<Result<_, _>>()?;
    reader.record_reply();
    session.complete_read(id, bytes);
    Ok(())
}

impl ConnectionShared {
    /// Handles a notification. `Err` is the reason for which the connection must end.
    fn handle_notification(&self, notification: Notification<'_>) -> Result<(), String> {
        match notification {
            Notification::MarkReached { queue, number } => {
                self.session_of_notification()?.handle_reached(queue, number)
            }
            Notification::QueueFailed { queue, fault } => self.session_of_notification()?.handle_failed(queue, fault),
            Notification::ProtocolError(reason) => Err(format!("the server refused the connection: {reason}")),
            Notification::ServerState(state) => {
                let endpoint = self.endpoint();
                match state {
                    ServerState::Ready => log::info!("{endpoint} accepts clients"),
                    ServerState::Full => log::info!("{endpoint} is full: it has as many clients as it allows"),
                    ServerState::Draining => log::warn!("{endpoint} is about to end and accepts no more clients"),
                }
                Ok(())
            }
            Notification::Reply(_) | Notification::ReadData { .. } => Ok(()),
        }
    }

    fn session_of_notification(&self) -> Result<&ClientSession, String> {
        self.session
            .as_ref()
            .ok_or_else(|| "the server sent a notification of the extensions, which it does not support".to_owned())
    }

    /// Heartbeat: sends PING to a server with the extensions.
    pub(in super::super) fn send_ping(&self) {
        if self.session.is_some() {
            self.defer_send(|guard| {
                let ping = ExtRequest::Ping(Ping {});
                guard.request_encoded(ExtCommand::Ping.name(), 5..=5, ReplySink::Discard, |out| ping.encode(out))
            });
        }
    }
}
