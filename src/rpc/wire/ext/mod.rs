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
pub use hello_ext::{
    DeviceRecord, ExtensionOffer, HelloExtReply, ListenerRecord, REVISION, ServerCapabilities, ServerState,
    TenantRecord,
};
pub use notification::{NOTIFICATION_HEADER, Notification, NotificationHeader, NotificationKind};
pub use request::{
    AttachGroup, CloseQueue, CopySpan, ExtRequest, FailGroup, Fill, HelloExt, IssueTokens, JoinGroup, Load, Mark,
    NotifyReached, OpenQueue, PEER_WRITE_HEAD, PUBLISH_PART_HEAD, PeerWrite, Ping, PrepareGraph, ProbePeer,
    PublishPartHead, ReadSpans, ReceiveFromPeer, RunGraph, SendToPeer, Status, SupportsOp, WRITE_HEAD, Wait, WriteHead,
};
pub use response::ExtResponse;

use super::codec::{Reader, WireError};

/// Decodes a text: its length in bytes as u32, then UTF-8.
fn text<'a>(r: &mut Reader<'a>, what: &'static str) -> Result<&'a str, WireError> {
    let len = r.u32(what)?;
    let bytes = r.bytes(what, usize::try_from(len).unwrap_or(usize::MAX))?;
    str::from_utf8(bytes).map_err(|e| WireError::BadValue {
        what,
        expected: "UTF-8",
        have: bytes.get(e.valid_up_to()).map_or(0, |&byte| byte.into()),
    })
}

/// Encodes a text. A text of 4 GiB or more would be truncated; no caller has one.
fn write_text(text: &str, out: &mut Vec<u8>) {
    let mut end = text.len().min(u32::MAX as usize);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u32).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// Encoded length of a text in bytes.
fn text_size(text: &str) -> u64 {
    4 + text.len() as u64
}
