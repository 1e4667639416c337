//! Requests of 7.0: round trip, truncation at each length, trailing bytes.

use crate::rpc::wire::*;
use fastrand::Rng;

use super::inputs::{LIMITS, RequestBuffers, frame, record, request, request_fields, truncation};

#[test]
fn round_trip() {
    let mut rng = Rng::with_seed(1);
    for round in 0..50 {
        let buffers = RequestBuffers::new(&mut rng, round, 2 * round, 100 * round);
        for &command in RpcCommand::ALL {
            let sent = request(command, &mut rng, &buffers);
            let (header, body) = frame(&sent);
            let header = RequestHeader::decode(&header).unwrap();
            assert_eq!(header, RequestHeader { command, size: body.len() as u64 });
            assert_eq!(header.body_len(&LIMITS), Ok(body.len()), "{command}");
            assert_eq!(sent.command(), command);
            assert_eq!(Request::decode(command, &body, &LIMITS).as_ref(), Ok(&sent), "{command}");
        }
    }
}

#[test]
fn body_sizes_are_the_sums_of_their_fields() {
    let mut rng = Rng::with_seed(2);
    let buffers = RequestBuffers::new(&mut rng, 3, 4, 0);
    for &command in RpcCommand::ALL {
        let sum: usize = request_fields(command, &buffers).iter().map(|(_, size)| size).sum();
        assert_eq!(frame(&request(command, &mut rng, &buffers)).1.len(), sum, "{command}");
        assert!(command.request().admits(sum as u64), "{command}");
    }
}

#[test]
fn truncation_names_the_field() {
    let mut rng = Rng::with_seed(3);
    let buffers = RequestBuffers::new(&mut rng, 3, 4, 20);
    for &command in RpcCommand::ALL {
        let body = frame(&request(command, &mut rng, &buffers)).1;
        let fields = request_fields(command, &buffers);
        for len in 0..body.len() {
            let got = Request::decode(command, &body[..len], &LIMITS);
            match (command, len) {
                (RpcCommand::Hello, 0) => assert_eq!(got, Ok(Request::Hello(Hello { conn_caps: None }))),
                (RpcCommand::SetTensor, SET_TENSOR_HEAD..) => {
                    let Ok(Request::SetTensor(got)) = got else { panic!("{got:?}") };
                    assert_eq!(got.data, &buffers.data[..len - SET_TENSOR_HEAD]);
                }
                (RpcCommand::SetTensor2d, SET_TENSOR_2D_HEAD..) => {
                    let Ok(Request::SetTensor2d(got)) = got else { panic!("{got:?}") };
                    assert_eq!(got.data, &buffers.data[..len - SET_TENSOR_2D_HEAD]);
                }
                _ => assert_eq!(got.err(), Some(truncation(&fields, len).unwrap()), "{command} at {len}"),
            }
        }
    }
}

#[test]
fn a_trailing_byte_is_an_error() {
    let mut rng = Rng::with_seed(4);
    let buffers = RequestBuffers::new(&mut rng, 3, 4, 20);
    for &command in RpcCommand::ALL {
        let mut body = frame(&request(command, &mut rng, &buffers)).1;
        body.push(0);
        let got = Request::decode(command, &body, &LIMITS);
        match got {
            // All bytes after the head are data.
            Ok(Request::SetTensor(SetTensor { data, .. }) | Request::SetTensor2d(SetTensor2d { data, .. })) => {
                assert_eq!(data.len(), buffers.data.len() + 1);
            }
            // The first byte of a uid.
            got if command == RpcCommand::GraphRecompute => {
                assert_eq!(got, Err(WireError::Truncated { what: "uid", need: 8, have: 1 }));
            }
            got => assert_eq!(got, Err(WireError::Trailing { what: command.name(), extra: 1 })),
        }
    }
}

