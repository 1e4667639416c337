//! CROSS_ENTROPY_LOSS and its gradient, OPT_STEP_ADAMW and OPT_STEP_SGD: results of every device against the formulas in f64,
//! and the shape rules.

use crate::devices::devices;
use fanout::graph::validate::GraphError;
use fanout::graph::{BuildError, TensorId};
use fanout::ops::training::Training;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::sched::TaskBuilder;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

const SHAPES: [[usize; 4]; 5] = [[1, 1, 1, 1], [7, 3, 2, 2], [1500, 3, 1, 1], [2048, 11, 1, 1], [33, 400, 1, 1]];

/// The logarithm of the softmax of a row.
fn log_softmax(x: &[f64]) -> Vec<f64> {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - top).exp()).sum();
    x.iter().map(|x| x - top - sum.ln()).collect()
}

/// Logits, and target probabilities that are mostly 0.
fn logits_and_targets(case: &mut Case, ne: [usize; 4], strided: bool) -> [TensorId; 2] {
    let n: usize = ne.iter().product();
    let x: Vec<f32> = normal(1, n).iter().map(|v| v * 5.0).collect();
    let t: Vec<f32> = uniform(2, n, -2.0, 1.0).iter().map(|v| v.max(0.0)).collect();
    let nb = [4, 4 * ne[0] * ne[2] * ne[3], 4 * ne[0], 4 * ne[0] * ne[2]];
    let desc = if strided { TensorDesc::strided(DType::F32, ne, nb) } else { TensorDesc::contiguous(DType::F32, ne) };
    let desc = desc.unwrap();
    [case.leaf_with_desc(desc, &x), case.leaf_with_desc(desc, &t)]
}

#[test]
fn losses_match_the_oracle() {
    for ne in SHAPES {
        for strided in [false, true] {
            let mut case = Case::new();
            let [x, t] = logits_and_targets(&mut case, ne, strided);
            let dst = case.b.node(Training::CrossEntropyLoss, &[Some(x), Some(t)]).unwrap();
            let case = case.build();
            let (x, t) = (case.values(x), case.values(t));
            let rows = x.chunks(ne[0]).zip(t.chunks(ne[0]));
            let row = |(x, t): (&[f64], &[f64])| log_softmax(x).iter().zip(t).map(|(l, t)| l * t).sum::<f64>();
            let want = -rows.map(row).sum::<f64>() / (x.len() / ne[0]) as f64;
            for on in devices() {
                assert_close(&case.run(on).values(dst), &[want], 2e-6, 1e-6, &format!("{ne:?} {strided} {}", on.name));
            }
        }
    }
}

#[test]
fn gradients_of_losses_match_the_oracle() {
    for ne in SHAPES {
        let mut case = Case::new();
        let g = case.leaf(DType::F32, [1; 4], &[0.75]);
        let [x, t] = logits_and_targets(&mut case, ne, false);
        let dst = case.b.node(Training::CrossEntropyLossBack, &[Some(g), Some(x), Some(t)]).unwrap();
        let case = case.build();
        let (x, t) = (case.values(x), case.values(t));
        let factor = 0.75 / (x.len() / ne[0]) as f64;
        let rows = x.chunks(ne[0]).zip(t.chunks(ne[0]));
        let row = |(x, t): (&[f64], &[f64])| {
            log_softmax(x).iter().zip(t).map(|(l, t)| (l.exp() - t) * factor).collect::<Vec<_>>()
        };
        let want: Vec<f64> = rows.flat_map(row).collect();
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 4e-6, 1e-9, &format!("{ne:?} {}", on.name));
        }
    }
}

/// The weights, gradients and moments of a step, each with its own strides.
fn step_operands(case: &mut Case, ne: [usize; 4], strided: bool) -> [TensorId; 4] {
    let n: usize = ne.iter().product();
    [1, 2, 3, 4].map(|seed| {
        let values: Vec<f32> = normal(seed, n).iter().map(|v| if seed == 4 { v.abs() } else { *v }).collect();
        let row = 4 * (ne[0] + if strided { seed as usize } else { 0 });
        let nb = [4, row * ne[2], row, row * ne[1] * ne[2]];
        let desc =
            if strided { TensorDesc::strided(DType::F32, ne, nb) } else { TensorDesc::contiguous(DType::F32, ne) };
        case.leaf_with_desc(desc.unwrap(), &values)
    })
}

