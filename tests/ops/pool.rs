//! POOL_1D, POOL_2D and POOL_2D_BACK: results of every device against loops over all windows, and the shape rules.

use crate::devices::devices;
use crate::layouts::{LAYOUTS, layout};
use fanout::ops::pool::{Pool, PoolAxis, PoolKind};
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;
use std::ops::Range;

const KINDS: [PoolKind; 2] = [PoolKind::Max, PoolKind::Average];

fn axis(kernel: i32, stride: i32, padding: i32) -> PoolAxis {
    PoolAxis { kernel, stride, padding }
}

/// The elements of an image of `extent` in the window of an output.
fn window(axis: PoolAxis, output: usize, extent: usize) -> Range<usize> {
    let start = output as i64 * i64::from(axis.stride) - i64::from(axis.padding);
    let clamp = |x: i64| x.clamp(0, extent as i64) as usize;
    clamp(start)..clamp(start + i64::from(axis.kernel))
}

fn cases() -> Vec<([usize; 4], [PoolAxis; 2])> {
    vec![
        ([1, 1, 1, 1], [axis(1, 1, 0); 2]),
        ([8, 6, 3, 2], [axis(2, 2, 0); 2]),
        ([9, 7, 2, 1], [axis(3, 2, 1), axis(2, 1, 1)]),
        ([5, 4, 1, 3], [axis(9, 1, 4), axis(3, 5, 2)]),
        ([40, 3, 2, 1], [axis(1, 7, 0), axis(2, 3, 0)]),
        ([6, 6, 1, 1], [axis(2, 2, -1), axis(2, 1, -2)]),
        ([4, 4, 1, 1], [axis(2, 1, 3), axis(3, 2, 5)]),
        ([3000, 2, 1, 1], [axis(1500, 100, 700), axis(1, 1, 0)]),
        ([2600, 2, 1, 1], [axis(3, 1, 1), axis(2, 1, 0)]),
    ]
}

fn rows_of(kind: PoolKind, values: &[f64], divisor: usize) -> f64 {
    match kind {
        PoolKind::Max => values.iter().fold(f64::from(-f32::MAX), |max, &x| max.max(x)),
        PoolKind::Average if divisor == 0 => 0.0,
        PoolKind::Average => values.iter().sum::<f64>() / divisor as f64,
    }
}

#[test]
fn windows_are_pooled() {
    for (number, (ne, axes)) in cases().into_iter().enumerate() {
        for dtype in [F32, F16] {
            let mut case = Case::new();
            let desc = layout(dtype, ne, number % LAYOUTS);
            let src = case.leaf_with_desc(desc, &normal(1, ne.iter().product()));
            let mut nodes = Vec::new();
            for kind in KINDS {
                for two_d in [false, true] {
                    let op = if two_d { Pool::Pool2d { kind, axes } } else { Pool::Pool1d { kind, axis: axes[0] } };
                    let code = Op::from(op).code();
                    let out = Op::from(op).infer(&fanout::ops::Sources::new(code, &[Some(&desc)])).unwrap();
                    let dst = case.b.leaf_with_desc(layout(F32, out.ne, (number + 1) % LAYOUTS)).unwrap();
                    nodes.push((op, case.b.node_into(op, &[Some(src)], dst).unwrap(), out.ne, kind, two_d));
                }
            }
            let case = case.build();
            let values = case.values(src);
            for on in devices() {
                let run = case.run(on);
                for (op, dst, out, kind, two_d) in &nodes {
                    let want: Vec<f64> = (0..out.iter().product())
                        .map(|k| {
                            let i = index(*out, k);
                            let x = window(axes[0], i[0], ne[0]);
                            let y = if *two_d { window(axes[1], i[1], ne[1]) } else { i[1]..i[1] + 1 };
                            let inside: Vec<f64> = y
                                .flat_map(|y| x.clone().map(move |x| [x, y]))
                                .map(|[x, y]| values[at(ne, [x, y, i[2], i[3]])])
                                .collect();
                            let whole = (axes[0].kernel * axes[1].kernel) as usize;
                            rows_of(*kind, &inside, if *two_d { whole } else { inside.len() })
                        })
                        .collect();
                    assert_close(&run.values(*dst), &want, 1e-5, 1e-5, &format!("{ne:?} {op:?} {dtype} {}", on.name));
                }
            }
        }
    }
}

#[test]
fn gradients_go_to_maxima_or_to_all_elements() {
    for (number, (ne, axes)) in cases().into_iter().enumerate() {
        for dtype in [F32, F16] {
            for kind in KINDS {
                // Few different values: many ties, of which the first maximum counts.
                let values: Vec<f32> = normal(2, ne.iter().product()).iter().map(|v| (v * 2.0).round()).collect();
                let mut case = Case::new();
                let forward = case.leaf_with_desc(layout(dtype, ne, number % LAYOUTS), &values);
                let out = [axes[0].output(ne[0]).unwrap(), axes[1].output(ne[1]).unwrap(), ne[2], ne[3]];
                let desc = layout(F32, out, (number + 1) % LAYOUTS);
                let gradient = case.leaf_with_desc(desc, &normal(3, out.iter().product()));
                let dst = case.b.leaf_with_desc(layout(F32, ne, (number + 2) % LAYOUTS)).unwrap();
                case.b.node_into(Pool::Pool2dBack { kind, axes }, &[Some(gradient), Some(forward)], dst).unwrap();
                let case = case.build();
                let mut want = vec![0.0; values.len()];
                for (k, gradient) in case.values(gradient).into_iter().enumerate() {
                    let i = index(out, k);
                    let (x, y) = (window(axes[0], i[0], ne[0]), window(axes[1], i[1], ne[1]));
                    let all = y.flat_map(|y| x.clone().map(move |x| [x, y])).map(|[x, y]| at(ne, [x, y, i[2], i[3]]));
                    match kind {
                        PoolKind::Max => {
                            let first = all.reduce(|best, k| if values[k] > values[best] { k } else { best });
                            first.into_iter().for_each(|k| want[k] += gradient);
                        }
                        PoolKind::Average => {
                            all.for_each(|k| want[k] += gradient / f64::from(axes[0].kernel * axes[1].kernel));
                        }
                    }
                }
                for on in devices() {
                    let what = format!("{ne:?} {axes:?} {kind:?} {dtype} {}", on.name);
                    assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-5, &what);
                }
            }
        }
    }
}

