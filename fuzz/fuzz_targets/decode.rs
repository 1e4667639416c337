//! Fuzz target: decodes any bytes as a stream of requests. Each accepted request must encode to the same bytes. Run it with
//! `cargo +nightly fuzz run decode`. `src/rpc/wire/tests/hostile.rs` tests the same property with seeded bytes.
#![no_main]

use fanout::rpc::wire::{Limits, Request, WireError, next_request};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits::new(64, 128, 1 << 20);

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while !rest.is_empty() {
        let start = rest;
        match decode_and_encode(&mut rest) {
            Ok(encoded) => assert_eq!(encoded, &start[..start.len() - rest.len()]),
            Err(_) => return,
        }
    }
});

fn decode_and_encode(stream: &mut &[u8]) -> Result<Vec<u8>, WireError> {
    let (command, body) = next_request(stream, &LIMITS)?;
    let request = Request::decode(command, body, &LIMITS)?;
    assert_eq!(request.command(), command);
    let mut encoded = Vec::new();
    request.encode(&mut encoded);
    Ok(encoded)
}
