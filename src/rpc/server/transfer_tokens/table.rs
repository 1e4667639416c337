//! Table of all live transfer tokens of a server. A PEER_WRITE first removes its token from the table, so that each token is
//! redeemed at most once.

use crate::poison::Unpoisoned;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use super::error::{MAX_UNUSED_TOKENS, TokenError};
use super::payload::{BufferedBytes, PeerWriteData, check_length};
use crate::device::{DeviceError, MemoryBudget};
use crate::rpc::server::host_memory::HostCharge;
use crate::rpc::wire::ext::TransferToken;

/// Receives the bytes of tokens that a RECEIVE_FROM_PEER has bound.
pub(super) trait Destination: Send + Sync {
    /// Accepts the bytes of piece `piece` of RECEIVE_FROM_PEER number `receive`. Never waits for a device.
    ///
    /// # Errors
    /// An error of the source server, for example a wrong length.
    fn accept_piece(&self, receive: u64, piece: usize, data: PeerWriteData<'_>) -> Result<(), TokenError>;

    /// Fails the receiving queue with `failure`. Later bytes are dropped.
    fn fail(&self, failure: DeviceError);
}

/// The state of a live token.
pub(super) enum TokenState {
    /// Neither bound nor redeemed.
    Issued,
    /// Redeemed before it was bound: the bytes are buffered.
    Buffered(BufferedBytes),
    /// Redeemed before it was bound, with bytes that cannot be used. The queue that binds it fails with this error.
    Invalid(DeviceError),
    /// Bound to a RECEIVE_FROM_PEER: its receiver, its number, and the index of the piece.
    Bound(Arc<dyn Destination>, u64, usize),
    /// Not redeemed, and the queue that it was bound to has failed or was closed. The bytes are dropped when they arrive.
    Abandoned,
}

/// A live token.
pub(super) struct TokenEntry {
    pub(super) session: u64,
    pub(super) budget: Arc<MemoryBudget>,
    /// Pays for the token.
    pub(super) charge: HostCharge,
    pub(super) state: TokenState,
}

/// Table of all live transfer tokens of a server.
#[derive(Default)]
pub(in crate::rpc::server) struct TokenTable(Mutex<TokenMaps>);

#[derive(Default)]
pub(super) struct TokenMaps {
    pub(super) entries: HashMap<TransferToken, TokenEntry>,
    /// Tokens by session.
    pub(super) sessions: HashMap<u64, SessionTokens>,
    pub(super) next_session: u64,
}

/// The tokens of one session.
#[derive(Default)]
pub(super) struct SessionTokens {
    pub(super) unused: HashSet<TransferToken>,
    /// Tokens in state [`TokenState::Abandoned`], oldest first; at most [`MAX_UNUSED_TOKENS`].
    pub(super) abandoned: VecDeque<TransferToken>,
}

impl TokenMaps {
    /// Removes a token from both maps.
    pub(super) fn remove(&mut self, token: &TransferToken) -> Option<TokenEntry> {
        let entry = self.entries.remove(token)?;
        if let Some(session_tokens) = self.sessions.get_mut(&entry.session) {
            match entry.state {
                TokenState::Abandoned => session_tokens.abandoned.retain(|abandoned| abandoned != token),
                _ => _ = session_tokens.unused.remove(token),
            }
        }
        Some(entry)
    }

    /// Abandons a token: its bytes are dropped, also if they arrive later. Returns the previous state, which the caller has
    /// to drop without holding the lock.
    fn abandon(&mut self, token: &TransferToken) -> Option<TokenState> {
        let entry = self.entries.get_mut(token)?;
        match entry.state {
            TokenState::Abandoned => None,
            // Redeemed already: no bytes will arrive.
            TokenState::Buffered(_) | TokenState::Invalid(_) => self.remove(token).map(|entry| entry.state),
            TokenState::Issued | TokenState::Bound(..) => {
                let state = std::mem::replace(&mut entry.state, TokenState::Abandoned);
                if let Some(session_tokens) = self.sessions.get_mut(&entry.session) {
                    session_tokens.unused.remove(token);
                    session_tokens.abandoned.push_back(*token);
                    if session_tokens.abandoned.len() > MAX_UNUSED_TOKENS {
                        session_tokens.abandoned.pop_front().map(|oldest| self.entries.remove(&oldest));
                    }
                }
                Some(state)
            }
        }
    }
}

impl TokenTable {
    /// Number of tokens that are issued, and have not been redeemed.
    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.lock().entries.len()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, TokenMaps> {
        // A panic while the lock was held can at most have left a token in one of the two maps only, where it cannot be
        // redeemed.
        self.0.lock().unpoisoned()
    }

