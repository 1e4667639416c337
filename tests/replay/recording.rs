//! Reader of recorded sessions. `tests/rpc/recordings/README.md` describes the format.

use fanout::rpc::wire::{REQUEST_HEADER, RequestHeader, RpcCommand};
use std::path::Path;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Request,
    Response,
}

/// A complete message of a connection, with its header.
pub(crate) struct Record {
    pub(crate) connection: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: Vec<u8>,
}

/// Reads a recording of `tests/rpc/recordings`.
pub(crate) fn read_recording(file: &str) -> Vec<Record> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rpc/recordings").join(file);
    let data = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut rest = data.strip_prefix(b"FANOUTRC\x01\0\0\0").expect("a recording of version 1");
    let mut records = Vec::new();
    while !rest.is_empty() {
        let (head, body) = rest.split_at(13);
        let length = u64::from_le_bytes(head[5..].try_into().unwrap()) as usize;
        let (bytes, after) = body.split_at(length);
        records.push(Record {
            connection: u32::from_le_bytes(head[..4].try_into().unwrap()),
            direction: if head[4] == 0 { Direction::Request } else { Direction::Response },
            bytes: bytes.to_vec(),
        });
        rest = after;
    }
    records
}

/// Splits an encoded request into command and body.
pub(crate) fn split_request(frame: &[u8]) -> (RpcCommand, &[u8]) {
    let (head, body) = frame.split_first_chunk::<REQUEST_HEADER>().expect("a whole frame");
    let header = RequestHeader::decode(head).unwrap();
    assert_eq!(header.size, body.len() as u64);
    (header.command, body)
}
