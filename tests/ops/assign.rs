//! SET and ACC: results of every device against a walk over the region, in place and not, and the shape rules.

use crate::devices::devices;
use fanout::ops::assign::Assign;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{index, normal};
use fanout_testing::op_case::Case;

/// a as numbers, with b written or added at the places of the region, in the order of b.
fn oracle(op: Assign, a: &[f64], b: &[f64], bne: [usize; 4], size: usize) -> Vec<f64> {
    let mut out = a.to_vec();
    for (k, &value) in b.iter().enumerate() {
        let i = index(bne, k);
        let strides = [size, op.nb[0] as usize, op.nb[1] as usize, op.nb[2] as usize];
        // A stride of a dimension with one element may be any number.
        let place: usize = op.offset as usize + (0..4).filter(|&d| i[d] > 0).map(|d| i[d] * strides[d]).sum::<usize>();
        let place = &mut out[place / size];
        *place = if op.accumulate { f64::from((*place + value) as f32) } else { value };
    }
    out
}

#[test]
fn regions_are_written_and_added() {
    // Shapes of a and b, strides and offset of the region.
    let cases = [
        ([7, 1, 1, 1], [3, 1, 1, 1], [-9, i32::MIN, -1], 8),
        ([1500, 20, 3, 1], [1500, 2, 3, 1], [6000, 120_000, 360_000], 12_000),
        ([1500, 20, 3, 1], [1100, 9, 2, 1], [12_000, 120_000, 0], 4),
        ([8, 6, 4, 2], [3, 5, 2, 2], [32, 384, 768], 36),
        ([8, 6, 4, 2], [8, 6, 4, 2], [32, 192, 768], 0),
    ];
    for (ane, bne, nb, offset) in cases {
        for (accumulate, dtype) in [(false, DType::F32), (false, DType::I32), (true, DType::F32), (false, DType::F16)] {
            for in_place in [false, true] {
                let size = dtype.block_bytes();
                let scale = |nb: i32| nb / 4 * size as i32;
                let op = Assign { accumulate, nb: nb.map(scale), offset: scale(offset), in_place };
                let values = |seed, ne: [usize; 4]| {
                    normal(seed, ne.iter().product()).iter().map(|v| (v * 8.0).round()).collect::<Vec<_>>()
                };
                let mut case = Case::new();
                let a = case.leaf(dtype, ane, &values(1, ane));
                // b has strides of its own, in rows twice as long.
                let row = 2 * bne[0] * size;
                let strides = [size, row * bne[2], row, row * bne[1] * bne[2]];
                let b = case.leaf_with_desc(TensorDesc::strided(dtype, bne, strides).unwrap(), &values(2, bne));
                let srcs = [Some(a), Some(b)];
                let dst = if in_place {
                    let onto = case.b.view(a, TensorDesc::contiguous(dtype, ane).unwrap(), 0).unwrap();
                    case.b.node_into(op, &srcs, onto).unwrap()
                } else {
                    case.b.node(op, &srcs).unwrap()
                };
                let case = case.build();
                let (a, b) = (values(1, ane), values(2, bne));
                let [a, b] = [a, b].map(|v| v.into_iter().map(f64::from).collect::<Vec<_>>());
                let want = oracle(op, &a, &b, bne, size);
                for on in devices() {
                    assert_eq!(case.run(on).values(dst), want, "{op:?} {ane:?} {bne:?} {dtype} {}", on.name);
                }
            }
        }
    }
}

/// A region may start at any byte of dst, and its rows may lie at any distance: the elements of the region then straddle those of a.
#[test]
fn unaligned_regions_are_written_bytewise() {
    for (accumulate, dtype, nb, offset) in [
        (false, DType::F32, [32, 192, 0], 1),
        (false, DType::F32, [32, 192, 0], 2),
        (false, DType::F32, [33, 192, 0], 4),
        (false, DType::F32, [32, 191, 0], 3),
        (false, DType::I32, [32, 192, 0], 7),
        (false, DType::F16, [15, 192, 0], 1),
        (true, DType::F32, [32, 192, 0], 1),
        (true, DType::F32, [32, 190, 0], 32),
    ] {
        let mut case = Case::new();
        let a = case.leaf(dtype, [8, 6, 3, 1], &normal(4, 144));
        let (bne, size) = ([3, 2, 2, 1], dtype.block_bytes());
        let b = case.leaf(dtype, bne, &normal(5, 12));
        let dst = case.b.node(Assign { accumulate, nb, offset, in_place: false }, &[Some(a), Some(b)]).unwrap();
        let case = case.build();
        let (mut want, added) = (case.bytes(a), case.bytes(b));
        for (k, value) in added.chunks_exact(size).enumerate() {
            let [i0, i1, i2, _] = index(bne, k);
            let place = offset as usize + i0 * size + i1 * nb[0] as usize + i2 * nb[1] as usize;
            let place = &mut want[place..][..size];
            let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            let sum = accumulate.then(|| (float(place) + float(value)).to_le_bytes());
            place.copy_from_slice(sum.as_ref().map_or(value, |sum| sum));
        }
        for on in devices() {
            assert!(case.run(on).bytes(dst) == want, "{accumulate} {dtype} {nb:?} {offset} {}", on.name);
        }
    }
}

