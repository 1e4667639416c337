//! Codecs of older versions: numberings against lists of the ops, kinds and types of each version, and frames against bytes
//! built by hand.

use super::inputs::{RequestBuffers, record, request};
use crate::ops::binary::Binary;
use crate::ops::flash_attn::FlashAttn;
use crate::ops::glu::{Glu, GluKind as Gate};
use crate::ops::mul_mat::MulMat;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::softmax::SoftMax;
use crate::ops::unary::{Unary, UnaryKind};
use crate::ops::{NodeView, Op, OpCode, Sources};
use crate::rpc::wire::*;
use crate::tensor::{DType, TensorDesc};
use fastrand::Rng;
use std::collections::HashMap;

/// Numberings of the versions. Each line has a version, a kind of number (op, unary, glu, type) and the names. The position of
/// a name is its number; types have the form `name=number`.
const NUMBERINGS: &str = include_str!("versions.txt");

pub(crate) const VERSIONS: [&str; 14] = [
    "gen0", "3.0.0", "3.5.0", "3.6.0", "3.6.1", "4.0.0", "4.0.1", "4.0.2", "4.0.3", "5.0.0", "5.1.0", "7.0.0", "8.0.0",
    "8.0.1",
];

pub(crate) fn codec(name: &str) -> VersionCodec {
    if name == "gen0" {
        return VersionCodec::Gen0;
    }
    let parts: Vec<u8> = name.split('.').map(|n| n.parse().expect("a number")).collect();
    let version = Version { major: parts[0], minor: parts[1], patch: parts[2] };
    VersionCodec::for_version(version).expect("a supported version")
}

pub(crate) fn list(version: &str, what: &str) -> Vec<&'static str> {
    let starts = |line: &&str| line.split(' ').take(2).eq([version, what]);
    let line = NUMBERINGS.lines().find(starts).expect("a line for each version and kind of number");
    line.split(' ').skip(2).collect()
}

#[test]
fn numbers_are_those_of_the_lists() {
    for version in VERSIONS {
        let (codec, ops, kinds) = (codec(version), list(version, "op"), list(version, "unary"));
        for &op in OpCode::ALL.iter().chain(OpCode::OWN) {
            let want = ops.iter().position(|name| *name == op.name());
            assert_eq!(codec.op_number(op).map(|n| n as usize), want, "{version}: {op}");
        }
        for (kind, name) in UnaryKind::ALL.iter().zip(list("8.0.1", "unary")) {
            let want = kinds.iter().position(|other| *other == name);
            assert_eq!(codec.unary_number(kind).map(|n| n as usize), want, "{version}: {name}");
        }
        let gates = list(version, "glu");
        for (number, name) in (0..).zip(list("8.0.1", "glu")) {
            assert_eq!(codec.has_glu(number), gates.get(number as usize) == Some(&name), "{version}: {name}");
        }
        let types: HashMap<_, _> = list(version, "type").iter().filter_map(|t| t.split_once('=')).collect();
        for dtype in DType::ALL {
            assert_eq!(codec.has_type(*dtype), types.contains_key(dtype.name()), "{version}: {dtype}");
            assert!(types.get(dtype.name()).is_none_or(|n| *n == dtype.to_wire().to_string()), "{version}: {dtype}");
        }
    }
}

#[test]
fn versions_without_a_list_are_unsupported() {
    for (major, minor, patch) in
        [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 1), (3, 6, 2), (4, 0, 4), (4, 1, 0), (5, 0, 1), (6, 0, 0), (7, 1, 0)]
    {
        assert!(VersionCodec::for_version(Version { major, minor, patch }).is_none(), "{major}.{minor}.{patch}");
    }
    for version in VERSIONS.iter().filter(|version| **version != "7.0.0") {
        assert!(codec(version).to_string().starts_with(version));
    }
}

