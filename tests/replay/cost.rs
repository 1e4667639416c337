//! The two sessions on which the cost of a decoded token is compared: the same model, prompt and number of tokens.

use crate::recording::{Direction, Recording, split_request};
use fanout::rpc::wire::RpcCommand;
use std::ops::Range;

/// Sessions of the same model, prompt and number of tokens: 7.0 and 8.0.
pub(crate) const RECORDINGS: [&str; 2] = ["decode-7.rec", "decode-8.rec"];
/// Tokens that each of them decodes behind the prompt.
pub(crate) const TOKENS: usize = 200;

/// The records that decode the tokens: behind the prompt's logits, up to the last logits.
pub(crate) fn decoding(recording: &Recording) -> Range<usize> {
    let mut command = None;
    let mut reads = Vec::new();
    for (index, record) in recording.records.iter().enumerate() {
        match record.direction {
            Direction::Request => command = Some(split_request(&record.bytes).0),
            Direction::Response if command == Some(RpcCommand::GetTensor) => reads.push(index),
            Direction::Response => {}
        }
    }
    assert_eq!(reads.len(), 1 + TOKENS, "the client reads the logits of the prompt and of each token");
    reads[0] + 1..reads[TOKENS] + 1
}
