//! ROPE and ROPE_BACK: results of every device against the formula, parameters and shape rules.

use crate::devices::devices;
use fanout::graph::BuildError;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::{Op, OpCode, OpFamily, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{at, index, normal, uniform};
use fanout_testing::op_case::Case;

/// The exponent of the running position of pair `j` and its axis, by the rules of each mode; positions are `[t, h, w, e]`.
fn axis_and_exponent(mode: RopeMode, j: usize) -> (usize, usize) {
    let Some(sections) = mode.sections() else { return (0, j) };
    let s = sections.map(|n| n as usize);
    let sector = j % s.iter().sum::<usize>();
    let mut starts = [0, s[0], s[0] + s[1], s[0] + s[1] + s[2]];
    match mode {
        RopeMode::Imrope(_) => {
            let axis = sector % 3;
            (if sector < 3 * s[axis] { axis } else { 3 }, j)
        }
        _ => {
            starts.reverse();
            let axis = 3 - starts.iter().position(|&start| sector >= start).unwrap();
            (axis, if matches!(mode, RopeMode::Vision(_)) { sector - starts[3 - axis] } else { j })
        }
    }
}

/// Angles are defined as running f32 products, so the oracle computes them in f32; the rest is f64.
fn oracle(op: &Rope, x: &[f64], ne: [usize; 4], positions: &[i64], factors: Option<&[f64]>) -> Vec<f64> {
    let mut out = x.to_vec();
    let (n_dims, offs, pairs) = (op.n_dims as usize, op.n_offs as usize, op.pairs());
    let step = op.freq_base.powf(-2.0 / n_dims as f32);
    let corr = |turns: f32| {
        let n = f64::from(op.n_ctx_orig) / (f64::from(turns) * 2.0 * std::f64::consts::PI);
        n_dims as f64 * n.ln() / (2.0 * f64::from(op.freq_base).ln())
    };
    let low = corr(op.beta_fast).floor().max(0.0);
    let high = corr(op.beta_slow).ceil().min(n_dims as f64 - 1.0);
    for r in 0..x.len() / ne[0] {
        let [_, i1, i2, i3] = index(ne, r * ne[0]);
        for j in 0..pairs {
            let (axis, exponent) = axis_and_exponent(op.mode, j);
            let base = positions[axis * ne[2] + i2] as f32;
            let theta = f64::from((0..exponent).fold(base, |theta, _| theta * step));
            let te = theta / factors.map_or(1.0, |f| f[j]);
            let ti = f64::from(op.freq_scale) * te;
            let ti = if op.backward { -ti } else { ti };
            let te = if op.backward { -te } else { te };
            let (theta, m) = if op.ext_factor == 0.0 {
                (ti, 1.0)
            } else {
                let ramp = 1.0 - ((j as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                let mix = ramp * f64::from(op.ext_factor);
                (ti * (1.0 - mix) + te * mix, 1.0 + 0.1 * (1.0 / f64::from(op.freq_scale)).ln())
            };
            let m = m * f64::from(op.attn_factor);
            let (c0, c1) = match op.mode {
                RopeMode::Normal => (offs + 2 * j, offs + 2 * j + 1),
                _ => (offs + j, offs + j + pairs),
            };
            let (k0, k1) = (at(ne, [c0, i1, i2, i3]), at(ne, [c1, i1, i2, i3]));
            (out[k0], out[k1]) =
                ((x[k0] * theta.cos() - x[k1] * theta.sin()) * m, (x[k0] * theta.sin() + x[k1] * theta.cos()) * m);
        }
    }
    out
}

fn positions(op: &Rope, tokens: usize) -> Vec<i64> {
    let count = if op.mode.sections().is_some() { 4 * tokens } else { tokens };
    (0..count as i64).map(|i| (i * 37 + 5) % 61).collect()
}

/// Runs `op` on all devices and compares with the oracle. With `onto`, the destination is x (in place).
#[track_caller]
fn check(op: Rope, dtype: DType, x: TensorDesc, onto: bool, with_factors: bool) {
    let ne = x.ne();
    let mut case = Case::new();
    let input = case.leaf_with_desc(x, &normal(3, x.elements()));
    let at = positions(&op, ne[2]);
    let p = case.indices(DType::I32, [at.len(), 1, 1, 1], &at);
    let n = op.pairs() + 1;
    let factors = with_factors.then(|| case.leaf(DType::F32, [n, 1, 1, 1], &uniform(4, n, 0.5, 4.0)));
    let srcs = [Some(input), Some(p), factors];
    let dst = if onto {
        let view = case.b.view(input, x, 0).unwrap();
        case.b.node_into(op, &srcs, view).unwrap()
    } else {
        case.b.node(op, &srcs).unwrap()
    };
    let case = case.build();
    let factors = factors.map(|f| case.values(f));
    let want = oracle(&op, &case.values(input), ne, &at, factors.as_deref());
    for on in devices() {
        let what = format!("{op:?} {dtype} {ne:?} onto {onto} factors {with_factors} {}", on.name);
        // An f32 angle of some hundreds has a rounding error that shows in values near 0.
        assert_close(&case.run(on).values(dst), &want, rounding(dtype), 1e-4, &what);
    }
}

const MODES: [RopeMode; 6] = [
    RopeMode::Normal,
    RopeMode::Neox,
    RopeMode::Mrope([3, 2, 2, 1]),
    RopeMode::Mrope([0, 4, 0, 0]),
    RopeMode::Vision([5, 5, 0, 0]),
    RopeMode::Imrope([3, 3, 2, 1]),
];

#[test]
fn every_mode_matches_the_oracle() {
    for mode in MODES {
        for (dtype, ne) in [
            (DType::F32, [20, 1, 1, 1]),
            (DType::F16, [20, 3, 5, 2]),
            (DType::F32, [20, 32, 7, 1]),
            (DType::F32, [20, 130, 9, 2]),
        ] {
            let vision = matches!(mode, RopeMode::Vision(_));
            for (n_dims, n_offs) in if vision { [(10, 0), (10, 0)] } else { [(20, 0), (12, 6)] } {
                let yarn = Rope {
                    n_dims,
                    n_offs,
                    n_ctx_orig: 128,
                    freq_base: 500.0,
                    freq_scale: 0.25,
                    ext_factor: 0.8,
                    attn_factor: 1.2,
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    ..Rope::new(mode, n_dims)
                };
                let plain = Rope { n_offs, ..Rope::new(mode, n_dims) };
                let x = TensorDesc::contiguous(dtype, ne).unwrap();
                let onto = false;
                check(plain, dtype, x, onto, false);
                check(yarn, dtype, x, onto, true);
                check(Rope { backward: true, ..plain }, dtype, x, true, false);
                check(Rope { backward: true, ..yarn }, dtype, x, onto, true);
            }
        }
    }
}

/// Rows longer than a piece, padded and permuted rows, and the destination on x.
#[test]
fn long_strided_and_in_place_rows_match_the_oracle() {
    for mode in MODES {
        let ne = [2600, 2, 2, 1];
        let n_dims = if matches!(mode, RopeMode::Vision(_)) { 1300 } else { 2400 };
        check(Rope::new(mode, n_dims), DType::F32, TensorDesc::contiguous(DType::F32, ne).unwrap(), true, true);
        let n_dims = if matches!(mode, RopeMode::Vision(_)) { 12 } else { 16 };
        for (dtype, nb) in [(DType::F32, [4, 120, 480, 1440]), (DType::F16, [2, 160, 48, 640])] {
            let x = TensorDesc::strided(dtype, [24, 4, 3, 2], nb).unwrap();
            for onto in [false, true] {
                check(Rope::new(mode, n_dims), dtype, x, onto, false);
            }
        }
    }
}

/// The destination on the factors, large enough for several workers.
#[test]
fn destination_may_coincide_with_the_factors() {
    let (n, op) = (8192, Rope::new(RopeMode::Neox, 8192));
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [n, 1, 1, 1], &normal(5, n));
    let p = case.indices(DType::I32, [1, 1, 1, 1], &[7]);
    let factors = case.leaf(DType::F32, [n, 1, 1, 1], &uniform(6, n, 0.5, 4.0));
    let dst = case.b.view(factors, TensorDesc::contiguous(DType::F32, [n, 1, 1, 1]).unwrap(), 0).unwrap();
    case.b.node_into(op, &[Some(x), Some(p), Some(factors)], dst).unwrap();
    let case = case.build();
    let want = oracle(&op, &case.values(x), [n, 1, 1, 1], &[7], Some(&case.values(factors)));
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 2e-6, 1e-4, on.name);
    }
}

