//! LOAD of slices: rows, columns and blocks of a tensor that the server identifies by the digest of the whole tensor.

use crate::client::{QueueFixture, deadline, options};
use crate::client_extended::connect_through_relay;
use crate::load_by_digest::*;
use crate::load_confidentiality::{fail_queue, server_with_one_file};
use crate::recorded_commands::RecordedCommands;
use crate::support::*;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{DeviceError, LoadOutcome, TensorDigest};
use fanout::rpc::client::Endpoint;
use fanout::rpc::wire::ext::{BufferSpan, ExtCommand, ExtRequest, Load, REVISION};
use fanout::tensor::{ByteRuns, DType, TensorDesc};
use fanout_testing::protocol_relay::ProtocolRelay;
use std::ops::Range;

/// A tensor of 3 matrices of 40 rows of 8000 bytes: longer than the chunks of 256 KiB in which the server reads.
const NE: [usize; 4] = [8000, 40, 3, 1];
const N: usize = 8000 * 40 * 3;

/// A server with the tensor, whose bytes are those of seed 1, in a file between two other tensors.
fn server_with_tensor() -> (tempfile::TempDir, TestServer) {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(&dir.path().join("m.gguf"), &gguf_file(&[("before", 8, 333), ("w", 1, N), ("behind", 9, 333)]), 9);
    let server = server_with_models(dir.path());
    (dir, server)
}

/// The slices of the tests, as ranges of each dimension: whole, rows, columns, both, of several matrices, matrices, a byte.
fn slices() -> Vec<[Range<usize>; 4]> {
    let all = NE.map(|n| 0..n);
    let with = |changes: &[(usize, Range<usize>)]| {
        let mut slice = all.clone();
        changes.iter().for_each(|(dim, range)| slice[*dim] = range.clone());
        slice
    };
    vec![
        all.clone(),
        with(&[(1, 3..37)]),
        with(&[(0, 0..1000)]),
        with(&[(0, 7990..8000)]),
        with(&[(0, 32..4032), (1, 5..30), (2, 1..2)]),
        with(&[(2, 1..3)]),
        with(&[(0, 7999..8000), (1, 39..40), (2, 2..3)]),
    ]
}

fn runs(slice: &[Range<usize>; 4]) -> ByteRuns {
    let tensor = TensorDesc::contiguous(DType::I8, NE).expect("a tensor");
    ByteRuns::of_slice(&tensor, slice).expect("a two-dimensional slice")
}

fn slice_of(bytes: &[u8], runs: &ByteRuns) -> Vec<u8> {
    runs.slices(bytes).expect("runs in the tensor").collect::<Vec<_>>().concat()
}

fn load_request(span: BufferSpan, digest: [u8; 32], bytes: u64, runs: ByteRuns) -> ExtRequest<'static> {
    ExtRequest::Load(Load { queue: 0, span, shape: None, digest, bytes, runs, name: "w" })
}

#[track_caller]
fn load_slice(client: &mut Client, span: BufferSpan, digest: [u8; 32], bytes: u64, runs: ByteRuns) -> bool {
    client.send_ext(&load_request(span, digest, bytes, runs));
    next_load_result(client)
}

/// Also where a failed queue of the session may still read the buffer, so that the server hashes the file before it writes.
#[test]
fn slices_are_loaded_by_the_digest_of_the_whole_tensor() {
    let (_dir, server) = server_with_tensor();
    let whole = random_bytes(1, N);
    for has_failed_queue in [false, true] {
        let mut client = Client::connect_with_queues(&server);
        if has_failed_queue {
            fail_queue(&mut client);
        }
        let memory = client.alloc_ext(0, N as u64 + 128);
        for slice in slices() {
            let runs = runs(&slice);
            let span = memory.span(64, runs.bytes());
            client.fill_span(0, memory.whole_span(), 7);
            assert!(load_slice(&mut client, span, digest(&whole), N as u64, runs), "{slice:?}");
            assert!(read_span(&mut client, span) == slice_of(&whole, &runs), "{slice:?}");
            assert_eq!(read_span(&mut client, memory.span(0, 64)), [7; 64], "{slice:?}");
            assert_eq!(read_span(&mut client, memory.span(64 + runs.bytes(), 64)), [7; 64], "{slice:?}");
        }
    }
}

