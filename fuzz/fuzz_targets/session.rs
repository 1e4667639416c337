//! Any bytes as the choices of a hostile client of a real server: `cargo +nightly fuzz run session`.
//! The body also runs as an ordinary seeded test, `crates/hostile-client/tests/sessions.rs`.
#![no_main]

use hostile_client::Target;
use libfuzzer_sys::fuzz_target;
use std::sync::{LazyLock, Mutex, PoisonError};

static TARGET: LazyLock<Mutex<Target>> = LazyLock::new(|| Mutex::new(Target::new()));

fuzz_target!(|bytes: &[u8]| {
    TARGET.lock().unwrap_or_else(PoisonError::into_inner).attack(bytes);
});
