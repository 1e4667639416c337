//! Failures that servers tell of after the fact, where they speak 7.0 or a version before: by a status, or a `false`.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::connection::lock;
use crate::device::{DeviceError, Timeline};
use crate::rpc::wire::Command;

/// How a queue fares. Its track has it, and so have the replies that are due, which may outlive the queue.
#[derive(Debug)]
pub(super) struct QueueStatus {
    endpoint: String,
    timeline: OnceLock<Weak<Timeline>>,
    state: Mutex<QueueStatusState>,
}

#[derive(Debug, Default)]
struct QueueStatusState {
    failure: Option<DeviceError>,
    /// The last mark that is known to be reached.
    reached: u64,
    /// Queues whose work waits for a mark of this one, and the last such mark.
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

    /// Why bytes that were read for the queue are not what it asked for.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        lock(&self.state).failure.clone()
    }

    /// The server has gone past mark `seq`. That proves nothing where it has said that it did not do the work.
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

    /// A queue's work waits for mark `seq` of this one: it fails with this one, unless that is known to be reached before.
    pub(super) fn add_dependent(&self, user: &Arc<QueueStatus>, seq: u64) {
        if std::ptr::eq(self, &**user) {
            return;
        }
        let mut state = lock(&self.state);
        if state.reached >= seq {
            return;
        }
        let failure = state.failure.clone();
        if failure.is_none() {
            state.dependents.retain(|(user, _)| user.strong_count() > 0);
            match state.dependents.iter_mut().find(|(known, _)| std::ptr::eq(known.as_ptr(), Arc::as_ptr(user))) {
                Some((_, last)) => *last = seq.max(*last),
                None => state.dependents.push((Arc::downgrade(user), seq)),
            }
        }
        drop(state);
        if let Some(failure) = failure {
            user.fail(&failure);
        }
    }

    /// The queue fails, and all that waits for it with it.
    pub(super) fn fail(&self, error: &DeviceError) {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        state.failure = Some(error.clone());
        let (reached, users) = (state.reached, std::mem::take(&mut state.dependents));
        drop(state);
        if let Some(timeline) = self.timeline() {
            timeline.fail(error.clone());
        }
        let waiting = users.into_iter().filter(|(_, seq)| *seq > reached);
        waiting.filter_map(|(user, _)| user.upgrade()).for_each(|user| user.fail(error));
    }

    /// The server says that it has not done what this queue asked for.
    pub(super) fn fail_refused(&self, command: Command) {
        let (device, call) = (self.endpoint.clone(), command.name());
        self.fail(&DeviceError::Driver { device, call, reason: "the server says that it has not done it".to_owned() });
    }

    /// The server says how a graph of this queue ended: a `ggml_status`, from versions that tell.
    pub(super) fn record_graph_status(&self, status: i8) {
        let why = match status {
            0 => return,
            1 => "it was aborted",
            -2 => "out of memory",
            _ => "a device failed",
        };
        let (device, call) = (self.endpoint.clone(), Command::GraphCompute.name());
        let reason = format!("the server says: {why} (status {status}); its log says more");
        self.fail(&DeviceError::Driver { device, call, reason });
    }
}
