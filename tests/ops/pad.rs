//! PAD, PAD_REFLECT_1D and ROLL: results of every device by the index of each element, and the shape rules.

use crate::devices::devices;
use fanout::ops::pad::Pad;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

/// The index in the source along dimension `d`; `None` where dst is 0.
fn source_index(op: Pad, d: usize, i: usize, n: usize) -> Option<usize> {
    let (i, n) = (i as i64, n as i64);
    let j = match op {
        Pad::Pad { before, circular, .. } => {
            let j = i - i64::from(before[d]);
            if circular { j.rem_euclid(n) } else { j }
        }
        Pad::Reflect { before, .. } if d == 0 => match i - i64::from(before) {
            j if j < 0 => -j,
            j if j >= n => 2 * (n - 1) - j,
            j => j,
        },
        Pad::Reflect { .. } => i,
        Pad::Roll { shifts } => (i - i64::from(shifts[d])).rem_euclid(n),
    };
    (0..n).contains(&j).then_some(j as usize)
}

fn check(op: Pad, x: TensorDesc) {
    let mut case = Case::new();
    let src = case.leaf_with_desc(x, &normal(1, x.elements()));
    let dst = case.b.node(op, &[Some(src)]).unwrap();
    let ne = case.b.tensor(dst).unwrap().desc.ne();
    let case = case.build();
    let values = case.values(src);
    let want: Vec<f64> = (0..ne.iter().product())
        .map(|k| {
            let i = index(ne, k);
            let from = [0, 1, 2, 3].map(|d| source_index(op, d, i[d], x.ne()[d]));
            let [Some(j0), Some(j1), Some(j2), Some(j3)] = from else { return 0.0 };
            values[at(x.ne(), [j0, j1, j2, j3])]
        })
        .collect();
    for on in devices() {
        assert_eq!(case.run(on).values(dst), want, "{op:?} {x:?} {}", on.name);
    }
}

fn layouts(ne: [usize; 4]) -> Vec<TensorDesc> {
    let [n0, n1, n2, _] = ne;
    vec![
        TensorDesc::contiguous(DType::F32, ne).unwrap(),
        TensorDesc::contiguous(DType::F16, ne).unwrap(),
        TensorDesc::strided(DType::F32, ne, [4, 4 * n0 * n2, 4 * n0, 4 * n0 * n1 * n2]).unwrap(),
    ]
}

#[test]
fn paddings_match_the_oracle() {
    let ne = [6, 5, 3, 2];
    let transposed = TensorDesc::strided(DType::F32, ne, [20, 4, 120, 360]).unwrap();
    for circular in [false, true] {
        for (before, after) in [
            ([0, 0, 0, 0], [0, 0, 0, 0]),
            ([1, 2, 0, 1], [2, 0, 3, 0]),
            ([6, 5, 3, 2], [6, 5, 3, 2]),
            ([9, 0, 0, 0], [1, 0, 0, 0]),
            ([-2, 1, 0, 0], [0, -3, 0, -1]),
            ([-9, 0, 0, 0], [12, 0, 0, 0]),
            ([1030, 0, 0, 0], [2000, 0, 0, 1]),
        ] {
            let op = Pad::Pad { before, after, circular };
            layouts(ne).into_iter().chain([transposed]).for_each(|x| check(op, x));
        }
        let op = Pad::Pad { before: [3, 0, 0, 0], after: [1500, 1, 0, 0], circular };
        check(op, TensorDesc::contiguous(DType::F32, [2500, 7, 1, 1]).unwrap());
    }
}

#[test]
fn reflections_match_the_oracle() {
    for (ne, before, after) in [
        ([1, 3, 1, 1], 0, 0),
        ([6, 5, 3, 2], 5, 5),
        ([6, 5, 3, 2], 0, 2),
        ([2000, 3, 1, 1], 1500, 1999),
        ([1024, 9, 1, 1], 1, 1023),
    ] {
        check(Pad::Reflect { before, after }, TensorDesc::contiguous(DType::F32, ne).unwrap());
    }
}