/// Only the digest and the length of the whole tensor identify it.
#[test]
fn a_slice_of_an_unknown_tensor_is_not_found() {
    let (_dir, server) = server_with_tensor();
    let whole = random_bytes(1, N);
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, N as u64);
    client.fill_span(0, memory.whole_span(), 7);
    let rows = runs(&[0..8000, 3..5, 0..1, 0..1]);
    let span = memory.span(0, rows.bytes());
    let (of_whole, of_slice, of_other) =
        (digest(&whole), digest(&slice_of(&whole, &rows)), digest(&random_bytes(2, N)));
    for (digest, bytes) in [
        (of_slice, N as u64),
        (of_slice, rows.bytes() + rows.offset()),
        (of_other, N as u64),
        (of_whole, N as u64 - 1),
        (of_whole, N as u64 + 1),
        (of_whole, u64::MAX),
    ] {
        assert!(!load_slice(&mut client, span, digest, bytes, rows), "{bytes} bytes");
    }
    // Slices without bytes are not found either, and not errors.
    for empty in [(0, 0, 0, 0), (0, 0, 8, 40), (9, 100, 200, 0), (u64::MAX, 0, 0, u64::MAX)] {
        let empty = ByteRuns::new(empty.0, empty.1, empty.2, empty.3).expect("valid runs");
        assert!(!load_slice(&mut client, memory.span(5, 0), of_whole, N as u64, empty), "{empty:?}");
    }
    assert!(read_span(&mut client, memory.whole_span()).iter().all(|&byte| byte == 7));
    assert!(load_slice(&mut client, span, of_whole, N as u64, rows));
}

/// A file that has changed since it was indexed gives no byte of it, although the slice is the same as before.
#[test]
fn a_slice_of_a_changed_file_is_not_found() {
    let (dir, server) = server_with_tensor();
    let whole = random_bytes(1, N);
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, N as u64);
    let rows = runs(&[0..8000, 3..5, 0..1, 0..1]);
    let span = memory.span(0, rows.bytes());
    let mut load = |digest| load_slice(&mut client, span, digest, N as u64, rows);
    assert!(load(digest(&whole)));
    // One byte behind the slice differs. The time of the modification is the same.
    let path = dir.path().join("m.gguf");
    let mut file = gguf_file(&[("before", 8, 333), ("w", 1, N), ("behind", 9, 333)]);
    let start = file.windows(64).position(|window| window == &whole[..64]).expect("the tensor");
    file[start + N - 1] ^= 1;
    write_file(&path, &file, 9);
    assert!(!load(digest(&whole)));
    let changed = digest(&file[start..start + N]);
    eventually("the server has hashed the file", || load(changed));
    // A file that is too short for the tensor.
    write_file(&path, &file[..start + N / 2], 9);
    assert!(!load(changed));
}

/// The index has a wrong digest for the only file. The slice is written while the tensor is hashed, and zeroed when the digest of
/// the whole turns out to be another one; where a failed queue may read the buffer, it is not written at all.
#[test]
fn no_byte_of_a_tensor_with_another_digest_is_disclosed() {
    for (has_failed_queue, left) in [(false, 0), (true, 7)] {
        let device = CpuDevice::new("CPU0", 1, MathMode::Exact, MEMORY).expect("a device");
        let (_dir, server, forged) = server_with_one_file(vec![device]);
        let mut client = Client::connect_with_queues(&server);
        if has_failed_queue {
            fail_queue(&mut client);
        }
        // Columns: a run of 100 of each 1000 bytes.
        let bytes = forged.len() as u64;
        let columns = ByteRuns::new(200, 100, 1000, bytes / 1000).expect("valid runs");
        let memory = client.alloc_ext(0, columns.bytes() + 64);
        client.fill_span(0, memory.whole_span(), 7);
        let span = memory.span(32, columns.bytes());
        assert!(!load_slice(&mut client, span, digest(&forged), bytes, columns));
        assert!(read_span(&mut client, span).iter().all(|&byte| byte == left));
        for around in [memory.span(0, 32), memory.span(32 + columns.bytes(), 32)] {
            assert_eq!(read_span(&mut client, around), [7; 32]);
        }
    }
}

