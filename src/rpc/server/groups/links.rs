//! The connections of a group to the other servers: one thread each, see [`GroupLink`].

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{self, Arc, Instant, Mutex, OnceLock, Weak, lock, thread};

use super::attach::displayable_reason;
use super::link::{GroupLink, SendError};
use super::{NO_RANK, part_message};
use crate::device::{CollectivePart, DeviceError, GroupHandle, MemoryBudget, RemoteRanks, Timeline, TimelinePoint};
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::host_memory::HostCharge;
use crate::rpc::server::peers::PeerPool;
use crate::rpc::wire::ext::{AttachGroup, ExtRequest, FailGroup, GroupSecret};

/// The connections of a group. They live as long as the group, and so does the charge for it.
pub(super) struct GroupLinks {
    /// Empty until the queues of this server have joined.
    links: OnceLock<Vec<Arc<GroupLink>>>,
    group: OnceLock<GroupHandle>,
    /// Reaches 1 when all connections are attached; fails with the group.
    ready: Arc<Timeline>,
    /// Connections that are not attached.
    pending: AtomicUsize,
    /// The connections of the other servers to this one, with their addresses.
    incoming: Mutex<Vec<(String, Weak<SessionWatch>)>>,
    failed_at: OnceLock<Instant>,
    /// Ranks of the group.
    ranks: usize,
    _charge: HostCharge,
}

/// What the links of a group are started with.
pub(super) struct LinkPlan<'a> {
    pub(super) secret: GroupSecret,
    /// By rank: the address of its server; empty for ranks of this server.
    pub(super) addresses: &'a [String],
    pub(super) budget: &'a Arc<MemoryBudget>,
}

impl GroupLinks {
    pub(super) fn new(ranks: usize, charge: HostCharge) -> Arc<GroupLinks> {
        Arc::new(GroupLinks {
            links: OnceLock::new(),
            group: OnceLock::new(),
            ready: Timeline::new(),
            pending: AtomicUsize::new(0),
            incoming: Mutex::default(),
            failed_at: OnceLock::new(),
            ranks,
            _charge: charge,
        })
    }

    /// The point at which all connections are attached.
    pub(super) fn ready_point(&self) -> TimelinePoint {
        TimelinePoint::new(&self.ready, 1)
    }

    /// When the group has failed.
    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.failed_at.get().copied()
    }

    /// Starts a connection to each other server. If one cannot be dialled, the group fails.
    pub(super) fn start(self: &Arc<Self>, group: &GroupHandle, plan: &LinkPlan<'_>, pool: &PeerPool) {
        let own: Vec<_> = (0..).zip(plan.addresses).filter(|(_, address)| address.is_empty()).collect();
        let from = own.first().map_or(0, |(rank, _)| *rank);
        let mut links: Vec<Arc<GroupLink>> = Vec::new();
        let mut dialers = Vec::new();
        for (rank, address) in plan.addresses.iter().enumerate().filter(|(_, address)| !address.is_empty()) {
            if links.iter().any(|link| link.address == *address) {
                continue;
            }
            match pool.dialer(address) {
                Ok(dialer) => {
                    let last = plan.addresses.iter().rposition(|other| other == address).unwrap_or(rank);
                    links.push(GroupLink::new(address, rank..=last, own.len(), plan.budget));
                    dialers.push(dialer);
                }
                Err(why) => {
                    let reason = format!("this server cannot connect to it: {why}");
                    return group.fail_rank(rank, &DeviceError::Remote { device: address.clone(), reason });
                }
            }
        }
        if links.is_empty() {
            return self.ready.advance(1);
        }
        self.pending.store(links.len(), Ordering::Relaxed);
        // A group is started once: nothing was set before.
        let _ = (self.group.set(group.clone()), self.links.set(links.clone()));
        for (link, dialer) in links.into_iter().zip(dialers) {
            let (rank, links, handle) = (*link.ranks.start(), Arc::clone(self), group.clone());
            let request = AttachGroup { secret: plan.secret, from, to: rank as u32 };
            let run = move || {
                if let Err(e) = link.run(&dialer, request, || links.count_attached()) {
                    handle.fail_rank(rank, &e);
                }
            };
            if let Err(e) = thread::Builder::new().name("group-link".to_owned()).spawn(run) {
                group.fail_rank(rank, &DeviceError::thread_spawn_failed("for a connection of a group", &e));
            }
        }
        // It may have failed before its connections were set.
        if let Some(failure) = group.failure() {
            self.report_failure(&failure);
        }
    }

    fn count_attached(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.ready.advance(1);
        }
    }

    /// Adds a connection of another server, which ends with the group.
    pub(super) fn add_incoming(&self, address: &str, session: &Arc<SessionWatch>) {
        lock(&self.incoming).push((address.to_owned(), Arc::downgrade(session)));
    }

    /// Removes a connection whose session ends by itself: its reason must still reach the other server.
    pub(super) fn remove_incoming(&self, session: &Arc<SessionWatch>) {
        lock(&self.incoming).retain(|(_, other)| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(session)));
    }

    /// Ends the connections of other servers to this one: of the server at `address`, or all.
    pub(super) fn end_incoming(&self, address: Option<&str>) {
        for (at, session) in &*lock(&self.incoming) {
            if address.is_none_or(|address| address == at)
                && let Some(session) = session.upgrade()
            {
                session.end_connection();
            }
        }
    }
}

impl RemoteRanks for GroupLinks {
    fn send(&self, rank: usize, round: u64, part: &CollectivePart, bytes: &[u8]) -> Result<(), DeviceError> {
        let (Some(links), Some(group)) = (self.links.get(), self.group.get()) else { return Ok(()) };
        let mut head = Vec::new();
        for link in links {
            let needed = bytes.get(part.bytes_for(&link.ranks, self.ranks)).unwrap_or_default();
            head.clear();
            part_message::encode_head(rank, round, part, needed.len()).encode(&mut head);
            let (rank, error) = match link.send(&head, needed) {
                Ok(()) => continue,
                Err(SendError::Peer(reason)) => {
                    (*link.ranks.start(), DeviceError::ConnectionLost { endpoint: link.address.clone(), reason })
                }
                Err(SendError::Memory(e)) => (rank, e),
            };
            group.fail_rank(rank, &error);
            return Err(group.failure().unwrap_or(error));
        }
        Ok(())
    }

    fn report_failure(&self, error: &DeviceError) {
        self.failed_at.get_or_init(sync::now);
        self.ready.fail(error.clone());
        let (rank, reason) = match error {
            DeviceError::RankFailed { rank, error, .. } => (*rank as u32, error.to_string()),
            DeviceError::RankLeft { rank, .. } => (*rank as u32, String::new()),
            error => (NO_RANK, error.to_string()),
        };
        // A rank may leave as soon as its last round is complete here. The other servers still need the parts of that round.
        let with_parts = matches!(error, DeviceError::RankLeft { .. });
        let reason = displayable_reason(&reason);
        if self.links.get().is_none() {
            // No connection was started, but another server may have attached its own.
            self.end_incoming(None);
        }
        for link in self.links.get().into_iter().flatten() {
            let mut message = Vec::new();
            ExtRequest::FailGroup(FailGroup { rank, reason: &reason }).encode(&mut message);
            if !link.close(message, with_parts) {
                // The other server learns of it by the end of its own connection.
                self.end_incoming(Some(&link.address));
            }
        }
    }
}
