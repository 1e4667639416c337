//! CONCAT and REPEAT: results of every device against copies made block by block, and the shape rules.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::concat::Concat;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{at, index};
use fanout_testing::op_case::Case;

/// A leaf of any type and layout with random bytes.
fn random_leaf(case: &mut Case, desc: TensorDesc, seed: u64) -> TensorId {
    let mut rng = fastrand::Rng::with_seed(seed);
    let bytes = (0..desc.extent()).map(|_| rng.u8(..)).collect();
    let memory = case.raw(DType::I8, [desc.extent(), 1, 1, 1], bytes);
    case.b.view(memory, desc, 0).unwrap()
}

/// A layout of kind 0 (contiguous), 1 (padded) or 2 (dimensions 0 and 1 exchanged in memory).
fn layout(dtype: DType, ne: [usize; 4], kind: usize) -> TensorDesc {
    let (size, blocks) = (dtype.block_bytes(), ne[0] / dtype.block_len());
    let (nb0, nb1, plane) = match kind {
        0 => (size, size * blocks, size * blocks * ne[1]),
        1 => (size, size * (blocks + 1), size * (blocks + 1) * (ne[1] + 1)),
        _ => (size * ne[1], size, size * blocks * ne[1]),
    };
    TensorDesc::strided(dtype, ne, [nb0, nb1, plane, plane * ne[2]]).unwrap()
}

/// The blocks of a tensor in logical order; `pick` returns the block at an index of `ne` (in blocks).
fn blocks<'a>(ne: [usize; 4], pick: impl Fn([usize; 4]) -> &'a [u8]) -> Vec<u8> {
    (0..ne.iter().product()).flat_map(|k| pick(index(ne, k)).to_vec()).collect()
}

#[test]
fn concat_joins_every_type_along_each_dimension() {
    for &dtype in DType::ALL {
        for dim in 0..4u8 {
            for (ka, kb) in [(0, 0), (1, 2), (2, 1)] {
                let d = usize::from(dim);
                let (mut an, mut bn) = ([3, 4, 2, 3], [3, 4, 2, 3]);
                (an[d], bn[d]) = (2, 5);
                let elements = |n: [usize; 4]| [n[0] * dtype.block_len(), n[1], n[2], n[3]];
                let mut case = Case::new();
                let a = random_leaf(&mut case, layout(dtype, elements(an), ka), 1);
                let b = random_leaf(&mut case, layout(dtype, elements(bn), kb), 2);
                let dst = case.b.node(Concat::Concat { dim }, &[Some(a), Some(b)]).unwrap();
                let case = case.build();
                let (av, bv, size) = (case.bytes(a), case.bytes(b), dtype.block_bytes());
                let mut ne = an;
                ne[d] += bn[d];
                let want = blocks(ne, |mut i| {
                    if i[d] < an[d] {
                        return &av[at(an, i) * size..][..size];
                    }
                    i[d] -= an[d];
                    &bv[at(bn, i) * size..][..size]
                });
                for on in devices() {
                    assert!(case.run(on).bytes(dst) == want, "{dtype} {dim} {ka} {kb} {}", on.name);
                }
            }
        }
    }
}

#[test]
fn concat_joins_empty_and_large_tensors() {
    for (an, bn) in [([0, 3, 2, 1], [5, 3, 2, 1]), ([5, 3, 2, 1], [0, 3, 2, 1]), ([1500, 40, 1, 1], [13, 40, 1, 1])] {
        let mut case = Case::new();
        let a = random_leaf(&mut case, TensorDesc::contiguous(DType::F32, an).unwrap(), 3);
        let b = random_leaf(&mut case, TensorDesc::contiguous(DType::F32, bn).unwrap(), 4);
        let dst = case.b.node(Concat::Concat { dim: 0 }, &[Some(a), Some(b)]).unwrap();
        let case = case.build();
        let (av, bv) = (case.bytes(a), case.bytes(b));
        let rows = an[1] * an[2];
        let row = |v: &[u8], n: usize, r: usize| v[4 * n * r..4 * n * (r + 1)].to_vec();
        let want: Vec<u8> = (0..rows).flat_map(|r| [row(&av, an[0], r), row(&bv, bn[0], r)].concat()).collect();
        for on in devices() {
            assert!(case.run(on).bytes(dst) == want, "{an:?} {bn:?} {}", on.name);
        }
    }
}

