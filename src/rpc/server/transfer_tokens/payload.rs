//! Bytes of a PUT, borrowed from its message or kept until they can go to their place.

use std::sync::Arc;

use super::error::TokenError;
use crate::device::{Account, Charge, PIECE};

/// Bytes that came before they could go to their place.
pub(super) struct Stash {
    pub(super) bytes: Vec<u8>,
    /// The session whose memory they go to pays for them.
    _charge: Charge,
}

impl Stash {
    pub(super) fn new(bytes: &[u8], account: &Arc<Account>) -> Result<Stash, TokenError> {
        let charge = account.charge(bytes.len() as u64).map_err(TokenError::Memory)?;
        Ok(Stash { bytes: bytes.to_vec(), _charge: charge })
    }
}

/// Bytes of a PUT.
pub(super) enum Data<'a> {
    Here(&'a [u8]),
    Kept(Stash),
}

impl Data<'_> {
    pub(super) fn len(&self) -> usize {
        self.bytes().len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Data::Here(bytes) => bytes,
            Data::Kept(stash) => &stash.bytes,
        }
    }

    pub(super) fn keep(self, account: &Arc<Account>) -> Result<Stash, TokenError> {
        match self {
            Data::Here(bytes) => Stash::new(bytes, account),
            Data::Kept(stash) => Ok(stash),
        }
    }
}

/// Whether bytes of a PUT can be some of a RECEIVE.
pub(super) fn possible(data: &[u8]) -> Result<(), TokenError> {
    let have = data.len();
    if have == 0 || have as u64 > PIECE { Err(TokenError::Length { expected: PIECE, have }) } else { Ok(()) }
}
