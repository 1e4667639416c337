//! The queue of a device: submitting work, waiting for it, and what a failure loses.

use super::Device;
use crate::guard::lock;
use fanout::device::{DeviceError, Queue, TimelinePoint};

/// The queue of a device, for its streams and for the host's synchronous accesses alike: a run that waited for transfers on another
/// queue would cost a switch of threads for each token. In return, a stream that waits for a silent server holds up all of them.
#[derive(Default)]
pub(super) struct SharedQueue {
    /// The generation of the link that `queue` belongs to.
    generation: u64,
    /// The number of the current queue: tells a ticket of a closed queue from one of this queue.
    number: u64,
    queue: Option<Box<dyn Queue>>,
    /// Pieces of work that were submitted to all queues, and how many of them are known to be done.
    submitted: u64,
    done: u64,
    /// The last piece for which `synchronize` waits. Writes by the host are none: for the host they are done, and hosts synchronise
    /// before each input of a run, which would be as many round trips.
    awaited: u64,
    loads: PendingLoads,
}

impl SharedQueue {
    pub(super) fn close(&mut self) {
        (self.queue, self.number, self.loads) = (None, self.number + 1, PendingLoads::None);
    }
}

/// Whether uploads of weights may be incomplete. If the queue fails then, weights are lost, too.
#[derive(Default)]
enum PendingLoads {
    #[default]
    None,
    /// The last work is such an upload.
    Last,
    Before(TimelinePoint),
}

/// Kinds of work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Work,
    /// The host writes computed memory.
    Write,
    Load,
}

/// A piece of work, and the queue that it was submitted to.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    queue: u64,
    work: u64,
}

/// Whether an error is the caller's mistake, which does not stick to a queue.
fn is_mistake(error: &DeviceError) -> bool {
    matches!(error, DeviceError::Misuse(_) | DeviceError::Source(_))
}

impl Device {
    /// Submits work to the queue, which the first work opens. After a failure the next work opens another queue.
    pub(crate) fn submit<T>(
        &self,
        submit: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<(T, Ticket), DeviceError> {
        self.submit_work(Kind::Work, submit)
    }

    /// Submits a write of memory to the queue. A load writes weights, or what else is not computed anew.
    pub(crate) fn submit_write<T>(
        &self,
        is_load: bool,
        submit: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<(T, Ticket), DeviceError> {
        self.submit_work(if is_load { Kind::Load } else { Kind::Write }, submit)
    }

    fn submit_work<T>(
        &self,
        kind: Kind,
        submit: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<(T, Ticket), DeviceError> {
        let mut guard = lock(&self.queue);
        let shared = &mut *guard;
        // Under the lock, or the queue of a newer link would be closed.
        let (fanout, generation) = self.fanout()?;
        if shared.generation != generation {
            shared.close();
            shared.generation = generation;
        }
        let queue = match &mut shared.queue {
            Some(queue) => queue,
            closed => {
                closed.insert(fanout.queue(&self.budget).inspect_err(|error| self.report_loss(generation, error))?)
            }
        };
        match (kind, &shared.loads) {
            (Kind::Load, _) => shared.loads = PendingLoads::Last,
            (_, PendingLoads::Last) => shared.loads = PendingLoads::Before(queue.mark()),
            _ => {}
        }
        // Also if it fails: a part of it may have been submitted.
        shared.submitted += 1;
        let ticket = Ticket { queue: shared.number, work: shared.submitted };
        if kind == Kind::Work {
            shared.awaited = shared.submitted;
        }
        let submitted = submit(&mut **queue);
        submitted.map(|value| (value, ticket)).inspect_err(|error| self.close_failed(shared, error))
    }

    /// Handles the result of waiting for work: all that was submitted before it is done, too, or its queue has failed.
    pub(crate) fn waited<T>(&self, ticket: Ticket, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        let mut shared = lock(&self.queue);
        if shared.number == ticket.queue {
            match &result {
                Ok(_) => shared.done = shared.done.max(ticket.work),
                Err(error) => self.close_failed(&mut shared, error),
            }
        }
        drop(shared);
        result
    }

    /// Closes the queue if it has failed. What was submitted to it may not have run, so all memory that it writes counts as lost.
    /// Under the lock of the queue: no work is submitted to the next one before that. The memory of a lost server counts as lost when
    /// the server is back.
    fn close_failed(&self, shared: &mut SharedQueue, error: &DeviceError) {
        let Some(queue) = shared.queue.as_mut().filter(|_| !is_mistake(error)) else { return };
        let is_own_loss = self.server.is_some_and(|server| server.is_lost_by(error));
        // Some errors end only what they are the result of, such as a lack of memory.
        if !is_own_loss && queue.mark().failure().is_none() {
            return;
        }
        let loads = match &shared.loads {
            PendingLoads::None => false,
            PendingLoads::Last => true,
            PendingLoads::Before(point) => !matches!(point.poll(), Ok(true)),
        };
        let generation = shared.generation;
        shared.close();
        if is_own_loss {
            return self.report_loss(generation, error);
        }
        for buffer in self.live_buffers() {
            if loads || !buffer.holds_weights() {
                buffer.lose_all(error);
            }
        }
        if let (true, Some(server)) = (loads, self.server) {
            // Weights are loaded only into the memory of a new connection.
            server.lost(error);
        }
    }

    /// A point after all work that was submitted so far; `None` if all of it is done.
    pub(crate) fn mark(&self) -> Option<(TimelinePoint, Ticket)> {
        self.mark_unless_done(|shared| shared.submitted)
    }

    /// A point after the work for which `synchronize` waits; `None` if it is done.
    pub(crate) fn mark_awaited(&self) -> Option<(TimelinePoint, Ticket)> {
        self.mark_unless_done(|shared| shared.awaited)
    }

    fn mark_unless_done(&self, last: impl Fn(&SharedQueue) -> u64) -> Option<(TimelinePoint, Ticket)> {
        let mut guard = lock(&self.queue);
        let shared = &mut *guard;
        let is_done = shared.done >= last(shared);
        let queue = shared.queue.as_mut().filter(|_| !is_done)?;
        Some((queue.mark(), Ticket { queue: shared.number, work: shared.submitted }))
    }
}
