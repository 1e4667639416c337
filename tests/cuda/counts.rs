//! Memory traffic of memory-bound kernels: at most 1.05 times the minimum, in full 32-byte sectors (coalesced accesses).

use crate::fixture::{CudaFixture, whole_buffer};
use fanout::graph::{Builder, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{self, Glu};
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::ops::{Op, OutputSpec};
use fanout::tensor::DType::{F16, F32, I32};
use fanout::tensor::TensorDesc;
use serde_json::Value;

/// Elements of each case: 64 MiB of f32.
const N: usize = 16 << 20;
/// Bytes of a sector, the unit of memory traffic.
const SECTOR_BYTES: f64 = 32.0;

type Build = fn(&mut Builder, usize) -> TensorId;

/// A leaf with rows of length `row`.
fn leaf(b: &mut Builder, row: usize) -> TensorId {
    b.leaf(F32, [row, N / row, 1, 1]).unwrap()
}

/// A node with one source.
fn unary_node(b: &mut Builder, row: usize, op: impl Into<Op>) -> TensorId {
    let x = leaf(b, row);
    b.node(op, &[Some(x)]).unwrap()
}

/// The cases: name, builder of the graph, and the row lengths to test.
const CASES: &[(&str, Build, &[usize])] = &[
    ("unary", |b, row| unary_node(b, row, Unary::Kind(UnaryKind::Silu)), &[4096]),
    ("norm", |b, row| unary_node(b, row, Norm::Norm { eps: 1e-5 }), &[4096, 8192]),
    ("rms_norm", |b, row| unary_node(b, row, Norm::RmsNorm { eps: 1e-5 }), &[512, 4096, 8192]),
    ("softmax", |b, row| unary_node(b, row, SoftMax { scale: 1.0, max_bias: 0.0 }), &[512, 4096, 8192]),
    ("glu", |b, row| unary_node(b, row, Glu { kind: glu::GluKind::Swiglu, swapped: false }), &[8192]),
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
    ("cont", |b, row| unary_node(b, row, CopyOp::Cont), &[8192]),
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
            let fixture = CudaFixture::new("CUDAEMU_COUNTS=on");
            let mut b = Builder::new();
            build(&mut b, row);
            let graph = std::sync::Arc::new(b.build());
            let (buffer, mut queue) = (fixture.buffer(0, graph.slot_sizes()[0] as u64), fixture.queue(0));
            queue.run(&fixture.program(0, &graph), &whole_buffer(&buffer)).unwrap();
            queue.mark().wait(crate::fixture::test_deadline()).unwrap();
            check(&format!("{name}, rows of {row}"), &fixture.emulator.counts_json());
            assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
        }
    }
}

#[test]
fn fill_reads_nothing() {
    for ne in [[4096, 4, 1, 1], [100, 3, 1, 1]] {
        for to in [F32, F16] {
            let fixture = CudaFixture::new("CUDAEMU_COUNTS=on");
            let mut b = Builder::new();
            let x = b.leaf(F32, ne).unwrap();
            b.node_with_output(Unary::Fill { value: 1.0 }, &[Some(x)], OutputSpec { dtype: to, ne }).unwrap();
            let graph = std::sync::Arc::new(b.build());
            let (buffer, mut queue) = (fixture.buffer(0, graph.slot_sizes()[0] as u64), fixture.queue(0));
            queue.run(&fixture.program(0, &graph), &whole_buffer(&buffer)).unwrap();
            queue.mark().wait(crate::fixture::test_deadline()).unwrap();
            let counts: Value = serde_json::from_str(&fixture.emulator.counts_json()).unwrap();
            let read = |kernel: &Value| kernel["global_read"]["bytes"].as_f64().unwrap();
            assert_eq!(counts["kernels"].as_object().unwrap().values().map(read).collect::<Vec<_>>(), [0.0]);
        }
    }
}

/// Latent attention: V is part of K, and all heads share it. Blocks of 64 heads read each byte of K once.
#[test]
fn latent_attention_of_128_heads_reads_k_twice() {
    let (heads, positions, [channels, values]) = (128, 1000, [576, 512]);
    // One multiprocessor: the positions are not split, so that the queries are read once.
    let fixture = CudaFixture::new("CUDAEMU_COUNTS=on\nCUDAEMU_CAPABILITY=8.0\nCUDAEMU_SMS=1");
    let mut b = Builder::new();
    let (q, k) = (b.leaf(F32, [channels, 1, heads, 1]).unwrap(), b.leaf(F16, [channels, positions, 1, 1]).unwrap());
    let row = 2 * channels;
    let v = TensorDesc::strided(F16, [values, positions, 1, 1], [2, row, positions * row, positions * row]).unwrap();
    let v = b.view(k, v, 0).unwrap();
    let op = FlashAttn { scale: 0.04, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
    b.node(op, &[Some(q), Some(k), Some(v)]).unwrap();
    let graph = std::sync::Arc::new(b.build());
    let (buffer, mut queue) = (fixture.buffer(0, graph.slot_sizes()[0] as u64), fixture.queue(0));
    queue.run(&fixture.program(0, &graph), &whole_buffer(&buffer)).unwrap();
    queue.mark().wait(crate::fixture::test_deadline()).unwrap();
    let counts: Value = serde_json::from_str(&fixture.emulator.counts_json()).unwrap();
    let read = counts["kernels"]["flash_attn_latent_f16_576_64"]["global_read"]["bytes"].as_f64().unwrap();
    // A tile of 32 positions repeats the last one.
    let rows = positions.next_multiple_of(32) * row;
    assert_eq!(read, (2 * rows + 4 * channels * heads) as f64);
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// Checks the counters of the kernels that ran, relative to the distinct bytes that they access.
fn check(what: &str, counts: &str) {
    let counts: Value = serde_json::from_str(counts).unwrap();
    let kernels = counts["kernels"].as_object().unwrap();
    assert!(!kernels.is_empty(), "{what}: no kernel ran");
    let sum = |of: &dyn Fn(&Value) -> f64| kernels.values().map(of).sum::<f64>();
    let both = |field: &str| {
        sum(&|kernel| {
            kernel["global_read"][field].as_f64().unwrap() + kernel["global_written"][field].as_f64().unwrap()
        })
    };
    let min_bytes = sum(&|kernel| {
        ["global_read_distinct_bytes", "global_written_distinct_bytes"]
            .map(|f| kernel[f].as_f64().unwrap())
            .iter()
            .sum()
    });
    assert!(
        min_bytes >= f64::from(64 << 20),
        "{what}: the minimum traffic is {min_bytes} bytes, expected at least 64 MiB"
    );
    let (moved, full) = (both("bytes") / min_bytes, both("bytes") / (both("sectors") * SECTOR_BYTES));
    assert!(moved <= 1.05, "{what}: moves {moved:.3} times the minimum number of bytes");
    assert!(full >= 0.95, "{what}: {kernels:?}: only {:.1} % of the sectors' bytes are used", full * 100.0);
}
