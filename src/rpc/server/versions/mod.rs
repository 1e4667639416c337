//! Which version of ggml's protocol a server serves a client by.
//!
//! From 4.0 on the HELLO of all versions are the same bytes, and llama.cpp's client aborts its process if the version in the
//! reply is not its own. A server therefore serves each version on a port of its own, or finds out per client address which
//! version works ([`VersionProbe`]). Clients of 3.x show themselves by an empty HELLO, clients of 2024 (gen0) by none. Versions
//! that no HELLO tells apart are told apart by later requests (`rpc::wire`'s detector), so that one [`ServedVersion`] may stand
//! for several.
//!
//! ```text
//! mod              ServedVersion, VersionPolicy of a listener
//! listen_address   ListenAddress: [HOST:]PORT[=VERSION]
//! choice           VersionChoice of a connection, and what the log says about it
//! probe            VersionProbe: the version that works, per client address
//! evidence         the state machine of one address: what proves a version, and what changes it
//! simulation       seeded histories of clients, health checks and scanners (test)
//! ```
//!
//! Not here: the encoding of the reply (`handshake`), and the messages of each version (`rpc::wire`).

mod choice;
mod evidence;
mod listen_address;
mod probe;
#[cfg(test)]
mod simulation;

pub(super) use choice::VersionChoice;
pub use listen_address::{ListenAddress, ParseListenError};
pub(super) use probe::VersionProbe;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::rpc::wire::{ClientCodec, HelloForm, Version, VersionCodec as Codec, VersionDetector};

/// A version of ggml's protocol that a server can serve clients by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServedVersion {
    /// 8.0. The messages of 8.0.0 and 8.0.1 differ only in numbers inside graphs, and clients ignore the patch number.
    V8_0,
    /// 7.0.
    V7_0,
    /// 5.1.
    V5_1,
    /// 5.0. Clients of 5.1 accept it as well.
    V5_0,
    /// 4.0.0 to 4.0.3, which differ only in op numbers: the first graph with an op that differs tells which one it is.
    V4_0,
    /// 4.0.3 only.
    V4_0_3,
    /// 4.0.2 only.
    V4_0_2,
    /// 4.0.1 only.
    V4_0_1,
    /// 4.0.0 only.
    V4_0_0,
    /// 3.0.0, 3.5.0, 3.6.0 and 3.6.1: clients that send an empty HELLO. The requests that differ tell which one it is.
    V3,
    /// 3.6.1 only.
    V3_6_1,
    /// 3.0.0 only, in the numbering of builds until 2025-11-13.
    V3_0_0,
    /// The protocol of 2024, whose clients send no HELLO. The length of a tensor record tells which of its two forms it is.
    Gen0,
}

/// A row of [`VERSIONS`].
struct VersionRow {
    version: ServedVersion,
    /// Name in messages.
    name: &'static str,
    /// Further texts that denote the version.
    aliases: &'static [&'static str],
    /// Version in the reply to HELLO. `None`: its clients send no HELLO.
    reply: Option<Version>,
    /// The versions that its clients may have, never none. The first one is assumed until their requests tell.
    candidates: &'static [Codec],
}

const fn row(
    version: ServedVersion,
    name: &'static str,
    aliases: &'static [&'static str],
    reply: (u8, u8, u8),
    candidates: &'static [Codec],
) -> VersionRow {
    let (major, minor, patch) = reply;
    VersionRow { version, name, aliases, reply: Some(Version { major, minor, patch }), candidates }
}

