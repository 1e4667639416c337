//! Streams: queues of operations, and the dependencies of the queued operations.

use std::collections::{BTreeMap, VecDeque};
use std::thread::{self, ThreadId};

use super::StreamOp;
use super::connections::ConnectionCounter;
use super::simulated_time::{EntryId, OpCost, Timeline};
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle, HandleTable, StreamId};
use crate::mem::MovedBytes;

/// How a stream synchronises with the legacy default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The legacy default stream: waits for all blocking streams, and they wait for it.
    Legacy,
    /// The default stream of one thread, which is a blocking stream.
    PerThread(ThreadId),
    /// Created with `CU_STREAM_DEFAULT`.
    Blocking,
    /// Created with `CU_STREAM_NON_BLOCKING`.
    NonBlocking,
}

/// Timeline point of a stream: the end of its `index`-th operation, from 1. Index 0 is always reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPoint {
    /// The stream.
    pub stream: StreamId,
    /// Number of operations that must be done.
    pub index: u64,
    /// The operation's entry of the simulated timeline.
    pub entry: EntryId,
}

/// A queued operation.
#[derive(Debug)]
pub(super) struct Item {
    /// The operation.
    pub(super) work: StreamOp,
    /// Points of other streams that must be reached first.
    pub(super) after: Vec<StreamPoint>,
    /// Its entry of the simulated timeline.
    entry: EntryId,
    /// Number of the submission among those of all streams.
    pub(super) order: u64,
}

/// The operation that a stream is executing.
#[derive(Debug)]
pub(super) struct Running {
    entry: EntryId,
    pub(super) order: u64,
    /// Whether it waits for a value in memory, and so may have to be retried.
    pub(super) awaits_value: bool,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    /// The context that it belongs to.
    pub context: ContextId,
    /// Its kind.
    pub kind: StreamKind,
    /// The hardware connection that it shares with other streams of the context, if connections are limited.
    pub(super) connection: Option<u32>,
    /// Operations that have not started.
    pub(super) queue: VecDeque<Item>,
    /// Points that the next operation must wait for.
    pending: Vec<StreamPoint>,
    submitted: u64,
    done: u64,
    /// Entry of the last submitted operation in the simulated timeline.
    last: EntryId,
    /// Entry of the operation that is executing, if one is.
    pub(super) running: Option<Running>,
    /// The program destroyed it; it is removed when its operations are done.
    destroyed: bool,
}

/// All streams.
#[derive(Debug, Default)]
pub struct Streams {
    pub(super) table: HandleTable<StreamId, Stream>,
    /// Number of submissions so far.
    submissions: u64,
    pub(super) connections: ConnectionCounter,
    /// The simulated clock.
    pub time: Timeline,
    /// Entries that join the ends of removed streams: the default streams of their context must still wait for those in
    /// simulated time.
    past: BTreeMap<ContextId, EntryId>,
}

impl Streams {
    /// No streams, with this clock. Streams of a context share this many hardware connections; `None`: each has its own.
    pub fn new(time: Timeline, connections: Option<u32>) -> Self {
        Self { time, connections: ConnectionCounter::new(connections), ..Self::default() }
    }

    /// Creates a stream.
    pub fn create(&mut self, context: ContextId, kind: StreamKind) -> StreamId {
        let connection = self.connections.next(context);
        self.insert(context, kind, connection)
    }

    fn insert(&mut self, context: ContextId, kind: StreamKind, connection: Option<u32>) -> StreamId {
        self.table.insert(Stream {
            context,
            kind,
            connection,
            queue: VecDeque::new(),
            pending: Vec::new(),
            submitted: 0,
            done: 0,
            last: EntryId::default(),
            running: None,
            destroyed: false,
        })
    }

    /// Creates a hidden stream: programs cannot name it, no other stream waits for it implicitly, and it is removed when its
    /// operations are done. It has a connection of its own.
    pub fn create_internal(&mut self, context: ContextId) -> StreamId {
        let id = self.insert(context, StreamKind::NonBlocking, None);
        if let Ok(stream) = self.table.get_mut(id) {
            stream.destroyed = true;
        }
        id
    }

    /// The stream of a handle; fails if the program destroyed it.
    pub fn get(&self, stream: StreamId) -> Result<&Stream> {
        self.table.get(stream).ok().filter(|stream| !stream.destroyed).ok_or(Error::InvalidHandle)
    }

