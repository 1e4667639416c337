//! Groups whose ranks are queues of several servers.

#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/attach.rs"]
mod attach;
#[path = "../../harnesses/groups.rs"]
pub(crate) mod harness;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/incoming.rs"]
mod incoming;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/link.rs"]
mod link;
#[path = "../../harnesses/links.rs"]
pub(crate) mod link_harness;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/links.rs"]
mod links;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/part_message.rs"]
mod part_message;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/session_groups.rs"]
mod session_groups;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/groups/table.rs"]
mod table;

pub(super) use incoming::IncomingLink;
pub(super) use part_message::decode_part;
pub(super) use session_groups::{GroupTimeouts, JoinRequest, Joined, SessionGroups};
pub(super) use table::GroupTable;

use std::time::Duration;

// As in the library, except for the lengths.
const MAX_GROUPS: usize = 16;
const MAX_RANKS: usize = 128;
const MAX_BACKLOG_PARTS: usize = 4;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_REASON_BYTES: usize = 2 << 10;
const NO_RANK: u32 = u32::MAX;