/// The versions in the order of [`ServedVersion`], newest first.
#[rustfmt::skip] // one row, one line
const VERSIONS: [VersionRow; 13] = [
    row(ServedVersion::V8_0, "8.0", &["8", "8.0.0", "8.0.1"], (8, 0, 1), &[Codec::V8_0_1, Codec::V8_0_0]),
    row(ServedVersion::V7_0, "7.0", &["7", "7.0.0"], (7, 0, 0), &[Codec::V7_0]),
    row(ServedVersion::V5_1, "5.1", &["5.1.0"], (5, 1, 0), &[Codec::V5_1]),
    row(ServedVersion::V5_0, "5.0", &["5", "5.0.0"], (5, 0, 0), &[Codec::V5_0]),
    row(ServedVersion::V4_0, "4.0", &["4"], (4, 0, 3), &[Codec::V4_0_3, Codec::V4_0_2, Codec::V4_0_1, Codec::V4_0_0]),
    row(ServedVersion::V4_0_3, "4.0.3", &[], (4, 0, 3), &[Codec::V4_0_3]),
    row(ServedVersion::V4_0_2, "4.0.2", &[], (4, 0, 2), &[Codec::V4_0_2]),
    row(ServedVersion::V4_0_1, "4.0.1", &[], (4, 0, 1), &[Codec::V4_0_1]),
    row(ServedVersion::V4_0_0, "4.0.0", &[], (4, 0, 0), &[Codec::V4_0_0]),
    // All clients of 3.x accept 3.0.0.
    row(ServedVersion::V3, "3.x", &["3"], (3, 0, 0),
        &[Codec::V3_6_1, Codec::V3_6_0, Codec::V3_6_0Unflagged, Codec::V3_0, Codec::V3_0Second,
          Codec::V3_0Third, Codec::V3_5]),
    row(ServedVersion::V3_6_1, "3.6.1", &[], (3, 6, 1), &[Codec::V3_6_1]),
    row(ServedVersion::V3_0_0, "3.0.0", &[], (3, 0, 0), &[Codec::V3_0]),
    VersionRow {
        version: ServedVersion::Gen0,
        name: "gen0",
        aliases: &[],
        reply: None,
        candidates: &[Codec::Gen0, Codec::Gen0First],
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
    /// The versions that are served by default. 8.0 and 7.0 have the same HELLO and are tried in this order; clients of 3.x and
    /// of 2024 are recognised by the form of their HELLO.
    pub(super) const DEFAULT_ORDER: [ServedVersion; 4] =
        [ServedVersion::V8_0, ServedVersion::V7_0, ServedVersion::V3, ServedVersion::Gen0];

    /// The version in the reply to HELLO; `None` if there is no HELLO.
    pub(super) const fn in_reply(self) -> Option<Version> {
        self.row().reply
    }

    /// How the clients begin a connection.
    pub(super) fn hello_form(self) -> HelloForm {
        self.codec().hello_form()
    }

    /// Whether other versions have the same HELLO, so that the server must try which of them a client has.
    pub(super) fn is_tried(self) -> bool {
        self.hello_form() == HelloForm::Caps
    }

    /// Whether the reply to HELLO offers fanout's extensions.
    pub(super) fn offers_extensions(self) -> bool {
        self.codec().offers_extensions()
    }

    /// Whether requests of this version have a command with this number.
    pub(super) fn has_command_number(self, number: u8) -> bool {
        ClientCodec::new(self.codec()).command(number).is_some()
    }

    /// Finds out which of the versions that this one stands for a client has.
    pub(super) fn detector(self) -> VersionDetector {
        VersionDetector::new(self.row().candidates)
    }

    /// The shortest text that denotes the version.
    fn shortest_name(self) -> &'static str {
        let row = self.row();
        row.aliases.iter().copied().chain([row.name]).min_by_key(|name| name.len()).unwrap_or(row.name)
    }

    /// Whether another version stands for this one, too.
    fn is_exact(self) -> bool {
        VERSIONS.iter().any(|row| row.version.covers(self))
    }

    /// Whether this version stands for another one, too.
    fn covers(self, other: ServedVersion) -> bool {
        self != other && other.row().candidates.iter().all(|codec| self.row().candidates.contains(codec))
    }

    /// How to serve a client if its requests do not tell which of the versions it has that this one stands for, for messages.
    pub(super) fn undecided_remedy(self) -> String {
        let ports = ports(VERSIONS.iter().map(|row| row.version).filter(|&version| self.covers(version)));
        if ports.is_empty() {
            "update the llama.cpp of the client".to_owned()
        } else {
            format!("give such clients a port for their version: {ports}")
        }
    }

    /// A codec with the form of HELLO and the commands of this version.
    fn codec(self) -> Codec {
        self.row().candidates.first().copied().unwrap_or(Codec::NEWEST)
    }

    const fn row(self) -> &'static VersionRow {
        &VERSIONS[self as usize]
    }
}

/// The options that give each of some versions a port, for messages.
fn ports(versions: impl Iterator<Item = ServedVersion>) -> String {
    versions.map(|version| format!("--listen PORT={version}")).collect::<Vec<_>>().join(" or ")
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

/// Which versions a listener serves, by the form of the client's HELLO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VersionPolicy {
    /// All of them, each once, in the configured order.
    versions: Arc<[ServedVersion]>,
}

impl VersionPolicy {
    /// The policy of a listener for one version, or, if `only` is `None`, for the versions of `order`. A version that `order` repeats
    /// counts once. `None` if there is no version.
    pub(super) fn new(only: Option<ServedVersion>, order: &[ServedVersion]) -> Option<VersionPolicy> {
        let mut versions: Vec<ServedVersion> = Vec::new();
        for &version in only.as_ref().map_or(order, std::slice::from_ref) {
            if !versions.contains(&version) {
                versions.push(version);
            }
        }
        (!versions.is_empty()).then(|| VersionPolicy { versions: versions.into() })
    }

