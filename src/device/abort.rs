//! Ending a queue from another thread than its submitter's.

use std::fmt;
use std::sync::Arc;

/// Capability: ends one queue from any thread. [`Queue::aborter`](super::Queue::aborter) returns it. Clones end the same queue.
///
/// The submitter of a queue may be blocked in a call of the queue, or in a wait for one of its points. A server calls
/// [`QueueAborter::abort`] when the client of such a queue has gone.
#[derive(Clone)]
pub struct QueueAborter(Arc<dyn Fn() + Send + Sync>);

impl QueueAborter {
    /// For devices: `abort` ends the queue. It must not block, and may be called more than once, also after the queue was
    /// dropped.
    pub fn new(abort: impl Fn() + Send + Sync + 'static) -> QueueAborter {
        QueueAborter(Arc::new(abort))
    }

    /// Does what dropping the queue does: discards the work that has not started, and stops a running program at its next
    /// node, also one that runs inline; a GPU finishes the launches that its stream has got. Every blocked call of the queue, and
    /// every wait for one of its points or reads, returns an error. Reads that have not started, and the points of a remote
    /// queue, fail at once, while earlier work of the queue may still use its memory.
    pub fn abort(&self) {
        (self.0)();
    }
}

impl fmt::Debug for QueueAborter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueueAborter")
    }
}