    /// Redeems a token: serves the PEER_WRITE of another server. Never waits for a device.
    ///
    /// A valid token is consumed even if this fails. On failure, the queue that waits for the bytes, or will wait for them,
    /// fails as well. An error of that queue alone, such as an exhausted memory budget, is not returned: the source server
    /// did nothing wrong.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], [`TokenError::Length`]; no bytes were written.
    pub(in crate::rpc::server) fn redeem(&self, token: &TransferToken, data: &[u8]) -> Result<(), TokenError> {
        match self.try_redeem(token, data) {
            Err(TokenError::Memory(_)) => Ok(()),
            result => result,
        }
    }

    fn try_redeem(&self, token: &TransferToken, data: &[u8]) -> Result<(), TokenError> {
        let buffer_budget = match self.lock().entries.get(token) {
            Some(TokenEntry { state: TokenState::Bound(..) | TokenState::Abandoned, .. }) => None,
            Some(TokenEntry { state: TokenState::Issued, budget, charge, .. }) => {
                Some((Arc::clone(budget), Arc::clone(charge.session())))
            }
            _ => return Err(TokenError::Unknown),
        };
        // Copies the bytes without holding the lock, so that other sessions do not wait.
        let data = match buffer_budget {
            None => PeerWriteData::Borrowed(data),
            Some((budget, memory)) => {
                match check_length(data).and_then(|()| BufferedBytes::copy_from(data, &budget, &memory)) {
                    Ok(buffered) => PeerWriteData::Buffered(buffered),
                    Err(e) => return Err(self.invalidate(token, e)),
                }
            }
        };
        let mut maps = self.lock();
        let Some(entry) = maps.entries.get_mut(token) else { return Err(TokenError::Unknown) };
        match (&mut entry.state, data) {
            (state @ TokenState::Issued, PeerWriteData::Buffered(buffered)) => {
                *state = TokenState::Buffered(buffered);
                Ok(())
            }
            (TokenState::Bound(..), data) => {
                let entry = maps.remove(token);
                drop(maps);
                match entry.map(|entry| entry.state) {
                    Some(TokenState::Bound(receiver, receive, piece)) => receiver.accept_piece(receive, piece, data),
                    _ => Err(TokenError::Unknown),
                }
            }
            (TokenState::Abandoned, data) => {
                maps.remove(token);
                drop(maps);
                check_length(data.bytes())
            }
            _ => Err(TokenError::Unknown),
        }
    }

    /// Consumes a token whose bytes are invalid. The token was not bound when they arrived. Returns the error.
    pub(super) fn invalidate(&self, token: &TransferToken, e: TokenError) -> TokenError {
        let mut maps = self.lock();
        match maps.entries.get_mut(token).map(|entry| &mut entry.state) {
            Some(state @ TokenState::Issued) => *state = TokenState::Invalid(e.to_device_error()),
            // A RECEIVE_FROM_PEER has bound the token in the meantime, or it was abandoned.
            Some(TokenState::Bound(..) | TokenState::Abandoned) => {
                let used = maps.remove(token);
                drop(maps);
                if let Some(TokenEntry { state: TokenState::Bound(receiver, ..), .. }) = used {
                    receiver.fail(e.to_device_error());
                }
            }
            _ => {}
        }
        e
    }

    /// Abandons tokens: their bytes are dropped when they arrive.
    pub(super) fn abandon(&self, tokens: &[TransferToken]) {
        let mut maps = self.lock();
        let removed: Vec<_> = tokens.iter().map(|token| maps.abandon(token)).collect();
        drop(maps);
        // Outside the lock: this may drop the last handle of device resources.
        drop(removed);
    }

    /// Removes tokens. A later PEER_WRITE with one of them is an error of its sender.
    pub(super) fn remove_all(&self, tokens: &[TransferToken]) {
        let mut maps = self.lock();
        let removed: Vec<_> = tokens.iter().map(|token| maps.remove(token)).collect();
        drop(maps);
        // Outside the lock, as in `abandon`.
        drop(removed);
    }
}
