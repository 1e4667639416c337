//! The protocol's version, and what a HELLO says beside it.

use std::fmt;

/// Transport capabilities in a HELLO. All zeros: plain TCP, the only transport here.
pub type ConnCaps = [u8; 24];

/// The version that this crate speaks, as server and as client.
pub const PROTOCOL_VERSION: Version = Version { major: 7, minor: 0, patch: 0 };

/// A version of the protocol, as a server's HELLO reply states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// Changes when messages change incompatibly.
    pub major: u8,
    /// Grows with additions that an older client does not know.
    pub minor: u8,
    /// No influence on compatibility.
    pub patch: u8,
}

impl Version {
    /// Whether a client of this version can talk to a server of version `server`: the same major, and no minor
    /// above the client's own.
    pub const fn accepts(self, server: Version) -> bool {
        self.major == server.major && server.minor <= self.minor
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}
