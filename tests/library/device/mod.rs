//! The device contract, on the CPU device: order, points, failures, memory.
mod fallback;
mod forward;
mod host;
mod tensors;
mod threads;

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, DeviceError, Queue, Source, SourceError};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::tensor::{DType, TensorDesc};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 30;

fn device(threads: usize) -> Arc<CpuDevice> {
    CpuDevice::new("CPU", threads, Path::Exact, MEMORY).unwrap()
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// x = x + x on `n` floats at the start of slot 0.
fn doubling(n: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let desc = b.tensor(x).unwrap().desc;
    let onto = b.view(x, desc, 0).unwrap();
    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
    Arc::new(b.build().unwrap())
}

/// x = x + y, `nodes` times, on `n` floats each (a multiple of 16), x at the start of slot 0 and y somewhere behind it.
fn counting(n: usize, nodes: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, y) = (b.leaf(DType::F32, [n, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [n, 1, 1, 1]).unwrap());
    let desc = b.tensor(x).unwrap().desc;
    let mut last = x;
    for _ in 0..nodes {
        let onto = b.view(x, desc, 0).unwrap();
        last = b.node_into(Binary::Add, &[Some(last), Some(y)], onto).unwrap();
    }
    Arc::new(b.build().unwrap())
}

/// A graph that finds an expert id out of range while it runs.
fn failing() -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, bias) = (b.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    b.node(Binary::AddId, &[Some(x), Some(bias), Some(ids)]).unwrap();
    Arc::new(b.build().unwrap())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn upload(queue: &mut dyn Queue, buffer: &Buffer, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(buffer.region(0, bytes.len() as u64).unwrap(), None, Source::Borrowed(&bytes)).unwrap();
}

fn first(queue: &mut dyn Queue, buffer: &Buffer) -> Result<f32, DeviceError> {
    Ok(floats(&queue.download(buffer.region(0, 4)?)?.wait(soon())?)[0])
}

#[test]
fn work_runs_in_the_order_submitted() {
    let (device, account) = (device(3), Account::new(MEMORY));
    let graph = doubling(40_000);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
    let mut queue = device.queue(&account).unwrap();
    upload(&mut *queue, &buffer, &[1.0; 40_000]);
    for _ in 0..10 {
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    }
    let early = queue.download(buffer.whole()).unwrap();
    queue.fill(buffer.whole(), 0).unwrap();
    let late = queue.download(buffer.region(0, 160_000).unwrap()).unwrap();
    assert!(floats(&early.wait(soon()).unwrap())[..40_000].iter().all(|&v| v == 1024.0));
    assert!(floats(&late.wait(soon()).unwrap()).iter().all(|&v| v == 0.0));
}

#[test]
fn a_failure_sticks_and_spares_other_queues() {
    let (device, account) = (device(2), Account::new(MEMORY));
    let graph = failing();
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
    let (mut bad, mut good) = (device.queue(&account).unwrap(), device.queue(&account).unwrap());
    bad.fill(buffer.whole(), 0xff).unwrap(); // ids of -1
    bad.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let expected = |e: &DeviceError| matches!(e, DeviceError::Data { op: OpCode::AddId, .. });
    let point = bad.mark();
    assert!(expected(&point.wait(soon()).unwrap_err()));
    assert!(expected(&first(&mut *bad, &buffer).unwrap_err()));
    assert!(expected(&bad.fill(buffer.whole(), 0).unwrap_err()));
    good.fill(buffer.whole(), 0).unwrap();
    assert_eq!(first(&mut *good, &buffer), Ok(0.0));
}

#[test]
fn a_queue_waits_for_anothers_point() {
    let (one, two) = (device(1), device(1));
    let account = Account::new(MEMORY);
    let (a, b) = (one.alloc(4, &account).unwrap(), two.alloc(4, &account).unwrap());
    let (mut source, mut target) = (one.queue(&account).unwrap(), two.queue(&account).unwrap());
    // The source is held up by a point that only this thread releases: the copy must wait for it.
    let gate = fanout::device::Timeline::new();
    source.wait(&fanout::device::Point::new(&gate, 1)).unwrap();
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
fn a_dropped_queue_releases_whoever_waits_for_it() {
    let (device, account) = (device(1), Account::new(MEMORY));
    let mut queue = device.queue(&account).unwrap();
    let buffer = device.alloc(4, &account).unwrap();
    let gate = fanout::device::Timeline::new();
    queue.wait(&fanout::device::Point::new(&gate, 1)).unwrap();
    queue.fill(buffer.whole(), 1).unwrap();
    let point = queue.mark();
    drop(queue);
    gate.advance(1);
    assert_eq!(point.wait(soon()), Err(DeviceError::Ended));
}

#[test]
fn memory_is_charged_zeroed_and_given_back() {
    let device = CpuDevice::new("CPU", 1, Path::Exact, 1000).unwrap();
    let (small, large) = (Account::new(600), Account::new(10_000));
    let mut queue = device.queue(&large).unwrap();
    let a = device.alloc(500, &small).unwrap();
    assert_eq!(queue.download(a.whole()).unwrap().wait(soon()).unwrap(), vec![0; 500]);
    assert!(matches!(device.alloc(200, &small), Err(DeviceError::OutOfMemory { asked: 200, left: 100, limit: 600 })));
    assert!(matches!(device.alloc(501, &large), Err(DeviceError::OutOfMemory { asked: 501, left: 500, limit: 1000 })));
    assert!(device.alloc(u64::MAX, &large).is_err());
    assert_eq!(device.memory().unwrap().free, 500);
    drop(a);
    queue.mark().wait(soon()).unwrap();
    assert_eq!((device.memory().unwrap().free, small.used(), large.used()), (1000, 0, 0));
    assert_eq!(device.alloc(0, &small).unwrap().bytes(), 0);
}

#[test]
fn bad_handles_are_errors() {
    let (device, account) = (device(1), Account::new(MEMORY));
    let graph = doubling(16);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let (buffer, tiny) = (device.alloc(1 << 12, &account).unwrap(), device.alloc(8, &account).unwrap());
    let mut queue = device.queue(&account).unwrap();
    assert!(buffer.region(1 << 12, 1).is_err() && buffer.region(u64::MAX, 2).is_err());
    assert!(buffer.whole().part(4000, 97).is_err());
    for bindings in [vec![], vec![tiny.whole()], vec![buffer.whole(), buffer.whole()]] {
        assert!(matches!(queue.run(&program, &bindings.into()), Err(DeviceError::Misuse(_))));
    }
    let misuse = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Misuse(_)));
    assert!(misuse(queue.upload(tiny.whole(), None, Source::Borrowed(&[0; 7]))));
    assert!(misuse(queue.copy_from(tiny.whole(), buffer.whole(), None).map(drop)));
    assert!(queue.run(&program, &Arc::from([buffer.whole()])).is_ok(), "misuse does not stick");
}

