//! ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER: in a group of one rank they are the identity, on every device that runs them; the
//! shape rules, and the devices that refuse them. Groups of several ranks: `src/cpu/program/tests/collectives.rs`.

use crate::devices::devices;
use fanout::device::{DeviceError, Membership, MemoryBudget, Support, UploadSource};
use fanout::graph::Builder;
use fanout::ops::collective::{Collective, CollectiveKind};
use fanout::ops::{NodeView, Op, OpCode, OpParams, OutputSpec, Sources};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::op_case::Subject;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REDUCE: CollectiveKind = CollectiveKind::AllReduce;

fn scatter(axis: u8) -> CollectiveKind {
    CollectiveKind::ReduceScatter { axis }
}

fn gather(axis: u8) -> CollectiveKind {
    CollectiveKind::AllGather { axis }
}

/// The bytes of the result of a group of one rank, from random bytes; `None` if the device refuses the node.
fn run_alone(on: &Subject, kind: CollectiveKind, dtype: DType, ne: [usize; 4]) -> Option<[Vec<u8>; 2]> {
    let (budget, mut b) = (MemoryBudget::new(1 << 24), Builder::new());
    let part = b.leaf(dtype, ne).unwrap();
    let op = Collective { kind, group: 3 };
    let dst = b.node_with_output(op, &[Some(part)], OutputSpec { dtype, ne }).unwrap();
    let graph = Arc::new(b.build());
    let is_supported = on.device.support(graph.node_view(&graph.nodes()[0]).unwrap()).runs();
    if !is_supported {
        return None;
    }
    let program = on.device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = on.device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let mut queue = on.device.queue(&budget).unwrap();
    let bindings = Arc::from([buffer.whole()]);
    // A remote queue fails later.
    if on.device.link_stats().is_none() {
        let not_joined = queue.run(&program, &bindings);
        assert!(matches!(not_joined, Err(DeviceError::Misuse(text)) if text.contains("not joined")), "{not_joined:?}");
    }
    let mut members = Membership::group(&[&*on.device], 1 << 19, &budget).unwrap();
    queue.collectives().unwrap().join(3, members.remove(0)).unwrap();
    let region = |id| {
        let tensor = graph.tensor(id).unwrap();
        buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
    };
    let (from, to) = (region(part), region(dst));
    let mut bytes = vec![0; from.bytes() as usize];
    fastrand::Rng::with_seed(from.bytes()).fill(&mut bytes);
    queue.upload(from, None, UploadSource::Borrowed(&bytes)).unwrap();
    queue.run(&program, &bindings).unwrap();
    let got = queue.download(to).unwrap().wait(Some(Instant::now() + Duration::from_secs(60))).unwrap();
    Some([bytes, got])
}

#[test]
fn a_group_of_one_rank_is_the_identity() {
    let mut ran = 0;
    for on in devices() {
        for (kind, dtype, ne) in [
            (REDUCE, DType::F32, [1, 1, 1, 1]),
            (REDUCE, DType::F32, [1027, 3, 2, 1]),
            (REDUCE, DType::F32, [50_000, 1, 1, 2]),
            (scatter(1), DType::F32, [1027, 3, 1, 1]),
            (scatter(3), DType::F32, [3, 2, 1, 2]),
            (gather(0), DType::F16, [3, 5, 2, 1]),
            (gather(1), DType::I32, [70, 500, 1, 1]),
            (gather(3), DType::I8, [7, 1, 1, 3]),
            (gather(2), DType::F32, [1, 1, 1, 1]),
        ] {
            if let Some([want, got]) = run_alone(on, kind, dtype, ne) {
                assert!(want == got, "{}: {kind:?} of {dtype} {ne:?}", on.name);
                ran += 1;
            }
        }
    }
    assert!(ran >= 18, "both math modes of the CPU run collectives");
}

#[test]
fn devices_without_collectives_give_a_reason() {
    let desc = TensorDesc::contiguous(DType::F32, [8, 1, 1, 1]).unwrap();
    let op = Op::from(Collective { kind: REDUCE, group: 0 });
    let srcs = Sources::new(op.code(), &[Some(&desc)]);
    let mut refusals = 0;
    for on in devices() {
        if let Support::No(no) = on.device.support(NodeView { op: &op, dst: &desc, srcs, aligned: true }) {
            assert_eq!(no.op, OpCode::AllReduce, "{}", on.name);
            let reasons = ["no CUDA kernels", "protocol"];
            assert!(reasons.iter().any(|reason| no.reason.contains(reason)), "{}: {no}", on.name);
            refusals += 1;
        }
    }
    assert!(refusals >= 2, "remote devices have no collectives");
}

