//! Failure tracking for queues of servers without the extensions: versions up to 7.0 report a failed request only in a later
//! reply, as a status or a `false`. A failed queue also fails the queues that wait for its marks.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::device::{DeviceError, Timeline};
use crate::poison::lock;
use crate::rpc::wire::RpcCommand;

/// Failure state of a queue. Shared by the queue's marks and by outstanding replies, which may outlive the queue.
#[derive(Debug)]
pub(super) struct QueueStatus {
    endpoint: String,
    timeline: OnceLock<Weak<Timeline>>,
    state: Mutex<QueueStatusState>,
}

#[derive(Debug, Default)]
struct QueueStatusState {
    failure: Option<DeviceError>,
    /// Last mark for which a completion was observed.
    reached: u64,
    /// Queues that depend on a mark of this queue, each with its last such mark.
    dependents: Vec<(Weak<QueueStatus>, u64)>,
}

impl QueueStatus {
    pub(super) fn new(endpoint: &str) -> Arc<QueueStatus> {
        Arc::new(QueueStatus { endpoint: endpoint.to_owned(), timeline: OnceLock::new(), state: Mutex::default() })
    }

    pub(super) fn set_timeline(&self, timeline: &Arc<Timeline>) {
        self.timeline.get_or_init(|| Arc::downgrade(timeline));
    }

    pub(super) fn timeline(&self) -> Option<Arc<Timeline>> {
        self.timeline.get().and_then(Weak::upgrade)
    }

    /// The failure of the queue. Bytes that were read for a failed queue are invalid.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        lock(&self.state).failure.clone()
    }

    /// Records that the server has processed all messages before mark `seq`. If it has reported a failure before, the work was
    /// not done, and the mark does not count as reached.
    pub(super) fn record_reached(&self, seq: u64) {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        state.reached = state.reached.max(seq);
        drop(state);
        if let Some(timeline) = self.timeline() {
            timeline.advance(seq);
        }
    }

    /// Makes `dependent` fail with this queue, because its work waits for mark `seq` of this queue. Does nothing if that mark
    /// was already reached.
    pub(super) fn add_dependent(&self, dependent: &Arc<QueueStatus>, seq: u64) {
        if std::ptr::eq(self, &**dependent) {
            return;
        }
        let mut state = lock(&self.state);
        if state.reached >= seq {
            return;
        }
        let failure = state.failure.clone();
        if failure.is_none() {
            state.dependents.retain(|(dependent, _)| dependent.strong_count() > 0);
            match state
                .dependents
                .iter_mut()
                .find(|(existing, _)| std::ptr::eq(existing.as_ptr(), Arc::as_ptr(dependent)))
            {
                Some((_, last)) => *last = seq.max(*last),
                None => state.dependents.push((Arc::downgrade(dependent), seq)),
            }
        }
        drop(state);
        if let Some(failure) = failure {
            dependent.fail(&failure);
        }
    }

    /// Fails the queue and its dependents.
    pub(super) fn fail(&self, error: &DeviceError) {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        state.failure = Some(error.clone());
        let (reached, dependents) = (state.reached, std::mem::take(&mut state.dependents));
        drop(state);
        if let Some(timeline) = self.timeline() {
            timeline.fail(error.clone());
        }
        let waiting = dependents.into_iter().filter(|(_, seq)| *seq > reached);
        waiting.filter_map(|(dependent, _)| dependent.upgrade()).for_each(|dependent| dependent.fail(error));
    }

    /// Fails the queue because the server replied that it did not carry out `command`.
    pub(super) fn fail_refused(&self, command: RpcCommand) {
        let (device, call) = (self.endpoint.clone(), command.name());
        self.fail(&DeviceError::Driver {
            device,
            call,
            reason: "the server reports that it did not carry out the command".to_owned(),
        });
    }

    /// Handles the `ggml_status` of a graph of this queue, which versions that reply to GRAPH_COMPUTE send.
    pub(super) fn record_graph_status(&self, status: i8) {
        let cause = match status {
            0 => return,
            1 => "it was aborted",
            -2 => "out of memory",
            _ => "a device failed",
        };
        let (device, call) = (self.endpoint.clone(), RpcCommand::GraphCompute.name());
        let reason = format!("the server reports: {cause} (status {status}); see its log for details");
        self.fail(&DeviceError::Driver { device, call, reason });
    }
}
