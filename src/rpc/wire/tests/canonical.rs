//! Property of the decoders that holds for any bytes: an accepted message encodes to the same bytes. The fuzz target `decode`
//! checks the same property of requests.

use crate::rpc::wire::*;

const LIMITS: Limits = Limits { max_nodes: 64, max_tensors: 128, max_body: 1 << 20 };

/// Decodes `bytes` as a stream of requests and asserts that each accepted request encodes to the same bytes. Returns the number
/// of accepted requests, and the error that ended the stream.
pub(crate) fn check_request_stream(mut bytes: &[u8]) -> (usize, Option<WireError>) {
    let mut accepted = 0;
    while !bytes.is_empty() {
        let start = bytes;
        match decode_and_encode(&mut bytes) {
            Ok(encoded) => assert_eq!(encoded, &start[..start.len() - bytes.len()]),
            Err(error) => return (accepted, Some(error)),
        }
        accepted += 1;
    }
    (accepted, None)
}

fn decode_and_encode(stream: &mut &[u8]) -> Result<Vec<u8>, WireError> {
    let (command, body) = next_request(stream, &LIMITS)?;
    let request = Request::decode(command, body, &LIMITS)?;
    assert_eq!(request.command(), command);
    if let Request::GraphCompute(graph) = &request {
        for (record, index) in graph.tensors().iter().zip(0..) {
            assert!(record.name().len() <= 3 * MAX_NAME); // a replaced byte becomes three bytes
            assert_eq!(graph.tensors().get(index), Some(record));
        }
    }
    let mut encoded = Vec::new();
    request.encode(&mut encoded);
    Ok(encoded)
}

/// Decodes `body` as the response to `command` and asserts that an accepted response encodes to the same bytes.
pub(crate) fn check_response(command: RpcCommand, body: &[u8]) -> Result<(), WireError> {
    command.response_size(body.len() as u64, 1 << 20)?;
    let response = Response::decode(command, body)?;
    let mut encoded = Vec::new();
    response.encode(&mut encoded);
    let (header, encoded) = encoded.split_at(RESPONSE_HEADER);
    assert_eq!(header, (body.len() as u64).to_le_bytes());
    assert_eq!(encoded, body);
    Ok(())
}
