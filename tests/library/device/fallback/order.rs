//! Order, points, failures and memory of queues that fall back.

use super::super::soon;
use super::{Pair, get, leaf, node, pair, region, set, square, sum};
use fanout::device::{Account, CopyOutcome, Device, DeviceError, Point, Program, Queue, Source, SourceError, Timeline};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode::{AddId, Mul, Sqr};
use fanout::ops::binary::Binary;
use fanout::tensor::DType;
use fanout_testing::recording_device::QueueEvent;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// x = x², in place, on a row of floats at the start of slot 0.
fn squaring(pair: &Pair) -> (Program, Arc<Graph>) {
    let mut b = Builder::new();
    let x = leaf(&mut b);
    super::in_place(&mut b, x);
    let graph = Arc::new(b.build().unwrap());
    (pair.device.prepare(Arc::clone(&graph)).unwrap(), graph)
}

/// Until a program falls back, and again when it is done, everything is the submitter's and the primary's.
#[test]
fn what_does_not_fall_back_passes_straight_through() {
    let pair = pair(&[Mul]);
    let (primary, second) = (&pair.primary.record, &pair.second.record);
    let (mut plain, mut b) = (Builder::new(), Builder::new());
    sum(&mut plain);
    let srcs = [leaf(&mut b), leaf(&mut b)];
    node(&mut b, Binary::Mul, &srcs);
    let (plain, graph) = (Arc::new(plain.build().unwrap()), Arc::new(b.build().unwrap()));
    let (straight, cut) = (pair.device.prepare(plain).unwrap(), pair.device.prepare(Arc::clone(&graph)).unwrap());
    let (large, buffer) = (pair.buffer(1 << 20), pair.buffer(graph.slot_sizes()[0]));
    let bindings = Arc::from([buffer.whole()]);
    let mut queue = pair.queue();
    for round in 1..=3 {
        primary.threads.lock().unwrap().clear();
        // A large upload waits for all earlier work, also for the worker to come back.
        queue.upload(large.whole(), None, Source::Borrowed(&vec![1; 1 << 20])).unwrap();
        set(&mut *queue, buffer.whole(), 3.0);
        queue.run_inline_or_submit(&straight, &bindings, Duration::from_secs(60)).unwrap();
        queue.run(&straight, &bindings).unwrap();
        queue.fill(large.whole(), 0).unwrap();
        assert!(
            queue.copy_from(large.region(0, 64).unwrap(), large.region(64, 64).unwrap(), None).unwrap().is_submitted()
        );
        let marked = queue.mark();
        queue.wait(&marked).unwrap();
        marked.wait(soon()).unwrap();
        assert_eq!(get(&mut *queue, region(&graph, &buffer, graph.nodes()[0].dst)), Ok(6.0));
        let me = std::thread::current().id();
        assert_eq!(*primary.threads.lock().unwrap(), [me].into(), "no other thread submits");
        assert_eq!(primary.inline_runs.load(SeqCst), round);
        assert_eq!(second.queues.load(SeqCst), u64::from(round > 1), "made when it is needed, and once");
        assert_eq!(pair.device.ran(Mul), round - 1);
        queue.run_inline_or_submit(&cut, &bindings, Duration::from_secs(60)).unwrap();
        assert_eq!(get(&mut *queue, region(&graph, &buffer, graph.nodes()[0].dst)), Ok(9.0));
    }
}

/// Everything that follows a program that falls back waits for it, and for what it waits for.
#[test]
fn nothing_overtakes_a_program_that_falls_back() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let (buffer, copy) = (pair.buffer(graph.slot_sizes()[0]), pair.buffer(64));
    let (row, bindings) = (buffer.region(0, 64).unwrap(), Arc::from([buffer.whole()]));
    let mut straight = Builder::new();
    sum(&mut straight);
    let straight = Arc::new(straight.build().unwrap());
    let sums = pair.buffer(straight.slot_sizes()[0]);
    let summed = region(&straight, &sums, straight.nodes()[0].dst);
    let straight = pair.device.prepare(straight).unwrap();
    let mut queue = pair.queue();
    for round in 1..=3 {
        set(&mut *queue, row.clone(), 3.0);
        set(&mut *queue, sums.whole(), round as f32);
        let gate = Timeline::new();
        queue.wait(&Point::new(&gate, 1)).unwrap();
        queue.run_inline_or_submit(&program, &bindings, Duration::from_secs(60)).unwrap();
        let first = queue.download(row.clone()).unwrap();
        queue.run(&program, &bindings).unwrap();
        assert!(queue.copy_from(row.clone(), copy.whole(), None).unwrap().is_submitted());
        queue.run_inline_or_submit(&straight, &Arc::from([sums.whole()]), Duration::from_secs(60)).unwrap();
        set(&mut *queue, row.clone(), 2.0);
        queue.run(&program, &bindings).unwrap();
        let second = queue.download(row.clone()).unwrap();
        queue.fill(row.clone(), 0).unwrap();
        let (third, point) = (queue.download(row.clone()).unwrap(), queue.mark());
        assert_eq!(queue.mark().poll(), Ok(false));
        assert_eq!(point.poll(), Ok(false));
        assert_eq!(pair.device.ran(Sqr), 3 * (round - 1));
        gate.advance(1);
        let value = |ticket: fanout::device::Ticket| super::floats(&ticket.wait(soon()).unwrap())[0];
        assert_eq!((value(first), value(second), value(third)), (9.0, 4.0, 0.0));
        assert_eq!(point.wait(soon()), Ok(()));
        assert_eq!(get(&mut *queue, copy.whole()), Ok(81.0));
        assert_eq!(get(&mut *queue, summed.clone()), Ok(2.0 * round as f32));
    }
}

