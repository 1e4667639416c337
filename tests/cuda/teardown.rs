//! Teardown: devices, queues and points can be dropped in any order and on any thread, without leaks and without losing
//! failures.

use crate::fixture::{CudaFixture, DOUBLE, MEMORY, chain, test_deadline, whole_buffer};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{CopyOutcome, Device, DeviceError, MemoryBudget, Timeline, TimelinePoint, UploadSource};
use fanout::fallback::Fallback;
use fanout::graph::Builder;
use fanout::ops::OpCode;
use fanout::ops::rows::Rows;
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;

/// A queue that has copied from another device keeps that device's context alive, and releases it when the queue is dropped.
#[test]
fn a_source_device_may_be_dropped_before_the_queue_that_copied_from_it() {
    for links in ["all", "none"] {
        let mut fixture = CudaFixture::new(&format!("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS={links}"));
        let (from, to, mut queue) = (fixture.buffer(0, 64), fixture.buffer(1, 64), fixture.queue(1));
        assert_eq!(queue.copy_from(from.whole(), to.whole(), None), Ok(CopyOutcome::Submitted));
        assert_eq!(queue.download(to.whole()).unwrap().wait(test_deadline()), Ok(vec![0; 64]));
        drop(from);
        drop(fixture.devices.remove(0));
        drop((queue, to));
        assert!(fixture.drop_devices(), "peers {links}: a context was not released in time");
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "peers {links}");
    }
}

/// The last point, pending read or program may be dropped on a thread that has no current CUDA context.
#[test]
fn the_last_handles_may_be_dropped_on_any_thread() {
    let mut fixture = CudaFixture::new("");
    let (program, buffer, mut queue) =
        (fixture.program(0, &chain(16, &[DOUBLE])), fixture.buffer(0, 256), fixture.queue(0));
    // A large download, and a program with a graph.
    let large = fixture.buffer(0, 3 << 20);
    let ticket = queue.download(large.whole()).unwrap();
    (0..3).for_each(|_| queue.run(&program, &whole_buffer(&buffer)).unwrap());
    let point = queue.mark();
    point.wait(test_deadline()).unwrap();
    drop((queue, buffer, large));
    std::thread::spawn(move || drop((program, ticket, point))).join().unwrap();
    assert!(fixture.drop_devices(), "the context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// A failed queue also fails the queues that wait for it on the device, so that its incomplete results are not used.
#[test]
fn a_failure_reaches_the_queues_that_waited() {
    let mut b = Builder::new();
    let table = b.leaf(DType::F32, [16, 4, 1, 1]).unwrap();
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
    let rows = Arc::new(b.build());
    let id = rows.tensor(ids).unwrap().place.unwrap().offset as u64;
    for links in ["all", "none"] {
        let fixture = CudaFixture::new(&format!("CUDAEMU_DEVICES=3\nCUDAEMU_PEERS={links}"));
        let buffers = [0, 1, 2].map(|device| fixture.buffer(device, rows.slot_sizes()[0] as u64));
        let mut queues = [0, 1, 2].map(|device| fixture.queue(device));
        let program = fixture.program(0, &rows);
        for (round, bad) in [(0, 0u8), (1, 3), (2, 4)] {
            let place = buffers[0].region(id, 4).unwrap();
            queues[0].upload(place, None, UploadSource::Borrowed(&[bad, 0, 0, 0])).unwrap();
            // The gate blocks all work until everything is submitted.
            let gate = Timeline::new();
            queues[0].wait(&TimelinePoint::new(&gate, 1)).unwrap();
            queues[0].run(&program, &whole_buffer(&buffers[0])).unwrap();
            for to in [1, 2] {
                let ready = queues[to - 1].mark();
                let (from, here) = (buffers[to - 1].whole(), buffers[to].whole());
                assert_eq!(queues[to].copy_from(from, here, Some(&ready)), Ok(CopyOutcome::Submitted));
                let copied = queues[to].mark();
                queues[to - 1].wait(&copied).unwrap();
            }
            let ticket = queues[2].download(buffers[2].whole()).unwrap();
            gate.advance(1);
            // No thread polls the first two queues; the failure must still reach the third.
            let got = ticket.wait(test_deadline());
            if round < 2 {
                assert!(got.is_ok(), "{links}: {got:?}");
            } else {
                let data = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Data { op: OpCode::GetRows, .. }));
                assert!(data(got.map(drop)), "{links}");
                assert!(queues.iter_mut().all(|queue| data(queue.mark().wait(test_deadline()))), "{links}");
            }
        }
    }
}

