use crate::common::{Case, assert_close, devices, normal};
use fanout::ops::norm::Norm;
use fanout::ops::{Op, OpCode, Out, Words};
use fanout::tensor::{DType, TensorDesc};

const OPS: [Norm; 5] = [
    Norm::Norm { eps: 1e-5 },
    Norm::RmsNorm { eps: 1e-6 },
    Norm::RmsNorm { eps: 0.5 },
    Norm::L2Norm { eps: 1e-12 },
    Norm::L2Norm { eps: 30.0 },
];

fn oracle(op: Norm, x: &[f64], n: usize) -> Vec<f64> {
    let row = |x: &[f64]| {
        let squares = |shift: f64| x.iter().map(|x| (x - shift) * (x - shift)).sum::<f64>();
        let (mean, divisor) = match op {
            Norm::Norm { eps } => {
                let mean = x.iter().sum::<f64>() / n as f64;
                (mean, (squares(mean) / n as f64 + f64::from(eps)).sqrt())
            }
            Norm::RmsNorm { eps } => (0.0, (squares(0.0) / n as f64 + f64::from(eps)).sqrt()),
            Norm::L2Norm { eps } => (0.0, squares(0.0).sqrt().max(f64::from(eps))),
        };
        x.iter().map(|x| (x - mean) / divisor).collect::<Vec<_>>()
    };
    x.chunks(n).flat_map(row).collect()
}

#[test]
fn shapes() {
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
                let want = oracle(op, &case.values(x), ne[0]);
                assert_close(&run.values(dst), &want, 4e-7, 3e-7, &format!("{op:?} {ne:?} {}", on.name));
            }
        }
    }
}

/// Strided, permuted, transposed and broadcast sources; strided destinations; in place, also of rows beyond the scratch.
#[test]
fn layouts() {
    let desc = |ne, nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let ne = [6, 4, 3, 2];
    let (padded, permuted) = (desc(ne, [4, 40, 200, 800]), desc(ne, [4, 72, 24, 288]));
    let (transposed, repeated) = (desc(ne, [16, 4, 96, 288]), desc(ne, [4, 0, 24, 72]));
    let long = desc([16_390, 2, 1, 1], [4, 70_000, 140_000, 140_000]);
    let cases = [
        (padded, Some(permuted)),
        (permuted, Some(padded)),
        (transposed, Some(padded)),
        (repeated, Some(transposed)),
        (padded, None),
        (transposed, None),
        (long, None),
        (long, Some(long)),
    ];
    for (dx, dd) in cases {
        for op in OPS {
            let mut case = Case::new();
            let x = case.leaf_of(dx, &normal(2, dx.elements()));
            let dst = match dd {
                Some(dd) => case.b.leaf_of(dd).unwrap(),
                None => case.b.view(x, dx, 0).unwrap(),
            };
            case.b.node_onto(op, &[Some(x)], dst).unwrap();
            let case = case.build();
            let want = oracle(op, &case.values(x), dx.ne()[0]);
            for on in devices() {
                let what = format!("{op:?} {dx:?} {dd:?} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, 4e-7, 3e-7, &what);
            }
        }
    }
}

#[test]
fn rows_of_zeros() {
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
fn parameters() {
    type Make = fn(f32) -> Norm;
    let families: [(OpCode, Make); 3] = [
        (OpCode::Norm, |eps| Norm::Norm { eps }),
        (OpCode::RmsNorm, |eps| Norm::RmsNorm { eps }),
        (OpCode::L2Norm, |eps| Norm::L2Norm { eps }),
    ];
    for (code, make) in families {
        for eps in [0.0, 1e-6, f32::INFINITY] {
            let words = Words::default().with_float(0, eps);
            assert_eq!(Op::decode(code, &words), Ok(Some(make(eps).into())));
            assert_eq!((Op::from(make(eps)).code(), Op::from(make(eps)).encode()), (code, words));
        }
        for eps in [-1e-30, f32::NAN, f32::NEG_INFINITY] {
            let error = Op::decode(code, &Words::default().with_float(0, eps)).unwrap_err();
            assert_eq!((error.op, error.word, error.name), (code, 0, "eps"));
        }
    }
}

#[test]
fn rules() {
    let ne = [8, 3, 1, 1];
    let mut case = Case::new();
    let x = case.leaf(DType::F32, ne, &normal(3, 24));
    case.b.node_as(OPS[0], &[Some(x)], Out { dtype: DType::F32, ne: [8, 2, 1, 1] }).unwrap();
    assert!(case.b.build().is_err(), "another shape");
    let mut case = Case::new();
    assert!(case.b.node(OPS[1], &[]).is_err(), "no source");
    // A type that the CPU has no kernel for is refused when the program is made, not when it runs.
    let x = case.leaf(DType::F16, ne, &normal(3, 24));
    case.b.node(OPS[1], &[Some(x)]).unwrap();
    let case = case.build();
    assert!(devices()[0].device.prepare(case.graph).is_err());
}
