//! Stream capture: calls on a capturing stream append graph nodes instead of queueing work. `engine/capture` tracks which
//! streams capture.

use std::thread;

use super::graph::{CopyRequest, GraphNode};
use super::launch::LaunchRequest;
use super::{Driver, DriverState, StateGuard};
use crate::bytecode;
use crate::engine::{CaptureMode, StreamKind, StreamOp};
use crate::error::{Error, Result};
use crate::handle::{ContextId, GraphId, NodeId, StreamId};

/// Result of `cuStreamGetCaptureInfo`.
#[derive(Debug, Default)]
pub struct CaptureInfo {
    /// `CUstreamCaptureStatus`: 0 none, 1 active, 2 invalidated.
    pub status: u32,
    /// Number of the capture, unique in the process.
    pub id: u64,
    /// The graph that receives the nodes, while the capture is active.
    pub graph: GraphId,
    /// Address of an array of the nodes that the next node will depend on. The driver owns the array; it is valid until the
    /// next call that changes the stream's capture.
    pub nodes: u64,
    /// Number of nodes in the array.
    pub count: usize,
}

impl DriverState {
    /// `cuStreamBeginCapture`, and `cuStreamBeginCaptureToGraph` with a graph and the nodes that the first captured node
    /// depends on.
    pub fn begin_capture(&mut self, stream: StreamId, mode: u32, given: Option<(GraphId, Vec<NodeId>)>) -> Result<()> {
        let stream = self.resolve_stream(stream)?;
        let mode = CaptureMode::new(mode)?;
        if self.streams.get(stream)?.kind == StreamKind::Legacy {
            return Err(Error::StreamCaptureUnsupported);
        }
        if self.captures.of(stream).is_some() {
            return Err(Error::IllegalState);
        }
        let (graph, given) = match given {
            Some((graph, nodes)) => {
                let found = self.graphs.get(graph)?;
                nodes.iter().try_for_each(|&node| found.payload(node).map(drop))?;
                (graph, Some(nodes))
            }
            None => (self.graphs.create(), None),
        };
        self.captures.begin(stream, mode, thread::current().id(), graph, given)
    }

    /// State of a stream's capture, for `cuStreamIsCapturing` and `cuStreamGetCaptureInfo`.
    pub fn capture_info(&mut self, stream: StreamId) -> Result<CaptureInfo> {
        let id = match crate::engine::default_stream_kind(stream) {
            Some(kind) => {
                let context = self.current()?;
                self.streams.default_of(context, kind)
            }
            None => stream,
        };
        let own = self.streams.get(id)?;
        if own.kind == StreamKind::Legacy && !self.implicated(own.context).is_empty() {
            // A query fails without invalidating the capture; using the legacy stream would invalidate it.
            return Err(Error::StreamCaptureImplicit);
        }
        let Some(capture) = self.captures.of(id) else { return Ok(CaptureInfo::default()) };
        let (status, number) = (capture.status(), capture.id);
        let (graph, nodes) = self.captures.frontier(id).unwrap_or_default();
        let (nodes, count) = (nodes.as_ptr().expose_provenance() as u64, nodes.len());
        Ok(CaptureInfo { status, id: number, graph, nodes, count })
    }

    /// `cuStreamUpdateCaptureDependencies`
    pub fn update_capture(&mut self, stream: StreamId, nodes: &[NodeId], replace: bool) -> Result<()> {
        let stream = self.resolve_stream(stream)?;
        let (graph, _) = self.captures.frontier(stream)?;
        let graph = self.graphs.get(graph)?;
        nodes.iter().try_for_each(|&node| graph.payload(node).map(drop))?;
        self.captures.update(stream, nodes, replace)
    }

    /// Capturing streams of a context with which the legacy default stream synchronises implicitly.
    fn implicated(&self, context: ContextId) -> Vec<StreamId> {
        if self.captures.is_empty() {
            return Vec::new();
        }
        let streams = self.streams.of_context(context).filter(|(id, stream)| {
            matches!(stream.kind, StreamKind::Blocking | StreamKind::PerThread(_)) && self.captures.of(*id).is_some()
        });
        streams.map(|(id, _)| id).collect()
    }

    /// Fails if the stream is the legacy default stream and a stream that it would synchronise with is capturing.
    pub(super) fn check_legacy(&mut self, stream: StreamId) -> Result<()> {
        let own = self.streams.get(stream)?;
        if own.kind != StreamKind::Legacy {
            return Ok(());
        }
        let implicated = self.implicated(own.context);
        self.captures.invalidate_streams(implicated, Error::StreamCaptureImplicit)
    }

    /// Fails, and invalidates the capture, if the host queries or waits for a capturing stream.
    pub(super) fn check_host_wait(&mut self, stream: StreamId) -> Result<()> {
        self.captures.invalidate_streams([stream], Error::StreamCaptureUnsupported)
    }

    /// Fails, and invalidates the captures, if the host waits for a context with capturing streams.
    pub fn check_host_wait_context(&mut self, context: ContextId) -> Result<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        let streams: Vec<StreamId> = self.streams.of_context(context).map(|(id, _)| id).collect();
        self.captures.invalidate_streams(streams, Error::StreamCaptureUnsupported)
    }

    /// Fails for a call that is unsafe during a capture (`CUstreamCaptureMode`).
    pub(super) fn check_unsafe_call(&mut self) -> Result<()> {
        self.captures.check_unsafe_call(thread::current().id())
    }

    /// Appends a node to a capturing stream.
    pub(super) fn append(&mut self, stream: StreamId, node: GraphNode) -> Result<NodeId> {
        let (graph, after) = self.captures.frontier(stream)?;
        let after = after.to_vec();
        let node = self.graphs.add(graph, &after, node)?;
        self.captures.advance(stream, node);
        Ok(node)
    }

    /// Appends a stream operation as a node. An operation that no node kind can hold fails and invalidates the capture.
    pub(super) fn capture(&mut self, stream: StreamId, work: StreamOp) -> Result<()> {
        let context = self.streams.get(stream)?.context;
        match self.node_of(work, context) {
            Ok(node) => self.append(stream, node).map(drop),
            Err(error) => {
                let id = self.captures.of(stream).map(|capture| capture.id);
                self.captures.invalidate(|capture| Some(capture.id) == id);
                Err(error)
            }
        }
    }
}

impl Driver {
    /// `cuStreamEndCapture`: ends the capture and returns its graph.
    pub fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let DriverState { captures, graphs, .. } = &mut *state;
        let ended = captures.end(stream, thread::current().id(), |graph, nodes| {
            graphs.get(graph).map(|graph| graph.ancestors(nodes)).unwrap_or_default()
        })?;
        drop(state);
        match ended.result {
            Ok(()) => Ok(ended.graph),
            Err(error) => {
                if !ended.given {
                    self.destroy_graph(ended.graph)?;
                }
                Err(error)
            }
        }
    }

    /// Captures a kernel launch.
    pub(super) fn capture_launch(
        &self,
        mut state: StateGuard<'_>,
        request: LaunchRequest,
        stream: StreamId,
        params: impl FnOnce(&bytecode::Function) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let node = self.kernel_node(&mut state, request, params)?;
        if node.context() != Some(state.streams.get(stream)?.context) {
            return Err(Error::InvalidHandle);
        }
        state.append(stream, node).map(drop)
    }

    /// Captures a copy.
    pub(super) fn capture_copy(&self, mut state: StateGuard<'_>, request: CopyRequest, stream: StreamId) -> Result<()> {
        let context = state.streams.get(stream)?.context;
        let node = self.copy_node(request, context)?;
        state.append(stream, node).map(drop)
    }
}
