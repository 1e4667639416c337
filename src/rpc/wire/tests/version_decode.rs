//! Decoding of requests of older versions: what a version's encoder writes is the canonical request again, numbers are the numbers of
//! the lists, and shortened or changed bodies are errors.

use super::inputs::{LIMITS, RequestBuffers, record, request};
use super::version_codec::{VERSIONS, codec, list};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::*;
use crate::tensor::DType;
use fastrand::Rng;

/// A record that a version can express, and that it transmits completely: parameters that it does not read are 0.
fn transmitted_record(rng: &mut Rng, version: &str, dtype: DType, op: OpCode, kind: i32) -> TensorRecord {
    let mut record = record(rng);
    (record.dtype, record.op) = (dtype.to_wire(), op.to_wire());
    record.op_params = [0; 16];
    record.op_params[0] = kind;
    record.src[2..].fill(0);
    record.flags = TensorRecord::FLAG_COMPUTE | TensorRecord::FLAG_OUTPUT;
    record.use_count = if version != "gen0" && version >= "5.1" { 3 } else { 0 };
    record
}

/// The same request with what a version does not transmit as the decoder fills it in.
fn canonical<'a>(request: Request<'a>, version: &str, no_srcs: &'a [[u8; TENSOR_RECORD]; MAX_SRC]) -> Request<'a> {
    let since = |first: &str| version != "gen0" && version >= first;
    match request {
        Request::SetTensor(mut r) if !since("7") => {
            r.head.cache = false;
            Request::SetTensor(r)
        }
        Request::GetAllocSize(r) if !since("3.6") => Request::GetAllocSize(GetAllocSize { srcs: no_srcs, ..r }),
        Request::Hello(_) if !since("4") => Request::Hello(Hello { conn_caps: None }),
        Request::GraphRecompute(r) => {
            Request::GraphRecompute(GraphRecompute { uid: r.uid.filter(|_| since("8")), ..r })
        }
        other => other,
    }
}

/// Replaces the random records of a request by expressible ones, and its device by the only one of gen0.
fn expressible<'a>(
    request: Request<'a>,
    tensor: &TensorRecord,
    buffers: &'a RequestBuffers,
    gen0: bool,
) -> Request<'a> {
    let (tensor, device) = (tensor.clone(), |device| if gen0 { 0 } else { device });
    match request {
        Request::AllocBuffer(r) => Request::AllocBuffer(AllocBuffer { device: device(r.device), ..r }),
        Request::GetAlignment(r) => Request::GetAlignment(GetAlignment { device: device(r.device) }),
        Request::GetMaxSize(r) => Request::GetMaxSize(GetMaxSize { device: device(r.device) }),
        Request::GetDeviceMemory(r) => Request::GetDeviceMemory(GetDeviceMemory { device: device(r.device) }),
        Request::SetTensor(r) => {
            Request::SetTensor(SetTensor { head: SetTensorHead { tensor, ..r.head }, data: r.data })
        }
        Request::SetTensorHash(r) => Request::SetTensorHash(SetTensorHash { tensor, ..r }),
        Request::GetTensor(r) => Request::GetTensor(GetTensor { tensor, ..r }),
        Request::CopyTensor(_) => Request::CopyTensor(CopyTensor { src: tensor.clone(), dst: tensor }),
        Request::InitTensor(_) => Request::InitTensor(InitTensor { tensor }),
        Request::GetAllocSize(r) => Request::GetAllocSize(GetAllocSize { tensor, ..r }),
        Request::MemsetTensor(r) => Request::MemsetTensor(MemsetTensor { tensor, ..r }),
        Request::SetTensor2d(r) => {
            Request::SetTensor2d(SetTensor2d { head: SetTensor2dHead { tensor, ..r.head }, data: r.data })
        }
        Request::GetTensor2d(r) => Request::GetTensor2d(GetTensor2d { tensor, ..r }),
        Request::CommAllreduce(r) => Request::CommAllreduce(CommAllreduce { tensor, ..r }),
        // The newest layout has a number; older ones leave it out.
        Request::GraphRecompute(r) => Request::GraphRecompute(GraphRecompute { uid: Some(7), ..r }),
        Request::GraphCompute(graph) => {
            let device = device(graph.device());
            Request::GraphCompute(GraphCompute::new(device, &buffers.nodes, &buffers.tensors).expect("few enough"))
        }
        other => other,
    }
}