/// Number of each command of 7.0 (`X`: missing), and the commands with an empty response or a status byte.
#[test]
fn commands_and_responses() {
    const X: u8 = 255;
    let missing = [X; 5]; // the commands of 8.0
    let first = [0, 1, 2, 3, 4, 5, 6, X, 7, 8, 9, 10, X, X, X, X, X, X];
    let three = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, X, X];
    let mut four = three;
    four[16] = 16;
    let mut five = four;
    five[17] = 17;
    // FREE_BUFFER, BUFFER_CLEAR, INIT_TENSOR, MEMSET_TENSOR.
    let until_5 = [4, 5, 12, 17];
    let rows: [(&str, _, &[u8], &[u8]); 14] = [
        ("gen0", first, &[4, 5, 6], &[10]),
        ("3.0.0", three, &until_5[..3], &[10]),
        ("3.5.0", four, &until_5[..3], &[]),
        ("3.6.0", four, &until_5[..3], &[]),
        ("3.6.1", four, &until_5[..3], &[]),
        ("4.0.0", four, &until_5[..3], &[]),
        ("4.0.1", four, &until_5[..3], &[]),
        ("4.0.2", four, &until_5[..3], &[]),
        ("4.0.3", four, &until_5[..3], &[]),
        ("5.0.0", five, &until_5, &[]),
        ("5.1.0", five, &until_5, &[]),
        ("7.0.0", five, &[], &[]),
        ("8.0.0", five, &[], &[]),
        ("8.0.1", five, &[], &[]),
    ];
    for (version, numbers, empty, status) in rows {
        let codec = codec(version);
        let of_8_0 = if version.starts_with('8') { [18, 19, 20, 21, 22] } else { missing };
        for (&command, number) in RpcCommand::ALL.iter().zip(numbers.into_iter().chain(of_8_0)) {
            assert_eq!(codec.command_number(command).unwrap_or(X), number, "{version}: {command}");
            if number == X {
                continue;
            }
            let want = match command as u8 {
                n if empty.contains(&n) => Some(BodySize::Exact(0)),
                n if status.contains(&n) => Some(BodySize::Exact(1)),
                _ => command.response(),
            };
            assert_eq!(codec.response_size(command), want, "{version}: {command}");
        }
    }
}

#[test]
fn the_codec_of_the_newest_version_is_the_encoder_of_requests() {
    let mut rng = Rng::with_seed(1);
    let buffers = RequestBuffers::new(&mut rng, 3, 5, 40);
    for &command in RpcCommand::ALL {
        let request = match request(command, &mut rng, &buffers) {
            Request::GraphCompute(graph) => Request::GraphCompute(graph.with_uid(rng.u64(..))),
            other => other,
        };
        let (mut want, mut got) = (Vec::new(), Vec::new());
        request.encode(&mut want);
        assert_eq!(VersionCodec::NEWEST.encode(&request, &mut got), Ok(()));
        assert_eq!(got, want, "{command}");
        if let Request::SetTensor(SetTensor { head, data }) = &request {
            got.clear();
            assert_eq!(VersionCodec::NEWEST.encode_set_tensor_head(head, data.len() as u64, &mut got), Ok(()));
            assert_eq!(got, want[..want.len() - data.len()]);
        }
    }
}

/// A record of 7.0 that all versions can express. `op`: ADD, or UNARY with the kind EXP, whose number differs in older
/// versions.
fn expressible_record(rng: &mut Rng, op: OpCode) -> TensorRecord {
    let mut record = record(rng);
    (record.dtype, record.op) = (DType::Q4_K.to_wire(), op.to_wire());
    record.op_params[0] = 13; // EXP
    (record.flags, record.use_count) = (TensorRecord::FLAG_COMPUTE | TensorRecord::FLAG_OUTPUT, 3);
    record
}

/// The encoded record with another op number, other flags and another use count.
fn encoded_record(record: &TensorRecord, op: u32, flags: i32, uses: i32) -> Vec<u8> {
    let mut bytes = record.encode().to_vec();
    bytes[52..56].copy_from_slice(&op.to_le_bytes());
    bytes[120..124].copy_from_slice(&flags.to_le_bytes());
    bytes[292..].copy_from_slice(&uses.to_le_bytes());
    bytes
}

