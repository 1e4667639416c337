//! What must hold for any bytes at all. The fuzz target `decode` asserts the same of requests.

use crate::rpc::wire::*;

const LIMITS: Limits = Limits { max_nodes: 64, max_tensors: 128, max_body: 1 << 20 };

/// Reads `bytes` as a client's stream. Each request that is accepted must encode to the very bytes it came from.
/// Returns how many there were, and the error that ended the stream if it did not end cleanly.
pub(crate) fn requests(mut bytes: &[u8]) -> (usize, Option<WireError>) {
    let mut accepted = 0;
    while !bytes.is_empty() {
        let start = bytes;
        match one(&mut bytes) {
            Ok(encoded) => assert_eq!(encoded, &start[..start.len() - bytes.len()]),
            Err(error) => return (accepted, Some(error)),
        }
        accepted += 1;
    }
    (accepted, None)
}

fn one(stream: &mut &[u8]) -> Result<Vec<u8>, WireError> {
    let (command, body) = next_request(stream, &LIMITS)?;
    let request = Request::decode(command, body, &LIMITS)?;
    assert_eq!(request.command(), command);
    if let Request::GraphCompute(graph) = &request {
        for (record, index) in graph.tensors().iter().zip(0..) {
            assert!(record.name().len() <= 3 * MAX_NAME); // a replaced byte takes three
            assert_eq!(graph.tensors().get(index), Some(record));
        }
    }
    let mut encoded = Vec::new();
    request.encode(&mut encoded);
    Ok(encoded)
}

/// Reads `body` as the response to `command`. What is accepted must encode to the same bytes.
pub(crate) fn response(command: Command, body: &[u8]) -> Result<(), WireError> {
    command.response_size(body.len() as u64, 1 << 20)?;
    let response = Response::decode(command, body)?;
    let mut encoded = Vec::new();
    response.encode(&mut encoded);
    let (header, encoded) = encoded.split_at(RESPONSE_HEADER);
    assert_eq!(header, (body.len() as u64).to_le_bytes());
    assert_eq!(encoded, body);
    Ok(())
}
