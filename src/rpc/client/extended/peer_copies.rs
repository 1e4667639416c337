//! Copies from server to server, whose bytes do not come by here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::super::connection::{Connection, ConnectionShared, lock};
use super::super::device::remote_buffer;
use super::extended_protocol::{close_queue, open_queue, source_connection, span};
use super::mark_tracker::MarkTracker;
use super::transfer_tokens::{TOKEN_BATCH, TransferTokens};
use crate::device::{DeviceError, DeviceInfo, Domain, PIECE, Point, Region, Timeline};
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Reach, Receive, Send, TICKET, TicketList, Wait};

/// The longest answer to REACH.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// The connections of this process to servers that have greeted, by their devices' domain.
static LIVE_CONNECTIONS: Mutex<Option<HashMap<Domain, Weak<Connection>>>> = Mutex::new(None);

/// Makes a connection known to those that might copy from its devices.
pub(in super::super) fn register_connection(connection: &Arc<Connection>) {
    let mut live = lock(&LIVE_CONNECTIONS);
    let live = live.get_or_insert_default();
    live.retain(|_, connection| connection.strong_count() > 0);
    live.insert(connection.domain(), Arc::downgrade(connection));
}

/// The connection of a device.
pub(super) fn connection_of(info: &DeviceInfo) -> Option<Arc<Connection>> {
    lock(&LIVE_CONNECTIONS).as_ref()?.get(&info.domain)?.upgrade()
}

/// What a connection has for copies to and from others.
#[derive(Debug, Default)]
pub(super) struct PeerCopyState {
    pub(super) tokens: TransferTokens,
    /// Whether the server reaches others, by their addresses.
    reachable: Mutex<HashMap<String, bool>>,
}

/// The queues of other connections that send to one queue. Nobody else's work goes there: so nobody waits for what is not
/// theirs, or fails with it.
#[derive(Debug, Default)]
pub(super) struct SendingQueues(Vec<SendingQueue>);

#[derive(Debug)]
struct SendingQueue {
    /// What it sends may be under way as long as the queue is there that receives it.
    connection: Arc<Connection>,
    device: u32,
    track: Arc<MarkTracker>,
    /// Holds the failure of the queue.
    timeline: Arc<Timeline>,
}

impl SendingQueues {
    /// The track of the queue that sends from a device to `user`; a new one after a failure.
    fn get_or_open(
        &mut self,
        connection: &Arc<Connection>,
        device: u32,
        user: &Arc<MarkTracker>,
    ) -> Result<Arc<MarkTracker>, DeviceError> {
        let same = |own: &SendingQueue| Arc::ptr_eq(&own.connection, connection) && own.device == device;
        let failed = self.0.extract_if(.., |own| same(own) && own.timeline.failure().is_some());
        failed.for_each(|own| own.close());
        if let Some(own) = self.0.iter().find(|own| same(own)) {
            own.track.add_dependent(user, u64::MAX);
            return Ok(Arc::clone(&own.track));
        }
        let name = format!("{} (device {device}, sending)", connection.endpoint());
        let (track, timeline) = open_queue(connection, device, &name)?;
        // Nobody asks for marks of it: whether all that it sends has come, the other end's marks tell.
        track.add_dependent(user, u64::MAX);
        self.0.push(SendingQueue { connection: Arc::clone(connection), device, track: Arc::clone(&track), timeline });
        Ok(track)
    }

    /// Nothing more is received.
    pub(super) fn close(&mut self) {
        self.0.drain(..).for_each(|own| own.close());
    }
}

impl SendingQueue {
    fn close(&self) {
        close_queue(&self.connection, &self.track, 0);
    }
}

impl ConnectionShared {
    /// Whether this server sends bytes to that of another connection by itself; asked once.
    pub(in super::super) fn can_send_to(&self, to: &ConnectionShared) -> bool {
        let (Some(session), Some(_)) = (&self.session, &to.session) else { return false };
        if !session.server.abilities.dials {
            return false;
        }
        // Held while the server is asked: so it is asked once.
        let mut known = lock(&session.peers.reachable);
        if let Some(&reaches) = known.get(to.endpoint()) {
            return reaches;
        }
        let reach = ExtRequest::Reach(Reach { address: to.endpoint() });
        // A connection that is lost says so to whoever uses it.
        let Ok(reply) = self.exchange(ExtCommand::Reach.name(), 5..=5 + MAX_REASON_BYTES, |out| reach.encode(out))
        else {
            return false;
        };
        let reaches = match Answer::decode(ExtCommand::Reach, &reply) {
            Ok(Answer::Reach(Ok(()))) => true,
            Ok(Answer::Reach(Err(reason))) => {
                log::info!("{} sends nothing to {}: {reason}", self.endpoint(), to.endpoint());
                false
            }
            other => {
                self.fail(format!("the server answered REACH with {other:?}"));
                return false;
            }
        };
        known.insert(to.endpoint().to_owned(), reaches);
        reaches
    }