/// Every I32 is a valid position.
#[test]
fn extreme_positions_keep_the_lengths_of_pairs() {
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [8, 1, 3, 1], &normal(1, 24));
    let p = case.indices(DType::I32, [3, 1, 1, 1], &[i64::from(i32::MIN), -1, i64::from(i32::MAX)]);
    let dst = case.b.node(Rope::new(RopeMode::Neox, 8), &[Some(x), Some(p)]).unwrap();
    let case = case.build();
    let x = case.values(x);
    for on in devices() {
        let y = case.run(on).values(dst);
        for (x, y) in x.chunks(8).zip(y.chunks(8)) {
            for j in 0..4 {
                let (a, b) = (x[j].hypot(x[j + 4]), y[j].hypot(y[j + 4]));
                assert!((a - b).abs() < 1e-5, "a rotation keeps lengths: {a} {b}");
            }
        }
    }
}

#[test]
fn parameters_round_trip() {
    for (mode, word) in MODES.into_iter().zip([0, 2, 8, 8, 24, 40]) {
        let op = Rope {
            n_offs: if word == 24 { 0 } else { 4 },
            n_ctx_orig: 4096,
            freq_scale: 0.5,
            ext_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            ..Rope::new(mode, 64)
        };
        let words = op.encode();
        assert_eq!((words.int(1), words.int(2), words.int(4), words.float(9)), (64, word, 4096, 32.0));
        assert_eq!(Op::decode(OpCode::Rope, &words), Ok(Some(op.into())));
        let back = Rope { backward: true, ..op };
        assert_eq!((back.code(), back.encode()), (OpCode::RopeBack, words));
        assert_eq!(Op::decode(OpCode::RopeBack, &words), Ok(Some(back.into())));
    }
}

