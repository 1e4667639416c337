//! Responses of 7.0: round trip, truncation at each length, trailing bytes.

use crate::rpc::wire::*;
use fastrand::Rng;

use super::inputs::{response_fields, responses, truncation};

/// The body of the encoded `response`, after a check of its header.
fn body(response: &Response<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    response.encode(&mut bytes);
    let body = bytes.split_off(RESPONSE_HEADER);
    let header = ResponseHeader::decode(bytes.first_chunk().expect("a whole header"));
    assert_eq!(header.size, body.len() as u64, "{}", response.command());
    assert_eq!(response.command().response_size(header.size, 1 << 20), Ok(body.len()));
    body
}

#[test]
fn round_trip() {
    let mut rng = Rng::with_seed(11);
    for round in 0..50 {
        let data: Vec<u8> = (0..round).map(|_| rng.u8(..)).collect();
        let all = responses(&mut rng, &data);
        let with_response = RpcCommand::ALL.iter().filter(|command| command.response().is_some());
        assert!(with_response.copied().eq(all.iter().map(Response::command)), "the list of responses lacks a command");
        for sent in all {
            assert_eq!(Response::decode(sent.command(), &body(&sent)).as_ref(), Ok(&sent));
        }
    }
}

#[test]
fn truncated_or_trailing_bytes_are_errors() {
    let mut rng = Rng::with_seed(12);
    for response in responses(&mut rng, &[1, 2, 3]) {
        let command = response.command();
        let mut body = body(&response);
        if matches!(command, RpcCommand::GetTensor | RpcCommand::GetTensor2d) {
            continue; // bytes of any length; the client compares the length with its request
        }
        let fields = response_fields(command);
        for len in 0..body.len() {
            let got = Response::decode(command, &body[..len]);
            if (command, len) == (RpcCommand::Hello, 3) {
                let Ok(Response::Hello(HelloReply { conn_caps: None, .. })) = got else { panic!("{got:?}") };
            } else {
                assert_eq!(got.err(), Some(truncation(fields, len).unwrap()), "{command} at {len}");
            }
        }
        body.push(0);
        assert_eq!(Response::decode(command, &body), Err(WireError::Trailing { what: command.name(), extra: 1 }));
    }
}

#[test]
fn results_are_zero_or_one() {
    for command in [RpcCommand::SetTensorHash, RpcCommand::CopyTensor] {
        let bad = WireError::BadValue { what: "result", expected: "0 or 1", have: 2 };
        assert_eq!(Response::decode(command, &[2]), Err(bad));
    }
}

#[test]
fn commands_without_a_response_have_none() {
    let silent = RpcCommand::ALL.iter().filter(|command| command.response().is_none());
    let mut names = Vec::new();
    for &command in silent {
        names.push(command.name());
        assert_eq!(Response::decode(command, &[]), Err(WireError::NoResponse(command.name())));
        assert_eq!(command.response_size(0, 0), Err(WireError::NoResponse(command.name())));
    }
    let expected = ["FREE_BUFFER", "BUFFER_CLEAR", "SET_TENSOR", "GRAPH_COMPUTE"];
    assert_eq!(names[..4], expected);
    assert_eq!(
        names[4..],
        ["INIT_TENSOR", "GRAPH_RECOMPUTE", "MEMSET_TENSOR", "SET_TENSOR_2D", "COMM_ALLREDUCE", "COMM_FREE"]
    );
}