#[test]
fn a_writer_fills_in_place_and_its_error_does_not_stick() {
    let (device, account) = (device(1), Account::new(MEMORY));
    let mut queue = device.queue(&account).unwrap();
    let bytes = 3 << 20;
    let buffer = device.alloc(bytes, &account).unwrap();
    let mut next = 0u8;
    let mut counting = |piece: &mut [u8]| {
        next += 1;
        piece.fill(next);
        Ok(())
    };
    queue.upload(buffer.whole(), None, Source::Writer(&mut counting)).unwrap();
    let got = queue.download(buffer.whole()).unwrap().wait(soon()).unwrap();
    assert_eq!((got[0], got[1 << 20], got[got.len() - 1]), (1, 2, 3));
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    for region in [buffer.whole(), buffer.region(0, 16).unwrap()] {
        let error = queue.upload(region, None, Source::Writer(&mut broken)).unwrap_err();
        assert!(matches!(&error, DeviceError::Source(why) if why.to_string().contains("cut off")), "{error}");
    }
    assert!(first(&mut *queue, &buffer).is_ok());
}

/// However a device holds a tensor that it was told of, every part of it reads as it was sent.
#[test]
fn a_whole_tensor_reads_back_as_any_bytes() {
    for (path, dtype, ne) in [
        (Path::Fast, DType::Q4_0, [512, 1024, 1, 1]),
        (Path::Fast, DType::F16, [256, 64, 16, 1]),
        (Path::Exact, DType::Q6_K, [256, 2048, 1, 1]),
    ] {
        let (device, account) = (CpuDevice::new("CPU", 2, path, MEMORY).unwrap(), Account::new(MEMORY));
        let mut queue = device.queue(&account).unwrap();
        let tensor = TensorDesc::contiguous(dtype, ne).unwrap();
        let buffer = device.alloc(tensor.extent() as u64 + 64, &account).unwrap();
        let region = buffer.region(64, tensor.extent() as u64).unwrap();
        let mut rng = fastrand::Rng::with_seed(11);
        let mut bytes: Vec<u8> = (0..tensor.extent()).map(|_| rng.u8(..)).collect();
        queue.upload(region.clone(), Some(&tensor), Source::Borrowed(&bytes)).unwrap();
        assert!(queue.download(region.clone()).unwrap().wait(soon()).unwrap() == bytes, "{dtype}");
        bytes.reverse();
        let mut rest = &bytes[..];
        let mut fill = |piece: &mut [u8]| {
            piece.copy_from_slice(&rest[..piece.len()]);
            rest = &rest[piece.len()..];
            Ok(())
        };
        queue.upload(region.clone(), Some(&tensor), Source::Writer(&mut fill)).unwrap();
        let part = queue.download(region.part(12_345, 678).unwrap()).unwrap().wait(soon()).unwrap();
        assert!(part == bytes[12_345..12_345 + 678], "{dtype}");
        assert!(queue.download(region).unwrap().wait(soon()).unwrap() == bytes, "{dtype}");
    }
}

