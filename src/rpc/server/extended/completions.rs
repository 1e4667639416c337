//! Completions of one queue: MARK_REACHED, READ_DATA and QUEUE_FAILED notifications, sent in the order of the queue's work.
//!
//! Fast path: the session's thread sends a completion itself if it is ready and no earlier one is pending. Otherwise the
//! completion is appended to the queue's list, and the session's [notifier](super::notifier) sends it when the device is done,
//! so that other queues and later requests do not wait. A failure is sent in order as well, and is the last notification of its
//! queue.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{self, Arc, Condvar, Instant, Mutex, MutexGuard, Unpoisoned, lock};
use std::collections::VecDeque;
use std::time::Duration;

use super::notifier::NotifierShared;
use crate::device::{DeviceError, GroupHandle, PendingRead, TimelinePoint};
use crate::rpc::server::client_connection::ClientWriter;
use crate::rpc::server::host_memory::BytePermit;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::{
    DeviceFault, ExtCommand, NOTIFICATION_HEADER, Notification, NotificationHeader, NotificationKind,
};

/// Limit of pending completions per queue. The session's thread blocks while the limit is reached.
const MAX_PENDING: usize = 1024;

/// Writes the notifications of one queue. Writes nothing once the queue has failed or was closed.
struct CompletionWriter {
    queue: u32,
    writer: Arc<ClientWriter>,
    closed: AtomicBool,
    /// The groups that the queue has joined, with its ranks: they fail with the queue.
    groups: Mutex<Vec<(GroupHandle, usize)>>,
}

impl CompletionWriter {
    /// Sends the head and the parts of a message, unless the queue is closed. `closed` is checked while the connection's
    /// write lock is held, so that no message follows a QUEUE_FAILED that another thread sends.
    fn send(&self, head: impl FnOnce(&mut Vec<u8>), parts: &[Vec<u8>]) -> Result<(), TransportError> {
        self.writer.send(
            |out| {
                if !self.closed.load(Ordering::Acquire) {
                    head(out)
                }
            },
            parts,
        )
    }

    fn send_reached(&self, number: u64) -> Result<(), TransportError> {
        self.send(|out| Notification::MarkReached { queue: self.queue, number }.encode(out), &[])
    }

    fn send_data(&self, id: u64, parts: &[Vec<u8>]) -> Result<(), TransportError> {
        let size = parts.iter().map(|part| part.len() as u64).sum::<u64>() + size_of_val(&id) as u64;
        let head = |out: &mut Vec<u8>| {
            let header: [u8; NOTIFICATION_HEADER] =
                NotificationHeader { kind: NotificationKind::ReadData, size }.encode();
            out.extend_from_slice(&header);
            out.extend_from_slice(&id.to_le_bytes());
        };
        self.send(head, parts)
    }

    /// Sends QUEUE_FAILED, the last notification of the queue.
    fn send_failed(&self, fault: DeviceFault) -> Result<(), TransportError> {
        let groups = std::mem::take(&mut *self.groups.lock().unpoisoned());
        let no_text = || "its queue has failed, for lack of memory".to_owned();
        let reason = Some(fault.text.clone()).filter(|text| !text.is_empty()).unwrap_or_else(no_text);
        for (group, rank) in groups {
            // The device's queue may be well, as after a refused upload, and does not fail its groups then.
            let device = format!("queue {}", self.queue);
            group.fail_rank(rank, &DeviceError::Remote { device, reason: reason.clone() });
        }
        let last = |out: &mut Vec<u8>| {
            if !self.closed.swap(true, Ordering::AcqRel) {
                Notification::QueueFailed { queue: self.queue, fault }.encode(out);
            }
        };
        self.writer.send(last, &[] as &[&[u8]])
    }
}

/// A pending completion.
enum PendingCompletion {
    Reached { number: u64, point: Option<TimelinePoint> },
    Data { id: u64, data: Download },
    Failed(DeviceFault),
}

impl PendingCompletion {
    /// The point that is not decided yet, if the completion has to wait for one.
    fn undecided_point(&self) -> Option<&TimelinePoint> {
        let point = match self {
            PendingCompletion::Reached { point, .. } => point.as_ref(),
            PendingCompletion::Data { data, .. } => Some(&data.end),
            PendingCompletion::Failed(_) => None,
        };
        point.filter(|point| point.poll() == Ok(false))
    }
}

/// The data of a READ that the device has not delivered yet.
pub(super) struct Download {
    /// Reads of the spans, in order.
    pub(super) reads: Vec<PendingRead>,
    /// Point of the queue after the reads.
    pub(super) end: TimelinePoint,
    /// Share of the host memory that is available for the session's replies.
    pub(super) _permit: BytePermit,
}

impl Download {
    fn is_ready(&self) -> bool {
        self.reads.iter().all(PendingRead::is_ready) && self.end.poll() == Ok(true)
    }

