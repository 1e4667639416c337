//! Completions of one queue: REACHED, DATA and FAILED notifications, sent in the order of the queue's work.
//!
//! The session's thread sends a completion itself when it is ready and no earlier one is pending. Otherwise the completion goes to a
//! thread of the queue, which waits for one after the other, so that no other queue and no request has to wait. A failure takes
//! its turn too; nothing is sent after it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::device::{DeviceError, Point, Ticket};
use crate::rpc::server::allowance::Room;
use crate::rpc::server::client_connection::Writer;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::{ExtCommand, Fault, NOTICE_HEADER, Notice, NoticeHeader, NoticeKind};

/// Completions that may be pending. The session reads its next request when there are fewer.
const MAX_PENDING: usize = 1024;

/// Writes a queue's notifications, and nothing more once the queue has failed or was closed.
struct CompletionWriter {
    queue: u32,
    writer: Arc<Writer>,
    closed: AtomicBool,
}

impl CompletionWriter {
    /// Sends the head and the parts of a message, unless the queue is closed. That is checked under the connection's lock, so
    /// that nothing follows a FAILED of another thread.
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

    fn reached(&self, number: u64) -> Result<(), TransportError> {
        self.send(|out| Notice::Reached { queue: self.queue, number }.encode(out), &[])
    }

    fn data(&self, id: u64, parts: &[Vec<u8>]) -> Result<(), TransportError> {
        let size = parts.iter().map(|part| part.len() as u64).sum::<u64>() + size_of_val(&id) as u64;
        let head = |out: &mut Vec<u8>| {
            let header: [u8; NOTICE_HEADER] = NoticeHeader { kind: NoticeKind::Data, size }.encode();
            out.extend_from_slice(&header);
            out.extend_from_slice(&id.to_le_bytes());
        };
        self.send(head, parts)
    }

    /// Sends FAILED, the last notification of the queue.
    fn failed(&self, fault: Fault) -> Result<(), TransportError> {
        let last = |out: &mut Vec<u8>| {
            if !self.closed.swap(true, Ordering::AcqRel) {
                Notice::Failed { queue: self.queue, fault }.encode(out);
            }
        };
        self.writer.send(last, &[] as &[&[u8]])
    }
}

/// A pending completion.
enum Pending {
    Reached { number: u64, point: Option<Point> },
    Data { id: u64, data: Download },
    Failed(Fault),
}

/// Bytes of a READ on their way to the client.
pub(super) struct Download {
    pub(super) tickets: Vec<Ticket>,
    /// The end of a download without any byte, which has no tickets.
    pub(super) moment: Option<Point>,
    /// A share of the host memory that the session's replies may take.
    pub(super) _room: Room,
}

impl Download {
    fn is_ready(&self) -> bool {
        self.tickets.iter().all(Ticket::is_ready) && self.moment.as_ref().is_none_or(|point| point.poll() == Ok(true))
    }

    fn wait(&mut self, until: Instant) -> Result<Vec<Vec<u8>>, DeviceError> {
        if let Some(moment) = &self.moment {
            moment.wait(Some(until))?;
        }
        self.tickets.drain(..).map(|ticket| ticket.wait(Some(until))).collect()
    }
}

/// The session's end of a queue's completions.
pub(super) struct Completions {
    notifications: Arc<CompletionWriter>,
    timeout: Duration,
    /// Completions that the thread has not sent yet.
    pending: Arc<AtomicUsize>,
    thread: Option<Sender<Pending>>,
    /// The queue has failed, as far as the session's thread has found out by itself.
    failed: bool,
}

impl Completions {
    /// The completions of the queue that its client calls `queue`. No completion may take longer than `timeout`.
    pub(super) fn new(queue: u32, writer: &Arc<Writer>, timeout: Duration) -> Completions {
        let notifications = CompletionWriter { queue, writer: Arc::clone(writer), closed: AtomicBool::new(false) };
        Completions {
            notifications: Arc::new(notifications),
            timeout,
            pending: Arc::default(),
            thread: None,
            failed: false,
        }
    }

    /// Whether the queue has failed: no work is submitted to it then, and nothing is sent.
    pub(super) fn failed(&self) -> bool {
        self.failed || self.notifications.closed.load(Ordering::Acquire)
    }

