//! ARANGE and TIMESTEP_EMBEDDING: results of every device against the formulas, and the parameters.

use crate::devices::devices;
use fanout::ops::sequence::Sequence;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::uniform;
use fanout_testing::op_case::Case;

#[test]
fn sequences_match_the_oracle() {
    for (start, stop, step, count) in [
        (0.0, 5.0, 1.0, 5),
        (-2.5, 2.6, 0.25, 21),
        (1.0, 1.5, 7.0, 1),
        (0.0, 40_000.0, 1.0, 40_000),
        (3.0, 3.0 + 1025.0 * 0.5, 0.5, 1025),
    ] {
        let op = Sequence::Arange { start, stop, step };
        let mut case = Case::new();
        let dst = case.b.node(op, &fanout::graph::NO_SOURCES).unwrap();
        assert_eq!(case.b.tensor(dst).unwrap().desc.ne(), [count, 1, 1, 1]);
        let case = case.build();
        let want: Vec<f64> = (0..count).map(|i| f64::from(start) + f64::from(step) * i as f64).collect();
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-7, 0.0, &format!("{op:?} {}", on.name));
        }
    }
}

#[test]
fn embeddings_match_the_oracle() {
    for (dim, count, max_period) in [(1, 2, 10_000), (2, 1, 100), (320, 3, 10_000), (33, 40, 1000), (4100, 2, 10_000)] {
        let op = Sequence::TimestepEmbedding { dim, max_period };
        let mut case = Case::new();
        let timesteps = case.leaf(DType::F32, [count, 1, 1, 1], &uniform(1, count, 0.0, 1000.0));
        let ne = [dim as usize, count, 1, 1];
        let desc = TensorDesc::strided(DType::F32, ne, [4, 4 * ne[0] + 12, 0, 0]).unwrap();
        let dst = case.b.leaf_with_desc(desc).unwrap();
        case.b.node_into(op, &[Some(timesteps)], dst).unwrap();
        let case = case.build();
        let (t, half) = (case.values(timesteps), dim as usize / 2);
        let wave = |k: usize| {
            let (t, j) = (t[k / ne[0]], k % ne[0]);
            // The frequency is an f32 number.
            let f = |j: usize| f64::from((-f64::from(max_period).ln() * j as f64 / half as f64).exp() as f32);
            match j {
                _ if j >= 2 * half => 0.0,
                _ if j < half => (t * f(j)).cos(),
                _ => (t * f(j - half)).sin(),
            }
        };
        let want: Vec<f64> = (0..ne[0] * count).map(wave).collect();
        for on in devices() {
            // An angle of up to 1000 has an error of up to 1e-4 in f32.
            assert_close(&case.run(on).values(dst), &want, 0.0, 3e-4, &format!("{op:?} {}", on.name));
        }
    }
}

#[test]
fn parameters_round_trip() {
    let op = Sequence::Arange { start: 1.5, stop: 9.0, step: 0.5 };
    let words = OpParams::default().with_float(0, 1.5).with_float(1, 9.0).with_float(2, 0.5);
    assert_eq!(Op::from(op).encode(), words);
    assert_eq!(Op::decode(OpCode::Arange, &words), Ok(Some(op.into())));
    let op = Sequence::TimestepEmbedding { dim: 320, max_period: -7 };
    let words = OpParams::default().with_int(0, 320).with_int(1, -7);
    assert_eq!(Op::from(op).encode(), words);
    assert_eq!(Op::decode(OpCode::TimestepEmbedding, &words), Ok(Some(op.into())));
    assert!(Op::decode(OpCode::TimestepEmbedding, &OpParams::default().with_int(0, -1)).is_err());
}

#[test]
fn invalid_nodes_are_rejected() {
    let arange = |start, stop, step| Sequence::Arange { start, stop, step };
    for op in [
        arange(1.0, 1.0, 1.0),
        arange(0.0, 1.0, -1.0),
        arange(0.0, 1.0, 0.0),
        arange(0.0, f32::INFINITY, 1.0),
        arange(f32::NAN, 1.0, 1.0),
        arange(0.0, 1.0, f32::NAN),
        arange(0.0, f32::MAX, 1e-3),
    ] {
        assert!(Case::new().b.node(op, &fanout::graph::NO_SOURCES).is_err(), "{op:?}");
    }
    let built = |op: Sequence, n: usize, ne: [usize; 4]| {
        let mut case = Case::new();
        let t = case.b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
        let count = Op::from(op).code().max_sources();
        case.b.node_with_output(op, &[Some(t)][..count], OutputSpec { dtype: DType::F32, ne }).is_ok()
    };
    assert!(built(arange(0.0, 4.0, 1.0), 1, [4, 1, 1, 1]));
    assert!(!built(arange(0.0, 4.0, 1.0), 1, [5, 1, 1, 1]), "too long");
    let embedding = Sequence::TimestepEmbedding { dim: 8, max_period: 10 };
    assert!(built(embedding, 3, [8, 3, 1, 1]));
    assert!(!built(embedding, 3, [9, 3, 1, 1]) && !built(embedding, 3, [8, 2, 1, 1]));
    let mut case = Case::new();
    let t = case.b.leaf(DType::F16, [3, 1, 1, 1]).unwrap();
    case.b.node(embedding, &[Some(t)]).unwrap();
    assert!(devices()[0].device.prepare(case.b.build().into()).is_err(), "F16");
}
