//! The device contract on the CPU device: order, points, failures, memory.
mod fallback;
mod forward;
mod host;
#[cfg(target_os = "linux")] // reads /proc/self/smaps
mod read_only;
mod tensors;
mod threads;

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, DeviceError, MemoryBudget, Queue, SourceError, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::tensor::{DType, TensorDesc};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 30;

fn device(threads: usize) -> Arc<CpuDevice> {
    CpuDevice::new("CPU", threads, MathMode::Exact, MEMORY).unwrap()
}

fn test_deadline() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// x = x + x on `n` floats at the start of slot 0.
fn doubling(n: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let desc = b.tensor(x).unwrap().desc;
    let onto = b.view(x, desc, 0).unwrap();
    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
    Arc::new(b.build())
}

/// x = x + y, `nodes` times, on `n` floats each (a multiple of 16), x at the start of slot 0 and y after it.
fn counting(n: usize, nodes: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, y) = (b.leaf(DType::F32, [n, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [n, 1, 1, 1]).unwrap());
    let desc = b.tensor(x).unwrap().desc;
    let mut last = x;
    for _ in 0..nodes {
        let onto = b.view(x, desc, 0).unwrap();
        last = b.node_into(Binary::Add, &[Some(last), Some(y)], onto).unwrap();
    }
    Arc::new(b.build())
}

/// A graph that fails while it runs if its buffer, and so its expert index, holds a value out of range.
fn failing() -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, bias) = (b.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    b.node(Binary::AddId, &[Some(x), Some(bias), Some(ids)]).unwrap();
    Arc::new(b.build())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn upload(queue: &mut dyn Queue, buffer: &Buffer, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(buffer.region(0, bytes.len() as u64).unwrap(), None, UploadSource::Borrowed(&bytes)).unwrap();
}

fn first(queue: &mut dyn Queue, buffer: &Buffer) -> Result<f32, DeviceError> {
    Ok(floats(&queue.download(buffer.region(0, 4)?)?.wait(test_deadline())?)[0])
}

#[test]
fn work_runs_in_submission_order() {
    let (device, budget) = (device(3), MemoryBudget::new(MEMORY));
    let graph = doubling(40_000);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    upload(&mut *queue, &buffer, &[1.0; 40_000]);
    for _ in 0..10 {
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    }
    let early = queue.download(buffer.whole()).unwrap();
    queue.fill(buffer.whole(), 0).unwrap();
    let late = queue.download(buffer.region(0, 160_000).unwrap()).unwrap();
    assert!(floats(&early.wait(test_deadline()).unwrap())[..40_000].iter().all(|&v| v == 1024.0));
    assert!(floats(&late.wait(test_deadline()).unwrap()).iter().all(|&v| v == 0.0));
}

#[test]
fn a_failure_sticks_to_its_queue_only() {
    let (device, budget) = (device(2), MemoryBudget::new(MEMORY));
    let graph = failing();
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let (mut bad, mut good) = (device.queue(&budget).unwrap(), device.queue(&budget).unwrap());
    bad.fill(buffer.whole(), 0xfe).unwrap(); // no valid expert index
    bad.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let expected = |e: &DeviceError| matches!(e, DeviceError::Data { op: OpCode::AddId, .. });
    let point = bad.mark();
    assert!(expected(&point.wait(test_deadline()).unwrap_err()));
    assert!(expected(&first(&mut *bad, &buffer).unwrap_err()));
    assert!(expected(&bad.fill(buffer.whole(), 0).unwrap_err()));
    good.fill(buffer.whole(), 0).unwrap();
    assert_eq!(first(&mut *good, &buffer), Ok(0.0));
}

#[test]
fn a_queue_waits_for_a_point_of_another_queue() {
    let (one, two) = (device(1), device(1));
    let budget = MemoryBudget::new(MEMORY);
    let (a, b) = (one.alloc(4, &budget).unwrap(), two.alloc(4, &budget).unwrap());
    let (mut source, mut target) = (one.queue(&budget).unwrap(), two.queue(&budget).unwrap());
    // The source queue waits for a point that this thread reaches later: the copy must wait too.
    let gate = fanout::device::Timeline::new();
    source.wait(&fanout::device::TimelinePoint::new(&gate, 1)).unwrap();
    upload(&mut *source, &a, &[7.0]);
    let ready = source.mark();
    assert!(target.copy_from(a.whole(), b.whole(), Some(&ready)).unwrap().is_submitted());
    let copied = target.mark();
    source.wait(&copied).unwrap();
    upload(&mut *source, &a, &[8.0]); // write after read
    assert_eq!((ready.poll(), copied.poll()), (Ok(false), Ok(false)));
    gate.advance(1);
    assert_eq!(first(&mut *target, &b), Ok(7.0));
    assert_eq!(first(&mut *source, &a), Ok(8.0));
}

#[test]
fn dropping_a_queue_fails_its_points() {
    let (device, budget) = (device(1), MemoryBudget::new(MEMORY));
    let mut queue = device.queue(&budget).unwrap();
    let buffer = device.alloc(4, &budget).unwrap();
    let gate = fanout::device::Timeline::new();
    queue.wait(&fanout::device::TimelinePoint::new(&gate, 1)).unwrap();
    queue.fill(buffer.whole(), 1).unwrap();
    let point = queue.mark();
    drop(queue);
    gate.advance(1);
    assert_eq!(point.wait(test_deadline()), Err(DeviceError::Ended));
}

#[test]
fn memory_is_reserved_zeroed_and_released() {
    // Buffers up to 256 KiB are charged a power of two.
    const K: u64 = 1 << 10;
    let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1024 * K).unwrap();
    let (small, large) = (MemoryBudget::new(640 * K), MemoryBudget::new(10_240 * K));
    let mut queue = device.queue(&large).unwrap();
    let a = device.alloc(512 * K, &small).unwrap();
    assert_eq!(queue.download(a.whole()).unwrap().wait(test_deadline()).unwrap(), vec![0; 512 << 10]);
    let refused = DeviceError::OutOfMemory { requested: 256 * K, available: 128 * K, limit: 640 * K };
    assert_eq!(device.alloc(200 * K, &small).unwrap_err(), refused);
    let refused = DeviceError::OutOfMemory { requested: 576 * K, available: 512 * K, limit: 1024 * K };
    assert_eq!(device.alloc(576 * K, &large).unwrap_err(), refused);
    assert!(device.alloc(u64::MAX, &large).is_err());
    assert_eq!(device.memory().unwrap().free, 512 * K);
    drop(a);
    queue.mark().wait(test_deadline()).unwrap();
    assert_eq!((device.memory().unwrap().free, small.used(), large.used()), (1024 * K, 0, 0));
    assert_eq!(device.alloc(0, &small).unwrap().bytes(), 0);
}

