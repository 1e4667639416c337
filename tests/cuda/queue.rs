//! Contract of CUDA queues and buffers: order, points, failures, memory accounting, and graph replay of repeated programs.

use crate::fixture::{
    COSTLY, CudaFixture, DOUBLE, INCREMENT, MEMORY, chain, read, test_deadline, upload, whole_buffer,
};
use fanout::cuda::{CudaDevice, CudaOptions};
use fanout::device::{
    Buffer, CompletionSource, CopyOutcome, Device, DeviceError, MemoryBudget, Queue, SourceError, Timeline,
    TimelinePoint, UploadSource,
};
use fanout::graph::Builder;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::tensor::{DType, TensorDesc};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first run launches kernel by kernel, the second builds a CUDA graph, and every later run replays it with one call.
#[test]
fn a_repeated_program_is_one_graph_launch() {
    let fixture = CudaFixture::new("");
    {
        let graph = chain(64, &[INCREMENT; 10]);
        let (program, buffer, other) =
            (fixture.program(0, &graph), fixture.buffer(0, 1 << 10), fixture.buffer(0, 1 << 10));
        let (bindings, others) = (whole_buffer(&buffer), whole_buffer(&other));
        let mut queue = fixture.queue(0);
        queue.run(&program, &bindings).unwrap();
        assert_eq!((fixture.driver_calls("cuLaunchKernel"), fixture.driver_calls("cuGraphLaunch")), (10, 0));
        for round in 1..=6 {
            queue.run(&program, &bindings).unwrap();
            assert_eq!((fixture.driver_calls("cuLaunchKernel"), fixture.driver_calls("cuGraphLaunch")), (10, round));
        }
        assert_eq!(read(&mut *queue, &buffer.whole(), 2).unwrap(), [70.0; 2]);
        assert_eq!(fixture.driver_calls("cuGraphAddKernelNode_v2"), 10);
        // Other addresses have a separate graph; the two graphs do not affect each other.
        for round in 1..=4 {
            queue.run(&program, &others).unwrap();
            queue.run(&program, &bindings).unwrap();
            assert_eq!(read(&mut *queue, &other.whole(), 1).unwrap(), [10.0 * round as f32]);
        }
        assert_eq!((fixture.driver_calls("cuLaunchKernel"), fixture.driver_calls("cuGraphLaunch")), (20, 6 + 4 + 3));
        assert_eq!(read(&mut *queue, &buffer.whole(), 1).unwrap(), [110.0]);
    }
    let mut fixture = fixture;
    fixture.devices.clear();
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "the emulator reports faults or leaks");
}

#[test]
fn bytes_of_every_size_arrive() {
    let fixture = CudaFixture::new("CUDAEMU_SEED=3");
    let mut queue = fixture.queue(0);
    let mut rng = fastrand::Rng::with_seed(5);
    for n in [1, 3, 64, 4096, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, 5 << 20] {
        let (buffer, offset) = (fixture.buffer(0, n + 7), 7);
        let bytes: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
        let region = buffer.region(offset, n).unwrap();
        queue.upload(region.clone(), None, UploadSource::Borrowed(&bytes)).unwrap();
        assert!(queue.download(region.clone()).unwrap().wait(test_deadline()).unwrap() == bytes, "{n} borrowed bytes");
        let mut rest = &bytes[..];
        let mut fill = |chunk: &mut [u8]| {
            chunk.copy_from_slice(&rest[rest.len() - chunk.len()..]);
            rest = &rest[..rest.len() - chunk.len()];
            Ok(())
        };
        queue.upload(region.clone(), None, UploadSource::Writer(&mut fill)).unwrap();
        let got = queue.download(region).unwrap().wait(test_deadline()).unwrap();
        assert!(
            got.len() as u64 == n && got[..1] == bytes[bytes.len() - got.len().min(512 << 10)..][..1],
            "{n} written"
        );
        assert_eq!(queue.download(buffer.region(0, offset).unwrap()).unwrap().wait(test_deadline()).unwrap(), [0; 7]);
    }
    assert_eq!(
        queue.download(fixture.buffer(0, 8).region(8, 0).unwrap()).unwrap().wait(test_deadline()),
        Ok(Vec::new())
    );
}

