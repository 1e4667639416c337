//! SSM_CONV and SSM_SCAN: results of every device against the formulas in f64, parameters, ids and shape rules.

use crate::devices::devices;
use fanout::ops::ssm::Ssm;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal, uniform};
use fanout_testing::op_case::{BuiltCase, Case};

/// What memory contains before a run.
const UNWRITTEN: f64 = f32::from_bits(0xa5a5_a5a5) as f64;

/// Shapes of SSM_CONV: d_conv, channels, tokens, sequences.
const CONVS: [[usize; 4]; 10] = [
    [4, 3, 1, 1],
    [4, 130, 1, 2],
    [4, 2100, 1, 1],
    [3, 70, 9, 3],
    [1, 5, 7, 2],
    [4, 67, 130, 2],
    [9, 65, 64, 1],
    [100, 3, 2, 1],
    // A window without elements: the sums are 0.
    [0, 3, 2, 2],
    [0, 3, 1, 1],
];

#[test]
fn convolutions_match_the_oracle() {
    for [d_conv, channels, tokens, sequences] in CONVS {
        for gap in [0, 4, 20] {
            let window = d_conv + tokens - 1;
            let ne = [window, channels, sequences, 1];
            let row = 4 * window;
            let nb = [4, row, row * channels + gap, (row * channels + gap) * sequences];
            let mut case = Case::new();
            let desc = TensorDesc::strided(DType::F32, ne, nb).unwrap();
            let x = case.leaf_with_desc(desc, &normal(1, ne.iter().product()));
            let w = case.leaf(DType::F32, [d_conv, channels, 1, 1], &normal(2, d_conv * channels));
            let (dst_ne, dst_row) = ([channels, tokens, sequences, 1], 4 * channels + gap);
            let dst_nb = [4, dst_row, dst_row * tokens, dst_row * tokens * sequences];
            let dst = case.b.leaf_with_desc(TensorDesc::strided(DType::F32, dst_ne, dst_nb).unwrap()).unwrap();
            case.b.node_into(Ssm::Conv, &[Some(x), Some(w)], dst).unwrap();
            let case = case.build();
            let (x, w) = (case.values(x), case.values(w));
            let want: Vec<f64> = (0..dst_ne.iter().product())
                .map(|k| {
                    let [c, t, s, _] = index(dst_ne, k);
                    (0..d_conv).map(|j| x[at(ne, [t + j, c, s, 0])] * w[c * d_conv + j]).sum()
                })
                .collect();
            for on in devices() {
                let what = format!("{}: {d_conv} {dst_ne:?} {gap}", on.name);
                assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-4, &what);
            }
        }
    }
}

/// A case of SSM_SCAN.
#[derive(Clone, Copy, Debug)]
struct ScanShape {
    n: usize,
    hd: usize,
    heads: usize,
    groups: usize,
    tokens: usize,
    sequences: usize,
    slots: usize,
    /// Whether each element of the state has its own decay (Mamba-1).
    by_element: bool,
    snapshots: u32,
    /// Bytes between the tokens of x, b and c.
    gap: usize,
}

const SCAN: ScanShape = ScanShape {
    n: 16,
    hd: 4,
    heads: 6,
    groups: 2,
    tokens: 3,
    sequences: 2,
    slots: 3,
    by_element: false,
    snapshots: 1,
    gap: 0,
};

fn scan_shapes() -> Vec<ScanShape> {
    let mamba1 = ScanShape { hd: 1, groups: 1, by_element: true, ..SCAN };
    vec![
        SCAN,
        ScanShape { gap: 12, snapshots: 2, ..SCAN },
        ScanShape { n: 1, heads: 3, groups: 3, ..SCAN },
        ScanShape { n: 128, hd: 64, heads: 2, groups: 1, tokens: 1, ..SCAN },
        ScanShape { n: 128, hd: 33, heads: 4, tokens: 5, snapshots: 4, ..SCAN },
        ScanShape { n: 37, hd: 3, heads: 4, groups: 4, tokens: 2, snapshots: 5, ..SCAN },
        ScanShape { n: 8, hd: 2, heads: 9, groups: 3, tokens: 150, sequences: 1, snapshots: 3, ..SCAN },
        // Several phases.
        ScanShape { n: 64, hd: 100, heads: 1, groups: 1, tokens: 230, sequences: 1, slots: 1, snapshots: 120, ..SCAN },
        // No tokens: the states are copied.
        ScanShape { tokens: 0, snapshots: 2, ..SCAN },
        ScanShape { tokens: 0, n: 128, hd: 64, ..SCAN },
        ScanShape { tokens: 0, ..mamba1 },
        mamba1,
        ScanShape { heads: 500, tokens: 2, gap: 4, ..mamba1 },
        ScanShape { n: 5, hd: 3, heads: 8, groups: 4, tokens: 4, ..mamba1 },
    ]
}

