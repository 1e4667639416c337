//! Table of all live transfer tokens of a server, and what has arrived for each. The last byte of a transfer removes its token,
//! so that each byte is written at most once.

use crate::poison::Unpoisoned;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};

use super::error::{MAX_REVOKED_TOKENS, TokenError};
use super::receiver::ReceiverShared;
use crate::device::{DeviceError, MemoryBudget, Reservation, TRANSFER_CHUNK_BYTES};
use crate::rpc::server::host_memory::{HostCharge, SessionMemory};
use crate::rpc::wire::ext::TransferToken;

/// Bytes in host memory that cannot be written to the device yet.
pub(super) struct BufferedBytes {
    pub(super) bytes: Vec<u8>,
    /// Charged to the session that issued the token.
    _reservations: (Reservation, HostCharge),
}

impl BufferedBytes {
    /// Copies `bytes` to host memory that is charged to `budget` and `memory`.
    ///
    /// # Errors
    /// `budget` or `memory` is exhausted.
    pub(super) fn copy_from(
        bytes: &[u8],
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
    ) -> Result<BufferedBytes, DeviceError> {
        let reservations = (budget.reserve(bytes.len() as u64)?, memory.reserve(bytes.len() as u64)?);
        Ok(BufferedBytes { bytes: bytes.to_vec(), _reservations: reservations })
    }
}

/// Where the bytes of a transfer go.
pub(super) enum Destination {
    /// To a buffer, until a RECEIVE_FROM_PEER names the token. After an error the bytes are dropped, and the queue of that
    /// RECEIVE_FROM_PEER fails.
    Early(Result<Vec<BufferedBytes>, DeviceError>),
    /// To the receiver of a RECEIVE_FROM_PEER. A closed receiver drops them.
    Bound(Arc<ReceiverShared>),
}

/// The bytes that have arrived for a token.
pub(super) struct Progress {
    /// Bytes that have arrived.
    received: u64,
    /// Bytes of the whole transfer; known from RECEIVE_FROM_PEER on.
    len: Option<u64>,
    destination: Destination,
}

/// The transfer of a live token.
pub(super) struct Transfer {
    /// The budget of the session that issued the token.
    budget: Arc<MemoryBudget>,
    /// Pays for the token.
    charge: HostCharge,
    progress: Mutex<Progress>,
}

impl Transfer {
    pub(super) fn new(budget: &Arc<MemoryBudget>, charge: HostCharge) -> Arc<Transfer> {
        let progress = Progress { received: 0, len: None, destination: Destination::Early(Ok(Vec::new())) };
        Arc::new(Transfer { budget: Arc::clone(budget), charge, progress: Mutex::new(progress) })
    }

    /// Locked for as long as a piece is written, so that the pieces of a transfer have an order. The lock of a receiver, or of
    /// the table, may be taken while this one is held.
    pub(super) fn lock(&self) -> MutexGuard<'_, Progress> {
        // Ignores poisoning: each change is a single assignment.
        self.progress.lock().unpoisoned()
    }
}

impl Progress {
    /// The length of the next piece: all pieces are full, except for the last one. Of unknown length, the limit.
    fn next_piece(&self) -> u64 {
        self.len.map_or(TRANSFER_CHUNK_BYTES, |len| TRANSFER_CHUNK_BYTES.min(len.saturating_sub(self.received)))
    }

    pub(super) fn is_complete(&self) -> bool {
        self.len.is_some_and(|len| self.received >= len)
    }

    /// Sets the length and the destination, for the RECEIVE_FROM_PEER of the token. Returns the bytes that have arrived.
    ///
    /// # Errors
    /// They cannot be used.
    pub(super) fn bind(&mut self, len: u64, destination: Destination) -> Result<Vec<BufferedBytes>, DeviceError> {
        self.len = Some(len);
        let Destination::Early(early) = mem::replace(&mut self.destination, destination) else { return Ok(Vec::new()) };
        let next = self.received;
        if next == len || (next < len && next.is_multiple_of(TRANSFER_CHUNK_BYTES)) {
            return early;
        }
        early.and(Err(TokenError::Piece { expected: len, next: 0, have: next, offset: 0 }.to_device_error()))
    }

