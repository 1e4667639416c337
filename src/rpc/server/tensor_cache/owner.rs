//! The owner of a cache entry, and the name of the entry's file.

use std::ffi::OsString;

use super::ENTRY_EXTENSION;

/// Bytes of an owner's digest. Nobody can find a second owner with the same 128 bits.
pub(super) const OWNER_BYTES: usize = 16;

/// The client that has written an entry, and the only one that finds it: the first bytes of the BLAKE3 digest of its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rpc::server) struct CacheOwner([u8; OWNER_BYTES]);

impl CacheOwner {
    /// The owner with this identity, a text that no other client has.
    pub(in crate::rpc::server) fn new(identity: &str) -> CacheOwner {
        let digest = blake3::hash(identity.as_bytes());
        let mut owner = [0; OWNER_BYTES];
        owner.iter_mut().zip(digest.as_bytes()).for_each(|(to, from)| *to = *from);
        CacheOwner(owner)
    }

    pub(super) fn as_bytes(&self) -> &[u8; OWNER_BYTES] {
        &self.0
    }
}

/// What identifies an entry: its owner, and the FNV-1a hash of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rpc::server) struct EntryKey {
    pub(in crate::rpc::server) owner: CacheOwner,
    pub(in crate::rpc::server) fnv: u64,
}

impl EntryKey {
    /// The name of the entry's file.
    pub(super) fn file_name(&self) -> OsString {
        let owner = u128::from_be_bytes(self.owner.0);
        format!("{owner:032x}-{:016x}.{ENTRY_EXTENSION}", self.fnv).into()
    }
}