fn build_scan(shape: ScanShape, ids: &[i64]) -> (BuiltCase, [fanout::graph::TensorId; 7]) {
    let ScanShape { n, hd, heads, groups, tokens, sequences, slots, by_element, snapshots, gap } = shape;
    let mut case = Case::new();
    let spread = |case: &mut Case, ne: [usize; 4], seed| {
        let nb2 = 4 * ne[0] * ne[1] + gap;
        let desc = TensorDesc::strided(DType::F32, ne, [4, 4 * ne[0], nb2, nb2 * ne[2] + gap]).unwrap();
        case.leaf_with_desc(desc, &normal(seed, ne.iter().product()))
    };
    let states = case.leaf(DType::F32, [n, hd, heads, slots], &normal(1, n * hd * heads * slots));
    let x = spread(&mut case, [hd, heads, tokens, sequences], 2);
    let mut steps = uniform(3, heads * tokens * sequences, -3.0, 1.0);
    if let Some(first) = steps.first_mut() {
        *first = 20.5;
    }
    let dt = case.leaf(DType::F32, [heads, tokens, sequences, 1], &steps);
    let of_head = if by_element { n } else { 1 };
    let a = case.leaf(DType::F32, [of_head, heads, 1, 1], &uniform(4, of_head * heads, -1.5, -0.05));
    let b = spread(&mut case, [n, groups, tokens, sequences], 5);
    let c = spread(&mut case, [n, groups, tokens, sequences], 6);
    let ids = case.indices(DType::I32, [sequences, 1, 1, 1], ids);
    let srcs = [states, x, dt, a, b, c, ids];
    let dst = case.b.node(Ssm::Scan { snapshots }, &srcs.map(Some)).unwrap();
    (case.build(), [states, x, dt, a, b, c, dst])
}

fn scan_oracle(shape: ScanShape, ids: &[i64], values: [&[f64]; 6]) -> Vec<f64> {
    let ScanShape { n, hd, heads, groups, tokens, sequences, snapshots, by_element, .. } = shape;
    let [states, x, dt, a, b, c] = values;
    let (outputs, block) = (hd * heads * tokens * sequences, n * hd * heads * sequences);
    let mut dst = vec![UNWRITTEN; outputs + snapshots as usize * block];
    for s in 0..sequences {
        for h in 0..heads {
            let group = h / (heads / groups);
            for i in 0..hd {
                let row = |k: usize, s: usize| ((s * heads + h) * hd + i) * n + k;
                let mut state: Vec<f64> = (0..n).map(|k| states[row(k, ids[s] as usize)]).collect();
                if tokens == 0 {
                    dst[row(0, s)..][..n].copy_from_slice(&state);
                }
                for t in 0..tokens {
                    let step = dt[(s * tokens + t) * heads + h];
                    let step = if step > 20.0 { step } else { step.exp().ln_1p() };
                    let input = x[at([hd, heads, tokens, sequences], [i, h, t, s])] * step;
                    let mut y = 0.0;
                    for (k, state) in state.iter_mut().enumerate() {
                        let of_group = at([n, groups, tokens, sequences], [k, group, t, s]);
                        let a = if by_element { a[h * n + k] } else { a[h] };
                        *state = *state * (step * a).exp() + b[of_group] * input;
                        y += *state * c[of_group];
                    }
                    dst[at([hd, heads, tokens, sequences], [i, h, t, s])] = y;
                    let behind = tokens - 1 - t;
                    if behind < snapshots as usize {
                        for (k, state) in state.iter().enumerate() {
                            dst[outputs + behind * block + row(k, s)] = *state;
                        }
                    }
                }
            }
        }
    }
    dst
}

#[test]
fn scans_match_the_oracle() {
    for shape in scan_shapes() {
        let ids: Vec<i64> = (0..shape.sequences as i64).map(|s| (2 * s + 2) % shape.slots as i64).collect();
        let (case, [states, x, dt, a, b, c, dst]) = build_scan(shape, &ids);
        let values = [states, x, dt, a, b, c].map(|id| case.values(id));
        let want = scan_oracle(shape, &ids, values.each_ref().map(|v| &**v));
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-4, 1e-4, &format!("{}: {shape:?}", on.name));
        }
    }
}

#[test]
fn slots_out_of_range_fail_the_run() {
    for (bad, tokens) in [(-1, 3), (3, 3), (i64::from(i32::MIN), 3), (i64::from(i32::MAX), 3), (3, 0)] {
        let (case, _) = build_scan(ScanShape { tokens, ..SCAN }, &[1, bad]);
        for on in devices() {
            let error = case.try_run(on).err();
            assert!(on.reported_bad_data(&error, OpCode::SsmScan), "{}: {bad}: {error:?}", on.name);
        }
    }
}