    /// The default stream of a context: the legacy one, or this thread's (created at its first use).
    pub fn default_of(&mut self, context: ContextId, kind: StreamKind) -> StreamId {
        let found = self.table.iter().find(|(_, stream)| stream.context == context && stream.kind == kind);
        match found {
            Some((id, _)) => id,
            None => self.create(context, kind),
        }
    }

    /// Appends an operation that takes no simulated time.
    pub fn submit(&mut self, stream: StreamId, work: StreamOp) -> Result<StreamPoint> {
        self.submit_costing(stream, work, Vec::new(), OpCost::Nothing)
    }

    /// As [`Streams::submit`], with points to wait for.
    pub fn submit_after(&mut self, stream: StreamId, work: StreamOp, after: Vec<StreamPoint>) -> Result<StreamPoint> {
        self.submit_costing(stream, work, after, OpCost::Nothing)
    }

    /// Appends an operation with points to wait for. An operation of a blocking stream also waits for everything that the
    /// legacy stream has queued by now, and vice versa.
    pub fn submit_costing(
        &mut self,
        stream: StreamId,
        work: StreamOp,
        mut after: Vec<StreamPoint>,
        cost: OpCost,
    ) -> Result<StreamPoint> {
        let implied = self.implied(stream)?;
        after.append(&mut self.table.get_mut(stream)?.pending);
        after.extend(implied);
        let thread = thread::current().id();
        self.time.reset_polling(thread);
        let own = self.table.get(stream)?;
        let past = self.past.get(&own.context).filter(|_| own.kind != StreamKind::NonBlocking);
        let before = after.iter().map(|point| point.entry).chain(past.copied()).chain([own.last]).collect();
        let entry = self.time.submit(cost, thread, before);
        after.retain(|&point| point.stream != stream && !self.is_reached(point));
        self.submissions += 1;
        let order = self.submissions;
        let target = self.table.get_mut(stream)?;
        target.queue.push_back(Item { work, after, entry, order });
        target.submitted += 1;
        target.last = entry;
        Ok(StreamPoint { stream, index: target.submitted, entry })
    }

    /// Advances the calling thread's clock by the duration of a launch.
    pub fn host_launched(&mut self) {
        self.time.launch(thread::current().id());
    }

    /// Advances the calling thread's clock by the duration of a module's compilation.
    pub fn host_compiled(&mut self) {
        self.time.compile(thread::current().id());
    }

    /// The calling thread holds the driver's lock for the duration of a synchronising allocation.
    pub fn host_allocated(&mut self) {
        self.time.hold_driver_lock(thread::current().id());
    }

    /// Whether points that are reached are reached by the calling thread's simulated clock too.
    pub fn host_queried(&mut self, points: &[StreamPoint]) -> bool {
        self.time.poll(thread::current().id(), &entries(points))
    }

    /// Advances the calling thread's clock to the points.
    pub fn host_waited(&mut self, points: &[StreamPoint]) {
        self.time.wait(thread::current().id(), entries(points));
    }

    /// Whether the points are reached, and their simulated times and the calling thread's are known.
    pub fn is_settled(&self, points: &[StreamPoint]) -> bool {
        let clock = self.time.clock(thread::current().id());
        points.iter().all(|&point| self.is_reached(point) && self.time.end(point.entry).is_some())
            && self.time.end(clock).is_some()
    }

    /// Makes all later operations of the stream wait for the point.
    pub fn wait(&mut self, stream: StreamId, point: StreamPoint) -> Result<()> {
        self.get(stream)?;
        if point.stream != stream && (self.time.is_enabled() || !self.is_reached(point)) {
            self.table.get_mut(stream)?.pending.push(point);
            // The wait is queued as an operation, because the default streams' implicit dependencies must include it.
            self.submit(stream, StreamOp::Wait)?;
        }
        Ok(())
    }

    /// The end of everything that the stream has queued by now.
    pub fn tail(&self, stream: StreamId) -> StreamPoint {
        let (index, entry) = self.table.get(stream).map_or_else(|_| Default::default(), |s| (s.submitted, s.last));
        StreamPoint { stream, index, entry }
    }

    /// The points that synchronising with the stream waits for; for the legacy stream these include all blocking streams.
    pub fn sync_points(&self, stream: StreamId) -> Vec<StreamPoint> {
        let mut points = vec![self.tail(stream)];
        if self.table.get(stream).is_ok_and(|stream| stream.kind == StreamKind::Legacy) {
            points.extend(self.implied(stream).unwrap_or_default());
        }
        points
    }

