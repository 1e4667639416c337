//! Scratch memory of queues: programs of several sizes share it.

use crate::fixture::{CudaFixture, MEMORY, test_deadline, whole_buffer};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, Program, Queue, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::rows::Rows;
use fanout::tensor::DType;
use std::sync::Arc;

/// A SET_ROWS by so many lists of 33 ids, each of which has a hash table in scratch memory; and the memory before the run.
fn scattered(lists: usize) -> (Arc<Graph>, Vec<u8>) {
    let mut b = Builder::new();
    let rows = b.leaf(DType::F32, [1, 33, lists, 1]).unwrap();
    let ids = b.leaf(DType::I64, [33, lists, 1, 1]).unwrap();
    let table = b.leaf(DType::F32, [1, 40, lists, 1]).unwrap();
    let onto = b.view(table, b.tensor(table).unwrap().desc, 0).unwrap();
    b.node_into(Rows::SetRows, &[Some(rows), Some(ids), Some(table)], onto).unwrap();
    let graph = b.build();
    let mut memory: Vec<u8> = (0..graph.slot_sizes()[0]).map(|i| i as u8).collect();
    let at = graph.tensor(ids).unwrap().place.unwrap().offset;
    for (i, id) in memory[at..].chunks_exact_mut(8).take(33 * lists).enumerate() {
        id.copy_from_slice(&((i * i % 37) as u64).to_le_bytes());
    }
    (Arc::new(graph), memory)
}

fn run(queue: &mut dyn Queue, program: &Program, buffer: &Buffer, memory: &[u8]) -> Vec<u8> {
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(memory)).unwrap();
    queue.run(program, &whole_buffer(buffer)).unwrap();
    queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap()
}

/// The larger scratch memory replaces the smaller one, which is freed once its work is done. Another queue gets what was freed.
#[test]
fn two_sizes_in_turn_use_no_freed_scratch() {
    let fixture = CudaFixture::new("");
    let cpu: Arc<dyn Device> = CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap();
    let cases = [1, 2048].map(|lists| {
        let (graph, memory) = scattered(lists);
        let buffer = cpu.alloc(memory.len() as u64, &fixture.budget).unwrap();
        let program = cpu.prepare(Arc::clone(&graph)).unwrap();
        let want = run(&mut *cpu.queue(&fixture.budget).unwrap(), &program, &buffer, &memory);
        (fixture.program(0, &graph), memory, want)
    });
    for _ in 0..2 {
        let mut queues = [fixture.queue(0), fixture.queue(0)];
        for turn in 0..6 {
            let (program, memory, want) = &cases[turn % 2];
            let buffer = fixture.buffer(0, memory.len() as u64);
            assert!(run(&mut *queues[turn / 3], program, &buffer, memory) == *want, "turn {turn}");
        }
    }
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}
