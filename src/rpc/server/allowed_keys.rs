//! The list of the clients' keys that a server allows (`--allow-keys`), with the limits of each, which the operator may change
//! while it serves.

mod certificates;
mod list;

pub(super) use list::KeyLimits;

use crate::poison::Unpoisoned;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use thiserror::Error;

use crate::io_hint::io_hint;
use crate::rpc::keys::{Certificate, Identity, KeyFileError, PublicKey, SecretKey};
use crate::rpc::transport::tls::{AllowedPeers, Credentials, Proof, ServerTls, Verdict};
use crate::rpc::transport::{KeyName, PeerAddr};
use certificates::AllCertificates;
use list::{ListEntry, parse_list};

/// Largest list that is read.
const MAX_LIST: u64 = 16 << 20;

/// The keys with which a server serves over TLS: its own one, and its clients'. Or its certificate, and the names of
/// its clients' certificates. Clones share the list.
#[derive(Clone)]
pub struct ServerKeys {
    pub(super) tls: ServerTls,
    proof: Proof,
    /// `None`: all certificates of the CA are allowed.
    list: Option<Arc<AllowedKeys>>,
}

/// Why keys cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerKeysError {
    /// The file of the server's own key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// The list of the clients' keys cannot be read.
    #[error("{path}: {error}{}", io_hint(.error))]
    Io {
        /// The list.
        path: String,
        /// The system's error.
        error: io::Error,
    },
    /// A line of the list is wrong.
    #[error("{path}:{line}: {reason}")]
    Line {
        /// The list.
        path: String,
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The library for TLS refuses the key.
    #[error("TLS: {0}")]
    Tls(String),
}

/// The list, as it was last read.
struct AllowedKeys {
    path: PathBuf,
    keys: RwLock<HashMap<Identity, ListEntry>>,
}

impl ServerKeys {
    /// The server's own key in the file `key`, and the list of its clients' keys in the file `list`: a line for each key, with
    /// the key, a name, `revoked` if it is not allowed any more, and its limits: `memory=SIZE` (device memory of its sessions),
    /// `connections=N`, `devices=LIST` (positions of the devices that it may use, such as `0,2`; its clients see these alone,
    /// from 0) and `share=N` (weight in the turns on a device, from 1 to 1000; 100 for keys without one). Empty lines and those
    /// that begin with `#` do not count.
    ///
    /// # Errors
    /// [`ServerKeysError`].
    pub fn read_files(key: &Path, list: &Path) -> Result<ServerKeys, ServerKeysError> {
        let failed = |e: rustls::Error| ServerKeysError::Tls(e.to_string());
        let credentials = Credentials::of_key(&SecretKey::read_file(key)?).map_err(failed)?;
        let list = AllowedKeys::read(list)?;
        let tls = ServerTls::new(&credentials, Arc::clone(&list) as _).map_err(failed)?;
        Ok(ServerKeys { tls, proof: Proof::Key(credentials), list: Some(list) })
    }

    /// A server with a certificate: clients must prove certificates of its CA. With a list, only those whose first DNS name
    /// stands there: a line has `cert:`, this name without a space before it, a name for the log, and `revoked` if it is not
    /// allowed any more; limits as in [`ServerKeys::read_files`].
    ///
    /// # Errors
    /// [`ServerKeysError`].
    pub fn with_certificate(certificate: Certificate, list: Option<&Path>) -> Result<ServerKeys, ServerKeysError> {
        let list = list.map(AllowedKeys::read).transpose()?;
        let allowed: Arc<dyn AllowedPeers> = match &list {
            Some(list) => Arc::clone(list) as _,
            None => Arc::new(AllCertificates::default()),
        };
        let tls = ServerTls::with_certificate(&certificate, allowed);
        let tls = tls.map_err(|e| ServerKeysError::Tls(e.to_string()))?;
        Ok(ServerKeys { tls, proof: Proof::Certificate(certificate), list })
    }

    /// The public part of the server's own key, which its clients demand. `None`: it has a certificate.
    pub fn public_key(&self) -> Option<PublicKey> {
        if let Proof::Key(credentials) = &self.proof { Some(credentials.public_key()) } else { None }
    }

    /// The server's certificate. `None`: it has a raw key.
    pub fn certificate(&self) -> Option<&Certificate> {
        if let Proof::Certificate(certificate) = &self.proof { Some(certificate) } else { None }
    }

    /// What the server proves to others that it dials.
    pub(super) fn proof(&self) -> Proof {
        self.proof.clone()
    }

    /// Number of keys, or of names of certificates, that are allowed. `None`: all certificates of the CA.
    pub fn allowed(&self) -> Option<usize> {
        let is_allowed = |entry: &&ListEntry| matches!(entry.verdict, Verdict::Allowed(_));
        let list = self.list.as_ref()?;
        Some(list.keys.read().unpoisoned().values().filter(is_allowed).count())
    }