#[test]
fn parameters_are_decoded() {
    let decode = |code, k| Op::decode(code, &OpParams::default().with_int(0, k));
    assert_eq!(decode(OpCode::SsmConv, 7).unwrap(), Some(Ssm::Conv.into()));
    assert_eq!(decode(OpCode::SsmScan, 7).unwrap(), Some(Ssm::Scan { snapshots: 7 }.into()));
    assert_eq!(Op::from(Ssm::Scan { snapshots: 7 }).encode(), OpParams::default().with_int(0, 7));
    // The word of clients before 7.0.
    assert_eq!(decode(OpCode::SsmScan, 0).unwrap(), Some(Ssm::Scan { snapshots: 1 }.into()));
    for k in [-1, i32::MIN] {
        assert!(decode(OpCode::SsmScan, k).is_err(), "{k}");
    }
}

#[test]
fn invalid_convolutions_are_rejected() {
    let build = |x: TensorDesc, w: TensorDesc| {
        let mut case = Case::new();
        let srcs = [x, w].map(|desc| Some(case.b.leaf_with_desc(desc).unwrap()));
        case.b.node(Ssm::Conv, &srcs).is_ok()
    };
    let packed = |ne| TensorDesc::contiguous(DType::F32, ne).unwrap();
    let strided = |ne, nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let (x, w) = (packed([6, 5, 2, 1]), packed([4, 5, 1, 1]));
    assert!(build(x, w));
    assert!(!build(x, packed([8, 5, 1, 1])), "a window longer than the rows");
    assert!(!build(x, packed([4, 4, 1, 1])), "other channels");
    assert!(!build(packed([6, 5, 2, 2]), w), "four dimensions");
    assert!(!build(x, packed([4, 5, 2, 1])), "several kernels");
    assert!(!build(strided([6, 5, 2, 1], [4, 28, 140, 280]), w), "gaps between the rows of x");
    assert!(!build(strided([6, 5, 2, 1], [8, 48, 240, 480]), w), "x is not dense");
    assert!(!build(x, strided([4, 5, 1, 1], [4, 20, 100, 100])), "gaps between the rows of w");
}

#[test]
fn invalid_scans_are_rejected() {
    let valid = [[16, 4, 6, 3], [4, 6, 3, 2], [6, 3, 2, 1], [1, 6, 1, 1], [16, 2, 3, 2], [16, 2, 3, 2], [2, 1, 1, 1]];
    let build = |shapes: [[usize; 4]; 7], ids: DType, snapshots: u32| {
        let mut case = Case::new();
        let dtype = |i| if i == Ssm::IDS { ids } else { DType::F32 };
        let srcs: Vec<_> = shapes.iter().enumerate().map(|(i, &ne)| Some(case.b.leaf(dtype(i), ne).unwrap())).collect();
        case.b.node(Ssm::Scan { snapshots }, &srcs).is_ok()
    };
    assert!(build(valid, DType::I32, 1) && build(valid, DType::I32, 4));
    let mut mamba1 = valid;
    mamba1[Ssm::A] = [16, 6, 1, 1];
    assert!(build(mamba1, DType::I32, 1));
    assert!(!build(mamba1, DType::I32, 2), "snapshots of Mamba-1");
    assert!(!build(valid, DType::I64, 1), "ids are I32");
    for (source, shape, what) in [
        (Ssm::STATES, [16, 4, 5, 3], "heads of the states"),
        (Ssm::STATES, [15, 4, 6, 3], "elements of the states"),
        (Ssm::X, [3, 6, 3, 2], "channels of a head"),
        (Ssm::DT, [6, 3, 1, 1], "dt of one sequence"),
        (Ssm::DT, [6, 3, 2, 2], "dt with four dimensions"),
        (Ssm::A, [2, 6, 1, 1], "a with another number of elements"),
        (Ssm::A, [1, 6, 2, 1], "a is no matrix"),
        (Ssm::B, [16, 4, 3, 2], "b and c differ"),
        (Ssm::IDS, [3, 1, 1, 1], "more ids than sequences"),
    ] {
        let mut shapes = valid;
        shapes[source] = shape;
        assert!(!build(shapes, DType::I32, 1), "{what}");
    }
    let mut groups = valid;
    (groups[Ssm::B], groups[Ssm::C]) = ([16, 4, 3, 2], [16, 4, 3, 2]);
    assert!(!build(groups, DType::I32, 1), "groups that do not divide the heads");
}
