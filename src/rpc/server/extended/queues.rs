//! The queues that a client has open, by its own numbers, and the moments that it has marked on them.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::completions::Completions;
use super::error::ExtendedError;
use crate::device::{DeviceError, Point, Queue};
use crate::rpc::server::peers::Outbound;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::transfer_tokens::Receiver;
use crate::rpc::transport::TransportError;
use crate::rpc::wire::ext::Fault;

/// Queues that a session may have open.
const MAX_QUEUES: usize = 256;

/// Marks of a session's queues that may be unreached.
const MAX_MARKS: usize = 1 << 16;

/// With so many marks, a queue forgets those that are reached.
const FEW_MARKS: usize = 64;

/// An open queue. It stays open when it has failed: only its client closes it.
pub(super) struct OpenQueue {
    number: u32,
    /// The position of its device.
    pub(super) device: u32,
    /// `None`: it could not be made.
    queue: Option<Box<dyn Queue>>,
    pub(super) completions: Completions,
    /// For what it is to receive from other servers, and to send to them: made for the first of that.
    pub(super) inbound: Option<Receiver>,
    pub(super) outbound: Option<Outbound>,
    marks: VecDeque<(u64, Point)>,
    last: Option<u64>,
    /// The first mark that was made when the queue had failed.
    lost: Option<u64>,
}

/// What waits for the queue ends with it. That is no failure, so nothing is sent.
impl Drop for OpenQueue {
    fn drop(&mut self) {
        self.completions.close();
    }
}

/// What is known of a mark.
pub(super) enum Moment {
    Reached,
    At(Point),
    /// It was made when the queue had failed.
    Never,
}

impl OpenQueue {
    /// Submits work, unless the queue has failed. A failure of the work fails the queue, not the session. `None`: nothing was
    /// submitted, or it failed.
    pub(super) fn submit<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<Option<T>, TransportError> {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.completions.failed()) else { return Ok(None) };
        match work(&mut **queue) {
            Ok(done) => Ok(Some(done)),
            Err(e) => self.completions.fail(Fault::from(&e)).map(|()| None),
        }
    }

    /// Whether all submitted work is done for certain; after a failure that is not known.
    fn is_done(&mut self) -> bool {
        !self.completions.failed() && self.queue.as_mut().is_none_or(|queue| queue.mark().poll() == Ok(true))
    }

    /// Waits until all submitted work is done, also that of a queue that has failed: its device may still be working. If the wait
    /// fails, the device's queue is dropped with its work.
    pub(super) fn wait_idle(&mut self, until: Instant) -> Result<(), TransportError> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let Err(e) = queue.mark().wait(Some(until)) else { return Ok(()) };
        self.queue = None;
        if self.completions.failed() { Ok(()) } else { self.completions.fail(Fault::from(&e)) }
    }

    /// Forgets the marks that are reached, and all marks once one of them has failed.
    fn forget_marks(&mut self) -> Result<(), TransportError> {
        while self.marks.pop_front_if(|(_, point)| point.poll() == Ok(true)).is_some() {}
        if let Some((first, point)) = self.marks.front()
            && let Err(e) = point.poll()
        {
            self.lost = Some(*first);
            self.marks.clear();
            if !self.completions.failed() {
                self.completions.fail(Fault::from(&e))?;
            }
        }
        Ok(())
    }

    /// Gives a number to the moment after all work so far.
    fn mark(&mut self, number: u64) -> Result<(), SessionError> {
        if let Some(last) = self.last.filter(|&last| number <= last) {
            return Err(ExtendedError::MarkOrder { number, last }.into());
        }
        self.last = Some(number);
        match self.submit(|queue| Ok(queue.mark()))? {
            Some(point) => self.marks.push_back((number, point)),
            None => _ = self.lost.get_or_insert(number),
        }
        Ok(())
    }

    /// A mark by its number.
    pub(super) fn moment(&self, number: u64) -> Result<Moment, ExtendedError> {
        if self.last.is_some_and(|last| number <= last) {
            if self.lost.is_some_and(|lost| number >= lost) {
                return Ok(Moment::Never);
            }
            match self.marks.binary_search_by_key(&number, |(number, _)| *number) {
                Ok(at) => {
                    return Ok(self.marks.get(at).map_or(Moment::Reached, |(_, point)| Moment::At(point.clone())));
                }
                // Before all that are kept: it was reached and forgotten.
                Err(0) => return Ok(Moment::Reached),
                Err(_) => {}
            }
        }
        Err(ExtendedError::NoMark { queue: self.number, number })
    }
}

