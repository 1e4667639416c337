//! Peer copies: copies between two servers that do not pass through the client. For a peer copy the destination gets
//! RECEIVE_FROM_PEER and the source SEND_TO_PEER, with the same transfer tokens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::super::connection::{Connection, ConnectionShared};
use super::super::device::remote_buffer;
use super::extended_protocol::{close_queue, open_queue, region_connection, span};
use super::mark_tracker::MarkTracker;
use super::transfer_tokens::{TOKEN_BATCH, TransferTokens};
use crate::device::{DeviceError, Domain, Region, TRANSFER_CHUNK_BYTES, Timeline, TimelinePoint};
use crate::poison::lock;
use crate::rpc::wire::ext::{
    ExtCommand, ExtRequest, ExtResponse, ProbePeer, ReceiveFromPeer, SendToPeer, TRANSFER_TOKEN_BYTES,
    TransferTokenList, Wait,
};

/// Longest reason in a reply to PROBE_PEER.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// The connections of this process to servers with the extensions, by the domain of their devices.
static LIVE_CONNECTIONS: Mutex<Option<HashMap<Domain, Weak<Connection>>>> = Mutex::new(None);

/// Registers a connection as a possible source of peer copies.
pub(in super::super) fn register_connection(connection: &Arc<Connection>) {
    let mut live = lock(&LIVE_CONNECTIONS);
    let live = live.get_or_insert_default();
    live.retain(|_, connection| connection.strong_count() > 0);
    live.insert(connection.domain(), Arc::downgrade(connection));
}

/// The connection of the devices of a domain; `None` if it is no longer open or does not have the extensions.
pub(super) fn connection_of(domain: &Domain) -> Option<Arc<Connection>> {
    lock(&LIVE_CONNECTIONS).as_ref()?.get(domain)?.upgrade()
}

/// Peer copy state of a connection.
#[derive(Debug, Default)]
pub(super) struct PeerCopyState {
    pub(super) tokens: TransferTokens,
    /// Whether the server can dial other servers, by their addresses; filled by PROBE_PEER.
    reachable: Mutex<HashMap<String, bool>>,
}

/// The queues on other connections that send to one receiving queue. They are dedicated to it: work of another receiver would
/// delay this one, and a failure would spread to it.
#[derive(Debug, Default)]
pub(super) struct SendingQueues(Vec<SendingQueue>);

#[derive(Debug)]
struct SendingQueue {
    /// Keeps the source's connection open while its data may be in flight to the receiving queue.
    connection: Arc<Connection>,
    device: u32,
    tracker: Arc<MarkTracker>,
    /// Keeps the timeline alive, which holds the failure of the queue.
    timeline: Arc<Timeline>,
}

impl SendingQueues {
    /// The mark tracker of the queue that sends from a device to `receiver`. A failed queue is replaced.
    fn get_or_open(
        &mut self,
        connection: &Arc<Connection>,
        device: u32,
        receiver: &Arc<MarkTracker>,
    ) -> Result<Arc<MarkTracker>, DeviceError> {
        let same = |sending: &SendingQueue| Arc::ptr_eq(&sending.connection, connection) && sending.device == device;
        let failed = self.0.extract_if(.., |sending| same(sending) && sending.timeline.failure().is_some());
        failed.for_each(|sending| sending.close());
        if let Some(sending) = self.0.iter().find(|sending| same(sending)) {
            sending.tracker.add_dependent(receiver, u64::MAX);
            return Ok(Arc::clone(&sending.tracker));
        }
        let name = format!("{} (device {device}, sending)", connection.endpoint());
        let (tracker, timeline) = open_queue(connection, device, &name)?;
        // No caller waits for marks of the sending queue: the receiver's marks prove the arrival of all data.
        tracker.add_dependent(receiver, u64::MAX);
        self.0.push(SendingQueue {
            connection: Arc::clone(connection),
            device,
            tracker: Arc::clone(&tracker),
            timeline,
        });
        Ok(tracker)
    }

    /// Closes all sending queues: the receiving queue is closed.
    pub(super) fn close(&mut self) {
        self.0.drain(..).for_each(|sending| sending.close());
    }
}

impl SendingQueue {
    fn close(&self) {
        close_queue(&self.connection, &self.tracker, 0);
    }
}

impl ConnectionShared {
    /// Whether this connection's server can send bytes to the server of `to` directly. Queried once per address (PROBE_PEER).
    pub(in super::super) fn can_send_to(&self, to: &ConnectionShared) -> bool {
        let (Some(session), Some(_)) = (&self.session, &to.session) else { return false };
        if !session.server.capabilities.peer_transfers {
            return false;
        }
        // The lock is held during the query, so that concurrent callers do not repeat it.
        let mut reachable = lock(&session.peers.reachable);
        if let Some(&reaches) = reachable.get(to.endpoint()) {
            return reaches;
        }
        let request = ExtRequest::ProbePeer(ProbePeer { address: to.endpoint() });
        // On a lost connection the next use of it returns the error.
        let Ok(reply) =
            self.call_encoded(ExtCommand::ProbePeer.name(), 5..=5 + MAX_REASON_BYTES, |out| request.encode(out))
        else {
            return false;
        };
        let reaches = match ExtResponse::decode(ExtCommand::ProbePeer, &reply) {
            Ok(ExtResponse::ProbePeer(Ok(()))) => true,
            Ok(ExtResponse::ProbePeer(Err(reason))) => {
                log::info!("{} cannot send to {} directly: {reason}", self.endpoint(), to.endpoint());
                false
            }
            other => {
                self.fail(format!("the server replied to PROBE_PEER with {other:?}"));
                return false;
            }
        };
        reachable.insert(to.endpoint().to_owned(), reaches);
        reaches
    }

