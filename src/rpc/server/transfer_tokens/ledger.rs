//! Transfer tokens of one session: issuing them, and binding them to the regions that receive their bytes.

use crate::poison::lock;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::error::{MAX_TOKENS_PER_REQUEST, MAX_UNUSED_TOKENS, TokenError};
use super::receiver::{FailureCallback, Receiver, ReceiverShared};
use super::table::{Destination, TokenTable, Transfer};
use crate::device::{Device, DeviceError, MemoryBudget, Queue, Region, Timeline, TimelinePoint};
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::tenants::ClientBudget;
use crate::rpc::wire::ext::{TRANSFER_TOKEN_BYTES, TransferToken};

/// Host memory that a token is charged: its entries in the tables, and its RECEIVE_FROM_PEER.
const TOKEN_BYTES: u64 = 512;

/// The transfer tokens of one session. Dropping the ledger revokes all of them.
pub(in crate::rpc::server) struct TokenLedger(Arc<SessionTransfers>);

/// The state that a session's transfers share: its tokens, its receivers, and the budgets that pay for both.
pub(in crate::rpc::server) struct SessionTransfers {
    pub(super) table: Arc<TokenTable>,
    pub(super) budget: Arc<MemoryBudget>,
    pub(super) memory: Arc<SessionMemory>,
    pub(super) threads: Arc<ClientBudget>,
    state: Mutex<TransfersState>,
}

#[derive(Default)]
struct TransfersState {
    /// Tokens that no RECEIVE_FROM_PEER has named.
    unused: HashSet<TransferToken>,
    /// Tokens whose queue has failed or was closed, oldest first; at most [`MAX_UNUSED_TOKENS`]. Their bytes are dropped when
    /// they arrive.
    abandoned: VecDeque<TransferToken>,
    receivers: Vec<Weak<ReceiverShared>>,
    /// Whether receivers are closed, also future ones.
    is_closed: bool,
    /// Whether the ledger was dropped.
    is_revoked: bool,
}

impl SessionTransfers {
    /// Closes all receivers, also future ones: all waits for their bytes fail. The hang-up watch calls it when the client has
    /// gone, and the notifier when it cannot send the heartbeat, because the session's own thread may be blocked on one of these
    /// queues.
    pub(in crate::rpc::server) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let receivers: Vec<_> = state.receivers.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        receivers.iter().for_each(|receiver| receiver.fail(DeviceError::Ended));
    }

    /// Remembers a token whose bytes are dropped when they arrive: with the session, so that other ones cannot displace it, or with
    /// the table if the session has ended.
    pub(super) fn abandon(&self, token: TransferToken) {
        let mut state = lock(&self.state);
        if state.is_revoked {
            drop(state);
            return self.table.revoke(token);
        }
        state.abandoned.push_back(token);
        let forgotten = (state.abandoned.len() > MAX_UNUSED_TOKENS).then(|| state.abandoned.pop_front()).flatten();
        drop(state);
        forgotten.iter().for_each(|token| self.table.remove(token));
    }
}

impl TokenLedger {
    /// The ledger of a new session. Bytes that arrive before they can be written are charged to `budget` and to
    /// `memory`, tokens to `memory`, and the threads of receivers to `threads`.
    pub(in crate::rpc::server) fn new(
        table: &Arc<TokenTable>,
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
        threads: &Arc<ClientBudget>,
    ) -> TokenLedger {
        let (table, budget, memory) = (Arc::clone(table), Arc::clone(budget), Arc::clone(memory));
        let threads = Arc::clone(threads);
        TokenLedger(Arc::new(SessionTransfers { table, budget, memory, threads, state: Mutex::default() }))
    }

    /// Creates the receiver of a queue of `device`; each receiving queue needs its own. A RECEIVE_FROM_PEER fails if its bytes
    /// have not arrived within `timeout`. `on_failure` is called when the receiver fails, and with it the queue.
    pub(in crate::rpc::server) fn new_receiver(
        &self,
        device: &Arc<dyn Device>,
        timeout: Duration,
        on_failure: FailureCallback,
    ) -> Receiver {
        let receiver = Receiver::new(&self.0, device, timeout, on_failure);
        let mut state = lock(&self.0.state);
        state.receivers.retain(|other| other.strong_count() > 0);
        state.receivers.push(Arc::downgrade(&receiver.0));
        let is_closed = state.is_closed;
        drop(state);
        if is_closed {
            receiver.0.fail(DeviceError::Ended);
        }
        receiver
    }

