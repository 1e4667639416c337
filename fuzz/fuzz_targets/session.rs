//! Any bytes as the choices of a hostile client of a real server: `cargo +nightly fuzz run session`.
//! The body also runs as an ordinary seeded test, `tests/hostile/sessions.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use session::Target;
use std::sync::{LazyLock, Mutex, PoisonError};

#[allow(dead_code)] // the end is for the test
#[path = "../../tests/hostile/session.rs"]
mod session;

static TARGET: LazyLock<Mutex<Target>> = LazyLock::new(|| Mutex::new(Target::new()));

fuzz_target!(|bytes: &[u8]| {
    TARGET.lock().unwrap_or_else(PoisonError::into_inner).attack(bytes);
});
