//! Completions of one queue: MARK_REACHED, READ_DATA and QUEUE_FAILED notifications, sent in the order of the queue's work.
//!
//! Fast path: the session's thread sends a completion itself if it is ready and no earlier one is pending. Otherwise the
//! completion is appended to the channel of the queue's own thread, which waits for each in turn, so that other queues and
//! later requests do not wait. A failure is sent in order as well, and is the last notification of its queue.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::device::{DeviceError, PendingRead, TimelinePoint};
use crate::rpc::server::byte_semaphore::BytePermit;
use crate::rpc::server::client_connection::ClientWriter;
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

/// The data of a READ that the device has not delivered yet.
pub(super) struct Download {
    /// Reads of the spans, in order.
    pub(super) reads: Vec<PendingRead>,
    /// Point of the queue to wait for if the READ has no bytes, and therefore no `reads`.
    pub(super) end: Option<TimelinePoint>,
    /// Share of the host memory that is available for the session's replies.
    pub(super) _permit: BytePermit,
}

impl Download {
    fn is_ready(&self) -> bool {
        self.reads.iter().all(PendingRead::is_ready) && self.end.as_ref().is_none_or(|point| point.poll() == Ok(true))
    }

    fn wait(&mut self, until: Instant) -> Result<Vec<Vec<u8>>, DeviceError> {
        if let Some(end) = &self.end {
            end.wait(Some(until))?;
        }
        self.reads.drain(..).map(|read| read.wait(Some(until))).collect()
    }
}

/// The session's side of a queue's completions.
pub(super) struct Completions {
    notifications: Arc<CompletionWriter>,
    timeout: Duration,
    /// Number of completions that the queue's thread has not sent yet.
    pending: Arc<AtomicUsize>,
    /// Channel to the queue's thread, which is started for the first completion that has to wait.
    thread: Option<Sender<PendingCompletion>>,
    /// Whether the session's thread has failed the queue. Other threads fail it through the [`CompletionWriter`].
    failed: bool,
}

impl Completions {
    /// Completions of the queue with the client's number `queue`. A completion that takes longer than `timeout` fails the
    /// queue.
    pub(super) fn new(queue: u32, writer: &Arc<ClientWriter>, timeout: Duration) -> Completions {
        let notifications = CompletionWriter { queue, writer: Arc::clone(writer), closed: AtomicBool::new(false) };
        Completions {
            notifications: Arc::new(notifications),
            timeout,
            pending: Arc::default(),
            thread: None,
            failed: false,
        }
    }

    /// Whether the queue has failed. No work may be submitted to a failed queue, and no notification is sent.
    pub(super) fn has_failed(&self) -> bool {
        self.failed || self.notifications.closed.load(Ordering::Acquire)
    }

    /// Suppresses all further notifications, also QUEUE_FAILED.
    pub(super) fn close(&self) {
        self.notifications.closed.store(true, Ordering::Release);
    }

    /// Fails the queue. QUEUE_FAILED is sent after the pending completions.
    pub(super) fn fail(&mut self, fault: DeviceFault) -> Result<(), TransportError> {
        self.failed = true;
        if self.none_pending() {
            self.notifications.send_failed(fault)
        } else {
            self.enqueue(PendingCompletion::Failed(fault))
        }
    }

    /// Callback that fails the queue from any thread, without waiting for pending completions.
    pub(super) fn failure_callback(&self) -> impl Fn(DeviceError) + Send + Sync + 'static {
        let notifications = Arc::clone(&self.notifications);
        move |e| {
            if let Err(e) = notifications.send_failed(DeviceFault::from(&e)) {
                notifications.writer.fail(ExtCommand::SendToPeer.name(), e);
            }
        }
    }

    /// Sends MARK_REACHED once `point` is reached. `None`: the mark was found reached earlier, and the notification is sent
    /// at once.
    pub(super) fn report_mark(&mut self, number: u64, point: Option<TimelinePoint>) -> Result<(), TransportError> {
        if self.none_pending() {
            match point.as_ref().map_or(Ok(true), TimelinePoint::poll) {
                Ok(true) => return self.notifications.send_reached(number),
                Ok(false) => {}
                Err(e) => return self.fail(DeviceFault::from(&e)),
            }
        }
        self.enqueue(PendingCompletion::Reached { number, point })
    }

    /// Sends READ_DATA once the data is available.
    pub(super) fn send_read_data(&mut self, id: u64, mut data: Download) -> Result<(), TransportError> {
        if !(self.none_pending() && data.is_ready()) {
            return self.enqueue(PendingCompletion::Data { id, data });
        }
        match data.wait(Instant::now()) {
            Ok(parts) => self.notifications.send_data(id, &parts),
            Err(e) => self.fail(DeviceFault::from(&e)),
        }
    }

    fn none_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    fn enqueue(&mut self, completion: PendingCompletion) -> Result<(), TransportError> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => match self.spawn_thread() {
                Ok(thread) => thread,
                Err(e) => {
                    self.failed = true;
                    return self.notifications.send_failed(DeviceFault::new(format!(
                        "cannot start a thread for the queue's completions: {e}"
                    )));
                }
            },
        };
        let thread = self.thread.insert(thread);
        self.pending.fetch_add(1, Ordering::AcqRel);
        if thread.send_timeout(completion, self.timeout).is_ok() {
            return Ok(());
        }
        self.failed = true;
        self.notifications.send_failed(DeviceFault::from(&DeviceError::Deadline("a queue's earlier completions")))
    }
}

impl Completions {
    fn spawn_thread(&self) -> io::Result<Sender<PendingCompletion>> {
        let (sender, receiver) = bounded(MAX_PENDING);
        let (notifications, timeout, pending) =
            (Arc::clone(&self.notifications), self.timeout, Arc::clone(&self.pending));
        let thread = std::thread::Builder::new().name("completions".to_owned());
        thread.spawn(move || send_pending(&receiver, &notifications, timeout, &pending)).map(|_| sender)
    }
}

/// Thread of a queue: waits for each completion in turn and sends it, until the session drops the queue.
fn send_pending(
    receiver: &Receiver<PendingCompletion>,
    notifications: &CompletionWriter,
    timeout: Duration,
    pending: &AtomicUsize,
) {
    for completion in receiver {
        // A closed queue sends nothing, so its completions are not waited for.
        if !notifications.closed.load(Ordering::Acquire) {
            let (command, sent) = send_when_ready(completion, notifications, Instant::now() + timeout);
            if let Err(e) = sent {
                notifications.writer.fail(command.name(), e);
            }
        }
        pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits for a completion and sends it. Returns the command that requested it, for error messages.
fn send_when_ready(
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
        PendingCompletion::Data { id, mut data } => {
            let parts = data.wait(until);
            (ExtCommand::Read, parts.map_or_else(failed, |parts| notifications.send_data(id, &parts)))
        }
        PendingCompletion::Failed(fault) => (ExtCommand::NotifyReached, notifications.send_failed(fault)),
    }
}