    fn wait(self, until: Instant) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.end.wait(Some(until))?;
        self.reads.into_iter().map(|read| read.wait(Some(until))).collect()
    }
}

/// The pending completions of a queue, which the session and its notifier share.
pub(super) struct QueueCompletions {
    notifications: CompletionWriter,
    timeout: Duration,
    pending: Mutex<PendingList>,
    /// Wakes the session's thread: a completion was sent, or all were dropped.
    sent: Condvar,
}

#[derive(Default)]
struct PendingList {
    completions: VecDeque<PendingCompletion>,
    /// Whether the notifier is sending a completion that it has taken from the list.
    sending: bool,
    /// Whether the notifier has the queue: it is on the list of ready queues, a callback will put it there, or the thread sends
    /// its completions. A queue that was put on the list twice would get two callbacks.
    with_notifier: bool,
    /// The time since which the first completion waits for its point.
    first_since: Option<Instant>,
}

impl PendingList {
    fn is_empty(&self) -> bool {
        self.completions.is_empty() && !self.sending
    }
}

impl QueueCompletions {
    /// Sends the completions from the first one on, up to the first one whose point is undecided, and returns that point. Called
    /// by the notifier's thread only, so completions keep their order.
    pub(super) fn send_ready(&self) -> Option<TimelinePoint> {
        loop {
            let mut pending = lock(&self.pending);
            let Some(first) = pending.completions.front() else {
                pending.with_notifier = false;
                return None;
            };
            if let Some(point) = first.undecided_point().cloned() {
                pending.first_since.get_or_insert_with(sync::now);
                return Some(point);
            }
            let completion = pending.completions.pop_front()?;
            (pending.sending, pending.first_since) = (true, None);
            drop(pending);
            let (command, sent) = send_decided(completion, &self.notifications, sync::now() + self.timeout);
            if let Err(e) = sent {
                self.notifications.writer.fail(command.name(), e);
            }
            lock(&self.pending).sending = false;
            if self.notifications.closed.load(Ordering::Acquire) {
                self.drop_all();
            }
            self.sent.notify_one();
        }
    }

    /// Fails the queue if its first completion has waited for longer than the timeout.
    pub(super) fn check_deadline(&self, now: Instant) {
        let since = lock(&self.pending).first_since;
        if since.is_some_and(|since| now.saturating_duration_since(since) > self.timeout) {
            self.fail_at_once(&DeviceError::Deadline("a point on a queue"), ExtCommand::NotifyReached);
        }
    }

    /// Fails the queue without waiting for the pending completions, which are dropped. `command` is named if the client cannot
    /// be notified.
    fn fail_at_once(&self, error: &DeviceError, command: ExtCommand) {
        if let Err(e) = self.notifications.send_failed(DeviceFault::from(error)) {
            self.notifications.writer.fail(command.name(), e);
        }
        self.drop_all();
    }

    /// Appends a completion. Unless the queue is already scheduled (`with_notifier`), it is put on the list of ready queues;
    /// otherwise the notifier's thread sends the new completion after the earlier ones.
    fn append(
        self: &Arc<Self>,
        mut pending: MutexGuard<'_, PendingList>,
        completion: PendingCompletion,
        notifier: &NotifierShared,
    ) {
        pending.completions.push_back(completion);
        let with_notifier = std::mem::replace(&mut pending.with_notifier, true);
        drop(pending);
        if !with_notifier {
            notifier.mark_ready(Arc::clone(self));
        }
    }

    fn drop_all(&self) {
        let mut pending = lock(&self.pending);
        let dropped = std::mem::take(&mut pending.completions);
        pending.first_since = None;
        drop(pending);
        // Outside of the lock: this may drop the last handle of a device's resources.
        drop(dropped);
        self.sent.notify_one();
    }
}

/// The session's side of a queue's completions.
pub(super) struct Completions {
    queue: Arc<QueueCompletions>,
    notifier: Arc<NotifierShared>,
    /// Whether the session's thread has failed the queue. Other threads fail it through the [`CompletionWriter`].
    failed: bool,
}

impl Completions {
    /// Completions of the queue with the client's number `queue`. A completion that takes longer than `timeout` fails the
    /// queue.
    pub(super) fn new(
        queue: u32,
        writer: &Arc<ClientWriter>,
        notifier: &Arc<NotifierShared>,
        timeout: Duration,
    ) -> Completions {
        let notifications = CompletionWriter {
            queue,
            writer: Arc::clone(writer),
            closed: AtomicBool::new(false),
            groups: Mutex::default(),
        };
        let queue = QueueCompletions { notifications, timeout, pending: Mutex::default(), sent: Condvar::new() };
        let queue = Arc::new(queue);
        notifier.add_queue(&queue);
        Completions { queue, notifier: Arc::clone(notifier), failed: false }
    }

