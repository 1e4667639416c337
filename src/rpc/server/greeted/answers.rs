//! What a client is told about one queue, in the order of the queue's work.
//!
//! The session's thread says at once what is known at once, while nothing is due before it. All else goes to a thread of the
//! queue, which waits for one thing after the other, so that no other queue and no message has to. A failure takes its turn
//! too; after it nothing is said any more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};

use super::super::allowance::Room;
use super::super::connection::Broken;
use super::super::outgoing::Outgoing;
use crate::device::{DeviceError, Point, Ticket};
use crate::rpc::wire::ext::{ExtCommand, Fault, NOTICE_HEADER, Notice, NoticeHeader, NoticeKind};

/// Answers that a queue may owe. The session reads on when there are fewer.
const MAX_PENDING: usize = 1024;

/// The voice of a queue: it is silent once the queue has failed or was closed.
struct Voice {
    queue: u32,
    out: Arc<Outgoing>,
    over: AtomicBool,
}

impl Voice {
    /// Sends the head and the parts of a message, unless the queue is silent: that is looked at where nobody else sends.
    fn say(&self, head: impl FnOnce(&mut Vec<u8>), parts: &[Vec<u8>]) -> Result<(), Broken> {
        self.out.send(
            |out| {
                if !self.over.load(Ordering::Acquire) {
                    head(out)
                }
            },
            parts,
        )
    }

    fn reached(&self, number: u64) -> Result<(), Broken> {
        self.say(|out| Notice::Reached { queue: self.queue, number }.encode(out), &[])
    }

    fn data(&self, id: u64, parts: &[Vec<u8>]) -> Result<(), Broken> {
        let size = parts.iter().map(|part| part.len() as u64).sum::<u64>() + size_of_val(&id) as u64;
        let head = |out: &mut Vec<u8>| {
            let header: [u8; NOTICE_HEADER] = NoticeHeader { kind: NoticeKind::Data, size }.encode();
            out.extend_from_slice(&header);
            out.extend_from_slice(&id.to_le_bytes());
        };
        self.say(head, parts)
    }

    /// The last word.
    fn failed(&self, fault: Fault) -> Result<(), Broken> {
        let last = |out: &mut Vec<u8>| {
            if !self.over.swap(true, Ordering::AcqRel) {
                Notice::Failed { queue: self.queue, fault }.encode(out);
            }
        };
        self.out.send(last, &[] as &[&[u8]])
    }
}

/// Something that a queue owes its client.
enum Task {
    Reached { number: u64, point: Option<Point> },
    Data { id: u64, data: Download },
    Failed(Fault),
}

/// Bytes on their way to a client.
pub(super) struct Download {
    pub(super) tickets: Vec<Ticket>,
    /// The moment of a download without any byte, whose tickets tell nothing.
    pub(super) moment: Option<Point>,
    /// Room among what the session has on its way.
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

/// The session's end of a queue's answers.
pub(super) struct Answers {
    voice: Arc<Voice>,
    patience: Duration,
    /// What was handed over and is not said yet.
    pending: Arc<AtomicUsize>,
    thread: Option<Sender<Task>>,
    /// The queue has failed, as far as the session's thread has found out by itself.
    failed: bool,
}

impl Answers {
    /// For the queue that its client calls `queue`; nothing of which may take longer than `patience`.
    pub(super) fn new(queue: u32, out: &Arc<Outgoing>, patience: Duration) -> Answers {
        let voice = Voice { queue, out: Arc::clone(out), over: AtomicBool::new(false) };
        Answers { voice: Arc::new(voice), patience, pending: Arc::default(), thread: None, failed: false }
    }

    /// Whether the queue has failed: then nothing is done for it, and nothing is said.
    pub(super) fn failed(&self) -> bool {
        self.failed || self.voice.over.load(Ordering::Acquire)
    }

    /// Nothing more is said of the queue, not even how it ends.
    pub(super) fn silence(&self) {
        self.voice.over.store(true, Ordering::Release);
    }

