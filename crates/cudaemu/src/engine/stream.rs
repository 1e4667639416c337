//! Streams: queues of work, and what their work waits for.

use std::collections::{BTreeMap, VecDeque};
use std::thread::{self, ThreadId};

use super::StreamOp;
use super::simulated_time::{OpCost, Picos, Timeline};
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle, HandleTable, StreamId};

/// How a stream stands to the legacy default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The legacy default stream: waits for all blocking streams, and they wait for it.
    Legacy,
    /// The default stream of one thread; it is a blocking one.
    PerThread(ThreadId),
    /// Made with `CU_STREAM_DEFAULT`.
    Blocking,
    /// Made with `CU_STREAM_NON_BLOCKING`.
    NonBlocking,
}

/// A point of a stream: the end of its `index`-th work, from 1. Index 0 is always reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPoint {
    /// The stream.
    pub stream: StreamId,
    /// How much of its work has to be done.
    pub index: u64,
    /// When that is, in simulated time; 0 without.
    pub time: Picos,
}

/// Work in a queue.
#[derive(Debug)]
struct Item {
    /// What to do.
    work: StreamOp,
    /// Points of other streams that must be reached first.
    after: Vec<StreamPoint>,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    /// Whose it is.
    pub context: ContextId,
    /// Its kind.
    pub kind: StreamKind,
    /// Priority, clamped: 0 is the lowest, -5 the highest.
    pub priority: i32,
    /// `cuStreamGetId`
    pub id: u64,
    /// Work that has not begun.
    queue: VecDeque<Item>,
    /// Points that the next work has to wait for.
    pending: Vec<StreamPoint>,
    submitted: u64,
    done: u64,
    /// Simulated end of all that was submitted.
    time: Picos,
    /// Its first work is being done now.
    running: bool,
    /// The program destroyed it; it goes when its work is done.
    destroyed: bool,
}

/// All streams.
#[derive(Debug, Default)]
pub struct Streams {
    table: HandleTable<StreamId, Stream>,
    made: u64,
    /// Simulated time.
    pub time: Timeline,
    /// Simulated ends of streams that are gone, for default streams of their context that have to wait for them.
    past: BTreeMap<ContextId, Picos>,
}

impl Streams {
    /// None, with this clock.
    pub fn new(time: Timeline) -> Self {
        Self { time, ..Self::default() }
    }

    /// A new stream.
    pub fn create(&mut self, context: ContextId, kind: StreamKind, priority: i32) -> StreamId {
        self.made += 1;
        self.table.insert(Stream {
            context,
            kind,
            priority: priority.clamp(super::stream::HIGHEST_PRIORITY, 0),
            id: self.made,
            queue: VecDeque::new(),
            pending: Vec::new(),
            submitted: 0,
            done: 0,
            time: 0,
            running: false,
            destroyed: false,
        })
    }

    /// A stream of the driver's own: programs cannot name it, nothing waits for it implicitly, and it goes when its work is done.
    pub fn create_internal(&mut self, context: ContextId) -> StreamId {
        let id = self.create(context, StreamKind::NonBlocking, 0);
        if let Ok(stream) = self.table.get_mut(id) {
            stream.destroyed = true;
        }
        id
    }

    /// A stream that the program has not destroyed.
    pub fn get(&self, stream: StreamId) -> Result<&Stream> {
        self.table.get(stream).ok().filter(|stream| !stream.destroyed).ok_or(Error::InvalidHandle)
    }

    /// The default stream of a context: the legacy one, or that of this thread (made if it is not there yet).
    pub fn default_of(&mut self, context: ContextId, kind: StreamKind) -> StreamId {
        let found = self.table.iter().find(|(_, stream)| stream.context == context && stream.kind == kind);
        match found {
            Some((id, _)) => id,
            None => self.create(context, kind, 0),
        }
    }

    /// Appends work that takes no simulated time.
    pub fn submit(&mut self, stream: StreamId, work: StreamOp) -> Result<StreamPoint> {
        self.submit_costing(stream, work, Vec::new(), OpCost::Nothing)
    }

    /// The same for work that also waits for points.
    pub fn submit_after(&mut self, stream: StreamId, work: StreamOp, after: Vec<StreamPoint>) -> Result<StreamPoint> {
        self.submit_costing(stream, work, after, OpCost::Nothing)
    }

