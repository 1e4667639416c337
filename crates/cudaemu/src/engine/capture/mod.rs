//! Stream capture: which streams record into which graph, and what a program may do meanwhile.
//!
//! A capture begins in one stream, its origin. A stream that waits for an event that was recorded in a capturing stream joins the
//! capture (a fork); before the capture ends, the origin must have waited for all that the others recorded (a join). Each
//! capturing stream has a frontier: the nodes that its next one will wait for.
//!
//! What is not allowed invalidates the captures that it concerns: they answer
//! [`StreamCaptureInvalidated`](Error::StreamCaptureInvalidated) until they are ended (CUDA C++ Programming Guide, "Prohibited
//! and Unhandled Operations").

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread::ThreadId;

use crate::error::{Error, Result};
use crate::handle::{EventId, GraphId, NodeId, StreamId};

/// Which calls are forbidden during a capture: `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls of any thread.
    #[default]
    Global,
    /// Unsafe calls of the thread that began it.
    ThreadLocal,
    /// None.
    Relaxed,
}

impl CaptureMode {
    /// From its number.
    pub fn new(raw: u32) -> Result<Self> {
        match raw {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Error::InvalidValue),
        }
    }

    /// Its number.
    pub fn raw(self) -> u32 {
        self as u32
    }
}

/// A capture that was begun and not ended.
#[derive(Debug)]
pub struct Capture {
    /// Its number; never used again.
    pub id: u64,
    /// What it records into.
    pub graph: GraphId,
    /// The graph is the program's own, and stays when the capture fails.
    pub given: bool,
    mode: CaptureMode,
    thread: ThreadId,
    origin: StreamId,
    valid: bool,
    /// The frontier of each stream that takes part.
    streams: BTreeMap<StreamId, Vec<NodeId>>,
    /// What streams recorded since the capture began, beyond what the origin waits for, is found by their last nodes.
    last: BTreeSet<NodeId>,
}

/// How a capture ended.
#[derive(Debug, PartialEq, Eq)]
pub struct EndedCapture {
    /// What it recorded into.
    pub graph: GraphId,
    /// The graph is the program's own.
    pub given: bool,
    /// Why it failed.
    pub result: Result<()>,
}

/// What waiting for an event means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventWait {
    /// Neither side is captured: the stream itself waits.
    Uncaptured,
    /// It was captured: the stream's frontier has grown.
    Captured,
}

/// All captures.
#[derive(Debug, Default)]
pub struct Captures {
    made: u64,
    open: BTreeMap<u64, Capture>,
    streams: BTreeMap<StreamId, u64>,
    /// Events that were last recorded in a capturing stream: the capture and the stream's frontier then.
    events: BTreeMap<EventId, (u64, Vec<NodeId>)>,
    /// What threads exchanged their mode for.
    modes: HashMap<ThreadId, CaptureMode>,
}

impl Captures {
    /// `cuStreamBeginCapture`: the first node waits for `frontier`, nodes that the graph has already.
    pub fn begin(
        &mut self,
        stream: StreamId,
        mode: CaptureMode,
        thread: ThreadId,
        graph: GraphId,
        given: Option<Vec<NodeId>>,
    ) -> Result<()> {
        if self.streams.contains_key(&stream) {
            return Err(Error::IllegalState);
        }
        self.made += 1;
        let id = self.made;
        let (given, frontier) = (given.is_some(), given.unwrap_or_default());
        let streams = BTreeMap::from([(stream, frontier)]);
        let last = BTreeSet::new();
        self.open.insert(id, Capture { id, graph, given, mode, thread, origin: stream, valid: true, streams, last });
        self.streams.insert(stream, id);
        Ok(())
    }

    /// The capture that a stream takes part in.
    pub fn of(&self, stream: StreamId) -> Option<&Capture> {
        self.open.get(self.streams.get(&stream)?)
    }

