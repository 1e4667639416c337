//! All certificates of the CA are allowed: the clients of a server with a certificate and without a list.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;

use crate::rpc::keys::Identity;
use crate::rpc::transport::KeyName;
use crate::rpc::transport::tls::{AllowedPeers, Verdict};

/// Limit of the names that a server remembers, which live as long as the process. A client with another name is refused then.
const MAX_NAMES: usize = 1 << 16;

/// Allows each certificate, by its own name. The CA's signature was verified before.
#[derive(Default)]
pub(super) struct AllCertificates {
    names: Mutex<HashMap<Identity, KeyName>>,
}

impl fmt::Debug for AllCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllCertificates")
    }
}

impl AllowedPeers for AllCertificates {
    fn check(&self, identity: &Identity) -> Verdict {
        let Identity::Certificate(name) = identity else { return Verdict::Unknown };
        let mut names = self.names.lock().unpoisoned();
        if let Some(known) = names.get(identity) {
            return Verdict::Allowed(*known);
        }
        if names.len() >= MAX_NAMES {
            return Verdict::Unknown;
        }
        let named = KeyName::new(identity.clone(), name);
        names.insert(identity.clone(), named);
        Verdict::Allowed(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_remembered_up_to_a_limit() {
        let all = AllCertificates::default();
        let identity = |n: usize| format!("cert:limit-{n}.test").parse::<Identity>().unwrap();
        let first = all.check(&identity(0));
        assert!(matches!(first, Verdict::Allowed(name) if name.to_string() == "limit-0.test"));
        for n in 1..MAX_NAMES {
            all.check(&identity(n));
        }
        assert_eq!(all.check(&identity(0)), first);
        assert_eq!(all.check(&identity(MAX_NAMES)), Verdict::Unknown);
        assert_eq!(all.check(&KEY.parse().unwrap()), Verdict::Unknown);
    }

    const KEY: &str = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
}
