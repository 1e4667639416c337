//! Fuzz target: the bytes make the choices of a hostile client, which attacks a server in this process. Run it with
//! `cargo +nightly fuzz run session`. The seeded test `crates/hostile-client/tests/sessions.rs` has the same body.
#![no_main]

use hostile_client::Target;
use libfuzzer_sys::fuzz_target;
use std::sync::{LazyLock, Mutex, PoisonError};

static TARGET: LazyLock<Mutex<Target>> = LazyLock::new(|| Mutex::new(Target::new()));

fuzz_target!(|bytes: &[u8]| {
    TARGET.lock().unwrap_or_else(PoisonError::into_inner).attack(bytes);
});
