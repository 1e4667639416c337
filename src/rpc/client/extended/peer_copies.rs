//! Peer copies: copies between two servers that do not pass through the client. For a peer copy the destination gets
//! RECEIVE_FROM_PEER and the source SEND_TO_PEER, with the same transfer token.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::super::connection::{Connection, ConnectionShared};
use super::super::device::remote_buffer;
use super::super::queue::QueueProtocol;
use super::super::remote_read::ReadCompleter;
use super::extended_protocol::{ExtendedProtocol, close_queue, open_queue, region_connection, span};
use super::mark_tracker::MarkTracker;
use super::transfer_tokens::TransferTokens;
use crate::device::{DeviceError, Domain, PendingRead, Region, Timeline, TimelinePoint};
use crate::poison::lock;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, ExtResponse, ProbePeer, ReceiveFromPeer, SendToPeer, Wait};

/// Bytes of one RECEIVE_FROM_PEER and SEND_TO_PEER: the source server stages all of them.
const MAX_TRANSFER_BYTES: u64 = 64 << 20;

/// Flow control: a queue sends RECEIVE_FROM_PEERs for at most twice as many bytes before it knows that the first ones have
/// arrived. The destination server buffers what arrives before it can be written.
const MAX_UNCONFIRMED_BYTES: u64 = 128 << 20;

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

/// The RECEIVE_FROM_PEERs of a queue whose bytes may not have arrived.
#[derive(Default)]
pub(super) struct UnconfirmedCopies {
    /// Their bytes after the last confirming read.
    bytes: u64,
    /// Confirms those before it.
    read: Option<PendingRead>,
}

impl UnconfirmedCopies {
    /// Whether the next copy, of `bytes` bytes, has room without a confirmation.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes.saturating_add(bytes) <= MAX_UNCONFIRMED_BYTES
    }
}

/// The name of the queue of a server that sends from a device to another server, in its errors.
fn sending_queue_name(endpoint: &str, device: u32) -> String {
    format!("{endpoint} (device {device}, sending)")
}

/// Whether a name in an error is that of a sending queue of this server, and not that of one of its devices.
pub(crate) fn is_sending_queue(name: &str, endpoint: &str) -> bool {
    name.strip_prefix(endpoint).is_some_and(|rest| rest.starts_with(" (") && rest.ends_with(", sending)"))
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
        let name = sending_queue_name(connection.endpoint(), device);
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

impl ExtendedProtocol {
    /// Copies `src`, on another connection, to `dst`, once `after` is reached. RECEIVE_FROM_PEER goes to this connection's server
    /// and SEND_TO_PEER to the source's.
    pub(super) fn receive_copy(
        &mut self,
        src: &Region,
        dst: &Region,
        mut after: Option<&TimelinePoint>,
    ) -> Result<(), DeviceError> {
        let (from, to, tracker) = (remote_buffer(src)?, remote_buffer(dst)?, Arc::clone(&self.marks));
        let source = region_connection(src)?;
        let outbound = self.sources.get_or_open(source, from.device, &tracker)?;
        if let Some(point) = after.filter(|point| !source.can_wait(point)) {
            match point.completion_source::<MarkTracker>().filter(|tracker| tracker.belongs_to(source)) {
                Some(of_point) => of_point.wait_until_placed(point, &tracker)?,
                None => {
                    point.wait(None)?;
                    after = None;
                }
            }
        }
        let connection = Arc::clone(&self.remote.connection);
        for at in (0..dst.bytes()).step_by(MAX_TRANSFER_BYTES as usize) {
            let len = (dst.bytes() - at).min(MAX_TRANSFER_BYTES);
            self.confirm_copies(len, dst)?;
            let token = connection.take_token()?;
            let span_of = |memory, region: &Region| span(memory, region.offset() + at, len);
            let receive = ReceiveFromPeer { queue: tracker.queue, span: span_of(to, dst), token };
            connection.with_writer(|guard| guard.send_ext(&ExtRequest::ReceiveFromPeer(receive)))?;
            let (queue, address) = (outbound.queue, connection.endpoint());
            let send = ExtRequest::SendToPeer(SendToPeer { queue, span: span_of(from, src), token, address });
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

    /// Counts a copy of `len` bytes. If there is no room for it, waits until the copies before the last confirming read have
    /// arrived, and sends a new one: it reads a byte of `dst` after the copies so far.
    fn confirm_copies(&mut self, len: u64, dst: &Region) -> Result<(), DeviceError> {
        if !self.unconfirmed.has_room(len) {
            self.unconfirmed.read.take().map_or(Ok(Vec::new()), |read| read.wait(None))?;
            let (to, read) = ReadCompleter::new(&self.remote);
            self.download(vec![(dst.subregion(0, 1)?, to)])?;
            self.last_read = None;
            self.unconfirmed = UnconfirmedCopies { bytes: 0, read: Some(read) };
        }
        self.unconfirmed.bytes += len;
        Ok(())
    }
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
