//! NORM, RMS_NORM, L2_NORM and GROUP_NORM: results of every device against the formulas in f64, parameters and shape rules.

use crate::devices::devices;
use fanout::ops::norm::Norm;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;
use std::num::NonZeroU32;

const OPS: [Norm; 7] = [
    Norm::Norm { eps: 1e-5 },
    Norm::RmsNorm { eps: 1e-6 },
    Norm::RmsNorm { eps: 0.5 },
    Norm::GroupNorm { groups: NonZeroU32::MIN, eps: 1e-5 },
    Norm::GroupNorm { groups: NonZeroU32::new(2).unwrap(), eps: 0.5 },
    Norm::L2Norm { eps: 1e-12 },
    Norm::L2Norm { eps: 30.0 },
];

fn oracle(op: Norm, x: &[f64], ne: [usize; 4]) -> Vec<f64> {
    let part = |x: &[f64]| {
        let n = x.len() as f64;
        let squares = |shift: f64| x.iter().map(|x| (x - shift) * (x - shift)).sum::<f64>();
        let (mean, divisor) = match op {
            Norm::Norm { eps } | Norm::GroupNorm { eps, .. } => {
                let mean = x.iter().sum::<f64>() / n;
                (mean, (squares(mean) / n + f64::from(eps)).sqrt())
            }
            Norm::RmsNorm { eps } => (0.0, (squares(0.0) / n + f64::from(eps)).sqrt()),
            Norm::L2Norm { eps } => (0.0, squares(0.0).sqrt().max(f64::from(eps))),
        };
        x.iter().map(|x| (x - mean) / divisor).collect::<Vec<_>>()
    };
    let group_len = match op {
        Norm::GroupNorm { groups, .. } => ne[0] * ne[1] * ne[2].div_ceil(groups.get() as usize),
        _ => ne[0],
    };
    x.chunks(ne[0] * ne[1] * ne[2]).flat_map(|batch| batch.chunks(group_len)).flat_map(part).collect()
}

#[test]
fn all_shapes_match_the_oracle() {
    for ne in [
        [1, 1, 1, 1],
        [5, 3, 1, 1],
        [64, 9, 3, 2],
        [1023, 20, 1, 1],
        [1025, 1, 1, 1],
        [16_385, 2, 1, 1],
        [40_000, 3, 1, 1],
    ] {
        let mut case = Case::new();
        let values: Vec<f32> = normal(1, ne.iter().product()).iter().map(|v| v * 3.0 + 1.0).collect();
        let x = case.leaf(DType::F32, ne, &values);
        let dsts = OPS.map(|op| case.b.node(op, &[Some(x)]).unwrap());
        let case = case.build();
        for on in devices() {
            let run = case.run(on);
            for (op, dst) in OPS.into_iter().zip(dsts) {
                let want = oracle(op, &case.values(x), ne);
                assert_close(&run.values(dst), &want, 4e-7, 3e-7, &format!("{op:?} {ne:?} {}", on.name));
            }
        }
    }
}

