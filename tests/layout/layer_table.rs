//! The table of layers: the names that each module of the crate, and each program beside it, may use.

mod guarded_paths;
mod server;

pub(crate) use guarded_paths::{ALLOWED_EVERYWHERE, FORBIDDEN_WORDS, GUARDED_PATHS};

use crate::layers::Layer;

/// A row of the table. `tests_also`: names that the unit tests of the layer may use in addition.
pub(crate) const fn layer(
    name: &'static str,
    may_use: &'static [&'static str],
    tests_also: &'static [&'static str],
) -> Layer {
    Layer { name, may_use, tests_also }
}

/// The layers from bottom to top: below the server, the server, and above it. A row may allow rows above it, submodules of its
/// own module, names of [`GUARDED_PATHS`], and dependencies of Cargo.toml that are not [`ALLOWED_EVERYWHERE`].
pub(crate) fn layers() -> Vec<Layer> {
    [BELOW_SERVER, server::SERVER, ABOVE_SERVER].concat()
}

const BELOW_SERVER: &[Layer] = &[
    layer("setters", &[], &[]),
    layer("io_hint", &["io"], &[]),
    layer("log_level", &[], &[]),
    layer("poison", &[], &[]),
    layer("sync", &[], &[]),
    layer("printable", &[], &[]),
    layer("size", &[], &[]),
    layer("tensor", &[], &["fastrand"]),
    layer("gguf", &["tensor", "io"], &["fastrand"]),
    layer("ops", &["tensor"], &[]),
    layer("graph", &["tensor", "ops"], &["fastrand"]),
    layer(
        "device",
        &["setters", "size", "tensor", "ops", "graph", "crossbeam", "memmap2", "files", "io"],
        &["fastrand"],
    ),
    layer("cpu", &["tensor", "ops", "graph", "device", "crossbeam", "memmap2", "files", "io"], &["fastrand"]),
    layer(
        "weights",
        &["io_hint", "tensor", "gguf", "device", "blake3", "safetensors", "io"],
        &["cpu", "fastrand", "files"],
    ),
    layer("fallback", &["tensor", "ops", "graph", "device"], &[]),
    layer("self_test", &["tensor", "ops", "graph", "device", "fastrand"], &["cpu"]),
    layer("rpc::wire", &["setters", "tensor", "ops"], &["fastrand"]),
    layer("rpc::status", &["serde", "files"], &[]),
    layer("rpc::keys", &["io_hint", "base64", "getrandom", "rustls", "webpki", "files", "io"], &[]),
    layer(
        "rpc::transport",
        &["rpc::keys", "rpc::transport::tls", "rustix", "socket2", "sockets", "addresses", "io"],
        &["fastrand", "files", "processes"],
    ),
    layer("rpc::transport::tls", &["rpc::keys", "rpc::transport", "rustls", "addresses", "io"], &[]),
    layer("rpc::connection", &["rpc::wire", "rpc::transport"], &["fastrand", "io"]),
    layer(
        "rpc",
        &["ops", "device", "rpc::wire"],
        &[
            "tensor",
            "graph",
            "cpu",
            "rpc::keys",
            "rpc::transport",
            "rpc::transport::tls",
            "rpc::client",
            "rpc::server",
            "rpc::server::allowed_keys",
            "rpc::server::limits",
            "addresses",
            "files",
            "fastrand",
            "io",
            "processes",
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
            "rpc::keys",
            "rpc::transport",
            "rpc::transport::tls",
            "rpc::wire",
            "fastrand",
            "getrandom",
            "io",
            "rpc::status",
            "serde_json",
        ],
        &["sockets", "addresses"],
    ),
];

const ABOVE_SERVER: &[Layer] = &[
    layer(
        "rpc::relay",
        &[
            "setters",
            "rpc::keys",
            "rpc::server::limits",
            "rpc::server::listen",
            "rpc::server::log_limits",
            "rpc::server::versions",
            "rpc::transport",
            "rpc::transport::tls",
            "addresses",
            "io",
        ],
        &[],
    ),
    layer(
        "sched",
        &[
            "setters",
            "size",
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
    layer("sched::planner", &["size"], &["fastrand"]),
    layer("sched::task", &["tensor", "ops", "graph", "device"], &[]),
    layer("sched::tensor_group", &["tensor", "ops", "graph", "device", "sched", "sched::task"], &[]),
    layer("sched::sampling", &["tensor", "ops", "graph", "sched::task"], &[]),
    layer("sched::tests", &["tensor", "ops", "graph", "device", "sched", "sched::task"], &["files"]),
    layer(
        "sched::split",
        &["tensor", "ops", "graph", "sched", "sched::task"],
        &["sched::assign", "fastrand", "device"],
    ),
    layer("sched::assign", &["graph", "device", "sched", "sched::task", "sched::split"], &["ops", "tensor"]),
    layer(
        "sched::batching",
        &["tensor", "ops", "graph", "sched::task"],
        &["cpu", "device", "sched", "sched::exec", "fastrand"],
    ),
    layer("sched::copy_paths", &["device", "sched"], &["sched::tests"]),
    layer(
        "sched::memory",
        &["graph", "device", "sched", "sched::task", "sched::copy_paths"],
        &["sched::tests", "sched::verify", "fastrand", "ops", "tensor"],
    ),
    layer(
        "sched::verify",
        &["tensor", "ops", "graph", "device", "sched", "sched::task"],
        &["sched::tests", "fastrand"],
    ),
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
    layer("registry", &["setters", "size", "device", "cpu", "fallback", "rpc::client", "io"], &[]),
    layer("recovery", &["device", "weights", "sched", "rpc::client", "registry"], &["io"]),
];
