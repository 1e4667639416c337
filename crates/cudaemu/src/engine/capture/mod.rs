//! Stream capture: tracks which streams record into which graph, and which calls a capture forbids.
//!
//! A capture begins in one stream, its origin. A stream that waits for an event recorded in a capturing stream joins the
//! capture (a fork). Before the capture ends, the origin must wait for everything that the other streams recorded (a join).
//! Each capturing stream has a frontier: the nodes that its next node will depend on.
//!
//! A forbidden call invalidates the captures that it concerns. They return
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
    /// Unsafe calls of the thread that began the capture.
    ThreadLocal,
    /// No calls.
    Relaxed,
}

impl CaptureMode {
    /// From its value in the C API.
    pub fn new(raw: u32) -> Result<Self> {
        match raw {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Error::InvalidValue),
        }
    }

    /// The value in the C API.
    pub fn raw(self) -> u32 {
        self as u32
    }
}

/// An active or invalidated capture: begun and not ended.
#[derive(Debug)]
pub struct Capture {
    /// Unique number, never reused.
    pub id: u64,
    /// The graph that receives the nodes.
    pub graph: GraphId,
    /// The program created the graph, so it stays when the capture fails.
    pub given: bool,
    mode: CaptureMode,
    thread: ThreadId,
    origin: StreamId,
    valid: bool,
    /// The frontier of each capturing stream.
    streams: BTreeMap<StreamId, Vec<NodeId>>,
    /// The last nodes that the streams have recorded. Comparing them with the ancestors of the origin's frontier finds work
    /// that was never joined.
    last: BTreeSet<NodeId>,
}

/// Result of ending a capture.
#[derive(Debug, PartialEq, Eq)]
pub struct EndedCapture {
    /// The graph that received the nodes.
    pub graph: GraphId,
    /// The program created the graph.
    pub given: bool,
    /// Why the capture failed.
    pub result: Result<()>,
}

/// Effect of an event wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventWait {
    /// Neither stream nor event is captured: the stream itself waits.
    Uncaptured,
    /// The wait was captured: it extended the stream's frontier.
    Captured,
}

/// All captures.
#[derive(Debug, Default)]
pub struct Captures {
    made: u64,
    open: BTreeMap<u64, Capture>,
    streams: BTreeMap<StreamId, u64>,
    /// Events whose last record was in a capturing stream: number of the capture, and the stream's frontier at that time.
    events: BTreeMap<EventId, (u64, Vec<NodeId>)>,
    /// Modes that threads have set by `cuThreadExchangeStreamCaptureMode`.
    modes: HashMap<ThreadId, CaptureMode>,
}

impl Captures {
    /// `cuStreamBeginCapture`: the first node depends on `frontier`, nodes that the graph contains already.
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

    /// The capture that a stream belongs to.
    pub fn of(&self, stream: StreamId) -> Option<&Capture> {
        self.open.get(self.streams.get(&stream)?)
    }

    /// Whether there is no capture: the common case, which must be fast.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn of_mut(&mut self, stream: StreamId) -> Option<&mut Capture> {
        self.open.get_mut(self.streams.get(&stream)?)
    }

    /// Whether a stream is capturing; fails if its capture is invalidated.
    pub fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        match self.of(stream) {
            None => Ok(false),
            Some(capture) if capture.valid => Ok(true),
            Some(_) => Err(Error::StreamCaptureInvalidated),
        }
    }

    /// The graph for a stream's next node, and the nodes that it will depend on.
    pub fn frontier(&self, stream: StreamId) -> Result<(GraphId, &[NodeId])> {
        let capture = self.of(stream).ok_or(Error::IllegalState)?;
        match (capture.valid, capture.streams.get(&stream)) {
            (true, Some(frontier)) => Ok((capture.graph, frontier)),
            _ => Err(Error::StreamCaptureInvalidated),
        }
    }

    /// Records that a node was appended to a stream.
    pub fn advance(&mut self, stream: StreamId, node: NodeId) {
        let Some(capture) = self.of_mut(stream) else { return };
        let old = capture.streams.insert(stream, vec![node]);
        for node in old.into_iter().flatten() {
            capture.last.remove(&node);
        }
        capture.last.insert(node);
    }

    /// `cuStreamUpdateCaptureDependencies`: extends or replaces the frontier.
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

    /// Records an event. Returns true if the stream is capturing, so that nothing must be queued.
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

    /// Forgets a destroyed event.
    pub fn forget(&mut self, event: EventId) {
        self.events.remove(&event);
    }

    /// Fails if the event's last record was in a capturing stream: the host cannot query or wait for such an event, and the
    /// attempt invalidates the capture.
    pub fn check_host_wait(&mut self, event: EventId) -> Result<()> {
        let Some((id, _)) = self.events.get(&event) else { return Ok(()) };
        let id = *id;
        self.invalidate(|capture| capture.id == id);
        Err(Error::CapturedEvent)
    }

    /// Makes a stream wait for an event; `recorded`: whether the event was ever recorded outside of captures.
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

    /// `cuStreamEndCapture`. `ancestors` returns the given nodes of the graph with everything that they depend on. An error
    /// leaves the capture as it is. A failed capture ends too; its [`EndedCapture`] holds the reason.
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

    /// Removes a destroyed stream. Invalidates the capture that it belongs to. A capture that began in it ends and is returned,
    /// with its graph.
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

    /// Invalidates the captures of these streams, because the host queries them or waits for them, or makes a call that implies
    /// it.
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

    /// Fails for a call that may wait for the device or allocate memory, if a capture forbids such unsafe calls; invalidates
    /// that capture.
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

    /// `cuThreadExchangeStreamCaptureMode`: returns the previous mode.
    pub fn exchange(&mut self, thread: ThreadId, mode: CaptureMode) -> CaptureMode {
        match mode {
            CaptureMode::Global => self.modes.remove(&thread),
            _ => self.modes.insert(thread, mode),
        }
        .unwrap_or_default()
    }

    /// Invalidates captures; returns whether there were any.
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

/// Appends the nodes that the frontier does not contain yet.
fn join(frontier: &mut Vec<NodeId>, nodes: &[NodeId]) {
    for node in nodes {
        if !frontier.contains(node) {
            frontier.push(*node);
        }
    }
}
