//! The layers: what each room of the crate, and each program beside it, may use.

use crate::layers::{Guard, Room};

/// `tests_also` is what the unit tests of the room may use besides.
const fn room(name: &'static str, may_use: &'static [&'static str], tests_also: &'static [&'static str]) -> Room {
    Room { name, may_use, tests_also }
}

/// From the bottom up: a row names rows above it, parts of its own room, names of [`GUARDS`], and dependencies of Cargo.toml
/// that are not [`EVERYWHERE`].
pub(crate) const ROOMS: &[Room] = &[
    room("setters", &[], &[]),
    room("tensor", &[], &["fastrand"]),
    room("gguf", &["tensor", "io"], &["fastrand"]),
    room("ops", &["tensor"], &[]),
    room("graph", &["tensor", "ops"], &["fastrand"]),
    room("device", &["setters", "tensor", "ops", "graph", "crossbeam", "memmap2", "files", "io"], &[]),
    room("cpu", &["tensor", "ops", "graph", "device", "crossbeam", "memmap2", "files", "io"], &["fastrand"]),
    room("fallback", &["tensor", "ops", "graph", "device"], &[]),
    room("rpc::wire", &["setters", "tensor", "ops"], &["fastrand"]),
    room("rpc::transport", &["rustix", "socket2", "sockets", "addresses", "io"], &["fastrand"]),
    room("rpc::connection", &["rpc::wire", "rpc::transport"], &["fastrand", "io"]),
    room(
        "rpc",
        &["ops", "device", "rpc::wire"],
        &["tensor", "graph", "cpu", "rpc::transport", "rpc::client", "rpc::server", "rpc::server::limits", "fastrand"],
    ),
    room(
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
    // A server. Its front ends, `ggml` and `extended`, stand on one core, `session`; neither is named below them or by the other.
    room("rpc::server::allowance", &["device"], &[]),
    room("rpc::server::client_connection", &["rpc", "rpc::connection", "rpc::transport", "rpc::wire"], &[]),
    room("rpc::server::peers::list", &["rpc::transport", "addresses", "io"], &[]),
    room("rpc::server::limits", &["setters", "rpc::wire", "rpc::server::peers::list"], &[]),
    room(
        "rpc::server::peers",
        &[
            "device",
            "rpc::connection",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::allowance",
            "rpc::server::limits",
            "rpc::server::peers::list",
            "crossbeam",
        ],
        &[],
    ),
    room("rpc::server::transfer_tokens", &["device", "rpc::wire", "getrandom"], &["cpu"]),
    room("rpc::server::tensor_cache", &["rpc::wire", "rpc::server::limits", "blake3", "files", "io", "processes"], &[]),
    room("rpc::server::gguf_index", &["tensor", "gguf", "device", "blake3", "rustix", "files", "io"], &["processes"]),
    room("rpc::server::guests", &["rpc::transport", "rpc::wire", "rpc::server::client_connection"], &[]),
    room("rpc::server::lifecycle", &["rpc::wire", "rpc::server::client_connection", "rpc::server::guests"], &[]),
    room(
        "rpc::server::context",
        &[
            "device",
            "rpc::server::limits",
            "rpc::server::peers::list",
            "rpc::server::transfer_tokens",
            "rpc::server::tensor_cache",
            "rpc::server::gguf_index",
            "rpc::server::lifecycle",
        ],
        &[],
    ),
    room(
        "rpc::server::session",
        &[
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::context",
        ],
        &["cpu"],
    ),
    room(
        "rpc::server::handshake",
        &["rpc::wire", "rpc::server::client_connection", "rpc::server::context", "rpc::server::session"],
        &[],
    ),
    room("rpc::server::resource_requests", &["rpc::wire", "rpc::server::session"], &[]),
    room(
        "rpc::server::ggml",
        &[
            "tensor",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::resource_requests",
            "rpc::server::tensor_cache",
        ],
        &[],
    ),
    room(
        "rpc::server::extended",
        &[
            "tensor",
            "ops",
            "graph",
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::resource_requests",
            "rpc::server::allowance",
            "rpc::server::peers",
            "rpc::server::transfer_tokens",
            "rpc::server::gguf_index",
            "rpc::server::lifecycle",
            "crossbeam",
            "io",
        ],
        &[],
    ),
    room(
        "rpc::server",
        &[
            "device",
            "rpc::transport",
            "rpc::wire",
            "rpc::server::client_connection",
            "rpc::server::context",
            "rpc::server::session",
            "rpc::server::handshake",
            "rpc::server::ggml",
            "rpc::server::extended",
            "rpc::server::limits",
            "rpc::server::peers::list",
            "rpc::server::tensor_cache",
            "rpc::server::gguf_index",
            "rpc::server::guests",
            "rpc::server::lifecycle",
            "addresses",
            "io",
        ],
        &[],
    ),
    room(
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
    room("sched::task", &["tensor", "ops", "graph", "device"], &[]),
    room("sched::tests", &["tensor", "ops", "graph", "device", "sched", "sched::task"], &["files"]),
    room("sched::split", &["tensor", "ops", "graph", "sched", "sched::task"], &["sched::assign", "fastrand", "device"]),
    room("sched::assign", &["graph", "device", "sched", "sched::task", "sched::split"], &["ops", "tensor"]),
    room("sched::copy_paths", &["device", "sched"], &["sched::tests"]),
    room(
        "sched::memory",
        &["graph", "device", "sched", "sched::task", "sched::copy_paths"],
        &["sched::tests", "sched::verify", "fastrand", "ops", "tensor"],
    ),
    room("sched::verify", &["ops", "graph", "device", "sched", "sched::task"], &["sched::tests", "fastrand"]),
    room(
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
    room("sched::plan_report", &["graph", "sched", "sched::task"], &[]),
    room(
        "sched::exec",
        &["tensor", "ops", "graph", "device", "sched", "sched::task", "sched::copy_paths", "sched::plan", "crossbeam"],
        &[],
    ),
    room("sched::compare", &["graph", "device", "sched", "sched::task", "sched::exec", "crossbeam"], &[]),
    // Backends without a row above stand here by the rule of backends.rs; the registry may use each.
    room("registry", &["setters", "device", "cpu", "fallback", "rpc::client", "io"], &[]),
];

/// The programs beside the library, by folder, and the rooms that they may use.
pub(crate) const PROGRAMS: &[Room] = &[
    room("bin", &["device", "rpc::wire", "rpc::client", "rpc::server", "registry"], &[]),
    room("bench", &["tensor", "ops", "graph", "device", "cpu", "cuda"], &[]),
    room(
        "examples/generate",
        &["tensor", "gguf", "ops", "graph", "device", "cpu", "sched", "rpc::client", "registry"],
        &[],
    ),
];

/// Parts of the standard library and system calls that rooms must name.
pub(crate) const GUARDS: &[Guard] = &[
    Guard {
        name: "sockets",
        paths: &["std::net::Tcp*", "std::net::UdpSocket", "std::net::Shutdown", "std::os::unix::net", "std::os::fd"],
    },
    Guard { name: "addresses", paths: &["std::net"] },
    Guard { name: "files", paths: &["std::fs"] },
    Guard { name: "io", paths: &["std::io"] },
    Guard { name: "processes", paths: &["std::process"] },
];

/// Dependencies that every room may use.
pub(crate) const EVERYWHERE: &[&str] = &["bytemuck", "half", "log", "thiserror"];

/// Words that must not stand in a room's files, not even in a comment.
pub(crate) const UNSAID: &[(&str, &str)] = &[("rpc::server", "CUDA")];