    /// Whether a queue of this connection can wait for a point without blocking this thread.
    pub(super) fn can_wait(&self, point: &TimelinePoint) -> bool {
        match point.completion_source::<MarkTracker>().filter(|tracker| tracker.belongs_to(self)) {
            Some(tracker) => tracker.can_be_waited_for(point.seq()) || tracker.is_reached(point.seq()),
            None => point.poll() == Ok(true),
        }
    }
}

impl Connection {
    /// Copies `src`, on another connection, to `dst` by a queue of this connection, once `after` is reached.
    /// RECEIVE_FROM_PEER goes to this connection's server and SEND_TO_PEER to the source's.
    pub(super) fn receive_copy(
        self: &Arc<Self>,
        (tracker, sources): (&Arc<MarkTracker>, &mut SendingQueues),
        src: &Region,
        dst: &Region,
        mut after: Option<&TimelinePoint>,
    ) -> Result<(), DeviceError> {
        let (from, to) = (remote_buffer(src)?, remote_buffer(dst)?);
        let source = region_connection(src)?;
        let outbound = sources.get_or_open(source, from.device, tracker)?;
        let queue = tracker.queue;
        if let Some(point) = after.filter(|point| !source.can_wait(point)) {
            match point.completion_source::<MarkTracker>().filter(|tracker| tracker.belongs_to(source)) {
                Some(of_point) => of_point.wait_until_placed(point, tracker)?,
                None => {
                    point.wait(None)?;
                    after = None;
                }
            }
        }
        let address = self.endpoint();
        let limits = [self.session()?, source.session()?].map(|session| session.server.max_message);
        let batch = tokens_per_message(limits[0].min(limits[1]), address);
        for at in (0..dst.bytes()).step_by(batch * TRANSFER_CHUNK_BYTES as usize) {
            let len = (dst.bytes() - at).min(batch as u64 * TRANSFER_CHUNK_BYTES);
            let tokens = self.take_tokens(tracker, len.div_ceil(TRANSFER_CHUNK_BYTES) as usize)?;
            let count = tokens.len();
            let token_list = TransferTokenList(&tokens);
            let receive = ReceiveFromPeer { queue, span: span(to, dst.offset() + at, len), tokens: token_list };
            self.with_writer(|guard| {
                guard.buffer(|out| ExtRequest::ReceiveFromPeer(receive).encode(out));
                guard.confirm_token_use(queue, count)?;
                guard.flush(ExtCommand::ReceiveFromPeer.name())
            })?;
            let send = SendToPeer {
                queue: outbound.queue,
                span: span(from, src.offset() + at, len),
                tokens: token_list,
                address,
            };
            let send = ExtRequest::SendToPeer(send);
            // WAIT and SEND_TO_PEER under one exclusive use of the writer: the queue of the point cannot be closed in between.
            let sent = source.with_writer(|guard| {
                let wait_placed = after.is_none_or(|point| guard.buffer_wait(&outbound, point));
                if wait_placed { guard.send_ext(&send).map(|()| true) } else { Ok(false) }
            })?;
            if !sent {
                after.map_or(Ok(()), |point| point.wait(None))?;
                source.with_writer(|guard| guard.send_ext(&send))?;
            }
            after = None;
        }
        Ok(())
    }
}

/// Number of transfer tokens of one RECEIVE_FROM_PEER and SEND_TO_PEER, limited by the servers' message size.
fn tokens_per_message(max_message: u64, address: &str) -> usize {
    // SEND_TO_PEER is the longer message. Its head: queue, span, number of tokens, address.
    let head = (4 + 24 + 4 + 4 + address.len()) as u64;
    let room = max_message.saturating_sub(head) / TRANSFER_TOKEN_BYTES as u64;
    usize::try_from(room).map_or(TOKEN_BATCH, |room| room.clamp(1, TOKEN_BATCH))
}

impl super::super::connection::WriteGuard<'_> {
    /// Makes a queue wait for a point. `false` if the point's queue was closed, so that the server can no longer wait for it.
    pub(super) fn buffer_wait(&mut self, dependent: &Arc<MarkTracker>, point: &TimelinePoint) -> bool {
        let Some(tracker) = point.completion_source::<MarkTracker>().filter(|tracker| tracker.belongs_to(self.shared))
        else {
            return true;
        };
        let (queue, of, number) = (dependent.queue, tracker.queue, point.seq());
        if tracker.is_reached(number) {
            return true;
        }
        let placed = tracker.can_be_waited_for(number);
        if placed {
            tracker.add_dependent(dependent, number);
            dependent.record_wait(of, number);
            self.buffer(|out| ExtRequest::Wait(Wait { queue, other_queue: of, number }).encode(out));
        }
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_a_message_fit_the_message_limit() {
        for (max_message, address, want) in [
            (16 << 20, "10.0.0.1:50052", 256),
            (4096 + 50, "10.0.0.1:50052", 256),
            (4096 + 49, "10.0.0.1:50052", 255),
            (4096, "h:1", 253),
            (0, "h:1", 1),
        ] {
            assert_eq!(tokens_per_message(max_message, address), want, "{max_message} bytes, {address}");
        }
    }
}