#[test]
fn shape_rules_are_checked() {
    let packed = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let check = |kind, part: TensorDesc, dst: TensorDesc| {
        let op = Op::from(Collective { kind, group: 0 });
        let srcs = Sources::new(op.code(), &[Some(&part)]);
        op.check(&NodeView { op: &op, dst: &dst, srcs, aligned: true }).map_err(|e| e.rule)
    };
    use DType::{BF16, F16, F32, Q4_0};
    let strided = TensorDesc::strided(F32, [4, 2, 1, 1], [4, 32, 64, 64]).unwrap();
    for (kind, part, dst, rule) in [
        (REDUCE, packed(F32, [4, 2, 1, 1]), packed(F32, [4, 2, 1, 1]), None),
        (REDUCE, packed(F16, [4, 2, 1, 1]), packed(F16, [4, 2, 1, 1]), Some("the part is F32 or BF16")),
        (REDUCE, packed(BF16, [4, 2, 1, 1]), packed(F32, [4, 2, 1, 1]), None),
        (REDUCE, packed(BF16, [4, 2, 1, 1]), packed(BF16, [4, 2, 1, 1]), Some("the destination's")),
        (scatter(1), packed(F32, [4, 7, 1, 1]), packed(F32, [4, 2, 1, 1]), None),
        (scatter(1), packed(BF16, [4, 7, 1, 1]), packed(F32, [4, 2, 1, 1]), None),
        (scatter(1), packed(F16, [4, 7, 1, 1]), packed(F16, [4, 2, 1, 1]), Some("the part is F32 or BF16")),
        (scatter(1), packed(BF16, [4, 7, 1, 1]), packed(BF16, [4, 2, 1, 1]), Some("the destination is F32")),
        (scatter(1), packed(F32, [4, 7, 1, 1]), packed(F32, [4, 8, 1, 1]), Some("no longer than")),
        (scatter(1), packed(F32, [4, 7, 1, 1]), packed(F32, [4, 0, 1, 1]), Some("has elements")),
        (scatter(1), packed(F32, [4, 7, 1, 1]), packed(F32, [3, 7, 1, 1]), Some("along the axis only")),
        (scatter(0), packed(F32, [4, 7, 1, 1]), packed(F32, [2, 7, 1, 1]), Some("along each axis above")),
        (scatter(4), packed(F32, [4, 1, 1, 1]), packed(F32, [2, 1, 1, 1]), Some("the axis is")),
        (REDUCE, packed(F32, [4, 2, 1, 1]), packed(F32, [8, 1, 1, 1]), Some("the destination's shape")),
        (REDUCE, strided, packed(F32, [4, 2, 1, 1]), Some("are contiguous")),
        (REDUCE, packed(F32, [0, 2, 1, 1]), packed(F32, [0, 2, 1, 1]), Some("has elements")),
        (gather(1), packed(F16, [4, 2, 1, 1]), packed(F16, [4, 7, 1, 1]), None),
        (gather(1), packed(F16, [4, 2, 1, 1]), packed(F32, [4, 7, 1, 1]), Some("the part's type")),
        (gather(1), packed(F16, [4, 8, 1, 1]), packed(F16, [4, 7, 1, 1]), Some("no longer than")),
        (gather(0), packed(F16, [4, 2, 1, 1]), packed(F16, [4, 7, 1, 1]), Some("along the axis only")),
        (gather(1), packed(Q4_0, [32, 2, 1, 1]), packed(Q4_0, [32, 7, 1, 1]), Some("no blocks")),
        (gather(4), packed(F16, [4, 2, 1, 1]), packed(F16, [4, 7, 1, 1]), Some("the axis is")),
    ] {
        let got = check(kind, part, dst);
        let fits = rule.map_or(got.is_ok(), |rule| got.is_err_and(|got| got.contains(rule)));
        assert!(fits, "{kind:?} of {part:?} to {dst:?}: {got:?}, expected {rule:?}");
    }
}

#[test]
fn parameters_have_a_codec() {
    for op in [REDUCE, scatter(2), gather(0), gather(3)].map(|kind| Collective { kind, group: 7 }) {
        let op = Op::from(op);
        assert_eq!(Op::decode(op.code(), &op.encode()), Ok(Some(op)));
    }
    for (code, params) in [
        (OpCode::AllReduce, OpParams::default().with_int(0, -1)),
        (OpCode::AllGather, OpParams::default().with_int(1, 4)),
        (OpCode::AllGather, OpParams::default().with_int(1, -1)),
        (OpCode::ReduceScatter, OpParams::default().with_int(1, 4)),
    ] {
        assert!(Op::decode(code, &params).is_err(), "{code} {params:?}");
    }
}