    /// Accepts the next piece.
    fn accept(&mut self, transfer: &Transfer, token: &TransferToken, at: u64, data: &[u8]) -> Result<(), TokenError> {
        if self.is_complete() {
            return Err(TokenError::Unknown);
        }
        let (expected, next, have) = (self.next_piece(), self.received, data.len() as u64);
        let is_last = self.len.is_none() && (1..expected).contains(&have);
        if at != next || !next.is_multiple_of(TRANSFER_CHUNK_BYTES) || (have != expected && !is_last) {
            let error = TokenError::Piece { expected, next, have, offset: at };
            match &mut self.destination {
                Destination::Early(early) => *early = Err(error.to_device_error()),
                Destination::Bound(receiver) => receiver.fail(error.to_device_error()),
            }
            return Err(error);
        }
        self.received += have;
        match &mut self.destination {
            Destination::Bound(receiver) => return receiver.accept(token, data),
            Destination::Early(early) => {
                if let Ok(pieces) = early {
                    match BufferedBytes::copy_from(data, &transfer.budget, transfer.charge.session()) {
                        Ok(piece) => pieces.push(piece),
                        Err(e) => *early = Err(e),
                    }
                }
            }
        }
        Ok(())
    }
}

/// Table of all live transfer tokens of a server.
#[derive(Default)]
pub(in crate::rpc::server) struct TokenTable(Mutex<Tokens>);

#[derive(Default)]
struct Tokens {
    live: HashMap<TransferToken, Arc<Transfer>>,
    /// Tokens whose session has ended; at most [`MAX_REVOKED_TOKENS`]. The source server cannot know that yet, and transfers to
    /// other sessions use the same connection, so bytes for them are dropped without an error.
    revoked: HashSet<TransferToken>,
    /// The same tokens, oldest first.
    by_age: VecDeque<TransferToken>,
}

impl TokenTable {
    /// Number of tokens that are issued, and have not been redeemed.
    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.lock().live.len()
    }

    fn lock(&self) -> MutexGuard<'_, Tokens> {
        // Ignores poisoning: each field is changed by single calls.
        self.0.lock().unpoisoned()
    }

    /// Adds a token. Returns whether it is new.
    pub(super) fn insert(&self, token: TransferToken, transfer: Arc<Transfer>) -> bool {
        match self.lock().live.entry(token) {
            // A collision of 128 random bits does not occur in practice. If it did, the token must not be replaced.
            Entry::Occupied(_) => false,
            Entry::Vacant(slot) => {
                slot.insert(transfer);
                true
            }
        }
    }

    pub(super) fn get(&self, token: &TransferToken) -> Option<Arc<Transfer>> {
        self.lock().live.get(token).map(Arc::clone)
    }

    /// Removes a token. A later PEER_WRITE with it is an error of its sender.
    pub(super) fn remove(&self, token: &TransferToken) {
        let removed = self.lock().live.remove(token);
        // Outside of the lock: this may drop the last handle of device resources.
        drop(removed);
    }

    /// Removes a token whose session has ended. Later PEER_WRITEs with it are ignored.
    pub(super) fn revoke(&self, token: TransferToken) {
        let mut tokens = self.lock();
        let removed = tokens.live.remove(&token);
        if removed.is_some() && tokens.revoked.insert(token) {
            tokens.by_age.push_back(token);
            if tokens.by_age.len() > MAX_REVOKED_TOKENS
                && let Some(oldest) = tokens.by_age.pop_front()
            {
                tokens.revoked.remove(&oldest);
            }
        }
        drop(tokens);
        // Outside of the lock, as above.
        drop(removed);
    }

    /// Redeems a token for the bytes of a transfer from byte `at` on: serves the PEER_WRITE of another server. Never waits for a
    /// device.
    ///
    /// Invalid bytes end the transfer. The queue that waits for them, or will wait for them, then fails as well. An error of
    /// that queue alone, such as an exhausted memory budget, is not returned: the source server did nothing wrong.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], [`TokenError::Piece`]; no bytes were written.
    pub(in crate::rpc::server) fn redeem(&self, token: &TransferToken, at: u64, data: &[u8]) -> Result<(), TokenError> {
        let tokens = self.lock();
        let Some(transfer) = tokens.live.get(token).map(Arc::clone) else {
            return if tokens.revoked.contains(token) { Ok(()) } else { Err(TokenError::Unknown) };
        };
        drop(tokens);
        let mut progress = transfer.lock();
        let accepted = progress.accept(&transfer, token, at, data);
        let is_early = matches!(progress.destination, Destination::Early(_));
        if progress.is_complete() || (accepted.is_err() && !is_early) {
            drop(progress);
            self.remove(token);
        }
        accepted
    }
}