/// A request as the server reads it: translated to the newest version, and decoded from `newest`.
pub(crate) fn decode<'a>(
    codec: ClientCodec,
    command: RpcCommand,
    body: &[u8],
    newest: &'a mut Vec<u8>,
) -> Result<Request<'a>, String> {
    let wire = |e: WireError| e.to_string();
    let len = codec.body_len(command, body.len() as u64, &LIMITS).map_err(wire)?;
    if command == RpcCommand::GraphCompute {
        *newest = [&vec![0xff; codec.graph_gap()], body].concat();
        codec.complete_graph_head(newest);
        let graph = codec.read_graph(newest, &LIMITS).map_err(wire)?;
        let (n_nodes, newest_len) = (graph.node_count(), codec.newest_graph_len(&graph, newest.len()));
        newest.resize(newest_len.max(newest.len()), 0);
        codec.translate_graph(newest, n_nodes, newest_len).map_err(|e| e.to_string())?;
        newest.truncate(newest_len);
        return Ok(Request::GraphCompute(GraphCompute::decode_with_uid(newest, &LIMITS).map_err(wire)?));
    }
    let is_upload = matches!(command, RpcCommand::SetTensor | RpcCommand::SetTensor2d);
    let head = if is_upload { codec.head_len(command) } else { len };
    *newest = codec.newest_body(command, &body[..head], (len - head) as u64);
    newest.extend_from_slice(&body[head..]);
    Request::decode(command, newest, &LIMITS).map_err(wire)
}

/// The frame of a request in a version, split into the command's number and the body.
fn encode(version: &str, request: &Request<'_>) -> (u8, Vec<u8>) {
    let mut frame = Vec::new();
    codec(version).encode(request, &mut frame).expect("an expressible request");
    let body = frame.split_off(REQUEST_HEADER);
    assert_eq!(frame[1..], (body.len() as u64).to_le_bytes());
    (frame[0], body)
}

#[test]
fn every_command_is_decoded_as_it_was_encoded() {
    let mut rng = Rng::with_seed(11);
    for version in VERSIONS {
        let (codec, client) = (codec(version), ClientCodec::new(codec(version)));
        let tensor = transmitted_record(&mut rng, version, DType::Q4_K, OpCode::Unary, 13);
        let mut buffers = RequestBuffers::new(&mut rng, 3, 5, 40);
        buffers.tensors.fill(tensor.encode());
        // Only sources that GET_ALLOC_SIZE may have: the server does not read them.
        buffers.srcs = [[0; TENSOR_RECORD]; MAX_SRC];
        for &command in RpcCommand::ALL {
            let Some(number) = codec.command_number(command) else { continue };
            let sent = expressible(request(command, &mut rng, &buffers), &tensor, &buffers, version == "gen0");
            let (got, body) = encode(version, &sent);
            assert_eq!((got, client.command(number)), (number, Some(command)), "{version}");
            let size = body.len() as u64;
            assert_eq!(client.body_len(command, size, &LIMITS), Ok(body.len()), "{version}: {command}");
            let mut newest = Vec::new();
            let decoded = decode(client, command, &body, &mut newest);
            let decoded = decoded.unwrap_or_else(|e| panic!("{version}: {command}: {e}"));
            match (&sent, &decoded) {
                (Request::GraphCompute(sent), Request::GraphCompute(graph)) => {
                    assert_eq!(graph.device(), sent.device(), "{version}");
                    assert_eq!(graph.uid(), Some(0), "{version}");
                    assert!(graph.nodes().iter().eq(sent.nodes().iter()) && graph.tensors().len() == 5);
                    assert!(graph.tensors().iter().all(|record| record == tensor), "{version}");
                    assert!((0..6).all(|at| graph.tensors().get(at).is_some() == (at < 5)));
                }
                _ => assert_eq!(decoded, canonical(sent.clone(), version, &buffers.srcs), "{version}: {command}"),
            }
            // A fixed layout has no shorter body. Data of any length may follow the heads of uploads.
            let upload = matches!(command, RpcCommand::SetTensor | RpcCommand::SetTensor2d);
            for len in 0..body.len() {
                let mut newest = Vec::new();
                let shortened = decode(client, command, &body[..len], &mut newest);
                let is_data = upload && len >= client.head_len(command);
                assert_eq!(shortened.is_ok(), is_data, "{version}: {command} of {len} bytes");
            }
            let longer = decode(client, command, &[&body[..], &[0]].concat(), &mut newest).is_ok();
            assert_eq!(longer, upload, "{version}: {command}");
        }
    }
}

