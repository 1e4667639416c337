use super::*;
use crate::device::{CompletionSource, Timeline};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Commands of [`Recorder`].
enum TestCommand {
    /// Sends the number.
    Record(Lane, u32),
    /// Sends the number, then blocks until the gate is dropped.
    Block(u32, Receiver<()>),
    Await(TimelinePoint),
    /// As `Record`, but only in the long lane.
    RecordInLongLane(u32),
    Panic,
}

impl Command for TestCommand {
    fn staged_bytes(&self) -> usize {
        0
    }

    fn lane(&self) -> Lane {
        match self {
            TestCommand::Record(lane, _) => *lane,
            TestCommand::Block(..) => Lane::Long,
            _ => Lane::Short,
        }
    }
}

/// Reports each command that it runs. Its end disconnects the receiver.
struct Recorder(Sender<u32>);

impl Executor for Recorder {
    type Command = TestCommand;

    fn execute(&mut self, command: TestCommand, turn: &Turn) -> CommandOutcome<TestCommand> {
        let number = match command {
            TestCommand::Await(point) => {
                return if point.poll() == Ok(false) {
                    CommandOutcome::AwaitPoint(point.clone(), TestCommand::Await(point))
                } else {
                    CommandOutcome::Done
                };
            }
            TestCommand::RecordInLongLane(_) if turn.lane() == Lane::Short => {
                return CommandOutcome::NeedsLongLane(command);
            }
            TestCommand::Record(_, number) | TestCommand::RecordInLongLane(number) => number,
            TestCommand::Block(number, gate) => {
                self.0.send(number).unwrap();
                let _ = gate.recv();
                return CommandOutcome::Done;
            }
            TestCommand::Panic => panic!("a command panics on purpose"),
        };
        self.0.send(number).unwrap();
        CommandOutcome::Done
    }
}

/// A channel whose commands report to `to`, with `steps` sent.
fn queue(
    threads: &QueueThreads,
    to: &Sender<u32>,
    steps: impl IntoIterator<Item = TestCommand>,
) -> Arc<CommandChannel<Recorder>> {
    let channel = CommandChannel::new(threads, &MemoryBudget::for_client(0));
    let mut executor = Some(Box::new(Recorder(to.clone())));
    steps.into_iter().for_each(|step| channel.send(step, &mut executor).unwrap());
    channel
}

fn wait_idle(channel: &CommandChannel<Recorder>) -> Result<Box<Recorder>, DeviceError> {
    channel.wait_idle(Instant::now() + Duration::from_secs(60))
}

#[test]
fn parked_channels_take_no_thread() {
    let (threads, (to, seen), timeline) = (QueueThreads::start("test", 1).unwrap(), channel(), Timeline::new());
    let point = TimelinePoint::new(&timeline, 1);
    let steps = |i| [TestCommand::Await(point.clone()), TestCommand::Record(Lane::Long, i)];
    let parked: Vec<_> = (0..1000).map(|i| queue(&threads, &to, steps(i))).collect();
    let other = queue(&threads, &to, [TestCommand::Record(Lane::Short, 1000), TestCommand::Record(Lane::Long, 1001)]);
    drop(wait_idle(&other).unwrap());
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), [1000, 1001]);
    timeline.advance(1);
    parked.iter().for_each(|channel| drop(wait_idle(channel).unwrap()));
    let mut all: Vec<_> = seen.try_iter().collect();
    all.sort_unstable();
    assert_eq!(all, (0..1000).collect::<Vec<_>>());
}

#[test]
fn the_failure_of_a_point_resumes_its_channel() {
    let (threads, (to, seen), timeline) = (QueueThreads::start("test", 1).unwrap(), channel(), Timeline::new());
    let steps = [TestCommand::Await(TimelinePoint::new(&timeline, 1)), TestCommand::Record(Lane::Short, 1)];
    let channel = queue(&threads, &to, steps);
    timeline.fail(DeviceError::Ended);
    drop(wait_idle(&channel).unwrap());
    assert_eq!(seen.try_recv(), Ok(1));
}

/// A client may open queues that wait for a point that is never reached, and close them, for ever.
#[test]
fn closed_channels_leave_nothing_behind() {
    let (threads, (to, seen), timeline) = (QueueThreads::start("test", 1).unwrap(), channel(), Timeline::new());
    let (open, gate) = channel();
    let blocking = queue(&threads, &to, [TestCommand::Block(0, gate)]);
    assert_eq!(seen.recv(), Ok(0));
    for _ in 0..1000 {
        let point = TimelinePoint::new(&timeline, 1);
        queue(&threads, &to, [TestCommand::Await(point), TestCommand::Record(Lane::Short, 1)]).close();
        // Queued after the blocked command.
        let channel = queue(&threads, &to, [TestCommand::Record(Lane::Long, 2)]);
        channel.close();
        assert_eq!(wait_idle(&channel).err(), Some(DeviceError::Ended));
        assert_eq!(channel.send(TestCommand::Panic, &mut None), Err(DeviceError::Ended));
    }
    // The thread of the short lane has left all closed channels by the time that it runs this one.
    let last = queue(&threads, &to, [TestCommand::Record(Lane::Short, 3)]);
    drop(wait_idle(&last).unwrap());
    assert_eq!(Arc::strong_count(&timeline), 1, "a channel lives on");
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), [3]);
    drop(open);
    drop(wait_idle(&blocking).unwrap());
}

