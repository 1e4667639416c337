//! The connection of a group to one other server, on which this server sends the parts of its ranks.
//!
//! A device's thread writes its part to the socket itself, as far as there is room. The rest, and parts that follow while bytes
//! are left, are copied to a backlog, which the connection's thread writes. So a slow server blocks no device, and a fast one
//! costs no thread switch. A server has received the part of round k before its ranks send theirs of round k + 1, so the backlog
//! never has more than two parts of a rank, unless the server sends parts and receives none: that fails the group.

use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, lock};
use std::collections::VecDeque;
use std::mem;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::attach::{Heartbeat, attach};
use super::{CLOSE_TIMEOUT, MAX_BACKLOG_PARTS};
use crate::device::{DeviceError, HostBuffer, MemoryBudget, Reservation};
use crate::rpc::connection::Handshake;
use crate::rpc::server::peers::{PeerDialer, describe_transport_error};
use crate::rpc::transport::{Aborter, Deadline, Receiver, Sender};
use crate::rpc::wire::ext::AttachGroup;

/// Limit of the bytes of a part that the device's thread writes itself.
const MAX_DIRECT_BYTES: usize = 2 << 20;

/// Longest time for which a write waits before the thread checks the heartbeat, and whether the group has failed.
const WRITE_SLICE: Duration = Duration::from_millis(250);

pub(super) struct GroupLink {
    /// As the client sent it.
    pub(super) address: String,
    /// From the first rank of the other server to the last one.
    pub(super) ranks: RangeInclusive<usize>,
    /// Limit of the parts in the backlog.
    max_backlog: usize,
    budget: Arc<MemoryBudget>,
    state: Mutex<LinkState>,
    /// Wakes the connection's thread.
    changed: Condvar,
}

struct LinkState {
    writer: Writer,
    /// Messages, or rests of them, to send before any other.
    backlog: VecDeque<QueuedMessage>,
    is_attached: bool,
    /// When the connection ends, once the group has failed.
    close_by: Option<Instant>,
    /// Ends the connection while it is not attached.
    aborter: Option<Aborter>,
}

enum Writer {
    /// Not attached, or a thread writes.
    Busy,
    Idle(Sender),
    Closed,
}

/// A message in the backlog.
struct QueuedMessage {
    bytes: Vec<u8>,
    /// Whether a part of it was sent already, so that no other message may precede the rest.
    is_begun: bool,
    is_ping: bool,
    _reservation: Option<Reservation>,
}

impl QueuedMessage {
    fn control(bytes: Vec<u8>, is_ping: bool) -> QueuedMessage {
        QueuedMessage { bytes, is_begun: false, is_ping, _reservation: None }
    }
}

/// Why a part could not be sent.
pub(super) enum SendError {
    /// The other server, or the connection to it: a text for the client.
    Peer(String),
    /// This server has no memory for the backlog.
    Memory(DeviceError),
}

impl GroupLink {
    /// A link to the server whose ranks are within `ranks`, for the parts of `own_ranks` ranks. The backlog is charged to
    /// `budget`.
    pub(super) fn new(
        address: &str,
        ranks: RangeInclusive<usize>,
        own_ranks: usize,
        budget: &Arc<MemoryBudget>,
    ) -> Arc<GroupLink> {
        Arc::new(GroupLink {
            address: address.to_owned(),
            ranks,
            max_backlog: MAX_BACKLOG_PARTS * own_ranks,
            budget: Arc::clone(budget),
            state: Mutex::new(LinkState {
                writer: Writer::Busy,
                backlog: VecDeque::new(),
                is_attached: false,
                close_by: None,
                aborter: None,
            }),
            changed: Condvar::new(),
        })
    }

