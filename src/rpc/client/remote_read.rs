//! Pending reads of remote devices, and their completers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;
use std::time::Instant;

use super::connection::ConnectionShared;
use super::device::RemoteDevice;
use crate::device::{DeviceError, LoadOutcome, PendingRead, PendingReadSender, ReadSource};
use crate::poison::lock;

/// Completes a pending read of one range of bytes.
#[derive(Debug)]
pub(super) struct ReadCompleter {
    to: Arc<ReadSender>,
    completed: Arc<AtomicBool>,
}

/// `None` after an abort of the queue, which fails the read.
type ReadSender = Mutex<Option<PendingReadSender>>;

/// The reads of a queue that are not completed, which an abort fails.
#[derive(Default)]
pub(super) struct OpenReads(Mutex<Vec<Weak<ReadSender>>>);

impl OpenReads {
    pub(super) fn add(&self, read: &ReadCompleter) {
        let mut reads = lock(&self.0);
        if reads.len() == reads.capacity() {
            reads.retain(|read| read.strong_count() > 0);
        }
        reads.push(Arc::downgrade(&read.to));
    }

    pub(super) fn abort(&self) {
        let reads = std::mem::take(&mut *lock(&self.0));
        for read in reads.iter().filter_map(Weak::upgrade) {
            let sender = lock(&read).take();
            // Without the lock: this may call a callback.
            drop(sender);
        }
    }
}

impl ReadCompleter {
    /// A completer and the pending read that it completes. A wait that starts before the completion is counted.
    pub(super) fn new(remote: &RemoteDevice) -> (ReadCompleter, PendingRead) {
        let (to, pending) = PendingRead::new();
        let to = Arc::new(Mutex::new(Some(to)));
        let completed = Arc::<AtomicBool>::default();
        let completer = ReadCompleter { to, completed: Arc::clone(&completed) };
        let read = SpinningRead { pending, completed, shared: Arc::clone(&**remote.connection) };
        (completer, PendingRead::from_source(read))
    }

    pub(super) fn complete(self, bytes: Result<Vec<u8>, DeviceError>) {
        self.completed.store(true, Ordering::Release);
        let sender = lock(&self.to).take();
        if let Some(sender) = sender {
            sender.send(bytes);
        }
    }
}

/// A read whose waiter spins before it parks.
struct SpinningRead {
    pending: PendingRead,
    completed: Arc<AtomicBool>,
    shared: Arc<ConnectionShared>,
}

impl ReadSource<Vec<u8>> for SpinningRead {
    fn is_ready(&self) -> bool {
        self.pending.is_ready()
    }

    fn wait(self: Box<Self>, deadline: Option<Instant>) -> Result<Vec<u8>, DeviceError> {
        let SpinningRead { pending, completed, shared } = *self;
        if pending.is_ready() {
            return pending.wait(deadline);
        }
        shared.count_wait();
        shared.spin.wait(|| completed.load(Ordering::Acquire), || pending.wait(deadline))
    }

    fn wake(&mut self, waker: &Waker) {
        self.pending.register(waker);
    }
}

/// A read in parts, as one: the server limits the bytes of a reply.
pub(super) struct JoinedReads(pub(super) Vec<PendingRead>);

impl ReadSource<Vec<u8>> for JoinedReads {
    fn is_ready(&self) -> bool {
        self.0.iter().all(PendingRead::is_ready)
    }

    fn wait(self: Box<Self>, deadline: Option<Instant>) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = Vec::new();
        for read in self.0 {
            bytes.append(&mut read.wait(deadline)?);
        }
        Ok(bytes)
    }

    fn wake(&mut self, waker: &Waker) {
        self.0.iter_mut().for_each(|read| read.register(waker));
    }
}

/// The reply to a load by digest, which was validated on arrival: one byte, 0 or 1.
pub(super) struct LoadReply(pub(super) PendingRead);

impl ReadSource<LoadOutcome> for LoadReply {
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    fn wait(self: Box<Self>, deadline: Option<Instant>) -> Result<LoadOutcome, DeviceError> {
        let reply = self.0.wait(deadline)?;
        Ok(if reply == [1] { LoadOutcome::Found } else { LoadOutcome::Missing })
    }

    fn wake(&mut self, waker: &Waker) {
        self.0.register(waker);
    }
}