#[test]
fn steps_match_the_oracle() {
    let adamw = [0.01f32, 0.9, 0.999, 1e-8, 0.1, 1.0 / (1.0 - 0.9), 1.0 / (1.0 - 0.999)];
    for ne in SHAPES {
        for strided in [false, true] {
            for op in [Training::OptStepAdamw, Training::OptStepSgd] {
                let mut case = Case::new();
                let [w, g, m, v] = step_operands(&mut case, ne, strided);
                let onto = case.b.view(w, case.b.tensor(w).unwrap().desc, 0).unwrap();
                let sources = if op == Training::OptStepAdamw {
                    vec![w, g, m, v, case.leaf(DType::F32, [7, 1, 1, 1], &adamw)]
                } else {
                    vec![w, g, case.leaf(DType::F32, [2, 1, 1, 1], &[0.25, 0.1])]
                };
                let sources: Vec<_> = sources.into_iter().map(Some).collect();
                let dst = case.b.node_into(op, &sources, onto).unwrap();
                let case = case.build();
                let [ws, gs, mut ms, mut vs] = [w, g, m, v].map(|id| case.values(id));
                let want: Vec<f64> = (0..ws.len())
                    .map(|k| {
                        if op == Training::OptStepSgd {
                            return ws[k] * (1.0 - 0.25 * 0.1) - 0.25 * gs[k];
                        }
                        let [alpha, b1, b2, eps, wd, b1h, b2h] = adamw.map(f64::from);
                        ms[k] = ms[k] * b1 + gs[k] * (1.0 - b1);
                        vs[k] = vs[k] * b2 + gs[k] * gs[k] * (1.0 - b2);
                        ws[k] * (1.0 - alpha * wd) - alpha * ms[k] * b1h / ((vs[k] * b2h).sqrt() + eps)
                    })
                    .collect();
                for on in devices() {
                    let (what, outcome) = (format!("{op:?} {ne:?} {strided} {}", on.name), case.run(on));
                    assert_close(&outcome.values(dst), &want, 1e-6, 1e-6, &what);
                    assert_close(&outcome.values(m), &ms, 1e-6, 1e-6, &format!("{what}: m"));
                    assert_close(&outcome.values(v), &vs, 1e-6, 1e-6, &format!("{what}: v"));
                }
            }
        }
    }
}