/// A moment is known when it is reached, whatever was submitted behind it.
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
    queue.wait(&Point::new(&gate, 1)).unwrap();
    queue.run(&program, &bindings).unwrap();
    let after = queue.mark();
    // Another queue goes on from the first point, and lets this one go on.
    other.wait(&between).unwrap();
    assert_eq!(get(&mut *other, row.clone()), Ok(9.0));
    let back = other.mark();
    assert_eq!((back.wait(soon()), after.poll()), (Ok(()), Ok(false)));
    gate.advance(1);
    other.wait(&after).unwrap();
    assert_eq!(get(&mut *other, row), Ok(81.0));
}

#[test]
fn a_large_upload_takes_its_turn() {
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
        let mut fill = |piece: &mut [u8]| {
            piece.fill(7);
            Ok(())
        };
        let source = if source { Source::Borrowed(&bytes) } else { Source::Writer(&mut fill) };
        queue.upload(large.whole(), None, source).unwrap();
        queue.run(&program, &bindings).unwrap();
        assert!(queue.download(large.whole()).unwrap().wait(soon()).unwrap() == bytes);
    }
}

/// x = x + bias\[id\], whose id is out of range in memory full of ones.
fn failing() -> Arc<Graph> {
    let mut b = Builder::new();
    let (x, bias) = (leaf(&mut b), leaf(&mut b));
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    let sum = b.node(Binary::AddId, &[Some(x), Some(bias), Some(ids)]).unwrap();
    square(&mut b, sum);
    Arc::new(b.build().unwrap())
}

#[test]
fn a_failure_names_its_device_and_sticks() {
    for (refused, culprit) in [([AddId], "HOST"), ([Sqr], "GPU")] {
        let pair = pair(&refused);
        let graph = failing();
        let program = pair.device.prepare(Arc::clone(&graph)).unwrap();
        let buffer = pair.buffer(graph.slot_sizes()[0]);
        let (mut bad, mut good) = (pair.queue(), pair.queue());
        bad.fill(buffer.whole(), 0xff).unwrap();
        bad.run(&program, &Arc::from([buffer.whole()])).unwrap();
        let expected = |e: DeviceError| {
            let DeviceError::On { device, source } = &e else { panic!("{e}") };
            assert_eq!(device, culprit);
            assert!(matches!(**source, DeviceError::Data { op: AddId, .. }), "{e}");
            assert!(e.to_string().starts_with(culprit), "{e}");
        };
        let point = bad.mark();
        expected(point.wait(soon()).unwrap_err());
        expected(bad.mark().wait(soon()).unwrap_err());
        expected(bad.fill(buffer.whole(), 0).unwrap_err());
        expected(bad.run(&program, &Arc::from([buffer.whole()])).unwrap_err());
        expected(bad.download(buffer.whole()).unwrap_err());
        assert_eq!(pair.device.ran(AddId), 0);
        good.fill(buffer.whole(), 0).unwrap();
        good.run(&program, &Arc::from([buffer.whole()])).unwrap();
        assert_eq!(get(&mut *good, buffer.region(0, 4).unwrap()), Ok(0.0));
    }
}