    /// Checks that the list names only devices of the server, which has `devices`.
    ///
    /// # Errors
    /// [`ServerKeysError::Line`].
    pub(super) fn check_devices(&self, devices: usize) -> Result<(), ServerKeysError> {
        let Some(list) = &self.list else { return Ok(()) };
        let keys = list.keys.read().unpoisoned();
        check_devices(&list.path, &keys, devices)
    }

    /// Reads the list again, if there is one, for a server of so many devices. Returns the identities that may use other devices
    /// than before. If the list cannot be used, the former one stays.
    ///
    /// # Errors
    /// [`ServerKeysError::Io`] and [`ServerKeysError::Line`].
    pub(super) fn reread(&self, devices: usize) -> Result<HashSet<Identity>, ServerKeysError> {
        let Some(list) = &self.list else { return Ok(HashSet::new()) };
        let new = read_list(&list.path)?;
        check_devices(&list.path, &new, devices)?;
        let mut keys = list.keys.write().unpoisoned();
        let has_other_devices = |(key, entry): &(&Identity, &ListEntry)| {
            keys.get(*key).is_some_and(|old| old.limits.devices != entry.limits.devices)
        };
        let changed = new.iter().filter(has_other_devices).map(|(key, _)| (*key).clone()).collect();
        *keys = new;
        Ok(changed)
    }

    /// The limits of a client by its name. A client that is not on the list any more, whose session is about to end, has no
    /// devices.
    pub(super) fn limits(&self, name: KeyName) -> KeyLimits {
        let Some(list) = &self.list else { return KeyLimits::default() };
        let keys = list.keys.read().unpoisoned();
        let removed = || KeyLimits { devices: Some(Vec::new()), ..KeyLimits::default() };
        keys.get(name.identity()).map_or_else(removed, |entry| entry.limits.clone())
    }

    /// Whether the list still allows a client, under the same name, which is its tenant. True for clients without a key.
    pub(super) fn still_allows(&self, peer: PeerAddr) -> bool {
        let PeerAddr::Key(_, name) = peer else { return true };
        self.list.as_ref().is_none_or(|list| list.check(name.identity()) == Verdict::Allowed(name))
    }
}

impl fmt::Debug for ServerKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerKeys").field("proof", &self.proof).field("list", &self.list).finish_non_exhaustive()
    }
}

impl fmt::Debug for AllowedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllowedKeys").field("path", &self.path).finish_non_exhaustive()
    }
}

impl AllowedKeys {
    fn read(path: &Path) -> Result<Arc<AllowedKeys>, ServerKeysError> {
        Ok(Arc::new(AllowedKeys { path: path.to_owned(), keys: RwLock::new(read_list(path)?) }))
    }
}

impl AllowedPeers for AllowedKeys {
    fn check(&self, identity: &Identity) -> Verdict {
        let keys = self.keys.read().unpoisoned();
        keys.get(identity).map_or(Verdict::Unknown, |entry| entry.verdict)
    }
}

/// Checks that each device that a list names is one of `devices`.
fn check_devices(path: &Path, keys: &HashMap<Identity, ListEntry>, devices: usize) -> Result<(), ServerKeysError> {
    let missing = |entry: &ListEntry| {
        let named = entry.limits.devices.iter().flatten();
        named.copied().find(|&device| device as usize >= devices).map(|device| (entry.line, device))
    };
    // The first line, as for other errors.
    let Some((line, device)) = keys.values().filter_map(missing).min() else { return Ok(()) };
    let reason = format!("devices: there is no device {device}; the server has {devices}, from 0 on");
    Err(ServerKeysError::Line { path: path.display().to_string(), line, reason })
}

fn read_list(path: &Path) -> Result<HashMap<Identity, ListEntry>, ServerKeysError> {
    let named = || path.display().to_string();
    let io_error = |error| ServerKeysError::Io { path: named(), error };
    // Opening a named pipe would wait for its writer, and a device could send for ever.
    if !std::fs::metadata(path).map_err(io_error)?.is_file() {
        return Err(io_error(io::Error::other("not a regular file")));
    }
    let file = std::fs::File::open(path).map_err(io_error)?;
    let text = io::read_to_string(io::Read::take(file, MAX_LIST + 1));
    let text = text.map_err(io_error)?;
    // A list that is cut could end before a `revoked`.
    if text.len() as u64 > MAX_LIST {
        return Err(io_error(io::Error::other(format!("longer than {MAX_LIST} bytes"))));
    }
    parse_list(&text).map_err(|(line, reason)| ServerKeysError::Line { path: named(), line, reason })
}

#[cfg(test)]
mod tests;