/// A completion source that reaches its point at the second poll.
#[derive(Debug, Default)]
struct ReachedOnSecondPoll(AtomicBool);

impl CompletionSource for ReachedOnSecondPoll {
    fn poll(&self, timeline: &Timeline) {
        if self.0.swap(true, Ordering::Relaxed) {
            timeline.advance(1);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A thread of the device polls a point that notifies nobody.
#[test]
fn points_that_need_polling_are_polled() {
    let fixture = CudaFixture::new("");
    let (mut queue, buffer) = (fixture.queue(0), fixture.buffer(0, 64));
    queue.wait(&TimelinePoint::new(&Timeline::with_source(Arc::<ReachedOnSecondPoll>::default()), 1)).unwrap();
    queue.fill(buffer.whole(), 3).unwrap();
    assert_eq!(queue.download(buffer.whole()).unwrap().wait(test_deadline()), Ok(vec![3; 64]));
}

/// Many consecutive uploads: pinned memory is used again only after the copies out of it.
#[test]
fn staging_memory_is_reused_only_after_its_copy() {
    for seed in 0..10 {
        let fixture = CudaFixture::new(&format!("CUDAEMU_SEED={seed}"));
        let (mut queue, buffer) = (fixture.queue(0), fixture.buffer(0, 40 << 17));
        for k in 0..40u8 {
            queue
                .upload(
                    buffer.region(u64::from(k) << 17, 1 << 17).unwrap(),
                    None,
                    UploadSource::Borrowed(&vec![k; 1 << 17]),
                )
                .unwrap();
        }
        let got = queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap();
        assert!(got.chunks(1 << 17).zip(0..).all(|(part, k)| part.iter().all(|&b| b == k)), "seed {seed}");
    }
}

#[test]
fn fills_and_copies_keep_their_order() {
    for seed in 0..10 {
        let fixture = CudaFixture::new(&format!("CUDAEMU_SEED={seed}"));
        let (mut queue, a, b) = (fixture.queue(0), fixture.buffer(0, 64), fixture.buffer(0, 64));
        let bytes: Vec<u8> = (0..64).collect();
        queue.upload(a.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
        assert_eq!(queue.copy_from(a.whole(), b.whole(), None), Ok(CopyOutcome::Submitted));
        queue.fill(a.region(8, 8).unwrap(), 0xee).unwrap();
        // Overlapping copies, in both directions.
        assert_eq!(
            queue.copy_from(b.region(0, 40).unwrap(), b.region(8, 40).unwrap(), None),
            Ok(CopyOutcome::Submitted)
        );
        assert_eq!(
            queue.copy_from(b.region(16, 40).unwrap(), b.region(4, 40).unwrap(), None),
            Ok(CopyOutcome::Submitted)
        );
        assert_eq!(queue.copy_from(b.whole(), b.whole(), None), Ok(CopyOutcome::Submitted));
        let mut want = bytes.clone();
        want.copy_within(0..40, 8);
        want.copy_within(16..56, 4);
        assert_eq!(queue.download(b.whole()).unwrap().wait(test_deadline()).unwrap(), want);
        let mut want = bytes;
        want[8..16].fill(0xee);
        assert_eq!(queue.download(a.whole()).unwrap().wait(test_deadline()).unwrap(), want);
    }
}

/// Work behind a point of another kind of queue is held back; the submitting thread does not block.
#[test]
fn a_stream_waits_for_host_points() {
    let fixture = CudaFixture::new("");
    let (program, buffer) = (fixture.program(0, &chain(16, &[DOUBLE])), fixture.buffer(0, 256));
    let (bindings, region) = (whole_buffer(&buffer), buffer.whole());
    let mut queue = fixture.queue(0);
    for round in 0..1100 {
        let gate = Timeline::new();
        upload(&mut *queue, &region, &[1.0]).unwrap();
        queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        queue.run(&program, &bindings).unwrap();
        let point = queue.mark();
        if round % 300 == 0 {
            assert_eq!(point.poll(), Ok(false));
        }
        gate.advance(1);
        if round % 100 == 0 {
            assert_eq!(read(&mut *queue, &region, 1), Ok(vec![2.0]));
        }
    }
    // Two pending waits are independent.
    let (first, second) = (Timeline::new(), Timeline::new());
    queue.wait(&TimelinePoint::new(&first, 1)).unwrap();
    queue.wait(&TimelinePoint::new(&second, 1)).unwrap();
    let point = queue.mark();
    second.advance(1);
    assert_eq!(point.poll(), Ok(false));
    first.advance(1);
    assert_eq!(point.wait(test_deadline()), Ok(()));
    // The failure of an awaited point fails this queue.
    let gate = Timeline::new();
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &bindings).unwrap();
    gate.fail(DeviceError::Ended);
    assert_eq!(queue.mark().wait(test_deadline()), Err(DeviceError::Ended));
    assert_eq!(queue.run(&program, &bindings), Err(DeviceError::Ended));
}

/// Reads that are not taken hold pinned memory. A queue may hold as much of it as stays free; a further read, of any queue, goes
/// through other pinned memory in pieces.
#[test]
fn the_pinned_memory_of_pending_downloads_is_shared() {
    const MIB: u64 = 1 << 20;
    let fixture = CudaFixture::new("");
    let (mut holder, mut other) = (fixture.queue(0), fixture.queue(0));
    let buffer = fixture.buffer(0, 32 * MIB);
    holder.fill(buffer.whole(), 7).unwrap();
    holder.mark().wait(test_deadline()).unwrap();
    let copies = || fixture.driver_calls("cuMemcpyDtoHAsync_v2");
    // All of it, since no other download is pending.
    let whole = holder.download(buffer.region(0, 16 * MIB).unwrap()).unwrap();
    assert_eq!(copies(), 1);
    for (of_other, bytes, pieces) in [(true, 64, 1), (false, 64, 1), (true, 4 * MIB + 1, 9), (false, 32 * MIB, 64)] {
        let queue = if of_other { &mut other } else { &mut holder };
        let before = copies();
        let regions = [(0, bytes), (5, 0)].map(|(at, n)| buffer.region(at, n).unwrap());
        let reads = queue.download_all(&regions).unwrap();
        let read: Vec<_> = reads.into_iter().map(|read| read.wait(test_deadline()).unwrap()).collect();
        assert!(read == [vec![7; bytes as usize], Vec::new()], "{bytes} bytes");
        assert_eq!(copies() - before, pieces, "{bytes} bytes");
    }
    drop(whole);
    holder.mark().wait(test_deadline()).unwrap();
    // One copy each while they are in one block.
    let part = buffer.region(0, 4 * MIB).unwrap();
    let in_one_block = |queue: &mut dyn Queue| {
        let before = copies();
        (queue.download(part.clone()).unwrap(), copies() - before == 1)
    };
    let held: Vec<_> = (0..3).map(|_| in_one_block(&mut *holder)).collect();
    assert_eq!(held.iter().map(|(_, one)| *one).collect::<Vec<_>>(), [true, true, false]);
    assert!(in_one_block(&mut *other).1, "another queue gets a share");
}

#[test]
fn memory_is_charged_zeroed_and_released() {
    let fixture = CudaFixture::new("CUDAEMU_MEMORY=64M");
    let (device, budget) = (&fixture.devices[0], MemoryBudget::new(1 << 20));
    let before = device.memory().unwrap();
    assert_eq!(before.total, 64 << 20);
    let buffer = device.alloc(1 << 19, &budget).unwrap();
    assert!(matches!(device.alloc((1 << 19) + 1, &budget), Err(DeviceError::OutOfMemory { available: 0x80000, .. })));
    let all = MemoryBudget::new(MEMORY);
    assert!(
        matches!(device.alloc(80 << 20, &all), Err(DeviceError::OutOfMemory { requested: 0x0500_0000, .. })),
        "the GPU's own"
    );
    assert_eq!(all.used(), 0);
    {
        let mut queue = device.queue(&budget).unwrap();
        queue.fill(buffer.whole(), 0xaa).unwrap();
        // Submitted work retains the memory.
        let gate = Timeline::new();
        queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        queue.fill(buffer.whole(), 0xbb).unwrap();
        drop(buffer);
        assert_eq!(budget.used(), 1 << 19);
        gate.advance(1);
        queue.mark().wait(test_deadline()).unwrap();
        // The thread that has submitted the held work may be dropping it.
        while budget.used() > 0 {
            std::thread::yield_now();
        }
        let again = device.alloc(1 << 19, &budget).unwrap();
        assert_eq!(queue.download(again.whole()).unwrap().wait(test_deadline()).unwrap(), vec![0; 1 << 19]);
    }
    assert_eq!((budget.used(), device.memory().unwrap().free), (0, before.free));
}

/// Uploads of many queues, and copies between devices without peer access, share a fixed amount of pinned memory.
#[test]
fn queues_share_the_pinned_memory_of_uploads() {
    const BYTES: usize = 1 << 20;
    let fixture = CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none");
    let allocated = fixture.driver_calls("cuMemHostAlloc");
    let (near, far) = (fixture.buffer(0, 40 * BYTES as u64), fixture.buffer(1, 40 * BYTES as u64));
    let part = |buffer: &fanout::device::Buffer, index: u8| {
        buffer.region(u64::from(index) * BYTES as u64, BYTES as u64).unwrap()
    };
    let mut queues: Vec<_> = (0..40u8).map(|index| (index, fixture.queue(0), fixture.queue(1))).collect();
    let budget = fixture.budget.used();
    for (index, first, second) in &mut queues {
        first.upload(part(&near, *index), None, UploadSource::Borrowed(&vec![*index; BYTES])).unwrap();
        let point = first.mark();
        let copied = second.copy_from(part(&near, *index), part(&far, *index), Some(&point));
        assert_eq!(copied, Ok(CopyOutcome::Submitted));
    }
    assert_eq!(fixture.budget.used(), budget);
    for (index, _, second) in &mut queues {
        let read = second.download(part(&far, *index)).unwrap().wait(test_deadline()).unwrap();
        assert!(read.iter().all(|byte| byte == index), "{index}");
    }
    assert_eq!(fixture.driver_calls("cuMemHostAlloc"), allocated, "allocating pinned memory waits for the GPU");
}

/// The temporary memory of an overlapping copy is charged to the device's limit; an out-of-memory error does not fail the
/// queue.
#[test]
fn overlapping_copies_are_charged() {
    let fixture = CudaFixture::new("");
    let device = CudaDevice::new("CUDA0", fixture.devices[0].gpu(), 1 << 20).unwrap();
    let buffer = device.alloc(768 << 10, &fixture.budget).unwrap();
    let mut queue = device.queue(&fixture.budget).unwrap();
    let mut shift = |bytes: u64| {
        let [from, to] = [0, 4096].map(|at| buffer.region(at, bytes).unwrap());
        queue.copy_from(from, to, None)
    };
    assert!(matches!(shift(512 << 10), Err(DeviceError::OutOfMemory { limit: 0x0010_0000, .. })));
    assert_eq!(shift(128 << 10), Ok(CopyOutcome::Submitted));
    assert_eq!(queue.mark().wait(test_deadline()), Ok(()));
    assert_eq!(device.memory().unwrap().free, 256 << 10);
    // An empty range at the end of the buffer is valid.
    assert_eq!(queue.fill(buffer.region(768 << 10, 0).unwrap(), 1), Ok(()));
}

/// Dropping a queue does not block, and its resources are freed only after its submitted work is done.
#[test]
fn a_dropped_queue_keeps_its_resources_until_its_work_is_done() {
    let fixture = CudaFixture::new("");
    let (program, budget) = (fixture.program(0, &chain(1 << 14, &[COSTLY; 4])), MemoryBudget::new(MEMORY));
    let buffer = fixture.devices[0].alloc(1 << 17, &budget).unwrap();
    let mut queue = fixture.devices[0].queue(&budget).unwrap();
    let gate = Timeline::new();
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &whole_buffer(&buffer)).unwrap();
    let (ticket, point) = (queue.download(buffer.whole()).unwrap(), queue.mark());
    drop((queue, buffer, program));
    assert_eq!(ticket.wait(test_deadline()), Err(DeviceError::Ended));
    assert_eq!(point.wait(test_deadline()), Err(DeviceError::Ended));
    // The device stays usable, and the memory is released in the end.
    let until = test_deadline();
    while budget.used() > 0 {
        fixture.devices[0].memory().unwrap();
        assert!(until.is_some_and(|until| std::time::Instant::now() < until), "the memory was not released in time");
        std::thread::yield_now();
    }
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// Long programs record events in their midst. What the run retains stays until its last launch is done.
#[test]
fn a_long_run_keeps_its_buffers() {
    // With so many multiprocessors, one block has little of the bandwidth: 75 ms for each product, by estimate.
    let options = CudaOptions { device_timeout: Duration::from_secs(10), ..CudaOptions::default() };
    let fixture = CudaFixture::with_options("CUDAEMU_SMS=1024", options);
    let mut b = Builder::new();
    let [weight, column] = [(); 2].map(|()| b.leaf(DType::F32, [1 << 24, 1, 1, 1]).unwrap());
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    for _ in 0..20 {
        b.node(MulMat::BY_ID, &[Some(weight), Some(column), Some(ids)]).unwrap();
    }
    let mut last = b.leaf(DType::F32, [1 << 16, 1, 1, 1]).unwrap();
    for _ in 0..20 {
        last = b.node(COSTLY, &[Some(last)]).unwrap();
    }
    let graph = Arc::new(b.build());
    let bytes: Vec<_> = graph.slot_sizes().iter().map(|&bytes| bytes as u64).collect();
    let (program, budget) = (fixture.program(0, &graph), MemoryBudget::new(MEMORY));
    let buffers: Vec<_> = bytes.iter().map(|&bytes| fixture.devices[0].alloc(bytes, &budget).unwrap()).collect();
    let bindings: Arc<[_]> = buffers.iter().map(Buffer::whole).collect();
    let mut queue = fixture.queue(0);
    for buffer in &buffers {
        // All bits: no expert, so the products read nothing.
        queue.fill(buffer.whole(), 0xFF).unwrap();
    }
    queue.run(&program, &bindings).unwrap();
    drop((buffers, bindings, program));
    let point = queue.mark();
    loop {
        let used = budget.used();
        if point.poll().unwrap() {
            break;
        }
        assert_eq!(used, bytes.iter().sum::<u64>());
    }
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

#[test]
fn bad_handles_are_errors() {
    let fixture = CudaFixture::new("CUDAEMU_DEVICES=2");
    let cpu = fanout::cpu::CpuDevice::new("CPU", 1, fanout::cpu::MathMode::Exact, MEMORY).unwrap();
    let graph = chain(16, &[DOUBLE]);
    let (here, there, host) =
        (fixture.buffer(0, 256), fixture.buffer(1, 256), cpu.alloc(256, &fixture.budget).unwrap());
    let (program, foreign) = (fixture.program(0, &graph), cpu.prepare(Arc::clone(&graph)).unwrap());
    let mut queue = fixture.queue(0);
    let misuse = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Misuse(_)));
    assert!(misuse(queue.run(&foreign, &whole_buffer(&here))));
    assert!(misuse(queue.run(&fixture.program(1, &graph), &whole_buffer(&here))), "a program of another GPU");
    assert!(misuse(queue.run(&program, &whole_buffer(&there))));
    assert!(misuse(queue.run(&program, &whole_buffer(&host))));
    assert!(misuse(queue.run(&program, &Arc::from([]))));
    assert!(misuse(queue.run(&program, &Arc::from([here.region(0, 8).unwrap()]))));
    assert!(misuse(queue.fill(there.whole(), 0)) && misuse(queue.download(host.whole()).map(drop)));
    assert!(misuse(queue.upload(here.whole(), None, UploadSource::Borrowed(&[0; 7]))));
    assert!(misuse(queue.copy_from(here.region(0, 8).unwrap(), here.whole(), None).map(drop)));
    assert_eq!(
        queue.copy_from(host.whole(), here.whole(), None),
        Ok(CopyOutcome::Unreachable),
        "a copy from another kind of device"
    );
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    let error = queue.upload(here.whole(), None, UploadSource::Writer(&mut broken)).unwrap_err();
    assert!(matches!(&error, DeviceError::Source(why) if why.to_string().contains("cut off")), "{error}");
    assert_eq!(queue.run(&program, &whole_buffer(&here)), Ok(()), "none of these errors may fail the queue");
}

/// Misaligned tensors, at which a GPU would fault, are rejected before they run.
#[test]
fn misaligned_tensors_are_unsupported() {
    let fixture = CudaFixture::new("");
    let shifted = |offset: usize, nb1: usize| {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [64, 1, 1, 1]).unwrap();
        let desc = TensorDesc::strided(DType::F32, [4, 2, 1, 1], [4, nb1, 2 * nb1, 2 * nb1]).unwrap();
        let view = b.view(x, desc, offset).unwrap();
        b.node(DOUBLE, &[Some(view)]).unwrap();
        fixture.devices[0].prepare(Arc::new(b.build()))
    };
    assert!(shifted(4, 20).is_ok());
    for (offset, nb1) in [(2, 16), (0, 18)] {
        assert!(matches!(shifted(offset, nb1), Err(DeviceError::Unsupported(no)) if no.reason.contains("aligned")));
    }
    let (program, buffer) = (fixture.program(0, &chain(16, &[DOUBLE])), fixture.buffer(0, 256));
    let odd = Arc::from([buffer.region(4, 252).unwrap()]);
    assert!(matches!(fixture.queue(0).run(&program, &odd), Err(DeviceError::Misuse(_))));
}

/// A kernel fault fails all queues of its device, with an error that names the kernel; the other device stays usable.
#[test]
fn a_fault_fails_one_device_only() {
    // A row so long that its block exceeds the emulator's instruction limit.
    let fixture = CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_MAX_INSTRUCTIONS=10K");
    let light = chain(16, &[DOUBLE]);
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [1 << 20, 1, 1, 1]).unwrap();
    b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let endless = Arc::new(b.build());
    let long = fixture.buffer(0, endless.slot_sizes()[0] as u64);
    let (a, b) = (fixture.buffer(0, 256), fixture.buffer(1, 256));
    let (mut bad, mut bystander, mut good) = (fixture.queue(0), fixture.queue(0), fixture.queue(1));
    for (queue, buffer, device) in [(&mut bad, &a, 0), (&mut good, &b, 1)] {
        upload(&mut **queue, &buffer.whole(), &[1.0]).unwrap();
        queue.run(&fixture.program(device, &light), &whole_buffer(buffer)).unwrap();
        assert_eq!(read(&mut **queue, &buffer.whole(), 1), Ok(vec![2.0]));
    }
    bad.run(&fixture.program(0, &endless), &whole_buffer(&long)).unwrap();
    let error = bad.mark().wait(test_deadline()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, DeviceError::Lost { .. }), "{text}");
    assert!(
        [
            "CUDA0 is lost",
            "cuEventQuery failed: CUDA_ERROR_LAUNCH_TIMEOUT",
            "running: launches 1 to 2 of 2 of a graph, norm_"
        ]
        .iter()
        .all(|part| text.contains(part)),
        "{text}"
    );
    assert_eq!(bad.fill(a.whole(), 0), Err(error), "the failure must persist");
    assert!(matches!(bystander.fill(a.whole(), 0), Err(DeviceError::Lost { .. })));
    assert!(fixture.devices[0].alloc(64, &fixture.budget).is_err());
    good.run(&fixture.program(1, &light), &whole_buffer(&b)).unwrap();
    assert_eq!(read(&mut *good, &b.whole(), 1), Ok(vec![4.0]));
    drop((bad, bystander));
    good.run(&fixture.program(1, &light), &whole_buffer(&b)).unwrap();
    assert_eq!(read(&mut *good, &b.whole(), 1), Ok(vec![8.0]));
}