/// Strided, permuted, transposed and broadcast sources; strided destinations; in place, also with rows longer than the
/// scratch.
#[test]
fn all_layouts_match_the_oracle() {
    let desc = |ne, nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let ne = [6, 4, 3, 2];
    let (padded, permuted) = (desc(ne, [4, 40, 200, 800]), desc(ne, [4, 72, 24, 288]));
    let (transposed, repeated) = (desc(ne, [16, 4, 96, 288]), desc(ne, [4, 0, 24, 72]));
    let (channels_first, single) = (desc(ne, [12, 72, 4, 288]), desc([1, 7, 5, 2], [999, 8, 60, 400]));
    let long = desc([16_390, 2, 1, 1], [4, 70_000, 140_000, 140_000]);
    let cases = [
        (padded, Some(permuted)),
        (permuted, Some(padded)),
        (transposed, Some(padded)),
        (repeated, Some(transposed)),
        (padded, None),
        (transposed, None),
        (channels_first, Some(padded)),
        (channels_first, None),
        (single, None),
        (single, Some(desc([1, 7, 5, 2], [4, 4, 32, 160]))),
        (long, None),
        (long, Some(long)),
    ];
    for (dx, dd) in cases {
        for op in OPS {
            let mut case = Case::new();
            let x = case.leaf_with_desc(dx, &normal(2, dx.elements()));
            let dst = match dd {
                Some(dd) => case.b.leaf_with_desc(dd).unwrap(),
                None => case.b.view(x, dx, 0).unwrap(),
            };
            case.b.node_into(op, &[Some(x)], dst).unwrap();
            let case = case.build();
            let want = oracle(op, &case.values(x), dx.ne());
            for on in devices() {
                let what = format!("{op:?} {dx:?} {dd:?} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, 4e-7, 3e-7, &what);
            }
        }
    }
}

fn group_norm(groups: u32) -> Norm {
    Norm::GroupNorm { groups: NonZeroU32::new(groups).unwrap(), eps: 1e-6 }
}

/// Groups of equal size, with a shorter last group, or more groups than channels; contiguous and padded planes.
#[test]
fn group_norm_supports_any_number_of_groups() {
    let max_groups = i32::MAX as u32;
    for (ne, groups) in [
        ([1, 1, 1, 1], vec![1, 2, max_groups]),
        ([7, 5, 6, 3], vec![1, 2, 3, 4, 5, 6, 7, max_groups]),
        ([9, 1, 7, 2], vec![1, 2, 3, 5]),
        ([1, 9, 5, 1], vec![2, 4]),
        ([1, 1, 130, 5], vec![1, 3, 64, 130]),
        ([8, 8, 64, 2], vec![32]),
        ([33, 31, 11, 2], vec![1, 4, 10]),
        ([1025, 3, 3, 1], vec![1, 2]),
        ([16_385, 1, 3, 2], vec![2]),
        ([150, 150, 2, 1], vec![1, 2]),
    ] {
        let [n0, n1, n2, _] = ne;
        let nb1 = 4 * n0 + 4;
        let padded = TensorDesc::strided(DType::F32, ne, [4, nb1, nb1 * n1, nb1 * n1 * n2]).unwrap();
        for desc in [TensorDesc::contiguous(DType::F32, ne).unwrap(), padded] {
            let mut case = Case::new();
            let values: Vec<f32> = normal(4, desc.elements()).iter().map(|v| v * 2.0 - 3.0).collect();
            let x = case.leaf_with_desc(desc, &values);
            let ops: Vec<_> = groups.iter().map(|&groups| group_norm(groups)).collect();
            let dsts: Vec<_> = ops.iter().map(|&op| case.b.node(op, &[Some(x)]).unwrap()).collect();
            let case = case.build();
            for on in devices() {
                let run = case.run(on);
                for (&op, &dst) in ops.iter().zip(&dsts) {
                    let want = oracle(op, &case.values(x), ne);
                    assert_close(&run.values(dst), &want, 4e-7, 6e-7, &format!("{op:?} {desc:?} {}", on.name));
                }
            }
        }
    }
}

/// An f32 accumulator would lose the small values beside the large value, and so the mean.
#[test]
fn groups_are_summed_in_f64() {
    let mut values = vec![1.0; 64 * 64 * 4];
    values[0] = 33_554_432.0;
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [64, 64, 4, 1], &values);
    let dst = case.b.node(group_norm(1), &[Some(x)]).unwrap();
    let case = case.build();
    // Rounding the mean, about 2049, to f32 moves a deviation from it by less than 1e-7 of the mean.
    let want = oracle(group_norm(1), &case.values(x), [64, 64, 4, 1]);
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 4e-7, 1e-9, on.name);
    }
}

