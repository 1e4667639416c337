//! Messages, in a form that harnesses compare. A message of a server has a header of two bytes: its kind, and the length of its body.
//! A request is one byte, and fields of one byte each.

/// Messages of the extension.
pub mod ext {
    use crate::device::DeviceError;

    pub const NOTIFICATION_HEADER: usize = 2;

    /// Bytes that are no message.
    #[derive(Debug)]
    pub struct WireError;

    #[derive(Clone, Copy, PartialEq, Eq)]
    pub enum NotificationKind {
        Reply,
        ReadData,
        ServerState,
        ProtocolError,
    }

    pub struct NotificationHeader {
        pub kind: NotificationKind,
        pub size: u64,
    }

    impl NotificationHeader {
        pub fn encode(&self) -> [u8; NOTIFICATION_HEADER] {
            [self.kind as u8, self.size as u8]
        }

        pub fn decode(header: &[u8; NOTIFICATION_HEADER]) -> Result<NotificationHeader, WireError> {
            use NotificationKind::{ProtocolError, ReadData, Reply, ServerState};
            let kind = *[Reply, ReadData, ServerState, ProtocolError].get(usize::from(header[0])).ok_or(WireError)?;
            Ok(NotificationHeader { kind, size: header[1].into() })
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ServerState {
        Ready,
        Draining,
    }

    #[allow(dead_code, reason = "the library uses what no harness does")]
    pub enum Notification<'a> {
        MarkReached { queue: u32, number: u64 },
        QueueFailed { queue: u32, fault: DeviceFault },
        ServerState(ServerState),
        ProtocolError(&'a str),
    }

    impl Notification<'_> {
        /// As a text, which names a queue other than the first.
        pub fn encode(&self, out: &mut Vec<u8>) {
            let of = |queue: &u32| if *queue == 0 { String::new() } else { format!("queue {queue}: ") };
            let text = match self {
                Notification::MarkReached { queue, number } => format!("{}mark {number}", of(queue)),
                Notification::QueueFailed { queue, fault } => format!("{}failed: {}", of(queue), fault.text),
                Notification::ServerState(ServerState::Ready) => "ready".to_owned(),
                Notification::ServerState(ServerState::Draining) => "draining".to_owned(),
                Notification::ProtocolError(why) => (*why).to_owned(),
            };
            out.extend(text.bytes());
        }

        pub fn decode(kind: NotificationKind, _: &[u8]) -> Result<Notification<'_>, WireError> {
            match kind {
                NotificationKind::ServerState => Ok(Notification::ServerState(ServerState::Ready)),
                NotificationKind::ProtocolError => Ok(Notification::ProtocolError("")),
                NotificationKind::Reply | NotificationKind::ReadData => Err(WireError),
            }
        }
    }

    #[derive(Clone, Debug)]
    pub struct DeviceFault {
        pub text: String,
    }

    impl From<&DeviceError> for DeviceFault {
        fn from(error: &DeviceError) -> DeviceFault {
            DeviceFault { text: error.to_string() }
        }
    }

    pub type GroupSecret = u8;

    pub struct AttachGroup {
        pub secret: GroupSecret,
        pub from: u32,
        pub to: u32,
    }

    pub struct Ping {}

