//! Cases of ops of training: gradients, losses, steps of optimisers.

use super::{Draft, IN_F32, case};
use crate::ops::backward::Backward;
use crate::ops::training::Training;
use crate::tensor::DType::F32;

pub(super) fn cases() -> Vec<Draft> {
    let (ne, loss) = ([137, 5, 3, 1], [37, 5, 1, 1]);
    let adamw = [0.01, 0.9, 0.999, 1e-8, 0.1, 10.0, 1000.0];
    vec![
        case(IN_F32).normal(F32, ne).normal(F32, ne).node(Backward::Silu),
        case(IN_F32).normal(F32, ne).normal(F32, ne).node(Backward::RmsNorm { eps: 1e-5 }),
        case(IN_F32).normal(F32, ne).uniform(ne, 0.0, 0.1).node(Backward::SoftMax { scale: 0.7 }),
        case(IN_F32).normal(F32, [66, 10, 3, 1]).node_as(Backward::Repeat, F32, [33, 5, 1, 1]),
        case(IN_F32).normal(F32, [33, 6, 1, 1]).indices([6, 1, 1, 1], [4, 0, 4, 8, 2, 4]).node_as(
            Backward::GetRows,
            F32,
            [33, 9, 1, 1],
        ),
        case(IN_F32).normal(F32, loss).uniform(loss, 0.0, 0.05).node(Training::CrossEntropyLoss),
        case(IN_F32)
            .listed(F32, [1; 4], [0.75])
            .normal(F32, loss)
            .uniform(loss, 0.0, 0.05)
            .node(Training::CrossEntropyLossBack),
        case(IN_F32)
            .normal(F32, ne)
            .normal(F32, ne)
            .normal(F32, ne)
            .uniform(ne, 0.1, 2.0)
            .listed(F32, [7, 1, 1, 1], adamw)
            .node_onto(Training::OptStepAdamw, 0),
        case(IN_F32)
            .normal(F32, ne)
            .normal(F32, ne)
            .listed(F32, [2, 1, 1, 1], [0.25, 0.1])
            .node_onto(Training::OptStepSgd, 0),
    ]
}
