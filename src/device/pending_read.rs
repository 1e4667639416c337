//! Pending reads: the results of downloads.
//!
//! [`PendingRead`] is a future of the standard library and needs no executor: whatever thread delivers the result wakes the task.
//! `ready_at` has the reads whose results are in memory once a point on a queue is reached.

use super::DeviceError;
use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, lock};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, Wake, Waker};

/// The future of a value that a device delivers later: by default the bytes of a download.
///
/// A thread waits for it by [`PendingRead::wait`], an asynchronous task by `.await`, in any executor, and a caller without
/// either by [`PendingRead::on_ready`]. Dropping it does not end the download.
pub struct PendingRead<T = Vec<u8>>(Pending<T>);

enum Pending<T> {
    /// The result is here.
    Ready(T),
    /// A [`PendingReadSender`] delivers the result.
    Sent(Arc<Slot<T>>),
    /// The result is made of other results or of points.
    Composed(Box<dyn ReadSource<T>>),
    /// The future has returned the result.
    Taken,
}

/// The source of a pending read that no sender delivers.
pub(crate) trait ReadSource<T>: Send {
    /// Whether `wait` would return at once. Polls the device.
    fn is_ready(&self) -> bool;

    /// Blocks until the result is here, or the deadline passes.
    fn wait(self: Box<Self>, deadline: Option<Instant>) -> Result<T, DeviceError>;

    /// Wakes the task once `is_ready` may have become true. Only the last waker has to be woken.
    fn wake(&mut self, waker: &Waker);
}

/// Where a sender puts the result.
#[derive(Debug)]
struct Slot<T> {
    state: Mutex<SlotState<T>>,
    delivered: Condvar,
}

#[derive(Debug)]
struct SlotState<T> {
    result: Option<Result<T, DeviceError>>,
    /// The task that awaits the result.
    waker: Option<Waker>,
}

impl<T> fmt::Debug for PendingRead<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Does not poll the device.
        let state = match &self.0 {
            Pending::Ready(_) => "ready",
            Pending::Sent(slot) if lock(&slot.state).result.is_some() => "ready",
            Pending::Sent(_) | Pending::Composed(_) => "pending",
            Pending::Taken => "taken",
        };
        write!(f, "PendingRead({state})")
    }
}

/// The device's end of a [`PendingRead`]. Dropping it without [`PendingReadSender::send`] fails the read with
/// [`DeviceError::Ended`].
#[derive(Debug)]
pub struct PendingReadSender<T = Vec<u8>>(Option<Arc<Slot<T>>>); // none once it has sent

impl<T> PendingRead<T> {
    /// For devices: a pending read and the sender that completes it.
    pub fn new() -> (PendingReadSender<T>, PendingRead<T>) {
        let state = Mutex::new(SlotState { result: None, waker: None });
        let slot = Arc::new(Slot { state, delivered: Condvar::new() });
        (PendingReadSender(Some(Arc::clone(&slot))), PendingRead(Pending::Sent(slot)))
    }

    /// For devices: a completed read.
    pub fn ready(result: T) -> PendingRead<T> {
        PendingRead(Pending::Ready(result))
    }

    pub(crate) fn from_source(source: impl ReadSource<T> + 'static) -> PendingRead<T> {
        PendingRead(Pending::Composed(Box::new(source)))
    }

    /// Whether [`PendingRead::wait`] would return at once. Polls the device, and does not block.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            Pending::Ready(_) | Pending::Taken => true,
            Pending::Sent(slot) => lock(&slot.state).result.is_some(),
            Pending::Composed(source) => source.is_ready(),
        }
    }

    /// Blocks until the result is delivered, the queue fails, or the deadline passes (`None`: no deadline).
    ///
    /// # Errors
    /// The queue's failure; [`DeviceError::Ended`] when the queue was dropped; [`DeviceError::Deadline`] when the deadline
    /// passes first.
    pub fn wait(self, deadline: Option<Instant>) -> Result<T, DeviceError> {
        match self.0 {
            Pending::Ready(result) => Ok(result),
            Pending::Sent(slot) => slot.wait(deadline),
            Pending::Composed(source) => source.wait(deadline),
            Pending::Taken => Err(TAKEN),
        }
    }

    /// Wakes the task once `is_ready` may have become true. Only the last waker is woken.
    pub(crate) fn register(&mut self, waker: &Waker) {
        match &mut self.0 {
            Pending::Ready(_) | Pending::Taken => {}
            Pending::Sent(slot) => match &mut lock(&slot.state).waker {
                Some(last) => last.clone_from(waker),
                none => *none = Some(waker.clone()),
            },
            Pending::Composed(source) => source.wake(waker),
        }
    }

    /// Calls `callback` once with the result: at once if it is here, else on the thread that delivers it. That may be a thread of a
    /// device, or any thread inside a call of this crate, so the callback must not wait for anything, take a lock that is held
    /// around such a call, or submit work: it hands the result over. A panic in it is logged.
    pub fn on_ready(self, callback: impl FnOnce(Result<T, DeviceError>) + Send + 'static)
    where
        T: Send + 'static,
    {
        let task = CallbackTask { woken: Mutex::new(Woken::No), read: Mutex::new(Some((self, Box::new(callback)))) };
        Arc::new(task).run();
    }
}

