//! The contract of queues and buffers on CUDA: order, points, failures, memory, and what repeated programs cost.

use crate::rig::{COSTLY, DOUBLE, INCREMENT, MEMORY, Rig, chain, read, soon, upload, whole};
use fanout::cuda::CudaDevice;
use fanout::device::{
    Account, CopyOutcome, Device, DeviceError, Point, Progress, Queue, Source, SourceError, Timeline,
};
use fanout::graph::Builder;
use fanout::ops::norm::Norm;
use fanout::tensor::{DType, TensorDesc};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first run launches kernel by kernel, the second captures, and from then on a run is one call.
#[test]
fn a_repeated_program_is_one_graph_launch() {
    let rig = Rig::new("");
    {
        let graph = chain(64, &[INCREMENT; 10]);
        let (program, buffer, other) = (rig.program(0, &graph), rig.buffer(0, 1 << 10), rig.buffer(0, 1 << 10));
        let (bindings, others) = (whole(&buffer), whole(&other));
        let mut queue = rig.queue(0);
        queue.run(&program, &bindings).unwrap();
        assert_eq!((rig.calls("cuLaunchKernel"), rig.calls("cuGraphLaunch")), (10, 0));
        for round in 1..=6 {
            queue.run(&program, &bindings).unwrap();
            // The ten launches of the capture are the last.
            assert_eq!((rig.calls("cuLaunchKernel"), rig.calls("cuGraphLaunch")), (20, round));
        }
        assert_eq!(read(&mut *queue, &buffer.whole(), 2).unwrap(), [70.0; 2]);
        // Other addresses are a capture of their own, and neither disturbs the other.
        for round in 1..=4 {
            queue.run(&program, &others).unwrap();
            queue.run(&program, &bindings).unwrap();
            assert_eq!(read(&mut *queue, &other.whole(), 1).unwrap(), [10.0 * round as f32]);
        }
        assert_eq!((rig.calls("cuLaunchKernel"), rig.calls("cuGraphLaunch")), (40, 6 + 4 + 3));
        assert_eq!(read(&mut *queue, &buffer.whole(), 1).unwrap(), [110.0]);
    }
    let mut rig = rig;
    rig.devices.clear();
    assert_eq!(rig.emulator.reports(), Vec::<String>::new(), "neither faults nor leaks");
}

#[test]
fn bytes_of_every_size_arrive() {
    let rig = Rig::new("CUDAEMU_SEED=3");
    let mut queue = rig.queue(0);
    let mut rng = fastrand::Rng::with_seed(5);
    for n in [1, 3, 64, 4096, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, 5 << 20] {
        let (buffer, offset) = (rig.buffer(0, n + 7), 7);
        let bytes: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
        let region = buffer.region(offset, n).unwrap();
        queue.upload(region.clone(), None, Source::Borrowed(&bytes)).unwrap();
        assert!(queue.download(region.clone()).unwrap().wait(soon()).unwrap() == bytes, "{n} borrowed bytes");
        let mut rest = &bytes[..];
        let mut fill = |piece: &mut [u8]| {
            piece.copy_from_slice(&rest[rest.len() - piece.len()..]);
            rest = &rest[..rest.len() - piece.len()];
            Ok(())
        };
        queue.upload(region.clone(), None, Source::Writer(&mut fill)).unwrap();
        let got = queue.download(region).unwrap().wait(soon()).unwrap();
        assert!(
            got.len() as u64 == n && got[..1] == bytes[bytes.len() - got.len().min(512 << 10)..][..1],
            "{n} written"
        );
        assert_eq!(queue.download(buffer.region(0, offset).unwrap()).unwrap().wait(soon()).unwrap(), [0; 7]);
    }
    assert_eq!(queue.download(rig.buffer(0, 8).region(8, 0).unwrap()).unwrap().wait(soon()), Ok(Vec::new()));
}

/// A timeline that is done when someone looks at it for the second time.
#[derive(Debug, Default)]
struct Late(AtomicBool);

