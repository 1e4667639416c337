//! Opening queues and ordering them by marks: OPEN_QUEUE, WAIT, NOTIFY_REACHED.

use super::completions::Completions;
use super::queues::MarkState;
use super::session::ExtendedSession;
use crate::rpc::server::log_limits::LogKind;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::watched_queue::WatchedQueue;
use crate::rpc::server::tenants::Resource;
use crate::rpc::wire::ext::{DeviceFault, NotifyReached, OpenQueue, Wait};

impl ExtendedSession<'_> {
    /// Opens a queue. If its device cannot create it, or the server or the client's tenant has too many, the queue is open and
    /// has failed.
    pub(super) fn open_queue(&mut self, request: &OpenQueue) -> Result<(), SessionError> {
        let &OpenQueue { queue: number, device } = request;
        let handle = self.resources.device(device)?;
        self.queues.check_can_open(number)?;
        let server = self.resources.server;
        let created = match server.tenants.reserve(self.resources.peer, Resource::Queues) {
            Ok(permit) => {
                let (watch, memory) = (self.connection.watch(), self.connection.memory());
                match WatchedQueue::open(&**handle, &self.resources.budget, watch, memory) {
                    Ok(queue) => Ok((queue, permit)),
                    Err(e) => Err(DeviceFault::from(&e)),
                }
            }
            Err(reason) => {
                let peer = self.resources.peer;
                let text = format_args!("{peer}: cannot open queue {number}: {reason}");
                server.logs.log(peer, LogKind::RefusedQueue, text);
                Err(DeviceFault::new(reason.to_string()))
            }
        };
        let completions = Completions::new(number, &self.writer, self.notifier.shared(), server.config.reply_timeout);
        Ok(self.queues.insert(number, device, created, completions)?)
    }

    /// Makes a queue wait for a mark of another queue. If that queue has failed before the mark, this queue fails as well.
    pub(super) fn wait_for_mark(&mut self, request: &Wait) -> Result<(), SessionError> {
        let mark_state = self.queues.get(request.other_queue)?.mark_state(request.number)?;
        let queue = self.queues.get(request.queue)?;
        match mark_state {
            _ if queue.completions.has_failed() || request.other_queue == request.queue => Ok(()),
            MarkState::Reached => Ok(()),
            MarkState::Pending(point) => Ok(queue.submit(|queue| queue.wait(&point)).map(drop)?),
            MarkState::Lost => {
                let reason = format!(
                    "queue {} has failed before its mark {}, which this queue waits for",
                    request.other_queue, request.number
                );
                Ok(queue.completions.fail(DeviceFault::new(reason))?)
            }
        }
    }

    /// Sends MARK_REACHED once the mark is reached. A mark of a failed queue is never reported: the client has received
    /// QUEUE_FAILED.
    pub(super) fn notify_reached(&mut self, request: &NotifyReached) -> Result<(), SessionError> {
        let queue = self.queues.get(request.queue)?;
        match queue.mark_state(request.number)? {
            _ if queue.completions.has_failed() => Ok(()),
            MarkState::Reached => Ok(queue.completions.report_mark(request.number, None)?),
            MarkState::Pending(point) => Ok(queue.completions.report_mark(request.number, Some(point))?),
            MarkState::Lost => Ok(()),
        }
    }
}
