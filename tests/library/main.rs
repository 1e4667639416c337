//! Tests of the library's public interface on local devices: graph validation (`graph/`), the device contract (`device/`),
//! the registry (`registry/`), mistakes in building a task (`misuse`), the texts of errors (`errors`), and the generated tables of docs/ops.md (`ops_doc`).
//!
//! All are in one test binary, because each binary links all of fanout. Tests that need a process or an allocator of their own
//! are in other binaries.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod device;
mod errors;
mod graph;
mod misuse;
mod ops_doc;
mod registry;
