//! The table of layers: the names that each module of the crate, and each program beside it, may use.

use crate::layers::{GuardedPaths, Layer};

/// A row of the table. `tests_also`: names that the unit tests of the layer may use in addition.
const fn layer(name: &'static str, may_use: &'static [&'static str], tests_also: &'static [&'static str]) -> Layer {
    Layer { name, may_use, tests_also }
}

/// The layers from bottom to top. A row may allow rows above it, submodules of its own module, names of [`GUARDED_PATHS`], and
/// dependencies of Cargo.toml that are not [`ALLOWED_EVERYWHERE`].
pub(crate) const LAYERS: &[Layer] = &[
    layer("setters", &[], &[]),
    layer("log_level", &[], &[]),
    layer("tensor", &[], &["fastrand"]),
    layer("gguf", &["tensor", "io"], &["fastrand"]),
    layer("ops", &["tensor"], &[]),
    layer("graph", &["tensor", "ops"], &["fastrand"]),
    layer("device", &["setters", "tensor", "ops", "graph", "crossbeam", "memmap2", "files", "io"], &[]),
    layer("cpu", &["tensor", "ops", "graph", "device", "crossbeam", "memmap2", "files", "io"], &["fastrand"]),
    layer("fallback", &["tensor", "ops", "graph", "device"], &[]),
    layer("rpc::wire", &["setters", "tensor", "ops"], &["fastrand"]),
    layer("rpc::transport", &["rustix", "socket2", "sockets", "addresses", "io"], &["fastrand"]),
    layer("rpc::connection", &["rpc::wire", "rpc::transport"], &["fastrand", "io"]),
    layer(
        "rpc",
        &["ops", "device", "rpc::wire"],
        &[
            "tensor",
            "graph",
            "cpu",
            "rpc::transport",
            "rpc::client",
            "rpc::server",
            "rpc::server::limits",
            "addresses",
            "fastrand",
        ],
    ),
    layer(
        "rpc::client",
        &[
            "setters",
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc",
            "rpc::connection",
            "rpc::transport",
            "rpc::wire",
            "fastrand",
            "io",
        ],
        &["sockets", "addresses"],
    ),
    // The server. Its front ends `ggml` and `extended` share the core `session`; no layer below uses a front end, and neither
    // front end uses its sibling.
    layer("rpc::server::byte_semaphore", &["device"], &[]),
    layer("rpc::server::peers::peer_allowlist", &["rpc::transport", "addresses", "io"], &[]),
    layer("rpc::server::versions", &["rpc::transport", "rpc::wire", "addresses"], &[]),
    layer(
        "rpc::server::limits",
        &["setters", "rpc::wire", "rpc::server::peers::peer_allowlist", "rpc::server::versions"],
        &[],
    ),
    layer("rpc::server::tenants", &["device", "rpc::transport", "rpc::server::limits", "addresses"], &[]),
    layer("rpc::server::thread_budget", &["device"], &[]),
    layer("rpc::server::hangup_watch", &["rpc::transport"], &[]),
    layer(
        "rpc::server::client_connection",
        &[
            "rpc",
            "rpc::connection",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::hangup_watch",
            "rpc::server::tenants",
            "addresses",
        ],
        &[],
    ),
    layer("rpc::server::listen", &["rpc::transport", "rpc::server::versions", "addresses", "io"], &[]),
    layer(
        "rpc::server::peers",
        &[
            "device",
            "rpc::connection",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::byte_semaphore",
            "rpc::server::limits",
            "rpc::server::thread_budget",
            "rpc::server::peers::peer_allowlist",
            "crossbeam",
        ],
        &[],
    ),
    layer(
        "rpc::server::collectives",
        &[
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc",
            "rpc::transport",
            "rpc::server::peers::peer_allowlist",
            "addresses",
        ],
        &["fastrand"],
    ),
    layer(
        "rpc::server::transfer_tokens",
        &["device", "rpc::wire", "rpc::server::thread_budget", "getrandom"],
        &["cpu"],
    ),
    layer(
        "rpc::server::tensor_cache",
        &["rpc::wire", "rpc::server::limits", "blake3", "files", "io", "processes"],
        &[],
    ),
    layer("rpc::server::gguf_index", &["tensor", "gguf", "device", "blake3", "rustix", "files", "io"], &["processes"]),
    layer(
        "rpc::server::admission",
        &["rpc::transport", "rpc::wire", "rpc::server::client_connection", "rpc::server::tenants"],
        &[],
    ),
    layer("rpc::server::lifecycle", &["rpc::wire", "rpc::server::client_connection", "rpc::server::admission"], &[]),
    layer(
        "rpc::server::context",
        &[
            "device",
            "rpc::server::limits",
            "rpc::server::tenants",
            "rpc::server::listen",
            "rpc::server::peers::peer_allowlist",
            "rpc::server::collectives",
            "rpc::server::thread_budget",
            "rpc::server::transfer_tokens",
            "rpc::server::tensor_cache",
            "rpc::server::gguf_index",
            "rpc::server::lifecycle",
            "rpc::server::hangup_watch",
            "rpc::server::versions",
        ],
        &[],
    ),
    layer(
        "rpc::server::session",
        &[
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::hangup_watch",
            "rpc::server::tenants",
            "rpc::server::context",
        ],
        &["cpu"],
    ),
    layer(
        "rpc::server::handshake",
        &[
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::versions",
        ],
        &[],
    ),
    layer("rpc::server::resource_requests", &["rpc::wire", "rpc::server::session"], &[]),
    layer(
        "rpc::server::ggml",
        &[
            "tensor",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::hangup_watch",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::resource_requests",
            "rpc::server::tensor_cache",
            "rpc::server::versions",
            "rpc::server::collectives",
            "addresses",
        ],
        &["fastrand"],
    ),
    layer(
        "rpc::server::extended",
        &[
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::tenants",
            "rpc::server::client_connection",
            "rpc::server::hangup_watch",
            "rpc::server::listen",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::resource_requests",
            "rpc::server::byte_semaphore",
            "rpc::server::peers",
            "rpc::server::thread_budget",
            "rpc::server::transfer_tokens",
            "rpc::server::gguf_index",
            "rpc::server::lifecycle",
        ],
        &[],
    ),
    layer(
        "rpc::server",
        &[
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::hangup_watch",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::ggml",
            "rpc::server::extended",
            "rpc::server::limits",
            "rpc::server::thread_budget",
            "rpc::server::tenants",
            "rpc::server::listen",
            "rpc::server::collectives",
            "rpc::server::peers::peer_allowlist",
            "rpc::server::tensor_cache",
            "rpc::server::gguf_index",
            "rpc::server::admission",
            "rpc::server::lifecycle",
            "rpc::server::versions",
            "addresses",
        ],
        &[],
    ),
    layer(
        "sched",
        &[
            "setters",
            "ops",
            "graph",
            "device",
            "sched::compare",
            "sched::exec",
            "sched::copy_paths",
            "sched::plan_report",
            "sched::task",
            "io",
        ],
        &[],
    ),
    layer("sched::task", &["tensor", "ops", "graph", "device"], &[]),
    layer("sched::tests", &["tensor", "ops", "graph", "device", "sched", "sched::task"], &["files"]),
    layer(
        "sched::split",
        &["tensor", "ops", "graph", "sched", "sched::task"],
        &["sched::assign", "fastrand", "device"],
    ),
    layer("sched::assign", &["graph", "device", "sched", "sched::task", "sched::split"], &["ops", "tensor"]),
    layer("sched::copy_paths", &["device", "sched"], &["sched::tests"]),
    layer(
        "sched::memory",
        &["graph", "device", "sched", "sched::task", "sched::copy_paths"],
        &["sched::tests", "sched::verify", "fastrand", "ops", "tensor"],
    ),
    layer("sched::verify", &["ops", "graph", "device", "sched", "sched::task"], &["sched::tests", "fastrand"]),
    layer(
        "sched::plan",
        &[
            "sched",
            "sched::task",
            "sched::split",
            "sched::assign",
            "sched::copy_paths",
            "sched::memory",
            "sched::verify",
        ],
        &[],
    ),
    layer("sched::plan_report", &["graph", "sched", "sched::task"], &[]),
    layer(
        "sched::exec",
        &["tensor", "ops", "graph", "device", "sched", "sched::task", "sched::copy_paths", "sched::plan", "crossbeam"],
        &[],
    ),
    layer("sched::compare", &["graph", "device", "sched", "sched::task", "sched::exec", "crossbeam"], &[]),
    // Backends without a row are inserted here by backends.rs; the registry may use all of them.
    layer("registry", &["setters", "device", "cpu", "fallback", "rpc::client", "io"], &[]),
];

/// The programs beside the library, by folder, and the layers that they may use.
pub(crate) const PROGRAMS: &[Layer] = &[
    layer("bin", &["log_level", "device", "rpc::wire", "rpc::client", "rpc::server", "registry"], &[]),
    layer("bench", &["tensor", "ops", "graph", "device", "cpu", "cuda"], &[]),
    layer(
        "examples/generate",
        &["log_level", "tensor", "gguf", "ops", "graph", "device", "cpu", "sched", "rpc::client", "registry"],
        &[],
    ),
];

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

/// Dependencies that every layer may use.
pub(crate) const ALLOWED_EVERYWHERE: &[&str] = &["bytemuck", "half", "log", "thiserror"];

/// Words that must not occur in the files of a layer, not even in comments. The server, for example, must not depend on any
/// backend.
pub(crate) const FORBIDDEN_WORDS: &[(&str, &str)] = &[("rpc::server", "CUDA")];