/// Queues that wait for each other do not keep each other's devices alive after they are dropped.
#[test]
fn queues_that_wait_for_each_other_are_freed() {
    let mut fixture = CudaFixture::new("CUDAEMU_DEVICES=2");
    {
        let mut queues = [fixture.queue(0), fixture.queue(1)];
        for _ in 0..3 {
            for (one, other) in [(0, 1), (1, 0)] {
                let buffer = fixture.buffer(one, 64);
                queues[one].fill(buffer.whole(), 1).unwrap();
                let point = queues[one].mark();
                queues[other].wait(&point).unwrap();
            }
        }
    }
    assert!(fixture.drop_devices(), "a context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// Queues that are dropped while their work waits do not have a thread each.
#[cfg(target_os = "linux")]
#[test]
fn dropped_queues_of_a_device_share_one_thread() {
    let mut fixture = CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_HANG_AT=1@0");
    let (program, mut busy) = (fixture.program(0, &chain(16, &[DOUBLE])), fixture.queue(0));
    busy.run(&program, &whole_buffer(&fixture.buffer(0, 256))).unwrap();
    let point = busy.mark();
    for _ in 0..20 {
        let mut queue = fixture.queue(1);
        queue.wait(&point).unwrap();
        queue.fill(fixture.buffer(1, 64).whole(), 1).unwrap();
    }
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("cuda-deferred")).count()
    };
    // A thread sets its name when it starts.
    while threads() == 0 {
        std::thread::yield_now();
    }
    // Freed memory has started one for the other device.
    assert!(threads() <= 2);
    fixture.emulator.end_hung_launches();
    drop((busy, program, point));
    assert!(fixture.drop_devices(), "a context was not released in time");
    assert_eq!(fixture.budget.used(), 0);
}

/// The thread of a fallback queue that is dropped is in a call of the GPU's queue, which holds back as many uploads as it may.
#[test]
fn dropping_a_fallback_queue_ends_an_upload_of_its_thread() {
    const UPLOAD: usize = 256 << 10;
    let mut fixture = CudaFixture::new("");
    // The GPU has no kernel for a misaligned row.
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [64, 1, 1, 1]).unwrap();
    let view = b.view(x, TensorDesc::contiguous(DType::F32, [4, 1, 1, 1]).unwrap(), 2).unwrap();
    b.node(DOUBLE, &[Some(view)]).unwrap();
    let cpu = CpuDevice::new("CPU0", 1, MathMode::Exact, MEMORY).unwrap();
    let device = Fallback::new(Arc::clone(&fixture.devices[0]) as Arc<dyn Device>, cpu);
    let program = device.prepare(Arc::new(b.build())).unwrap();
    let budget = MemoryBudget::new(2 << 20);
    let (buffer, mut queue) = (fixture.buffer(0, UPLOAD as u64), device.queue(&budget).unwrap());
    let bindings = whole_buffer(&fixture.buffer(0, program.graph().slot_sizes()[0] as u64));
    let (gate, never) = (Timeline::new(), Timeline::new());
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &bindings).unwrap();
    queue.wait(&TimelinePoint::new(&never, 1)).unwrap();
    for _ in 0..10 {
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[1; UPLOAD])).unwrap();
    }
    gate.advance(1);
    // The bytes of held uploads are charged. The next upload waits for those before.
    while budget.used() + UPLOAD as u64 <= budget.limit() {
        std::thread::yield_now();
    }
    drop((queue, bindings, buffer, program, device));
    assert!(fixture.drop_devices(), "the context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}
