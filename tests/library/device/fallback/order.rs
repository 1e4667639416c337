//! Order, points, failures and scratch memory of fallback queues.

use super::super::test_deadline;
use super::{FallbackPair, get, leaf, node, pair, region, set, square, sum};
use fanout::device::{
    CopyOutcome, Device, DeviceError, MemoryBudget, Program, Queue, SourceError, Timeline, TimelinePoint, UploadSource,
};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode::{AddId, Mul, Sqr};
use fanout::ops::binary::Binary;
use fanout::tensor::DType;
use fanout_testing::recording_device::QueueEvent;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// x = x², in place, on a row of floats at the start of slot 0.
fn squaring(pair: &FallbackPair) -> (Program, Arc<Graph>) {
    let mut b = Builder::new();
    let x = leaf(&mut b);
    super::in_place(&mut b, x);
    let graph = Arc::new(b.build());
    (pair.device.prepare(Arc::clone(&graph)).unwrap(), graph)
}

/// Before the first program that falls back, and after it is done, commands go directly to the primary's queue on the
/// submitter's thread.
#[test]
fn commands_without_fallback_are_forwarded_directly() {
    let pair = pair(&[Mul]);
    let (primary, secondary) = (&pair.primary.record, &pair.secondary.record);
    let (mut plain, mut b) = (Builder::new(), Builder::new());
    sum(&mut plain);
    let srcs = [leaf(&mut b), leaf(&mut b)];
    node(&mut b, Binary::Mul, &srcs);
    let (plain, graph) = (Arc::new(plain.build()), Arc::new(b.build()));
    let (straight, cut) = (pair.device.prepare(plain).unwrap(), pair.device.prepare(Arc::clone(&graph)).unwrap());
    let (large, buffer) = (pair.buffer(1 << 20), pair.buffer(graph.slot_sizes()[0]));
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = pair.queue();
    for round in 1..=3 {
        primary.threads.lock().unwrap().clear();
        // A large upload waits for all earlier work, so the submitter has the worker again after it.
        queue.upload(large.whole(), None, UploadSource::Borrowed(&vec![1; 1 << 20])).unwrap();
        set(&mut *queue, buffer.whole(), 3.0);
        queue.run_inline(&straight, &bindings, Duration::from_secs(60)).unwrap();
        queue.run(&straight, &bindings).unwrap();
        queue.fill(large.whole(), 0).unwrap();
        assert!(
            queue.copy_from(large.region(0, 64).unwrap(), large.region(64, 64).unwrap(), None).unwrap().is_submitted()
        );
        let marked = queue.mark();
        queue.wait(&marked).unwrap();
        marked.wait(test_deadline()).unwrap();
        assert_eq!(get(&mut *queue, region(&graph, &buffer, graph.nodes()[0].dst)), Ok(6.0));
        let me = std::thread::current().id();
        assert_eq!(*primary.threads.lock().unwrap(), [me].into(), "no other thread submits");
        assert_eq!(primary.inline_runs.load(SeqCst), round);
        assert_eq!(
            secondary.queues.load(SeqCst),
            u64::from(round > 1),
            "the secondary queue is opened once, when first needed"
        );
        assert_eq!(pair.device.secondary_nodes(Mul), round - 1);
        queue.run_inline(&cut, &bindings, Duration::from_secs(60)).unwrap();
        assert_eq!(get(&mut *queue, region(&graph, &buffer, graph.nodes()[0].dst)), Ok(9.0));
    }
}

/// Commands after a program that falls back wait for it, and for the points that it waits for.
#[test]
fn nothing_overtakes_a_program_that_falls_back() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let (buffer, copy) = (pair.buffer(graph.slot_sizes()[0]), pair.buffer(64));
    let (row, bindings) = (buffer.region(0, 64).unwrap(), Arc::from([buffer.whole()]));
    let mut straight = Builder::new();
    sum(&mut straight);
    let straight = Arc::new(straight.build());
    let sums = pair.buffer(straight.slot_sizes()[0]);
    let summed = region(&straight, &sums, straight.nodes()[0].dst);
    let straight = pair.device.prepare(straight).unwrap();
    let mut queue = pair.queue();
    for round in 1..=3 {
        set(&mut *queue, row.clone(), 3.0);
        set(&mut *queue, sums.whole(), round as f32);
        let gate = Timeline::new();
        queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        queue.run_inline(&program, &bindings, Duration::from_secs(60)).unwrap();
        let first = queue.download(row.clone()).unwrap();
        queue.run(&program, &bindings).unwrap();
        assert!(queue.copy_from(row.clone(), copy.whole(), None).unwrap().is_submitted());
        queue.run_inline(&straight, &Arc::from([sums.whole()]), Duration::from_secs(60)).unwrap();
        set(&mut *queue, row.clone(), 2.0);
        queue.run(&program, &bindings).unwrap();
        let second = queue.download(row.clone()).unwrap();
        queue.fill(row.clone(), 0).unwrap();
        let (third, point) = (queue.download(row.clone()).unwrap(), queue.mark());
        assert_eq!(queue.mark().poll(), Ok(false));
        assert_eq!(point.poll(), Ok(false));
        assert_eq!(pair.device.secondary_nodes(Sqr), 3 * (round - 1));
        gate.advance(1);
        let value = |read: fanout::device::PendingRead| super::floats(&read.wait(test_deadline()).unwrap())[0];
        assert_eq!((value(first), value(second), value(third)), (9.0, 4.0, 0.0));
        assert_eq!(point.wait(test_deadline()), Ok(()));
        assert_eq!(get(&mut *queue, copy.whole()), Ok(81.0));
        assert_eq!(get(&mut *queue, summed.clone()), Ok(2.0 * round as f32));
    }
}

