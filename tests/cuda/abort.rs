//! Aborted queues: every blocked call and wait ends, and the memory is freed, whatever the queue was waiting for.

use crate::fixture::{CudaFixture, DOUBLE, chain, test_deadline, whole_buffer};
use fanout::device::{
    Buffer, CompletionSource, Device, DeviceError, Queue, QueueAborter, Timeline, TimelinePoint, UploadSource,
};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// A completion source that never reaches a point, and aborts a queue when it is polled: a thread waits by then.
#[derive(Debug, Default)]
struct AbortWhenPolled(Mutex<Option<QueueAborter>>);

impl CompletionSource for AbortWhenPolled {
    fn poll(&self, _: &Timeline) {
        if let Some(aborter) = &*self.0.lock().unwrap() {
            aborter.abort();
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What a queue does when it is aborted.
#[derive(Clone, Copy, Debug)]
enum Pending {
    /// The queue holds work back behind a host point, and a thread waits for a mark of it.
    Mark,
    /// As `Mark`, for a download.
    Download,
    /// The submitter of a large upload waits for what the queue holds back.
    LargeUpload,
    /// As `LargeUpload`, from pinned memory.
    PinnedUpload,
    /// A thread of the device polls a point that notifies nobody.
    PolledPoint,
    /// The queue holds work back behind a queue of another device, which is aborted, too.
    OtherDevice,
    /// The submitter produces the bytes of an upload.
    UploadSource,
}

/// Puts a queue into a state and aborts it. Returns the error of what was waited for.
fn abort_in_state(fixture: &CudaFixture, pending: Pending, queue: &mut dyn Queue, buffer: &Buffer) -> DeviceError {
    let aborter = queue.aborter().unwrap();
    let gate = Timeline::new();
    let never = TimelinePoint::new(&gate, 1);
    let program = fixture.program(0, &chain(16, &[DOUBLE; 8]));
    (0..3).for_each(|_| queue.run(&program, &whole_buffer(buffer)).unwrap());
    match pending {
        Pending::Mark => {
            queue.wait(&never).unwrap();
            queue.run(&program, &whole_buffer(buffer)).unwrap();
            let point = queue.mark();
            assert_eq!(point.poll(), Ok(false));
            aborter.abort();
            point.wait(test_deadline()).unwrap_err()
        }
        Pending::Download => {
            queue.wait(&never).unwrap();
            let read = queue.download(buffer.whole()).unwrap();
            aborter.abort();
            read.wait(test_deadline()).unwrap_err()
        }
        Pending::LargeUpload | Pending::PinnedUpload => {
            queue.wait(&never).unwrap();
            let pinned = fixture.devices[0].pinned_memory().unwrap().alloc_pinned(4 << 20, &fixture.budget).unwrap();
            let plain = vec![0; 4 << 20];
            let bytes: &[u8] = if let Pending::PinnedUpload = pending { &pinned } else { &plain };
            std::thread::scope(|scope| {
                let upload = scope.spawn(|| queue.upload(buffer.whole(), None, UploadSource::Borrowed(bytes)));
                // The upload waits for what the queue holds back, or will find the queue aborted.
                aborter.abort();
                upload.join().unwrap().unwrap_err()
            })
        }
        Pending::PolledPoint => {
            let source = Arc::new(AbortWhenPolled::default());
            let polled = Timeline::with_source(Arc::clone(&source) as _);
            *source.0.lock().unwrap() = Some(aborter);
            // The first poll may have aborted the queue.
            let _ = queue.wait(&TimelinePoint::new(&polled, 1)).and_then(|()| queue.fill(buffer.whole(), 1));
            queue.mark().wait(test_deadline()).unwrap_err()
        }
        Pending::OtherDevice => {
            let mut other = fixture.queue(1);
            other.wait(&never).unwrap();
            other.fill(fixture.buffer(1, 64).whole(), 1).unwrap();
            let behind = other.mark();
            queue.wait(&behind).unwrap();
            queue.fill(buffer.whole(), 1).unwrap();
            let point = queue.mark();
            let other_aborter = other.aborter().unwrap();
            aborter.abort();
            other_aborter.abort();
            point.wait(test_deadline()).unwrap_err()
        }
        Pending::UploadSource => {
            let mut fill = |_: &mut [u8]| {
                aborter.abort();
                Ok(())
            };
            // The source has been read: the upload may end with it.
            let _ = queue.upload(buffer.whole(), None, UploadSource::Writer(&mut fill));
            queue.mark().wait(test_deadline()).unwrap_err()
        }
    }
}

#[test]
fn an_aborted_queue_ends_whatever_it_waits_for() {
    use Pending::*;
    for pending in [Mark, Download, LargeUpload, PinnedUpload, PolledPoint, OtherDevice, UploadSource] {
        let mut fixture = CudaFixture::new("CUDAEMU_DEVICES=2");
        let (mut queue, buffer) = (fixture.queue(0), fixture.buffer(0, 4 << 20));
        let budget = Arc::clone(&fixture.budget);
        assert_eq!(abort_in_state(&fixture, pending, &mut *queue, &buffer), DeviceError::Ended, "{pending:?}");
        // All later work is refused, and all points fail once the work of the queue is done.
        assert_eq!(queue.fill(buffer.whole(), 0), Err(DeviceError::Ended), "{pending:?}");
        assert_eq!(queue.mark().wait(test_deadline()), Err(DeviceError::Ended), "{pending:?}");
        // Other queues of the device go on.
        let mut other = fixture.queue(0);
        other.fill(buffer.whole(), 7).unwrap();
        let bytes = other.download(buffer.region(0, 8).unwrap()).unwrap().wait(test_deadline());
        assert_eq!(bytes, Ok(vec![7; 8]), "{pending:?}");
        drop((queue, other, buffer));
        assert!(fixture.drop_devices(), "{pending:?}: a context was not released in time");
        assert_eq!(budget.used(), 0, "{pending:?}");
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "{pending:?}");
    }
}

/// The work that an aborted queue holds back is dropped, and queues that wait for it fail.
#[test]
fn work_behind_an_aborted_queue_is_never_reached() {
    let mut fixture = CudaFixture::new("CUDAEMU_DEVICES=2");
    let (mut other, mut queue) = (fixture.queue(1), fixture.queue(0));
    let (never, scratch, target) = (Timeline::new(), fixture.buffer(1, 64), fixture.buffer(0, 1 << 20));
    other.wait(&TimelinePoint::new(&never, 1)).unwrap();
    other.fill(scratch.whole(), 2).unwrap();
    queue.wait(&other.mark()).unwrap();
    queue.fill(target.whole(), 1).unwrap();
    let point = queue.mark();
    assert_eq!(point.poll(), Ok(false));
    other.aborter().unwrap().abort();
    assert_eq!(point.wait(test_deadline()), Err(DeviceError::Ended));
    drop((other, queue, point, scratch));
    let mut reader = fixture.queue(0);
    assert_eq!(reader.download(target.region(0, 8).unwrap()).unwrap().wait(test_deadline()), Ok(vec![0; 8]));
    drop((reader, target));
    assert!(fixture.drop_devices(), "a context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// A program that is being submitted ends at its next launch, and a graph is not replayed.
#[test]
fn an_abort_ends_a_submission_between_launches() {
    let mut fixture = CudaFixture::new("");
    let (program, buffer, mut queue) =
        (fixture.program(0, &chain(16, &[DOUBLE; 1000])), fixture.buffer(0, 256), fixture.queue(0));
    let aborter = queue.aborter().unwrap();
    let bindings = whole_buffer(&buffer);
    let ran = std::thread::scope(|scope| {
        let run = scope.spawn(|| queue.run(&program, &bindings));
        while fixture.driver_calls("cuLaunchKernel") == 0 {
            std::thread::yield_now();
        }
        aborter.abort();
        run.join().unwrap()
    });
    let launches = fixture.driver_calls("cuLaunchKernel");
    assert!(ran == Err(DeviceError::Ended) || launches == 1000, "{ran:?} after {launches} launches");
    assert_eq!(queue.run(&program, &bindings), Err(DeviceError::Ended));
    assert_eq!(fixture.driver_calls("cuLaunchKernel"), launches);
    assert_eq!(queue.mark().wait(test_deadline()), Err(DeviceError::Ended));
    drop((queue, program, bindings, buffer));
    assert!(fixture.drop_devices(), "a context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}
