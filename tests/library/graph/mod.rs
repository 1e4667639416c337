//! Validation of graphs from peers: accepted graphs, and a graph for every reason of rejection.
use fanout::graph::validate::{GraphError, OpSet, UntrustedTensor, import_untrusted, widen_strides};
use fanout::graph::{Graph, SlotOffset};
use fanout::ops::OpCode;
use fanout::tensor::DType;

const COMPUTE: i32 = 16;
const SLOT: usize = 1 << 16;

/// A packed F32 tensor at an offset of slot 0. A leaf, unless the caller sets `op`.
fn tensor(id: u64, ne: [u32; 4], offset: usize) -> UntrustedTensor {
    let nb = [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]];
    UntrustedTensor {
        id,
        dtype: 0,
        ne,
        nb,
        op: OpCode::None.to_wire(),
        params: [0; 16],
        flags: 0,
        srcs: [0; 10],
        use_count: 0,
        place: Some(SlotOffset { slot: 0, offset }),
    }
}

fn node(id: u64, op: OpCode, srcs: &[u64], ne: [u32; 4], offset: usize) -> UntrustedTensor {
    let mut t = tensor(id, ne, offset);
    t.op = op.to_wire();
    t.flags = COMPUTE;
    t.srcs[..srcs.len()].copy_from_slice(srcs);
    t
}

/// c = a + b, each `[8, 4]`, at 0, 256 and 512.
fn addition() -> Vec<UntrustedTensor> {
    let ne = [8, 4, 1, 1];
    vec![tensor(1, ne, 0), tensor(2, ne, 256), node(3, OpCode::Add, &[1, 2], ne, 512)]
}

fn validate(listed: &[u64], records: &[UntrustedTensor]) -> Result<Graph, GraphError> {
    import_untrusted(listed, records, vec![SLOT], OpSet::Protocol)
}

#[test]
fn an_addition_is_accepted() {
    let graph = validate(&[3], &addition()).unwrap();
    assert_eq!((graph.nodes().len(), graph.tensors().len()), (1, 3));
}

#[test]
fn records_that_compute_nothing_are_dropped_unchecked() {
    let ne = [8, 4, 1, 1];
    let mut records = addition();
    // A view without memory, a node without the compute flag and an empty node are dropped.
    let mut view = node(4, OpCode::View, &[3], ne, 0);
    view.place = None;
    let mut uncomputed = node(5, OpCode::SsmScan, &[99], ne, 0);
    uncomputed.flags = 1;
    let empty = node(6, OpCode::MulMat, &[99], [0, 4, 1, 1], 0);
    let no_channels = node(8, OpCode::GroupNorm, &[99], [8, 4, 0, 1], 0);
    // The op, parameters and sources of a leaf are ignored.
    records[0].op = OpCode::FlashAttnExt.to_wire();
    records[0].srcs = [77; 10];
    // A leaf without readers is not checked.
    let mut junk = tensor(7, ne, usize::MAX);
    junk.dtype = 4;
    records.extend([view, uncomputed, empty, no_channels, junk]);
    let graph = validate(&[4, 5, 3, 6, 8], &records).unwrap();
    assert_eq!((graph.nodes().len(), graph.tensors().len()), (1, 3));
}

#[test]
fn use_counts_and_viewed_tensors_are_imported() {
    let ne = [8, 4, 1, 1];
    // c = a + b; two views, the second of the first; d = sqr(the second).
    let build = |change: fn(&mut [UntrustedTensor])| {
        let mut records = addition();
        records.push(node(4, OpCode::Reshape, &[3], [32, 1, 1, 1], 512));
        records.push(node(5, OpCode::View, &[4], ne, 512));
        records.push(node(6, OpCode::Sqr, &[5], ne, 1024));
        records.iter_mut().for_each(|t| t.use_count = 1);
        change(&mut records);
        let graph = validate(&[3, 4, 5, 6], &records).unwrap();
        let (sum, sqr) = (graph.nodes()[0].dst, &graph.nodes()[1]);
        let read = graph.tensor(sqr.srcs[0].unwrap()).unwrap();
        (graph.tensor(sum).unwrap().use_count, read.use_count, read.view_of == Some(sum))
    };
    assert_eq!(build(|_| ()), (Some(1), Some(1), true));
    assert_eq!(build(|t| t[2].use_count = 0), (None, Some(1), true), "unknown");
    assert_eq!(build(|t| t[2].use_count = -1), (None, Some(1), true), "nonsense");
    assert_eq!(build(|t| t[2].flags |= 2), (None, Some(1), true), "an output");
    assert_eq!(build(|t| t[2].use_count = 3), (Some(3), Some(1), true));
    assert_eq!(build(|t| t[3].use_count = 2), (Some(1), Some(1), false), "the first view has a second reader");
    assert_eq!(build(|t| t[4].flags |= 2), (Some(1), None, true), "the view is an output");
    // Two views that refer to each other.
    assert_eq!(build(|t| t[3].srcs[0] = 5), (Some(1), Some(1), false));
}

