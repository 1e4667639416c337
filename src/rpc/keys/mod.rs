//! Keys with which the two ends of a connection prove who they are: Ed25519 keys in the text forms of command lines and lists,
//! and in files that OpenSSL reads too, or certificates of an organisation's CA.

mod certificate;
mod identity;

pub use certificate::Certificate;
pub(crate) use certificate::name_of;
pub(crate) use identity::Identity;

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::PrivatePkcs8KeyDer;
use thiserror::Error;

use crate::io_hint::io_hint;

/// What precedes a public key in its text.
const PREFIX: &str = "ed25519:";

/// What precedes an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// What precedes the seed of an Ed25519 key in PKCS #8 (RFC 8410, section 7).
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

const PEM_BEGIN: &str = "-----BEGIN PRIVATE KEY-----";
const PEM_END: &str = "-----END PRIVATE KEY-----";

/// Longest file that is read as a key.
const MAX_KEY_FILE: u64 = 64 << 10;

/// The public part of an Ed25519 key. Its text is `ed25519:` and 43 characters of Base64 (the URL-safe alphabet), for example
/// `ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey([u8; 32]);

/// A text that is no public key.
#[derive(Debug, Error)]
#[error("expected a public key: {PREFIX} and 43 characters, as `rpc-server keygen` prints it")]
pub struct ParsePublicKeyError(());

/// The secret part of an Ed25519 key.
#[derive(Clone)]
pub struct SecretKey {
    seed: [u8; 32],
    public: PublicKey,
}

/// Why a file of keys cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyFileError {
    /// The file cannot be read or written.
    #[error("{path}: {error}{}", io_hint(.error))]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        error: io::Error,
    },
    /// A new key would replace an existing file.
    #[error(
        "{0} exists, and is not overwritten: give another file (`rpc-server keygen --public {0}` prints the public part of a key)"
    )]
    Exists(String),
    /// The content is no Ed25519 key.
    #[error(
        "{0}: no Ed25519 key in PEM (PKCS #8), as `rpc-server keygen` and `openssl genpkey -algorithm ed25519` write it"
    )]
    Format(String),
    /// A certificate, its key or the certificates of a CA cannot be used.
    #[error("{path}: {reason}")]
    Certificate {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// Other users can read a secret key.
    #[error("{path}: other users can read this secret key (mode {mode:o}): chmod 600 {path}")]
    Exposed {
        /// The file.
        path: String,
        /// Its permissions.
        mode: u32,
    },
}

impl PublicKey {
    /// The key of a SubjectPublicKeyInfo. `None`: of another algorithm.
    pub(crate) fn from_spki(spki: &[u8]) -> Option<PublicKey> {
        spki.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(PublicKey)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = ParsePublicKeyError;

    fn from_str(text: &str) -> Result<PublicKey, ParsePublicKeyError> {
        let decoded = text.strip_prefix(PREFIX).and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        decoded.and_then(|bytes| bytes.try_into().ok()).map(PublicKey).ok_or(ParsePublicKeyError(()))
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(…)")
    }
}

impl SecretKey {
    /// A new key.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> io::Result<SecretKey> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|e| io::Error::other(e.to_string()))?;
        SecretKey::from_seed(seed).ok_or_else(|| io::Error::other("no key from random numbers"))
    }

    /// Reads a file that [`SecretKey::create_file`] or OpenSSL has written.
    ///
    /// # Errors
    /// [`KeyFileError`], also if other users can read the file.
    pub fn read_file(path: &Path) -> Result<SecretKey, KeyFileError> {
        let pem = read_secret(path)?;
        SecretKey::from_pem(&pem).ok_or_else(|| KeyFileError::Format(path.display().to_string()))
    }

