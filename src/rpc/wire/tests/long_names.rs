//! Clients with names of 128 bytes: each message with a record shows them by its length, and is decoded as that of other clients.

use crate::rpc::wire::*;
use crate::tensor::DType;
use fastrand::Rng;

use super::inputs::{LIMITS, RequestBuffers, frame, request, request_fields};
use super::version_decode::decode;

/// A body with longer records, and whether it has one.
fn lengthen(command: RpcCommand, body: &[u8], buffers: &RequestBuffers, rng: &mut Rng) -> (Vec<u8>, bool) {
    let (mut long, mut rest, mut has_record) = (Vec::new(), body, false);
    // A long name, or the end of a short one.
    let name_end = if rng.bool() { b'n' } else { 0 };
    for (name, size) in request_fields(command, buffers) {
        let (field, behind) = rest.split_at(size);
        rest = behind;
        if !["tensor", "tensors", "srcs", "src", "dst"].contains(&name) {
            long.extend_from_slice(field);
            continue;
        }
        for record in field.chunks_exact(TENSOR_RECORD) {
            let (start, end) = record.split_at(TENSOR_RECORD - 4);
            long.extend_from_slice(start);
            long.extend([name_end; MAX_NAME]);
            long.extend_from_slice(end);
            has_record = true;
        }
    }
    long.extend_from_slice(rest);
    (long, has_record)
}

/// A whole tensor is uploaded, so that only the right record leaves as many bytes as the tensor has.
fn make_plausible(sent: &mut Request<'_>) {
    match sent {
        Request::SetTensor(SetTensor { head, data }) => {
            let n = data.len() as u32;
            head.tensor.dtype = DType::I8.to_wire();
            (head.tensor.ne, head.tensor.nb, head.offset) = ([n, 1, 1, 1], [1, n, n, n], 0);
        }
        Request::SetTensor2d(SetTensor2d { head, data }) => (head.size, head.n_copies) = (data.len() as u64 / 4, 4),
        _ => {}
    }
}

#[test]
fn every_message_with_a_record_shows_its_length() {
    let mut rng = Rng::with_seed(21);
    let mut with_records = 0;
    for round in 0..20 {
        // Not fewer bytes than a record has more.
        let buffers = RequestBuffers::new(&mut rng, round, 1 + round, 400);
        for &command in RpcCommand::ALL {
            // The tests make graphs in the layout of 7.0.
            let major = if let RpcCommand::GraphCompute | RpcCommand::GraphRecompute = command { 7 } else { 8 };
            let codec = VersionCodec::for_version(Version { major, minor: 0, patch: 0 }).unwrap();
            let mut sent = request(command, &mut rng, &buffers);
            make_plausible(&mut sent);
            let usual = frame(&sent).1;
            let (long, has_record) = lengthen(command, &usual, &buffers, &mut rng);
            with_records += u32::from(has_record);
            for (body, is_long) in [(&usual, false), (&long, has_record)] {
                let mut detector = VersionDetector::new(&[codec]);
                let size = body.len() as u64;
                detector.observe_header(command as u8, size);
                if let RpcCommand::SetTensor | RpcCommand::SetTensor2d = command {
                    detector.observe_upload(command, &body[..detector.upload_start_len(command)], size);
                }
                if command == RpcCommand::GraphCompute {
                    let mut message = [&vec![0; detector.codec().graph_gap()], &body[..]].concat();
                    detector.codec().complete_graph_head(&mut message);
                    detector.observe_graph_body(&message, &LIMITS);
                }
                let found = detector.codec();
                assert_eq!(found.to_string().contains("128"), is_long, "{command}: {found}");
                assert_eq!(found.body_len(command, size, &LIMITS), Ok(body.len()), "{command}");
                let (mut newest, mut other) = (Vec::new(), Vec::new());
                let got = decode(found, command, body, &mut newest);
                let want = decode(ClientCodec::new(codec), command, &usual, &mut other);
                match (got.unwrap(), want.unwrap()) {
                    (Request::GraphCompute(got), Request::GraphCompute(want)) => {
                        assert!(got.nodes().iter().eq(want.nodes().iter()));
                        assert!(got.tensors().iter().eq(want.tensors().iter()));
                    }
                    // The sources are not read.
                    (Request::GetAllocSize(got), Request::GetAllocSize(want)) => assert_eq!(got.tensor, want.tensor),
                    (got, want) => assert_eq!(got, want, "{command}"),
                }
            }
        }
    }
    assert_eq!(with_records, 20 * 11, "messages with a record");
}

/// A part of a tensor with a long name, sent first, is written as if its record were of the usual length. Requests with long records
/// must not follow, or the client would compute with what was written.
#[test]
fn an_upload_decides_the_length_of_later_records() {
    let codec = VersionCodec::for_version(Version { major: 8, minor: 0, patch: 0 }).unwrap();
    let mut detector = VersionDetector::new(&[codec]);
    detector.observe_header(RpcCommand::SetTensor as u8, 1000);
    let start = vec![0; detector.upload_start_len(RpcCommand::SetTensor)];
    detector.observe_upload(RpcCommand::SetTensor, &start, 1000);
    detector.observe_header(RpcCommand::GetTensor as u8, (TENSOR_RECORD + MAX_NAME + 16) as u64);
    assert_eq!(detector.codec(), ClientCodec::new(codec));
    assert!(detector.codec().body_len(RpcCommand::GetTensor, (TENSOR_RECORD + MAX_NAME + 16) as u64, &LIMITS).is_err());
}
