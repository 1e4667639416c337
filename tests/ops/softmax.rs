//! SOFT_MAX: results of every device against the formula in f64, parameters and shape rules.

use crate::devices::devices;
use fanout::graph::BuildError;
use fanout::ops::softmax::SoftMax;
use fanout::ops::{Op, OpCode, OpFamily, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{index, normal, uniform};
use fanout_testing::op_case::Case;

/// The ALiBi slope of head `h` of `heads`, by its formula.
pub(crate) fn slope(max_bias: f32, heads: usize, h: usize) -> f64 {
    if max_bias <= 0.0 {
        return 1.0;
    }
    let (bias, steps) = (f64::from(max_bias), f64::from(1 << heads.ilog2()));
    if (h as f64) < steps {
        (-bias / steps).exp2().powi(h as i32 + 1)
    } else {
        (-bias / 2.0 / steps).exp2().powi((2.0 * (h as f64 - steps)) as i32 + 1)
    }
}

type Tensor<'a> = (&'a [f64], [usize; 4]);

fn oracle(op: SoftMax, (x, ne): Tensor<'_>, mask: Option<Tensor<'_>>, sinks: Option<&[f64]>) -> Vec<f64> {
    let [n, _, heads, _] = ne;
    let mut out = Vec::with_capacity(x.len());
    for (r, row) in x.chunks(n).enumerate() {
        let [_, i1, h, i3] = index(ne, r * n);
        let bias = |i0| {
            mask.map_or(0.0, |(values, m)| {
                let at = [i0, i1, h % m[2], i3 % m[3]];
                values[fanout_testing::inputs::at(m, at)] * slope(op.max_bias, heads, h)
            })
        };
        let z: Vec<f64> = row.iter().enumerate().map(|(i, x)| x * f64::from(op.scale) + bias(i)).collect();
        let sink = sinks.map(|s| s[h]);
        let top = z.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = z.iter().copied().chain(sink).map(|z| (z - top).exp()).sum();
        out.extend(z.iter().map(|z| (z - top).exp() / sum));
    }
    out
}

/// Masks every third entry and the end of each row. Over eight rows the masked end grows from row to row; no row is fully
/// masked.
fn mask_values(seed: u64, ne: [usize; 4]) -> Vec<f32> {
    let mut values = uniform(seed, ne.iter().product(), -3.0, 1.0);
    for (r, row) in values.chunks_mut(ne[0]).enumerate() {
        row.iter_mut().skip(1).step_by(3).for_each(|m| *m = f32::NEG_INFINITY);
        let shown = 1 + (ne[0] - 1) * 5 / (5 + 3 * (r % 8));
        row[shown..].fill(f32::NEG_INFINITY);
    }
    values
}

#[test]
fn masks_alibi_and_sinks_match_the_oracle() {
    let shapes = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([7, 3, 2, 2], [7, 3, 2, 2]),
        ([33, 5, 6, 2], [33, 8, 1, 1]),
        ([1024, 2, 3, 1], [1024, 2, 3, 1]),
        ([2500, 3, 4, 1], [2500, 3, 2, 1]),
    ];
    for (k, (ne, mne)) in shapes.into_iter().enumerate() {
        for (mask_type, max_bias, with_sinks) in [
            (None, 0.0, false),
            (None, 0.0, true),
            (Some(DType::F32), 0.0, false),
            (Some(DType::F16), 0.0, true),
            (Some(DType::F16), 8.0, false),
            (Some(DType::F32), 4.0, true),
        ] {
            let op = SoftMax { scale: 0.7, max_bias };
            let mut case = Case::new();
            let x = case.leaf(DType::F32, ne, &normal(k as u64, ne.iter().product()));
            let mask = mask_type.map(|t| case.leaf(t, mne, &mask_values(9, mne)));
            let sinks = with_sinks.then(|| case.leaf(DType::F32, [ne[2], 1, 1, 1], &normal(10, ne[2])));
            let dst = case.b.node(op, &[Some(x), mask, sinks]).unwrap();
            let case = case.build();
            let (mask, sinks) = (mask.map(|m| case.values(m)), sinks.map(|s| case.values(s)));
            let mask = mask.as_deref().map(|m| (m, mne));
            let want = oracle(op, (&case.values(x), ne), mask, sinks.as_deref());
            for on in devices() {
                let what = format!("{ne:?} mask {mask_type:?} bias {max_bias} sinks {with_sinks} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-9, &what);
            }
        }
    }
}

