//! Replays recorded sessions of llama.cpp clients against the server binary.
//!
//! The files in `tests/rpc/recordings/` contain the messages between a client of one version of the protocol and llama.cpp's
//! own server. One driver sends the client's requests to this crate's server, which answers the recorded version, with translated
//! handles and addresses, and compares the responses with the recorded ones. The cost of a token is counted on two sessions of
//! the same model and number of tokens.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed expectation of a test is a panic

mod cost;
mod driver;
mod recording;
mod translate;

use cost::{RECORDINGS, TOKENS, decoding};
use driver::{MAX_NMSE, Replay};
use recording::Recording;

/// Replays a recording against a server of `version`. The session must have at least `graphs` graphs and `reads` GET_TENSORs,
/// and the NMSE of the read values must not exceed [`MAX_NMSE`].
fn check(file: &str, version: &str, graphs: usize, reads: usize) {
    let recording = Recording::read(file);
    let mut replay = Replay::new(&recording, version, 2);
    replay.run(0..recording.records.len());
    let stats = replay.stats;
    assert!(stats.graphs >= graphs && stats.reads >= reads, "{} graphs, {} reads", stats.graphs, stats.reads);
    let nmse = stats.nmse();
    assert!(nmse <= MAX_NMSE, "{file}: NMSE {nmse:.2e} against llama.cpp's own server, at most {MAX_NMSE:.0e}");
}

#[test]
fn a_dense_model() {
    check("dense.rec", "7", 5, 5);
}

#[test]
fn a_mixture_of_experts() {
    check("moe.rec", "7", 5, 5);
}

#[test]
fn a_model_with_its_kv_cache_on_the_client() {
    check("kv-on-host.rec", "7", 5, 15);
}

/// Real clients of older versions, on a port of their exact version.
#[test]
fn clients_of_older_versions() {
    for (file, version) in [("5.0.rec", "5.0"), ("4.0.2.rec", "4.0.2"), ("4.0.1.rec", "4.0.1")] {
        check(file, version, 3, 3);
    }
}

/// The server answers 4.0.3 to every client of 4.0, and the numbers in the first graph tell the client's version.
#[test]
fn the_graphs_of_a_client_of_4_0_tell_its_version() {
    for file in ["4.0.2.rec", "4.0.1.rec"] {
        check(file, "4.0", 3, 3);
    }
}

/// Replays both sessions, with their values compared, and counts the responses that this crate's server sent for the tokens.
#[test]
fn a_token_of_protocol_8_takes_no_more_round_trips() {
    let round_trips = |(file, version): (&str, &str)| {
        let recording = Recording::read(file);
        let mut replay = Replay::new(&recording, version, 2);
        let decoding = decoding(&recording);
        replay.run(0..decoding.start);
        let before = replay.stats.round_trips;
        replay.run(decoding);
        assert!(replay.stats.nmse() <= MAX_NMSE, "{file}: NMSE {:.2e}", replay.stats.nmse());
        replay.stats.round_trips - before
    };
    let [seven, eight] = [(RECORDINGS[0], "7"), (RECORDINGS[1], "8")].map(round_trips);
    assert!(TOKENS <= eight && eight <= seven, "{eight} round trips of 8.0, {seven} of 7.0");
}