/// A point is reported when it is reached, even if later work is pending.
#[test]
fn a_point_between_two_programs_is_reached_between_them() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let buffer = pair.buffer(graph.slot_sizes()[0]);
    let (row, bindings) = (buffer.region(0, 64).unwrap(), Arc::from([buffer.whole()]));
    let (mut queue, mut other) = (pair.queue(), pair.queue());
    set(&mut *queue, row.clone(), 3.0);
    queue.run(&program, &bindings).unwrap();
    let between = queue.mark();
    let gate = Timeline::new();
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &bindings).unwrap();
    let after = queue.mark();
    // Another queue waits for the first point, and then releases this queue.
    other.wait(&between).unwrap();
    assert_eq!(get(&mut *other, row.clone()), Ok(9.0));
    let back = other.mark();
    assert_eq!((back.wait(test_deadline()), after.poll()), (Ok(()), Ok(false)));
    gate.advance(1);
    other.wait(&after).unwrap();
    assert_eq!(get(&mut *other, row), Ok(81.0));
}

#[test]
fn a_large_upload_stays_in_order() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let (buffer, bytes) = (pair.buffer(graph.slot_sizes()[0]), vec![7; 3 << 20]);
    let large = pair.buffer(bytes.len());
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = pair.queue();
    for source in [true, false] {
        queue.run(&program, &bindings).unwrap();
        queue.fill(large.whole(), 1).unwrap();
        queue.run(&program, &bindings).unwrap();
        let mut fill = |chunk: &mut [u8]| {
            chunk.fill(7);
            Ok(())
        };
        let source = if source { UploadSource::Borrowed(&bytes) } else { UploadSource::Writer(&mut fill) };
        queue.upload(large.whole(), None, source).unwrap();
        queue.run(&program, &bindings).unwrap();
        assert!(queue.download(large.whole()).unwrap().wait(test_deadline()).unwrap() == bytes);
    }
}

/// x = x + bias\[id\], whose id is out of range in memory filled with 0xFE.
fn failing() -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, bias) = (leaf(&mut b), leaf(&mut b));
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    let sum = b.node(Binary::AddId, &[Some(x), Some(bias), Some(ids)]).unwrap();
    square(&mut b, sum);
    Arc::new(b.build())
}

#[test]
fn a_failure_names_its_device_and_sticks() {
    for (refused, culprit) in [([AddId], "HOST"), ([Sqr], "GPU")] {
        let pair = pair(&refused);
        let graph = failing();
        let program = pair.device.prepare(Arc::clone(&graph)).unwrap();
        let buffer = pair.buffer(graph.slot_sizes()[0]);
        let (mut bad, mut good) = (pair.queue(), pair.queue());
        bad.fill(buffer.whole(), 0xfe).unwrap();
        bad.run(&program, &Arc::from([buffer.whole()])).unwrap();
        let expected = |e: DeviceError| {
            let DeviceError::OnDevice { device, error } = &e else { panic!("{e}") };
            assert_eq!(device, culprit);
            assert!(matches!(**error, DeviceError::Data { op: AddId, .. }), "{e}");
            assert!(e.to_string().starts_with(culprit), "{e}");
        };
        let point = bad.mark();
        expected(point.wait(test_deadline()).unwrap_err());
        expected(bad.mark().wait(test_deadline()).unwrap_err());
        expected(bad.fill(buffer.whole(), 0).unwrap_err());
        expected(bad.run(&program, &Arc::from([buffer.whole()])).unwrap_err());
        expected(bad.download(buffer.whole()).unwrap_err());
        assert_eq!(pair.device.secondary_nodes(AddId), 0);
        good.fill(buffer.whole(), 0).unwrap();
        good.run(&program, &Arc::from([buffer.whole()])).unwrap();
        assert_eq!(get(&mut *good, buffer.region(0, 4).unwrap()), Ok(0.0));
    }
}

