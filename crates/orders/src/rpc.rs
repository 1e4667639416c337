//! Files of the library's module `rpc`, and fakes of what they use: a transport in memory, and messages in a form that harnesses
//! compare.

pub(crate) mod connection;
pub(crate) mod server;
pub(crate) mod transport;
pub(crate) mod wire;
