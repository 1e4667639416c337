//! What each program may use of the library, and of the crates and modules that are listed in the table of layers.

use super::layer_table::layer;
use super::layers::Layer;

/// The programs beside the library, by folder, and the layers that they may use.
pub(crate) const PROGRAMS: &[Layer] = &[
    layer(
        "bin",
        &[
            "io_hint",
            "log_level",
            "printable",
            "device",
            "cpu",
            "self_test",
            "rpc::keys",
            "rpc::wire",
            "rpc::client",
            "rpc::relay",
            "rpc::server",
            "registry",
            "rpc::status",
        ],
        &[],
    ),
    layer("bench", &["tensor", "ops", "graph", "device", "cpu", "cuda"], &[]),
    layer(
        "examples/generate",
        &[
            "io_hint",
            "log_level",
            "printable",
            "tensor",
            "gguf",
            "ops",
            "graph",
            "device",
            "cpu",
            "weights",
            "sched",
            "rpc::client",
            "rpc::keys",
            "rpc::server", // the demo
            "rpc::status",
            "registry",
            "recovery",
        ],
        &[],
    ),
];
