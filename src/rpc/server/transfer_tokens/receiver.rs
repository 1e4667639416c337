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
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::error::TokenError;
use super::payload::{BufferedBytes, PeerWriteData};
use super::table::{Destination, TokenTable};
use crate::device::{
    Device, DeviceError, MemoryBudget, Queue, QueueAborter, Region, TRANSFER_CHUNK_BYTES, Timeline, TimelinePoint,
    UploadSource,
};
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::tenants::ClientBudget;
use crate::rpc::wire::ext::TransferToken;

/// Called once when a receiver fails by itself, and not when it is closed.
pub(in crate::rpc::server) type FailureCallback = Box<dyn Fn(&DeviceError) + Send + Sync>;

/// The receiver of one queue. Dropping it fails all waits for its bytes.
pub(in crate::rpc::server) struct Receiver(pub(super) Arc<ReceiverShared>);

impl Receiver {
    pub(super) fn new(
        table: &Arc<TokenTable>,
        device: &Arc<dyn Device>,
        (budget, memory): (&Arc<MemoryBudget>, &Arc<SessionMemory>),
        threads: &Arc<ClientBudget>,
        timeout: Duration,
        on_failure: FailureCallback,
    ) -> Receiver {
        Receiver(Arc::new(ReceiverShared {
            table: Arc::clone(table),
            device: Arc::clone(device),
            budget: Arc::clone(budget),
            memory: Arc::clone(memory),
            threads: Arc::clone(threads),
            timeout,
            on_failure,
            state: Mutex::default(),
            signal: Mutex::default(),
            changed: Condvar::new(),
        }))
    }
}

/// The receivers of all queues of a session. The hang-up watch closes them when the client has gone, and the notifier when it
/// cannot send the heartbeat, because the session's own thread may be blocked on one of these queues.
#[derive(Default)]
pub(in crate::rpc::server) struct PendingReceives(Mutex<ReceiverList>);

#[derive(Default)]
struct ReceiverList {
    receivers: Vec<Weak<ReceiverShared>>,
    closed: bool,
}

impl PendingReceives {
    pub(super) fn add(&self, receiver: &Receiver) {
        let mut list = self.lock();
        list.receivers.retain(|other| other.strong_count() > 0);
        list.receivers.push(Arc::downgrade(&receiver.0));
        let closed = list.closed;
        drop(list);
        if closed {
            receiver.0.fail(DeviceError::Ended);
        }
    }

    /// Closes all receivers, also future ones: all waits for their bytes fail.
    pub(in crate::rpc::server) fn close(&self) {
        let mut list = self.lock();
        list.closed = true;
        let receivers: Vec<_> = list.receivers.iter().filter_map(Weak::upgrade).collect();
        drop(list);
        receivers.iter().for_each(|receiver| receiver.fail(DeviceError::Ended));
    }

    fn lock(&self) -> MutexGuard<'_, ReceiverList> {
        // A panic cannot leave the list inconsistent: each change is a single operation.
        self.0.lock().unpoisoned()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.fail(DeviceError::Ended);
    }
}

/// State that the receiver, its thread and the bound tokens share.
pub(super) struct ReceiverShared {
    table: Arc<TokenTable>,
    device: Arc<dyn Device>,
    budget: Arc<MemoryBudget>,
    memory: Arc<SessionMemory>,
    threads: Arc<ClientBudget>,
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

/// What other threads signal to the receiver's thread, and to the one that writes bytes.
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
    /// Number of the first entry of `receives`; they are numbered consecutively.
    first_number: u64,
    /// Whether the receiver's thread was started.
    thread_started: bool,
}

/// A RECEIVE_FROM_PEER that is not done.
struct QueuedReceive {
    region: Region,
    tokens: Vec<TransferToken>,
    /// From this point of the session's queue on, the region may be overwritten.
    ready: TimelinePoint,
    /// The session's queue waits for point 1 of this timeline: all bytes are written.
    completed: Arc<Timeline>,
    /// Bytes that have arrived and are not written yet, by the index of their piece.
    buffered: Vec<(usize, BufferedBytes)>,
    /// Number of pieces that were not submitted to the device queue yet.
    unwritten: usize,
    /// The point of the device queue behind the last piece; set when all pieces are submitted.
    written: Option<TimelinePoint>,
    /// Latest arrival of the last byte.
    deadline: Instant,
}

impl QueuedReceive {
    /// The part of the region that one token's bytes fill.
    fn piece(&self, at: usize) -> Result<Region, DeviceError> {
        let start = at as u64 * TRANSFER_CHUNK_BYTES;
        self.region.subregion(start, TRANSFER_CHUNK_BYTES.min(self.region.bytes().saturating_sub(start)))
    }

    /// Submits the upload of one piece.
    fn write(&mut self, queue: &mut dyn Queue, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        queue.upload(self.piece(at)?, None, UploadSource::Borrowed(bytes))?;
        self.unwritten -= 1;
        if self.unwritten == 0 {
            self.written = Some(queue.mark());
        }
        Ok(())
    }
}

/// Why a piece was not accepted.
struct PieceError {
    /// The failure of the queue that waits for the piece.
    failure: DeviceError,
    /// The error that the source server receives; `None` if it did nothing wrong.
    sender_error: Option<TokenError>,
}