#[test]
fn rotations_match_the_oracle() {
    for shifts in [[0, 0, 0, 0], [1, 0, 0, 0], [-5, 2, -1, 1], [3, -4, 2, -1]] {
        layouts([6, 5, 3, 2]).into_iter().for_each(|x| check(Pad::Roll { shifts }, x));
    }
    check(Pad::Roll { shifts: [1700, -3, 0, 0] }, TensorDesc::contiguous(DType::F32, [2500, 7, 1, 1]).unwrap());
    // Bytes are copied, whatever they mean.
    let mut case = Case::new();
    let x = case.indices(DType::I64, [4, 1, 1, 1], &[1, -2, i64::MAX, i64::MIN]);
    let dst = case.b.node(Pad::Roll { shifts: [1, 0, 0, 0] }, &[Some(x)]).unwrap();
    let case = case.build();
    for on in devices() {
        let want = [i64::MIN, 1, -2, i64::MAX].map(i64::to_le_bytes).concat();
        assert_eq!(case.run(on).bytes(dst), want, "{}", on.name);
    }
}

#[test]
fn parameters_round_trip() {
    let ints = |values: &[i32]| {
        values.iter().enumerate().fold(OpParams::default(), |words, (k, &value)| words.with_int(k, value))
    };
    for (code, op, words) in [
        (
            OpCode::Pad,
            Pad::Pad { before: [1, 3, 5, 7], after: [2, -4, 6, 8], circular: true },
            ints(&[1, 2, 3, -4, 5, 6, 7, 8, 1]),
        ),
        (OpCode::PadReflect1d, Pad::Reflect { before: 3, after: 4 }, ints(&[3, 4])),
        (OpCode::Roll, Pad::Roll { shifts: [1, -2, 3, -4] }, ints(&[1, -2, 3, -4])),
    ] {
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, words));
        assert_eq!(Op::decode(code, &words), Ok(Some(op.into())));
    }
    for words in [ints(&[-1, 0]), ints(&[0, i32::MIN])] {
        assert!(Op::decode(OpCode::PadReflect1d, &words).is_err());
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let build = |op: Pad, x: TensorDesc| {
        let mut case = Case::new();
        let src = case.b.leaf_with_desc(x).unwrap();
        case.b.node(op, &[Some(src)]).ok().map(|_| case.b.build())
    };
    let x = TensorDesc::contiguous(DType::F32, [6, 4, 1, 1]).unwrap();
    let gaps = TensorDesc::strided(DType::F32, [6, 4, 1, 1], [4, 32, 128, 128]).unwrap();
    let transposed = TensorDesc::strided(DType::F32, [6, 4, 1, 1], [16, 4, 96, 96]).unwrap();
    let reflect = |before, after| Pad::Reflect { before, after };
    let pad = |before, after| Pad::Pad { before: [before, 0, 0, 0], after: [after, 0, 0, 0], circular: false };
    for (op, x, what) in [
        (pad(-4, -3), x, "nothing is left"),
        (pad(i32::MIN, 0), x, "far less than nothing"),
        (reflect(6, 0), x, "the reflection repeats"),
        (reflect(0, u32::MAX), x, "far beyond a row"),
        (reflect(1, 1), gaps, "gaps"),
        (Pad::Roll { shifts: [6, 0, 0, 0] }, x, "a whole turn"),
        (Pad::Roll { shifts: [0, i32::MIN, 0, 0] }, x, "many turns"),
        (Pad::Roll { shifts: [1, 0, 0, 0] }, transposed, "transposed"),
    ] {
        assert!(build(op, x).is_none(), "{what}");
    }
    assert!(build(Pad::Roll { shifts: [5, -3, 0, 0] }, gaps).is_some());
    for (dtype, op) in [(DType::I32, pad(1, 1)), (DType::Q8_0, Pad::Roll { shifts: [0, 1, 0, 0] })] {
        let graph = build(op, TensorDesc::contiguous(dtype, [32, 4, 1, 1]).unwrap()).unwrap();
        assert!(devices()[0].device.prepare(graph.into()).is_err(), "{dtype}");
    }
    let huge = pad(i32::MAX, i32::MAX);
    assert!(
        build(huge, TensorDesc::contiguous(DType::F32, [6, 1, 1, 1]).unwrap()).is_some(),
        "16 GiB are a valid shape"
    );
}
