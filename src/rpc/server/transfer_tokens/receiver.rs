//! Receiver of one queue: writes bytes from other servers to the queue's device, in the order of its RECEIVE_FROM_PEERs.
//!
//! The receiver writes on a device queue of its own. The session's queue cannot write them, because it waits for them, and the
//! connection on which they arrive must not block on the session's queue. The bytes of a RECEIVE_FROM_PEER may be written when
//! the earlier work of the session's queue is done (`ready`), and the session's queue continues when they are written
//! (`completed`). RECEIVE_FROM_PEERs of one queue are processed one at a time: bytes for later ones are buffered.
//!
//! Work is done by the thread that makes it possible. The thread of the source server's connection writes bytes itself if the
//! device is ready for them. This fast path saves a thread switch for the few bytes that are sent per generated token. All
//! waiting for devices and deadlines is left to the receiver's thread.
//!
//! An upload may block, for example on memory that another queue computes in, and the lock of [`ReceiverState`] is held
//! meanwhile. So a receiver is closed without that lock: the close aborts the device queue, which ends the upload, and the
//! thread that holds the lock ends the RECEIVE_FROM_PEERs when it has released it.

use crate::poison::Unpoisoned;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use super::error::TokenError;
use super::ledger::SessionTransfers;
use super::table::BufferedBytes;
use crate::device::{Device, DeviceError, Queue, QueueAborter, Region, Timeline, TimelinePoint, UploadSource};
use crate::rpc::wire::ext::TransferToken;

/// Called once when a receiver fails by itself, and not when it is closed.
pub(in crate::rpc::server) type FailureCallback = Box<dyn Fn(&DeviceError) + Send + Sync>;

/// The receiver of one queue. Dropping it fails all waits for its bytes.
pub(in crate::rpc::server) struct Receiver(pub(super) Arc<ReceiverShared>);

impl Receiver {
    pub(super) fn new(
        session: &Arc<SessionTransfers>,
        device: &Arc<dyn Device>,
        timeout: Duration,
        on_failure: FailureCallback,
    ) -> Receiver {
        Receiver(Arc::new(ReceiverShared {
            session: Arc::clone(session),
            device: Arc::clone(device),
            timeout,
            on_failure,
            state: Mutex::default(),
            signal: Mutex::default(),
            changed: Condvar::new(),
        }))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.fail(DeviceError::Ended);
    }
}

/// State that the receiver, its thread and the bound tokens share.
pub(super) struct ReceiverShared {
    session: Arc<SessionTransfers>,
    device: Arc<dyn Device>,
    /// Limit of the time between a RECEIVE_FROM_PEER and the arrival of its bytes, and of each wait for a device.
    timeout: Duration,
    on_failure: FailureCallback,
    /// May be locked for as long as an upload blocks. After its release, each holder calls [`ReceiverShared::end_if_closed`].
    state: Mutex<ReceiverState>,
    /// Locked for single accesses only.
    signal: Mutex<ReceiverSignal>,
    /// Wakes the thread: `signal` has changed.
    changed: Condvar,
}

/// Signals of other threads to the receiver's thread, and to the thread that writes bytes.
#[derive(Default)]
struct ReceiverSignal {
    /// Set when the receiver was closed or has failed, with the reason. Bytes are dropped from then on.
    closed: Option<DeviceError>,
    /// Ends the device queue. `None`: there is none, or it was ended.
    aborter: Option<QueueAborter>,
    /// The thread has to wait for a device.
    device_wait: bool,
}

#[derive(Default)]
struct ReceiverState {
    /// The device queue that writes the bytes; created for the first bytes.
    queue: Option<Box<dyn Queue>>,
    /// RECEIVE_FROM_PEERs that are not done, oldest first.
    receives: VecDeque<QueuedReceive>,
    /// Whether the receiver's thread was started.
    thread_started: bool,
}

/// A RECEIVE_FROM_PEER that is not done.
struct QueuedReceive {
    region: Region,
    token: TransferToken,
    /// From this point of the session's queue on, the region may be overwritten.
    ready: TimelinePoint,
    /// The session's queue waits for point 1 of this timeline: all bytes are written.
    completed: Arc<Timeline>,
    /// Bytes that have arrived and are not written yet, in order.
    buffered: Vec<BufferedBytes>,
    /// Bytes that were submitted to the device queue.
    submitted: u64,
    /// The point of the device queue after the last piece; set when all pieces are submitted.
    written: Option<TimelinePoint>,
    /// Latest arrival of the last byte.
    deadline: Instant,
}

impl QueuedReceive {
    /// Submits the upload of the next bytes.
    fn write(&mut self, queue: &mut dyn Queue, bytes: &[u8]) -> Result<(), DeviceError> {
        let part = self.region.subregion(self.submitted, bytes.len() as u64)?;
        queue.upload(part, None, UploadSource::Borrowed(bytes))?;
        self.submitted += bytes.len() as u64;
        if self.submitted == self.region.bytes() {
            self.written = Some(queue.mark());
        }
        Ok(())
    }
}