impl PieceError {
    /// An error that the source server caused.
    fn from_sender(error: TokenError) -> Box<PieceError> {
        Box::new(PieceError { failure: error.to_device_error(), sender_error: Some(error) })
    }

    /// An error of this server or its device.
    fn local(failure: DeviceError) -> Box<PieceError> {
        Box::new(PieceError { failure, sender_error: None })
    }
}

/// What the receiver's thread has to wait for next.
enum NextWait {
    /// A point of a device.
    Device(TimelinePoint),
    /// The arrival of bytes, with the deadline of the oldest RECEIVE_FROM_PEER.
    Bytes(Option<Instant>),
}

impl ReceiverState {
    /// Accepts the bytes of a piece: submits their upload if the device is ready, and buffers them otherwise. A closed receiver
    /// drops them.
    fn accept_piece(
        &mut self,
        shared: &ReceiverShared,
        number: u64,
        at: usize,
        data: PeerWriteData<'_>,
    ) -> Result<(), Box<PieceError>> {
        if shared.is_closed() {
            return Ok(());
        }
        let index = number.checked_sub(self.first_number).and_then(|index| usize::try_from(index).ok());
        let Some(receive) = index.and_then(|index| self.receives.get_mut(index)) else {
            return Err(PieceError::local(DeviceError::Bug(
                "bytes arrived for a RECEIVE_FROM_PEER that is done".to_owned(),
            )));
        };
        if Instant::now() >= receive.deadline {
            return Err(Box::new(PieceError { failure: deadline_error(), sender_error: Some(TokenError::Unknown) }));
        }
        let (expected, have) = (receive.piece(at).map_err(PieceError::local)?.bytes(), data.len());
        if have as u64 != expected {
            return Err(PieceError::from_sender(TokenError::Length { expected, have }));
        }
        let ready =
            index == Some(0) && receive.buffered.is_empty() && receive.ready.poll().map_err(PieceError::local)?;
        if ready {
            let queue = device_queue(&mut self.queue, shared).map_err(PieceError::local)?;
            return receive.write(queue, at, data.bytes()).map_err(PieceError::local);
        }
        let buffered = data.into_buffered(&shared.budget, &shared.memory).map_err(PieceError::from_sender)?;
        receive.buffered.push((at, buffered));
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
                self.first_number += 1;
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
            for (at, buffered) in std::mem::take(&mut head.buffered) {
                head.write(queue, at, &buffered.bytes)?;
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
            let mut queue = shared.device.queue(&shared.budget)?;
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

    /// Appends a RECEIVE_FROM_PEER, and returns its number. `completed` is advanced to 1 when all bytes are written. Starts the
    /// receiver's thread if necessary.
    ///
    /// # Errors
    /// The failure of the receiver if it is closed, or that the thread cannot be started: by the system, or by
    /// the [`ClientBudget`].
    pub(super) fn enqueue_receive(
        self: &Arc<Self>,
        ready: TimelinePoint,
        completed: Arc<Timeline>,
        region: Region,
        tokens: &[TransferToken],
    ) -> Result<u64, DeviceError> {
        let mut state = self.lock();
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if !state.thread_started {
            let (shared, permit) = (Arc::clone(self), self.threads.reserve()?);
            let started = std::thread::Builder::new().name("receiver".to_owned()).spawn(move || {
                let _permit = permit;
                shared.run_thread();
            });
            started.map_err(|e| DeviceError::thread_spawn_failed("for arriving bytes", &e))?;
            state.thread_started = true;
        }
        let number = state.first_number + state.receives.len() as u64;
        let (tokens, unwritten, deadline) = (tokens.to_vec(), tokens.len(), Instant::now() + self.timeout);
        let receive = QueuedReceive {
            region,
            tokens,
            ready,
            completed,
            buffered: Vec::new(),
            unwritten,
            written: None,
            deadline,
        };
        state.receives.push_back(receive);
        drop(state);
        self.end_if_closed();
        Ok(number)
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
                self.table.abandon(&receive.tokens);
            } else {
                self.table.remove_all(&receive.tokens);
            }
            receive.completed.fail(failure.clone());
        }
    }

    fn lock_signal(&self) -> MutexGuard<'_, ReceiverSignal> {
        // Ignores poisoning: each change is a single assignment.
        self.signal.lock().unpoisoned()
    }
}

impl Destination for ReceiverShared {
    fn accept_piece(&self, number: u64, at: usize, data: PeerWriteData<'_>) -> Result<(), TokenError> {
        let mut completed = Vec::new();
        let mut state = self.lock();
        let accepted = state.accept_piece(self, number, at, data);
        let next = match &accepted {
            Ok(()) => state.advance(self, &mut completed),
            Err(error) => Err(error.failure.clone()),
        };
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
        accepted.or_else(|error| error.sender_error.map_or(Ok(()), Err))
    }

    /// Closes the receiver, unless it is closed already. The queue that waits for its bytes fails with `failure`. Never waits
    /// for a device or for a thread that does.
    fn fail(&self, failure: DeviceError) {
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
        // The queue that waits for the bytes would report its failure only with a completion, of which none may be pending.
        if failure != DeviceError::Ended {
            (self.on_failure)(&failure);
        }
    }
}