#[test]
fn invalid_regions_bindings_and_sizes_are_errors() {
    let (device, budget) = (device(1), MemoryBudget::new(MEMORY));
    let graph = doubling(16);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let (buffer, tiny) = (device.alloc(1 << 12, &budget).unwrap(), device.alloc(8, &budget).unwrap());
    let mut queue = device.queue(&budget).unwrap();
    assert!(buffer.region(1 << 12, 1).is_err() && buffer.region(u64::MAX, 2).is_err());
    assert!(buffer.whole().subregion(4000, 97).is_err());
    for bindings in [vec![], vec![tiny.whole()], vec![buffer.whole(), buffer.whole()]] {
        assert!(matches!(queue.run(&program, &bindings.into()), Err(DeviceError::Misuse(_))));
    }
    let misuse = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Misuse(_)));
    assert!(misuse(queue.upload(tiny.whole(), None, UploadSource::Borrowed(&[0; 7]))));
    assert!(misuse(queue.copy_from(tiny.whole(), buffer.whole(), None).map(drop)));
    assert!(queue.run(&program, &Arc::from([buffer.whole()])).is_ok(), "misuse does not stick");
}

#[test]
fn a_writer_fills_in_place_and_its_error_does_not_stick() {
    let (device, budget) = (device(1), MemoryBudget::new(MEMORY));
    let mut queue = device.queue(&budget).unwrap();
    let bytes = 3 << 20;
    let buffer = device.alloc(bytes, &budget).unwrap();
    let mut next = 0u8;
    let mut numbering = |chunk: &mut [u8]| {
        next += 1;
        chunk.fill(next);
        Ok(())
    };
    queue.upload(buffer.whole(), None, UploadSource::Writer(&mut numbering)).unwrap();
    let got = queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap();
    // The writer fills chunks of 1 MiB.
    assert_eq!((got[0], got[1 << 20], got[got.len() - 1]), (1, 2, 3));
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    for region in [buffer.whole(), buffer.region(0, 16).unwrap()] {
        let error = queue.upload(region, None, UploadSource::Writer(&mut broken)).unwrap_err();
        assert!(matches!(&error, DeviceError::Source(why) if why.to_string().contains("cut off")), "{error}");
    }
    assert!(first(&mut *queue, &buffer).is_ok());
}

