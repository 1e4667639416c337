//! Any bytes as a client's stream of requests: `cargo +nightly fuzz run decode`. Each request that is accepted must encode to the
//! very bytes it came from. `src/rpc/wire/tests/hostile.rs` asserts the same of seeded bytes.
#![no_main]

use fanout::rpc::wire::{Limits, Request, WireError, next_request};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits::new(64, 128, 1 << 20);

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while !rest.is_empty() {
        let start = rest;
        match one(&mut rest) {
            Ok(encoded) => assert_eq!(encoded, &start[..start.len() - rest.len()]),
            Err(_) => return,
        }
    }
});

fn one(stream: &mut &[u8]) -> Result<Vec<u8>, WireError> {
    let (command, body) = next_request(stream, &LIMITS)?;
    let request = Request::decode(command, body, &LIMITS)?;
    assert_eq!(request.command(), command);
    let mut encoded = Vec::new();
    request.encode(&mut encoded);
    Ok(encoded)
}
