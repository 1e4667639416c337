//! Handlers for groups: JOIN_GROUP of clients; ATTACH_GROUP, PUBLISH_PART and FAIL_GROUP of other servers.

use super::error::ExtendedError;
use super::session::ExtendedSession;
use crate::device::{CollectiveGroup, DeviceError, Membership, ReceiveError};
use crate::rpc::server::groups::{JoinRequest, Joined, decode_part};
use crate::rpc::server::session::failure::{SessionError, decoder_bug};
use crate::rpc::wire::ext::{
    AttachGroup, ExtCommand, ExtRequest, ExtResponse, FailGroup, JoinGroup, PUBLISH_PART_HEAD,
};

impl ExtendedSession<'_> {
    /// Makes a queue a rank of a group. Its later work waits until the servers of the group are connected.
    pub(super) fn join_group(&mut self, request: &JoinGroup<'_>) -> Result<(), SessionError> {
        let &JoinGroup { queue, group, secret, rank, part_bytes, addresses } = request;
        let addresses: Vec<_> = addresses.iter().take(CollectiveGroup::MAX_RANKS + 1).collect();
        if addresses.len() > CollectiveGroup::MAX_RANKS || rank as usize >= addresses.len() {
            return Err(ExtendedError::GroupRanks { rank, ranks: addresses.len() }.into());
        }
        let open_queue = self.queues.get(queue)?;
        let (groups, pool) = (&self.groups, &self.peer_pool);
        let joined = open_queue.submit(|queue| {
            let missing = DeviceError::Misuse("the queue's device runs no collectives");
            let collectives = queue.collectives().ok_or(missing)?;
            let Joined { member, connected, group: handle } =
                groups.join(&JoinRequest { secret, rank, part_bytes, addresses }, pool)?;
            collectives.join(group, Membership::InProcess(member))?;
            queue.wait(&connected)?;
            Ok(handle)
        });
        if let Some(handle) = joined? {
            open_queue.completions.add_group(handle, rank as usize);
        }
        Ok(())
    }

    /// Binds the connection to a group, whose parts the other server sends on it.
    pub(super) fn attach_group(&mut self, request: &AttachGroup) -> Result<(), SessionError> {
        if self.incoming_link.is_some() {
            return Err(ExtendedError::AttachedAlready.into());
        }
        let server = self.resources.server;
        match server.groups.attach(request, server.config.stall_timeout, self.connection.watch()) {
            Ok(link) => {
                self.incoming_link = Some(link);
                Ok(self.reply(&ExtResponse::AttachGroup(Ok(())))?)
            }
            Err(why) => Ok(self.reply(&ExtResponse::AttachGroup(Err(&why)))?),
        }
    }

    /// Serves a PUBLISH_PART: receives the part into the exchange buffer of the sender's rank.
    pub(super) fn publish_part(&mut self, len: usize) -> Result<(), SessionError> {
        let head = self.connection.read_array::<PUBLISH_PART_HEAD>()?;
        let limits = &self.resources.server.config.limits;
        let ExtRequest::PublishPartHead(head) = ExtRequest::decode(ExtCommand::PublishPart, &head, limits)? else {
            return Err(decoder_bug());
        };
        let data = (len - PUBLISH_PART_HEAD) as u64; // no underflow: the header's size was checked
        let part = decode_part(&head).ok_or(ExtendedError::InvalidPart)?;
        let (link, connection) = (self.incoming_link.as_ref(), &mut self.connection);
        let link = link.ok_or(ExtendedError::NotAttached)?;
        let range = link.bytes_of(&part);
        if head.len != data || range.len() as u64 != data {
            return Err(ExtendedError::PartLength { part: range.len() as u64, data }.into());
        }
        let member = link.member(head.rank).ok_or(ExtendedError::NotARankOfSender(head.rank))?;
        let mut remaining = data;
        let published = member.publish_received(head.round, &part, range, |bytes| {
            remaining = 0;
            connection.read_exact(bytes)
        });
        match published {
            Err(ReceiveError::Source(e)) => Err(e.into()),
            // The next request follows the bytes in the stream.
            Ok(()) | Err(ReceiveError::Group) => Ok(connection.discard(remaining)?),
        }
    }

    /// Fails the group of the connection.
    pub(super) fn fail_group(&self, request: &FailGroup<'_>) -> Result<(), SessionError> {
        let link = self.incoming_link.as_ref().ok_or(ExtendedError::NotAttached)?;
        if link.fail(request.rank, request.reason) {
            return Ok(());
        }
        Err(ExtendedError::NoSuchRank(request.rank).into())
    }
}
