//! fanout's extensions to the RPC protocol, for connections between a fanout client and a fanout server: commands with numbers
//! from 128, and notifications.
//!
//! A server offers the extensions in a byte of its HELLO reply that 7.0 leaves unused ([`ExtensionOffer`]). A client enables
//! them with HELLO_EXT. After the reply to HELLO_EXT every message of the server is a [`Notification`]. `docs/protocol.md`
//! describes the meaning and the order of the messages; start there.

mod command;
mod fault;
mod fields;
mod hello_ext;
mod notification;
mod request;
mod response;

pub use command::{ExtCommand, ExtHeader, GROUP_SECRET_BYTES, TRANSFER_TOKEN_BYTES};
pub use fault::{DeviceFault, DeviceFaultKind};
pub use fields::{BufferSpan, BufferSpans, GroupSecret, NO_TENSOR, RankAddresses, TensorShape, TransferToken};
pub use hello_ext::{DeviceRecord, ExtensionOffer, HelloExtReply, REVISION, ServerCapabilities, ServerState};
pub use notification::{NOTIFICATION_HEADER, Notification, NotificationHeader, NotificationKind};
pub use request::{
    AttachGroup, CloseQueue, CopySpan, ExtRequest, FailGroup, Fill, HelloExt, IssueTokens, JoinGroup, Load, Mark,
    NotifyReached, OpenQueue, PEER_WRITE_HEAD, PUBLISH_PART_HEAD, PeerWrite, Ping, PrepareGraph, ProbePeer,
    PublishPartHead, ReadSpans, ReceiveFromPeer, RunGraph, SendToPeer, Status, SupportsOp, WRITE_HEAD, Wait, WriteHead,
};
pub use response::ExtResponse;
