//! Completions and the notifier of a session.

#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/extended/completions.rs"]
mod completions;
#[path = "../../harnesses/completions.rs"]
pub(crate) mod harness;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../../src/rpc/server/extended/notifier.rs"]
mod notifier;