    /// The ends of all streams of a context.
    pub fn context_tails(&self, context: ContextId) -> Vec<StreamPoint> {
        self.table.iter().filter(|(_, stream)| stream.context == context).map(|(id, _)| self.tail(id)).collect()
    }

    /// The ends of all streams.
    pub fn all_tails(&self) -> Vec<StreamPoint> {
        self.table.iter().map(|(id, _)| self.tail(id)).collect()
    }

    /// Whether the point is reached. Removed streams have reached all their points.
    pub fn is_reached(&self, point: StreamPoint) -> bool {
        self.table.get(point.stream).map_or(true, |stream| stream.done >= point.index)
    }

    /// Streams whose first operation can start, oldest first.
    pub fn ready(&self) -> Vec<StreamId> {
        self.ready_where(|_| true)
    }

    /// Of the streams whose first operation can start, those in which it does not wait for a value, which it may do for ever.
    pub fn ready_to_finish(&self) -> Vec<StreamId> {
        self.ready_where(|op| !op.awaits_value())
    }

    fn ready_where(&self, wanted: impl Fn(&StreamOp) -> bool) -> Vec<StreamId> {
        let ready = |stream: &Stream| {
            let first = stream.queue.front().filter(|item| stream.running.is_none() && wanted(&item.work));
            first.is_some_and(|item| item.after.iter().all(|&point| self.is_reached(point)))
                && self.blocker(stream).is_none()
        };
        self.table.iter().filter(|(_, stream)| ready(stream)).map(|(id, _)| id).collect()
    }

    /// Whether any operation is queued or executing.
    pub fn any_queued(&self) -> bool {
        self.table.iter().any(|(_, stream)| stream.running.is_some() || !stream.queue.is_empty())
    }

    /// The context of a stream, which may be hidden.
    pub fn context_of(&self, stream: StreamId) -> Option<ContextId> {
        self.table.get(stream).ok().map(|stream| stream.context)
    }

    /// Takes the first operation of a stream to execute it now.
    pub fn begin(&mut self, stream: StreamId) -> Option<(ContextId, StreamOp)> {
        let stream = self.table.get_mut(stream).ok()?;
        let item = stream.queue.pop_front()?;
        stream.running = Some(Running { entry: item.entry, order: item.order, awaits_value: item.work.awaits_value() });
        Some((stream.context, item.work))
    }

    /// Puts an operation back that cannot execute yet (a wait for a value).
    pub fn requeue(&mut self, stream: StreamId, work: StreamOp) {
        if let Ok(stream) = self.table.get_mut(stream)
            && let Some(Running { entry, order, .. }) = stream.running.take()
        {
            stream.queue.push_front(Item { work, after: Vec::new(), entry, order });
        }
    }

    /// Index of the operation that [`Streams::begin`] returned.
    pub fn running_index(&self, stream: StreamId) -> u64 {
        self.table.get(stream).map_or(0, |stream| stream.done + 1)
    }

    /// Marks the operation that [`Streams::begin`] returned as done. `moved` are the bytes that it moved if it is a kernel.
    pub fn finish(&mut self, stream: StreamId, moved: MovedBytes) {
        if let Ok(found) = self.table.get_mut(stream) {
            found.done += 1;
            let entry = found.running.take().map(|running| running.entry);
            self.time.executed(entry.unwrap_or_default(), moved);
        }
        self.sweep(stream);
    }

    /// Invalidates the handle; queued operations still run.
    pub fn destroy(&mut self, stream: StreamId) -> Result<()> {
        let (context, kind, last) = self.get(stream).map(|stream| (stream.context, stream.kind, stream.last))?;
        if kind != StreamKind::NonBlocking && self.time.is_enabled() {
            // When the stream is removed depends on the order of execution; the simulated times of streams that wait for it
            // must not.
            let past = self.past.entry(context).or_default();
            *past = self.time.join(vec![*past, last]);
        }
        self.table.get_mut(stream)?.destroyed = true;
        self.sweep(stream);
        Ok(())
    }

