//! A device queue of a session: ends when the session's client has gone, and pays for the uploads that it stages.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::{Device, DeviceError, MAX_PENDING_BYTES, MemoryBudget, Queue, TRANSFER_CHUNK_BYTES};
use crate::rpc::server::hangup_watch::{CancelOrder, CancellerGuard, SessionWatch};
use crate::rpc::server::host_memory::{HostCharge, SessionMemory};

/// Host memory that an open queue is charged: its state, its stack, and [`STAGED_PREPAID_BYTES`].
const QUEUE_BYTES: u64 = 32 << 10;

/// Uploads that the charge of a queue includes.
const STAGED_PREPAID_BYTES: u64 = 16 << 10;

/// The most bytes that a queue stages: its limit of pending uploads, and the buffer in which it receives one.
const MAX_STAGED_BYTES: u64 = MAX_PENDING_BYTES as u64 + TRANSFER_CHUNK_BYTES;

/// A queue of a session. The hang-up watch aborts it when the client has gone, if the device can end a queue from another
/// thread ([`Queue::aborter`]).
pub(in crate::rpc::server) struct WatchedQueue {
    /// Dropped before the queue, which needs no abort once it is closed; a late one has no effect.
    _canceller: Option<CancellerGuard>,
    queue: Box<dyn Queue>,
    charge: HostCharge,
    /// Bytes of the uploads since the queue was last seen idle.
    staged: u64,
}

impl WatchedQueue {
    /// Opens a queue of `device`, whose memory is reserved in `budget` and `memory`.
    ///
    /// # Errors
    /// As [`Device::queue`]; [`DeviceError::Exhausted`] if the host memory is not available in time.
    pub(in crate::rpc::server) fn open(
        device: &dyn Device,
        budget: &Arc<MemoryBudget>,
        watch: &Arc<SessionWatch>,
        memory: &Arc<SessionMemory>,
    ) -> Result<WatchedQueue, DeviceError> {
        let charge = memory.wait(QUEUE_BYTES)?;
        let mut queue = device.queue(budget)?;
        let aborter = queue.aborter();
        let canceller = aborter.map(|aborter| watch.on_hangup(CancelOrder::Queue, move || aborter.abort()));
        Ok(WatchedQueue { _canceller: canceller, queue, charge, staged: 0 })
    }

    /// Charges an upload of `bytes` bytes, before it is submitted, until the queue is seen idle: a busy queue stages small
    /// uploads in host memory. If host memory is short, waits for the queue's own work, so that nothing else is staged, and
    /// then for other sessions.
    ///
    /// # Errors
    /// The failure of the queue; work that is not done within `timeout`; [`DeviceError::Exhausted`].
    pub(in crate::rpc::server) fn charge_upload(&mut self, bytes: u64, timeout: Duration) -> Result<(), DeviceError> {
        // Larger uploads are not staged: they wait for the queue, and write in place.
        let bytes = bytes.min(TRANSFER_CHUNK_BYTES);
        self.staged = self.staged.saturating_add(bytes).min(MAX_STAGED_BYTES);
        if self.missing() == 0 {
            return Ok(());
        }
        if self.queue.mark().poll() == Ok(true) {
            self.restart_staging(bytes);
        }
        if self.charge.grow(self.missing()).is_err() {
            self.queue.mark().wait(Some(Instant::now() + timeout))?;
            self.restart_staging(bytes);
            self.charge.wait_and_grow(self.missing())?;
        }
        Ok(())
    }

    /// Bytes that the staged uploads need beyond what is charged.
    fn missing(&self) -> u64 {
        (QUEUE_BYTES - STAGED_PREPAID_BYTES + self.staged).saturating_sub(self.charge.bytes())
    }

    fn restart_staging(&mut self, bytes: u64) {
        // The upload itself, and the buffer in which the queue receives it and which it keeps.
        self.staged = 2 * bytes;
        self.charge.shrink_to(QUEUE_BYTES.max(QUEUE_BYTES - STAGED_PREPAID_BYTES + self.staged));
    }
}

impl Deref for WatchedQueue {
    type Target = dyn Queue;

    fn deref(&self) -> &(dyn Queue + 'static) {
        &*self.queue
    }
}

impl DerefMut for WatchedQueue {
    fn deref_mut(&mut self) -> &mut (dyn Queue + 'static) {
        &mut *self.queue
    }
}