/// Small work is done at once when nothing is before it, and in its turn when something is.
#[test]
fn small_work_keeps_its_place_behind_pending_work() {
    let (device, account) = (device(2), Account::new(MEMORY));
    let graph = doubling(16);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let (buffer, copy) = (device.alloc(1 << 12, &account).unwrap(), device.alloc(1 << 12, &account).unwrap());
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = device.queue(&account).unwrap();
    for round in 1..=3u8 {
        upload(&mut *queue, &buffer, &[1.0; 16]);
        queue.run_inline_or_submit(&program, &bindings, Duration::from_secs(60)).unwrap();
        let point = queue.mark();
        assert_eq!(point.poll(), Ok(true), "all of it was done here");
        assert_eq!(first(&mut *queue, &buffer), Ok(2.0));
        // From here on everything waits.
        let gate = fanout::device::Timeline::new();
        queue.wait(&fanout::device::Point::new(&gate, 1)).unwrap();
        queue.run_inline_or_submit(&program, &bindings, Duration::from_secs(60)).unwrap();
        let early = queue.download(buffer.region(0, 4).unwrap()).unwrap();
        upload(&mut *queue, &buffer, &[f32::from(round); 16]);
        queue.run(&program, &bindings).unwrap();
        assert!(queue.copy_from(buffer.whole(), copy.whole(), None).unwrap().is_submitted());
        queue.fill(buffer.whole(), 0).unwrap();
        let (late, point) = (queue.download(buffer.region(0, 4).unwrap()).unwrap(), queue.mark());
        assert_eq!(point.poll(), Ok(false));
        gate.advance(1);
        assert_eq!(floats(&early.wait(soon()).unwrap()), [4.0]);
        assert_eq!(floats(&late.wait(soon()).unwrap()), [0.0]);
        assert_eq!(point.wait(soon()), Ok(()));
        assert_eq!(first(&mut *queue, &copy), Ok(2.0 * f32::from(round)));
    }
}

