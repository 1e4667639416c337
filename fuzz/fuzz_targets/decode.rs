//! Any bytes as a client's stream of requests: `cargo +nightly fuzz run decode`.
//! The body also runs as an ordinary seeded test, `tests/wire/hostile.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)] // responses are for the tests
#[path = "../../tests/wire/decode.rs"]
mod decode;

fuzz_target!(|bytes: &[u8]| {
    decode::requests(bytes);
});
