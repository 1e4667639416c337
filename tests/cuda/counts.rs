//! What memory-bound kernels move: little more than each byte once, in whole sectors.

use crate::rig::{Rig, whole};
use fanout::graph::{Builder, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::glu::{self, Glu};
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::ops::{Op, OutputSpec};
use fanout::tensor::DType::{F16, F32, I32};
use serde_json::Value;

/// Elements of each case: 64 MiB of f32.
const N: usize = 16 << 20;
const SECTOR: f64 = 32.0;

type Build = fn(&mut Builder, usize) -> TensorId;

/// A leaf of rows of this length.
fn leaf(b: &mut Builder, row: usize) -> TensorId {
    b.leaf(F32, [row, N / row, 1, 1]).unwrap()
}

fn one(b: &mut Builder, row: usize, op: impl Into<Op>) -> TensorId {
    let x = leaf(b, row);
    b.node(op, &[Some(x)]).unwrap()
}

/// By name: the graph, and the lengths of its rows.
const CASES: &[(&str, Build, &[usize])] = &[
    ("unary", |b, row| one(b, row, Unary::Kind(UnaryKind::Silu)), &[4096]),
    ("norm", |b, row| one(b, row, Norm::Norm { eps: 1e-5 }), &[4096, 8192]),
    ("rms_norm", |b, row| one(b, row, Norm::RmsNorm { eps: 1e-5 }), &[512, 4096, 8192]),
    ("softmax", |b, row| one(b, row, SoftMax { scale: 1.0, max_bias: 0.0 }), &[512, 4096, 8192]),
    ("glu", |b, row| one(b, row, Glu { kind: glu::GluKind::Swiglu, swapped: false }), &[8192]),
    (
        "binary",
        |b, row| {
            let (x, y) = (leaf(b, row), leaf(b, row));
            b.node(Binary::Add, &[Some(x), Some(y)]).unwrap()
        },
        &[4096],
    ),
    (
        "binary with a row",
        |b, row| {
            let (x, w) = (leaf(b, row), b.leaf(F32, [row, 1, 1, 1]).unwrap());
            b.node(Binary::Mul, &[Some(x), Some(w)]).unwrap()
        },
        &[8192],
    ),
    (
        "cpy to f16",
        |b, row| {
            let x = leaf(b, row);
            b.node_with_output(CopyOp::Cpy, &[Some(x)], OutputSpec { dtype: F16, ne: [row, N / row, 1, 1] }).unwrap()
        },
        &[4096],
    ),
    ("cont", |b, row| one(b, row, CopyOp::Cont), &[8192]),
    (
        "rope",
        |b, row| {
            let heads = 32;
            let tokens = N / row / heads;
            let x = b.leaf(F32, [row, heads, tokens, 1]).unwrap();
            let positions = b.leaf(I32, [tokens, 1, 1, 1]).unwrap();
            b.node(Rope::new(RopeMode::Neox, row as u32), &[Some(x), Some(positions)]).unwrap()
        },
        &[128],
    ),
];

#[test]
fn memory_bound_kernels_move_each_byte_once_in_whole_sectors() {
    for (name, build, rows) in CASES {
        for &row in *rows {
            let rig = Rig::new("CUDAEMU_COUNTS=on");
            let mut b = Builder::new();
            build(&mut b, row);
            let graph = std::sync::Arc::new(b.build().unwrap());
            let (buffer, mut queue) = (rig.buffer(0, graph.slot_sizes()[0] as u64), rig.queue(0));
            queue.run(&rig.program(0, &graph), &whole(&buffer)).unwrap();
            queue.mark().wait(crate::rig::soon()).unwrap();
            check(&format!("{name}, rows of {row}"), &rig.emulator.counts_json());
            assert_eq!(rig.emulator.reports(), Vec::<String>::new());
        }
    }
}

#[test]
fn fill_reads_nothing() {
    for ne in [[4096, 4, 1, 1], [100, 3, 1, 1]] {
        for to in [F32, F16] {
            let rig = Rig::new("CUDAEMU_COUNTS=on");
            let mut b = Builder::new();
            let x = b.leaf(F32, ne).unwrap();
            b.node_with_output(Unary::Fill { value: 1.0 }, &[Some(x)], OutputSpec { dtype: to, ne }).unwrap();
            let graph = std::sync::Arc::new(b.build().unwrap());
            let (buffer, mut queue) = (rig.buffer(0, graph.slot_sizes()[0] as u64), rig.queue(0));
            queue.run(&rig.program(0, &graph), &whole(&buffer)).unwrap();
            queue.mark().wait(crate::rig::soon()).unwrap();
            let counts: Value = serde_json::from_str(&rig.emulator.counts_json()).unwrap();
            let read = |kernel: &Value| kernel["global_read"]["bytes"].as_f64().unwrap();
            assert_eq!(counts["kernels"].as_object().unwrap().values().map(read).collect::<Vec<_>>(), [0.0]);
        }
    }
}

fn check(what: &str, counts: &str) {
    let counts: Value = serde_json::from_str(counts).unwrap();
    let kernels = counts["kernels"].as_object().unwrap();
    assert!(!kernels.is_empty(), "{what}: nothing ran");
    let sum = |of: &dyn Fn(&Value) -> f64| kernels.values().map(of).sum::<f64>();
    let both = |field: &str| {
        sum(&|kernel| {
            kernel["global_read"][field].as_f64().unwrap() + kernel["global_written"][field].as_f64().unwrap()
        })
    };
    let least = sum(&|kernel| {
        ["global_read_distinct_bytes", "global_written_distinct_bytes"]
            .map(|f| kernel[f].as_f64().unwrap())
            .iter()
            .sum()
    });
    assert!(least >= f64::from(64 << 20), "{what}: {least} bytes are no 64 MiB");
    let (moved, full) = (both("bytes") / least, both("bytes") / (both("sectors") * SECTOR));
    assert!(moved <= 1.05, "{what}: moves {moved:.3} times the least bytes");
    assert!(full >= 0.95, "{what}: {kernels:?}: {:.1} % of the sectors' bytes are asked for", full * 100.0);
}
