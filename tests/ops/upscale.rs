//! UPSCALE: results of every device against the formulas of each mode, and the shape rules.

use crate::devices::devices;
use crate::layouts::{LAYOUTS, layout};
use fanout::ops::upscale::{ScaleMode, Upscale};
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::DType::{F16, F32};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

fn modes() -> Vec<Upscale> {
    let mode = |mode, align_corners, antialias| Upscale { mode, align_corners, antialias };
    let [nearest, bilinear, bicubic] = [ScaleMode::Nearest, ScaleMode::Bilinear, ScaleMode::Bicubic];
    vec![
        mode(nearest, false, false),
        mode(nearest, true, false),
        mode(bilinear, false, false),
        mode(bilinear, true, false),
        mode(bilinear, false, true),
        mode(bilinear, true, true),
        mode(bicubic, false, false),
        mode(bicubic, true, false),
    ]
}

/// The elements along a dimension that value `i` of `out` is interpolated from, with their weights. Coordinates are f32, because
/// the nearest element depends on their rounding.
fn weights(op: Upscale, n: usize, out: usize, i: usize) -> Vec<(usize, f64)> {
    let corners = op.align_corners && n > 1 && out > 1;
    let factor = if corners { (out - 1) as f32 / (n - 1) as f32 } else { out as f32 / n as f32 };
    let offset = if op.align_corners { 0.0 } else { 0.5 };
    let clamp = |x: f64| x.clamp(0.0, (n - 1) as f64) as usize;
    let x = (i as f32 + offset) / factor;
    if op.antialias {
        let support = f64::from((1.0 / factor).max(1.0));
        let (centre, offset) = (f64::from(x), f64::from(offset));
        let low = (centre - support + offset).max(0.0) as usize;
        let high = ((centre + support + offset) as usize).min(n);
        let weight = |s: usize| (1.0 - ((s as f64 - centre + offset) / support).abs()).max(0.0);
        let total: f64 = (low..high).map(weight).sum();
        return (low..high).map(|s| (s, weight(s) / total)).collect();
    }
    let x = f64::from(x - offset);
    match op.mode {
        ScaleMode::Nearest => vec![(((i as f32 / factor) as usize).min(n - 1), 1.0)],
        ScaleMode::Bilinear => {
            let low = clamp(x.floor());
            let part = (x - low as f64).clamp(0.0, 1.0);
            vec![(low, 1.0 - part), (clamp(x.floor() + 1.0), part)]
        }
        ScaleMode::Bicubic => {
            let cubic = |d: f64| {
                let (a, d) = (-0.75, d.abs());
                if d <= 1.0 {
                    (a + 2.0) * d.powi(3) - (a + 3.0) * d.powi(2) + 1.0
                } else {
                    a * d.powi(3) - 5.0 * a * d.powi(2) + 8.0 * a * d - 4.0 * a
                }
            };
            (-1..=2).map(|k| (clamp(x.floor() + f64::from(k)), cubic(x.floor() + f64::from(k) - x))).collect()
        }
    }
}

#[test]
fn all_modes_match_the_formulas() {
    for (number, (from, to)) in [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([1, 1, 1, 1], [5, 3, 1, 1]),
        ([2, 3, 2, 1], [4, 6, 2, 1]),
        ([5, 4, 2, 3], [13, 7, 3, 3]),
        ([16, 9, 1, 1], [7, 4, 1, 1]),
        ([4, 4, 4, 2], [4, 1, 2, 6]),
        ([24, 24, 2, 1], [600, 3, 2, 1]),
        ([6000, 2, 1, 1], [3, 3, 1, 1]),
        ([3, 2, 1, 1], [1, 5, 3, 2]),
    ]
    .into_iter()
    .enumerate()
    {
        for op in modes() {
            let mut case = Case::new();
            let values = normal(1, from.iter().product());
            let src = case.leaf_with_desc(layout(F32, from, number % LAYOUTS), &values);
            let dst = case.b.leaf_with_desc(layout(F32, to, (number + 1) % LAYOUTS)).unwrap();
            case.b.node_into(op, &[Some(src)], dst).unwrap();
            let case = case.build();
            let nearest = Upscale { mode: ScaleMode::Nearest, align_corners: false, antialias: false };
            let axis = |d: usize| {
                let op = if d < 2 { op } else { nearest };
                (0..to[d]).map(|i| weights(op, from[d], to[d], i)).collect::<Vec<_>>()
            };
            let axes = [0, 1, 2, 3].map(axis);
            let want: Vec<f64> = (0..to.iter().product())
                .map(|k| {
                    let i = index(to, k);
                    let (z, n) = (axes[2][i[2]][0].0, axes[3][i[3]][0].0);
                    let row = |y: usize| -> f64 {
                        axes[0][i[0]].iter().map(|&(x, w)| w * f64::from(values[at(from, [x, y, z, n])])).sum()
                    };
                    axes[1][i[1]].iter().map(|&(y, w)| w * row(y)).sum()
                })
                .collect();
            for on in devices() {
                let what = format!("{from:?} {to:?} {op:?} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, 1e-4, 1e-4, &what);
            }
        }
    }
}

#[test]
fn parameters_survive_the_wire() {
    for op in modes() {
        let op = Op::from(op);
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    for word in [3, 0x200, 0x202, 0x400, -1, i32::MIN, 0xff] {
        assert!(Op::decode(OpCode::Upscale, &OpParams::default().with_int(0, word)).is_err(), "{word:#x}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let built = |from, to| {
        let mut case = Case::new();
        let src = case.b.leaf(from, [4, 3, 2, 1]).unwrap();
        let out = OutputSpec { dtype: to, ne: [8, 6, 2, 1] };
        case.b.node_with_output(modes()[0], &[Some(src)], out).is_ok()
    };
    assert!(built(F32, F32));
    assert!(!built(F16, F32), "another type of the source");
    assert!(!built(F32, F16), "another type of the destination");
    let mut case = Case::new();
    let src = case.b.leaf(F32, [4, 3, 2, 1]).unwrap();
    assert!(case.b.node(modes()[0], &[Some(src)]).is_err(), "without a shape");
}
