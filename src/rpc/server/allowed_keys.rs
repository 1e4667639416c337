//! The list of the clients' keys that a server allows (`--allow-keys`), which the operator may change while it serves.

mod certificates;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::rpc::keys::{Certificate, Identity, KeyFileError, PublicKey, SecretKey};
use crate::rpc::transport::tls::{AllowedPeers, Credentials, Proof, ServerTls, Verdict};
use crate::rpc::transport::{KeyName, PeerAddr};
use certificates::AllCertificates;

/// Largest list that is read.
const MAX_LIST: u64 = 16 << 20;

/// Longest name of a key: names stand in each line of the log about their clients.
const MAX_NAME: usize = 64;

/// The keys with which a server serves over TLS: its own one, and those of its clients. Or its certificate, and the names of
/// those of its clients. Clones share the list.
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
    #[error("{path}: {source}")]
    Io {
        /// The list.
        path: String,
        /// The system's error.
        source: io::Error,
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
    keys: RwLock<HashMap<Identity, Verdict>>,
}

impl ServerKeys {
    /// The server's own key in the file `key`, and the list of its clients' keys in the file `list`: a line for each key, with
    /// the key, a name, and `revoked` if it is not allowed any more. Empty lines and those that begin with `#` do not count.
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
    /// allowed any more.
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
        let is_allowed = |verdict: &&Verdict| matches!(verdict, Verdict::Allowed(_));
        let list = self.list.as_ref()?;
        Some(list.keys.read().unwrap_or_else(PoisonError::into_inner).values().filter(is_allowed).count())
    }

    /// Reads the list again, if there is one. If it cannot be read, the former one stays.
    ///
    /// # Errors
    /// [`ServerKeysError::Io`] and [`ServerKeysError::Line`].
    pub fn reread(&self) -> Result<(), ServerKeysError> {
        if let Some(list) = &self.list {
            let keys = read_list(&list.path)?;
            *list.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        }
        Ok(())
    }

    /// Whether the list still allows the key by which a client is known; clients without a key are not its business.
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
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        keys.get(identity).copied().unwrap_or(Verdict::Unknown)
    }
}

fn read_list(path: &Path) -> Result<HashMap<Identity, Verdict>, ServerKeysError> {
    let named = || path.display().to_string();
    let file = std::fs::File::open(path).map_err(|source| ServerKeysError::Io { path: named(), source })?;
    let text = io::read_to_string(io::Read::take(file, MAX_LIST + 1));
    let text = text.map_err(|source| ServerKeysError::Io { path: named(), source })?;
    // A list that is cut could end before a `revoked`.
    if text.len() as u64 > MAX_LIST {
        let source = io::Error::other(format!("longer than {MAX_LIST} bytes"));
        return Err(ServerKeysError::Io { path: named(), source });
    }
    parse_list(&text).map_err(|(line, reason)| ServerKeysError::Line { path: named(), line, reason })
}

/// The keys of a list, or the number of the first wrong line and what is wrong with it.
fn parse_list(text: &str) -> Result<HashMap<Identity, Verdict>, (usize, String)> {
    let mut keys = HashMap::new();
    let mut names = HashMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |reason: String| (number, reason);
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let (key, name, is_revoked) = match words[..] {
            [key, name] => (key, name, false),
            [key, name, "revoked"] => (key, name, true),
            _ => {
                return Err(wrong(
                    "expected a key, a name, and `revoked` if the key is not allowed any more".to_owned(),
                ));
            }
        };
        let key: Identity = key.parse().map_err(|e| wrong(format!("{e}")))?;
        if name.len() > MAX_NAME || !name.chars().all(|c| c.is_ascii_graphic()) {
            return Err(wrong(format!("a name has at most {MAX_NAME} printable characters of ASCII, and no spaces")));
        }
        if names.insert(name, ()).is_some() {
            return Err(wrong(format!("the name {name} stands in an earlier line too")));
        }
        let verdict = if is_revoked { Verdict::Revoked } else { Verdict::Allowed(KeyName::new(key.clone(), name)) };
        if keys.insert(key, verdict).is_some() {
            return Err(wrong("the key stands in an earlier line too".to_owned()));
        }
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 2] =
        ["ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "ed25519:PUAXw-hDiVqStwqnTRt-vJyYLM8uxJaMwM1V8Sr0Zgw"];

    #[test]
    fn a_list_has_a_key_in_each_line() {
        let text = format!("# ours\n\n{} alice\n  {} bob revoked\ncert:GPU-2.test gpu-2\n", KEYS[0], KEYS[1]);
        let keys = parse_list(&text).unwrap();
        let verdict = |key: &str| keys.get(&key.parse().unwrap()).copied();
        let allowed = |key: &str, name| Some(Verdict::Allowed(KeyName::new(key.parse::<Identity>().unwrap(), name)));
        assert_eq!(verdict(KEYS[0]), allowed(KEYS[0], "alice"));
        assert_eq!(verdict("cert:gpu-2.test"), allowed("cert:gpu-2.test", "gpu-2"));
        assert_eq!(verdict(KEYS[1]), Some(Verdict::Revoked));
        for (text, line) in [
            (format!("\n{}", KEYS[0]), 2),
            (format!("{} a b", KEYS[0]), 1),
            ("ed25519:AAAA alice".to_owned(), 1),
            ("cert:*.test alice".to_owned(), 1),
            ("cert:a.test a\ncert:A.test b".to_owned(), 2),
            (format!("{} {}", KEYS[0], "n".repeat(65)), 1),
            (format!("{} a\n{} a", KEYS[0], KEYS[1]), 2),
            (format!("{} a\n{} b", KEYS[0], KEYS[0]), 2),
        ] {
            assert_eq!(parse_list(&text).map_err(|(line, _)| line), Err(line), "{text}");
        }
    }
}
