//! Moves of nodes: random graphs in little memory give the same bytes in the order of the fused kernels as in their own order.

use super::{FusedOp, FusionMatch, FusionPattern, Link, select_kernels};
use crate::graph::{Builder, Graph, Node, TensorId};
use crate::ops::binary::Binary;
use crate::ops::mul_mat::MulMat;
use crate::ops::training::Training;
use crate::ops::unary::Unary;
use crate::ops::{NodeView, Op, OpCode};
use crate::tensor::{DType, TensorDesc};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Elements of the memory of all tensors but for the constants of OPT_STEP_ADAMW, which lie after it.
const ELEMENTS: usize = 24;
const ALL_ELEMENTS: usize = 64;

/// Patterns of nodes that read each other's results. The fused op means nothing.
const PATTERNS: &[FusionPattern] = &[
    FusionPattern {
        ops: &[(OpCode::Add, Link::ReadsResult), (OpCode::Mul, Link::ReadsResult), (OpCode::Sub, Link::ReadsResult)],
        find,
    },
    FusionPattern { ops: &[(OpCode::Add, Link::ReadsResult), (OpCode::Unary, Link::ReadsResult)], find },
    FusionPattern { ops: &[(OpCode::Mul, Link::SameSource1), (OpCode::Mul, Link::SameSource1)], find },
    FusionPattern { ops: &[(OpCode::MulMat, Link::Any), (OpCode::Unary, Link::ReadsResult)], find },
    FusionPattern { ops: &[(OpCode::Sub, Link::Any), (OpCode::OptStepAdamw, Link::Any)], find },
];

fn find(c: &super::Candidate<'_>) -> Option<FusionMatch> {
    Some(FusionMatch {
        fused: FusedOp::Products { product: MulMat::PLAIN, biased: false },
        dst: c.nodes[0].dst,
        srcs: vec![c.src(0, 0), c.src(0, 1)],
    })
}

/// A graph of `nodes` nodes whose operands are views of the same memory.
fn random_graph(rng: &mut fastrand::Rng, nodes: usize) -> Graph {
    let mut b = Builder::new();
    let memory = b.leaf(DType::F32, [ELEMENTS, 1, 1, 1]).unwrap();
    let constants = b.leaf(DType::F32, [7, 1, 1, 1]).unwrap();
    // All tensors have `n` elements but for the weights of MUL_MAT, and lie at places of as many.
    let n = rng.usize(1..=3);
    let places = ELEMENTS / n;
    let view = |b: &mut Builder, ne, place: usize| {
        b.view(memory, TensorDesc::contiguous(DType::F32, ne).unwrap(), 4 * n * place).unwrap()
    };
    let row = [n, 1, 1, 1];
    let node = |b: &mut Builder, op: Op, srcs: &[Option<TensorId>], place| {
        let dst = view(b, row, place);
        b.node_into(op, srcs, dst).unwrap()
    };
    let mut results: Vec<(TensorId, usize)> = Vec::new();
    // Those of the last product.
    let mut columns = None;
    for _ in 0..nodes {
        let mut operand = |b: &mut Builder| match results.len() {
            // Often one of the last results.
            len if len > 0 && rng.u8(0..3) > 0 => results[len - 1 - rng.usize(0..len.min(4))],
            _ => {
                let place = rng.usize(0..places);
                (view(b, row, place), place)
            }
        };
        let [x, y] = [operand(&mut b), operand(&mut b)];
        let srcs = [Some(x.0), Some(y.0)];
        let mut at = rng.usize(0..places);
        let done = match rng.u8(0..6) {
            0 => node(&mut b, Binary::Add.into(), &srcs, at),
            1 => node(&mut b, Binary::Mul.into(), &srcs, at),
            2 => node(&mut b, Binary::Sub.into(), &srcs, at),
            3 => {
                // The result lies on no operand.
                let x = columns.filter(|_| rng.bool()).unwrap_or(x);
                columns = Some(x);
                let weights = rng.usize(0..=places - n);
                while at == x.1 || (weights..weights + n).contains(&at) {
                    at = rng.usize(0..places);
                }
                let a = view(&mut b, [n, n, 1, 1], weights);
                node(&mut b, MulMat::PLAIN.into(), &[Some(a), Some(x.0)], at)
            }
            4 => {
                // Updates sources 2 and 3, which lie on no other operand.
                let mut apart: Vec<usize> = (0..places).collect();
                rng.shuffle(&mut apart);
                at = apart[0];
                let mut srcs: Vec<_> = apart[..4].iter().map(|&place| Some(view(&mut b, row, place))).collect();
                srcs.push(Some(constants));
                node(&mut b, Training::OptStepAdamw.into(), &srcs, at)
            }
            _ => node(&mut b, Unary::Sqr.into(), &srcs[..1], at),
        };
        results.push((done, at));
    }
    b.build()
}

/// Runs a node on memory in which each element holds a hash of the values from which it was computed.
fn run(graph: &Graph, node: &Node, memory: &mut [u64; ALL_ELEMENTS]) {
    let elements = |id: TensorId| {
        let tensor = graph.tensor(id).unwrap();
        let first = tensor.place.unwrap().offset / 4;
        first..first + tensor.desc.elements()
    };
    let mut hasher = DefaultHasher::new();
    node.op.code().hash(&mut hasher);
    for id in node.srcs.iter().flatten() {
        memory[elements(*id)].hash(&mut hasher);
    }
    let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i)).filter_map(|(_, id)| *id);
    for (i, id) in updated.chain([node.dst]).enumerate() {
        i.hash(&mut hasher);
        memory[elements(id)].fill(hasher.finish());
    }
}

#[test]
fn moves_do_not_change_results() {
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut moved, mut fused) = (0, 0);
    // Nodes that run ahead of others: products, and nodes that update sources.
    let mut ahead = [(OpCode::MulMat, 0), (OpCode::OptStepAdamw, 0)];
    for case in 0..10_000 {
        let count = rng.usize(1..14);
        let graph = random_graph(&mut rng, count);
        let mut order = Vec::new();
        let select = |_: &NodeView<'_>| Ok::<_, ()>(());
        let calls = select_kernels(
            &graph,
            PATTERNS,
            select,
            |_, _| Some(()),
            |call| {
                fused += usize::from(call.nodes.len() > 1);
                order.extend(call.nodes);
                Ok::<_, ()>(())
            },
        );
        assert_eq!(calls, Ok(()));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..count), "case {case}: {order:?}");
        moved += usize::from(!order.is_sorted());
        for (_, &index) in order.iter().enumerate().filter(|&(i, &index)| order[i..].iter().any(|&other| other < index))
        {
            let code = graph.nodes()[index].op.code();
            ahead.iter_mut().filter(|(of, _)| *of == code).for_each(|(_, count)| *count += 1);
        }
        let mut want: [u64; ALL_ELEMENTS] = std::array::from_fn(|i| i as u64);
        let mut got = want;
        graph.nodes().iter().for_each(|node| run(&graph, node, &mut want));
        order.iter().for_each(|&index| run(&graph, &graph.nodes()[index], &mut got));
        assert!(got == want, "case {case}: the order {order:?} changes the results");
    }
    assert!(moved > 200 && fused > 700, "{moved} orders changed, {fused} fused kernels");
    assert!(ahead.iter().all(|&(_, count)| count > 200), "{ahead:?}");
}
