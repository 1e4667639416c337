//! Open queues of a session, by the numbers that the client gave them, and their marks.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::completions::Completions;
use super::error::ExtendedError;
use crate::device::{DeviceError, Queue, Reservation, TimelinePoint};
use crate::rpc::server::peers::PeerSender;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::watched_queue::WatchedQueue;
use crate::rpc::server::transfer_tokens::Receiver;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::DeviceFault;

/// Limit of open queues per session.
const MAX_QUEUES: usize = 256;

/// Limit of marks that are not reached, over all queues of a session.
const MAX_MARKS: usize = 1 << 16;

/// A queue with at least this many marks prunes the reached ones.
const PRUNE_THRESHOLD: usize = 64;

/// An open queue. A failed queue stays open until the client closes it.
pub(super) struct OpenQueue {
    /// The client's number of the queue.
    number: u32,
    /// Index of its device.
    pub(super) device: u32,
    /// The device queue; `None` if the device could not create it, or if it was dropped after a failed wait.
    queue: Option<WatchedQueue>,
    /// Counts the queue against the limits of queues until its device queue is dropped. `None`: it could not be created.
    _permit: Option<Reservation>,
    pub(super) completions: Completions,
    /// Receives bytes from other servers; created for the first RECEIVE_FROM_PEER.
    pub(super) receiver: Option<Receiver>,
    /// Sends bytes to other servers; created for the first SEND_TO_PEER.
    pub(super) peer_sender: Option<PeerSender>,
    /// Marks that were not reached when they were last polled, in ascending order of their numbers.
    marks: VecDeque<(u64, TimelinePoint)>,
    /// Number of the last mark.
    last_mark: Option<u64>,
    /// First mark that will never be reached, because the queue had failed before it.
    first_lost_mark: Option<u64>,
}

/// Closing a queue cancels its pending completions. That is not a failure, so no notification is sent.
impl Drop for OpenQueue {
    fn drop(&mut self) {
        self.completions.close();
    }
}

/// The state of a mark.
pub(super) enum MarkState {
    Reached,
    /// Not reached when it was last polled. The point is reached together with the mark.
    Pending(TimelinePoint),
    /// Never reached: the queue had failed before it.
    Lost,
}

impl OpenQueue {
    /// Submits work, unless the queue has failed. If `work` fails, the queue fails, and the session continues. Returns `None`
    /// if nothing was submitted or `work` failed.
    pub(super) fn submit<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<Option<T>, TransportError> {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.completions.has_failed()) else { return Ok(None) };
        match work(&mut **queue) {
            Ok(result) => Ok(Some(result)),
            Err(e) => self.completions.fail(DeviceFault::from(&e)).map(|()| None),
        }
    }

    /// Charges an upload of `bytes` bytes, as [`WatchedQueue::charge_upload`]. If that fails, the queue fails. Returns
    /// whether the upload may be submitted.
    pub(super) fn charge_upload(&mut self, bytes: u64, timeout: Duration) -> Result<bool, TransportError> {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.completions.has_failed()) else { return Ok(false) };
        match queue.charge_upload(bytes, timeout) {
            Ok(()) => Ok(true),
            Err(e) => self.completions.fail(DeviceFault::from(&e)).map(|()| false),
        }
    }

    /// Whether all submitted work is done. False after a failure, because the device may still be executing earlier work.
    fn is_done(&mut self) -> bool {
        !self.completions.has_failed() && self.queue.as_mut().is_none_or(|queue| queue.mark().poll() == Ok(true))
    }

    /// Waits until all submitted work is done, also for a failed queue, whose device may still be executing work. If the wait
    /// fails, the device queue is dropped together with its work.
    pub(super) fn wait_idle(&mut self, until: Instant) -> Result<(), TransportError> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let Err(e) = queue.mark().wait(Some(until)) else { return Ok(()) };
        self.queue = None;
        if self.completions.has_failed() { Ok(()) } else { self.completions.fail(DeviceFault::from(&e)) }
    }

    /// Removes the marks that are reached. If one has failed, the queue fails and all of its marks are removed.
    fn prune_marks(&mut self) -> Result<(), TransportError> {
        while self.marks.pop_front_if(|(_, point)| point.poll() == Ok(true)).is_some() {}
        if let Some((first, point)) = self.marks.front()
            && let Err(e) = point.poll()
        {
            self.first_lost_mark = Some(*first);
            self.marks.clear();
            if !self.completions.has_failed() {
                self.completions.fail(DeviceFault::from(&e))?;
            }
        }
        Ok(())
    }

    /// Places mark `number` after all work submitted so far.
    fn mark(&mut self, number: u64) -> Result<(), SessionError> {
        if let Some(last) = self.last_mark.filter(|&last| number <= last) {
            return Err(ExtendedError::MarkOrder { number, last }.into());
        }
        self.last_mark = Some(number);
        match self.submit(|queue| Ok(queue.mark()))? {
            Some(point) => self.marks.push_back((number, point)),
            None => _ = self.first_lost_mark.get_or_insert(number),
        }
        Ok(())
    }

    /// The state of mark `number`.
    ///
    /// # Errors
    /// [`ExtendedError::NoMark`] if it was never placed.
    pub(super) fn mark_state(&self, number: u64) -> Result<MarkState, ExtendedError> {
        if self.last_mark.is_some_and(|last| number <= last) {
            if self.first_lost_mark.is_some_and(|lost| number >= lost) {
                return Ok(MarkState::Lost);
            }
            match self.marks.binary_search_by_key(&number, |(number, _)| *number) {
                Ok(at) => {
                    return Ok(self
                        .marks
                        .get(at)
                        .map_or(MarkState::Reached, |(_, point)| MarkState::Pending(point.clone())));
                }
                // It precedes all recorded marks: it was reached and pruned.
                Err(0) => return Ok(MarkState::Reached),
                Err(_) => {}
            }
        }
        Err(ExtendedError::NoMark { queue: self.number, number })
    }
}

