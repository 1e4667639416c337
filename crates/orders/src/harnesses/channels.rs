//! Command channels and the threads of their queues. Invariants: each command runs once, in the order in which it was sent, and not
//! before the point for which it waits; the submitter gets the executor back when all are done; a closed channel runs no further
//! command; every wait ends.

use crate::device::{
    Command, CommandChannel, CommandOutcome, CompletionSource, DeviceError, Executor, Lane, MemoryBudget, QueueThreads,
    Timeline, TimelinePoint, Turn,
};
use crate::sync::orders::{spawn, yield_now};
use crate::sync::{self, Arc, Instant, Mutex, lock};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// No deadline: no clock runs.
fn never() -> Instant {
    sync::now() + Duration::from_secs(60)
}

/// What a command does.
enum Work {
    Short,
    Long,
    /// Notices in its turn of the short lane that it needs the long one.
    LongUnnoticed,
    /// Takes two turns.
    TwoTurns(bool),
    Upload(usize),
    Await(TimelinePoint),
    /// Advances another timeline.
    Advance(Arc<Timeline>, u64),
    /// Runs in the long lane and counts the turns under way there, of which only one may exist.
    Alone(Arc<AtomicU32>),
}

struct Numbered {
    number: u32,
    work: Work,
}

impl Command for Numbered {
    fn staged_bytes(&self) -> usize {
        if let Work::Upload(bytes) = self.work { bytes } else { 0 }
    }

    fn lane(&self) -> Lane {
        if matches!(self.work, Work::Long | Work::Alone(_)) { Lane::Long } else { Lane::Short }
    }
}

/// Records the numbers of its commands. A panic within a command would be caught, so that violations are recorded too.
struct Recorder {
    ran: Arc<Mutex<Vec<u32>>>,
    broken: Arc<AtomicBool>,
    /// Commands that have begun, and their bytes.
    begun: Arc<[AtomicU64; 2]>,
    /// Whether the executor was dropped.
    ended: Arc<AtomicBool>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Executor for Recorder {
    type Command = Numbered;

    fn execute(&mut self, mut command: Numbered, turn: &Turn) -> CommandOutcome<Numbered> {
        if lock(&self.ran).len() as u64 == self.begun[0].load(Ordering::Relaxed) {
            self.begun[0].fetch_add(1, Ordering::Relaxed);
            self.begun[1].fetch_add(command.staged_bytes() as u64, Ordering::Relaxed);
        }
        match &mut command.work {
            Work::Long if turn.lane() == Lane::Short => self.broken.store(true, Ordering::Relaxed),
            Work::LongUnnoticed if turn.lane() == Lane::Short => return CommandOutcome::NeedsLongLane(command),
            Work::TwoTurns(begun) if !*begun => {
                *begun = true;
                return CommandOutcome::TurnOver(command);
            }
            Work::Await(point) if point.poll() == Ok(false) => {
                return CommandOutcome::AwaitPoint(point.clone(), command);
            }
            Work::Advance(timeline, seq) => timeline.advance(*seq),
            Work::Alone(inside) => {
                let others = inside.fetch_add(1, Ordering::Relaxed);
                yield_now();
                inside.fetch_sub(1, Ordering::Relaxed);
                if others > 0 {
                    self.broken.store(true, Ordering::Relaxed);
                }
            }
            _ => {}
        }
        lock(&self.ran).push(command.number);
        CommandOutcome::Done
    }
}

/// Pending commands at most, as in the library, and bytes of an upload of which only one may be pending.
const MAX_PENDING: u64 = 64;
const LARGE: usize = 3 << 20;

/// A queue, from its submitter's side.
struct Queue {
    channel: Arc<CommandChannel<Recorder>>,
    executor: Option<Box<Recorder>>,
    ran: Arc<Mutex<Vec<u32>>>,
    broken: Arc<AtomicBool>,
    begun: Arc<[AtomicU64; 2]>,
    ended: Arc<AtomicBool>,
    sent: u32,
    sent_bytes: u64,
}

impl Queue {
    fn new(threads: &QueueThreads) -> Queue {
        let (ran, broken) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (begun, ended) = (Arc::<[AtomicU64; 2]>::default(), Arc::new(AtomicBool::new(false)));
        let recorder = Recorder {
            ran: Arc::clone(&ran),
            broken: Arc::clone(&broken),
            begun: Arc::clone(&begun),
            ended: Arc::clone(&ended),
        };
        let channel = CommandChannel::new(threads, &MemoryBudget::new(0));
        Queue { channel, executor: Some(Box::new(recorder)), ran, broken, begun, ended, sent: 0, sent_bytes: 0 }
    }