#[test]
fn repeat_tiles_every_type() {
    for &dtype in DType::ALL {
        let times = [([1, 1, 1, 1], [1, 1, 1, 1]), ([3, 2, 1, 2], [7, 3, 4, 2]), ([1, 3, 2, 1], [300, 2, 1, 3])];
        for (an, count) in times {
            for kind in 0..3 {
                let elements = |n: [usize; 4]| [n[0] * dtype.block_len(), n[1], n[2], n[3]];
                let ne: [usize; 4] = std::array::from_fn(|d| an[d] * count[d]);
                let mut case = Case::new();
                let a = random_leaf(&mut case, layout(dtype, elements(an), kind), 5);
                let dst = random_leaf(&mut case, layout(dtype, elements(ne), 2 - kind), 6);
                case.b.node_into(Concat::Repeat, &[Some(a)], dst).unwrap();
                let case = case.build();
                let (av, size) = (case.bytes(a), dtype.block_bytes());
                let want = blocks(ne, |i| &av[at(an, std::array::from_fn(|d| i[d] % an[d])) * size..][..size]);
                let on = &devices()[kind];
                assert!(case.run(on).bytes(dst) == want, "{dtype} {an:?} {count:?} {kind} {}", on.name);
            }
        }
    }
}

#[test]
fn invalid_shapes_are_rejected() {
    use DType::{F16, F32};
    for op in [Concat::Repeat, Concat::Concat { dim: 0 }, Concat::Concat { dim: 3 }].map(Op::from) {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    for dim in [-1, 4, i32::MIN, i32::MAX] {
        assert!(Op::decode(OpCode::Concat, &OpParams::default().with_int(0, dim)).is_err(), "{dim}");
    }
    let built = |op: Concat, srcs: &[(DType, [usize; 4])], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let ids: Vec<_> = srcs.iter().map(|&(dtype, ne)| case.b.leaf(dtype, ne).ok()).collect();
        case.b.node_with_output(op, &ids, OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let along = |dim| Concat::Concat { dim };
    let ne = [4, 3, 1, 1];
    assert!(built(along(1), &[(F32, ne), (F32, ne)], (F32, [4, 6, 1, 1])));
    assert!(!built(along(1), &[(F32, ne), (F16, ne)], (F32, [4, 6, 1, 1])), "two types");
    assert!(!built(along(1), &[(F32, ne), (F32, ne)], (F16, [4, 6, 1, 1])), "a third type");
    assert!(!built(along(0), &[(F32, ne), (F32, [4, 2, 1, 1])], (F32, [8, 3, 1, 1])), "other counts differ");
    assert!(!built(along(1), &[(F32, ne), (F32, ne)], (F32, [4, 5, 1, 1])), "not the sum");
    assert!(!built(along(1), &[(F32, ne)], (F32, [4, 3, 1, 1])), "one source");
    assert!(!built(along(4), &[(F32, ne), (F32, ne)], (F32, [4, 6, 1, 1])), "no such dimension");
    assert!(built(Concat::Repeat, &[(F32, ne)], (F32, [8, 3, 5, 1])));
    assert!(!built(Concat::Repeat, &[(F32, ne)], (F32, [6, 3, 1, 1])), "one and a half times");
    assert!(!built(Concat::Repeat, &[(F32, ne)], (F16, [8, 3, 1, 1])), "another type");
    // A size that overflows.
    let mut case = Case::new();
    let huge = [1, usize::MAX, 0, 1];
    let (a, b) = (case.b.leaf_with_desc(empty_desc(huge)).unwrap(), case.b.leaf_with_desc(empty_desc(huge)).unwrap());
    assert!(case.b.node(along(1), &[Some(a), Some(b)]).is_err());
}

/// A tensor without elements (`ne` has a 0).
fn empty_desc(ne: [usize; 4]) -> TensorDesc {
    TensorDesc::strided(DType::F32, ne, [4, 4, 4, 4]).unwrap()
}
