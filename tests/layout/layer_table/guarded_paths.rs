//! What all layers may use, and what only those may use whose rows name it.

use crate::layers::GuardedPaths;

/// Parts of the standard library (system calls) that a layer may use only if its row names them.
pub(crate) const GUARDED_PATHS: &[GuardedPaths] = &[
    GuardedPaths {
        name: "sockets",
        paths: &["std::net::Tcp*", "std::net::UdpSocket", "std::net::Shutdown", "std::os::unix::net", "std::os::fd"],
    },
    GuardedPaths { name: "addresses", paths: &["std::net"] },
    GuardedPaths { name: "files", paths: &["std::fs"] },
    GuardedPaths { name: "io", paths: &["std::io"] },
    GuardedPaths { name: "processes", paths: &["std::process"] },
];

/// Dependencies, and modules without dependencies, that every layer may use.
pub(crate) const ALLOWED_EVERYWHERE: &[&str] = &["bytemuck", "half", "log", "poison", "sync", "thiserror"];

/// Words that must not occur in the files of a layer, not even in comments. The server, for example, must not depend on any
/// backend.
pub(crate) const FORBIDDEN_WORDS: &[(&str, &str)] = &[("rpc::server", "CUDA")];
