//! Which version of ggml's protocol a server answers to a HELLO.
//!
//! The HELLO of a 7.0 and of an 8.0 client are the same bytes, and llama.cpp's client aborts its process if the version in the
//! reply is not its own. A server therefore serves each version on a port of its own ([`VersionPolicy::Fixed`]), or finds out
//! per client address which version works ([`VersionPolicy::Probe`], [`VersionProbe`]).
//!
//! ```text
//! mod              ServedVersion, VersionPolicy of a listener, VersionChoice of a connection
//! listen_address   ListenAddress: [HOST:]PORT[=VERSION]
//! probe            VersionProbe: the version that works, per client address
//! ```
//!
//! Not here: the encoding of the reply (`handshake`, `reject`), and the messages of each version (`rpc::wire`).

mod listen_address;
mod probe;

pub use listen_address::{ListenAddress, ParseListenError};
pub(super) use probe::VersionProbe;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use log::{Level, log};
use thiserror::Error;

use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::{RpcCommand, Version, VersionCodec};

/// A version of ggml's protocol that a server can answer to a HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServedVersion {
    /// 8.0. The messages of 8.0.0 and 8.0.1 differ only in numbers inside graphs, and clients ignore the patch number.
    V8_0,
    /// 7.0.
    V7_0,
}

/// A row of [`VERSIONS`].
struct VersionRow {
    version: ServedVersion,
    /// Name in messages.
    name: &'static str,
    /// Further texts that denote the version.
    aliases: &'static [&'static str],
    /// Version in the reply to HELLO.
    reply: Version,
}

/// The versions, newest first.
const VERSIONS: [VersionRow; 2] = [
    VersionRow {
        version: ServedVersion::V8_0,
        name: "8.0",
        aliases: &["8", "8.0.0", "8.0.1"],
        reply: Version { major: 8, minor: 0, patch: 1 },
    },
    VersionRow {
        version: ServedVersion::V7_0,
        name: "7.0",
        aliases: &["7", "7.0.0"],
        reply: Version { major: 7, minor: 0, patch: 0 },
    },
];

/// A text that is not a valid [`ServedVersion`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no version of the protocol that this server supports: {supported}", supported = supported_names())]
pub struct ParseVersionError(String);

fn supported_names() -> String {
    VERSIONS.map(|row| row.name).join(", ")
}

impl ServedVersion {
    /// The order in which versions are tried by default: newest first.
    pub(super) const DEFAULT_ORDER: [ServedVersion; 2] = [ServedVersion::V8_0, ServedVersion::V7_0];

    /// The version in the reply to HELLO.
    pub(super) const fn in_reply(self) -> Version {
        self.row().reply
    }

    /// Whether requests of this version have the command.
    pub(super) fn has_command(self, command: RpcCommand) -> bool {
        self.codec().command_number(command).is_some()
    }

    /// Whether GRAPH_COMPUTE gives graphs a number, by which GRAPH_RECOMPUTE names them.
    pub(super) fn has_graph_uid(self) -> bool {
        self.codec().has_graph_uid()
    }

    fn codec(self) -> &'static VersionCodec {
        // Each version of the table has a codec: see the test below.
        VersionCodec::for_version(self.in_reply()).unwrap_or(VersionCodec::NEWEST)
    }

    const fn row(self) -> &'static VersionRow {
        match self {
            ServedVersion::V8_0 => &VERSIONS[0],
            ServedVersion::V7_0 => &VERSIONS[1],
        }
    }
}

impl fmt::Display for ServedVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

impl FromStr for ServedVersion {
    type Err = ParseVersionError;

    fn from_str(text: &str) -> Result<ServedVersion, ParseVersionError> {
        let row = VERSIONS.iter().find(|row| row.name == text || row.aliases.contains(&text));
        row.map(|row| row.version).ok_or_else(|| ParseVersionError(text.to_owned()))
    }
}

/// How a listener chooses the version that it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum VersionPolicy {
    /// This version, to every client.
    Fixed(ServedVersion),
    /// The version that works for the client's address. The list is the order in which the versions are tried: at least two,
    /// each once.
    Probe(Arc<[ServedVersion]>),
}

impl VersionPolicy {
    /// The policy of a listener for one version, or, if `only` is `None`, for those of `order`. A version that `order` repeats
    /// counts once. `None` if there is no version.
    pub(super) fn new(only: Option<ServedVersion>, order: &[ServedVersion]) -> Option<VersionPolicy> {
        let mut list: Vec<ServedVersion> = Vec::new();
        for &version in only.as_ref().map_or(order, std::slice::from_ref) {
            if !list.contains(&version) {
                list.push(version);
            }
        }
        match list[..] {
            [] => None,
            [version] => Some(VersionPolicy::Fixed(version)),
            _ => Some(VersionPolicy::Probe(list.into())),
        }
    }