    /// Writes the key to a new file that only this user can read.
    ///
    /// # Errors
    /// [`KeyFileError::Io`]; no part of the file is left then. [`KeyFileError::Exists`].
    pub fn create_file(&self, path: &Path) -> Result<(), KeyFileError> {
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let named = || path.display().to_string();
        let mut file = options.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => KeyFileError::Exists(named()),
            _ => KeyFileError::Io { path: named(), error },
        })?;
        file.write_all(self.to_pem().as_bytes()).map_err(|error| {
            // On a full disk. A second attempt would find the file.
            let _ = std::fs::remove_file(path);
            KeyFileError::Io { path: named(), error }
        })
    }

    fn to_pem(&self) -> String {
        format!("{PEM_BEGIN}\n{}\n{PEM_END}\n", STANDARD.encode(self.to_pkcs8()))
    }

    fn from_pem(pem: &str) -> Option<SecretKey> {
        let (_, rest) = pem.split_once(PEM_BEGIN)?;
        let (body, _) = rest.split_once(PEM_END)?;
        let body: String = body.split_ascii_whitespace().collect();
        let der = STANDARD.decode(body).ok()?;
        SecretKey::from_seed(der.strip_prefix(&PKCS8_PREFIX)?.try_into().ok()?)
    }

    /// The public part.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    fn from_seed(seed: [u8; 32]) -> Option<SecretKey> {
        let pkcs8 = PrivatePkcs8KeyDer::from(pkcs8(&seed));
        let key = any_eddsa_type(&pkcs8).ok()?;
        let public = PublicKey::from_spki(&key.public_key()?)?;
        Some(SecretKey { seed, public })
    }

    /// The key in PKCS #8.
    pub(crate) fn to_pkcs8(&self) -> Vec<u8> {
        pkcs8(&self.seed)
    }
}

fn pkcs8(seed: &[u8; 32]) -> Vec<u8> {
    [&PKCS8_PREFIX[..], seed].concat()
}

/// The text of a file with a secret key.
fn read_secret(path: &Path) -> Result<String, KeyFileError> {
    let named = || path.display().to_string();
    let io = |error| KeyFileError::Io { path: named(), error };
    let file = std::fs::File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    // A folder is refused first: the check of the mode below is for files.
    if metadata.is_dir() {
        return Err(io(io::ErrorKind::IsADirectory.into()));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyFileError::Exposed { path: named(), mode });
        }
    }
    let text = io::read_to_string(io::Read::take(file, MAX_KEY_FILE + 1)).map_err(io)?;
    if text.len() as u64 > MAX_KEY_FILE {
        return Err(io(io::Error::other(format!("longer than {MAX_KEY_FILE} bytes"))));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_text() {
        let text = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        let key: PublicKey = text.parse().unwrap();
        assert_eq!(key.to_string(), text);
        assert_eq!(PublicKey::from_spki(&[&SPKI_PREFIX[..], &key.0].concat()), Some(key));
        assert_eq!(PublicKey::from_spki(&key.0), None);
        for wrong in ["", "ed25519:", &text[8..], &text[..50], &format!("{text}A"), &text.replace('_', "/")] {
            assert!(wrong.parse::<PublicKey>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn secret_keys_are_files_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = SecretKey::generate().unwrap();
        key.create_file(&path).unwrap();
        assert_eq!(SecretKey::read_file(&path).unwrap().seed, key.seed);
        assert!(matches!(key.create_file(&path), Err(KeyFileError::Exists(_))), "an existing file stays");
        assert!(matches!(SecretKey::read_file(dir.path()), Err(KeyFileError::Io { .. })), "a folder");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
            assert!(matches!(SecretKey::read_file(&path), Err(KeyFileError::Exposed { mode: 0o640, .. })));
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        std::fs::write(&path, "no key").unwrap();
        assert!(matches!(SecretKey::read_file(&path), Err(KeyFileError::Format(_))));
        // The example of RFC 8410, section 10.3.
        let example = "MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC";
        let key = SecretKey::from_pem(&format!("{PEM_BEGIN}\n{example}\n{PEM_END}\n")).unwrap();
        assert_eq!(STANDARD.encode(key.to_pkcs8()), example);
        // The public part, in the same document.
        assert_eq!(key.public_key().to_string(), "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE");
        assert_eq!(format!("{key:?}"), "SecretKey(…)");
    }
}
