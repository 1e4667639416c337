//! Reader of recorded sessions. `tests/rpc/recordings/README.md` describes the format.

use fanout::rpc::wire::{
    GraphCompute, Limits, REQUEST_HEADER, Request, RequestHeader, Response, RpcCommand, Version, WireError,
};
use fanout::tensor::DType;
use half::f16;
use std::io::Read;
use std::path::Path;

const LIMITS: Limits = Limits::new(1 << 16, 1 << 17, 1 << 28);
/// From this major version on, GRAPH_COMPUTE has a uid.
const MAJOR_WITH_UID: u8 = 8;

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

/// A recorded session.
pub(crate) struct Recording {
    pub(crate) records: Vec<Record>,
    /// The version that the recorded server answered.
    pub(crate) version: Version,
}

impl Recording {
    /// Reads a file of `tests/rpc/recordings`.
    pub(crate) fn read(file: &str) -> Recording {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rpc/recordings").join(file);
        let data = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (head, rest) = data.split_at(12);
        let records = match head {
            b"FANOUTRC\x01\0\0\0" => split_records(rest, |rest, length| take(rest, length).to_vec()),
            b"FANOUTRC\x02\0\0\0" => {
                let mut packed = Vec::new();
                flate2::read::ZlibDecoder::new(rest).read_to_end(&mut packed).unwrap();
                split_records(&packed, unpack_message)
            }
            _ => panic!("{} is not a recording of version 1 or 2", path.display()),
        };
        let version = recorded_version(&records);
        Recording { records, version }
    }

    /// Whether GRAPH_COMPUTE and GRAPH_RECOMPUTE have a uid.
    pub(crate) fn has_uid(&self) -> bool {
        self.version.major >= MAJOR_WITH_UID
    }

    /// Decodes a recorded request of 7.0 or 8.0, or one of an older version whose body is that of 7.0.
    pub(crate) fn decode_request<'a>(&self, frame: &'a [u8]) -> Result<Request<'a>, WireError> {
        let (command, body) = split_request(frame);
        if command == RpcCommand::GraphCompute && self.has_uid() {
            return Ok(Request::GraphCompute(GraphCompute::decode_with_uid(body, &LIMITS)?));
        }
        Request::decode(command, body, &LIMITS)
    }
}

/// The version in the first reply to a HELLO: the first response of every session.
fn recorded_version(records: &[Record]) -> Version {
    let reply = records.iter().find(|record| record.direction == Direction::Response).expect("a reply to HELLO");
    match Response::decode(RpcCommand::Hello, &reply.bytes[8..]) {
        Ok(Response::Hello(hello)) => hello.version,
        other => panic!("the first response is no reply to HELLO: {other:?}"),
    }
}

/// Splits an encoded request into command and body.
pub(crate) fn split_request(frame: &[u8]) -> (RpcCommand, &[u8]) {
    let (head, body) = frame.split_first_chunk::<REQUEST_HEADER>().expect("a whole frame");
    let header = RequestHeader::decode(head).unwrap();
    assert_eq!(header.size, body.len() as u64);
    (header.command, body)
}

/// Splits records, whose messages `message` reads from the bytes behind their header, given their length.
fn split_records(mut rest: &[u8], message: impl Fn(&mut &[u8], usize) -> Vec<u8>) -> Vec<Record> {
    let mut records = Vec::new();
    while !rest.is_empty() {
        let connection = take_u32(&mut rest);
        let direction = if take(&mut rest, 1)[0] == 0 { Direction::Request } else { Direction::Response };
        let length = take_u64(&mut rest) as usize;
        records.push(Record { connection, direction, bytes: message(&mut rest, length) });
    }
    records
}

/// Reads the segments of a message.
fn unpack_message(rest: &mut &[u8], length: usize) -> Vec<u8> {
    let mut message = Vec::with_capacity(length);
    while message.len() < length {
        let kind = take(rest, 1)[0];
        let size = take_u32(rest) as usize;
        match kind {
            0 => message.extend_from_slice(take(rest, size)),
            1 => {
                let dtype = DType::from_wire(take(rest, 1)[0].into()).unwrap();
                let (seed, first) = (take_u64(rest), take_u64(rest));
                append_weights(dtype, seed, first, size, &mut message);
            }
            2 => {
                for half in take(rest, size / 2).chunks_exact(2) {
                    message.extend(f16::from_le_bytes([half[0], half[1]]).to_f32().to_le_bytes());
                }
            }
            _ => panic!("no segment has the kind {kind}"),
        }
    }
    assert_eq!(message.len(), length, "the last segment ends with the message");
    message
}

/// Appends `size` bytes of generated weights: element i is the upper 12 bits of splitmix64's output i, signed, times 2^-14, and
/// one more in F32.
fn append_weights(dtype: DType, seed: u64, first: u64, size: usize, message: &mut Vec<u8>) {
    for index in first..first + (size / dtype.block_bytes()) as u64 {
        let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        let value = ((z >> 52) as f32 - 2048.0) / 16384.0;
        match dtype {
            DType::F32 => message.extend((value + 1.0).to_le_bytes()),
            DType::F16 => message.extend(f16::from_f32(value).to_le_bytes()),
            _ => panic!("no generated weights are {dtype}"),
        }
    }
}

fn take<'a>(rest: &mut &'a [u8], size: usize) -> &'a [u8] {
    let (taken, after) = rest.split_at(size);
    *rest = after;
    taken
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(rest, 4).try_into().unwrap())
}

fn take_u64(rest: &mut &[u8]) -> u64 {
    u64::from_le_bytes(take(rest, 8).try_into().unwrap())
}
