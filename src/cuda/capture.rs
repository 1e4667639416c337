//! CUDA graphs: the launches of a repeated program as one.
#![allow(unsafe_code)]

use super::core::Core;
use super::events::Stream;
use crate::device::DeviceError;
use cudarc::driver::{CudaContext, result, sys};
use std::sync::Arc;

/// Work that is launched as one.
#[derive(Debug)]
pub(super) struct Captured {
    raw: sys::CUgraphExec,
    context: Arc<CudaContext>,
}

// SAFETY: an executable graph may be used from any thread, one at a time: its program's lock sees to that.
unsafe impl Send for Captured {}

impl Captured {
    /// What `work` submits to `stream`, instead of doing it.
    pub(super) fn of(
        core: &Core,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Captured, DeviceError> {
        // Only this thread's calls are watched: other sessions go on.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and not captured already: it belongs to the one queue that calls.
        unsafe { result::stream::begin_capture(stream.raw(), mode) }
            .map_err(|e| core.failed("cuStreamBeginCapture", e))?;
        let done = work();
        // SAFETY: as above; a capture that began ends here, whatever came of the work.
        let graph = unsafe { result::stream::end_capture(stream.raw()) };
        let graph = match graph {
            Ok(graph) => graph,
            // What failed in the work says more than that its capture cannot be ended.
            Err(e) => return Err(done.err().unwrap_or_else(|| core.failed("cuStreamEndCapture", e))),
        };
        // SAFETY: the graph came from the capture; it is destroyed once, and the executable does not need it.
        let made = unsafe {
            let made = done.map(|()| result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)));
            let _ = result::graph::destroy(graph);
            made?
        };
        made.map(|raw| Captured { raw, context: Arc::clone(core.context()) })
            .map_err(|e| core.failed("cuGraphInstantiate", e))
    }

    /// Launches it.
    pub(super) fn launch(&self, core: &Core, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive. What the graph's kernels touch is kept by the queue that launches, as for single launches.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.map_err(|e| core.failed("cuGraphLaunch", e))
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: destroyed once; the driver keeps what still runs.
            let _ = unsafe { result::graph::exec_destroy(self.raw) };
        }
    }
}
