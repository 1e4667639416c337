//! How another server is trusted: the part of `--peer` after `=`.

use std::fmt;

use crate::rpc::keys::PublicKey;

/// The text that demands a certificate of this server's CA, for the host by which the server is dialled.
const CERTIFICATE: &str = "cert";

/// The text that permits collectives, which are not encrypted.
const PLAIN_COLLECTIVES: &str = "plain-collectives";

/// What the operator demands of the servers of an entry, and permits to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerTrust {
    /// `HOST`: dialled without TLS.
    Plain,
    /// `HOST=ed25519:…`: dialled over TLS, and must prove this key.
    Key(PublicKey),
    /// `HOST=cert`: dialled over TLS, and must prove a certificate of this server's CA for the host that is dialled.
    Certificate,
    /// `HOST=plain-collectives`: collectives only, also on a server with keys.
    PlainCollectives,
}

/// What another server is dialled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Transfers,
    Collectives,
}

impl PeerTrust {
    pub(super) fn parse(text: &str) -> Option<PeerTrust> {
        match text {
            PLAIN_COLLECTIVES => Some(PeerTrust::PlainCollectives),
            CERTIFICATE => Some(PeerTrust::Certificate),
            key => key.parse().ok().map(PeerTrust::Key),
        }
    }

    /// Whether the servers of the entry must prove something, so that they are dialled over TLS.
    pub(super) fn demands_tls(self) -> bool {
        matches!(self, PeerTrust::Key(_) | PeerTrust::Certificate)
    }

    /// Whether this server may exchange bytes with a server of the entry for `purpose`. Collectives are not encrypted: a server
    /// with keys (`is_keyed`) permits them on loopback only, unless the entry names them.
    pub(super) fn permits(self, purpose: Purpose, is_keyed: bool, is_loopback: bool) -> bool {
        match (self, purpose) {
            (PeerTrust::PlainCollectives, purpose) => purpose == Purpose::Collectives,
            (_, Purpose::Transfers) => true,
            (_, Purpose::Collectives) => !is_keyed || is_loopback,
        }
    }
}

