//! CUDA graphs: the launches of a repeated program as one.
#![allow(unsafe_code)]

use super::core::Core;
use super::events::Stream;
use crate::device::DeviceError;
use cudarc::driver::{result, sys};

/// Work that is launched as one.
#[derive(Debug)]
pub(super) struct Captured(sys::CUgraphExec);

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
        let graph =
            unsafe { result::stream::end_capture(stream.raw()) }.map_err(|e| core.failed("cuStreamEndCapture", e));
        done?;
        let graph = graph?;
        // SAFETY: the graph came from the capture; it is destroyed once, and the executable does not need it.
        let made = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            made
        };
        made.map(Captured).map_err(|e| core.failed("cuGraphInstantiate", e))
    }

    /// Launches it.
    pub(super) fn launch(&self, core: &Core, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive. What the graph's kernels touch is kept by the queue that launches, as for single launches.
        unsafe { result::graph::launch(self.0, stream.raw()) }.map_err(|e| core.failed("cuGraphLaunch", e))
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps what still runs.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
