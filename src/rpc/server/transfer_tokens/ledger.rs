//! Transfer tokens of one session: issuing them, and binding them to the regions that receive their bytes.

use std::collections::HashSet;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;
use std::time::Duration;

use super::error::{MAX_TOKENS_PER_REQUEST, MAX_UNUSED_TOKENS, TokenError, check_count};
use super::payload::PeerWriteData;
use super::receiver::{FailureCallback, PendingReceives, Receiver, ReceiverShared};
use super::table::{Destination, SessionTokens, TokenEntry, TokenMaps, TokenState, TokenTable};
use crate::device::{Device, DeviceError, MemoryBudget, Queue, Region, Timeline, TimelinePoint};
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::tenants::ClientBudget;
use crate::rpc::wire::ext::{TRANSFER_TOKEN_BYTES, TransferToken};

/// Host memory that a token is charged: its entries in the tables.
const TOKEN_BYTES: u64 = 256;

/// The transfer tokens of one session. Dropping the ledger revokes all of them.
pub(in crate::rpc::server) struct TokenLedger {
    table: Arc<TokenTable>,
    session: u64,
    budget: Arc<MemoryBudget>,
    memory: Arc<SessionMemory>,
    threads: Arc<ClientBudget>,
    pending_receives: Arc<PendingReceives>,
}

impl TokenLedger {
    /// Registers a new session in `table`. Bytes that arrive before they can be written are charged to `budget` and to
    /// `memory`, tokens to `memory`, and the threads of receivers to `threads`.
    pub(in crate::rpc::server) fn new(
        table: &Arc<TokenTable>,
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
        threads: &Arc<ClientBudget>,
    ) -> TokenLedger {
        let mut maps = table.lock();
        let session = maps.next_session;
        maps.next_session += 1;
        maps.sessions.insert(session, SessionTokens::default());
        let (budget, memory, threads) = (Arc::clone(budget), Arc::clone(memory), Arc::clone(threads));
        TokenLedger { table: Arc::clone(table), session, budget, memory, threads, pending_receives: Arc::default() }
    }

    /// Creates the receiver of a queue of `device`; each receiving queue needs its own. A RECEIVE_FROM_PEER fails if its bytes
    /// have not arrived within `timeout`. `on_failure` is called when the receiver fails, and with it the queue.
    pub(in crate::rpc::server) fn new_receiver(
        &self,
        device: &Arc<dyn Device>,
        timeout: Duration,
        on_failure: FailureCallback,
    ) -> Receiver {
        let memory = (&self.budget, &self.memory);
        let receiver = Receiver::new(&self.table, device, memory, &self.threads, timeout, on_failure);
        self.pending_receives.add(&receiver);
        receiver
    }

    /// All receivers of the session.
    pub(in crate::rpc::server) fn pending_receives(&self) -> &Arc<PendingReceives> {
        &self.pending_receives
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
        let mut tokens = vec![[0; TRANSFER_TOKEN_BYTES]; count as usize];
        getrandom::fill(tokens.as_flattened_mut()).map_err(TokenError::RandomBytes)?;
        let mut maps = self.table.lock();
        let TokenMaps { entries, sessions, .. } = &mut *maps;
        let session_tokens = sessions.entry(self.session).or_default();
        let unused = session_tokens.unused.len() + tokens.len();
        if unused > MAX_UNUSED_TOKENS {
            return Err(TokenError::TooManyUnused(unused));
        }
        for token in &tokens {
            // A collision of 128 random bits does not occur in practice. If it did, the existing token must not be replaced.
            let charge = self.memory.reserve(TOKEN_BYTES)?;
            if let MapEntry::Vacant(slot) = entries.entry(*token) {
                slot.insert(TokenEntry {
                    session: self.session,
                    budget: Arc::clone(&self.budget),
                    charge,
                    state: TokenState::Issued,
                });
                session_tokens.unused.insert(*token);
            }
        }
        Ok(tokens)
    }