#[test]
fn next_request_splits_a_stream() {
    let mut rng = Rng::with_seed(5);
    let buffers = RequestBuffers::new(&mut rng, 2, 2, 9);
    let sent: Vec<_> = RpcCommand::ALL.iter().map(|&command| request(command, &mut rng, &buffers)).collect();
    let mut bytes = Vec::new();
    sent.iter().for_each(|request| request.encode(&mut bytes));

    let mut rest = &*bytes;
    for request in &sent {
        let (command, body) = next_request(&mut rest, &LIMITS).unwrap();
        assert_eq!(Request::decode(command, body, &LIMITS).as_ref(), Ok(request));
    }
    assert!(rest.is_empty());

    let (mut header, body) = frame(&sent[0]);
    let whole = [&header[..], &body].concat();
    for len in 0..whole.len() {
        let (what, need, have) = if len < 9 { ("header", 9, len) } else { ("body", 12, len - 9) };
        let got = next_request(&mut &whole[..len], &LIMITS).err();
        assert_eq!(got, Some(WireError::Truncated { what, need, have: have as u64 }));
    }
    header[0] = 23;
    assert_eq!(next_request(&mut &header[..], &LIMITS).err(), Some(WireError::UnknownCommand(23)));
}

#[test]
fn a_set_tensor_head_is_encoded_without_its_data() {
    let mut rng = Rng::with_seed(6);
    let data = [1, 2, 3];
    let head = SetTensorHead { tensor: record(&mut rng), cache: true, offset: rng.u64(..) };
    let mut whole = Vec::new();
    Request::SetTensor(SetTensor { head: head.clone(), data: &data }).encode(&mut whole);

    let mut streamed = Vec::new();
    head.encode(data.len() as u64, &mut streamed).unwrap();
    let first: &[u8; SET_TENSOR_HEAD] = streamed[REQUEST_HEADER..].try_into().unwrap();
    assert_eq!(SetTensorHead::decode(first).as_ref(), Ok(&head));
    streamed.extend_from_slice(&data);
    assert_eq!(streamed, whole);

    let limit = isize::MAX as u64 - SET_TENSOR_HEAD as u64;
    for data_len in [limit + 1, u64::MAX] {
        let mut out = Vec::new();
        let too_large = WireError::TooLarge { what: "data", have: data_len, limit };
        assert_eq!(head.encode(data_len, &mut out), Err(too_large));
        assert!(out.is_empty());
    }
    let mut out = Vec::new();
    head.encode(limit, &mut out).unwrap();
    let header = RequestHeader::decode(out.first_chunk().unwrap()).unwrap();
    assert_eq!(
        header.body_len(&LIMITS),
        Ok(isize::MAX as usize),
        "the decoder accepts the longest body that the encoder allows"
    );
}

#[test]
fn flags_are_zero_or_one() {
    let mut rng = Rng::with_seed(7);
    let buffers = RequestBuffers::new(&mut rng, 0, 0, 0);
    let mut body = frame(&request(RpcCommand::SetTensor, &mut rng, &buffers)).1;
    for flag in 0..=u8::MAX {
        body[TENSOR_RECORD] = flag;
        let got = Request::decode(RpcCommand::SetTensor, &body, &LIMITS);
        match flag {
            0 | 1 => {
                let Ok(Request::SetTensor(got)) = got else { panic!("{got:?}") };
                assert_eq!(got.head.cache, flag == 1);
            }
            _ => {
                let bad = WireError::BadValue { what: "cache", expected: "0 or 1", have: flag.into() };
                assert_eq!(got, Err(bad));
            }
        }
    }
}

#[test]
fn graphs_and_sources_are_read_in_place() {
    let mut rng = Rng::with_seed(8);
    let buffers = RequestBuffers::new(&mut rng, 5, 7, 0);
    let body = frame(&request(RpcCommand::GraphCompute, &mut rng, &buffers)).1;
    let Ok(Request::GraphCompute(graph)) = Request::decode(RpcCommand::GraphCompute, &body, &LIMITS) else { panic!() };
    assert_eq!(graph.device().to_le_bytes(), body[..4]);
    assert_eq!((graph.nodes().len(), graph.tensors().len()), (5, 7));
    assert!(graph.nodes().iter().map(u64::to_le_bytes).eq(buffers.nodes.iter().copied()));
    assert!(graph.tensors().iter().eq(buffers.tensors.iter().map(TensorRecord::decode)));
    assert_eq!(graph.tensors().get(6), graph.tensors().iter().last());
    assert_eq!(graph.tensors().get(7), None);
    assert!(!graph.nodes().is_empty() && !graph.tensors().is_empty());

    let Request::GetAllocSize(request) = request(RpcCommand::GetAllocSize, &mut rng, &buffers) else { panic!() };
    assert!(request.srcs().iter().eq(buffers.srcs.iter().map(TensorRecord::decode)));
}
