//! Pinned memory of the host: large uploads from it are not staged.

use crate::fixture::{CudaFixture, MEMORY, test_deadline};
use fanout::device::{DeviceError, MemoryBudget, PinnedMemory, Timeline, TimelinePoint, UploadSource};
use std::sync::mpsc;

/// Bytes per staging segment of an upload from plain memory.
const STAGING_SEGMENT: u64 = 512 << 10;

/// An upload of pinned bytes is one driver copy; an upload of other bytes is one copy per staging segment.
#[test]
fn pinned_uploads_are_not_staged() {
    let fixture = CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_SEED=4");
    let budget = MemoryBudget::new(MEMORY);
    let mut rng = fastrand::Rng::with_seed(2);
    // Bytes, their offset in the pinned buffer, device, expected driver copies. The small upload fits one segment, so it is one
    // copy whether it is staged or not.
    for (n, offset, device, copies) in
        [(3 << 20, 0, 0, 1), ((3 << 20) - 1, 1, 0, 1), (3 << 20, 0, 1, 1), (1 << 10, 5, 0, 1), (0, 0, 0, 0)]
    {
        // The memory is pinned through the first device, but is valid for all devices.
        let mut host = fixture.devices[0].alloc_pinned(offset as u64 + n, &budget).unwrap();
        assert!(host.iter().all(|&v| v == 0) && budget.used() == offset as u64 + n);
        rng.fill(&mut host);
        let bytes = host[offset..].to_vec();
        let (buffer, mut queue) = (fixture.buffer(device, n), fixture.queue(device));
        let before = fixture.driver_calls("cuMemcpyHtoDAsync_v2");
        queue.fill(buffer.whole(), 1).unwrap();
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&host[offset..])).unwrap();
        assert_eq!(fixture.driver_calls("cuMemcpyHtoDAsync_v2") - before, copies, "{n} bytes from offset {offset}");
        host.fill(0);
        drop(host);
        assert!(
            queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap() == bytes,
            "{n} bytes from offset {offset}"
        );
        assert_eq!(budget.used(), 0);
        // Plain memory is staged in segments.
        let before = fixture.driver_calls("cuMemcpyHtoDAsync_v2");
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
        assert_eq!(
            fixture.driver_calls("cuMemcpyHtoDAsync_v2") - before,
            n.div_ceil(STAGING_SEGMENT),
            "{n} plain bytes"
        );
    }
}

#[test]
fn pinned_memory_beyond_a_limit_is_an_out_of_memory_error() {
    let fixture = CudaFixture::new("");
    let budget = MemoryBudget::new(MEMORY);
    assert!(matches!(
        fixture.devices[0].alloc_pinned(2 * MEMORY, &budget),
        Err(DeviceError::OutOfMemory { requested, .. }) if requested == 2 * MEMORY
    ));
    // Sizes that the budget permits but the driver cannot pin.
    for asked in [1 << 60, u64::MAX] {
        let error = fixture.devices[0].alloc_pinned(asked, &MemoryBudget::new(u64::MAX)).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { requested: n, .. } if n == asked), "{error}");
    }
}

/// A large unstaged upload behind blocked work returns only after that work and the copy are done, because the bytes are borrowed.
#[test]
fn a_pinned_upload_waits_for_earlier_work() {
    let fixture = CudaFixture::new("");
    let budget = MemoryBudget::new(MEMORY);
    let gate = Timeline::new();
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        let (fixture, budget, blocked) = (&fixture, &budget, TimelinePoint::new(&gate, 1));
        scope.spawn(move || {
            let mut host = fixture.devices[0].alloc_pinned(3 << 20, budget).unwrap();
            host.fill(5);
            let (buffer, mut queue) = (fixture.buffer(0, 3 << 20), fixture.queue(0));
            queue.wait(&blocked).unwrap();
            tx.send(()).unwrap();
            queue.upload(buffer.whole(), None, UploadSource::Borrowed(&host)).unwrap();
            tx.send(()).unwrap();
            host.fill(6);
            assert!(queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap().iter().all(|&v| v == 5));
        });
        rx.recv().unwrap();
        assert!(rx.try_recv().is_err(), "the upload must still be blocked");
        gate.advance(1);
        rx.recv().unwrap();
    });
}