    /// Sends nothing more, not even a failure.
    pub(super) fn close(&self) {
        self.notifications.closed.store(true, Ordering::Release);
    }

    /// Fails the queue. FAILED is sent after the completions that are pending.
    pub(super) fn fail(&mut self, fault: Fault) -> Result<(), TransportError> {
        self.failed = true;
        if self.idle() { self.notifications.failed(fault) } else { self.enqueue(Pending::Failed(fault)) }
    }

    /// Fails the queue from any thread, without waiting for pending completions.
    pub(super) fn failing(&self) -> impl Fn(DeviceError) + Send + Sync + 'static {
        let notifications = Arc::clone(&self.notifications);
        move |e| {
            if let Err(e) = notifications.failed(Fault::from(&e)) {
                notifications.writer.give_up(ExtCommand::Send.name(), e);
            }
        }
    }

    /// Sends REACHED once the mark is; without a point it was, long ago.
    pub(super) fn reached(&mut self, number: u64, point: Option<Point>) -> Result<(), TransportError> {
        if self.idle() {
            match point.as_ref().map_or(Ok(true), Point::poll) {
                Ok(true) => return self.notifications.reached(number),
                Ok(false) => {}
                Err(e) => return self.fail(Fault::from(&e)),
            }
        }
        self.enqueue(Pending::Reached { number, point })
    }

    /// Sends the bytes of a READ.
    pub(super) fn data(&mut self, id: u64, mut data: Download) -> Result<(), TransportError> {
        if !(self.idle() && data.is_ready()) {
            return self.enqueue(Pending::Data { id, data });
        }
        match data.wait(Instant::now()) {
            Ok(parts) => self.notifications.data(id, &parts),
            Err(e) => self.fail(Fault::from(&e)),
        }
    }

    fn idle(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    fn enqueue(&mut self, task: Pending) -> Result<(), TransportError> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => match self.start() {
                Ok(thread) => thread,
                Err(e) => {
                    self.failed = true;
                    return self
                        .notifications
                        .failed(Fault::new(format!("cannot start a thread for the queue's answers: {e}")));
                }
            },
        };
        let thread = self.thread.insert(thread);
        self.pending.fetch_add(1, Ordering::AcqRel);
        if thread.send_timeout(task, self.timeout).is_ok() {
            return Ok(());
        }
        self.failed = true;
        self.notifications.failed(Fault::from(&DeviceError::Deadline("a queue's earlier answers")))
    }
}

impl Completions {
    fn start(&self) -> io::Result<Sender<Pending>> {
        let (tasks, todo) = bounded(MAX_PENDING);
        let (notifications, timeout, pending) =
            (Arc::clone(&self.notifications), self.timeout, Arc::clone(&self.pending));
        let thread = std::thread::Builder::new().name("answers".to_owned());
        thread.spawn(move || send_pending(&todo, &notifications, timeout, &pending)).map(|_| tasks)
    }
}

/// Waits for one completion after the other and sends it, until the session drops the queue.
fn send_pending(todo: &Receiver<Pending>, notifications: &CompletionWriter, timeout: Duration, pending: &AtomicUsize) {
    for task in todo {
        // A closed queue sends nothing, so nothing is waited for.
        if !notifications.closed.load(Ordering::Acquire) {
            let (command, sent) = complete(task, notifications, Instant::now() + timeout);
            if let Err(e) = sent {
                notifications.writer.give_up(command.name(), e);
            }
        }
        pending.fetch_sub(1, Ordering::AcqRel);
    }
}

fn complete(
    task: Pending,
    notifications: &CompletionWriter,
    until: Instant,
) -> (ExtCommand, Result<(), TransportError>) {
    let failed = |e: DeviceError| notifications.failed(Fault::from(&e));
    match task {
        Pending::Reached { number, point } => {
            let reached = point.map_or(Ok(()), |point| point.wait(Some(until)));
            (ExtCommand::Ask, reached.map_or_else(failed, |()| notifications.reached(number)))
        }
        Pending::Data { id, mut data } => {
            let parts = data.wait(until);
            (ExtCommand::Read, parts.map_or_else(failed, |parts| notifications.data(id, &parts)))
        }
        Pending::Failed(fault) => (ExtCommand::Ask, notifications.failed(fault)),
    }
}