/// Nothing is written: dst is a.
#[test]
fn an_empty_region_is_a_copy() {
    let mut case = Case::new();
    let a = case.leaf(DType::F32, [8, 6, 1, 1], &normal(3, 48));
    let b = case.b.leaf(DType::F32, [0, 2, 1, 1]).unwrap();
    let op = Assign { accumulate: false, nb: [32, 0, 0], offset: 4, in_place: false };
    let dst = case.b.node(op, &[Some(a), Some(b)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert_eq!(case.run(on).values(dst), case.values(a), "{}", on.name);
    }
}

#[test]
fn parameters_round_trip() {
    for (accumulate, code) in [(false, OpCode::Set), (true, OpCode::Acc)] {
        for in_place in [false, true] {
            let op = Assign { accumulate, nb: [64, -1, i32::MIN], offset: 12, in_place };
            let words = OpParams::default().with_int(0, 64).with_int(1, -1).with_int(2, i32::MIN).with_int(3, 12);
            let words = words.with_int(4, i32::from(in_place));
            assert_eq!(Op::from(op).encode(), words);
            assert_eq!(Op::decode(code, &words), Ok(Some(op.into())));
        }
        let error = Op::decode(code, &OpParams::default().with_int(3, -4)).unwrap_err();
        assert_eq!((error.word, error.name), (3, "offset"));
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let (ane, bne) = ([8, 6, 1, 1], [4, 2, 1, 1]);
    let built = |nb: [i32; 3], offset, (a, b): (TensorDesc, TensorDesc), on_b: bool| {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf_with_desc(a).unwrap(), case.b.leaf_with_desc(b).unwrap());
        let op = Assign { accumulate: false, nb, offset, in_place: false };
        let srcs = [Some(a), Some(b)];
        if on_b {
            let onto = case.b.view(b, case.b.tensor(a).unwrap().desc, 0).unwrap();
            case.b.node_into(op, &srcs, onto)
        } else {
            case.b.node(op, &srcs)
        }
        .map(|_| case.b.build())
    };
    let t = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let (a, b) = (t(DType::F32, ane), t(DType::F32, bne));
    assert!(built([32, 0, 0], 144, (a, b), false).is_ok(), "up to the end");
    for (nb, offset, operands, what) in [
        ([32, 0, 0], 148, (a, b), "4 bytes beyond the end"),
        ([32, 0, 0], -4, (a, b), "in front of dst"),
        ([-32, 0, 0], 100, (a, b), "rows backwards"),
        ([i32::MAX, 0, 0], 0, (a, b), "rows far apart"),
        ([4, 0, 0], 0, (a, b), "rows that overlap"),
        ([0, 0, 0], 0, (a, b), "rows at one place"),
        ([32, 0, 0], 0, (a, t(DType::F16, bne)), "two types"),
        ([0, 0, 0], 0, (a, t(DType::F32, [8, 7, 1, 1])), "b has more elements than a"),
        ([32, 0, 0], 0, (TensorDesc::strided(DType::F32, ane, [4, 64, 384, 384]).unwrap(), b), "gaps in a"),
    ] {
        assert!(built(nb, offset, operands, false).is_err(), "{what}");
    }
    assert!(built([32, 0, 0], 0, (a, a), true).is_err(), "dst on b");
    for dtype in [DType::Q8_0, DType::IQ2_S] {
        let operands = (t(dtype, [256, 4, 1, 1]), t(dtype, [256, 1, 1, 1]));
        let graph = built([0, 0, 0], 0, operands, false).unwrap();
        assert!(devices()[0].device.prepare(graph.into()).is_err(), "{dtype}");
    }
}