/// The open queues.
#[derive(Default)]
pub(super) struct Queues {
    open: HashMap<u32, OpenQueue>,
    /// One was closed whose device may be at its work yet.
    loose: bool,
}

impl Queues {
    /// Whether another one may be opened under this number.
    pub(super) fn admit(&self, number: u32) -> Result<(), ExtendedError> {
        if self.open.contains_key(&number) {
            return Err(ExtendedError::QueueOpen(number));
        }
        if self.open.len() >= MAX_QUEUES { Err(ExtendedError::Queues(MAX_QUEUES)) } else { Ok(()) }
    }

    /// Opens one, which has failed already where there is no queue.
    pub(super) fn insert(
        &mut self,
        number: u32,
        device: u32,
        queue: Result<Box<dyn Queue>, DeviceError>,
        mut completions: Completions,
    ) -> Result<(), TransportError> {
        let queue = match queue {
            Ok(queue) => Some(queue),
            Err(e) => {
                completions.fail(Fault::from(&e))?;
                None
            }
        };
        let open = OpenQueue {
            number,
            device,
            queue,
            completions,
            inbound: None,
            outbound: None,
            marks: VecDeque::new(),
            last: None,
            lost: None,
        };
        self.open.insert(number, open);
        Ok(())
    }

    pub(super) fn close(&mut self, number: u32) -> Result<(), ExtendedError> {
        let mut open = self.open.remove(&number).ok_or(ExtendedError::Queue(number))?;
        self.loose |= !open.is_done();
        Ok(())
    }

    /// Marks the moment after all that a queue was sent so far.
    pub(super) fn mark(&mut self, queue: u32, number: u64) -> Result<(), SessionError> {
        if self.get(queue)?.marks.len() >= FEW_MARKS {
            self.get(queue)?.forget_marks()?;
            if self.marks() >= MAX_MARKS {
                self.iter().try_for_each(OpenQueue::forget_marks)?;
            }
            if self.marks() >= MAX_MARKS {
                return Err(ExtendedError::Marks(MAX_MARKS).into());
            }
        }
        self.get(queue)?.mark(number)
    }

    fn marks(&self) -> usize {
        self.open.values().map(|open| open.marks.len()).sum()
    }

    pub(super) fn get(&mut self, number: u32) -> Result<&mut OpenQueue, ExtendedError> {
        self.open.get_mut(&number).ok_or(ExtendedError::Queue(number))
    }

    /// Waits for the work of all queues. True when no device works for this session for certain: never again in this session once a
    /// queue has failed, or was closed before its work was done.
    pub(super) fn rest(&mut self, until: Instant) -> Result<bool, TransportError> {
        let mut certain = !self.loose;
        for open in self.open.values_mut() {
            // `None` where the queue has failed, also during this wait.
            certain &= open.submit(|queue| queue.mark().wait(Some(until)))?.is_some();
        }
        Ok(certain)
    }

    /// One that works on memory of a device.
    pub(super) fn on(&mut self, number: u32, lies_on: u32) -> Result<&mut OpenQueue, ExtendedError> {
        let open = self.get(number)?;
        let device = open.device;
        if device == lies_on { Ok(open) } else { Err(ExtendedError::QueueDevice { queue: number, device, lies_on }) }
    }

    /// Whether there is no more than one.
    pub(super) fn alone(&self) -> bool {
        self.open.len() < 2
    }

    pub(super) fn iter(&mut self) -> impl Iterator<Item = &mut OpenQueue> {
        self.open.values_mut()
    }
}