/// A program whose caller has no patience is handed over between two nodes, wherever that is.
#[test]
fn a_program_goes_on_where_its_caller_left_it() {
    let (n, nodes) = (64_000, 100);
    let (device, account, graph) = (device(3), Account::new(MEMORY), counting(n, nodes));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = device.queue(&account).unwrap();
    for patience in [0, 10, 20, 50, 100, 200, 500, 1000, 5000] {
        upload(&mut *queue, &buffer, &vec![1.0; graph.slot_sizes()[0] / 4]);
        queue.run_inline_or_submit(&program, &bindings, Duration::from_micros(patience)).unwrap();
        let got = floats(&queue.download(buffer.region(0, 4 * n as u64).unwrap()).unwrap().wait(soon()).unwrap());
        assert!(got.iter().all(|&v| v == (1 + nodes) as f32), "after {patience} us");
    }
}

/// More bytes and commands than may wait: the submitter waits for room, and what it frees is not lost.
#[test]
fn a_full_queue_makes_its_submitter_wait() {
    let (device, account) = (device(1), Account::new(MEMORY));
    let buffer = device.alloc(1 << 18, &account).unwrap();
    let mut queue = device.queue(&account).unwrap();
    let gate = fanout::device::Timeline::new();
    queue.wait(&fanout::device::Point::new(&gate, 1)).unwrap();
    let (tx, rx) = mpsc::channel();
    let submitter = std::thread::spawn(move || {
        for i in 0..200u8 {
            queue.upload(buffer.whole(), None, Source::Borrowed(&vec![i; 1 << 18])).unwrap();
            tx.send(i).unwrap();
        }
        let last = queue.download(buffer.whole()).unwrap().wait(soon()).unwrap();
        assert_eq!(last, vec![199; 1 << 18]);
    });
    for i in 0..16 {
        assert_eq!(rx.recv(), Ok(i), "there is room for some");
    }
    assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty), "and then there is none");
    gate.advance(1);
    submitter.join().unwrap();
}

/// Many queues on one pool, graph by graph: every result is as if it had run alone.
#[test]
fn sessions_share_the_pool_in_turn() {
    let (device, account, n) = (device(3), Account::new(MEMORY), 48_000);
    // The small one need not wait for a turn.
    let graphs = [counting(n, 100), counting(n, 10)];
    let (tx, rx) = mpsc::channel();
    for seed in 1..=8u8 {
        let (device, account, tx) = (Arc::clone(&device), Arc::clone(&account), tx.clone());
        let graph = Arc::clone(&graphs[usize::from(seed % 2)]);
        std::thread::spawn(move || {
            let program = device.prepare(Arc::clone(&graph)).unwrap();
            let buffer = device.alloc(graph.slot_sizes()[0] as u64, &account).unwrap();
            let bindings = Arc::from([buffer.whole()]);
            let mut queue = device.queue(&account).unwrap();
            upload(&mut *queue, &buffer, &vec![1.0; graph.slot_sizes()[0] / 4]);
            upload(&mut *queue, &buffer, &vec![f32::from(seed); n]);
            for round in 0..20 {
                // Here, or on the queue's thread after what is there already.
                if round % 4 == 3 {
                    queue.run(&program, &bindings).unwrap();
                } else {
                    queue.run_inline_or_submit(&program, &bindings, Duration::from_micros(200)).unwrap();
                }
            }
            let got = queue.download(buffer.region(0, 4 * n as u64).unwrap()).unwrap().wait(soon()).unwrap();
            let want = f32::from(seed) + (20 * graph.nodes().len()) as f32;
            tx.send(floats(&got).iter().all(|&v| v == want)).unwrap();
        });
    }
    drop(tx);
    let results: Vec<bool> = rx.iter().collect();
    assert_eq!(results, vec![true; 8]);
}