#[test]
fn rows_of_zeros_give_zeros() {
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [100, 1, 1, 1], &[0.0; 100]);
    let dsts = OPS.map(|op| case.b.node(op, &[Some(x)]).unwrap());
    let case = case.build();
    for on in devices() {
        let run = case.run(on);
        for dst in dsts {
            assert_eq!(run.values(dst), [0.0; 100], "{}", on.name);
        }
    }
}

#[test]
fn parameters_round_trip() {
    type Make = fn(f32) -> Norm;
    let families: [(OpCode, Make); 3] = [
        (OpCode::Norm, |eps| Norm::Norm { eps }),
        (OpCode::RmsNorm, |eps| Norm::RmsNorm { eps }),
        (OpCode::L2Norm, |eps| Norm::L2Norm { eps }),
    ];
    for (code, make) in families {
        for eps in [0.0, 1e-6, f32::INFINITY] {
            let words = OpParams::default().with_float(0, eps);
            assert_eq!(Op::decode(code, &words), Ok(Some(make(eps).into())));
            assert_eq!((Op::from(make(eps)).code(), Op::from(make(eps)).encode()), (code, words));
        }
        for eps in [-1e-30, f32::NAN, f32::NEG_INFINITY] {
            let error = Op::decode(code, &OpParams::default().with_float(0, eps)).unwrap_err();
            assert_eq!((error.op, error.word, error.name), (code, 0, "eps"));
        }
    }
}

#[test]
fn group_norm_parameters_round_trip() {
    let words = |groups, eps| OpParams::default().with_int(0, groups).with_float(1, eps);
    for groups in [1, 2, 32, i32::MAX] {
        let op = group_norm(groups as u32);
        assert_eq!(Op::decode(OpCode::GroupNorm, &words(groups, 1e-6)), Ok(Some(op.into())));
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (OpCode::GroupNorm, words(groups, 1e-6)));
    }
    for (groups, eps, word, name) in [
        (0, 1e-6, 0, "n_groups"),
        (-1, 1e-6, 0, "n_groups"),
        (i32::MIN, 0.0, 0, "n_groups"),
        (1, -1e-30, 1, "eps"),
        (1, f32::NAN, 1, "eps"),
        (1, f32::NEG_INFINITY, 1, "eps"),
    ] {
        let error = Op::decode(OpCode::GroupNorm, &words(groups, eps)).unwrap_err();
        assert_eq!((error.op, error.word, error.name), (OpCode::GroupNorm, word, name), "{groups} {eps}");
    }
    // An op whose eps is in another word must not read it from the first word.
    assert!(Op::decode(OpCode::GroupNorm, &words(f32::NAN.to_bits() as i32, 0.0)).is_ok());
}

#[test]
fn invalid_nodes_are_rejected() {
    let ne = [8, 3, 1, 1];
    let mut case = Case::new();
    let x = case.leaf(DType::F32, ne, &normal(3, 24));
    assert!(
        case.b.node_with_output(OPS[0], &[Some(x)], OutputSpec { dtype: DType::F32, ne: [8, 2, 1, 1] }).is_err(),
        "another shape"
    );
    for (ne, op) in [(ne, group_norm(1 << 31)), ([8, 3, 0, 1], group_norm(1)), ([0, 3, 2, 1], OPS[0])] {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(3, ne.iter().product()));
        assert!(case.b.node(op, &[Some(x)]).is_err(), "{op:?} of {ne:?}");
    }
    let mut case = Case::new();
    assert!(case.b.node(OPS[1], &fanout::graph::NO_SOURCES).is_err(), "no source");
    // A type without a CPU kernel is rejected when the program is compiled, not when it runs.
    for op in OPS {
        let mut case = Case::new();
        let x = case.leaf(DType::F16, ne, &normal(3, 24));
        case.b.node(op, &[Some(x)]).unwrap();
        let case = case.build();
        assert!(devices()[0].device.prepare(case.graph).is_err(), "{op:?}");
    }
}
