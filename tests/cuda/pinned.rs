//! Memory of the host that GPUs copy from without staging.

use crate::rig::{MEMORY, Rig, soon};
use fanout::device::{Account, DeviceError, PinnedMemory, Point, Source, Timeline};
use std::sync::mpsc;

/// What the driver is asked for an upload of pinned bytes: one copy. Of others: one for each piece.
#[test]
fn pinned_bytes_are_copied_as_they_lie() {
    let rig = Rig::new("CUDAEMU_DEVICES=2\nCUDAEMU_SEED=4");
    let account = Account::new(MEMORY);
    let mut rng = fastrand::Rng::with_seed(2);
    for (n, offset, device, copies) in
        [(3 << 20, 0, 0, 1), ((3 << 20) - 1, 1, 0, 1), (3 << 20, 0, 1, 1), (1 << 10, 5, 0, 1), (0, 0, 0, 0)]
    {
        // Pinned for the first device, which is good for every one.
        let mut host = rig.devices[0].alloc_pinned(offset as u64 + n, &account).unwrap();
        assert!(host.iter().all(|&v| v == 0) && account.used() == offset as u64 + n);
        rng.fill(&mut host);
        let bytes = host[offset..].to_vec();
        let (buffer, mut queue) = (rig.buffer(device, n), rig.queue(device));
        let before = rig.calls("cuMemcpyHtoDAsync_v2");
        queue.fill(buffer.whole(), 1).unwrap();
        queue.upload(buffer.whole(), None, Source::Borrowed(&host[offset..])).unwrap();
        assert_eq!(rig.calls("cuMemcpyHtoDAsync_v2") - before, copies, "{n} bytes from {offset} on");
        host.fill(0);
        drop(host);
        assert!(queue.download(buffer.whole()).unwrap().wait(soon()).unwrap() == bytes, "{n} bytes from {offset} on");
        assert_eq!(account.used(), 0);
        // What lies where it was is not pinned any more, and goes piece by piece.
        let before = rig.calls("cuMemcpyHtoDAsync_v2");
        queue.upload(buffer.whole(), None, Source::Borrowed(&bytes)).unwrap();
        assert_eq!(rig.calls("cuMemcpyHtoDAsync_v2") - before, n.div_ceil(512 << 10), "{n} plain bytes");
    }
    assert!(matches!(
        rig.devices[0].alloc_pinned(2 * MEMORY, &account),
        Err(DeviceError::OutOfMemory { asked, .. }) if asked == 2 * MEMORY
    ));
    // What the driver does not give, and the account would.
    for asked in [1 << 60, u64::MAX] {
        let error = rig.devices[0].alloc_pinned(asked, &Account::new(u64::MAX)).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { asked: n, .. } if n == asked), "{error}");
    }
}

/// An upload behind work that waits returns when that is done, not before: its bytes are the caller's again.
#[test]
fn a_pinned_upload_waits_for_what_is_before_it() {
    let rig = Rig::new("");
    let account = Account::new(MEMORY);
    let gate = Timeline::new();
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        let (rig, account, blocked) = (&rig, &account, Point::new(&gate, 1));
        scope.spawn(move || {
            let mut host = rig.devices[0].alloc_pinned(1 << 20, account).unwrap();
            host.fill(5);
            let (buffer, mut queue) = (rig.buffer(0, 1 << 20), rig.queue(0));
            queue.wait(&blocked).unwrap();
            tx.send(()).unwrap();
            queue.upload(buffer.whole(), None, Source::Borrowed(&host)).unwrap();
            tx.send(()).unwrap();
            host.fill(6);
            assert!(queue.download(buffer.whole()).unwrap().wait(soon()).unwrap().iter().all(|&v| v == 5));
        });
        rx.recv().unwrap();
        assert!(rx.try_recv().is_err(), "it waits");
        gate.advance(1);
        rx.recv().unwrap();
    });
}
