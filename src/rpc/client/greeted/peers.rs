//! Copies from server to server, whose bytes do not come by here.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use super::super::connection::{Connection, Shared, To, lock};
use super::super::device::memory;
use super::speaker::{close, open, source, span};
use super::track::Track;
use crate::device::{DeviceError, DeviceInfo, PIECE, Point, Region, Timeline};
use crate::rpc::wire::ext::{
    Answer, ExtCommand, ExtRequest, Reach, Receive, Send, TICKET, Ticket, TicketList, Tickets, Wait,
};

/// Tickets that are asked for at once, the most that a server issues to one request.
const BATCH: usize = 256;

/// The longest answer to REACH.
const REASON: u64 = 64 << 10;

/// The connections of this process to servers that have greeted, by their devices' domain.
static LIVE: Mutex<Option<HashMap<String, Weak<Connection>>>> = Mutex::new(None);

/// Makes a connection known to those that might copy from its devices.
pub(in super::super) fn enlist(connection: &Arc<Connection>) {
    let mut live = lock(&LIVE);
    let live = live.get_or_insert_default();
    live.retain(|_, connection| connection.strong_count() > 0);
    live.insert(connection.domain(), Arc::downgrade(connection));
}

/// The connection of a device.
pub(super) fn connection_of(info: &DeviceInfo) -> Option<Arc<Connection>> {
    lock(&LIVE).as_ref()?.get(&info.domain)?.upgrade()
}

/// What a connection has for copies to and from others.
#[derive(Debug, Default)]
pub(super) struct Peers {
    tickets: Mutex<Pool>,
    /// There are more of them, or there will be none.
    came: Condvar,
    /// Whether the server reaches others, by their addresses.
    reaches: Mutex<HashMap<String, bool>>,
    /// By device: the queue that sends from it.
    outbound: Mutex<HashMap<u32, Outbound>>,
}

/// Tickets for bytes that other servers put here.
#[derive(Debug, Default)]
struct Pool {
    here: Vec<Ticket>,
    /// Whether more are on their way.
    asked: bool,
}

#[derive(Clone, Debug)]
struct Outbound {
    track: Arc<Track>,
    /// Holds the failure of the queue.
    timeline: Arc<Timeline>,
}

impl Peers {
    pub(super) fn wake(&self) {
        drop(lock(&self.tickets));
        self.came.notify_all();
    }
}

