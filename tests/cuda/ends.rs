//! What devices, queues and points leave behind, in whatever order and on whichever thread they go.

use crate::rig::{DOUBLE, Rig, chain, soon, whole};
use fanout::device::{CopyOutcome, DeviceError, Point, Source, Timeline};
use fanout::graph::Builder;
use fanout::ops::OpCode;
use fanout::ops::rows::Rows;
use fanout::tensor::DType;
use std::sync::Arc;

/// A queue that has copied from a device through pinned memory keeps what it needs of it, and gives it back in time.
#[test]
fn a_source_may_go_before_the_queue_that_copied_from_it() {
    for links in ["all", "none"] {
        let mut rig = Rig::new(&format!("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS={links}"));
        let (from, to, mut queue) = (rig.buffer(0, 64), rig.buffer(1, 64), rig.queue(1));
        assert_eq!(queue.copy_from(from.whole(), to.whole(), None), Ok(CopyOutcome::Submitted));
        assert_eq!(queue.download(to.whole()).unwrap().wait(soon()), Ok(vec![0; 64]));
        drop(from);
        drop(rig.devices.remove(0));
        drop((queue, to));
        assert!(rig.end(), "peers {links}: a device never goes");
        assert_eq!(rig.emulator.reports(), Vec::<String>::new(), "peers {links}");
    }
}

/// A thread that never had to do with the driver may be the last to hold a point, a ticket or a program.
#[test]
fn the_last_handles_may_go_on_any_thread() {
    let mut rig = Rig::new("");
    let (program, buffer, mut queue) = (rig.program(0, &chain(16, &[DOUBLE])), rig.buffer(0, 256), rig.queue(0));
    // A ticket larger than the blocks that are kept for later, and a program that was captured.
    let large = rig.buffer(0, 3 << 20);
    let ticket = queue.download(large.whole()).unwrap();
    (0..3).for_each(|_| queue.run(&program, &whole(&buffer)).unwrap());
    let point = queue.mark();
    point.wait(soon()).unwrap();
    drop((queue, buffer, large));
    std::thread::spawn(move || drop((program, ticket, point))).join().unwrap();
    assert!(rig.end(), "the device never goes");
    assert_eq!(rig.emulator.reports(), Vec::<String>::new());
}

/// What a queue could not make is not taken for good by those that wait for it on the device.
#[test]
fn a_failure_reaches_the_queues_that_waited() {
    let mut b = Builder::new();
    let table = b.leaf(DType::F32, [16, 4, 1, 1]).unwrap();
    let ids = b.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
    let rows = Arc::new(b.build().unwrap());
    let id = rows.tensor(ids).unwrap().place.unwrap().offset as u64;
    for links in ["all", "none"] {
        let rig = Rig::new(&format!("CUDAEMU_DEVICES=3\nCUDAEMU_PEERS={links}"));
        let buffers = [0, 1, 2].map(|device| rig.buffer(device, rows.slot_sizes()[0] as u64));
        let mut queues = [0, 1, 2].map(|device| rig.queue(device));
        let program = rig.program(0, &rows);
        for (round, bad) in [(0, 0u8), (1, 3), (2, 4)] {
            let place = buffers[0].region(id, 4).unwrap();
            queues[0].upload(place, None, Source::Borrowed(&[bad, 0, 0, 0])).unwrap();
            // Nothing runs before all is submitted.
            let gate = Timeline::new();
            queues[0].wait(&Point::new(&gate, 1)).unwrap();
            queues[0].run(&program, &whole(&buffers[0])).unwrap();
            for to in [1, 2] {
                let ready = queues[to - 1].mark();
                let (from, here) = (buffers[to - 1].whole(), buffers[to].whole());
                assert_eq!(queues[to].copy_from(from, here, Some(&ready)), Ok(CopyOutcome::Submitted));
                let copied = queues[to].mark();
                queues[to - 1].wait(&copied).unwrap();
            }
            let ticket = queues[2].download(buffers[2].whole()).unwrap();
            gate.advance(1);
            // Nobody looks at the first queue, nor at the second.
            let got = ticket.wait(soon());
            if round < 2 {
                assert!(got.is_ok(), "{links}: {got:?}");
            } else {
                let data = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Data { op: OpCode::GetRows, .. }));
                assert!(data(got.map(drop)), "{links}");
                assert!(queues.iter_mut().all(|queue| data(queue.mark().wait(soon()))), "{links}");
            }
        }
    }
}

/// A queue that waited and was dropped keeps nothing of the other one.
#[test]
fn queues_that_wait_for_each_other_go() {
    let mut rig = Rig::new("CUDAEMU_DEVICES=2");
    {
        let mut queues = [rig.queue(0), rig.queue(1)];
        for _ in 0..3 {
            for (one, other) in [(0, 1), (1, 0)] {
                let buffer = rig.buffer(one, 64);
                queues[one].fill(buffer.whole(), 1).unwrap();
                let point = queues[one].mark();
                queues[other].wait(&point).unwrap();
            }
        }
    }
    assert!(rig.end(), "a device never goes");
    assert_eq!(rig.emulator.reports(), Vec::<String>::new());
}
