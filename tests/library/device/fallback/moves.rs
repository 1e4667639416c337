//! Copies between primary and secondary device: only the needed bytes.

use super::super::{floats, test_deadline};
use super::{ROW, in_place, leaf, node, pair, region, rows, square, sum};
use fanout::device::{Device, UploadSource};
use fanout::graph::{Builder, TensorId};
use fanout::ops::OpCode::{self, Add, Cpy, SetRows, Sqr};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;

/// Graphs with one segment of unsupported nodes copy the minimal number of bytes.
#[test]
fn only_needed_bytes_are_copied() {
    type BuildGraph = fn(&mut Builder) -> TensorId;
    let row = 64u64;
    let table: &[(&str, BuildGraph, &[OpCode], u64, u64)] = &[
        ("two sources", |b| sum(b), &[Add], 2 * row, row),
        (
            "a source read twice",
            |b| {
                let x = leaf(b);
                node(b, Binary::Add, &[x, x])
            },
            &[Add],
            row,
            row,
        ),
        (
            "a result that is read by the next node and by a later node",
            |b| {
                let s = sum(b);
                square(b, s)
            },
            &[Add, Sqr],
            2 * row,
            2 * row,
        ),
        (
            "a result read by the next node only",
            |b| {
                let s = sum(b);
                b.set_use_count(s, 1).unwrap();
                square(b, s)
            },
            &[Add, Sqr],
            2 * row,
            row,
        ),
        (
            "a result with a reader outside of the graph",
            |b| {
                let s = sum(b);
                b.set_use_count(s, 2).unwrap();
                square(b, s)
            },
            &[Add, Sqr],
            2 * row,
            2 * row,
        ),
        (
            "in place",
            |b| {
                let x = leaf(b);
                in_place(b, x)
            },
            &[Sqr],
            row,
            row,
        ),
        (
            "twice in place",
            |b| {
                let x = leaf(b);
                let y = in_place(b, x);
                in_place(b, y)
            },
            &[Sqr],
            row,
            row,
        ),
        (
            "in place on shared memory, read by the next node only",
            |b| {
                let x = leaf(b);
                let y = in_place(b, x);
                b.set_use_count(y, 1).unwrap();
                square(b, y)
            },
            &[Sqr],
            row,
            2 * row,
        ),
        (
            "a part of a computed result",
            |b| {
                let s = sum(b);
                let half = b.view(s, TensorDesc::contiguous(DType::F32, [8, 1, 1, 1]).unwrap(), 32).unwrap();
                square(b, half)
            },
            &[Add, Sqr],
            2 * row,
            row + row / 2,
        ),
        (
            "a destination with gaps",
            |b| {
                let x = b.leaf(DType::F32, [4, 8, 1, 1]).unwrap();
                let desc = TensorDesc::strided(DType::F32, [4, 8, 1, 1], [4, 64, 512, 512]).unwrap();
                let into = b.leaf_with_desc(desc).unwrap();
                let onto = b.view(into, desc, 0).unwrap();
                b.node_into(CopyOp::Cpy, &[Some(x), Some(into)], onto).unwrap()
            },
            &[Cpy],
            128 + 464,
            464,
        ),
        (
            "a dense part of a tensor",
            |b| {
                let (x, cache) = (leaf(b), b.leaf(DType::F32, [16, 8, 1, 1]).unwrap());
                let desc = TensorDesc::contiguous(DType::F32, ROW).unwrap();
                let into = b.view(cache, desc, 128).unwrap();
                let onto = b.view(cache, desc, 128).unwrap();
                b.node_into(CopyOp::Cpy, &[Some(x), Some(into)], onto).unwrap()
            },
            &[Cpy],
            row,
            row,
        ),
        ("rows of a cache", |b| rows(b), &[SetRows], 2 * row + 8 * row + 16, 8 * row),
    ];
    for &(what, make, refused, down, up) in table {
        let mut b = Builder::new();
        make(&mut b);
        let graph = Arc::new(b.build());
        let pair = pair(refused);
        let program = pair.device.prepare(Arc::clone(&graph)).unwrap();
        let buffer = pair.buffer(graph.slot_sizes()[0]);
        let mut queue = pair.queue();
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        queue.mark().wait(test_deadline()).unwrap();
        assert_eq!(pair.primary.take_transferred_bytes(), (down, up), "{what}: bytes from and to the primary");
        assert_eq!(pair.secondary.take_transferred_bytes(), (up, down), "{what}: bytes from and to the secondary");
        let nodes: u64 = pair.device.secondary_counts().iter().map(|&(_, n)| n).sum();
        assert_eq!(nodes, graph.nodes().len() as u64, "{what}");
    }
}

/// Operands larger than all chunks in flight, and not a multiple of the chunk size.
#[test]
fn large_operands_are_copied_in_chunks() {
    let n = 2_500_001;
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let y = square(&mut b, x);
    let graph = Arc::new(b.build());
    let pair = pair(&[Sqr]);
    let program = pair.device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = pair.buffer(graph.slot_sizes()[0]);
    let mut queue = pair.queue();
    let bytes: Vec<u8> = (0..n).flat_map(|i| ((i % 4093) as f32).to_le_bytes()).collect();
    queue.upload(region(&graph, &buffer, x), None, UploadSource::Borrowed(&bytes)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let got = floats(&queue.download(region(&graph, &buffer, y)).unwrap().wait(test_deadline()).unwrap());
    let wrong = (0..n).find(|i| got[*i] != ((i % 4093) as f32).powi(2));
    assert_eq!((got.len(), wrong), (n, None));
}
