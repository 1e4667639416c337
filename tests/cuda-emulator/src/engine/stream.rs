//! Streams: queues of work, and what their work waits for.

use std::collections::VecDeque;
use std::thread::ThreadId;

use super::Work;
use crate::driver::error::{Error, Result};
use crate::driver::handle::{ContextId, Handle, StreamId, Table};

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
pub struct Point {
    /// The stream.
    pub stream: StreamId,
    /// How much of its work has to be done.
    pub index: u64,
}

/// Work in a queue.
#[derive(Debug)]
struct Item {
    /// What to do.
    work: Work,
    /// Points of other streams that must be reached first.
    after: Vec<Point>,
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
    pending: Vec<Point>,
    submitted: u64,
    done: u64,
    /// Its first work is being done now.
    running: bool,
    /// The program destroyed it; it goes when its work is done.
    destroyed: bool,
}

/// All streams.
#[derive(Debug, Default)]
pub struct Streams {
    table: Table<StreamId, Stream>,
    made: u64,
}

impl Streams {
    /// A new stream.
    pub fn create(&mut self, context: ContextId, kind: StreamKind, priority: i32) -> StreamId {
        self.made += 1;
        self.table.insert(Stream {
            context,
            kind,
            priority: priority.clamp(super::stream::HIGHEST, 0),
            id: self.made,
            queue: VecDeque::new(),
            pending: Vec::new(),
            submitted: 0,
            done: 0,
            running: false,
            destroyed: false,
        })
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

    /// Appends work. A blocking stream's work waits for what the legacy stream has by now, and the other way round.
    pub fn submit(&mut self, stream: StreamId, work: Work) -> Result<Point> {
        let after = self.implied(stream)?;
        let target = self.table.get_mut(stream)?;
        let mut item = Item { work, after: std::mem::take(&mut target.pending) };
        item.after.extend(after);
        target.queue.push_back(item);
        target.submitted += 1;
        let point = Point { stream, index: target.submitted };
        Ok(point)
    }

    /// All later work of the stream waits for the point.
    pub fn wait(&mut self, stream: StreamId, point: Point) -> Result<()> {
        self.get(stream)?;
        if point.stream != stream && !self.reached(point) {
            self.table.get_mut(stream)?.pending.push(point);
            // The wait takes a place in the queue: what the default streams imply must see it.
            self.submit(stream, Work::Wait)?;
        }
        Ok(())
    }

    /// The end of all that the stream has by now.
    pub fn end(&self, stream: StreamId) -> Point {
        Point { stream, index: self.table.get(stream).map_or(0, |stream| stream.submitted) }
    }

    /// What a synchronisation with the stream waits for: with the legacy stream, that is all blocking streams too.
    pub fn ends(&self, stream: StreamId) -> Vec<Point> {
        let mut points = vec![self.end(stream)];
        if self.table.get(stream).is_ok_and(|stream| stream.kind == StreamKind::Legacy) {
            points.extend(self.implied(stream).unwrap_or_default());
        }
        points
    }

    /// The ends of all streams of a context.
    pub fn ends_of(&self, context: ContextId) -> Vec<Point> {
        self.table.iter().filter(|(_, stream)| stream.context == context).map(|(id, _)| self.end(id)).collect()
    }

    /// The ends of all streams.
    pub fn ends_of_all(&self) -> Vec<Point> {
        self.table.iter().map(|(id, _)| self.end(id)).collect()
    }

    /// Whether the point is reached. The streams that are gone have done all they had.
    pub fn reached(&self, point: Point) -> bool {
        self.table.get(point.stream).map_or(true, |stream| stream.done >= point.index)
    }

    /// Streams whose first work can begin, oldest first.
    pub fn ready(&self) -> Vec<StreamId> {
        let ready = |stream: &Stream| {
            let first = stream.queue.front();
            !stream.running && first.is_some_and(|item| item.after.iter().all(|&point| self.reached(point)))
        };
        self.table.iter().filter(|(_, stream)| ready(stream)).map(|(id, _)| id).collect()
    }

    /// Whether some work is being done now.
    pub fn any_running(&self) -> bool {
        self.table.iter().any(|(_, stream)| stream.running)
    }

    /// Takes the first work of a stream, to be done now.
    pub fn begin(&mut self, stream: StreamId) -> Option<(ContextId, Work)> {
        let stream = self.table.get_mut(stream).ok()?;
        let item = stream.queue.pop_front()?;
        stream.running = true;
        Some((stream.context, item.work))
    }

    /// Puts work back that cannot be done yet (a value that has not come).
    pub fn put_back(&mut self, stream: StreamId, work: Work) {
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
        self.get(stream)?;
        self.table.get_mut(stream)?.destroyed = true;
        self.sweep(stream);
        Ok(())
    }

    /// Ends all streams of a context at once, with what is queued, and gives those that the program left.
    pub fn drop_context(&mut self, context: ContextId) -> Vec<StreamId> {
        let gone = self.table.take(|_, stream| stream.context == context);
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
    fn implied(&self, stream: StreamId) -> Result<Vec<Point>> {
        let own = self.table.get(stream)?;
        let others = |wanted: fn(StreamKind) -> bool| {
            let others = self.table.iter().filter(move |(_, other)| other.context == own.context && wanted(other.kind));
            others.map(|(id, _)| self.end(id)).filter(|&point| !self.reached(point)).collect()
        };
        Ok(match own.kind {
            StreamKind::NonBlocking => Vec::new(),
            StreamKind::Legacy => others(|kind| matches!(kind, StreamKind::Blocking | StreamKind::PerThread(_))),
            StreamKind::Blocking | StreamKind::PerThread(_) => others(|kind| kind == StreamKind::Legacy),
        })
    }
}

/// The highest priority.
pub const HIGHEST: i32 = -5;

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
pub fn special(stream: StreamId) -> Option<StreamKind> {
    match stream.raw() {
        0 | 1 => Some(StreamKind::Legacy),
        2 => Some(StreamKind::PerThread(std::thread::current().id())),
        _ => None,
    }
}