    fn send(&mut self, work: Work) -> Result<(), DeviceError> {
        let number = self.sent;
        self.sent += 1;
        let command = Numbered { number, work };
        self.sent_bytes += command.staged_bytes() as u64;
        let sent = self.channel.send(command, &mut self.executor);
        // Beside what is pending, a command may have been removed that has not begun.
        let [begun, begun_bytes] = [0, 1].map(|i| self.begun[i].load(Ordering::Relaxed));
        assert!(u64::from(self.sent) - begun <= MAX_PENDING + 1, "pending commands");
        assert!(self.sent_bytes - begun_bytes <= 2 * LARGE as u64, "bytes of pending commands");
        sent
    }

    /// Waits for all commands, and takes the executor.
    fn finish(mut self) {
        self.executor = Some(self.channel.wait_idle(never()).expect("all commands end"));
        assert_eq!(*lock(&self.ran), (0..self.sent).collect::<Vec<_>>(), "commands in the order in which they ran");
        assert!(!self.broken.load(Ordering::Relaxed), "a long command ran in the short lane, or beside another turn");
        assert!(self.channel.take_executor_if_idle().is_none(), "there is one executor");
        self.channel.close();
    }
}

fn threads(short: usize) -> QueueThreads {
    QueueThreads::start("queues", short).expect("threads start")
}

/// Two sessions send commands of both lanes.
pub(super) fn two_sessions() {
    let threads = threads(1);
    let other = {
        let threads = threads.clone();
        spawn(move || {
            let mut queue = Queue::new(&threads);
            queue.send(Work::Long).unwrap();
            queue.send(Work::TwoTurns(false)).unwrap();
            queue.finish();
        })
    };
    let mut queue = Queue::new(&threads);
    queue.send(Work::Short).unwrap();
    queue.send(Work::LongUnnoticed).unwrap();
    queue.send(Work::Short).unwrap();
    queue.finish();
    other.join().unwrap();
    assert_eq!(threads.activity().waiting, 0);
}

/// Uploads that do not fit beside each other: the submitter waits for room.
pub(super) fn full() {
    let threads = threads(1);
    let mut queue = Queue::new(&threads);
    for _ in 0..3 {
        queue.send(Work::Upload(LARGE)).unwrap();
    }
    // The command between the last two uploads waits for a point that this thread reaches only after the last upload was accepted: room must
    // come from the upload before it.
    let timeline = Timeline::new();
    queue.send(Work::Upload(LARGE)).unwrap();
    queue.send(Work::Await(TimelinePoint::new(&timeline, 1))).unwrap();
    queue.send(Work::Upload(LARGE)).unwrap();
    timeline.advance(1);
    queue.finish();
}

/// More commands than may be pending, behind one that waits.
pub(super) fn many_commands() {
    let threads = threads(1);
    let timeline = Timeline::new();
    let mut queue = Queue::new(&threads);
    queue.send(Work::Await(TimelinePoint::new(&timeline, 1))).unwrap();
    let advancing = spawn(move || timeline.advance(1));
    for _ in 0..MAX_PENDING + 2 {
        queue.send(Work::Short).unwrap();
    }
    advancing.join().unwrap();
    queue.finish();
}

/// A command of one queue waits for a point that a command of another queue reaches.
pub(super) fn parked() {
    let threads = threads(1);
    let timeline = Timeline::new();
    let other = {
        let (threads, timeline) = (threads.clone(), Arc::clone(&timeline));
        spawn(move || {
            let mut queue = Queue::new(&threads);
            queue.send(Work::Advance(Arc::clone(&timeline), 1)).unwrap();
            queue.send(Work::Advance(timeline, 2)).unwrap();
            queue.finish();
        })
    };
    let mut queue = Queue::new(&threads);
    queue.send(Work::Await(TimelinePoint::new(&timeline, 1))).unwrap();
    queue.send(Work::Short).unwrap();
    queue.send(Work::Await(TimelinePoint::new(&timeline, 2))).unwrap();
    queue.finish();
    other.join().unwrap();
}

/// A device that does not notify.
#[derive(Debug, Default)]
pub(crate) struct Polled(pub(crate) AtomicU64);

impl CompletionSource for Polled {
    fn poll(&self, timeline: &Timeline) {
        timeline.advance(self.0.load(Ordering::Relaxed));
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A command waits for a point of a device that does not notify. The clock runs: the next poll is a deadline.
pub(super) fn polled() {
    sync::orders::with_clock(|| {
        let threads = threads(1);
        let source = Arc::new(Polled::default());
        let timeline = Timeline::with_source(Arc::clone(&source) as Arc<dyn CompletionSource>);
        let mut queue = Queue::new(&threads);
        // The thread of the long lane may also run what follows the first command.
        queue.send(Work::Long).unwrap();
        queue.send(Work::Await(TimelinePoint::new(&timeline, 1))).unwrap();
        source.0.store(1, Ordering::Relaxed);
        while lock(&queue.ran).len() < 2 {
            yield_now();
        }
        queue.channel.close();
    });
}

/// A channel is closed while commands run, wait for a point, and are sent.
pub(super) fn closed() {
    let threads = threads(1);
    let timeline = Timeline::new();
    let mut queue = Queue::new(&threads);
    let (ran, point) = (Arc::clone(&queue.ran), TimelinePoint::new(&timeline, 1));
    let (begun, channel) = (Arc::clone(&queue.begun), Arc::clone(&queue.channel));
    let closing = spawn(move || {
        channel.close();
        begun[0].load(Ordering::Relaxed)
    });
    let advancing = spawn(move || timeline.advance(1));
    for work in [Work::Short, Work::Await(point), Work::Long] {
        // Whether a command is accepted depends on the order.
        let _ = queue.send(work);
    }
    let idle = queue.channel.wait_idle(never());
    let begun_at_close = closing.join().unwrap();
    advancing.join().unwrap();
    assert!(idle.is_ok() || idle.as_ref().err() == Some(&DeviceError::Ended));
    let at_end = lock(&ran).clone();
    assert!(at_end.is_sorted() && at_end.len() <= 3, "{at_end:?}");
    assert!(at_end.len() as u64 <= begun_at_close + 1, "commands that begin after the close");
    assert_eq!(queue.send(Work::Short), Err(DeviceError::Ended));
    assert!(!queue.broken.load(Ordering::Relaxed));
    // The executor ends with the channel, though that is still referred to.
    drop((idle, queue.executor.take()));
    while !queue.ended.load(Ordering::Relaxed) {
        yield_now();
    }
    // The turns of the closed channel are free again.
    let mut next = Queue::new(&threads);
    next.send(Work::Short).unwrap();
    next.send(Work::Long).unwrap();
    next.finish();
}

/// Submitting threads take turns of the long lane beside a channel. At most one has a turn at a time.
pub(super) fn turns_of_threads() {
    let threads = threads(0);
    let inside = Arc::new(AtomicU32::new(0));
    let others: Vec<_> = (0..2)
        .map(|_| {
            let (threads, inside) = (threads.clone(), Arc::clone(&inside));
            spawn(move || {
                let session = MemoryBudget::new(0);
                for _ in 0..2 {
                    let turn = threads.begin(Lane::Long, &session);
                    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "turns at a time");
                    yield_now();
                    inside.fetch_sub(1, Ordering::Relaxed);
                    drop(turn);
                }
            })
        })
        .collect();
    let mut queue = Queue::new(&threads);
    queue.send(Work::Alone(Arc::clone(&inside))).unwrap();
    queue.send(Work::Alone(inside)).unwrap();
    queue.finish();
    others.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(threads.activity().waiting, 0);
}