/// Invalid runs end the connection, whether or not the server has such a tensor.
#[test]
fn slices_that_do_not_fit_are_protocol_errors() {
    let (_dir, server) = server_with_tensor();
    let (whole, max) = (digest(&random_bytes(1, N)), u64::MAX);
    #[rustfmt::skip]
    let cases: &[(u64, u64, [u64; 4], &str)] = &[
        // Length of the span and of the tensor; runs; a part of the error.
        (8000, N as u64, [N as u64 - 7999, 8000, 8000, 1], "the runs end at byte 960001 of a tensor of 960000 bytes"),
        (8000, N as u64, [0, 4000, 956_001, 2], "the runs end at byte 960001"),
        (8000, 7999, [0, 8000, 8000, 1], "of a tensor of 7999 bytes"),
        (8000, 0, [0, 8000, 8000, 1], "of a tensor of 0 bytes"),
        (7999, max, [max - 8000, 8000, 8000, 1], "the slice has 8000 bytes, the span 7999"),
        (8000, N as u64, [0, 8000, 8000, 2], "the slice has 16000 bytes, the span 8000"),
        (8000, N as u64, [0, 8000, 8000, 0], "the slice has 0 bytes, the span 8000"),
        (8000, N as u64, [0, 0, 8000, 9], "the slice has 0 bytes, the span 8000"),
        (8000, N as u64, [0, 4000, 3999, 2], "a stride of at least the bytes of a run, got 3999"),
        (8000, N as u64, [0, 8000, 0, 1], "a stride of at least the bytes of a run, got 0"),
        (8000, max, [max - 7999, 8000, 8000, 1], "a number of runs that end below 2^64 bytes, got 1"),
        (8000, max, [0, 8000, 1 << 40, 1 << 40], "a number of runs that end below 2^64 bytes"),
        (8000, max, [8000, max, max, 2], "a number of runs that end below 2^64 bytes, got 2"),
    ];
    for digest in [whole, [3; 32]] {
        for &(len, bytes, numbers, error) in cases {
            let mut client = Client::connect_with_queues(&server);
            let memory = client.alloc_ext(0, 8000);
            // Numbers that are no `ByteRuns` replace the ones of a valid message, in front of the name.
            let mut message = Vec::new();
            load_request(memory.span(0, len), digest, bytes, ByteRuns::whole(len)).encode(&mut message);
            let end = message.len() - 5;
            for (to, number) in message[end - 32..end].chunks_exact_mut(8).zip(numbers) {
                to.copy_from_slice(&number.to_le_bytes());
            }
            client.write(&message);
            client.expect_protocol_error(&["LOAD", error]);
        }
    }
}

/// The client's API: a slice as a tensor of its own, with the bytes of an upload of the same slice.
#[test]
fn a_client_loads_slices_and_uploads_what_is_missing() {
    let (_dir, server) = server_with_tensor();
    let whole = random_bytes(1, N);
    let (relay, endpoint) = connect_through_relay(&server);
    for slice in slices() {
        let runs = runs(&slice);
        let mut fixture = QueueFixture::new(&endpoint.devices()[0], runs.bytes());
        let region = fixture.buffer.whole();
        let part = TensorDesc::contiguous(DType::I8, slice.each_ref().map(|range| range.len())).expect("a tensor");
        for (seed, outcome) in [(1, LoadOutcome::Found), (2, LoadOutcome::Missing)] {
            let wanted = TensorDigest { digest: digest(&random_bytes(seed, N)), bytes: N as u64, name: "w" };
            let loads = fixture.queue.load_by_digest().expect("a server with models");
            let reply = loads.load_by_digest(region.clone(), Some(&part), wanted, runs).expect("a submitted request");
            assert_eq!(reply.wait(deadline()), Ok(outcome), "{slice:?}");
            if outcome == LoadOutcome::Missing {
                let mut reader = runs.reader(&whole).expect("runs in the tensor");
                fixture.queue.upload_from(region.clone(), Some(&part), |to| reader.read(to)).expect("an upload");
            }
            assert!(fixture.download() == slice_of(&whole, &runs), "{slice:?}");
        }
    }
    // A slice that the server would refuse is not sent.
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 100);
    let sent = relay.count(ExtCommand::Load);
    for (bytes, runs) in [(99, [0, 100, 100, 1]), (N as u64, [0, 99, 99, 1]), (N as u64, [0, 0, 0, 0])] {
        let [offset, run_bytes, stride, count] = runs;
        let runs = ByteRuns::new(offset, run_bytes, stride, count).expect("valid runs");
        let wanted = TensorDigest { digest: digest(&whole), bytes, name: "w" };
        let loads = fixture.queue.load_by_digest().expect("a server with models");
        let refused = loads.load_by_digest(fixture.buffer.whole(), None, wanted, runs);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{runs:?}");
    }
    assert_eq!(relay.count(ExtCommand::Load), sent);
    fixture.download();
}

/// A server of the revision before. The client then uses ggml's protocol, which has no load by digest, so its caller uploads.
#[test]
fn with_a_server_of_another_revision_there_is_no_load_by_digest() {
    let (_dir, server) = server_with_tensor();
    let relay = ProtocolRelay::with_offer(server.addr, |offer| {
        assert_eq!(offer, REVISION, "a ready server");
        offer - 1
    });
    let endpoint = Endpoint::connect(&relay.addr.to_string(), &options()).expect("a server");
    let rows = runs(&[0..8000, 3..5, 0..1, 0..1]);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], rows.bytes());
    assert!(fixture.queue.load_by_digest().is_none());
    let whole = random_bytes(1, N);
    let mut reader = rows.reader(&whole).expect("runs in the tensor");
    fixture.queue.upload_from(fixture.buffer.whole(), None, |to| reader.read(to)).expect("an upload");
    assert!(fixture.download() == slice_of(&whole, &rows));
}