    /// Whether a queue of this connection can be made to wait for a point at once.
    pub(super) fn can_wait(&self, point: &Point) -> bool {
        match point.progress::<MarkTracker>().filter(|track| track.belongs_to(self)) {
            Some(track) => track.can_be_waited_for(point.seq()) || track.is_reached(point.seq()),
            None => point.poll() == Ok(true),
        }
    }
}

impl Connection {
    /// Has a queue of this connection receive what another connection's server sends, once `after` is reached.
    pub(super) fn receive_copy(
        self: &Arc<Self>,
        (track, sources): (&Arc<MarkTracker>, &mut SendingQueues),
        src: &Region,
        dst: &Region,
        mut after: Option<&Point>,
    ) -> Result<(), DeviceError> {
        let (from, to) = (remote_buffer(src)?, remote_buffer(dst)?);
        let source = source_connection(src)?;
        let outbound = sources.get_or_open(source, from.device, track)?;
        let queue = track.queue;
        if let Some(point) = after.filter(|point| !source.can_wait(point)) {
            match point.progress::<MarkTracker>().filter(|track| track.belongs_to(source)) {
                Some(track) => track.wait_until_placed(point.seq())?,
                None => {
                    point.wait(None)?;
                    after = None;
                }
            }
        }
        let address = self.endpoint();
        let limits = [self.session()?, source.session()?].map(|session| session.server.max_message);
        let batch = tokens_per_message(limits[0].min(limits[1]), address);
        for at in (0..dst.bytes()).step_by(batch * PIECE as usize) {
            let len = (dst.bytes() - at).min(batch as u64 * PIECE);
            let tickets = self.take_tokens(track, len.div_ceil(PIECE) as usize)?;
            let count = tickets.len();
            let tickets = TicketList(&tickets);
            let receive = Receive { queue, span: span(to, dst.offset() + at, len), tickets };
            self.with_writer(|turn| {
                turn.buffer(|out| ExtRequest::Receive(receive).encode(out));
                turn.confirm_token_use(queue, count)?;
                turn.flush(ExtCommand::Receive.name())
            })?;
            let send = Send { queue: outbound.queue, span: span(from, src.offset() + at, len), tickets, address };
            let send = ExtRequest::Send(send);
            // In one turn: nobody ends the queue of the point in between.
            let said = source.with_writer(|turn| {
                let waits = after.is_none_or(|point| turn.buffer_wait(&outbound, point));
                if waits { turn.send_ext(&send).map(|()| true) } else { Ok(false) }
            })?;
            if !said {
                after.map_or(Ok(()), |point| point.wait(None))?;
                source.with_writer(|turn| turn.send_ext(&send))?;
            }
            after = None;
        }
        Ok(())
    }
}

/// Tickets of one RECEIVE and one SEND, of which servers take so many bytes.
fn tokens_per_message(max_message: u64, address: &str) -> usize {
    // SEND is the longer one: the queue, the span, the number of tickets, the address.
    let beside = (4 + 24 + 4 + 4 + address.len()) as u64;
    let room = max_message.saturating_sub(beside) / TICKET as u64;
    usize::try_from(room).map_or(TOKEN_BATCH, |room| room.clamp(1, TOKEN_BATCH))
}

impl super::super::connection::WriteGuard<'_> {
    /// Makes a queue wait for a point; `false` where this connection's server does not know of it any more.
    pub(super) fn buffer_wait(&mut self, user: &Arc<MarkTracker>, point: &Point) -> bool {
        let Some(track) = point.progress::<MarkTracker>().filter(|track| track.belongs_to(self.shared)) else {
            return true;
        };
        let (queue, of, number) = (user.queue, track.queue, point.seq());
        if track.is_reached(number) {
            return true;
        }
        let placed = track.can_be_waited_for(number);
        if placed {
            track.add_dependent(user, number);
            user.record_wait(of, number);
            self.buffer(|out| ExtRequest::Wait(Wait { queue, of, number }).encode(out));
        }
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_of_one_message_fit_it() {
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