    /// The transfers of the session, to close its receivers.
    pub(in crate::rpc::server) fn transfers(&self) -> &Arc<SessionTransfers> {
        &self.0
    }

    /// Issues `count` new random tokens.
    ///
    /// # Errors
    /// [`TokenError::RequestCount`], [`TokenError::TooManyUnused`], [`TokenError::RandomBytes`],
    /// [`TokenError::HostMemory`].
    pub(in crate::rpc::server) fn issue(&self, count: u32) -> Result<Vec<TransferToken>, TokenError> {
        if !(1..=MAX_TOKENS_PER_REQUEST).contains(&count) {
            return Err(TokenError::RequestCount(count));
        }
        let SessionTransfers { table, budget, memory, .. } = &*self.0;
        let mut tokens = vec![[0; TRANSFER_TOKEN_BYTES]; count as usize];
        getrandom::fill(tokens.as_flattened_mut()).map_err(TokenError::RandomBytes)?;
        let mut state = lock(&self.0.state);
        let unused = state.unused.len() + tokens.len();
        if unused > MAX_UNUSED_TOKENS {
            return Err(TokenError::TooManyUnused(unused));
        }
        for token in &tokens {
            if table.insert(*token, Transfer::new(budget, memory.reserve(TOKEN_BYTES)?)) {
                state.unused.insert(*token);
            }
        }
        Ok(tokens)
    }

    /// Checks that a token was issued to this session, and that no earlier RECEIVE_FROM_PEER has named it.
    ///
    /// # Errors
    /// [`TokenError::NotOfSession`].
    pub(in crate::rpc::server) fn check_unused(&self, token: &TransferToken) -> Result<(), TokenError> {
        if lock(&self.0.state).unused.contains(token) { Ok(()) } else { Err(TokenError::NotOfSession) }
    }

    /// Binds an unused token to `region` and makes later work of `queue` wait for its bytes. The bytes are written to `region`
    /// once the earlier work of `queue` is done. `receiver` is the receiver of that queue. The queue fails if the bytes do not
    /// arrive within the receiver's timeout, or are invalid.
    ///
    /// # Errors
    /// The failure of the queue.
    pub(in crate::rpc::server) fn receive(
        &self,
        receiver: &Receiver,
        queue: &mut dyn Queue,
        region: Region,
        token: TransferToken,
    ) -> Result<(), DeviceError> {
        let Some(transfer) = self.0.table.get(&token) else { return Ok(()) };
        let (ready, completed) = (queue.mark(), Timeline::new());
        let mut progress = transfer.lock();
        let bound = progress.bind(region.bytes(), Destination::Bound(Arc::clone(&receiver.0)));
        let (early, failure) = bound.map_or_else(|e| (Vec::new(), Some(e)), |early| (early, None));
        let is_complete = progress.is_complete();
        // With the lock of the transfer: the next piece must come after the early ones.
        receiver.0.enqueue_receive(ready, Arc::clone(&completed), region, token, early)?;
        drop(progress);
        lock(&self.0.state).unused.remove(&token);
        if is_complete {
            self.0.table.remove(&token);
        }
        if let Some(e) = failure {
            receiver.0.fail(e);
        }
        // The wait must be the last step: on a device whose queues cannot wait for a timeline, it blocks until the bytes are
        // written.
        queue.wait(&TimelinePoint::new(&completed, 1)).inspect_err(|e| receiver.0.fail(e.clone()))
    }

    /// Abandons an unused token for `len` bytes after a failure of its queue. Its bytes are dropped when they arrive.
    pub(in crate::rpc::server) fn discard(&self, token: TransferToken, len: u64) {
        let was_unused = lock(&self.0.state).unused.remove(&token);
        let Some(transfer) = self.0.table.get(&token).filter(|_| was_unused) else { return };
        // The bytes that have arrived are dropped.
        let _ = transfer.lock().bind(len, Destination::Early(Err(DeviceError::Ended)));
        self.0.abandon(token);
    }
}

impl Drop for TokenLedger {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.is_revoked = true;
        let (unused, abandoned) = (std::mem::take(&mut state.unused), std::mem::take(&mut state.abandoned));
        drop(state);
        unused.into_iter().chain(abandoned).for_each(|token| self.0.table.revoke(token));
    }
}