/// The open queues of a session.
#[derive(Default)]
pub(super) struct Queues {
    open: HashMap<u32, OpenQueue>,
    /// Whether a queue was closed while its device may still have been executing its work.
    closed_while_busy: bool,
}

impl Queues {
    /// Checks that a queue can be opened under `number`.
    pub(super) fn check_can_open(&self, number: u32) -> Result<(), ExtendedError> {
        if self.open.contains_key(&number) {
            return Err(ExtendedError::QueueAlreadyOpen(number));
        }
        if self.open.len() >= MAX_QUEUES { Err(ExtendedError::TooManyQueues(MAX_QUEUES)) } else { Ok(()) }
    }

    /// Inserts a queue. If it could not be created (`Err`), it is inserted as failed.
    pub(super) fn insert(
        &mut self,
        number: u32,
        device: u32,
        created: Result<(WatchedQueue, Reservation), DeviceFault>,
        mut completions: Completions,
    ) -> Result<(), TransportError> {
        let (queue, permit) = match created {
            Ok((queue, permit)) => (Some(queue), Some(permit)),
            Err(fault) => {
                completions.fail(fault)?;
                (None, None)
            }
        };
        let open = OpenQueue {
            number,
            device,
            queue,
            _permit: permit,
            completions,
            receiver: None,
            peer_sender: None,
            marks: VecDeque::new(),
            last_mark: None,
            first_lost_mark: None,
        };
        self.open.insert(number, open);
        Ok(())
    }

    /// Closes a queue. Its pending completions are dropped.
    pub(super) fn close(&mut self, number: u32) -> Result<(), ExtendedError> {
        let mut open = self.open.remove(&number).ok_or(ExtendedError::NoSuchQueue(number))?;
        self.closed_while_busy |= !open.is_done();
        Ok(())
    }

    /// Places mark `number` after all work that was submitted to a queue so far. Prunes reached marks if there are many.
    pub(super) fn mark(&mut self, queue: u32, number: u64) -> Result<(), SessionError> {
        if self.get(queue)?.marks.len() >= PRUNE_THRESHOLD {
            self.get(queue)?.prune_marks()?;
            if self.mark_count() >= MAX_MARKS {
                self.iter_mut().try_for_each(OpenQueue::prune_marks)?;
            }
            if self.mark_count() >= MAX_MARKS {
                return Err(ExtendedError::TooManyMarks(MAX_MARKS).into());
            }
        }
        self.get(queue)?.mark(number)
    }

    fn mark_count(&self) -> usize {
        self.open.values().map(|open| open.marks.len()).sum()
    }

    pub(super) fn get(&mut self, number: u32) -> Result<&mut OpenQueue, ExtendedError> {
        self.open.get_mut(&number).ok_or(ExtendedError::NoSuchQueue(number))
    }

    /// Waits for the work of all queues. Returns true if no device executes work of this session any more. Returns
    /// false, also for all later calls, once a queue has failed or was closed before its work was done.
    pub(super) fn wait_all_idle(&mut self, until: Instant) -> Result<bool, TransportError> {
        let mut all_idle = !self.closed_while_busy;
        for open in self.open.values_mut() {
            // `None` if the queue has failed, also during this wait.
            all_idle &= open.submit(|queue| queue.mark().wait(Some(until)))?.is_some();
        }
        Ok(all_idle)
    }

    /// Queue `number`, which has to belong to the device with index `buffer_device`.
    ///
    /// # Errors
    /// [`ExtendedError::NoSuchQueue`], [`ExtendedError::WrongQueueDevice`].
    pub(super) fn get_on_device(&mut self, number: u32, buffer_device: u32) -> Result<&mut OpenQueue, ExtendedError> {
        let open = self.get(number)?;
        let device = open.device;
        if device == buffer_device {
            Ok(open)
        } else {
            Err(ExtendedError::WrongQueueDevice { queue: number, device, buffer_device })
        }
    }

    /// Whether at most one queue is open.
    pub(super) fn at_most_one(&self) -> bool {
        self.open.len() < 2
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut OpenQueue> {
        self.open.values_mut()
    }
}