    /// Whether nothing at all is being captured: the case that has to be fast.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn of_mut(&mut self, stream: StreamId) -> Option<&mut Capture> {
        self.open.get_mut(self.streams.get(&stream)?)
    }

    /// Whether a stream records; fails if its capture is lost.
    pub fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        match self.of(stream) {
            None => Ok(false),
            Some(capture) if capture.valid => Ok(true),
            Some(_) => Err(Error::StreamCaptureInvalidated),
        }
    }

    /// Where the next node of a stream goes and what it waits for.
    pub fn frontier(&self, stream: StreamId) -> Result<(GraphId, &[NodeId])> {
        let capture = self.of(stream).ok_or(Error::IllegalState)?;
        match (capture.valid, capture.streams.get(&stream)) {
            (true, Some(frontier)) => Ok((capture.graph, frontier)),
            _ => Err(Error::StreamCaptureInvalidated),
        }
    }

    /// A node was appended to a stream.
    pub fn advance(&mut self, stream: StreamId, node: NodeId) {
        let Some(capture) = self.of_mut(stream) else { return };
        let old = capture.streams.insert(stream, vec![node]);
        for node in old.into_iter().flatten() {
            capture.last.remove(&node);
        }
        capture.last.insert(node);
    }

    /// `cuStreamUpdateCaptureDependencies`: adds to the frontier, or replaces it.
    pub fn update(&mut self, stream: StreamId, nodes: &[NodeId], replace: bool) -> Result<()> {
        self.frontier(stream)?;
        let capture = self.of_mut(stream).ok_or(Error::IllegalState)?;
        let frontier = capture.streams.entry(stream).or_default();
        if replace {
            frontier.clear();
        }
        join(frontier, nodes);
        Ok(())
    }

    /// An event is recorded. True: in a capturing stream, so that nothing is to be queued.
    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<bool> {
        if !self.is_capturing(stream)? {
            self.events.remove(&event);
            return Ok(false);
        }
        let Some(capture) = self.of(stream) else { return Ok(false) };
        let recorded = (capture.id, capture.streams.get(&stream).cloned().unwrap_or_default());
        self.events.insert(event, recorded);
        Ok(true)
    }

    /// An event is gone.
    pub fn forget(&mut self, event: EventId) {
        self.events.remove(&event);
    }

    /// Whether an event was last recorded in a capturing stream. Such an event cannot be asked or waited for by the host; to try
    /// invalidates its capture.
    pub fn check_host_wait(&mut self, event: EventId) -> Result<()> {
        let Some((id, _)) = self.events.get(&event) else { return Ok(()) };
        let id = *id;
        self.invalidate(|capture| capture.id == id);
        Err(Error::CapturedEvent)
    }

    /// A stream waits for an event (`recorded`: it ever was, outside of captures).
    pub fn wait(&mut self, stream: StreamId, event: EventId, recorded: bool) -> Result<EventWait> {
        let own = self.of(stream).map(|capture| (capture.id, capture.valid));
        if matches!(own, Some((_, false))) {
            return Err(Error::StreamCaptureInvalidated);
        }
        let Some((id, nodes)) = self.events.get(&event).cloned() else {
            return match own {
                Some((own, _)) if recorded => {
                    self.invalidate(|capture| capture.id == own);
                    Err(Error::StreamCaptureIsolation)
                }
                Some(_) => Ok(EventWait::Captured),
                None => Ok(EventWait::Uncaptured),
            };
        };
        let capture = self.open.get_mut(&id).ok_or(Error::CapturedEvent)?;
        if !capture.valid {
            return Err(Error::StreamCaptureInvalidated);
        }
        match own {
            Some((own, _)) if own != id => {
                self.invalidate(|capture| capture.id == own || capture.id == id);
                return Err(Error::StreamCaptureMerge);
            }
            _ => join(capture.streams.entry(stream).or_default(), &nodes),
        }
        self.streams.insert(stream, id);
        Ok(EventWait::Captured)
    }

    /// `cuStreamEndCapture`. `ancestors` gives the nodes, themselves included, that must be done before some nodes of the graph.
    /// An error leaves the capture as it is; a capture that failed is an [`Ended`] that says so.
    pub fn end(
        &mut self,
        stream: StreamId,
        thread: ThreadId,
        ancestors: impl FnOnce(GraphId, &[NodeId]) -> BTreeSet<NodeId>,
    ) -> Result<EndedCapture> {
        let capture = self.of(stream).ok_or(Error::IllegalState)?;
        if capture.origin != stream {
            return Err(Error::StreamCaptureUnmatched);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread {
            return Err(Error::StreamCaptureWrongThread);
        }
        let id = capture.id;
        let capture = self.open.remove(&id).ok_or(Error::IllegalState)?;
        self.streams.retain(|_, in_capture| *in_capture != id);
        let joined = || {
            let reached = ancestors(capture.graph, capture.streams.get(&stream).map_or(&[], Vec::as_slice));
            capture.last.is_subset(&reached)
        };
        let result = match capture.valid {
            false => Err(Error::StreamCaptureInvalidated),
            true if !joined() => Err(Error::StreamCaptureUnjoined),
            true => Ok(()),
        };
        Ok(EndedCapture { graph: capture.graph, given: capture.given, result })
    }

    /// A stream is destroyed. A capture that it takes part in is lost; one that began in it is gone, and that is the graph it recorded.
    pub fn destroy(&mut self, stream: StreamId) -> Option<EndedCapture> {
        let capture = self.of_mut(stream)?;
        capture.valid = false;
        let (id, origin) = (capture.id, capture.origin);
        self.streams.remove(&stream);
        if origin != stream {
            return None;
        }
        self.streams.retain(|_, in_capture| *in_capture != id);
        let capture = self.open.remove(&id)?;
        Some(EndedCapture { graph: capture.graph, given: capture.given, result: Err(Error::StreamCaptureInvalidated) })
    }

    /// The host asks about these streams, or waits for them, or uses something that would: captures that they take part in are lost.
    pub fn invalidate_streams(&mut self, streams: impl IntoIterator<Item = StreamId>, error: Error) -> Result<()> {
        let hit: BTreeSet<u64> = streams.into_iter().filter_map(|stream| self.streams.get(&stream).copied()).collect();
        let lost = hit.iter().any(|id| self.open.get(id).is_some_and(|capture| !capture.valid));
        self.invalidate(|capture| hit.contains(&capture.id));
        match hit.is_empty() {
            true => Ok(()),
            false if lost => Err(Error::StreamCaptureInvalidated),
            false => Err(error),
        }
    }

    /// A call that may wait for the device or take memory from it, and is therefore unsafe during a capture.
    pub fn check_unsafe_call(&mut self, thread: ThreadId) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let mode = self.modes.get(&thread).copied().unwrap_or_default();
        let forbids = |capture: &Capture| match (mode, capture.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            (CaptureMode::Global, CaptureMode::Global) => true,
            _ => capture.thread == thread,
        };
        match self.invalidate(forbids) {
            true => Err(Error::StreamCaptureUnsupported),
            false => Ok(()),
        }
    }

    /// `cuThreadExchangeStreamCaptureMode`: gives the mode before.
    pub fn exchange(&mut self, thread: ThreadId, mode: CaptureMode) -> CaptureMode {
        match mode {
            CaptureMode::Global => self.modes.remove(&thread),
            _ => self.modes.insert(thread, mode),
        }
        .unwrap_or_default()
    }

    /// Invalidates captures; whether there were any.
    pub fn invalidate(&mut self, which: impl Fn(&Capture) -> bool) -> bool {
        let mut any = false;
        for capture in self.open.values_mut().filter(|capture| which(capture)) {
            capture.valid = false;
            any = true;
        }
        any
    }
}

impl Capture {
    /// `CUstreamCaptureStatus`: 1 active, 2 invalidated.
    pub fn status(&self) -> u32 {
        if self.valid { 1 } else { 2 }
    }
}

/// Adds nodes that are not there yet.
fn join(frontier: &mut Vec<NodeId>, nodes: &[NodeId]) {
    for node in nodes {
        if !frontier.contains(node) {
            frontier.push(*node);
        }
    }
}
