//! What a queue needs to become a rank of a group.

use super::{CollectiveGroup, GroupMember};
use crate::device::{Device, DeviceError, Domain, MemoryBudget};
use crate::sync::{Arc, OnceLock};
use std::fmt;

/// What a queue needs to become a rank of a group ([`Collectives::join`](crate::device::Collectives::join)).
#[derive(Debug)]
pub enum Membership {
    /// A rank of a group of devices of this process.
    InProcess(GroupMember),
    /// A rank of a group of devices of servers.
    OnServer(ServerMember),
}

impl Membership {
    /// Whether the queues of these devices can be the ranks of a group: all devices belong to this process, or all belong to
    /// servers, each of which can send to every other one. Not checked: in a group of three or more ranks, two connections to one
    /// server make [`Collectives::join`](crate::device::Collectives::join) fail. [`Device::support`] says whether a device runs
    /// collective nodes.
    pub fn can_form_group(devices: &[&dyn Device]) -> bool {
        let is_remote = |device: &&dyn Device| device.link_stats().is_some();
        let reach = |a: &&dyn Device| devices.iter().all(|b| a.copies_from(b.info()));
        !devices.iter().any(is_remote) || devices.iter().all(|device| is_remote(device) && reach(device))
    }

    /// The memberships of a new group, by rank: one per device. Every process of the group holds, for each rank, two parts of up to
    /// `part_bytes` bytes, in whole pages of host memory: this process reserves them in `budget`, a server in the budget of the
    /// client's session. A larger part fails the group.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for devices that cannot form a group, and for none or more than [`CollectiveGroup::MAX_RANKS`];
    /// [`DeviceError::OutOfMemory`].
    pub fn group(
        devices: &[&dyn Device],
        part_bytes: u64,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Vec<Membership>, DeviceError> {
        if !Membership::can_form_group(devices) {
            return Err(DeviceError::Misuse(
                "the devices of a group are neither all of this process nor all of servers that can connect to each other",
            ));
        }
        if devices.first().is_some_and(|device| device.link_stats().is_some()) {
            let domains = devices.iter().map(|device| device.info().domain.clone()).collect();
            let members = ServerMember::members(domains, part_bytes)?;
            return Ok(members.map(Membership::OnServer).collect());
        }
        let members = CollectiveGroup::members(devices.len(), part_bytes, budget)?;
        Ok(members.into_iter().map(Membership::InProcess).collect())
    }
}

/// One rank of a group of devices of servers, which exchange the parts directly. The group exists on the servers only: once the
/// queues of all ranks have joined, the servers connect to each other. Until then the queues' later work waits.
#[derive(Debug)]
pub struct ServerMember {
    group: Arc<RemoteGroup>,
    rank: usize,
}

/// What the members of a group of servers share.
struct RemoteGroup {
    /// By rank: the copy domain of its device, which identifies the connection to its server.
    domains: Vec<Domain>,
    part_bytes: u64,
    /// Authorises a server to attach to the group at the others.
    secret: OnceLock<[u8; 16]>,
}

impl fmt::Debug for RemoteGroup {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteGroup({:?}, parts of {} bytes)", self.domains, self.part_bytes)
    }
}

impl ServerMember {
    fn members(domains: Vec<Domain>, part_bytes: u64) -> Result<impl Iterator<Item = ServerMember>, DeviceError> {
        if !(1..=CollectiveGroup::MAX_RANKS).contains(&domains.len()) {
            return Err(DeviceError::Misuse("a group has 1 to 64 ranks"));
        }
        let ranks = domains.len();
        let group = Arc::new(RemoteGroup { domains, part_bytes, secret: OnceLock::new() });
        Ok((0..ranks).map(move |rank| ServerMember { group: Arc::clone(&group), rank }))
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// By rank: the copy domain of its device.
    pub fn domains(&self) -> &[Domain] {
        &self.group.domains
    }

    /// Length of the largest part in bytes.
    pub fn part_bytes(&self) -> u64 {
        self.group.part_bytes
    }

    /// The group's secret: that of the first call on any member.
    #[cfg(feature = "client")]
    pub(crate) fn secret(&self, first: [u8; 16]) -> [u8; 16] {
        *self.group.secret.get_or_init(|| first)
    }
}