    /// Appends work that waits for points. A blocking stream's work waits for what the legacy stream has by now, and the other way
    /// round.
    pub fn submit_costing(
        &mut self,
        stream: StreamId,
        work: StreamOp,
        mut after: Vec<StreamPoint>,
        cost: OpCost,
    ) -> Result<StreamPoint> {
        let implied = self.implied(stream)?;
        after.append(&mut self.table.get_mut(stream)?.pending);
        let ready = self.start(stream, after.iter().chain(&implied))?;
        self.time.reset_polling(thread::current().id());
        let time = if self.time.is_enabled() { self.time.schedule(cost, ready) } else { 0 };
        after.extend(implied);
        after.retain(|&point| point.stream != stream && !self.is_reached(point));
        let target = self.table.get_mut(stream)?;
        target.queue.push_back(Item { work, after });
        target.submitted += 1;
        target.time = time;
        Ok(StreamPoint { stream, index: target.submitted, time })
    }

    /// When work that is submitted now could begin in simulated time.
    fn start<'a>(&self, stream: StreamId, after: impl Iterator<Item = &'a StreamPoint>) -> Result<Picos> {
        if !self.time.is_enabled() {
            return Ok(0);
        }
        let own = self.table.get(stream)?;
        let past = match own.kind {
            StreamKind::NonBlocking => 0,
            _ => self.past.get(&own.context).copied().unwrap_or(0),
        };
        let host = self.time.now(thread::current().id());
        Ok(after.map(|point| point.time).fold(own.time.max(past).max(host), Picos::max))
    }

    /// The thread launches a kernel or a graph, which keeps it busy for a while.
    pub fn host_launched(&mut self) {
        self.time.launch(thread::current().id());
    }

    /// The thread asks for points that are reached: whether they are by its clock too.
    pub fn host_queried(&mut self, points: &[StreamPoint]) -> bool {
        let latest = points.iter().map(|point| point.time).max();
        self.time.poll(thread::current().id(), latest.unwrap_or(0))
    }

    /// The thread has waited for points.
    pub fn host_waited(&mut self, points: &[StreamPoint]) {
        let latest = points.iter().map(|point| point.time).max();
        self.time.advance_to(thread::current().id(), latest.unwrap_or(0));
    }

    /// All later work of the stream waits for the point.
    pub fn wait(&mut self, stream: StreamId, point: StreamPoint) -> Result<()> {
        self.get(stream)?;
        if point.stream != stream && (self.time.is_enabled() || !self.is_reached(point)) {
            self.table.get_mut(stream)?.pending.push(point);
            // The wait takes a place in the queue: what the default streams imply must see it.
            self.submit(stream, StreamOp::Wait)?;
        }
        Ok(())
    }

    /// The end of all that the stream has by now.
    pub fn tail(&self, stream: StreamId) -> StreamPoint {
        let (index, time) = self.table.get(stream).map_or((0, 0), |stream| (stream.submitted, stream.time));
        StreamPoint { stream, index, time }
    }

    /// What a synchronisation with the stream waits for: with the legacy stream, that is all blocking streams too.
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

    /// Whether the point is reached. The streams that are gone have done all they had.
    pub fn is_reached(&self, point: StreamPoint) -> bool {
        self.table.get(point.stream).map_or(true, |stream| stream.done >= point.index)
    }

    /// Streams whose first work can begin, oldest first.
    pub fn ready(&self) -> Vec<StreamId> {
        let ready = |stream: &Stream| {
            let first = stream.queue.front();
            !stream.running && first.is_some_and(|item| item.after.iter().all(|&point| self.is_reached(point)))
        };
        self.table.iter().filter(|(_, stream)| ready(stream)).map(|(id, _)| id).collect()
    }

    /// Whether some work waits or is being done.
    pub fn any_queued(&self) -> bool {
        self.table.iter().any(|(_, stream)| stream.running || !stream.queue.is_empty())
    }

    /// All streams of a context.
    pub fn of_context(&self, context: ContextId) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.table.iter().filter(move |(_, stream)| stream.context == context)
    }

    /// The context of a stream, which may be one of the driver's own.
    pub fn context_of(&self, stream: StreamId) -> Option<ContextId> {
        self.table.get(stream).ok().map(|stream| stream.context)
    }

    /// Takes the first work of a stream, to be done now.
    pub fn begin(&mut self, stream: StreamId) -> Option<(ContextId, StreamOp)> {
        let stream = self.table.get_mut(stream).ok()?;
        let item = stream.queue.pop_front()?;
        stream.running = true;
        Some((stream.context, item.work))
    }

    /// Puts work back that cannot be done yet (a value that has not come).
    pub fn requeue(&mut self, stream: StreamId, work: StreamOp) {
        if let Ok(stream) = self.table.get_mut(stream) {
            stream.running = false;
            stream.queue.push_front(Item { work, after: Vec::new() });
        }
    }

    /// Index of the work that [`Streams::begin`] gave.
    pub fn running_index(&self, stream: StreamId) -> u64 {
        self.table.get(stream).map_or(0, |stream| stream.done + 1)
    }

    /// The work that [`Streams::begin`] gave is done.
    pub fn finish(&mut self, stream: StreamId) {
        if let Ok(found) = self.table.get_mut(stream) {
            found.running = false;
            found.done += 1;
        }
        self.sweep(stream);
    }

    /// Ends the handle; what is queued still runs.
    pub fn destroy(&mut self, stream: StreamId) -> Result<()> {
        let (context, kind, time) = self.get(stream).map(|stream| (stream.context, stream.kind, stream.time))?;
        if kind != StreamKind::NonBlocking && self.time.is_enabled() {
            // When the stream itself goes depends on the order of execution; what waits for it must not.
            let past = self.past.entry(context).or_default();
            *past = time.max(*past);
        }
        self.table.get_mut(stream)?.destroyed = true;
        self.sweep(stream);
        Ok(())
    }

    /// Ends all streams of a context at once, with what is queued, and gives those that the program left.
    pub fn drop_context(&mut self, context: ContextId) -> Vec<StreamId> {
        self.past.remove(&context);
        let gone = self.table.remove_where(|_, stream| stream.context == context);
        let left = |stream: &Stream| {
            !stream.destroyed && matches!(stream.kind, StreamKind::Blocking | StreamKind::NonBlocking)
        };
        gone.into_iter().filter(|(_, stream)| left(stream)).map(|(id, _)| id).collect()
    }

    fn sweep(&mut self, id: StreamId) {
        let over = |stream: &Stream| stream.destroyed && !stream.running && stream.queue.is_empty();
        if self.table.get(id).is_ok_and(over) {
            // It was just found.
            let _ = self.table.remove(id);
        }
    }

    /// Points that work of this stream waits for because of the default stream's rules.
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