impl Progress for Late {
    fn look(&self, timeline: &Timeline) {
        if self.0.swap(true, Ordering::Relaxed) {
            timeline.advance(1);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Nobody tells a stream that a point of such a timeline is reached: whoever waits has to look.
#[test]
fn points_that_someone_has_to_look_at_are_waited_for() {
    let rig = Rig::new("");
    let (mut queue, buffer) = (rig.queue(0), rig.buffer(0, 64));
    queue.wait(&Point::new(&Timeline::looked_at(Arc::<Late>::default()), 1)).unwrap();
    queue.fill(buffer.whole(), 3).unwrap();
    assert_eq!(queue.download(buffer.whole()).unwrap().wait(soon()), Ok(vec![3; 64]));
}

/// Many uploads in a row: each lap of the staging memory waits for the one before.
#[test]
fn staging_memory_is_used_again_only_when_it_was_copied() {
    for seed in 0..10 {
        let rig = Rig::new(&format!("CUDAEMU_SEED={seed}"));
        let (mut queue, buffer) = (rig.queue(0), rig.buffer(0, 40 << 17));
        for k in 0..40u8 {
            queue
                .upload(buffer.region(u64::from(k) << 17, 1 << 17).unwrap(), None, Source::Borrowed(&vec![k; 1 << 17]))
                .unwrap();
        }
        let got = queue.download(buffer.whole()).unwrap().wait(soon()).unwrap();
        assert!(got.chunks(1 << 17).zip(0..).all(|(part, k)| part.iter().all(|&b| b == k)), "seed {seed}");
    }
}

#[test]
fn fills_and_copies_keep_their_order() {
    for seed in 0..10 {
        let rig = Rig::new(&format!("CUDAEMU_SEED={seed}"));
        let (mut queue, a, b) = (rig.queue(0), rig.buffer(0, 64), rig.buffer(0, 64));
        let bytes: Vec<u8> = (0..64).collect();
        queue.upload(a.whole(), None, Source::Borrowed(&bytes)).unwrap();
        assert_eq!(queue.copy_from(a.whole(), b.whole(), None), Ok(CopyOutcome::Submitted));
        queue.fill(a.region(8, 8).unwrap(), 0xee).unwrap();
        // Overlapping, in both directions.
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
        assert_eq!(queue.download(b.whole()).unwrap().wait(soon()).unwrap(), want);
        let mut want = bytes;
        want[8..16].fill(0xee);
        assert_eq!(queue.download(a.whole()).unwrap().wait(soon()).unwrap(), want);
    }
}

/// A point of another kind of queue: the device waits for it, and the submitter does not.
#[test]
fn a_stream_waits_for_the_hosts_points() {
    let rig = Rig::new("");
    let (program, buffer) = (rig.program(0, &chain(16, &[DOUBLE])), rig.buffer(0, 256));
    let (bindings, region) = (whole(&buffer), buffer.whole());
    let mut queue = rig.queue(0);
    // More often than there are words to wait with.
    for round in 0..1100 {
        let gate = Timeline::new();
        upload(&mut *queue, &region, &[1.0]).unwrap();
        queue.wait(&Point::new(&gate, 1)).unwrap();
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
    // Two at once are two conditions.
    let (first, second) = (Timeline::new(), Timeline::new());
    queue.wait(&Point::new(&first, 1)).unwrap();
    queue.wait(&Point::new(&second, 1)).unwrap();
    let point = queue.mark();
    second.advance(1);
    assert_eq!(point.poll(), Ok(false));
    first.advance(1);
    assert_eq!(point.wait(soon()), Ok(()));
    // What will never be reached is this queue's failure.
    let gate = Timeline::new();
    queue.wait(&Point::new(&gate, 1)).unwrap();
    queue.run(&program, &bindings).unwrap();
    gate.fail(DeviceError::Ended);
    assert_eq!(queue.mark().wait(soon()), Err(DeviceError::Ended));
    assert_eq!(queue.run(&program, &bindings), Err(DeviceError::Ended));
}

#[test]
fn memory_is_charged_zeroed_and_given_back() {
    let rig = Rig::new("CUDAEMU_MEMORY=64M");
    let (device, account) = (&rig.devices[0], Account::new(1 << 20));
    let before = device.memory().unwrap();
    assert_eq!(before.total, 64 << 20);
    let buffer = device.alloc(1 << 19, &account).unwrap();
    assert!(matches!(device.alloc((1 << 19) + 1, &account), Err(DeviceError::OutOfMemory { left: 0x80000, .. })));
    let all = Account::new(MEMORY);
    assert!(
        matches!(device.alloc(80 << 20, &all), Err(DeviceError::OutOfMemory { asked: 0x0500_0000, .. })),
        "the GPU's own"
    );
    assert_eq!(all.used(), 0);
    {
        let mut queue = device.queue(&account).unwrap();
        queue.fill(buffer.whole(), 0xaa).unwrap();
        // Work on its way keeps the memory.
        let gate = Timeline::new();
        queue.wait(&Point::new(&gate, 1)).unwrap();
        queue.fill(buffer.whole(), 0xbb).unwrap();
        drop(buffer);
        assert_eq!(account.used(), 1 << 19);
        gate.advance(1);
        queue.mark().wait(soon()).unwrap();
        assert_eq!(account.used(), 0);
        let again = device.alloc(1 << 19, &account).unwrap();
        assert_eq!(queue.download(again.whole()).unwrap().wait(soon()).unwrap(), vec![0; 1 << 19]);
    }
    assert_eq!((account.used(), device.memory().unwrap().free), (0, before.free));
}

/// Pinned memory for a queue's uploads, and for copies between devices without a link, is its account's.
#[test]
fn staging_memory_is_charged() {
    let rig = Rig::new("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none");
    let (near, far) = (rig.buffer(0, 64), rig.buffer(1, 64));
    let upload = |queue: &mut dyn Queue| queue.upload(near.whole(), None, Source::Borrowed(&[1; 64]));
    let account = Account::new(3 << 20);
    let mut queue = rig.devices[0].queue(&account).unwrap();
    assert_eq!(account.used(), 0);
    for _ in 0..2 {
        upload(&mut *queue).unwrap();
        assert_eq!(account.used(), 2 << 20);
    }
    assert_eq!(queue.copy_from(far.whole(), near.whole(), None), Ok(CopyOutcome::Submitted));
    assert_eq!(account.used(), 3 << 20);
    let mut other = rig.devices[0].queue(&account).unwrap();
    assert!(matches!(upload(&mut *other), Err(DeviceError::OutOfMemory { asked: 0x20_0000, .. })));
    queue.mark().wait(soon()).unwrap();
    drop(queue);
    let until = soon();
    while account.used() > 0 {
        assert!(until.is_some_and(|until| std::time::Instant::now() < until), "the memory never comes back");
        std::thread::yield_now();
    }
    assert_eq!(upload(&mut *other), Ok(()));
}

/// What an overlapping copy needs besides counts against the device's limit too, and a refusal does not stick.
#[test]
fn overlapping_copies_are_charged() {
    let rig = Rig::new("");
    let device = CudaDevice::new("CUDA0", rig.devices[0].gpu(), 1 << 20).unwrap();
    let buffer = device.alloc(768 << 10, &rig.account).unwrap();
    let mut queue = device.queue(&rig.account).unwrap();
    let mut shift = |bytes: u64| {
        let [from, to] = [0, 4096].map(|at| buffer.region(at, bytes).unwrap());
        queue.copy_from(from, to, None)
    };
    assert!(matches!(shift(512 << 10), Err(DeviceError::OutOfMemory { limit: 0x0010_0000, .. })));
    assert_eq!(shift(128 << 10), Ok(CopyOutcome::Submitted));
    assert_eq!(queue.mark().wait(soon()), Ok(()));
    assert_eq!(device.memory().unwrap().free, 256 << 10);
    // An empty range may lie at the very end.
    assert_eq!(queue.fill(buffer.region(768 << 10, 0).unwrap(), 1), Ok(()));
}

/// A dropped queue leaves its work to the device: whoever drops it does not wait, and nothing is freed too early.
#[test]
fn a_dropped_queue_is_buried_when_its_work_is_done() {
    let rig = Rig::new("");
    let (program, account) = (rig.program(0, &chain(1 << 14, &[COSTLY; 4])), Account::new(MEMORY));
    let buffer = rig.devices[0].alloc(1 << 17, &account).unwrap();
    let mut queue = rig.devices[0].queue(&account).unwrap();
    let gate = Timeline::new();
    queue.wait(&Point::new(&gate, 1)).unwrap();
    queue.run(&program, &whole(&buffer)).unwrap();
    let (ticket, point) = (queue.download(buffer.whole()).unwrap(), queue.mark());
    drop((queue, buffer, program));
    assert_eq!(ticket.wait(soon()), Err(DeviceError::Ended));
    assert_eq!(point.wait(soon()), Err(DeviceError::Ended));
    // Another queue is not disturbed, and the memory comes back.
    let until = soon();
    while account.used() > 0 {
        rig.devices[0].memory().unwrap();
        assert!(until.is_some_and(|until| std::time::Instant::now() < until), "the memory never comes back");
        std::thread::yield_now();
    }
    assert_eq!(rig.emulator.reports(), Vec::<String>::new());
}

#[test]
fn bad_handles_are_errors() {
    let rig = Rig::new("CUDAEMU_DEVICES=2");
    let cpu = fanout::cpu::CpuDevice::new("CPU", 1, fanout::cpu::Path::Exact, MEMORY).unwrap();
    let graph = chain(16, &[DOUBLE]);
    let (here, there, host) = (rig.buffer(0, 256), rig.buffer(1, 256), cpu.alloc(256, &rig.account).unwrap());
    let (program, foreign) = (rig.program(0, &graph), cpu.prepare(Arc::clone(&graph)).unwrap());
    let mut queue = rig.queue(0);
    let misuse = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Misuse(_)));
    assert!(misuse(queue.run(&foreign, &whole(&here))));
    assert!(misuse(queue.run(&rig.program(1, &graph), &whole(&here))), "of another GPU");
    assert!(misuse(queue.run(&program, &whole(&there))));
    assert!(misuse(queue.run(&program, &whole(&host))));
    assert!(misuse(queue.run(&program, &Arc::from([]))));
    assert!(misuse(queue.run(&program, &Arc::from([here.region(0, 8).unwrap()]))));
    assert!(misuse(queue.fill(there.whole(), 0)) && misuse(queue.download(host.whole()).map(drop)));
    assert!(misuse(queue.upload(here.whole(), None, Source::Borrowed(&[0; 7]))));
    assert!(misuse(queue.copy_from(here.region(0, 8).unwrap(), here.whole(), None).map(drop)));
    assert_eq!(
        queue.copy_from(host.whole(), here.whole(), None),
        Ok(CopyOutcome::Unreachable),
        "no copies from other kinds of devices"
    );
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    let error = queue.upload(here.whole(), None, Source::Writer(&mut broken)).unwrap_err();
    assert!(matches!(&error, DeviceError::Source(why) if why.to_string().contains("cut off")), "{error}");
    assert_eq!(queue.run(&program, &whole(&here)), Ok(()), "nothing of it sticks");
}

/// What a CPU can read and a GPU faults at is refused before it runs.
#[test]
fn misaligned_tensors_are_refused() {
    let rig = Rig::new("");
    let shifted = |offset: usize, nb1: usize| {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [64, 1, 1, 1]).unwrap();
        let desc = TensorDesc::strided(DType::F32, [4, 2, 1, 1], [4, nb1, 2 * nb1, 2 * nb1]).unwrap();
        let view = b.view(x, desc, offset).unwrap();
        b.node(DOUBLE, &[Some(view)]).unwrap();
        rig.devices[0].prepare(Arc::new(b.build().unwrap()))
    };
    assert!(shifted(4, 20).is_ok());
    for (offset, nb1) in [(2, 16), (0, 18)] {
        assert!(matches!(shifted(offset, nb1), Err(DeviceError::Unsupported(no)) if no.reason.contains("aligned")));
    }
    let (program, buffer) = (rig.program(0, &chain(16, &[DOUBLE])), rig.buffer(0, 256));
    let odd = Arc::from([buffer.region(4, 252).unwrap()]);
    assert!(matches!(rig.queue(0).run(&program, &odd), Err(DeviceError::Misuse(_))));
}

/// A kernel that goes wrong ends its device's queues with an error that names the kernel; the other device goes on.
#[test]
fn a_fault_poisons_one_device() {
    // A row so long that its one block runs into the limit.
    let rig = Rig::new("CUDAEMU_DEVICES=2\nCUDAEMU_MAX_INSTRUCTIONS=10K");
    let light = chain(16, &[DOUBLE]);
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [1 << 20, 1, 1, 1]).unwrap();
    b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let endless = Arc::new(b.build().unwrap());
    let long = rig.buffer(0, endless.slot_sizes()[0] as u64);
    let (a, b) = (rig.buffer(0, 256), rig.buffer(1, 256));
    let (mut bad, mut bystander, mut good) = (rig.queue(0), rig.queue(0), rig.queue(1));
    for (queue, buffer, device) in [(&mut bad, &a, 0), (&mut good, &b, 1)] {
        upload(&mut **queue, &buffer.whole(), &[1.0]).unwrap();
        queue.run(&rig.program(device, &light), &whole(buffer)).unwrap();
        assert_eq!(read(&mut **queue, &buffer.whole(), 1), Ok(vec![2.0]));
    }
    bad.run(&rig.program(0, &endless), &whole(&long)).unwrap();
    let error = bad.mark().wait(soon()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, DeviceError::Driver { .. }), "{text}");
    assert!(["CUDA0: cu", "LAUNCH_TIMEOUT", "launched last is norm_"].iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(bad.fill(a.whole(), 0), Err(error), "it sticks");
    assert!(matches!(bystander.fill(a.whole(), 0), Err(DeviceError::Driver { .. })));
    assert!(rig.devices[0].alloc(64, &rig.account).is_err());
    good.run(&rig.program(1, &light), &whole(&b)).unwrap();
    assert_eq!(read(&mut *good, &b.whole(), 1), Ok(vec![4.0]));
    drop((bad, bystander));
    good.run(&rig.program(1, &light), &whole(&b)).unwrap();
    assert_eq!(read(&mut *good, &b.whole(), 1), Ok(vec![8.0]));
}