impl fmt::Display for PeerTrust {
    /// With the `=` before it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerTrust::Plain => Ok(()),
            PeerTrust::Key(key) => write!(f, "={key}"),
            PeerTrust::Certificate => write!(f, "={CERTIFICATE}"),
            PeerTrust::PlainCollectives => write!(f, "={PLAIN_COLLECTIVES}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::peer_allowlist::{Peer, PeerAllowlist};
    use crate::rpc::keys::SecretKey;
    use crate::rpc::transport::tls::{Credentials, Proof};

    const KEYS: [&str; 2] =
        ["ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "ed25519:PUAXw-hDiVqStwqnTRt-vJyYLM8uxJaMwM1V8Sr0Zgw"];

    fn list(peers: &[&str], is_keyed: bool) -> PeerAllowlist {
        let proof = is_keyed.then(|| Proof::Key(Credentials::of_key(&SecretKey::generate().unwrap()).unwrap()));
        let peers: Vec<Peer> = peers.iter().map(|peer| peer.parse().unwrap()).collect();
        PeerAllowlist::resolve(&peers, proof).unwrap()
    }

    #[test]
    fn an_entry_says_how_a_server_is_trusted() {
        for host in ["10.0.0.5:7", "10.0.0.0/24:50052", "gpu-2:*", "[fd00::5]:50052"] {
            for trust in [String::new(), format!("={}", KEYS[0]), "=cert".to_owned(), "=plain-collectives".to_owned()] {
                let text = format!("{host}{trust}");
                let peer: Peer = text.parse().unwrap();
                let demands = (peer.demands_key(), peer.demands_certificate());
                assert_eq!((peer.to_string(), demands), (text, (trust.starts_with("=ed25519"), trust == "=cert")));
            }
        }
        for wrong in ["", "ed25519:AAAA", "plain", KEYS[0].trim_start_matches("ed25519:"), &format!("{}=", KEYS[0])] {
            assert!(format!("10.0.0.5={wrong}").parse::<Peer>().is_err(), "{wrong:?}");
        }
    }

    /// The address decides, not the entry by which a client names it: no name leads to a connection without TLS.
    #[test]
    fn a_host_must_prove_one_of_the_keys_of_all_its_entries() {
        let [first, second] = KEYS;
        for (peers, address, want) in [
            (&["10.0.0.5:7".to_owned()][..], "10.0.0.5:7", &[][..]),
            (&[format!("10.0.0.5:7={first}")], "10.0.0.5:7", &[first]),
            (&[format!("10.0.0.0/24:7={first}")], "10.0.0.5:7", &[first]),
            (&[format!("10.0.0.5:7={first}"), format!("10.0.0.5:7={second}")], "10.0.0.5:7", &[first, second]),
            (&[format!("10.0.0.0/24:*={first}"), format!("10.0.0.5:7={second}")], "10.0.0.5:7", &[first, second]),
            (&["10.0.0.0/24:*".to_owned(), format!("10.0.0.5:7={first}")], "10.0.0.5:7", &[first]),
            (&["10.0.0.0/24:*".to_owned(), format!("10.0.0.5:7={first}")], "10.0.0.5:8", &[]),
            (&["10.0.0.0/24:*".to_owned(), format!("10.0.0.5:7={first}")], "10.0.0.6:7", &[]),
            (&["localhost:7".to_owned(), format!("127.0.0.1:7={first}")], "localhost:7", &[first]),
            (&[format!("localhost:7={first}"), "127.0.0.0/8:*".to_owned()], "127.0.0.1:7", &[first]),
            (&[format!("10.0.0.5:7={first}"), "10.0.0.5:7=plain-collectives".to_owned()], "10.0.0.5:7", &[first]),
        ] {
            let peers: Vec<_> = peers.iter().map(String::as_str).collect();
            let list = list(&peers, true);
            let targets = list.transfer_targets(address).unwrap();
            let demands = list.demands_of(&targets.addresses);
            let keys: Vec<_> = demands.iter().map(|demand| demand.to_string().split_off(1)).collect();
            assert_eq!(keys, want, "{peers:?}: {address}");
            assert_eq!(targets.tls.is_some(), !want.is_empty(), "{peers:?}: {address}");
        }
        for peers in [
            &["10.0.0.5:7=cert"][..],
            &["10.0.0.0/24:*", "10.0.0.5:7=cert"],
            &[&format!("10.0.0.0/24:*={first}"), "10.0.0.5:7=cert"],
        ] {
            let why = list(peers, true).transfer_targets("10.0.0.5:7").map(drop).unwrap_err();
            assert!(why.contains("=cert"), "{why}");
        }
        let refused = list(&["10.0.0.5:7=plain-collectives"], true).transfer_targets("10.0.0.5:7");
        assert!(refused.map(drop).unwrap_err().contains("none of its --peer flags names it"));
    }

    #[test]
    fn collectives_of_a_server_with_keys_need_loopback_or_consent() {
        let key = format!("10.0.0.5={}", KEYS[0]);
        let local_key = format!("127.0.0.1={}", KEYS[0]);
        for (peers, is_keyed, host, want) in [
            (&["10.0.0.5"][..], false, "10.0.0.5", true),
            (&["10.0.0.5"], true, "10.0.0.5", false),
            (&[&key], true, "10.0.0.5", false),
            (&["10.0.0.5=plain-collectives"], true, "10.0.0.5", true),
            (&["10.0.0.5=plain-collectives"], false, "10.0.0.5", true),
            (&[&key, "10.0.0.5=plain-collectives"], true, "10.0.0.5", true),
            (&[&key, "10.0.0.0/24=plain-collectives"], true, "10.0.0.5", true),
            (&["10.0.0.6=plain-collectives", "10.0.0.5"], true, "10.0.0.5", false),
            (&["10.0.0.6=plain-collectives"], true, "10.0.0.5", false),
            (&["127.0.0.1"], true, "127.0.0.1", true),
            (&[&local_key], true, "127.0.0.1", true),
            (&["::1"], true, "::1", true),
            (&["127.0.0.1"], true, "127.0.0.2", false),
        ] {
            let list = list(peers, is_keyed);
            let address = if host.contains(':') { format!("[{host}]:51052") } else { format!("{host}:51052") };
            let dialled = list.collective_targets(&address);
            let ip = host.parse().unwrap();
            assert_eq!((dialled.is_ok(), list.permits_incoming(ip)), (want, want), "{peers:?}, {is_keyed}: {host}");
            // Rank 0 does not listen where nothing could be accepted.
            let is_possible = want || peers.iter().any(|peer| peer.ends_with("plain-collectives"));
            assert_eq!(
                list.permits_collectives_at(ip),
                is_possible || ip.is_loopback(),
                "{peers:?}, {is_keyed}: {host}"
            );
        }
        let why = list(&["10.0.0.5"], true).collective_targets("10.0.0.5:51052").unwrap_err();
        assert!(why.contains("=plain-collectives"), "{why}");
        let why = list(&["10.0.0.5"], true).collective_targets("10.0.0.6:51052").unwrap_err();
        assert!(why.contains("none of its --peer flags names it"), "{why}");
    }
}