#[test]
fn a_second_device_that_breaks_ends_the_queue() {
    let pair = pair(&[Sqr]);
    let (program, graph) = squaring(&pair);
    let buffer = pair.buffer(graph.slot_sizes()[0]);
    pair.second.record.fail_programs.store(true, SeqCst);
    let mut queue = pair.queue();
    let gate = Timeline::new();
    queue.wait(&Point::new(&gate, 1)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let ticket = queue.download(buffer.whole()).unwrap();
    gate.advance(1);
    let error = DeviceError::On {
        device: "HOST".to_owned(),
        source: Box::new(DeviceError::Bug("a recording device was told to fail".into())),
    };
    assert_eq!(ticket.wait(soon()), Err(error.clone()));
    assert_eq!(queue.mark().wait(soon()), Err(error));
}

/// Whatever the thread waits for, dropping its queue ends it.
#[test]
fn a_dropped_queue_releases_whoever_waits_for_it() {
    for second in [false, true] {
        let pair = pair(&[Sqr]);
        let (program, graph) = squaring(&pair);
        let buffer = pair.buffer(graph.slot_sizes()[0]);
        let mut queue = pair.queue();
        let (gate, (tx, rx)) = (Timeline::new(), mpsc::channel());
        let closed = Point::new(&gate, 1);
        if second {
            *pair.second.record.gate.lock().unwrap() = Some(closed);
        } else {
            queue.wait(&closed).unwrap();
        }
        for record in [&pair.primary.record, &pair.second.record] {
            *record.events.lock().unwrap() = Some(tx.clone());
        }
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        let (ticket, point) = (queue.download(buffer.whole()).unwrap(), queue.mark());
        let told = || rx.recv_timeout(Duration::from_secs(60));
        if second {
            assert_eq!(told(), Ok(QueueEvent::Submitted), "the second device has the program");
        }
        drop(queue);
        assert_eq!(point.wait(soon()), Err(DeviceError::Ended));
        assert!(ticket.wait(soon()).is_err());
        for _ in 0..1 + usize::from(second) {
            assert_eq!(told(), Ok(QueueEvent::Dropped), "no queue of a device is left");
        }
    }
}

#[test]
fn scratch_is_charged_kept_and_grows() {
    let pair = pair(&[Sqr]);
    let sized = |n: usize| {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
        square(&mut b, x);
        let graph = Arc::new(b.build().unwrap());
        (pair.device.prepare(Arc::clone(&graph)).unwrap(), graph.slot_sizes()[0])
    };
    let buffer = pair.buffer(1 << 20);
    let mut queue = pair.queue();
    let mut used = |n| {
        let (program, bytes) = sized(n);
        queue.run(&program, &Arc::from([buffer.region(0, bytes as u64).unwrap()])).unwrap();
        queue.mark().wait(soon()).unwrap();
        pair.account.used() - buffer.bytes()
    };
    // The second device's queue takes memory of its own, always the same.
    let first = used(16);
    // Two operands each, the second one at a multiple of 64.
    assert_eq!([1000, 16, 1000, 2000].map(|n| used(n) - first), [8032 - 128, 8032 - 128, 8032 - 128, 16_000 - 128]);
    // An account that has too little left.
    let tight = Account::new(100);
    let (program, bytes) = sized(16);
    let mut queue = pair.device.queue(&tight).unwrap();
    queue.run(&program, &Arc::from([buffer.region(0, bytes as u64).unwrap()])).unwrap();
    let error = queue.mark().wait(soon()).unwrap_err();
    assert!(
        matches!(&error, DeviceError::On { device, source } if device == "HOST"
        && matches!(**source, DeviceError::OutOfMemory { .. })),
        "{error}"
    );
}

/// Copies from other devices: the answer of the primary, or no copy while nobody can ask it.
#[test]
fn a_copy_from_elsewhere_is_promised_only_where_it_is_known_to_work() {
    let (pair, elsewhere) = (pair(&[Sqr]), pair(&[]));
    let (program, graph) = squaring(&pair);
    let (buffer, there) = (pair.buffer(graph.slot_sizes()[0]), elsewhere.second.alloc(64, &pair.account).unwrap());
    let row = buffer.region(0, 64).unwrap();
    let mut queue = pair.queue();
    let hold = |queue: &mut dyn Queue| {
        let gate = Timeline::new();
        queue.wait(&Point::new(&gate, 1)).unwrap();
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        gate
    };
    let gate = hold(&mut *queue);
    assert_eq!(queue.copy_from(there.whole(), row.clone(), None), Ok(CopyOutcome::Unreachable));
    assert!(matches!(queue.copy_from(row.clone(), there.whole(), None), Err(DeviceError::Misuse(_))));
    assert!(matches!(queue.copy_from(row.part(0, 4).unwrap(), row.clone(), None), Err(DeviceError::Misuse(_))));
    gate.advance(1);
    // A large upload has the worker back.
    let large = pair.buffer(1 << 20);
    queue.upload(large.whole(), None, Source::Borrowed(&vec![0; 1 << 20])).unwrap();
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
    let theirs = elsewhere.second.alloc(graph.slot_sizes()[0] as u64, &pair.account).unwrap();
    let mut queue = pair.queue();
    let gate = Timeline::new();
    queue.wait(&Point::new(&gate, 1)).unwrap();
    queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
    let misuse = |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Misuse(_))), "{r:?}");
    for bindings in [vec![], vec![tiny.whole()], vec![buffer.whole(), buffer.whole()], vec![theirs.whole()]] {
        misuse(queue.run(&program, &bindings.into()));
    }
    misuse(queue.run(&foreign, &Arc::from([buffer.whole()])));
    misuse(queue.upload(tiny.whole(), None, Source::Borrowed(&[0; 7])));
    misuse(queue.upload(theirs.whole(), None, Source::Borrowed(&[0; 128])));
    misuse(queue.fill(theirs.whole(), 0));
    misuse(queue.download(theirs.whole()).map(drop));
    let mut broken = |_: &mut [u8]| Err(SourceError::new("cut off"));
    assert!(matches!(queue.upload(tiny.whole(), None, Source::Writer(&mut broken)), Err(DeviceError::Source(_))));
    gate.advance(1);
    assert_eq!(queue.mark().wait(soon()), Ok(()));
}