/// The record in a request of a version, decoded again.
fn transmit(version: &str, tensor: &TensorRecord) -> TensorRecord {
    let sent = Request::GetTensor(GetTensor { tensor: tensor.clone(), offset: 0, size: 0 });
    let (_, body) = encode(version, &sent);
    translated(ClientCodec::new(codec(version)), &body[..body.len() - 16])
}

#[test]
fn every_op_kind_and_type_is_decoded_as_it_was_encoded() {
    let mut rng = Rng::with_seed(12);
    for version in VERSIONS {
        let codec = codec(version);
        for &op in OpCode::ALL.iter().filter(|op| codec.op_number(**op).is_some()) {
            let tensor = transmitted_record(&mut rng, version, DType::F32, op, 0);
            assert_eq!(transmit(version, &tensor), tensor, "{version}: {op}");
        }
        for kind in UnaryKind::ALL.iter().filter(|kind| codec.unary_number(kind).is_some()) {
            let tensor = transmitted_record(&mut rng, version, DType::F32, OpCode::Unary, kind.wire_number());
            assert_eq!(transmit(version, &tensor), tensor, "{version}: {kind:?}");
        }
        for kind in (0..8).filter(|&kind| codec.op_number(OpCode::Glu).is_some() && codec.has_glu(kind)) {
            let tensor = transmitted_record(&mut rng, version, DType::F32, OpCode::Glu, kind);
            assert_eq!(transmit(version, &tensor), tensor, "{version}: GLU {kind}");
        }
        for &dtype in DType::ALL.iter().filter(|dtype| codec.has_type(**dtype)) {
            let tensor = transmitted_record(&mut rng, version, dtype, OpCode::None, 0);
            assert_eq!(transmit(version, &tensor), tensor, "{version}: {dtype}");
        }
    }
}

#[test]
fn decoded_numbers_are_those_of_the_lists() {
    for version in VERSIONS {
        let (codec, ops, kinds) = (codec(version), list(version, "op"), list(version, "unary"));
        let newest = list("8.0.1", "unary");
        for number in (0..300).chain([u32::MAX - 1, u32::MAX]) {
            let name = ops.get(number as usize);
            let want = OpCode::ALL.iter().find(|op| name == Some(&op.name()));
            assert_eq!(codec.op(number).as_ref(), want, "{version}: op {number}");
            let kind = kinds.get(number as usize).and_then(|name| newest.iter().position(|other| other == name));
            assert_eq!(codec.unary_kind(number as i32).map(|n| n as usize), kind, "{version}: kind {number}");
        }
    }
}

/// A record of a client, translated to the newest version.
fn translated(codec: ClientCodec, record: &[u8]) -> TensorRecord {
    match decode(codec, RpcCommand::GetTensor, &[record, &[0; 16]].concat(), &mut Vec::new()) {
        Ok(Request::GetTensor(request)) => request.tensor,
        other => panic!("{other:?}"),
    }
}