#[test]
fn invalid_parameters_are_rejected() {
    let good = Rope::new(RopeMode::Mrope([1, 1, 1, 1]), 8).encode();
    assert!(Op::decode(OpCode::Rope, &good).is_ok());
    let bad: [(&str, OpParams, usize); 10] = [
        ("n_dims 0", good.with_int(1, 0), 1),
        ("odd n_dims", good.with_int(1, 7), 1),
        ("negative n_dims", good.with_int(1, -2), 1),
        ("mode 1", good.with_int(2, 1), 2),
        ("mode 16", good.with_int(2, 16), 2),
        ("a negative section", good.with_int(14, -1), 14),
        ("no sections", good.with_int(11, 0).with_int(12, 0).with_int(13, 0), 11),
        ("odd n_offs", good.with_int(15, 3), 15),
        ("negative n_offs", good.with_int(15, -2), 15),
        ("vision with n_offs", good.with_int(2, 24).with_int(15, 2), 15),
    ];
    for (what, words, word) in bad {
        let error = Op::decode(OpCode::Rope, &words).err();
        assert_eq!(error.map(|e| e.word), Some(word), "{what}");
    }
}

#[test]
fn mismatched_shapes_are_rejected() {
    use DType::{BF16, F32, I32, I64};
    use RopeMode::{Mrope, Neox, Normal, Vision};
    let x = (F32, [16, 2, 3, 1]);
    let at = (I32, [3, 1, 1, 1]);
    let four = (I32, [12, 1, 1, 1]);
    let plain = |mode, n| Rope::new(mode, n);
    type Leaf = (DType, [usize; 4]);
    let cases: [(&str, Rope, Leaf, Leaf, Option<Leaf>); 15] = [
        ("more channels than there are", plain(Normal, 18), x, at, None),
        ("an offset beyond the row", Rope { n_offs: 2, ..plain(Normal, 16) }, x, at, None),
        ("offset and channels that overflow", Rope { n_offs: u32::MAX - 1, ..plain(Normal, 16) }, x, at, None),
        ("an odd offset", Rope { n_offs: 1, ..plain(Normal, 8) }, x, at, None),
        ("an odd number of channels", plain(Neox, 7), x, at, None),
        ("no channels", plain(Neox, 0), x, at, None),
        ("too few positions", plain(Neox, 16), x, (I32, [2, 1, 1, 1]), None),
        ("one position of four", plain(Mrope([2, 2, 2, 2]), 16), x, at, None),
        ("no sections", plain(Mrope([0, 0, 0, 2]), 16), x, four, None),
        ("long sections", plain(Mrope([u32::MAX; 4]), 16), x, four, None),
        ("half a row of vision", plain(Vision([2, 2, 0, 0]), 4), x, four, None),
        ("wide positions", plain(Neox, 16), x, (I64, [3, 1, 1, 1]), None),
        ("too few factors", plain(Neox, 16), x, at, Some((F32, [7, 1, 1, 1]))),
        ("a matrix of factors", plain(Neox, 16), x, at, Some((F32, [8, 2, 1, 1]))),
        ("another type", plain(Neox, 16), (BF16, [16, 2, 3, 1]), at, None),
    ];
    for (what, op, x, at, factors) in cases {
        let mut case = Case::new();
        let mut leaf = |(dtype, ne)| case.b.leaf(dtype, ne).unwrap();
        let srcs = [Some(leaf(x)), Some(leaf(at)), factors.map(&mut leaf)];
        let error = case.b.node(op, &srcs).err();
        assert!(matches!(error, Some(BuildError::Node(_))), "{what}: {error:?}");
    }
}