#[test]
fn a_failure_of_the_secondary_device_fails_the_queue() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let buffer = pair.buffer(graph.slot_sizes()[0]);
    pair.secondary.record.fail_programs.store(true, SeqCst);
    let mut queue = pair.queue();
    let gate = Timeline::new();
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let read = queue.download(buffer.whole()).unwrap();
    gate.advance(1);
    let error = DeviceError::OnDevice {
        device: "HOST".to_owned(),
        error: Box::new(DeviceError::Bug("a recording device failed on request".into())),
    };
    assert_eq!(read.wait(test_deadline()), Err(error.clone()));
    assert_eq!(queue.mark().wait(test_deadline()), Err(error));
}

/// Dropping the queue ends its thread in every wait.
#[test]
fn dropping_a_queue_fails_its_points() {
    for secondary in [false, true] {
        let pair = pair(&[Sqr]);
        let (program, graph) = squaring(&pair);
        let buffer = pair.buffer(graph.slot_sizes()[0]);
        let mut queue = pair.queue();
        let (gate, (tx, rx)) = (Timeline::new(), mpsc::channel());
        let closed = TimelinePoint::new(&gate, 1);
        if secondary {
            *pair.secondary.record.gate.lock().unwrap() = Some(closed);
        } else {
            queue.wait(&closed).unwrap();
        }
        for record in [&pair.primary.record, &pair.secondary.record] {
            *record.events.lock().unwrap() = Some(tx.clone());
        }
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        let (read, point) = (queue.download(buffer.whole()).unwrap(), queue.mark());
        let next_event = || rx.recv_timeout(Duration::from_secs(60));
        if secondary {
            assert_eq!(next_event(), Ok(QueueEvent::Submitted), "the secondary device has the program");
        }
        drop(queue);
        assert_eq!(point.wait(test_deadline()), Err(DeviceError::Ended));
        assert!(read.wait(test_deadline()).is_err());
        for _ in 0..1 + usize::from(secondary) {
            assert_eq!(next_event(), Ok(QueueEvent::Dropped), "all queues are dropped");
        }
    }
}

/// An abort ends the thread in every wait, the submitter's waits for the thread, and a primary without a thread.
#[test]
fn an_abort_fails_points_reads_and_later_calls() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Waits {
        /// Nothing fell back: the primary waits.
        PrimaryAlone,
        /// The thread waits for the primary.
        Primary,
        /// The thread waits for the secondary device.
        Secondary,
    }
    for waits in [Waits::PrimaryAlone, Waits::Primary, Waits::Secondary] {
        let pair = pair(&[Sqr]);
        let (program, graph) = squaring(&pair);
        let (buffer, large) = (pair.buffer(graph.slot_sizes()[0]), pair.buffer(1 << 20));
        let mut queue = pair.queue();
        let aborter = queue.aborter().unwrap();
        let (gate, (tx, rx)) = (Timeline::new(), mpsc::channel());
        let closed = TimelinePoint::new(&gate, 1);
        *pair.secondary.record.events.lock().unwrap() = Some(tx);
        if waits == Waits::Secondary {
            *pair.secondary.record.gate.lock().unwrap() = Some(closed);
        } else {
            queue.wait(&closed).unwrap();
        }
        if waits != Waits::PrimaryAlone {
            queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        }
        let (read, point) = (queue.download(buffer.whole()).unwrap(), queue.mark());
        if waits == Waits::Secondary {
            assert_eq!(rx.recv_timeout(Duration::from_secs(60)), Ok(QueueEvent::Submitted));
        }
        std::thread::scope(|scope| {
            // A large upload waits for the thread and for the primary.
            let whole = large.whole();
            let upload = scope.spawn(|| queue.upload(whole, None, UploadSource::Borrowed(&vec![1; 1 << 20])));
            aborter.abort();
            assert!(upload.join().unwrap().is_err(), "{waits:?}");
        });
        assert!(point.wait(test_deadline()).is_err(), "{waits:?}");
        assert!(read.wait(test_deadline()).is_err(), "{waits:?}");
        assert!(queue.run(&program, &Arc::from([buffer.whole()])).is_err(), "{waits:?}");
        assert!(queue.mark().wait(test_deadline()).is_err(), "{waits:?}");
        aborter.abort();
        drop(queue);
        aborter.abort();
        drop((buffer, large, program));
    }
}