/// The highest priority.
pub const HIGHEST_PRIORITY: i32 = -5;

impl Stream {
    /// Whether all its work is done.
    pub fn idle(&self) -> bool {
        self.done == self.submitted
    }

    /// `CU_STREAM_NON_BLOCKING`, or 0.
    pub fn flags(&self) -> u32 {
        u32::from(self.kind == StreamKind::NonBlocking)
    }
}

/// The null handle and the two special ones.
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
        let blocking = streams.create(context, StreamKind::Blocking, 0);
        let free = streams.create(context, StreamKind::NonBlocking, -99);
        let legacy = streams.default_of(context, StreamKind::Legacy);
        assert_eq!(streams.default_of(context, StreamKind::Legacy), legacy);
        assert_eq!(streams.get(free).map(|stream| stream.priority), Ok(HIGHEST_PRIORITY));
        for stream in [blocking, legacy, blocking, free] {
            assert!(streams.submit(stream, StreamOp::Wait).is_ok());
        }
        let mut order = Vec::new();
        while let Some(&stream) = streams.ready().first() {
            assert!(streams.begin(stream).is_some());
            assert!(!streams.ready().contains(&stream));
            streams.finish(stream);
            order.push(stream);
        }
        assert_eq!(order, [blocking, free, legacy, blocking]);
        assert!(streams.get(legacy).is_ok_and(Stream::idle));
    }

    #[test]
    fn destroyed_streams_finish_their_work() {
        let context = ContextId::default();
        let mut streams = Streams::default();
        let [first, second] = [0; 2].map(|_| streams.create(context, StreamKind::NonBlocking, 0));
        let Ok(point) = streams.submit(first, StreamOp::Wait) else { panic!("the stream is there") };
        assert_eq!(streams.wait(second, point), Ok(()));
        assert_eq!(streams.destroy(first), Ok(()));
        assert_eq!(streams.destroy(first), Err(Error::InvalidHandle));
        assert_eq!(streams.ready(), [first]);
        assert!(!streams.is_reached(point));
        assert!(streams.begin(first).is_some());
        streams.finish(first);
        assert!(streams.is_reached(point));
        assert_eq!(streams.ready(), [second]);
        assert_eq!(streams.drop_context(context), [second]);
    }
}
