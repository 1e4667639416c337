//! CUDA graphs: captures the launches of a program once and replays them as a single launch (graph capture, graph replay).
//!
//! Capture and replay of one graph replaces a driver call per kernel, whose cost dominates small models.
#![allow(unsafe_code)]

use super::context::DeviceContext;
use super::events::Stream;
use crate::device::DeviceError;
use cudarc::driver::{CudaContext, result, sys};
use std::sync::Arc;

/// An executable CUDA graph (cuGraphExec).
#[derive(Debug)]
pub(super) struct GraphExec {
    raw: sys::CUgraphExec,
    cuda_context: Arc<CudaContext>,
}

// SAFETY: an executable graph may be used from any thread, but not concurrently; the lock of its program serialises launches.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Captures what `work` submits to `stream` into a graph. The work is recorded, not executed.
    pub(super) fn capture(
        context: &DeviceContext,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<GraphExec, DeviceError> {
        // Thread-local capture: with the global mode, unsafe calls of other threads (such as allocations) would fail meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not being captured, because only the calling queue uses it.
        unsafe { result::stream::begin_capture(stream.raw(), mode) }
            .map_err(|e| context.driver_error("cuStreamBeginCapture", e))?;
        let done = work();
        // SAFETY: as above. A capture that began must end here, even if the work failed.
        let graph = unsafe { result::stream::end_capture(stream.raw()) };
        let graph = match graph {
            Ok(graph) => graph,
            // The error of the work is more specific than the error of the invalidated capture.
            Err(e) => return Err(done.err().unwrap_or_else(|| context.driver_error("cuStreamEndCapture", e))),
        };
        // SAFETY: the graph came from the capture and is destroyed once; the executable graph does not refer to it.
        let made = unsafe {
            let made = done.map(|()| result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)));
            let _ = result::graph::destroy(graph);
            made?
        };
        made.map(|raw| GraphExec { raw, cuda_context: Arc::clone(context.cuda_context()) })
            .map_err(|e| context.driver_error("cuGraphInstantiate", e))
    }

    /// Replays the graph: submits all its kernels with one launch.
    pub(super) fn launch(&self, context: &DeviceContext, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive. The launching queue retains the memory that the kernels access, as for single
        // launches.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.map_err(|e| context.driver_error("cuGraphLaunch", e))
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.cuda_context.bind_to_thread().is_ok() {
            // SAFETY: the handle is destroyed once; the driver defers the release until running launches are done.
            let _ = unsafe { result::graph::exec_destroy(self.raw) };
        }
    }
}