impl Shared {
    /// Whether this server sends bytes to that of another connection by itself; asked once.
    pub(in super::super) fn reaches(&self, to: &Shared) -> bool {
        let (Some(session), Some(_)) = (&self.session, &to.session) else { return false };
        if !session.server.abilities.dials {
            return false;
        }
        // Held while the server is asked: so it is asked once.
        let mut known = lock(&session.peers.reaches);
        if let Some(&reaches) = known.get(to.endpoint()) {
            return reaches;
        }
        let reach = ExtRequest::Reach(Reach { address: to.endpoint() });
        // A connection that is lost says so to whoever uses it.
        let Ok(reply) = self.exchange(ExtCommand::Reach.name(), 5..=5 + REASON, |out| reach.encode(out)) else {
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
        match point.progress::<Track>().filter(|track| track.is_of(self)) {
            Some(track) => track.is_placed(point.seq()) || track.is_reached(point.seq()),
            None => point.poll() == Ok(true),
        }
    }

    /// Whether there are tickets for so many bytes here.
    pub(super) fn has_tickets(self: &Arc<Self>, bytes: u64) -> bool {
        let Some(session) = &self.session else { return false };
        let needed = bytes.div_ceil(PIECE);
        lock(&session.peers.tickets).here.len() as u64 >= needed
    }

    /// Takes tickets, and asks for more ahead of time. Waits for them where there are too few.
    fn tickets(self: &Arc<Self>, count: usize) -> Result<Vec<Ticket>, DeviceError> {
        let peers = &self.session()?.peers;
        let mut pool = lock(&peers.tickets);
        let mut waited = false;
        loop {
            let left = pool.here.len().checked_sub(count);
            if left.is_none_or(|left| left < BATCH / 2) && !pool.asked {
                pool.asked = true;
                drop(pool);
                self.refill()?;
                pool = lock(&peers.tickets);
            }
            if let Some(left) = pool.here.len().checked_sub(count) {
                return Ok(pool.here.split_off(left));
            }
            if !std::mem::replace(&mut waited, true) {
                self.count_wait();
            }
            self.unbroken()?;
            pool = peers.came.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn refill(self: &Arc<Self>) -> Result<(), DeviceError> {
        let shared = Arc::clone(self);
        let told = move |reply: Result<Vec<u8>, DeviceError>| {
            let (Ok(reply), Some(session)) = (reply, &shared.session) else { return Ok(()) };
            match Answer::decode(ExtCommand::Tickets, &reply) {
                Ok(Answer::Tickets(TicketList(tickets))) => {
                    let mut pool = lock(&session.peers.tickets);
                    pool.here.extend_from_slice(tickets);
                    pool.asked = false;
                    drop(pool);
                    session.peers.came.notify_all();
                    Ok(())
                }
                Ok(_) => Err("another command's answer".to_owned()),
                Err(e) => Err(e.to_string()),
            }
        };
        let len = 4 + (BATCH * TICKET) as u64;
        let request = ExtRequest::Tickets(Tickets { count: BATCH as u32 });
        self.turn(|turn| {
            turn.ask(ExtCommand::Tickets.name(), len..=len, To::Told(Box::new(told)), |out| request.encode(out))
        })
    }
}

impl Connection {
    /// The queue that sends from a device; a new one after a failure.
    fn outbound(self: &Arc<Self>, device: u32) -> Result<Outbound, DeviceError> {
        let mut outbound = lock(&self.session()?.peers.outbound);
        if let Some(old) = outbound.get(&device) {
            if old.timeline.failure().is_none() {
                return Ok(old.clone());
            }
            close(self, &old.track, 0);
        }
        let name = format!("{} (device {device}, sending)", self.endpoint());
        let (track, timeline) = open(self, device, &name)?;
        let new = Outbound { track, timeline };
        outbound.insert(device, new.clone());
        Ok(new)
    }

    /// Has a queue of this connection receive what another connection's server sends, once `after` is reached.
    pub(super) fn fetch(
        self: &Arc<Self>,
        track: &Arc<Track>,
        src: &Region,
        dst: &Region,
        mut after: Option<&Point>,
    ) -> Result<(), DeviceError> {
        let (from, to) = (memory(src)?, memory(dst)?);
        let source = source(src)?;
        let outbound = source.outbound(from.device)?;
        // Nobody asks for marks of it: what it sends may be under way as long as it is there.
        outbound.track.carries(track, u64::MAX);
        let queue = track.queue;
        if let Some(point) = after.filter(|point| !source.can_wait(point)) {
            match point.progress::<Track>().filter(|track| track.is_of(source)) {
                Some(track) => track.until_placed(point.seq())?,
                None => {
                    point.wait(None)?;
                    after = None;
                }
            }
        }
        let address = self.endpoint();
        for at in (0..dst.bytes()).step_by(BATCH * PIECE as usize) {
            let len = (dst.bytes() - at).min(BATCH as u64 * PIECE);
            let tickets = self.tickets(len.div_ceil(PIECE) as usize)?;
            let tickets = TicketList(&tickets);
            let receive = Receive { queue, span: span(to, dst.offset() + at, len), tickets };
            self.turn(|turn| turn.say_now(&ExtRequest::Receive(receive)))?;
            let send = Send { queue: outbound.track.queue, span: span(from, src.offset() + at, len), tickets, address };
            let send = ExtRequest::Send(send);
            // In one turn: what others send from there must not come to wait for this point too.
            let said = source.turn(|turn| {
                let waits = after.is_none_or(|point| turn.waits(&outbound.track, point));
                if waits { turn.say_now(&send).map(|()| true) } else { Ok(false) }
            })?;
            if !said {
                after.map_or(Ok(()), |point| point.wait(None))?;
                source.turn(|turn| turn.say_now(&send))?;
            }
            after = None;
        }
        Ok(())
    }
}

impl super::super::connection::Turn<'_> {
    /// Makes a queue wait for a point; `false` where this connection's server does not know of it any more.
    pub(super) fn waits(&mut self, user: &Arc<Track>, point: &Point) -> bool {
        let Some(track) = point.progress::<Track>().filter(|track| track.is_of(self.shared)) else { return true };
        let (queue, of, number) = (user.queue, track.queue, point.seq());
        if track.is_reached(number) {
            return true;
        }
        let placed = track.is_placed(number);
        if placed {
            track.carries(user, number);
            user.waits(of, number);
            self.put(|out| ExtRequest::Wait(Wait { queue, of, number }).encode(out));
        }
        placed
    }
}