/// A repacked tensor reads back as it was uploaded, in whole and in parts.
#[test]
fn a_repacked_tensor_reads_back_as_uploaded() {
    for (mode, dtype, ne) in [
        (MathMode::Fast, DType::Q4_0, [512, 1024, 1, 1]),
        (MathMode::Fast, DType::F16, [256, 64, 16, 1]),
        (MathMode::Exact, DType::Q6_K, [256, 2048, 1, 1]),
    ] {
        let (device, budget) = (CpuDevice::new("CPU", 2, mode, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
        let mut queue = device.queue(&budget).unwrap();
        let tensor = TensorDesc::contiguous(dtype, ne).unwrap();
        let buffer = device.alloc(tensor.extent() as u64 + 64, &budget).unwrap();
        let region = buffer.region(64, tensor.extent() as u64).unwrap();
        let mut rng = fastrand::Rng::with_seed(11);
        let mut bytes: Vec<u8> = (0..tensor.extent()).map(|_| rng.u8(..)).collect();
        queue.upload(region.clone(), Some(&tensor), UploadSource::Borrowed(&bytes)).unwrap();
        assert!(queue.download(region.clone()).unwrap().wait(test_deadline()).unwrap() == bytes, "{dtype}");
        bytes.reverse();
        let mut rest = &bytes[..];
        let mut fill = |chunk: &mut [u8]| {
            chunk.copy_from_slice(&rest[..chunk.len()]);
            rest = &rest[chunk.len()..];
            Ok(())
        };
        queue.upload(region.clone(), Some(&tensor), UploadSource::Writer(&mut fill)).unwrap();
        let part = queue.download(region.subregion(12_345, 678).unwrap()).unwrap().wait(test_deadline()).unwrap();
        assert!(part == bytes[12_345..12_345 + 678], "{dtype}");
        assert!(queue.download(region).unwrap().wait(test_deadline()).unwrap() == bytes, "{dtype}");
    }
}

/// Small work runs inline if no work is pending, and in order if some is.
#[test]
fn small_work_stays_in_order_after_pending_work() {
    let (device, budget) = (device(2), MemoryBudget::new(MEMORY));
    let graph = doubling(16);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let (buffer, copy) = (device.alloc(1 << 12, &budget).unwrap(), device.alloc(1 << 12, &budget).unwrap());
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = device.queue(&budget).unwrap();
    for round in 1..=3u8 {
        let deadline = test_deadline();
        loop {
            upload(&mut *queue, &buffer, &[1.0; 16]);
            queue.run_inline(&program, &bindings, Duration::from_secs(60)).unwrap();
            let point = queue.mark();
            if point.poll() == Ok(true) {
                break;
            }
            // Only the thread that ran the round before, and has not returned its turn yet, may keep work from running inline.
            assert!(round > 1 && Some(Instant::now()) < deadline, "all work runs inline");
            assert_eq!(point.wait(deadline), Ok(()));
        }
        assert_eq!(first(&mut *queue, &buffer), Ok(2.0));
        // From here on all work is pending.
        let gate = fanout::device::Timeline::new();
        queue.wait(&fanout::device::TimelinePoint::new(&gate, 1)).unwrap();
        queue.run_inline(&program, &bindings, Duration::from_secs(60)).unwrap();
        let early = queue.download(buffer.region(0, 4).unwrap()).unwrap();
        upload(&mut *queue, &buffer, &[f32::from(round); 16]);
        queue.run(&program, &bindings).unwrap();
        assert!(queue.copy_from(buffer.whole(), copy.whole(), None).unwrap().is_submitted());
        queue.fill(buffer.whole(), 0).unwrap();
        let (late, point) = (queue.download(buffer.region(0, 4).unwrap()).unwrap(), queue.mark());
        assert_eq!(point.poll(), Ok(false));
        gate.advance(1);
        assert_eq!(floats(&early.wait(test_deadline()).unwrap()), [4.0]);
        assert_eq!(floats(&late.wait(test_deadline()).unwrap()), [0.0]);
        assert_eq!(point.wait(test_deadline()), Ok(()));
        assert_eq!(first(&mut *queue, &copy), Ok(2.0 * f32::from(round)));
    }
}

/// A program that exceeds the inline budget continues on a thread of the device at the next node, at any node.
#[test]
fn a_program_beyond_its_inline_budget_continues_on_the_thread() {
    let (n, nodes) = (64_000, 100);
    let (device, budget, graph) = (device(3), MemoryBudget::new(MEMORY), counting(n, nodes));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = device.queue(&budget).unwrap();
    for budget_us in [0, 10, 20, 50, 100, 200, 500, 1000, 5000] {
        upload(&mut *queue, &buffer, &vec![1.0; graph.slot_sizes()[0] / 4]);
        queue.run_inline(&program, &bindings, Duration::from_micros(budget_us)).unwrap();
        let got =
            floats(&queue.download(buffer.region(0, 4 * n as u64).unwrap()).unwrap().wait(test_deadline()).unwrap());
        assert!(got.iter().all(|&v| v == (1 + nodes) as f32), "with an inline budget of {budget_us} us");
    }
}

/// More bytes and commands than may be pending: the submitter blocks, and its source memory may be freed after each call.
#[test]
fn a_full_queue_blocks_its_submitter() {
    let (device, budget) = (device(1), MemoryBudget::new(MEMORY));
    let buffer = device.alloc(1 << 18, &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    let gate = fanout::device::Timeline::new();
    queue.wait(&fanout::device::TimelinePoint::new(&gate, 1)).unwrap();
    let (tx, rx) = mpsc::channel();
    let submitter = std::thread::spawn(move || {
        for i in 0..200u8 {
            queue.upload(buffer.whole(), None, UploadSource::Borrowed(&vec![i; 1 << 18])).unwrap();
            tx.send(i).unwrap();
        }
        let last = queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap();
        assert_eq!(last, vec![199; 1 << 18]);
    });
    for i in 0..16 {
        assert_eq!(rx.recv(), Ok(i), "the queue accepts some commands without blocking");
    }
    assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty), "the submitter blocks on a full queue");
    gate.advance(1);
    submitter.join().unwrap();
}

/// Many queues share one pool, in turns: every result is as if the queue ran alone.
#[test]
fn queues_share_the_pool_in_turns() {
    let (device, budget, n) = (device(3), MemoryBudget::new(MEMORY), 48_000);
    // Two sizes: a run of the graph with 10 nodes is more likely to end within the inline budget of 200 us below.
    let graphs = [counting(n, 100), counting(n, 10)];
    let (tx, rx) = mpsc::channel();
    for seed in 1..=8u8 {
        let (device, budget, tx) = (Arc::clone(&device), Arc::clone(&budget), tx.clone());
        let graph = Arc::clone(&graphs[usize::from(seed % 2)]);
        std::thread::spawn(move || {
            let program = device.prepare(Arc::clone(&graph)).unwrap();
            let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
            let bindings = Arc::from([buffer.whole()]);
            let mut queue = device.queue(&budget).unwrap();
            // y = 1, x = seed.
            upload(&mut *queue, &buffer, &vec![1.0; graph.slot_sizes()[0] / 4]);
            upload(&mut *queue, &buffer, &vec![f32::from(seed); n]);
            for round in 0..20 {
                // Inline, or on a thread of the device after the pending work.
                if round % 4 == 3 {
                    queue.run(&program, &bindings).unwrap();
                } else {
                    queue.run_inline(&program, &bindings, Duration::from_micros(200)).unwrap();
                }
            }
            let got = queue.download(buffer.region(0, 4 * n as u64).unwrap()).unwrap().wait(test_deadline()).unwrap();
            let want = f32::from(seed) + (20 * graph.nodes().len()) as f32;
            tx.send(floats(&got).iter().all(|&v| v == want)).unwrap();
        });
    }
    drop(tx);
    let results: Vec<bool> = rx.iter().collect();
    assert_eq!(results, vec![true; 8]);
}