#[test]
fn scratch_is_reserved_reused_and_grows() {
    let pair = pair(&[Sqr]);
    let sized = |n: usize| {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
        square(&mut b, x);
        let graph = Arc::new(b.build());
        (pair.device.prepare(Arc::clone(&graph)).unwrap(), graph.slot_sizes()[0])
    };
    let buffer = pair.buffer(1 << 20);
    let mut queue = pair.queue();
    let mut used = |n| {
        let (program, bytes) = sized(n);
        queue.run(&program, &Arc::from([buffer.region(0, bytes as u64).unwrap()])).unwrap();
        queue.mark().wait(test_deadline()).unwrap();
        pair.budget.used() - buffer.bytes()
    };
    // Two operands of 4 bytes for each element, in a slot or in a mapping. The secondary device's queue also reserves a
    // constant amount for itself.
    let (small, large) = (used(16), used(30_000));
    assert!(small < large, "{small} {large}");
    assert_eq!([16, 30_000, 1 << 16].map(|n| used(n) - large), [0, 0, 256 << 10]);
    // A budget with too few bytes available.
    let tight = MemoryBudget::new(100);
    let (program, bytes) = sized(16);
    let mut queue = pair.device.queue(&tight).unwrap();
    queue.run(&program, &Arc::from([buffer.region(0, bytes as u64).unwrap()])).unwrap();
    let error = queue.mark().wait(test_deadline()).unwrap_err();
    assert!(
        matches!(&error, DeviceError::OnDevice { device, error } if device == "HOST"
        && matches!(**error, DeviceError::OutOfMemory { .. })),
        "{error}"
    );
}

/// Copies from other devices: the primary's outcome, or `Unreachable` while the thread holds the primary's queue and the
/// outcome is not cached.
#[test]
fn a_copy_from_another_device_is_accepted_only_if_known_to_work() {
    let (pair, elsewhere) = (pair(&[Sqr]), pair(&[]));
    let (program, graph) = squaring(&pair);
    let (buffer, there) = (pair.buffer(graph.slot_sizes()[0]), elsewhere.secondary.alloc(64, &pair.budget).unwrap());
    let row = buffer.region(0, 64).unwrap();
    let mut queue = pair.queue();
    let hold = |queue: &mut dyn Queue| {
        let gate = Timeline::new();
        queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        gate
    };
    let gate = hold(&mut *queue);
    assert_eq!(queue.copy_from(there.whole(), row.clone(), None), Ok(CopyOutcome::Unreachable));
    assert!(matches!(queue.copy_from(row.clone(), there.whole(), None), Err(DeviceError::Misuse(_))));
    assert!(matches!(queue.copy_from(row.subregion(0, 4).unwrap(), row.clone(), None), Err(DeviceError::Misuse(_))));
    gate.advance(1);
    // After a large upload the submitter has the worker again.
    let large = pair.buffer(1 << 20);
    queue.upload(large.whole(), None, UploadSource::Borrowed(&vec![0; 1 << 20])).unwrap();
    assert_eq!(queue.copy_from(there.whole(), row.clone(), None), Ok(CopyOutcome::Submitted));
    let gate = hold(&mut *queue);
    assert_eq!(queue.copy_from(there.whole(), row.clone(), None), Ok(CopyOutcome::Submitted));
    gate.advance(1);
    assert_eq!(get(&mut *queue, row), Ok(0.0));
    assert_eq!(pair.primary.record.copies.load(SeqCst), 2);
}

#[test]
fn misuse_does_not_stick() {
    let (pair, elsewhere) = (pair(&[Sqr]), pair(&[Sqr]));
    let ((program, graph), (foreign, _)) = (squaring(&pair), squaring(&elsewhere));
    let (buffer, tiny) = (pair.buffer(graph.slot_sizes()[0]), pair.buffer(8));
    let theirs = elsewhere.secondary.alloc(graph.slot_sizes()[0] as u64, &pair.budget).unwrap();
    let mut queue = pair.queue();
    let gate = Timeline::new();
    queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let misuse = |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Misuse(_))), "{r:?}");
    for bindings in [vec![], vec![tiny.whole()], vec![buffer.whole(), buffer.whole()], vec![theirs.whole()]] {
        misuse(queue.run(&program, &bindings.into()));
    }
    misuse(queue.run(&foreign, &Arc::from([buffer.whole()])));
    misuse(queue.upload(tiny.whole(), None, UploadSource::Borrowed(&[0; 7])));
    misuse(queue.upload(theirs.whole(), None, UploadSource::Borrowed(&[0; 128])));
    misuse(queue.fill(theirs.whole(), 0));
    misuse(queue.download(theirs.whole()).map(drop));
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    assert!(matches!(queue.upload(tiny.whole(), None, UploadSource::Writer(&mut broken)), Err(DeviceError::Source(_))));
    gate.advance(1);
    assert_eq!(queue.mark().wait(test_deadline()), Ok(()));
}
