//! Groups for collectives whose ranks are queues of several servers. The collectives of ggml's protocol, which join two servers
//! and are no part of a graph, are in `collectives`.
//!
//! ```text
//! JOIN_GROUP   → SessionGroups::join   the client's queues become ranks; the last one of this server starts the links
//! link thread: dials another server, sends ATTACH_GROUP, waits for its reply; the group is ready when all links are
//! ATTACH_GROUP → GroupTable::attach    replies when the ranks of this server have joined
//! device's thread: GroupMember::publish → GroupLinks::send → PUBLISH_PART on each link
//! PUBLISH_PART → IncomingLink          publishes the part on behalf of the sender's rank
//! FAIL_GROUP   → IncomingLink          fails the group because of a rank
//! notifier:    SessionGroups::check    fails groups with a late JOIN_GROUP or part; closes the connections of failed groups
//! ```
//!
//! - Each server has an instance of the group with all ranks. The parts of its own ranks go to every other server; the parts of the
//!   others arrive on connections that the other servers have dialled.
//! - A connection belongs to one group and one direction. So no copy holds up a part, the end of the connection is the end of
//!   the group, and a PUBLISH_PART needs no secret.
//! - A server sends a part only when the other servers have replied to its ATTACH_GROUP, and they reply when they know the
//!   group. So no part arrives early, and none waits in memory.
//! - This server dials the servers that its operator allows for copies (`peers`), with the same trust.
//! - Exchange memory is reserved when the group is made. It, and parts that a slow server has not received yet, are charged to
//!   the memory budget of the session.
//!
//! Start reading at `session_groups.rs`; `links.rs` has the connections to the other servers, `link.rs` the thread of one.

mod attach;
mod incoming;
mod link;
mod links;
mod part_message;
mod session_groups;
mod table;

pub(super) use incoming::IncomingLink;
pub(super) use part_message::decode_part;
pub(super) use session_groups::{GroupTimeouts, JoinRequest, Joined, SessionGroups};
pub(super) use table::GroupTable;

use std::time::Duration;

/// Limit of the groups of a session whose memory is not freed.
const MAX_GROUPS: usize = 16;

/// Limit of the ranks of these groups together. Each has two exchange buffers, each a memory mapping.
const MAX_RANKS: usize = 128;

/// Limit of the parts in the backlog of a link, per rank of this server: twice what a server can cause that receives.
const MAX_BACKLOG_PARTS: usize = 4;

/// After a group has failed, limit of the time to send the reason, and after which connections of other servers end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest reason of a failure, in bytes, that is sent or shown. A received one may have 4 KiB, and is cut to this length.
const MAX_REASON_BYTES: usize = 2 << 10;

/// In FAIL_GROUP: no rank in particular.
const NO_RANK: u32 = u32::MAX;
