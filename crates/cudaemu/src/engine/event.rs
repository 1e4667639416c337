//! Events: a point of a stream, and the time at which it was reached.

use super::StreamPoint;
use crate::handle::ContextId;

/// An event.
#[derive(Clone, Debug)]
pub struct Event {
    /// The context that it belongs to.
    pub context: ContextId,
    /// Whether it records times (not `CU_EVENT_DISABLE_TIMING`).
    pub timing: bool,
    /// Point of its last record.
    pub recorded: Option<StreamPoint>,
    /// Real time at which the point was reached, in microseconds since the driver started.
    pub time: Option<f64>,
}

impl Event {
    /// An event that was never recorded.
    pub fn new(context: ContextId, timing: bool) -> Self {
        Self { context, timing, recorded: None, time: None }
    }
}