/// A NaN is replaced by the element after it; a window of infinities below every maximum has the smallest finite value.
#[test]
fn special_values_follow_ggml() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let mut case = Case::new();
    let src = case.leaf(F32, [8, 1, 1, 1], &[nan, 1.0, 2.0, nan, -inf, -inf, inf, 3.0]);
    let op = Pool::Pool1d { kind: PoolKind::Max, axis: axis(2, 2, 0) };
    let dst = case.b.node(op, &[Some(src)]).unwrap();
    let case = case.build();
    for on in devices() {
        let got = case.run(on).values(dst);
        assert!(got[1].is_nan(), "{}", on.name);
        assert_eq!([got[0], got[2], got[3]], [1.0, f64::from(-f32::MAX), f64::INFINITY], "{}", on.name);
    }
}

#[test]
fn parameters_survive_the_wire() {
    let axes = [axis(2, 3, 4), axis(5, 6, -7)];
    for kind in KINDS {
        for op in [Pool::Pool1d { kind, axis: axes[0] }, Pool::Pool2d { kind, axes }, Pool::Pool2dBack { kind, axes }] {
            let op = Op::from(op);
            assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
        }
    }
    for (code, words) in [
        (OpCode::Pool1d, [2, 1, 1, 0, 0, 0, 0]),
        (OpCode::Pool1d, [-1, 1, 1, 0, 0, 0, 0]),
        (OpCode::Pool1d, [0, 0, 1, 0, 0, 0, 0]),
        (OpCode::Pool1d, [0, 1, 0, 0, 0, 0, 0]),
        (OpCode::Pool2d, [0, 1, 0, 1, 1, 0, 0]),
        (OpCode::Pool2d, [0, 1, 1, 1, -1, 0, 0]),
        (OpCode::Pool2dBack, [1, 1, 1, 0, 1, 0, 0]),
    ] {
        let params = words.iter().enumerate().fold(OpParams::default(), |p, (k, &word)| p.with_int(k, word));
        assert!(Op::decode(code, &params).is_err(), "{code} {words:?}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let built = |op: Pool, srcs: &[(DType, [usize; 4])], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let srcs: Vec<_> = srcs.iter().map(|&(dtype, ne)| case.b.leaf(dtype, ne).ok()).collect();
        case.b.node_with_output(op, &srcs, OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let kind = PoolKind::Average;
    let (line, plane) = (Pool::Pool1d { kind, axis: axis(3, 2, 0) }, Pool::Pool2d { kind, axes: [axis(3, 2, 0); 2] });
    let src = (F32, [10, 9, 2, 1]);
    assert!(built(line, &[src], (F32, [4, 9, 2, 1])));
    assert!(!built(line, &[src], (F32, [5, 9, 2, 1])), "another length");
    assert!(!built(line, &[src], (F16, [4, 9, 2, 1])), "another type");
    assert!(!built(line, &[(F32, [2, 9, 2, 1])], (F32, [1, 9, 2, 1])), "a window that is too large");
    assert!(built(plane, &[src], (F32, [4, 4, 2, 1])));
    assert!(!built(plane, &[src], (F32, [4, 4, 1, 1])), "another number of planes");
    // A padding of 0.5 is sent as 0.
    assert!(built(plane, &[src], (F32, [5, 4, 2, 1])));
    assert!(!built(plane, &[src], (F32, [6, 4, 2, 1])));
    let back = Pool::Pool2dBack { kind, axes: [axis(3, 2, 0); 2] };
    let gradient = (F32, [4, 4, 2, 1]);
    assert!(built(back, &[gradient, src], src));
    assert!(!built(back, &[(F32, [3, 4, 2, 1]), src], src), "gradients are missing");
    assert!(!built(back, &[gradient, src], (F32, [10, 9, 2, 2])), "another shape");
    assert!(!built(back, &[gradient, (F16, src.1)], (F16, src.1)), "gradients are F32");
    let extreme = Pool::Pool1d { kind, axis: axis(i32::MAX, i32::MAX, i32::MAX) };
    assert!(built(extreme, &[src], (F32, [2, 9, 2, 1])));
    let cropped = Pool::Pool1d { kind, axis: axis(1, 1, i32::MIN) };
    assert!(!built(cropped, &[src], (F32, [1, 9, 2, 1])));
    let mut case = Case::new();
    let src = case.b.leaf(BF16, src.1).unwrap();
    case.b.node(line, &[Some(src)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert!(case.try_run(on).is_err(), "{}", on.name);
    }
}
