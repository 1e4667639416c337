//! The identity that an end of a connection proves: a key or a certificate's name, as lists of allowed clients have it.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::PublicKey;

/// What precedes the name of a certificate in its text.
const PREFIX: &str = "cert:";

/// Longest DNS name.
const MAX_NAME: usize = 253;

/// A raw public key, or a certificate of the CA by its first DNS name: certificates are renewed, and their names stay.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    Key(PublicKey),
    /// In lower case.
    Certificate(String),
}

/// A text that is no identity.
#[derive(Debug, Error)]
#[error(
    "expected a public key: ed25519: and 43 characters, as `rpc-server keygen` prints it; or {PREFIX} and a DNS name"
)]
pub(crate) struct ParseIdentityError(());

impl From<PublicKey> for Identity {
    fn from(key: PublicKey) -> Identity {
        Identity::Key(key)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::Key(key) => key.fmt(f),
            Identity::Certificate(name) => write!(f, "{PREFIX}{name}"),
        }
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Identity, ParseIdentityError> {
        let name = |text: &str| Identity::of_name(text).ok_or(ParseIdentityError(()));
        match text.strip_prefix(PREFIX) {
            Some(text) => name(text),
            None => text.parse().map(Identity::Key).map_err(|_| ParseIdentityError(())),
        }
    }
}

impl Identity {
    /// A certificate with this DNS name. `None`: it is a wildcard, or no DNS name.
    pub(super) fn of_name(name: &str) -> Option<Identity> {
        // A final dot marks a complete name; with and without it, the name is the same.
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let valid = !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(is_name);
        valid.then(|| Identity::Certificate(name.to_ascii_lowercase()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_a_key_or_the_name_of_a_certificate() {
        let key = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        for (text, want) in [
            (key, Some(key)),
            ("cert:gpu-2.example.org", Some("cert:gpu-2.example.org")),
            ("cert:GPU-2", Some("cert:gpu-2")),
            ("cert:gpu-2.", Some("cert:gpu-2")),
            ("cert:.", None),
            ("cert:", None),
            ("cert:*.example.org", None),
            ("cert:a b", None),
            ("gpu-2.example.org", None),
            ("ed25519:", None),
        ] {
            assert_eq!(text.parse::<Identity>().ok().map(|it| it.to_string()).as_deref(), want, "{text:?}");
        }
        assert!(format!("cert:{}", "a".repeat(254)).parse::<Identity>().is_err());
    }
}