/// The destination on x, and on an f32 mask of the same shape.
#[test]
fn in_place_results_match_the_oracle() {
    let ne = [1100, 3, 2, 1];
    let op = SoftMax { scale: 1.5, max_bias: 2.0 };
    for onto in [0, 1] {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(1, 6600));
        let mask = case.leaf(DType::F32, ne, &mask_values(2, ne));
        let desc = TensorDesc::contiguous(DType::F32, ne).unwrap();
        let dst = case.b.view([x, mask][onto], desc, 0).unwrap();
        case.b.node_into(op, &[Some(x), Some(mask)], dst).unwrap();
        let case = case.build();
        let want = oracle(op, (&case.values(x), ne), Some((&case.values(mask), ne)), None);
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-9, &format!("onto {onto} {}", on.name));
        }
    }
}

/// A fully masked row is NaN, unless a sink takes the probability mass.
#[test]
fn fully_masked_rows_are_nan_without_a_sink() {
    for with_sink in [false, true] {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, [5, 2, 1, 1], &normal(1, 10));
        let hidden: Vec<f32> = (0..10).map(|i| if i < 5 { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = case.leaf(DType::F16, [5, 2, 1, 1], &hidden);
        let sink = with_sink.then(|| case.leaf(DType::F32, [1, 1, 1, 1], &[0.25]));
        let op = SoftMax { scale: 1.0, max_bias: 0.0 };
        let dst = case.b.node(op, &[Some(x), Some(mask), sink]).unwrap();
        let case = case.build();
        for on in devices() {
            let got = case.run(on).values(dst);
            assert!(got[..5].iter().all(|y| if with_sink { *y == 0.0 } else { y.is_nan() }), "{got:?}");
            assert!(got[5..].iter().all(|y| *y > 0.0 && *y < 1.0), "{got:?}");
        }
    }
}

/// Sinks that are not adjacent, such as a column of a matrix.
#[test]
fn strided_sinks_match_the_oracle() {
    for n in [7, 1100, 9000] {
        let (op, ne) = (SoftMax { scale: 0.7, max_bias: 0.0 }, [n, 2, 6, 1]);
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(1, 12 * n));
        let desc = TensorDesc::strided(DType::F32, [6, 1, 1, 1], [8, 64, 64, 64]).unwrap();
        let sinks = case.leaf_with_desc(desc, &normal(2, 6));
        let dst = case.b.node(op, &[Some(x), None, Some(sinks)]).unwrap();
        let case = case.build();
        let want = oracle(op, (&case.values(x), ne), None, Some(&case.values(sinks)));
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-9, &format!("{n} {}", on.name));
        }
    }
}

#[test]
fn parameters_round_trip() {
    let op = SoftMax { scale: 0.125, max_bias: 8.0 };
    assert_eq!(op.encode(), OpParams::default().with_float(0, 0.125).with_float(1, 8.0));
    assert_eq!(Op::decode(OpCode::SoftMax, &op.encode()), Ok(Some(op.into())));
}

#[test]
fn mismatched_shapes_are_rejected() {
    use DType::{BF16, F16, F32};
    let contiguous = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let plain = contiguous(F32, [8, 3, 4, 2]);
    let padded = TensorDesc::strided(F32, [8, 3, 4, 2], [4, 36, 108, 432]).unwrap();
    let cases: [(TensorDesc, f32, Option<TensorDesc>, Option<TensorDesc>); 10] = [
        (padded, 0.0, None, None),
        (plain, 1.0, None, None),
        (plain, 0.0, Some(contiguous(BF16, [8, 3, 1, 1])), None),
        (plain, 0.0, Some(contiguous(F16, [7, 3, 1, 1])), None),
        (plain, 0.0, Some(contiguous(F16, [8, 2, 1, 1])), None),
        (plain, 0.0, Some(contiguous(F16, [8, 3, 3, 1])), None),
        (plain, 0.0, Some(contiguous(F16, [8, 3, 1, 3])), None),
        (plain, 0.0, Some(padded), None),
        (plain, 0.0, None, Some(contiguous(F32, [3, 1, 1, 1]))),
        (plain, 0.0, None, Some(contiguous(F16, [4, 1, 1, 1]))),
    ];
    for (k, (x, max_bias, mask, sinks)) in cases.into_iter().enumerate() {
        let mut case = Case::new();
        let x = case.b.leaf_with_desc(x).unwrap();
        let mask = mask.map(|m| case.b.leaf_with_desc(m).unwrap());
        let sinks = sinks.map(|s| case.b.leaf_with_desc(s).unwrap());
        let error = case.b.node(SoftMax { scale: 1.0, max_bias }, &[Some(x), mask, sinks]).err();
        assert!(matches!(error, Some(BuildError::Node(_))), "case {k}: {error:?}");
    }
}