    /// Sends a message as far as there is room, and puts the rest in the backlog.
    ///
    /// # Errors
    /// [`SendError`].
    pub(super) fn send(&self, head: &[u8], data: &[u8]) -> Result<(), SendError> {
        let mut state = lock(&self.state);
        if state.close_by.is_some() {
            return Ok(());
        }
        let is_free = state.backlog.is_empty() && matches!(state.writer, Writer::Idle(_));
        if !is_free {
            if matches!(state.writer, Writer::Closed) {
                return Err(SendError::Peer("the connection is closed".to_owned()));
            }
            if state.backlog.len() >= self.max_backlog {
                return Err(SendError::Peer("it does not receive the parts that this server sends".to_owned()));
            }
            let message = self.rest_of(head, data, 0)?;
            state.backlog.push_back(message);
            self.changed.notify_one();
            return Ok(());
        }
        let Writer::Idle(mut sender) = mem::replace(&mut state.writer, Writer::Busy) else { return Ok(()) };
        drop(state);
        let written = sender.write_available(&[head, data.get(..MAX_DIRECT_BYTES).unwrap_or(data)]);
        let mut state = lock(&self.state);
        if matches!(state.writer, Writer::Closed) {
            return Ok(()); // its thread has ended, because the group has failed
        }
        let written = written.map_err(|e| SendError::Peer(describe_transport_error(&e)));
        let rest = written.and_then(|(sent, is_flushed)| {
            let is_whole = is_flushed && sent == head.len() + data.len();
            (!is_whole).then(|| self.rest_of(head, data, sent)).transpose()
        });
        match rest {
            Ok(rest) => rest.into_iter().for_each(|rest| state.backlog.push_front(rest)),
            Err(e) => {
                // Without the rest, no other message can follow. The connection's thread may wait for the writer, and would end
                // only at the close timeout.
                state.writer = Writer::Closed;
                self.changed.notify_one();
                return Err(e);
            }
        }
        state.writer = Writer::Idle(sender);
        if !state.backlog.is_empty() || state.close_by.is_some() {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// What is left of a message after its first `sent` bytes.
    fn rest_of(&self, head: &[u8], data: &[u8], sent: usize) -> Result<QueuedMessage, SendError> {
        let parts = [head.get(sent..), data.get(sent.saturating_sub(head.len())..)].map(Option::unwrap_or_default);
        let len = parts.iter().map(|part| part.len()).sum();
        let reservation = self.budget.reserve(len as u64).map_err(SendError::Memory)?;
        let mut bytes = Vec::new();
        let no_memory = |_| SendError::Memory(HostBuffer::out_of_memory(len as u64, &self.budget));
        bytes.try_reserve_exact(len).map_err(no_memory)?;
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        Ok(QueuedMessage { bytes, is_begun: sent > 0, is_ping: false, _reservation: Some(reservation) })
    }

    /// Ends the connection after a last message, or at once if it is not attached. Later calls have no effect. `with_parts`: parts in
    /// the backlog precede the last message, because the other server may need them for a round that is complete here. Otherwise
    /// they are dropped, except for the rest of a message that was begun. Returns whether the connection was attached.
    pub(super) fn close(&self, last: Vec<u8>, with_parts: bool) -> bool {
        let mut state = lock(&self.state);
        if state.close_by.is_none() {
            state.close_by = Some(sync::now() + CLOSE_TIMEOUT);
            state.backlog.retain(|message| message.is_begun || with_parts);
            state.backlog.push_back(QueuedMessage::control(last, false));
        }
        if let Some(aborter) = state.aborter.take() {
            aborter.abort();
        }
        let is_attached = state.is_attached;
        drop(state);
        self.changed.notify_one();
        is_attached
    }

    /// The connection's thread: connects, calls `attached`, and then sends the backlog and PINGs until the group has failed.
    ///
    /// # Errors
    /// The failure of the other server's rank.
    pub(super) fn run(
        &self,
        dialer: &PeerDialer,
        request: AttachGroup,
        attached: impl FnOnce(),
    ) -> Result<(), DeviceError> {
        let cannot_connect = |why: String| DeviceError::Remote {
            device: self.address.clone(),
            reason: format!("this server cannot connect to it: {why}"),
        };
        let ended = match self.connect(dialer, request).map_err(cannot_connect) {
            Err(e) => Err(e),
            Ok(None) => Ok(()),
            Ok(Some(receiver)) => {
                attached();
                let lost = |reason| DeviceError::ConnectionLost { endpoint: self.address.clone(), reason };
                self.serve(receiver, dialer.stall_timeout()).map_err(lost)
            }
        };
        let mut state = lock(&self.state);
        (state.writer, state.aborter) = (Writer::Closed, None);
        state.backlog.clear();
        ended
    }

    /// Connects and attaches. `None`: the group has failed meanwhile.
    fn connect(&self, dialer: &PeerDialer, request: AttachGroup) -> Result<Option<Receiver>, String> {
        if lock(&self.state).close_by.is_some() {
            return Ok(None);
        }
        let Handshake { aborter, mut receiver, mut sender, .. } = dialer.dial()?;
        let mut state = lock(&self.state);
        if state.close_by.is_some() {
            return Ok(None);
        }
        state.aborter = Some(aborter);
        drop(state);
        let timeout = dialer.stall_timeout() + dialer.handshake_timeout();
        let attached = attach(&mut sender, &mut receiver, request, timeout);
        let mut state = lock(&self.state);
        if state.close_by.is_some() {
            return Ok(None);
        }
        attached?;
        (state.writer, state.aborter, state.is_attached) = (Writer::Idle(sender), None, true);
        Ok(Some(receiver))
    }

    /// Sends the backlog and PINGs until the group has failed.
    ///
    /// # Errors
    /// Why the connection is lost: a text for the client.
    fn serve(&self, mut receiver: Receiver, stall: Duration) -> Result<(), String> {
        let mut heartbeat = Heartbeat::new(stall);
        loop {
            let mut state = lock(&self.state);
            let is_idle = matches!(state.writer, Writer::Idle(_));
            if matches!(state.writer, Writer::Closed) || has_passed(state.close_by) {
                return Ok(());
            }
            if is_idle && (!state.backlog.is_empty() || state.close_by.is_some()) {
                let Writer::Idle(mut sender) = mem::replace(&mut state.writer, Writer::Busy) else { return Ok(()) };
                let (message, close_by) = (state.backlog.pop_front(), state.close_by);
                drop(state);
                let Some(message) = message else {
                    // A close with unread input would reset the connection, and could destroy the last message.
                    drop(receiver);
                    let left = close_by.map_or(CLOSE_TIMEOUT, |at| at.saturating_duration_since(sync::now()));
                    let deadline = Deadline::after(left);
                    // The other server may have gone.
                    let _ = sender.finish(&deadline).and_then(|()| sender.drain(&deadline));
                    return Ok(());
                };
                self.write(&mut sender, &message.bytes, &mut receiver, &mut heartbeat, stall)?;
                if message.is_ping {
                    heartbeat.ping_sent();
                }
                lock(&self.state).writer = Writer::Idle(sender);
                continue;
            }
            let left = state.close_by.map(|at| at.saturating_duration_since(sync::now()));
            let wait = left.unwrap_or_else(|| heartbeat.remaining());
            if !wait.is_zero() {
                state = self.changed.wait_timeout(state, wait).unpoisoned().0;
            }
            if let Some(ping) = heartbeat.take_ping() {
                state.backlog.push_back(QueuedMessage::control(ping, true));
            }
            drop(state);
            heartbeat.receive(&mut receiver)?;
        }
    }

    /// Writes a message in slices. Returns early once the time to close the connection has passed.
    fn write(
        &self,
        sender: &mut Sender,
        mut bytes: &[u8],
        receiver: &mut Receiver,
        heartbeat: &mut Heartbeat,
        stall: Duration,
    ) -> Result<(), String> {
        let mut progress = sync::now();
        loop {
            let written = sender.write_available(&[bytes]);
            let (n, is_flushed) = written.map_err(|e| describe_transport_error(&e))?;
            bytes = bytes.get(n..).unwrap_or_default();
            if (bytes.is_empty() && is_flushed) || has_passed(lock(&self.state).close_by) {
                return Ok(());
            }
            if n > 0 {
                progress = sync::now();
            } else if sync::now().saturating_duration_since(progress) > stall {
                return Err(format!("it has received no bytes for {stall:?}"));
            }
            sender.wait_for_room(&Deadline::after(WRITE_SLICE)).map_err(|e| describe_transport_error(&e))?;
            heartbeat.receive(receiver)?;
        }
    }
}

fn has_passed(at: Option<Instant>) -> bool {
    at.is_some_and(|at| at <= sync::now())
}

#[cfg(test)]
mod tests;
