//! Hostile bytes: counts larger than the body, and mutated messages.

use crate::rpc::wire::*;
use fastrand::Rng;

use super::{
    canonical::{check_request_stream, check_response},
    inputs::{LIMITS, RequestBuffers, mutate, request, responses},
};

#[test]
fn graph_counts_allocate_no_memory() {
    let unlimited = Limits { max_nodes: u32::MAX, max_tensors: u32::MAX, max_body: u64::MAX };
    let body = |n_nodes: u32, ids: usize, n_tensors: u32, records: usize| {
        [
            &[0; 4][..],
            &n_nodes.to_le_bytes(),
            &vec![1; 8 * ids],
            &n_tensors.to_le_bytes(),
            &vec![2; TENSOR_RECORD * records],
        ]
        .concat()
    };
    let truncated = |what, need, have| WireError::Truncated { what, need, have };
    let too_large = |what, have, limit| WireError::TooLarge { what, have, limit };
    let max = u64::from(u32::MAX);
    for (limits, body, want) in [
        (unlimited, body(u32::MAX, 1, 0, 0), truncated("nodes", 8 * max, 12)),
        (unlimited, body(1, 1, u32::MAX, 1), truncated("tensors", 296 * max, 296)),
        (unlimited, body(u32::MAX, 0, u32::MAX, 0), truncated("nodes", 8 * max, 4)),
        // 2^29 ids of 8 bytes: overflows to 0 in 32-bit arithmetic.
        (unlimited, body(1 << 29, 0, 0, 0), truncated("nodes", 1 << 32, 4)),
        (unlimited, body(2, 1, 0, 0), truncated("nodes", 16, 12)),
        (unlimited, body(1, 1, 2, 1), truncated("tensors", 592, 296)),
        (unlimited, body(1, 1, 1, 2), WireError::Trailing { what: "GRAPH_COMPUTE", extra: 296 }),
        (LIMITS, body(u32::MAX, 1, 0, 0), too_large("n_nodes", max, 64)),
        (LIMITS, body(65, 65, 0, 0), too_large("n_nodes", 65, 64)),
        (LIMITS, body(64, 64, u32::MAX, 0), too_large("n_tensors", max, 128)),
        (LIMITS, body(64, 64, 129, 129), too_large("n_tensors", 129, 128)),
    ] {
        assert_eq!(Request::decode(RpcCommand::GraphCompute, &body, &limits), Err(want));
    }
    assert!(Request::decode(RpcCommand::GraphCompute, &body(64, 64, 128, 128), &LIMITS).is_ok());
    assert!(Request::decode(RpcCommand::GraphCompute, &body(0, 0, 0, 0), &LIMITS).is_ok());
}

#[test]
fn mutated_requests_are_rejected_or_canonical() {
    let mut rng = Rng::with_seed(21);
    let (mut accepted, mut rejected) = (0, 0);
    let mut bytes = Vec::new();
    for round in 0..100_000 {
        let (nodes, tensors, data) = (rng.usize(0..6), rng.usize(0..4), rng.usize(0..50));
        let buffers = RequestBuffers::new(&mut rng, nodes, tensors, data);
        bytes.clear();
        request(RpcCommand::ALL[round % RpcCommand::ALL.len()], &mut rng, &buffers).encode(&mut bytes);
        mutate(&mut bytes, &mut rng);
        let (count, rest) = check_request_stream(&bytes);
        accepted += count;
        rejected += usize::from(rest.is_some());
    }
    assert!(accepted > 20_000 && rejected > 20_000, "{accepted} accepted, {rejected} rejected: too few of one kind");
}

#[test]
fn mutated_responses_are_rejected_or_canonical() {
    let mut rng = Rng::with_seed(22);
    let (mut accepted, mut rejected) = (0, 0);
    for _ in 0..2_000 {
        for sent in responses(&mut rng, &[5; 7]) {
            let mut bytes = Vec::new();
            sent.encode(&mut bytes);
            let mut body = bytes.split_off(RESPONSE_HEADER);
            mutate(&mut body, &mut rng);
            match check_response(sent.command(), &body) {
                Ok(()) => accepted += 1,
                Err(_) => rejected += 1,
            }
        }
    }
    assert!(accepted > 2_000 && rejected > 2_000, "{accepted} accepted, {rejected} rejected: too few of one kind");
}
