//! Invalid commands and sizes are rejected at the header, before the body is read.

use crate::rpc::wire::*;

use super::inputs::LIMITS;

/// Number, name and minimum length of the request's body of each command, from the protocol's table.
const COMMANDS: [(u8, &str, u64); 23] = [
    (0, "ALLOC_BUFFER", 12),
    (1, "GET_ALIGNMENT", 4),
    (2, "GET_MAX_SIZE", 4),
    (3, "BUFFER_GET_BASE", 8),
    (4, "FREE_BUFFER", 8),
    (5, "BUFFER_CLEAR", 9),
    (6, "SET_TENSOR", 305),
    (7, "SET_TENSOR_HASH", 312),
    (8, "GET_TENSOR", 312),
    (9, "COPY_TENSOR", 592),
    (10, "GRAPH_COMPUTE", 12),
    (11, "GET_DEVICE_MEMORY", 4),
    (12, "INIT_TENSOR", 296),
    (13, "GET_ALLOC_SIZE", 3260),
    (14, "HELLO", 0),
    (15, "DEVICE_COUNT", 0),
    (16, "GRAPH_RECOMPUTE", 4),
    (17, "MEMSET_TENSOR", 313),
    (18, "SET_TENSOR_2D", 328),
    (19, "GET_TENSOR_2D", 328),
    (20, "COMM_INIT", 80),
    (21, "COMM_ALLREDUCE", 300),
    (22, "COMM_FREE", 4),
];

fn header(number: u8, size: u64) -> Result<RequestHeader, WireError> {
    let mut bytes = [number; REQUEST_HEADER];
    bytes[1..].copy_from_slice(&size.to_le_bytes());
    RequestHeader::decode(&bytes).inspect(|header| assert_eq!(header.encode(), bytes))
}

#[test]
fn numbers_and_names() {
    assert_eq!(RpcCommand::ALL.len(), COMMANDS.len());
    for (number, name, _) in COMMANDS {
        let command = RpcCommand::from_wire(number).unwrap();
        assert_eq!((command as u8, command.name(), command.to_string()), (number, name, name.to_string()));
    }
    for number in 23..=u8::MAX {
        assert_eq!(RpcCommand::from_wire(number), Err(WireError::UnknownCommand(number)));
        assert_eq!(header(number, 0), Err(WireError::UnknownCommand(number)));
    }
}

#[test]
fn sizes() {
    // With the uid of 8.0, whose body is the longer one.
    let graph_max = 12 + 8 + 8 * 64 + 296 * 128;
    for (number, name, smallest) in COMMANDS {
        let command = RpcCommand::from_wire(number).unwrap();
        let len = |size| header(number, size).unwrap().body_len(&LIMITS);
        let bad = |have| Err(WireError::BodySize { command: name, expected: command.request(), have });
        let too_large = |have, limit| Err(WireError::TooLarge { what: name, have, limit });

        assert_eq!(len(smallest), Ok(smallest as usize), "{name}");
        if smallest > 0 {
            assert_eq!(len(0), bad(0));
            assert_eq!(len(smallest - 1), bad(smallest - 1));
        }
        match command {
            RpcCommand::SetTensor => {
                assert_eq!(len(306), Ok(306));
                assert_eq!(len(LIMITS.max_body + 1), Ok(LIMITS.max_body as usize + 1), "data is streamed");
                assert_eq!(len(i64::MAX as u64), Ok(i64::MAX as usize));
                assert_eq!(len(1 << 63), too_large(1 << 63, i64::MAX as u64));
                assert_eq!(len(u64::MAX), too_large(u64::MAX, i64::MAX as u64));
            }
            RpcCommand::GraphCompute => {
                assert_eq!(len(13), bad(13));
                assert_eq!(len(12 + 8 + 296), Ok(316));
                assert_eq!(len(graph_max), Ok(graph_max as usize));
                assert_eq!(len(graph_max + 8), too_large(graph_max + 8, graph_max));
                assert_eq!(len(u64::MAX), bad(u64::MAX));
                assert_eq!(len(u64::MAX - 3), too_large(u64::MAX - 3, graph_max));
            }
            RpcCommand::SetTensor2d => {
                assert_eq!(len(329), Ok(329));
                assert_eq!(len(LIMITS.max_body + 1), Ok(LIMITS.max_body as usize + 1), "data is streamed");
                assert_eq!(len(u64::MAX), too_large(u64::MAX, i64::MAX as u64));
            }
            RpcCommand::GraphRecompute => {
                assert_eq!(len(12), Ok(12), "with the uid of 8.0");
                for size in [5, 11, 13, u64::MAX] {
                    assert_eq!(len(size), bad(size));
                }
            }
            RpcCommand::Hello => {
                assert_eq!(len(24), Ok(24));
                for size in [1, 3, 23, 25, u64::MAX] {
                    assert_eq!(len(size), bad(size));
                }
            }
            _ => {
                for size in [smallest + 1, LIMITS.max_body, u64::MAX] {
                    assert_eq!(len(size), bad(size));
                }
            }
        }
    }
}

