//! Version of the protocol, and the transport capabilities in HELLO.

use std::fmt;

/// Transport capabilities in HELLO. All zeros: plain TCP, the only transport that this crate supports.
pub type ConnCaps = [u8; 24];

/// Length of the capabilities in bytes.
pub(crate) const CAPS_BYTES: usize = size_of::<ConnCaps>();

/// TCP port of a server unless another is given: that of llama.cpp's server, too.
pub const DEFAULT_PORT: u16 = 50052;

/// Version of the protocol that this crate's server and client implement.
pub const PROTOCOL_VERSION: Version = Version { major: 8, minor: 0, patch: 1 };

/// A version of the protocol, as in a server's reply to HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// Changes with incompatible changes of messages.
    pub major: u8,
    /// Increases with additions, such as new ops, that older servers do not support.
    pub minor: u8,
    /// Not relevant for the compatibility of 7.0. Earlier versions also added ops with a new patch number.
    pub patch: u8,
}

impl Version {
    /// Whether a client of this version can use a server of version `server`: the major numbers must be equal, and the server's
    /// minor number must not exceed the client's.
    pub const fn accepts(self, server: Version) -> bool {
        self.major == server.major && server.minor <= self.minor
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}