    /// Whether the queue has failed. No work may be submitted to a failed queue, and no notification is sent.
    pub(super) fn has_failed(&self) -> bool {
        self.failed || self.queue.notifications.closed.load(Ordering::Acquire)
    }

    /// Suppresses all further notifications, also QUEUE_FAILED, and drops the pending completions.
    pub(super) fn close(&self) {
        self.queue.notifications.closed.store(true, Ordering::Release);
        self.queue.drop_all();
    }

    /// Fails the queue. QUEUE_FAILED is sent after the pending completions.
    pub(super) fn fail(&mut self, fault: DeviceFault) -> Result<(), TransportError> {
        self.failed = true;
        if self.none_pending() {
            self.queue.notifications.send_failed(fault)
        } else {
            self.enqueue(PendingCompletion::Failed(fault))
        }
    }

    /// Adds a group that the queue has joined as rank `rank`.
    pub(super) fn add_group(&self, group: GroupHandle, rank: usize) {
        // Poisoning is ignored: each change is a single call.
        let mut groups = self.queue.notifications.groups.lock().unpoisoned();
        groups.retain(|(group, _)| group.failure().is_none());
        groups.push((group, rank));
    }

    /// Callback that fails the queue from any thread, without waiting for pending completions.
    pub(super) fn failure_callback(&self) -> impl Fn(DeviceError) + Send + Sync + 'static {
        let queue = Arc::clone(&self.queue);
        move |e| queue.fail_at_once(&e, ExtCommand::SendToPeer)
    }

    /// Callback that fails the queue from any thread, once: QUEUE_FAILED is sent after the completions that are pending then, and
    /// also if none is.
    pub(super) fn ordered_failure_callback(&self) -> impl Fn(&DeviceError) + Send + Sync + 'static {
        let (queue, notifier) = (Arc::clone(&self.queue), Arc::clone(&self.notifier));
        move |e| queue.append(lock(&queue.pending), PendingCompletion::Failed(DeviceFault::from(e)), &notifier)
    }

    /// Sends MARK_REACHED once `point` is reached. `None`: the mark was found reached earlier, and the notification is sent
    /// at once.
    pub(super) fn report_mark(&mut self, number: u64, point: Option<TimelinePoint>) -> Result<(), TransportError> {
        if self.none_pending() {
            match point.as_ref().map_or(Ok(true), TimelinePoint::poll) {
                Ok(true) => return self.queue.notifications.send_reached(number),
                Ok(false) => {}
                Err(e) => return self.fail(DeviceFault::from(&e)),
            }
        }
        self.enqueue(PendingCompletion::Reached { number, point })
    }

    /// Sends READ_DATA once the data is available.
    pub(super) fn send_read_data(&mut self, id: u64, data: Download) -> Result<(), TransportError> {
        if !(self.none_pending() && data.is_ready()) {
            return self.enqueue(PendingCompletion::Data { id, data });
        }
        match data.wait(sync::now()) {
            Ok(parts) => self.queue.notifications.send_data(id, &parts),
            Err(e) => self.fail(DeviceFault::from(&e)),
        }
    }

    fn none_pending(&self) -> bool {
        lock(&self.queue.pending).is_empty()
    }

    /// Appends a completion. Blocks while [`MAX_PENDING`] completions are pending, for up to the timeout.
    fn enqueue(&mut self, completion: PendingCompletion) -> Result<(), TransportError> {
        let until = sync::now() + self.queue.timeout;
        let mut pending = lock(&self.queue.pending);
        while pending.completions.len() >= MAX_PENDING {
            let left = until.saturating_duration_since(sync::now());
            if left.is_zero() {
                drop(pending);
                self.failed = true;
                let late = DeviceError::Deadline("a queue's earlier completions");
                return self.queue.notifications.send_failed(DeviceFault::from(&late));
            }
            pending = self.queue.sent.wait_timeout(pending, left).unpoisoned().0;
        }
        self.queue.append(pending, completion, &self.notifier);
        Ok(())
    }
}

/// Sends a completion whose point is decided. Returns the command that requested it, for error messages.
fn send_decided(
    completion: PendingCompletion,
    notifications: &CompletionWriter,
    until: Instant,
) -> (ExtCommand, Result<(), TransportError>) {
    let failed = |e: DeviceError| notifications.send_failed(DeviceFault::from(&e));
    match completion {
        PendingCompletion::Reached { number, point } => {
            let reached = point.map_or(Ok(()), |point| point.wait(Some(until)));
            (ExtCommand::NotifyReached, reached.map_or_else(failed, |()| notifications.send_reached(number)))
        }
        PendingCompletion::Data { id, data } => {
            let parts = data.wait(until);
            (ExtCommand::Read, parts.map_or_else(failed, |parts| notifications.send_data(id, &parts)))
        }
        PendingCompletion::Failed(fault) => (ExtCommand::NotifyReached, notifications.send_failed(fault)),
    }
}