    /// The queue has failed: its client hears so after all that it was owed before.
    pub(super) fn fail(&mut self, fault: Fault) -> Result<(), Broken> {
        self.failed = true;
        if self.idle() { self.voice.failed(fault) } else { self.hand_over(Task::Failed(fault)) }
    }

    /// Says from any thread that the queue has failed, without waiting for what it owes.
    pub(super) fn failing(&self) -> impl Fn(DeviceError) + Send + Sync + 'static {
        let voice = Arc::clone(&self.voice);
        move |e| {
            if let Err(broken) = voice.failed(Fault::from(&e)) {
                voice.out.give_up(ExtCommand::Send.name(), broken);
            }
        }
    }

    /// Says when a mark is reached; without a point it was long ago.
    pub(super) fn reached(&mut self, number: u64, point: Option<Point>) -> Result<(), Broken> {
        if self.idle() {
            match point.as_ref().map_or(Ok(true), Point::poll) {
                Ok(true) => return self.voice.reached(number),
                Ok(false) => {}
                Err(e) => return self.fail(Fault::from(&e)),
            }
        }
        self.hand_over(Task::Reached { number, point })
    }

    /// Says what a READ has read.
    pub(super) fn data(&mut self, id: u64, mut data: Download) -> Result<(), Broken> {
        if !(self.idle() && data.is_ready()) {
            return self.hand_over(Task::Data { id, data });
        }
        match data.wait(Instant::now()) {
            Ok(parts) => self.voice.data(id, &parts),
            Err(e) => self.fail(Fault::from(&e)),
        }
    }

    fn idle(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    fn hand_over(&mut self, task: Task) -> Result<(), Broken> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => match self.start() {
                Ok(thread) => thread,
                Err(e) => {
                    self.failed = true;
                    return self
                        .voice
                        .failed(Fault::new(format!("cannot start a thread for the queue's answers: {e}")));
                }
            },
        };
        let thread = self.thread.insert(thread);
        self.pending.fetch_add(1, Ordering::AcqRel);
        if thread.send_timeout(task, self.patience).is_ok() {
            return Ok(());
        }
        self.failed = true;
        self.voice.failed(Fault::from(&DeviceError::Deadline("a queue's earlier answers")))
    }
}

impl Answers {
    fn start(&self) -> io::Result<Sender<Task>> {
        let (tasks, todo) = bounded(MAX_PENDING);
        let (voice, patience, pending) = (Arc::clone(&self.voice), self.patience, Arc::clone(&self.pending));
        let thread = std::thread::Builder::new().name("answers".to_owned());
        thread.spawn(move || serve(&todo, &voice, patience, &pending)).map(|_| tasks)
    }
}

/// Waits for one thing after the other and says it, until the session has no more.
fn serve(todo: &Receiver<Task>, voice: &Voice, patience: Duration, pending: &AtomicUsize) {
    for task in todo {
        // What nobody wants is not waited for.
        if !voice.over.load(Ordering::Acquire) {
            let (command, said) = answer(task, voice, Instant::now() + patience);
            if let Err(broken) = said {
                voice.out.give_up(command.name(), broken);
            }
        }
        pending.fetch_sub(1, Ordering::AcqRel);
    }
}

fn answer(task: Task, voice: &Voice, until: Instant) -> (ExtCommand, Result<(), Broken>) {
    let failed = |e: DeviceError| voice.failed(Fault::from(&e));
    match task {
        Task::Reached { number, point } => {
            let reached = point.map_or(Ok(()), |point| point.wait(Some(until)));
            (ExtCommand::Ask, reached.map_or_else(failed, |()| voice.reached(number)))
        }
        Task::Data { id, mut data } => {
            let parts = data.wait(until);
            (ExtCommand::Read, parts.map_or_else(failed, |parts| voice.data(id, &parts)))
        }
        Task::Failed(fault) => (ExtCommand::Ask, voice.failed(fault)),
    }
}