/// Old servers do not read the parameters and sources that later versions added, so their clients may send anything there.
#[test]
fn parameters_that_a_version_does_not_read_are_absent() {
    let mut rng = Rng::with_seed(13);
    let mut filled = |version: &str, op: OpCode| {
        let mut record = record(&mut rng);
        record.op = codec(version).op_number(op).expect("an op of the version");
        record.op_params.fill(1);
        record.src.fill(5);
        (record.flags, record.use_count) = (0, 77);
        translated(ClientCodec::new(codec(version)), &record.encode())
    };
    let absent = |record: &TensorRecord| {
        let params: Vec<_> = (0..16).filter(|&at| record.op_params[at] != 1).collect();
        let srcs = record.src.iter().filter(|&&id| id == 0).count();
        (params, srcs, record.flags, record.use_count)
    };
    for (version, op, params, srcs) in [
        ("gen0", OpCode::Scale, &[1][..], 0),
        ("3.0.0", OpCode::Scale, &[], 0),
        ("gen0", OpCode::Rope, &[15], 0),
        ("5.1.0", OpCode::Rope, &[15], 0),
        ("7.0.0", OpCode::Rope, &[], 0),
        ("gen0", OpCode::SoftMax, &[], 8),
        ("gen0", OpCode::FlashAttnExt, &[], 6),
        ("3.0.0", OpCode::FlashAttnExt, &[], 0),
        ("gen0", OpCode::GroupNorm, &[], 0),
    ] {
        let flags = if matches!(version, "gen0" | "3.0.0") { TensorRecord::FLAG_COMPUTE } else { 0 };
        let uses = if version >= "5.1" && version != "gen0" { 77 } else { 0 };
        assert_eq!(absent(&filled(version, op)), (params.to_vec(), srcs, flags, uses), "{version}: {op}");
    }
    let mut norm = record(&mut rng);
    norm.op = 22;
    let gen0_first = ClientCodec::new(VersionCodec::Gen0First);
    let norm = translated(gen0_first, &norm.encode()[..292]);
    assert_eq!((norm.op, norm.op_params[1]), (OpCode::GroupNorm.to_wire(), 1e-6_f32.to_bits() as i32));
    // The third parameter was the precision, before there was a cap of the scores.
    let mut attention = record(&mut rng);
    attention.op = VersionCodec::Gen0First.op_number(OpCode::FlashAttnExt).expect("an op of the version");
    attention.op_params[..4].copy_from_slice(&[1, 2, 10, 0]);
    let attention = translated(gen0_first, &attention.encode()[..292]);
    assert_eq!(attention.op_params[..4], [1, 2, 0, 10]);
}

/// Random bodies, some of them with plausible counts: no decoder and no detector may panic or allocate by a claimed count.
#[test]
fn random_bodies_of_every_version_are_decoded_or_rejected() {
    let mut rng = Rng::with_seed(14);
    let codecs = VERSIONS.map(codec).into_iter().chain([VersionCodec::Gen0First, VersionCodec::V3_6_0Unflagged]);
    for codec in codecs {
        let client = ClientCodec::new(codec);
        for command in RpcCommand::ALL.iter().copied().filter(|&command| codec.command_number(command).is_some()) {
            for _ in 0..100 {
                let len = match client.request_body(command) {
                    BodySize::Exact(n) => (n as usize + rng.usize(0..3)).saturating_sub(1),
                    _ => rng.usize(0..2000),
                };
                let mut body: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
                // Counts of a graph: small numbers reach the records.
                for at in [0, 4, 8, 12, 16, 20].into_iter().filter(|_| rng.bool()) {
                    body.iter_mut().skip(at).take(4).enumerate().for_each(|(n, b)| *b = u8::from(n == 0));
                }
                let mut detector = VersionDetector::new(&[VersionCodec::Gen0, codec, VersionCodec::Gen0First]);
                detector.observe_header(rng.u8(..), len as u64);
                detector.observe_upload(command, &body[..len.min(304)], len as u64);
                detector.observe_graph_body(&body, &LIMITS);
                if let Ok(graph) = client.read_graph(&body, &LIMITS) {
                    detector.observe_graph(&graph);
                    let _ = detector.disagrees_on(&graph);
                }
                if let Ok(Request::GraphCompute(graph)) = decode(client, command, &body, &mut Vec::new()) {
                    assert_eq!(graph.tensors().iter().count(), graph.tensors().len());
                }
            }
        }
    }
}