#[test]
fn a_panic_ends_its_own_channel_only() {
    let (threads, (to, seen)) = (QueueThreads::start("test", 1).unwrap(), channel());
    let (own, own_seen) = channel();
    // The gate keeps the panic until all commands are sent: the channel takes none after it.
    let (open, gate) = channel();
    let broken =
        queue(&threads, &own, [TestCommand::Block(0, gate), TestCommand::Panic, TestCommand::Record(Lane::Short, 1)]);
    drop((own, open));
    assert_eq!(own_seen.recv(), Ok(0));
    assert!(own_seen.recv().is_err(), "the executor is dropped and runs nothing more");
    assert_eq!(wait_idle(&broken).err(), Some(DeviceError::Ended));
    drop(wait_idle(&queue(&threads, &to, [TestCommand::Record(Lane::Short, 2)])).unwrap());
    assert_eq!(seen.try_recv(), Ok(2));
}

#[test]
fn short_commands_pass_long_ones() {
    let (threads, (to, seen)) = (QueueThreads::start("test", 1).unwrap(), channel());
    let (open, gate) = channel();
    let long = |number| TestCommand::Record(Lane::Long, number);
    let first =
        queue(&threads, &to, [TestCommand::Block(0, gate), long(1), TestCommand::Record(Lane::Short, 2), long(3)]);
    assert_eq!(seen.recv(), Ok(0));
    let second = queue(&threads, &to, [long(10), long(11)]);
    let third = queue(&threads, &to, [TestCommand::Record(Lane::Short, 20), TestCommand::RecordInLongLane(21)]);
    assert_eq!(seen.recv(), Ok(20));
    assert!(third.take_executor_if_idle().is_none());
    // `third` stands in the long lane after `second` once its second command has been tried in the short lane.
    while lock(&third.state).next_lane() != Some(Lane::Long) {
        std::thread::yield_now();
    }
    drop(open);
    for channel in [&first, &second, &third] {
        drop(wait_idle(channel).unwrap());
    }
    let seen: Vec<_> = seen.try_iter().collect();
    let of = |numbers: std::ops::Range<u32>| seen.iter().filter(|n| numbers.contains(n)).copied().collect::<Vec<_>>();
    assert_eq!((of(0..10), of(10..20), of(20..30)), (vec![1, 2, 3], vec![10, 11], vec![21]));
}

/// A completion source with one point. It counts the requests for it.
#[derive(Debug, Default)]
struct OnePoint {
    notifies: bool,
    reached: AtomicBool,
    requests: AtomicU64,
}

impl CompletionSource for OnePoint {
    fn poll(&self, timeline: &Timeline) {
        if self.reached.load(Ordering::SeqCst) {
            timeline.advance(1);
        }
    }

    fn request_notify(&self, timeline: &Timeline, _: u64) -> bool {
        self.requests.fetch_add(1, Ordering::SeqCst);
        if !self.notifies {
            self.poll(timeline);
        }
        self.notifies
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A channel whose command waits for a point is parked if the point's device notifies, and tried again and again otherwise.
#[test]
fn only_points_of_devices_that_do_not_notify_are_polled() {
    for notifies in [false, true] {
        let (threads, (to, seen)) = (QueueThreads::start("test", 1).unwrap(), channel());
        let source = Arc::new(OnePoint { notifies, ..OnePoint::default() });
        let timeline = Timeline::with_source(Arc::clone(&source) as _);
        let steps = [TestCommand::Await(TimelinePoint::new(&timeline, 1)), TestCommand::Record(Lane::Short, 1)];
        let channel = queue(&threads, &to, steps);
        // Each try makes two requests: it polls the point, and registers a callback.
        while source.requests.load(Ordering::SeqCst) < 10 && lock(&channel.state).parked.is_none() {
            std::thread::yield_now();
        }
        assert_eq!(lock(&channel.state).parked.is_some(), notifies);
        assert_eq!(seen.try_recv().ok(), None);
        source.reached.store(true, Ordering::SeqCst);
        if notifies {
            assert_eq!(source.requests.load(Ordering::SeqCst), 2);
            timeline.advance(1);
        }
        drop(wait_idle(&channel).unwrap());
        assert_eq!(seen.try_recv(), Ok(1));
    }
}