    /// Removes all streams of a context at once, with their queued operations. Returns the streams that the program had not
    /// destroyed.
    pub fn drop_context(&mut self, context: ContextId) -> Vec<StreamId> {
        self.past.remove(&context);
        self.connections.forget(context);
        let gone = self.table.remove_where(|_, stream| stream.context == context);
        // They will not be executed, but later entries of the timeline wait for their durations.
        for (_, stream) in &gone {
            let running = stream.running.as_ref().map(|running| running.entry);
            for entry in running.into_iter().chain(stream.queue.iter().map(|item| item.entry)) {
                self.time.executed(entry, MovedBytes::default());
            }
        }
        let left = |stream: &Stream| {
            !stream.destroyed && matches!(stream.kind, StreamKind::Blocking | StreamKind::NonBlocking)
        };
        gone.into_iter().filter(|(_, stream)| left(stream)).map(|(id, _)| id).collect()
    }

    fn sweep(&mut self, id: StreamId) {
        let over = |stream: &Stream| stream.destroyed && stream.running.is_none() && stream.queue.is_empty();
        if self.table.get(id).is_ok_and(over) {
            // Cannot fail: the stream was found above.
            let _ = self.table.remove(id);
        }
    }

    /// Points that an operation of this stream must wait for by the default stream's rules.
    fn implied(&self, stream: StreamId) -> Result<Vec<StreamPoint>> {
        let own = self.table.get(stream)?;
        let others = |wanted: fn(StreamKind) -> bool| {
            let others = self.table.iter().filter(move |(_, other)| other.context == own.context && wanted(other.kind));
            others
                .map(|(id, _)| self.tail(id))
                .filter(|&point| self.time.is_enabled() || !self.is_reached(point))
                .collect()
        };
        Ok(match own.kind {
            StreamKind::NonBlocking => Vec::new(),
            StreamKind::Legacy => others(|kind| matches!(kind, StreamKind::Blocking | StreamKind::PerThread(_))),
            StreamKind::Blocking | StreamKind::PerThread(_) => others(|kind| kind == StreamKind::Legacy),
        })
    }
}

fn entries(points: &[StreamPoint]) -> Vec<EntryId> {
    points.iter().map(|point| point.entry).collect()
}

impl Stream {
    /// Whether all its operations are done.
    pub fn idle(&self) -> bool {
        self.done == self.submitted
    }
}

/// The kind of default stream of the null handle and the two special handles; `None` for others.
pub fn default_stream_kind(stream: StreamId) -> Option<StreamKind> {
    match stream.raw() {
        0 | 1 => Some(StreamKind::Legacy),
        2 => Some(StreamKind::PerThread(std::thread::current().id())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_streams_wait_for_blocking_ones_and_the_other_way_round() {
        let context = ContextId::default();
        let mut streams = Streams::default();
        let blocking = streams.create(context, StreamKind::Blocking);
        let free = streams.create(context, StreamKind::NonBlocking);
        let legacy = streams.default_of(context, StreamKind::Legacy);
        assert_eq!(streams.default_of(context, StreamKind::Legacy), legacy);
        for stream in [blocking, legacy, blocking, free] {
            assert!(streams.submit(stream, StreamOp::Wait).is_ok());
        }
        let mut order = Vec::new();
        while let Some(&stream) = streams.ready().first() {
            assert!(streams.begin(stream).is_some());
            assert!(!streams.ready().contains(&stream));
            streams.finish(stream, MovedBytes::default());
            order.push(stream);
        }
        assert_eq!(order, [blocking, free, legacy, blocking]);
        assert!(streams.get(legacy).is_ok_and(Stream::idle));
    }

    #[test]
    fn destroyed_streams_finish_their_work() {
        let context = ContextId::default();
        let mut streams = Streams::default();
        let [first, second] = [0; 2].map(|_| streams.create(context, StreamKind::NonBlocking));
        let Ok(point) = streams.submit(first, StreamOp::Wait) else { panic!("the stream is there") };
        assert_eq!(streams.wait(second, point), Ok(()));
        assert_eq!(streams.destroy(first), Ok(()));
        assert_eq!(streams.destroy(first), Err(Error::InvalidHandle));
        assert_eq!(streams.ready(), [first]);
        assert!(!streams.is_reached(point));
        assert!(streams.begin(first).is_some());
        streams.finish(first, MovedBytes::default());
        assert!(streams.is_reached(point));
        assert_eq!(streams.ready(), [second]);
        assert_eq!(streams.drop_context(context), [second]);
    }
}