    /// The versions that the listener may answer, in the order in which they are tried.
    pub(super) fn versions(&self) -> &[ServedVersion] {
        match self {
            VersionPolicy::Fixed(version) => std::slice::from_ref(version),
            VersionPolicy::Probe(list) => list,
        }
    }
}

/// The choice of the version of one connection. The session calls [`VersionChoice::answer`] when it replies to HELLO, and then
/// reports what the client did, unless that says nothing about the version: fanout's clients (HELLO_EXT) work with each.
pub(super) struct VersionChoice<'a> {
    policy: &'a VersionPolicy,
    probe: &'a VersionProbe,
    peer: PeerAddr,
}

impl<'a> VersionChoice<'a> {
    /// The choice for a connection of `peer` to a listener with this policy.
    pub(super) fn new(policy: &'a VersionPolicy, probe: &'a VersionProbe, peer: PeerAddr) -> VersionChoice<'a> {
        VersionChoice { policy, probe, peer }
    }

    /// The version to answer now.
    pub(super) fn answer(&self) -> ServedVersion {
        match (self.policy, self.peer.ip()) {
            (VersionPolicy::Fixed(version), _) => *version,
            (VersionPolicy::Probe(list), Some(addr)) => self.probe.answer(addr, list, Instant::now()),
            (VersionPolicy::Probe(list), None) => list[0],
        }
    }

    /// Reports a command of a client that was answered `answered`: the version works.
    pub(super) fn report_command(&self, answered: ServedVersion) {
        if let (VersionPolicy::Probe(_), Some(addr)) = (self.policy, self.peer.ip()) {
            self.probe.pinned_by_command(addr, answered, Instant::now());
        }
    }

    /// Reports that the client was answered `answered` and closed the connection without a command, as a client of another
    /// version does. Logs the consequence: at level info when it is new, so that a health check cannot fill the log.
    pub(super) fn report_hang_up(&self, answered: ServedVersion) {
        let (VersionPolicy::Probe(list), Some(addr)) = (self.policy, self.peer.ip()) else { return };
        let Some(hang_up) = self.probe.ended_without_command(addr, list, answered, Instant::now()) else { return };
        let level = if hang_up.is_news { Level::Info } else { Level::Debug };
        let other = hang_up.other;
        let consequence = if hang_up.changed {
            format!("the next connection from this address is answered {other}")
        } else {
            format!(
                "{answered} has worked for this address, so it is answered again; after one more such connection, {other} is"
            )
        };
        log!(
            level,
            "{}: answered protocol {answered}, and the client hung up without a command, as a client of another version \
             does: {consequence}. To serve such clients without a failed attempt, give them a port: --listen PORT={other}",
            self.peer
        );
    }
}

#[cfg(test)]
mod tests {
    use super::ServedVersion::{V7_0, V8_0};
    use super::*;

    #[test]
    fn versions_are_parsed_by_every_name_of_the_table() {
        for row in &VERSIONS {
            assert_eq!(row.version.row().name, row.name, "the rows are in the order of the match");
            for name in row.aliases.iter().chain([&row.name]) {
                assert_eq!(name.parse(), Ok(row.version), "{name}");
            }
            assert_eq!(row.version.to_string(), row.name);
        }
        for text in ["", "9", "8.1", "8.0.2", "7.1", " 8", "v8", "08", "8.", "6.0"] {
            let error = text.parse::<ServedVersion>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.ends_with(": 8.0, 7.0"), "{error}");
        }
    }

    #[test]
    fn a_policy_is_fixed_or_a_list_without_repetitions() {
        let probe = |list: &[ServedVersion]| Some(VersionPolicy::Probe(list.into()));
        for (only, order, want) in [
            (None, &[V8_0, V7_0][..], probe(&[V8_0, V7_0])),
            (None, &[V7_0, V8_0, V7_0, V8_0], probe(&[V7_0, V8_0])),
            (None, &[V7_0, V7_0], Some(VersionPolicy::Fixed(V7_0))),
            (None, &[V8_0], Some(VersionPolicy::Fixed(V8_0))),
            (Some(V7_0), &[V8_0, V7_0], Some(VersionPolicy::Fixed(V7_0))),
            (Some(V7_0), &[], Some(VersionPolicy::Fixed(V7_0))),
            (None, &[], None),
        ] {
            let policy = VersionPolicy::new(only, order);
            assert_eq!(policy, want, "{only:?} {order:?}");
            if let Some(policy) = policy {
                assert!(!policy.versions().is_empty());
            }
        }
    }
}
