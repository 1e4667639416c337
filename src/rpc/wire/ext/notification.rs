//! Notifications: all messages that a server sends after the reply to HELLO_EXT, each with its kind in the header.

use super::super::codec::{Field, Reader, WireError};
use super::super::frame::{header, write_frame};
use super::DeviceFault;
use super::hello_ext::ServerState;

/// Length of a notification's header in bytes: `kind u8 | size u64`.
pub const NOTIFICATION_HEADER: usize = 9;

/// Kind of a notification. The discriminant is the number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum NotificationKind {
    /// Reply to the oldest request without a reply.
    Reply = 0,
    /// A mark of a queue is reached.
    MarkReached = 1,
    /// The bytes of a READ.
    ReadData = 2,
    /// A queue has failed.
    QueueFailed = 3,
    /// The client violated the protocol, or the session cannot continue. The server closes the connection.
    ProtocolError = 4,
    /// State of the server: sent when it changes, and as a heartbeat during a long request.
    ServerState = 5,
}

/// Header of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotificationHeader {
    /// Kind.
    pub kind: NotificationKind,
    /// Length of the body in bytes, unchecked; the receiver compares it with its own requests.
    pub size: u64,
}

impl NotificationHeader {
    /// Decodes a header.
    ///
    /// # Errors
    /// [`WireError::BadValue`] for an unknown kind.
    pub fn decode(bytes: &[u8; NOTIFICATION_HEADER]) -> Result<NotificationHeader, WireError> {
        let [kind, size @ ..] = *bytes;
        let kind = match kind {
            0 => NotificationKind::Reply,
            1 => NotificationKind::MarkReached,
            2 => NotificationKind::ReadData,
            3 => NotificationKind::QueueFailed,
            4 => NotificationKind::ProtocolError,
            5 => NotificationKind::ServerState,
            have => {
                return Err(WireError::BadValue { what: "notification kind", expected: "0 to 5", have: have.into() });
            }
        };
        Ok(NotificationHeader { kind, size: u64::from_le_bytes(size) })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; NOTIFICATION_HEADER] {
        header(self.kind as u8, self.size)
    }
}

/// A notification.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notification<'a> {
    /// The body of a reply to a request of 7.0 or of the extensions.
    Reply(&'a [u8]),
    /// All work that was sent to the queue before its mark `number` is done; earlier marks are therefore reached, too.
    MarkReached {
        /// Queue.
        queue: u32,
        /// Number of the mark.
        number: u64,
    },
    /// The bytes that READ `id` requested: its spans in order.
    ReadData {
        /// Id of the READ.
        id: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The queue has failed: it executes no more work, and reaches no more marks. Its last notification.
    QueueFailed {
        /// Queue.
        queue: u32,
        /// Cause.
        fault: DeviceFault,
    },
    /// The reason why the server closes the connection.
    ProtocolError(&'a str),
    /// The current state of the server.
    ServerState(ServerState),
}

impl<'a> Notification<'a> {
    /// The kind of this notification.
    pub const fn kind(&self) -> NotificationKind {
        match self {
            Notification::Reply(_) => NotificationKind::Reply,
            Notification::MarkReached { .. } => NotificationKind::MarkReached,
            Notification::ReadData { .. } => NotificationKind::ReadData,
            Notification::QueueFailed { .. } => NotificationKind::QueueFailed,
            Notification::ProtocolError(_) => NotificationKind::ProtocolError,
            Notification::ServerState(_) => NotificationKind::ServerState,
        }
    }

    /// Decodes the body of a notification.
    ///
    /// # Errors
    /// [`WireError`], which names the first field that is missing or invalid.
    pub fn decode(kind: NotificationKind, body: &'a [u8]) -> Result<Notification<'a>, WireError> {
        let mut r = Reader::new(body);
        let notification = match kind {
            NotificationKind::Reply => Notification::Reply(r.rest()),
            NotificationKind::MarkReached => {
                Notification::MarkReached { queue: r.u32("queue")?, number: r.u64("number")? }
            }
            NotificationKind::ReadData => Notification::ReadData { id: r.u64("id")?, bytes: r.rest() },
            NotificationKind::QueueFailed => {
                Notification::QueueFailed { queue: r.u32("queue")?, fault: Field::read(&mut r, "reason")? }
            }
            NotificationKind::ProtocolError => Notification::ProtocolError(Field::read(&mut r, "reason")?),
            NotificationKind::ServerState => Notification::ServerState(Field::read(&mut r, "state")?),
        };
        r.finish("notification")?;
        Ok(notification)
    }

    /// Appends the frame: header and body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        write_frame(self.kind() as u8, 0, out, |out| match self {
            Notification::Reply(body) => body.write(out),
            Notification::MarkReached { queue, number } => {
                queue.write(out);
                number.write(out);
            }
            Notification::ReadData { id, bytes } => {
                id.write(out);
                bytes.write(out);
            }
            Notification::QueueFailed { queue, fault } => {
                queue.write(out);
                fault.write(out);
            }
            Notification::ProtocolError(reason) => reason.write(out),
            Notification::ServerState(state) => state.write(out),
        });
    }
}