    /// Bytes of a transfer.
    pub struct PeerWrite<'a> {
        pub token: u8,
        pub at: u64,
        pub data: &'a [u8],
    }

    #[derive(Clone, Copy)]
    pub struct TensorShape {
        pub dtype: u32,
        pub ne: [u32; 4],
    }

    pub struct PublishPartHead {
        pub rank: u32,
        pub round: u64,
        pub op: u32,
        pub axis: u32,
        pub whole: Option<TensorShape>,
        pub extent: u32,
        pub len: u64,
    }

    pub struct FailGroup<'a> {
        pub rank: u32,
        pub reason: &'a str,
    }

    pub enum ExtRequest<'a> {
        AttachGroup(AttachGroup),
        Ping(Ping),
        PeerWrite(PeerWrite<'a>),
        PublishPartHead(PublishPartHead),
        FailGroup(FailGroup<'a>),
    }

    /// First bytes of requests.
    pub const ATTACH_GROUP: u8 = b'A';
    pub const PING: u8 = b'P';
    pub const PEER_WRITE: u8 = b'W';
    pub const PUBLISH_PART: u8 = b'R';
    pub const FAIL_GROUP: u8 = b'F';

    /// Fields of the head of a PUBLISH_PART.
    pub const PART_FIELDS: usize = 11;

    impl ExtRequest<'_> {
        pub fn encode(&self, out: &mut Vec<u8>) {
            match self {
                ExtRequest::AttachGroup(AttachGroup { secret, from, to }) => {
                    out.extend([ATTACH_GROUP, *secret, *from as u8, *to as u8]);
                }
                ExtRequest::Ping(Ping {}) => out.push(PING),
                ExtRequest::PeerWrite(PeerWrite { token, at, data }) => {
                    out.extend([PEER_WRITE, *token, *at as u8, data.len() as u8]);
                    out.extend_from_slice(data);
                }
                ExtRequest::PublishPartHead(head) => {
                    let TensorShape { dtype, ne } = head.whole.as_ref().expect("a shape");
                    out.extend([PUBLISH_PART, head.rank as u8, head.round as u8, head.op as u8, head.axis as u8]);
                    out.push(*dtype as u8);
                    out.extend(ne.map(|n| n as u8));
                    out.extend([head.extent as u8, head.len as u8]);
                }
                // An empty reason means that the rank has left. No harness compares another one.
                ExtRequest::FailGroup(FailGroup { rank, reason }) => {
                    out.extend([FAIL_GROUP, *rank as u8, u8::from(!reason.is_empty())]);
                }
            }
        }
    }

    impl PublishPartHead {
        pub fn decode(fields: &[u8; PART_FIELDS]) -> PublishPartHead {
            let &[rank, round, op, axis, dtype, n0, n1, n2, n3, extent, len] = fields;
            PublishPartHead {
                rank: rank.into(),
                round: round.into(),
                op: op.into(),
                axis: axis.into(),
                whole: Some(TensorShape { dtype: dtype.into(), ne: [n0, n1, n2, n3].map(u32::from) }),
                extent: extent.into(),
                len: len.into(),
            }
        }
    }

    /// The body of a reply: one byte for a PING; none for an ATTACH_GROUP that succeeds, else the reason.
    pub enum ExtResponse<'a> {
        AttachGroup(Result<(), &'a str>),
        Ping,
    }

    impl ExtResponse<'_> {
        pub fn decode(command: ExtCommand, body: &[u8]) -> Result<ExtResponse<'_>, WireError> {
            match (command, body) {
                (ExtCommand::AttachGroup, []) => Ok(ExtResponse::AttachGroup(Ok(()))),
                (ExtCommand::AttachGroup, why) => {
                    Ok(ExtResponse::AttachGroup(Err(str::from_utf8(why).map_err(|_| WireError)?)))
                }
                (ExtCommand::Ping, [0]) => Ok(ExtResponse::Ping),
                _ => Err(WireError),
            }
        }
    }

    #[derive(Clone, Copy)]
    pub enum ExtCommand {
        AttachGroup,
        NotifyReached,
        Ping,
        Read,
        SendToPeer,
    }

    impl ExtCommand {
        pub fn name(self) -> &'static str {
            match self {
                ExtCommand::AttachGroup => "ATTACH_GROUP",
                ExtCommand::NotifyReached => "NOTIFY_REACHED",
                ExtCommand::Ping => "PING",
                ExtCommand::Read => "READ",
                ExtCommand::SendToPeer => "SEND_TO_PEER",
            }
        }
    }
}