/// The error of a read whose future has returned the result before.
const TAKEN: DeviceError = DeviceError::Misuse("a pending read was awaited after its result");

/// Nothing borrows from the result while it is delivered.
impl<T> Unpin for PendingRead<T> {}

impl<T> Future for PendingRead<T> {
    type Output = Result<T, DeviceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Registered first: a result that arrives between the two calls wakes the task.
        self.register(context.waker());
        if !self.is_ready() {
            return Poll::Pending;
        }
        let read = std::mem::replace(&mut *self, PendingRead(Pending::Taken));
        Poll::Ready(read.wait(Some(sync::now())))
    }
}

/// The task of [`PendingRead::on_ready`]: each wake-up polls the read on the thread that wakes it.
struct CallbackTask<T> {
    woken: Mutex<Woken>,
    /// Locked by the thread that polls; none once the callback was called.
    read: Mutex<Option<(PendingRead<T>, ReadCallback<T>)>>,
}

type ReadCallback<T> = Box<dyn FnOnce(Result<T, DeviceError>) + Send>;

/// Whether a thread polls the read of a [`CallbackTask`], and whether the task was woken meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    No,
    Polling,
    Again,
}

impl<T: Send + 'static> CallbackTask<T> {
    /// Polls the read until no wake-up is left. A wake-up from inside a poll, or during the poll of another thread, is left to the
    /// thread that polls.
    fn run(self: Arc<Self>) {
        let mut woken = lock(&self.woken);
        if *woken != Woken::No {
            *woken = Woken::Again;
            return;
        }
        loop {
            *woken = Woken::Polling;
            drop(woken);
            self.poll();
            woken = lock(&self.woken);
            if *woken == Woken::Polling {
                *woken = Woken::No;
                return;
            }
        }
    }

    fn poll(self: &Arc<Self>) {
        let mut slot = lock(&self.read);
        let Some((mut read, callback)) = slot.take() else { return };
        match Pin::new(&mut read).poll(&mut Context::from_waker(&Waker::from(Arc::clone(self)))) {
            Poll::Ready(result) => {
                drop(slot);
                // A panic would end the device's thread that delivers the result.
                if catch_unwind(AssertUnwindSafe(|| callback(result))).is_err() {
                    log::error!("the callback of a pending read panicked");
                }
            }
            Poll::Pending => *slot = Some((read, callback)),
        }
    }
}

impl<T: Send + 'static> Wake for CallbackTask<T> {
    fn wake(self: Arc<Self>) {
        self.run();
    }
}

impl<T> Slot<T> {
    fn wait(&self, deadline: Option<Instant>) -> Result<T, DeviceError> {
        let mut slot = lock(&self.state);
        loop {
            if let Some(result) = slot.result.take() {
                return result;
            }
            slot = match deadline {
                None => self.delivered.wait(slot).unpoisoned(),
                Some(at) => {
                    let left = at.saturating_duration_since(sync::now());
                    if left.is_zero() {
                        return Err(DeviceError::Deadline("a download"));
                    }
                    self.delivered.wait_timeout(slot, left).unpoisoned().0
                }
            };
        }
    }

    /// Delivers the result.
    fn deliver(&self, result: Result<T, DeviceError>) {
        let mut state = lock(&self.state);
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        self.delivered.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> PendingReadSender<T> {
    /// Completes the read.
    pub fn send(mut self, result: Result<T, DeviceError>) {
        if let Some(slot) = self.0.take() {
            slot.deliver(result);
        }
    }
}

impl<T> Drop for PendingReadSender<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.deliver(Err(DeviceError::Ended));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dropping_the_sender_fails_the_pending_read() {
        let (tx, read) = PendingRead::<Vec<u8>>::new();
        tx.send(Ok(vec![1]));
        assert!(read.is_ready() && PendingRead::ready(()).is_ready());
        let (tx, read) = PendingRead::<Vec<u8>>::new();
        assert!(!read.is_ready());
        drop(tx);
        assert_eq!(read.wait(Some(Instant::now() + Duration::from_secs(60))), Err(DeviceError::Ended));
    }

    #[test]
    fn a_callback_that_panics_does_not_reach_the_device() {
        let (results, received) = std::sync::mpsc::channel();
        let timeline = crate::device::Timeline::new();
        let read = || PendingRead::at(crate::device::TimelinePoint::new(&timeline, 1), || Ok(1));
        read().on_ready(|result| assert_eq!(result, Ok(2), "a panic that the test expects"));
        read().on_ready(move |result| results.send(result).unwrap());
        timeline.advance(1);
        assert_eq!(received.try_recv(), Ok(Ok(1)));
    }

    #[test]
    fn callbacks_get_the_result_once() {
        let (results, received) = std::sync::mpsc::channel();
        let watch = |read: PendingRead<u32>| {
            let results = results.clone();
            read.on_ready(move |result| results.send(result).unwrap());
        };
        watch(PendingRead::ready(1));
        let (early, read) = PendingRead::new();
        early.send(Ok(2));
        watch(read);
        let (late, read) = PendingRead::new();
        watch(read);
        let (dropped, read) = PendingRead::new();
        watch(read);
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [Ok(1), Ok(2)]);
        late.send(Ok(3));
        drop(dropped);
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [Ok(3), Err(DeviceError::Ended)]);
    }
}
