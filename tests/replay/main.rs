//! Replays recorded sessions of llama.cpp clients against the server binary.
//!
//! The files in `tests/rpc/recordings/` contain the messages between a client of protocol 7.0 or 8.0 and llama.cpp's own
//! server. One driver sends the client's requests to this crate's server, which answers the recorded version, with translated
//! handles and addresses, and compares the responses with the recorded ones. The cost of a token is counted on two sessions of
//! the same model and number of tokens.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed expectation of a test is a panic

mod cost;
mod driver;
mod recording;
mod translate;

use driver::Replay;
use recording::Recording;

/// Replays a recording. It must have at least `reads` GET_TENSORs, and the NMSE of the read values must not exceed `bound`.
fn check(file: &str, reads: usize, bound: f64) {
    let recording = Recording::read(file);
    let mut replay = Replay::new(&recording, 2);
    replay.run(0..recording.records.len());
    let stats = replay.stats;
    assert!(stats.graphs >= 5 && stats.reads >= reads, "{} graphs, {} reads", stats.graphs, stats.reads);
    let nmse = stats.nmse();
    assert!(nmse <= bound, "{file}: NMSE {nmse:.2e} against llama.cpp's own server, at most {bound:.0e}");
}

#[test]
fn a_dense_model() {
    check("dense.rec", 5, 1e-3);
}

#[test]
fn a_mixture_of_experts() {
    check("moe.rec", 5, 1e-3);
}

#[test]
fn a_model_with_its_kv_cache_on_the_client() {
    check("kv-on-host.rec", 15, 1e-3);
}

#[test]
fn two_hundred_tokens_of_protocol_7() {
    check("decode-7.rec", 201, 1e-3);
}

#[test]
fn two_hundred_tokens_of_protocol_8() {
    check("decode-8.rec", 201, 1e-3);
}
