//! Events: points of streams, with the time when they were reached.

use super::StreamPoint;
use crate::handle::ContextId;

/// An event.
#[derive(Clone, Debug)]
pub struct Event {
    /// Whose it is.
    pub context: ContextId,
    /// Its time counts (not `CU_EVENT_DISABLE_TIMING`).
    pub timing: bool,
    /// Where it was last recorded.
    pub recorded: Option<StreamPoint>,
    /// When that was reached, in microseconds since the driver began.
    pub time: Option<f64>,
}

impl Event {
    /// One that was not recorded yet.
    pub fn new(context: ContextId, timing: bool) -> Self {
        Self { context, timing, recorded: None, time: None }
    }
}