/// The next event for which the receiver's thread has to wait.
enum NextWait {
    /// A point of a device.
    Device(TimelinePoint),
    /// The arrival of bytes, with the deadline of the oldest RECEIVE_FROM_PEER.
    Bytes(Option<Instant>),
}

impl ReceiverState {
    /// Accepts the next bytes for a token: submits their upload if the device is ready, and buffers them otherwise.
    fn accept(&mut self, shared: &ReceiverShared, token: &TransferToken, data: &[u8]) -> Result<(), DeviceError> {
        let Some(at) = self.receives.iter().position(|receive| receive.token == *token) else { return Ok(()) };
        let receive = &mut self.receives[at];
        if Instant::now() >= receive.deadline {
            return Err(deadline_error());
        }
        if at == 0 && receive.buffered.is_empty() && receive.ready.poll()? {
            return receive.write(device_queue(&mut self.queue, shared)?, data);
        }
        let SessionTransfers { budget, memory, .. } = &*shared.session;
        receive.buffered.push(BufferedBytes::copy_from(data, budget, memory)?);
        Ok(())
    }

    /// Writes buffered bytes as far as possible without waiting, and moves the timelines of RECEIVE_FROM_PEERs that are done to
    /// `completed`: the caller advances them without the lock, because that may run code that takes locks. Returns what to wait
    /// for next.
    ///
    /// # Errors
    /// The failure of the device, or that the deadline has passed.
    fn advance(
        &mut self,
        shared: &ReceiverShared,
        completed: &mut Vec<Arc<Timeline>>,
    ) -> Result<NextWait, DeviceError> {
        loop {
            let Some(head) = self.receives.front_mut() else { return Ok(NextWait::Bytes(None)) };
            if let Some(written) = &head.written {
                if !written.poll()? {
                    return Ok(NextWait::Device(written.clone()));
                }
                completed.extend(self.receives.pop_front().map(|done| done.completed));
                continue;
            }
            if head.buffered.is_empty() {
                return if Instant::now() < head.deadline {
                    Ok(NextWait::Bytes(Some(head.deadline)))
                } else {
                    Err(deadline_error())
                };
            }
            if !head.ready.poll()? {
                return Ok(NextWait::Device(head.ready.clone()));
            }
            let queue = device_queue(&mut self.queue, shared)?;
            for buffered in std::mem::take(&mut head.buffered) {
                head.write(queue, &buffered.bytes)?;
            }
        }
    }
}

fn deadline_error() -> DeviceError {
    DeviceError::Deadline("bytes from another server")
}

/// The receiver's device queue, which is created for the first bytes.
fn device_queue<'a>(
    queue: &'a mut Option<Box<dyn Queue>>,
    shared: &ReceiverShared,
) -> Result<&'a mut dyn Queue, DeviceError> {
    let queue = match queue {
        Some(queue) => queue,
        none => {
            let mut queue = shared.device.queue(&shared.session.budget)?;
            shared.set_aborter(queue.aborter())?;
            none.insert(queue)
        }
    };
    Ok(&mut **queue)
}

