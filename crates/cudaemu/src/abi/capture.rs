//! Stream capture: `cuStreamBeginCapture` to `cuStreamEndCapture`, and queries of a capture's state. The logic is in
//! `driver/capture.rs`.

use std::ffi::c_uint;
use std::thread;

use super::ffi_guard::{In, InOut, Out, api, with_state};
use crate::driver::driver;
use crate::engine::CaptureMode;
use crate::error::{Error, Result};
use crate::handle::{GraphId, Handle, NodeId, StreamId};

api! {
    fn cuStreamBeginCapture_v2(stream: StreamId, mode: c_uint) {
        with_state(|_, state| state.begin_capture(stream, mode, None))
    }

    fn cuStreamBeginCaptureToGraph(
        stream: StreamId,
        graph: GraphId,
        nodes: In<NodeId>,
        _edges: In<u64>,
        count: usize,
        mode: c_uint,
    ) {
        let nodes = nodes.read_array(count)?;
        with_state(|_, state| state.begin_capture(stream, mode, Some((graph, nodes))))
    }

    fn cuStreamEndCapture(stream: StreamId, graph: Out<GraphId>) {
        graph.check_not_null()?;
        let ended = driver()?.end_capture(stream);
        graph.set(*ended.as_ref().unwrap_or(&GraphId::default()));
        ended.map(drop)
    }

    fn cuStreamIsCapturing(stream: StreamId, status: Out<c_uint>) {
        status.write_with(|| with_state(|_, state| state.capture_info(stream).map(|info| info.status)))
    }

    fn cuStreamGetCaptureInfo(stream: StreamId, status: Out<c_uint>, id: Out<u64>) {
        info(stream, status, id, Out::new(0), Out::new(0), Out::new(0))
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: StreamId,
        status: Out<c_uint>,
        id: Out<u64>,
        graph: Out<GraphId>,
        nodes: Out<u64>,
        count: Out<usize>,
    ) {
        info(stream, status, id, graph, nodes, count)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: StreamId,
        status: Out<c_uint>,
        id: Out<u64>,
        graph: Out<GraphId>,
        nodes: Out<u64>,
        edges: Out<u64>,
        count: Out<usize>,
    ) {
        // Null edge data: all dependencies of a capture are full ones, for which the driver reports no data. Only edges that are added
        // to a graph directly can be programmatic.
        edges.set(0);
        info(stream, status, id, graph, nodes, count)
    }

    fn cuStreamUpdateCaptureDependencies(stream: StreamId, nodes: In<NodeId>, count: usize, flags: c_uint) {
        update(stream, nodes, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2(
        stream: StreamId,
        nodes: In<NodeId>,
        _edges: In<u64>,
        count: usize,
        flags: c_uint,
    ) {
        update(stream, nodes, count, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: InOut<c_uint>) {
        mode.exchange(|mode| {
            let mode = CaptureMode::new(mode)?;
            with_state(|_, state| Ok(state.captures.exchange(thread::current().id(), mode).raw()))
        })
    }
}

fn info(
    stream: StreamId,
    status: Out<c_uint>,
    id: Out<u64>,
    graph: Out<GraphId>,
    nodes: Out<u64>,
    count: Out<usize>,
) -> Result<()> {
    status.check_not_null()?;
    let info = with_state(|_, state| state.capture_info(stream))?;
    status.set(info.status);
    // An invalidated capture reports its status only.
    if info.status == 1 {
        id.set(info.id);
        if !info.graph.is_null() {
            graph.set(info.graph);
        }
        nodes.set(info.nodes);
        count.set(info.count);
    }
    Ok(())
}

fn update(stream: StreamId, nodes: In<NodeId>, count: usize, flags: c_uint) -> Result<()> {
    let nodes = nodes.read_array(count)?;
    // Flags: 0 adds dependencies, 1 replaces them.
    if flags > 1 {
        return Err(Error::InvalidValue);
    }
    with_state(|_, state| state.update_capture(stream, &nodes, flags == 1))
}
