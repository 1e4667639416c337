//! Streams and events of the driver.
#![allow(unsafe_code)]

use super::context::PrimaryContext;
use super::driver_api::{self, DriverError};
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::sync::Arc;
use std::time::Duration;

/// The sleep between two polls of a thread that waits for a GPU for long.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Whether the work that a call queries is done.
fn query(call: impl Fn() -> Result<(), DriverError>) -> Result<bool, DriverError> {
    driver_api::retry_once(|| match call() {
        Ok(()) => Ok(true),
        Err(DriverError::NOT_READY) => Ok(false),
        Err(e) => Err(e),
    })
}

/// A CUDA stream: work on a device that is executed in the order of submission.
#[derive(Debug)]
pub(super) struct Stream {
    raw: sys::CUstream,
    context: Arc<PrimaryContext>,
}

// SAFETY: the driver allows the use of a stream handle from any thread; it locks internally.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    pub(super) fn new(context: &Arc<PrimaryContext>) -> Result<Stream, DeviceError> {
        context.bind()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the function writes one handle.
        unsafe { driver_api::cuStreamCreate(&raw mut raw, flags) }
            .map(|()| Stream { raw, context: Arc::clone(context) })
            .map_err(|e| context.driver_error("cuStreamCreate", e))
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// The context of its device.
    pub(super) fn context(&self) -> &Arc<PrimaryContext> {
        &self.context
    }

    /// Makes later work on this stream wait until `event` is reached. The event may belong to another device. It must have been
    /// recorded: streams share the hardware's queues, so a stream that waits for work that is submitted later may be in front of
    /// that work.
    pub(super) fn wait_event(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive, because they are borrowed from their owners. There are no flags.
        unsafe { driver_api::cuStreamWaitEvent(self.raw, event.raw, 0) }
            .map_err(|e| self.context.driver_error("cuStreamWaitEvent", e))
    }

    /// Queries whether all work of the stream is done. Does not block.
    pub(super) fn is_idle(&self) -> Result<bool, DeviceError> {
        // SAFETY: the handle is alive.
        query(|| unsafe { driver_api::cuStreamQuery(self.raw) })
            .map_err(|e| self.context.driver_error("cuStreamQuery", e))
    }

    /// Blocks until the stream has no work or its device is lost, whatever else fails: afterwards, no work of it accesses memory that
    /// the caller releases. `notice_hang` is called meanwhile, and marks a hanging device as lost.
    pub(super) fn wait_out(&self, notice_hang: impl Fn()) {
        let mut failed = 0;
        while self.context.lost().is_none() {
            match self.context.bind().and_then(|()| self.is_idle()) {
                Ok(true) => return,
                Ok(false) => failed = 0,
                Err(_) => failed += 1,
            }
            if failed == MAX_FAILED_QUERIES {
                self.context.mark_lost("its streams cannot be queried any more", false);
            }
            notice_hang();
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Queries of a stream that fail in a row before its device counts as lost.
const MAX_FAILED_QUERIES: usize = 100;

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the handle is destroyed once; the driver completes submitted work before it frees the stream.
            let _ = unsafe { driver_api::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A CUDA event: a position in a stream.
#[derive(Debug)]
pub(super) struct Event {
    raw: sys::CUevent,
    context: Arc<PrimaryContext>,
}

// SAFETY: the driver allows the use of an event handle from any thread; it locks internally.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without a time stamp, which is cheaper.
    pub(super) fn new(context: &Arc<PrimaryContext>) -> Result<Event, DeviceError> {
        context.bind()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the function writes one handle.
        unsafe { driver_api::cuEventCreate(&raw mut raw, flags) }
            .map(|()| Event { raw, context: Arc::clone(context) })
            .map_err(|e| context.driver_error("cuEventCreate", e))
    }

    /// Records the event after all work submitted to `stream` so far, a stream of the event's device.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        unsafe { driver_api::cuEventRecord(self.raw, stream.raw()) }
            .map_err(|e| self.context.driver_error("cuEventRecord", e))
    }

    /// The context of its device.
    pub(super) fn context(&self) -> &Arc<PrimaryContext> {
        &self.context
    }

    /// Queries whether all work before the event is done. Does not block. The event's context must be current.
    pub(super) fn is_reached(&self) -> Result<bool, DeviceError> {
        // SAFETY: the handle is alive.
        query(|| unsafe { driver_api::cuEventQuery(self.raw) })
            .map_err(|e| self.context.driver_error("cuEventQuery", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the handle is destroyed once; the driver defers the release while a stream still waits for the event.
            let _ = unsafe { driver_api::cuEventDestroy_v2(self.raw) };
        }
    }
}