#[test]
fn a_later_node_reads_the_new_moments() {
    let ne = [3000, 6, 1, 1];
    let mut case = Case::new();
    let [w, g, m, v] = step_operands(&mut case, ne, false);
    let constants = case.leaf(DType::F32, [7, 1, 1, 1], &[0.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0]);
    let onto = case.b.view(w, TensorDesc::contiguous(DType::F32, ne).unwrap(), 0).unwrap();
    case.b.node_into(Training::OptStepAdamw, &[w, g, m, v, constants].map(Some), onto).unwrap();
    let sum = case.b.node(fanout::ops::binary::Binary::Add, &[Some(m), Some(v)]).unwrap();
    let case = case.build();
    let [gs, ms, vs] = [g, m, v].map(|id| case.values(id));
    let want: Vec<f64> = (0..gs.len()).map(|k| 0.5 * (ms[k] + gs[k] + vs[k] + gs[k] * gs[k])).collect();
    for on in devices() {
        assert_close(&case.run(on).values(sum), &want, 1e-6, 1e-6, on.name);
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    for (code, op) in [
        (OpCode::CrossEntropyLoss, Training::CrossEntropyLoss),
        (OpCode::CrossEntropyLossBack, Training::CrossEntropyLossBack),
        (OpCode::OptStepAdamw, Training::OptStepAdamw),
        (OpCode::OptStepSgd, Training::OptStepSgd),
    ] {
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, OpParams::default()));
        assert_eq!(Op::decode(code, &OpParams::default()), Ok(Some(op.into())));
    }
    let build = |op: Training, sources: &[[usize; 4]]| {
        let mut case = Case::new();
        let srcs: Vec<_> = sources.iter().map(|&ne| Some(case.b.leaf(DType::F32, ne).unwrap())).collect();
        case.b.node(op, &srcs)
    };
    let (x, one) = ([6, 4, 1, 1], [1; 4]);
    for (op, sources, what) in [
        (Training::CrossEntropyLoss, vec![x, x], None),
        (Training::CrossEntropyLoss, vec![x, one], Some("targets are not repeated")),
        (Training::CrossEntropyLossBack, vec![one, x, x], None),
        (Training::CrossEntropyLossBack, vec![x, x, x], Some("a gradient for each element")),
        (Training::CrossEntropyLossBack, vec![one, x, one], Some("targets are not repeated")),
        (Training::OptStepSgd, vec![x, x, [2, 1, 1, 1]], None),
        (Training::OptStepSgd, vec![x, x, [3, 1, 1, 1]], Some("three constants")),
        (Training::OptStepSgd, vec![x, one, [2, 1, 1, 1]], Some("gradients are not repeated")),
        (Training::OptStepSgd, vec![x, x], Some("no constants")),
        (Training::OptStepAdamw, vec![x, x, x, x, [7, 1, 1, 1]], None),
        (Training::OptStepAdamw, vec![x, x, x, x, [1, 7, 1, 1]], None),
        (Training::OptStepAdamw, vec![x, x, x, [4, 6, 1, 1], [7, 1, 1, 1]], Some("another shape")),
        (Training::OptStepAdamw, vec![x, x, x, x], Some("no constants")),
    ] {
        assert_eq!(build(op, &sources).is_err(), what.is_some(), "{op:?} {what:?}");
    }
}

/// A plan has one destination for each node, and AdamW writes three tensors.
#[test]
fn a_task_cannot_contain_adamw() {
    let mut task = TaskBuilder::new();
    let mut inputs = [4, 4, 4, 4, 7].map(|n| Some(task.input("x", DType::F32, [n, 1, 1, 1]).unwrap()));
    assert!(matches!(task.node(Training::OptStepAdamw, &inputs), Err(BuildError::Tensor(_))));
    inputs[2] = Some(task.input("constants", DType::F32, [2, 1, 1, 1]).unwrap());
    assert!(task.node(Training::OptStepSgd, &inputs[..3]).is_ok());
}

/// The moments are written, so they share no byte with another operand, nor with themselves.
#[test]
fn overlapping_moments_are_rejected() {
    let ne = [6, 4, 1, 1];
    let build = |of: [usize; 4], repeated: bool| {
        let mut case = Case::new();
        let leaves = [0, 1, 2, 3].map(|_| case.b.leaf(DType::F32, ne).unwrap());
        let constants = case.b.leaf(DType::F32, [7, 1, 1, 1]).unwrap();
        let mut srcs = of.map(|k| leaves[k]);
        if repeated {
            let desc = TensorDesc::strided(DType::F32, ne, [4, 0, 96, 96]).unwrap();
            srcs[3] = case.b.view(leaves[3], desc, 0).unwrap();
        }
        let onto = case.b.view(srcs[0], TensorDesc::contiguous(DType::F32, ne).unwrap(), 0).unwrap();
        let [w, g, m, v] = srcs;
        case.b.node_into(Training::OptStepAdamw, &[w, g, m, v, constants].map(Some), onto)
    };
    assert!(build([0, 1, 2, 3], false).is_ok());
    for of in [[0, 1, 0, 3], [0, 1, 2, 0], [0, 1, 1, 3], [0, 1, 2, 1], [0, 1, 2, 2]] {
        let error = build(of, false).unwrap_err();
        assert!(matches!(error.rule(), Some(GraphError::Overlap { .. })), "{of:?}: {error:?}");
    }
    let error = build([0, 1, 2, 3], true).unwrap_err();
    assert!(matches!(error.rule(), Some(GraphError::SelfOverlap(_))), "{error:?}");
}