#[test]
fn strides_are_widened_to_contiguous_strides() {
    // 5 GiB of F32: nb[2] and nb[3] do not fit 32 bits.
    let ne = [1 << 15, 5 << 13, 3, 1];
    let packed = [4, 4 << 15, 5 << 30, 15 << 30];
    assert_eq!(widen_strides(DType::F32, ne, packed.map(|n: usize| n as u32)), packed);
    // Strides that are not contiguous are kept.
    assert_eq!(widen_strides(DType::F32, [8, 4, 2, 1], [4, 64, 4096, 7]), [4, 64, 4096, 7]);
}

#[test]
fn every_rule_violation_is_rejected() {
    type Change = fn(&mut Vec<UntrustedTensor>);
    type Expected = fn(&GraphError) -> bool;
    let cases: &[(&str, Change, Expected)] = &[
        ("a duplicate id", |r| r[1].id = 1, |e| matches!(e, GraphError::DuplicateTensor(1))),
        (
            "an unknown source",
            |r| r[2].srcs[1] = 9,
            |e| matches!(e, GraphError::UnknownTensor { what: "source", id: 9 }),
        ),
        ("a missing source", |r| r[2].srcs[1] = 0, |e| matches!(e, GraphError::Shape(_))),
        ("itself as a source", |r| r[2].srcs[1] = 3, |e| matches!(e, GraphError::UseBeforeDefinition { index: 1, .. })),
        ("an undefined op number", |r| r[2].op = 102, |e| matches!(e, GraphError::UnknownOp(102))),
        (
            "an op that ggml itself cannot run",
            |r| r[2].op = 75,
            |e| e.to_string() == "op FLASH_ATTN_BACK is not supported by this server: in ggml it always aborts",
        ),
        (
            "an op with a function of the client",
            |r| r[2].op = 93,
            |e| {
                let named = matches!(e, GraphError::UnsupportedOp(OpCode::MapCustom1));
                named && e.to_string().ends_with("it calls a function in the address space of the client")
            },
        ),
        (
            "a parameter that the op does not define",
            |r| (r[2].op, r[2].srcs) = (OpCode::GroupNorm.to_wire(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            |e| matches!(e, GraphError::Param(e) if (e.op, e.word, e.name) == (OpCode::GroupNorm, 0, "n_groups")),
        ),
        ("a removed type", |r| r[0].dtype = 4, |e| matches!(e, GraphError::UnknownType(4))),
        ("an undefined type number", |r| r[2].dtype = u32::MAX, |e| matches!(e, GraphError::UnknownType(u32::MAX))),
        ("a row of half a block", |r| r[0].dtype = DType::Q4_0.to_wire(), |e| matches!(e, GraphError::Desc(_))),
        ("element counts that overflow", |r| r[0].ne = [u32::MAX; 4], |e| matches!(e, GraphError::Desc(_))),
        ("a source with the wrong shape", |r| r[1].ne = [7, 4, 1, 1], |e| matches!(e, GraphError::Shape(_))),
        (
            "an empty source",
            |r| r[1].ne = [8, 0, 1, 1],
            |e| matches!(e, GraphError::Shape(_) | GraphError::EmptySource { .. }),
        ),
        ("a source without memory", |r| r[1].place = None, |e| matches!(e, GraphError::Unplaced { .. })),
        ("a destination without memory", |r| r[2].place = None, |e| matches!(e, GraphError::Unplaced { .. })),
        (
            "an unknown slot",
            |r| r[1].place = Some(SlotOffset { slot: 1, offset: 0 }),
            |e| matches!(e, GraphError::OutOfBuffer { size: 0, .. }),
        ),
        (
            "a tensor past the end of its slot",
            |r| r[2].place = Some(SlotOffset { slot: 0, offset: SLOT - 127 }),
            |e| matches!(e, GraphError::OutOfBuffer { extent: 128, .. }),
        ),
        (
            "an offset that overflows",
            |r| r[0].place = Some(SlotOffset { slot: 0, offset: usize::MAX }),
            |e| matches!(e, GraphError::OutOfBuffer { .. }),
        ),
        (
            "a stride past the end of the slot",
            |r| r[0].nb[1] = 1 << 20,
            |e| matches!(e, GraphError::OutOfBuffer { .. }),
        ),
        (
            "a destination with overlapping elements",
            |r| r[2].nb[1] = 0,
            |e| matches!(e, GraphError::SelfOverlap(OpCode::Add)),
        ),
        (
            "a destination that overlaps a source",
            |r| r[2].place = Some(SlotOffset { slot: 0, offset: 4 }),
            |e| matches!(e, GraphError::Overlap { index: 0, .. }),
        ),
    ];
    for (what, change, expected) in cases {
        let mut records = addition();
        change(&mut records);
        let error = validate(&[3], &records).expect_err(what);
        assert!(expected(&error), "{what}: {error:?}");
        assert!(!error.to_string().is_empty());
    }
}

#[test]
fn in_place_is_accepted_only_for_exact_overlap() {
    let mut records = addition();
    records[2].place = records[0].place;
    assert!(validate(&[3], &records).is_ok(), "ADD onto its first source");
    records[2].place = records[1].place;
    assert!(validate(&[3], &records).is_ok(), "ADD onto its second source");
    // ADD_ID reads any row of its bias for any row of the destination, so only its first source may be overwritten.
    let mut ids = tensor(4, [4, 1, 1, 1], 1024);
    ids.dtype = DType::I32.to_wire();
    records[2].op = OpCode::AddId.to_wire();
    records[2].srcs[2] = 4;
    records.push(ids);
    assert!(matches!(validate(&[3], &records), Err(GraphError::Overlap { op: OpCode::AddId, index: 1 })));
    records[2].place = records[0].place;
    assert!(validate(&[3], &records).is_ok(), "ADD_ID onto its first source");
    let mut records = addition();
    records[2].place = records[0].place;
    records[2].srcs[1] = 0;
    (records[2].op, records[2].params[0]) = (OpCode::GroupNorm.to_wire(), 3);
    assert!(validate(&[3], &records).is_ok(), "GROUP_NORM onto its source");
    records[2].op = OpCode::Cumsum.to_wire();
    assert!(matches!(validate(&[3], &records), Err(GraphError::Overlap { op: OpCode::Cumsum, index: 0 })));
}

#[test]
fn a_broadcast_source_is_limited_by_its_buffer() {
    // 2^28 rows of 8 floats in a buffer of 32 bytes: a request of 300 bytes would cause hours of work.
    let mut a = tensor(1, [8, 1, 1, 1], 0);
    a.ne[1] = 1 << 28;
    a.nb = [4, 0, 0, 0];
    let records = [a, node(2, OpCode::Sum, &[1], [1, 1, 1, 1], 512)];
    assert!(matches!(validate(&[2], &records), Err(GraphError::BroadcastTooLarge { op: OpCode::Sum, index: 0, .. })));
}

#[test]
fn nodes_run_in_the_listed_order() {
    let ne = [8, 4, 1, 1];
    let mut records = addition();
    records.push(node(4, OpCode::Mul, &[3, 1], ne, 1024));
    assert_eq!(validate(&[3, 4], &records).unwrap().nodes().len(), 2);
    assert!(matches!(validate(&[4, 3], &records), Err(GraphError::UseBeforeDefinition { op: OpCode::Mul, index: 0 })));
    assert!(matches!(validate(&[3, 3], &records), Err(GraphError::DuplicateNode(3))));
    assert!(matches!(validate(&[3, 5], &records), Err(GraphError::UnknownTensor { what: "node", id: 5 })));
    // Two nodes that depend on each other.
    records[2].srcs[1] = 4;
    for order in [[3, 4], [4, 3]] {
        assert!(matches!(validate(&order, &records), Err(GraphError::UseBeforeDefinition { .. })));
    }
}

/// Random mutations of valid records, some of which stay valid: validation does not panic, and accepted graphs run within their
/// buffers.
#[test]
fn mutated_graphs_never_panic() {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut passed = 0;
    for _ in 0..30_000 {
        let mut records = addition();
        records.push(node(4, OpCode::Mul, &[3, 1], [8, 4, 1, 1], 1024));
        for _ in 0..rng.usize(1..4) {
            let t = rng.usize(0..records.len());
            let t = &mut records[t];
            let value = [0, 1, 2, 3, 8, 32, 64, 1 << 16, i32::MAX as u32, u32::MAX][rng.usize(0..10)];
            match rng.usize(0..8) {
                0 => t.ne[rng.usize(0..4)] = value,
                1 => t.nb[rng.usize(0..4)] = value,
                2 => t.op = rng.u32(0..102),
                3 => t.dtype = rng.u32(0..45),
                4 => t.params[rng.usize(0..16)] = value as i32,
                5 => t.srcs[rng.usize(0..10)] = rng.u64(0..6),
                6 => t.flags = value as i32,
                _ => t.place = Some(SlotOffset { slot: rng.u32(0..2), offset: value as usize }),
            }
        }
        if let Ok(graph) = validate(&[3, 4], &records) {
            passed += 1;
            for node in graph.nodes() {
                let t = graph.tensor(node.dst).unwrap();
                assert!(t.place.unwrap().offset + t.desc.extent() <= SLOT);
            }
        }
    }
    assert!(passed > 1000, "{passed} of 30000 mutated graphs were accepted: too few to test execution");
}