    /// The policy of a listener for another protocol.
    pub(super) fn none() -> VersionPolicy {
        VersionPolicy { versions: Arc::default() }
    }

    /// The versions that the listener serves, in the configured order.
    pub(super) fn versions(&self) -> &[ServedVersion] {
        &self.versions
    }

    /// The versions that share the HELLO of 4.0 and later, in the order in which they are tried with a client.
    fn tried(&self) -> impl Iterator<Item = ServedVersion> {
        self.versions.iter().copied().filter(|version| version.is_tried())
    }

    /// Whether the version of a client must be found out among several. These listeners all have the versions of the
    /// configuration, since a listener with versions of its own has one.
    fn tries_several(&self) -> bool {
        self.tried().nth(1).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::ServedVersion::{V7_0, V8_0};
    use super::*;

    #[test]
    fn versions_are_parsed_by_every_name_of_the_table() {
        for (number, row) in VERSIONS.iter().enumerate() {
            assert_eq!(row.version as usize, number, "the rows are in the order of the enum");
            for name in row.aliases.iter().chain([&row.name]) {
                assert_eq!(name.parse(), Ok(row.version), "{name}");
            }
            assert_eq!(row.version.to_string(), row.name);
        }
        for text in ["", "9", "8.1", "8.0.2", "7.1", " 8", "v8", "08", "8.", "6.0", "2.0", "0", "gen1"] {
            let error = text.parse::<ServedVersion>().unwrap_err().to_string();
            let names = ": 8.0, 7.0, 5.1, 5.0, 4.0, 4.0.3, 4.0.2, 4.0.1, 4.0.0, 3.x, 3.6.1, 3.0.0, gen0";
            assert!(error.contains(&format!("{text:?}")) && error.ends_with(names), "{error}");
        }
    }

    #[test]
    fn every_version_of_the_table_has_codecs_of_one_form_of_hello() {
        for row in &VERSIONS {
            let name = row.name;
            assert!(!row.candidates.is_empty(), "{name}");
            for codec in row.candidates {
                assert_eq!(codec.hello_form(), row.version.hello_form(), "{name}: {codec}");
                // A codec has the name of its version, which is not that of the newest one by mistake.
                assert!(!codec.is_newest() || row.version == V8_0, "{name}: {codec}");
                let (major, of_codec) = (name.split('.').next(), codec.to_string());
                assert!(major.is_some_and(|major| of_codec.starts_with(major)), "{name}: {codec}");
            }
            if let Some(reply) = row.reply {
                let replied = Codec::for_version(reply).unwrap();
                assert!(row.candidates.contains(&replied), "{name}: {reply}");
                assert_eq!(replied.offers_extensions(), row.version.offers_extensions(), "{name}");
            }
            assert_eq!(row.version.detector().codec(), ClientCodec::new(row.candidates[0]));
        }
    }

    #[test]
    fn a_policy_serves_each_version_once_and_probes_only_among_several() {
        use ServedVersion::{Gen0, V3, V3_0_0, V4_0};
        for (only, order, versions, probed) in [
            (None, &[V8_0, V7_0][..], &[V8_0, V7_0][..], &[V8_0, V7_0][..]),
            (None, &[V7_0, V8_0, V7_0, V8_0], &[V7_0, V8_0], &[V7_0, V8_0]),
            (None, &[V7_0, V7_0], &[V7_0], &[]),
            (None, &[V8_0], &[V8_0], &[]),
            (None, &[V8_0, Gen0, V7_0, V3], &[V8_0, Gen0, V7_0, V3], &[V8_0, V7_0]),
            (None, &[Gen0, V4_0], &[Gen0, V4_0], &[]),
            (Some(V7_0), &[V8_0, V7_0], &[V7_0], &[]),
            (Some(V3_0_0), &[], &[V3_0_0], &[]),
            (None, &[], &[], &[]),
        ] {
            let policy = VersionPolicy::new(only, order);
            assert_eq!(policy.is_some(), !versions.is_empty());
            let Some(policy) = policy else { continue };
            assert_eq!(policy.versions(), versions, "{only:?} {order:?}");
            assert_eq!(policy.tries_several(), probed.len() > 1, "{only:?} {order:?}");
            if only.is_none() && policy.tries_several() {
                assert_eq!(VersionProbe::of_order(order).list(), probed, "{order:?}");
            }
        }
    }
}
