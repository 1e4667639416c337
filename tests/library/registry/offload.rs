//! For which nodes a GPU reports `Support::Offload`, i.e. that copying weights from the host pays off; on an emulated GPU.

use super::{emulated, small};
use fanout::device::Support;
use fanout::graph::{Builder, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::DType::{self, F16, F32, I32, I64, Q4_0};

const K: usize = 64;

/// Adds a node with this number of tokens.
type AddNode = fn(&mut Builder, usize);

fn leaf(b: &mut Builder, dtype: DType, ne: [usize; 4]) -> Option<TensorId> {
    Some(b.leaf(dtype, ne).unwrap())
}

fn product(b: &mut Builder, weights: DType, [columns, batch]: [usize; 2]) {
    let srcs = [leaf(b, weights, [K, 48, 1, 1]), leaf(b, F32, [K, columns, batch, 1])];
    b.node(MulMat::PLAIN, &srcs).unwrap();
}

fn by_id(b: &mut Builder, used: usize, tokens: usize) {
    let (experts, ids) = (leaf(b, F16, [K, 48, 4, 1]), leaf(b, I32, [used, tokens, 1, 1]));
    let x = leaf(b, F32, [K, used, tokens, 1]);
    b.node(MulMat::BY_ID, &[experts, x, ids]).unwrap();
}

/// Nodes that are offloaded from 32 tokens on.
const BY_BATCH: [(&str, AddNode); 7] = [
    ("MUL_MAT of F16", |b, n| product(b, F16, [n, 1])),
    ("MUL_MAT of Q4_0", |b, n| product(b, Q4_0, [n, 1])),
    ("MUL_MAT_ID", |b, n| by_id(b, 2, n)),
    ("MUL by a row", |b, n| {
        let srcs = [leaf(b, F32, [K, n, 1, 1]), leaf(b, F32, [K, 1, 1, 1])];
        b.node(Binary::Mul, &srcs).unwrap();
    }),
    ("RMS_NORM", |b, n| {
        let x = leaf(b, F32, [K, n, 1, 1]);
        b.node(Norm::RmsNorm { eps: 1e-6 }, &[x]).unwrap();
    }),
    ("ROPE of 40 heads", |b, n| {
        let srcs = [leaf(b, F32, [K, 40, n, 1]), leaf(b, I32, [n, 1, 1, 1])];
        b.node(Rope::new(RopeMode::Neox, K as u32), &srcs).unwrap();
    }),
    ("SOFT_MAX", |b, n| {
        let x = leaf(b, F32, [K, n, 1, 1]);
        b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[x]).unwrap();
    }),
];

/// Nodes that are not offloaded at any size.
const NEVER: [(&str, AddNode); 5] = [
    ("GET_ROWS", |b, n| {
        let srcs = [leaf(b, F16, [K, 100, 1, 1]), leaf(b, I32, [n, 1, 1, 1])];
        b.node(Rows::GetRows, &srcs).unwrap();
    }),
    ("SET_ROWS", |b, n| {
        let (x, ids, cache) =
            (leaf(b, F32, [K, n, 1, 1]), leaf(b, I64, [n, 1, 1, 1]), b.leaf(F16, [K, 512, 1, 1]).unwrap());
        let desc = b.tensor(cache).unwrap().desc;
        let onto = b.view(cache, desc, 0).unwrap();
        b.node_into(Rows::SetRows, &[x, ids, Some(cache)], onto).unwrap();
    }),
    ("CONT", |b, n| {
        let x = leaf(b, F32, [K, n, 1, 1]);
        b.node(CopyOp::Cont, &[x]).unwrap();
    }),
    ("MUL_MAT of few columns in a batch", |b, n| product(b, F16, [2, n])),
    ("MUL_MAT_ID of many experts and few tokens", |b, n| by_id(b, n.min(4), 2)),
];

#[test]
fn large_batches_are_offloaded_to_the_gpu() {
    emulated("CUDAEMU_DEVICES=1", |registry| {
        let entry = registry.by_name("CUDA0").unwrap();
        let devices = [false, true].map(|fallback| entry.open(&small().with_fallback(fallback)).unwrap());
        let cpu = registry.by_name("CPU").unwrap().open(&small()).unwrap();
        let cases = BY_BATCH.map(|case| (case, true)).into_iter().chain(NEVER.map(|case| (case, false)));
        for ((name, make), by_batch) in cases {
            for n in [1, 2, 31, 32, 33, 512] {
                let mut b = Builder::new();
                make(&mut b, n);
                let graph = b.build();
                let node = graph.node_view(graph.nodes().last().unwrap()).unwrap();
                let want = if by_batch && n >= 32 { Support::Offload } else { Support::Yes };
                for device in &devices {
                    assert_eq!(device.support(node), want, "{name} of {n}");
                }
                assert_eq!(cpu.support(node), Support::Yes, "{name} of {n}");
            }
        }
    });
}

/// A node that falls back to the CPU is not offloaded, since copying its weights to the GPU would gain nothing.
#[test]
fn nodes_that_fall_back_are_not_offloaded() {
    emulated("CUDAEMU_DEVICES=1", |registry| {
        let mut b = Builder::new();
        let x = b.leaf(F32, [K + 1, 64, 1, 1]).unwrap();
        let desc = fanout::tensor::TensorDesc::contiguous(F32, [K, 64, 1, 1]).unwrap();
        let odd = b.view(x, desc, 2).unwrap();
        b.node(Norm::RmsNorm { eps: 1e-6 }, &[Some(odd)]).unwrap();
        let graph = b.build();
        let node = graph.node_view(&graph.nodes()[0]).unwrap();
        for (fallback, runs) in [(true, true), (false, false)] {
            let device = registry.entries()[0].open(&small().with_fallback(fallback)).unwrap();
            let support = device.support(node);
            assert_eq!((support.runs(), support == Support::Offload), (runs, false), "{support:?}");
        }
    });
}