#[test]
fn frames_are_those_of_each_version() {
    let mut rng = Rng::with_seed(2);
    let (unary, sum) = (expressible_record(&mut rng, OpCode::Unary), expressible_record(&mut rng, OpCode::Add));
    let encoded = [unary.encode(), sum.encode()];
    let mut srcs = [[0; TENSOR_RECORD]; MAX_SRC];
    srcs[0] = encoded[1];
    let nodes = [[7; 8]];
    let number = |n: u64| n.to_le_bytes().to_vec();
    let word = |n: u32| n.to_le_bytes().to_vec();
    // Version, number of UNARY, and the age: how many of the layout changes since gen0 the version has.
    let rows = [
        ("gen0", 69, 0),
        ("3.0.0", 80, 1),
        ("3.5.0", 85, 2),
        ("3.6.1", 86, 3),
        ("4.0.3", 91, 4),
        ("5.0.0", 91, 5),
        ("5.1.0", 91, 6),
        ("7.0.0", 91, 7),
        ("8.0.0", 91, 8),
        ("8.0.1", 92, 8),
    ];
    for (version, op, age) in rows {
        let (flags, uses) = (if age >= 3 { 18 } else { 2 }, if age >= 6 { 3 } else { 0 });
        let first = encoded_record(&unary, op, flags, uses);
        let second = encoded_record(&sum, 2, flags, uses);
        let none = encoded_record(&TensorRecord::decode(&[0; TENSOR_RECORD]), 0, 0, 0);
        let device = if age >= 1 { word(0) } else { vec![] };
        let shift = u8::from(age >= 1);
        let uid = |n: u64| if age >= 8 { number(n) } else { vec![] };
        let tensor = unary.clone();
        let head = SetTensorHead { tensor: tensor.clone(), cache: true, offset: 5 };
        let graph = GraphCompute::new(0, &nodes, &encoded).expect("few enough");
        let flag = if age >= 7 { vec![1] } else { vec![] };
        let mut sizes = vec![device.clone(), first.clone()];
        if age >= 3 {
            sizes.push(second.clone());
            sizes.extend(std::iter::repeat_n(none, 9));
        }
        let cases: [(Request<'_>, u8, Vec<Vec<u8>>); 11] = [
            (Request::AllocBuffer(AllocBuffer { device: 0, size: 9 }), 0, vec![device.clone(), number(9)]),
            (Request::GetAlignment(GetAlignment { device: 0 }), 1, vec![device.clone()]),
            (Request::GetMaxSize(GetMaxSize { device: 0 }), 2, vec![device.clone()]),
            (Request::BufferGetBase(BufferGetBase { remote_ptr: 3 }), 3, vec![number(3)]),
            (Request::FreeBuffer(FreeBuffer { remote_ptr: 3 }), 4, vec![number(3)]),
            (Request::BufferClear(BufferClear { remote_ptr: 3, value: 4 }), 5, vec![number(3), vec![4]]),
            (
                Request::SetTensor(SetTensor { head: head.clone(), data: b"data" }),
                6,
                vec![first.clone(), flag, number(5), b"data".to_vec()],
            ),
            (
                Request::GetTensor(GetTensor { tensor: tensor.clone(), offset: 1, size: 2 }),
                7 + shift,
                vec![first.clone(), number(1), number(2)],
            ),
            (
                Request::CopyTensor(CopyTensor { src: tensor.clone(), dst: sum.clone() }),
                8 + shift,
                vec![first.clone(), second.clone()],
            ),
            (
                Request::GraphCompute(graph),
                9 + shift,
                vec![device.clone(), uid(0), word(1), vec![7; 8], word(2), first.clone(), second],
            ),
            (Request::GetDeviceMemory(GetDeviceMemory { device: 0 }), 10 + shift, vec![device.clone()]),
        ];
        let later: [(u8, Request<'_>, u8, Vec<Vec<u8>>); 6] = [
            (1, Request::InitTensor(InitTensor { tensor: tensor.clone() }), 12, vec![first.clone()]),
            (1, Request::GetAllocSize(GetAllocSize { device: 0, tensor: tensor.clone(), srcs: &srcs }), 13, sizes),
            (
                1,
                Request::Hello(Hello { conn_caps: Some([9; 24]) }),
                14,
                vec![if age >= 4 { vec![9; 24] } else { vec![] }],
            ),
            (1, Request::DeviceCount(DeviceCount {}), 15, vec![]),
            (2, Request::GraphRecompute(GraphRecompute { device: 6, uid: Some(9) }), 16, vec![word(6), uid(9)]),
            (
                5,
                Request::MemsetTensor(MemsetTensor { tensor, offset: 1, size: 2, value: 3 }),
                17,
                vec![first, number(1), number(2), vec![3]],
            ),
        ];
        let codec = codec(version);
        let cases = cases.into_iter().map(|(request, number, body)| (0, request, number, body));
        for (age_of, request, number, body) in cases.chain(later) {
            let (body, mut got) = (body.concat(), vec![1, 2, 3]);
            let sent = codec.encode(&request, &mut got);
            let mut want = vec![1, 2, 3];
            if age < age_of {
                let lacks = sent.expect_err("a missing command").to_string();
                assert!(lacks.contains(request.command().name()), "{version}: {lacks}");
            } else {
                assert_eq!(sent, Ok(()), "{version}: {}", request.command());
                want.push(number);
                want.extend((body.len() as u64).to_le_bytes());
                want.extend(&body);
            }
            assert!(got == want, "{version}: {}", request.command());
        }
        let (mut got, mut want) = (Vec::new(), Vec::new());
        codec
            .encode(&Request::SetTensor(SetTensor { head: head.clone(), data: &[0; 100] }), &mut want)
            .expect("expressible");
        codec.encode_set_tensor_head(&head, 100, &mut got).expect("expressible");
        assert_eq!(got, want[..want.len() - 100], "{version}");
        got.clear();
        assert!(codec.encode_set_tensor_head(&head, u64::MAX, &mut got).is_err() && got.is_empty(), "{version}");
    }
}

#[test]
fn records_that_a_version_lacks_are_errors() {
    let mut rng = Rng::with_seed(3);
    let mut lacks = |version: &str, dtype: u32, op: u32, kind: i32, what: &str| {
        let mut tensor = record(&mut rng);
        (tensor.dtype, tensor.op, tensor.op_params[0]) = (dtype, op, kind);
        let mut out = vec![5];
        let request = Request::InitTensor(InitTensor { tensor: tensor.clone() });
        let copy = Request::CopyTensor(CopyTensor { src: tensor.clone(), dst: tensor.clone() });
        let request = if version == "gen0" { copy } else { request };
        let message = codec(version).encode(&request, &mut out).expect_err(what).to_string();
        let name = if version == "7.0.0" { "7.0" } else { version };
        assert!(message.contains(what) && message.contains(name), "{message}");
        assert_eq!(out, [5]);
        let head = SetTensorHead { tensor, cache: false, offset: 0 };
        assert!(codec(version).encode_set_tensor_head(&head, 1, &mut out).is_err() && out == [5]);
    };
    let code = |op: OpCode| op.to_wire();
    lacks("gen0", 0, code(OpCode::Glu), 0, "GLU");
    lacks("gen0", 0, code(OpCode::Unary), 16, "kind 16 of UNARY");
    lacks("gen0", DType::MXFP4.to_wire(), 0, 0, "MXFP4");
    lacks("3.0.0", 0, code(OpCode::TopK), 0, "TOP_K");
    lacks("3.0.0", 0, code(OpCode::Unary), 22, "kind 22 of UNARY");
    lacks("3.0.0", 0, code(OpCode::Unary), -1, "kind -1 of UNARY");
    lacks("3.6.1", 0, code(OpCode::Glu), 6, "kind 6 of GLU");
    lacks("4.0.1", DType::Q2_0.to_wire(), 0, 0, "Q2_0");
    lacks("5.1.0", 31, 0, 0, "type 31");
    lacks("5.1.0", 0, 102, 0, "op 102");
    lacks("7.0.0", 0, code(OpCode::TopKMask), 0, "TOP_K_MASK");
    lacks("8.0.0", DType::F8_E4M3.to_wire(), 0, 0, "F8_E4M3");
    let mut out = Vec::new();
    let second = Request::GetAlignment(GetAlignment { device: 1 });
    assert!(VersionCodec::Gen0.encode(&second, &mut out).expect_err("one device").to_string().contains("device 1"));
}

#[test]
fn nodes_with_other_results_in_a_version_are_errors() {
    let t = |dtype, ne| TensorDesc::contiguous(dtype, ne).expect("a tensor");
    let f32s = |ne| t(DType::F32, ne);
    let (x, heads) = (f32s([32, 5, 4, 1]), f32s([4, 1, 1, 1]));
    let (mask, masks) = (t(DType::F16, [32, 64, 1, 1]), t(DType::F16, [32, 64, 4, 1]));
    let (short, keys, values) = (t(DType::F16, [32, 5, 1, 1]), f32s([32, 32, 4, 1]), f32s([16, 32, 4, 1]));
    let weights = t(DType::NVFP4, [64, 8, 1, 1]);
    let positions = t(DType::I32, [4, 1, 1, 1]);
    let scale = |bias| Op::from(Unary::Scale { scale: 2.0, bias });
    let softmax = || Op::from(SoftMax { scale: 1.0, max_bias: 0.0 });
    let attention = FlashAttn { scale: 1.0, max_bias: 0.0, softcap: 0.0, f32_accumulation: false, n_kv_max: 0 };
    let attention = || Op::from(attention);
    let rope = |mode, n_offs| Op::from(Rope { n_offs, ..Rope::new(mode, 16) });
    let gate = |kind| Op::from(Glu { kind, swapped: false });
    // Op, sources, and the first version that computes them as 7.0 does.
    let cases: Vec<(Op, Vec<Option<&TensorDesc>>, &str)> = vec![
        (Binary::Add.into(), vec![Some(&x), Some(&x)], "gen0"),
        (Binary::AddId.into(), vec![Some(&x), Some(&x), Some(&positions)], "3.0.0"),
        (scale(0.0), vec![Some(&x)], "gen0"),
        (scale(1.0), vec![Some(&x)], "3.0.0"),
        (Unary::Fill { value: 1.0 }.into(), vec![Some(&x)], "3.5.0"),
        (Unary::Kind(UnaryKind::Exp).into(), vec![Some(&x)], "gen0"),
        (Unary::Kind(UnaryKind::GeluErf).into(), vec![Some(&x)], "3.0.0"),
        (Unary::Kind(UnaryKind::Trunc).into(), vec![Some(&x)], "3.5.0"),
        (gate(Gate::Swiglu), vec![Some(&x)], "3.0.0"),
        (gate(Gate::SwigluClamp { limit: 1.0 }), vec![Some(&x)], "7.0.0"),
        (softmax(), vec![Some(&x), Some(&mask)], "gen0"),
        (softmax(), vec![Some(&x), Some(&masks)], "3.0.0"),
        (softmax(), vec![Some(&x), Some(&mask), Some(&heads)], "3.0.0"),
        (attention(), vec![Some(&x), Some(&keys), Some(&keys), Some(&mask)], "gen0"),
        (attention(), vec![Some(&x), Some(&keys), Some(&values), Some(&mask)], "3.0.0"),
        (attention(), vec![Some(&x), Some(&keys), Some(&keys), Some(&masks)], "3.0.0"),
        (attention(), vec![Some(&x), Some(&keys), Some(&keys), Some(&short)], "3.6.0"),
        (attention(), vec![Some(&x), Some(&keys), Some(&keys), None, Some(&heads)], "3.0.0"),
        (rope(RopeMode::Neox, 0), vec![Some(&x), Some(&positions)], "gen0"),
        (rope(RopeMode::Vision([4; 4]), 0), vec![Some(&x), Some(&positions)], "3.0.0"),
        (rope(RopeMode::Imrope([4; 4]), 0), vec![Some(&x), Some(&positions)], "3.5.0"),
        (rope(RopeMode::Normal, 2), vec![Some(&x), Some(&positions)], "7.0.0"),
        (MulMat::PLAIN.into(), vec![Some(&weights), Some(&x)], "4.0.0"),
    ];
    for (op, srcs, since) in cases {
        let node = NodeView { op: &op, dst: &x, srcs: Sources::new(op.code(), &srcs), aligned: true };
        let since = VERSIONS.iter().position(|version| *version == since).expect("a version");
        for (age, version) in VERSIONS.iter().enumerate() {
            let result = codec(version).check_expressible(&node);
            assert_eq!(result.is_ok(), age >= since, "{version}: {op:?}: {result:?}");
            assert!(result.err().is_none_or(|no| no.version.starts_with(version)));
        }
    }
}