    /// Checks that `tokens` are as many as `bytes` bytes need, that all were issued to this session, and that none was named
    /// in an earlier RECEIVE_FROM_PEER.
    ///
    /// # Errors
    /// [`TokenError::WrongCount`], [`TokenError::TooManyInMessage`], [`TokenError::NotOfSession`].
    pub(in crate::rpc::server) fn check_unused(&self, bytes: u64, tokens: &[TransferToken]) -> Result<(), TokenError> {
        check_count(bytes, tokens.len())?;
        let maps = self.table.lock();
        let mut seen = HashSet::new();
        for (index, token) in tokens.iter().enumerate() {
            let entry = maps.entries.get(token).filter(|entry| entry.session == self.session);
            let unused =
                entry.is_some_and(|entry| !matches!(entry.state, TokenState::Bound(..) | TokenState::Abandoned));
            // Rejecting repeated tokens also bounds the size of `seen` by the number of the session's tokens.
            if !unused || !seen.insert(token) {
                return Err(TokenError::NotOfSession(index));
            }
        }
        Ok(())
    }

    /// Binds `tokens` to `region` and makes later work of `queue` wait for their bytes. The bytes are written to `region`
    /// once the earlier work of `queue` is done. `receiver` is the receiver of that queue. The caller has checked the tokens
    /// ([`TokenLedger::check_unused`]). The queue fails if the bytes do not arrive within the receiver's timeout, or have the
    /// wrong length.
    ///
    /// # Errors
    /// The failure of the queue. The tokens are consumed in that case.
    pub(in crate::rpc::server) fn receive(
        &self,
        receiver: &Receiver,
        queue: &mut dyn Queue,
        region: Region,
        tokens: &[TransferToken],
    ) -> Result<(), DeviceError> {
        if tokens.is_empty() {
            return Ok(());
        }
        let ready = queue.mark();
        let completed = Timeline::new();
        let enqueued = receiver.0.enqueue_receive(ready, Arc::clone(&completed), region, tokens);
        let receive = enqueued.inspect_err(|_| self.discard(tokens))?;
        for (piece, state) in self.bind(&receiver.0, receive, tokens) {
            match state {
                // Wrong bytes fail the queue. The error is not reported to the source server: its PEER_WRITE has returned.
                TokenState::Buffered(buffered) => {
                    drop(receiver.0.accept_piece(receive, piece, PeerWriteData::Buffered(buffered)))
                }
                TokenState::Invalid(e) => receiver.0.fail(e),
                TokenState::Issued | TokenState::Bound(..) | TokenState::Abandoned => {}
            }
        }
        if receiver.0.is_closed() {
            self.discard(tokens);
        }
        // The wait must be the last step: on a device whose queues cannot wait for a timeline, it blocks until the bytes are
        // written.
        queue.wait(&TimelinePoint::new(&completed, 1)).inspect_err(|e| receiver.0.fail(e.clone()))
    }

    /// Abandons tokens after a failure of their queue. Their bytes are dropped when they arrive.
    pub(in crate::rpc::server) fn discard(&self, tokens: &[TransferToken]) {
        let maps = self.table.lock();
        let Some(session_tokens) = maps.sessions.get(&self.session) else { return };
        let unused: Vec<_> = tokens.iter().filter(|token| session_tokens.unused.contains(*token)).copied().collect();
        drop(maps);
        self.table.abandon(&unused);
    }

    /// Binds checked tokens to the pieces of a RECEIVE_FROM_PEER. Returns the tokens that were redeemed before, each with the
    /// index of its piece.
    fn bind(&self, receiver: &Arc<ReceiverShared>, receive: u64, tokens: &[TransferToken]) -> Vec<(usize, TokenState)> {
        let mut maps = self.table.lock();
        let mut redeemed = Vec::new();
        for (piece, token) in tokens.iter().enumerate() {
            match maps.entries.get_mut(token) {
                Some(entry) if matches!(entry.state, TokenState::Issued) => {
                    let destination: Arc<dyn Destination> = receiver.clone();
                    entry.state = TokenState::Bound(destination, receive, piece);
                }
                // The queue has failed after the tokens were checked, and the token was removed.
                None => {}
                Some(_) => redeemed.extend(maps.remove(token).map(|entry| (piece, entry.state))),
            }
        }
        redeemed
    }
}

impl Drop for TokenLedger {
    fn drop(&mut self) {
        let mut maps = self.table.lock();
        let session_tokens = maps.sessions.remove(&self.session).unwrap_or_default();
        let tokens = session_tokens.unused.iter().chain(&session_tokens.abandoned);
        let removed: Vec<_> = tokens.map(|token| maps.entries.remove(token)).collect();
        drop(maps);
        // Outside the lock: this may drop the last handle of device resources.
        drop(removed);
    }
}