impl ReceiverShared {
    fn lock(&self) -> MutexGuard<'_, ReceiverState> {
        // A panic while the lock was held can leave a RECEIVE_FROM_PEER that is never done; its deadline fails it.
        self.state.lock().unpoisoned()
    }

    /// Appends a RECEIVE_FROM_PEER whose bytes in `buffered` have arrived. `completed` is advanced to 1 when all bytes are written.
    /// Starts the receiver's thread if necessary.
    ///
    /// # Errors
    /// The failure of the receiver if it is closed, or that the thread cannot be started: by the system, or by
    /// the budget of threads.
    pub(super) fn enqueue_receive(
        self: &Arc<Self>,
        ready: TimelinePoint,
        completed: Arc<Timeline>,
        region: Region,
        token: TransferToken,
        buffered: Vec<BufferedBytes>,
    ) -> Result<(), DeviceError> {
        let mut state = self.lock();
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if !state.thread_started {
            let (shared, permit) = (Arc::clone(self), self.session.threads.reserve()?);
            let started = std::thread::Builder::new().name("receiver".to_owned()).spawn(move || {
                let _permit = permit;
                shared.run_thread();
            });
            started.map_err(|e| DeviceError::thread_spawn_failed("for arriving bytes", &e))?;
            state.thread_started = true;
        }
        let (submitted, deadline) = (0, Instant::now() + self.timeout);
        let receive = QueuedReceive { region, token, ready, completed, buffered, submitted, written: None, deadline };
        state.receives.push_back(receive);
        self.advance(state, Ok(()));
        Ok(())
    }

    /// Accepts the next bytes for a token, which its transfer has checked. Never waits for a device. A closed receiver drops
    /// them.
    ///
    /// # Errors
    /// The token has expired.
    pub(super) fn accept(&self, token: &TransferToken, data: &[u8]) -> Result<(), TokenError> {
        let mut state = self.lock();
        let accepted = if self.is_closed() { Ok(()) } else { state.accept(self, token, data) };
        let expired = accepted == Err(deadline_error());
        self.advance(state, accepted);
        if expired { Err(TokenError::Unknown) } else { Ok(()) }
    }

    /// Writes buffered bytes as far as possible without waiting, and leaves further waits to the receiver's thread. After an
    /// error, closes the receiver.
    fn advance(&self, mut state: MutexGuard<'_, ReceiverState>, changed: Result<(), DeviceError>) {
        let mut completed = Vec::new();
        let next = changed.and_then(|()| state.advance(self, &mut completed));
        drop(state);
        completed.iter().for_each(|completed| completed.advance(1));
        match next {
            Err(e) => self.fail(e),
            Ok(NextWait::Device(_)) => {
                self.lock_signal().device_wait = true;
                self.changed.notify_one();
            }
            Ok(NextWait::Bytes(_)) => {}
        }
        self.end_if_closed();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.failure().is_some()
    }

    /// Why the receiver was closed.
    fn failure(&self) -> Option<DeviceError> {
        self.lock_signal().closed.clone()
    }

    /// Registers the aborter of the device queue, before the first upload.
    ///
    /// # Errors
    /// The failure of the receiver if it is closed: nothing would end an upload any more.
    fn set_aborter(&self, aborter: Option<QueueAborter>) -> Result<(), DeviceError> {
        let mut signal = self.lock_signal();
        match &signal.closed {
            Some(failure) => Err(failure.clone()),
            None => {
                signal.aborter = aborter;
                Ok(())
            }
        }
    }

    /// The receiver's thread: waits for devices and deadlines until the receiver is closed.
    fn run_thread(&self) {
        while !self.is_closed() {
            let mut completed = Vec::new();
            let next = self.lock().advance(self, &mut completed);
            if !completed.is_empty() {
                // Completing a RECEIVE_FROM_PEER may make the next one ready.
                completed.iter().for_each(|completed| completed.advance(1));
                continue;
            }
            match next {
                Err(e) => self.fail(e),
                Ok(NextWait::Device(point)) => {
                    if let Err(e) = point.wait(Some(Instant::now() + self.timeout)) {
                        self.fail(e);
                    }
                }
                // New RECEIVE_FROM_PEERs have later deadlines than this one, so the thread need not be woken for them.
                Ok(NextWait::Bytes(deadline)) => {
                    let timeout =
                        deadline.map_or(self.timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
                    let idle = |signal: &mut ReceiverSignal| signal.closed.is_none() && !signal.device_wait;
                    let signal = self.changed.wait_timeout_while(self.lock_signal(), timeout, idle);
                    signal.unpoisoned().0.device_wait = false;
                }
            }
        }
        self.end_if_closed();
    }

    /// Ends the RECEIVE_FROM_PEERs of a closed receiver. If another thread holds the lock, does nothing: that thread calls this
    /// when it has released the lock.
    fn end_if_closed(&self) {
        let Some(failure) = self.failure() else { return };
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let (queue, receives) = (state.queue.take(), std::mem::take(&mut state.receives));
        drop(state);
        // Outside of the lock: the code that the failures run may take locks of its own. Dropping the device queue cancels
        // uploads that have not started.
        drop(queue);
        for receive in receives {
            // Before the deadline, a PEER_WRITE with one of these tokens is still legitimate: its bytes are dropped.
            if Instant::now() < receive.deadline {
                self.session.abandon(receive.token);
            } else {
                self.session.table.remove(&receive.token);
            }
            receive.completed.fail(failure.clone());
        }
    }

    fn lock_signal(&self) -> MutexGuard<'_, ReceiverSignal> {
        // Ignores poisoning: each change is a single assignment.
        self.signal.lock().unpoisoned()
    }

    /// Closes the receiver, unless it is closed already. The queue that waits for its bytes fails with `failure`. Never waits
    /// for a device or for a thread that does.
    pub(super) fn fail(&self, failure: DeviceError) {
        let mut signal = self.lock_signal();
        if signal.closed.is_some() {
            return;
        }
        signal.closed = Some(failure.clone());
        let aborter = signal.aborter.take();
        drop(signal);
        self.changed.notify_one();
        if let Some(aborter) = aborter {
            aborter.abort();
        }
        self.end_if_closed();
        // The queue that waits for the bytes would report its failure only with a completion, and none may be pending.
        if failure != DeviceError::Ended {
            (self.on_failure)(&failure);
        }
    }
}