#[test]
fn max_body_limits_everything_but_streamed_data() {
    let limits = Limits { max_nodes: u32::MAX, max_tensors: u32::MAX, max_body: 300 };
    for (number, name, smallest) in COMMANDS {
        let command = RpcCommand::from_wire(number).unwrap();
        let want = if smallest <= 300 || matches!(command, RpcCommand::SetTensor | RpcCommand::SetTensor2d) {
            Ok(smallest as usize)
        } else {
            Err(WireError::TooLarge { what: name, have: smallest, limit: 300 })
        };
        assert_eq!(command.request_size(smallest, &limits), want);
    }
    assert_eq!(RpcCommand::GraphCompute.request_size(300, &limits), Ok(300));
    let too_large = WireError::TooLarge { what: "GRAPH_COMPUTE", have: 308, limit: 300 };
    assert_eq!(RpcCommand::GraphCompute.request_size(308, &limits), Err(too_large));
}

#[test]
fn responses_are_rejected_at_their_header() {
    let get = RpcCommand::GetTensor;
    assert_eq!(get.response_size(100, 100), Ok(100));
    let too_large = WireError::TooLarge { what: "GET_TENSOR", have: u64::MAX, limit: 100 };
    assert_eq!(get.response_size(u64::MAX, 100), Err(too_large));
    for (command, sizes) in [
        (RpcCommand::AllocBuffer, &[16][..]),
        (RpcCommand::CopyTensor, &[1]),
        (RpcCommand::DeviceCount, &[4]),
        (RpcCommand::GetAllocSize, &[8]),
        (RpcCommand::GetDeviceMemory, &[16]),
        (RpcCommand::Hello, &[3, 28]),
    ] {
        for size in (0..40).chain([u64::MAX]) {
            let expected = command.response().unwrap();
            let want = if sizes.contains(&size) {
                Ok(size as usize)
            } else {
                Err(WireError::BodySize { command: command.name(), expected, have: size })
            };
            assert_eq!(command.response_size(size, u64::MAX), want);
        }
    }
}

#[test]
fn errors_name_expected_and_received_values() {
    let text = |number, size| header(number, size).unwrap().body_len(&LIMITS).unwrap_err().to_string();
    assert_eq!(text(0, 13), "ALLOC_BUFFER: expected a body of 12 bytes, the header says 13 bytes");
    assert_eq!(text(14, 5), "HELLO: expected a body of 0 or 24 bytes, the header says 5 bytes");
    assert_eq!(text(6, 5), "SET_TENSOR: expected a body of at least 305 bytes, the header says 5 bytes");
    assert_eq!(
        text(10, 13),
        "GRAPH_COMPUTE: expected a body of 12 + 8 n_nodes + 296 n_tensors bytes, the header says 13 bytes"
    );
    assert_eq!(text(10, (1 << 60) + 4), format!("GRAPH_COMPUTE: {} is over the limit of 38420", (1u64 << 60) + 4));
    assert_eq!(header(200, 0).unwrap_err().to_string(), "unknown command 200, expected 0 to 22");
}

#[test]
fn a_client_accepts_its_major_and_no_later_minor() {
    let client = Version { major: 4, minor: 2, patch: 1 };
    for (major, minor, patch, accepted) in
        [(4, 2, 1, true), (4, 2, 9, true), (4, 0, 0, true), (4, 3, 0, false), (3, 0, 0, false), (5, 0, 0, false)]
    {
        assert_eq!(client.accepts(Version { major, minor, patch }), accepted, "{major}.{minor}.{patch}");
    }
    assert_eq!(PROTOCOL_VERSION.to_string(), "8.0.1");
}
