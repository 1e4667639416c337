//! Tests of the test devices: the virtual time of schedules on `DelayingDevice`, and the orders and races that a `Gate`
//! produces.

use fanout::device::{
    Buffer, CopyOutcome, Device, DeviceError, Domain, MemoryBudget, Program, Queue, Timeline, TimelinePoint,
    UploadSource,
};
use fanout::graph::Builder;
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::tensor::DType;
use fanout_testing::delaying_device::{DelayingDevice, Ticks, VirtualTime};
use fanout_testing::gated_device::Gate;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A memory budget that no test exhausts.
fn budget() -> Arc<MemoryBudget> {
    MemoryBudget::new(1 << 30)
}

/// A program that computes `x = x + x` for one float.
fn doubling(device: &dyn Device) -> Program {
    let mut b = Builder::with_separate_slots();
    let x = b.leaf(DType::F32, [1, 1, 1, 1]).unwrap();
    let dst = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
    b.node_into(Binary::Add, &[Some(x), Some(x)], dst).unwrap();
    device.prepare(Arc::new(b.build())).unwrap()
}

/// A device with a queue, memory and a program.
struct DeviceFixture {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    buffer: Buffer,
    program: Program,
}

impl DeviceFixture {
    fn new(device: Arc<dyn Device>) -> DeviceFixture {
        let budget = budget();
        let (queue, buffer) = (device.queue(&budget).unwrap(), device.alloc(64, &budget).unwrap());
        let program = doubling(&*device);
        DeviceFixture { device, queue, buffer, program }
    }

    /// Another queue of the device, on the same memory.
    fn with_another_queue(&self) -> DeviceFixture {
        let queue = self.device.queue(&budget()).unwrap();
        DeviceFixture {
            device: Arc::clone(&self.device),
            queue,
            buffer: self.buffer.clone(),
            program: self.program.clone(),
        }
    }

    fn run(&mut self) {
        self.queue.run(&self.program, &Arc::from([self.buffer.whole()])).unwrap();
    }

    fn upload(&mut self, value: f32) {
        let dst = self.buffer.region(0, 4).unwrap();
        self.queue.upload(dst, None, UploadSource::Borrowed(&value.to_le_bytes())).unwrap();
    }

    fn copy(&mut self, from: &DeviceFixture, after: Option<&TimelinePoint>) {
        let (src, dst) = (from.buffer.whole(), self.buffer.whole());
        assert!(self.queue.copy_from(src, dst, after).unwrap().is_submitted());
    }

    fn value(&mut self) -> Result<f32, DeviceError> {
        let bytes = self.queue.download(self.buffer.region(0, 4)?)?.wait(None)?;
        Ok(f32::from_le_bytes(bytes.try_into().unwrap()))
    }
}

fn delaying_devices(world: &Arc<VirtualTime>, services: &[Ticks]) -> Vec<DeviceFixture> {
    let sim =
        |(i, &service)| DelayingDevice::new(world, &format!("S{i}"), service).with_time_per_byte(1).with_launch_time(2);
    services.iter().enumerate().map(sim).map(|sim| DeviceFixture::new(sim.shared())).collect()
}

#[test]
fn small_schedules_take_the_expected_virtual_time() {
    type Schedule = fn(&mut [DeviceFixture], &VirtualTime);
    // Ticks: a program takes 2 + 10 on S0 and 2 + 30 on S1, a copy of 64 bytes 2 + 64, an upload of 4 bytes 2 + 4.
    let cases: &[(&str, Schedule, Ticks)] = &[
        ("a queue runs in order", |d, _| (0..3).for_each(|_| d[0].run()), 36),
        (
            "devices run in parallel",
            |d, _| {
                d[0].run();
                d[1].run();
            },
            32,
        ),
        (
            "a wait serializes two devices",
            |d, _| {
                d[0].run();
                let done = d[0].queue.mark();
                d[1].queue.wait(&done).unwrap();
                d[1].run();
            },
            12 + 32,
        ),
        (
            "a wait for a point does not wait for later work on the same queue",
            |d, _| {
                d[0].run();
                let done = d[0].queue.mark();
                d[0].run();
                d[1].queue.wait(&done).unwrap();
                d[1].run();
            },
            12 + 32,
        ),
        (
            "a copy begins after its point",
            |d, _| {
                d[0].run();
                let done = d[0].queue.mark();
                let [source, target] = d else { panic!("two devices") };
                target.copy(source, Some(&done));
                target.run();
            },
            12 + 66 + 32,
        ),
        (
            "a copy begins after earlier work on its queue",
            |d, _| {
                let [source, target] = d else { panic!("two devices") };
                target.run();
                target.copy(source, None);
            },
            32 + 66,
        ),
        (
            "two queues of a device share its compute unit",
            |d, _| {
                let mut other_queue = d[1].with_another_queue();
                d[1].run();
                other_queue.run();
            },
            32 + 32,
        ),
        (
            "the program that is ready first runs first",
            |d, _| {
                let mut other_queue = d[0].with_another_queue();
                d[1].run();
                let late = d[1].queue.mark();
                d[0].queue.wait(&late).unwrap();
                d[0].run();
                (0..2).for_each(|_| other_queue.run());
            },
            32 + 12,
        ),
        (
            "transfers overlap with computation",
            |d, _| {
                let mut other_queue = d[1].with_another_queue();
                d[1].run();
                other_queue.upload(1.0);
                other_queue.copy(&d[0], None);
            },
            6 + 66,
        ),
        (
            "points of other timelines count as reached",
            |d, _| {
                d[0].queue.wait(&TimelinePoint::new(&Timeline::new(), 7)).unwrap();
                d[0].run();
            },
            12,
        ),
        (
            "a wait of the host advances virtual time",
            |d, _| {
                d[1].run();
                d[1].queue.mark().wait(None).unwrap();
                d[0].run();
            },
            32 + 12,
        ),
        (
            "a wait of the host advances virtual time only to its point",
            |d, world| {
                d[1].run();
                let first = d[1].queue.mark();
                d[1].run();
                let second = d[1].queue.mark();
                first.wait(None).unwrap();
                assert_eq!(world.now(), 32);
                d[0].run();
                second.wait(None).unwrap();
                first.wait(None).unwrap();
                assert_eq!(world.now(), 64);
                d[0].run();
            },
            64 + 12,
        ),
        (
            "a wait of the host for bytes advances virtual time",
            |d, _| {
                d[0].run();
                d[0].value().unwrap();
                d[1].run();
            },
            12 + 6 + 32,
        ),
    ];
    for (what, schedule, makespan) in cases {
        let world = VirtualTime::new();
        schedule(&mut delaying_devices(&world, &[10, 30]), &world);
        assert_eq!(world.makespan(), *makespan, "{what}");
    }
}

#[test]
fn delaying_devices_count_busy_time_and_reject_copies_across_domains() {
    let world = VirtualTime::new();
    let mut fixtures = delaying_devices(&world, &[10, 30]);
    let [a, b] = &mut fixtures[..] else { panic!("two devices") };
    (0..2).for_each(|_| b.run());
    b.copy(a, None);
    b.upload(1.0);
    assert_eq!((world.busy(0), world.busy(1)), ((0, 0), (64, 72)));
    let other_domain = DeviceFixture::new(
        DelayingDevice::new(&world, "S2", 1).with_info(|info| info.domain = Domain::named("elsewhere")).shared(),
    );
    assert_eq!(a.queue.copy_from(other_domain.buffer.whole(), a.buffer.whole(), None), Ok(CopyOutcome::Unreachable));
    assert_eq!(world.busy(0), (0, 0));
}

/// The distinct results of `schedule` over 50 seeds, each with whether the gate detected a race.
fn outcomes<T: Ord>(schedule: impl Fn(&Arc<Gate>, &mut [DeviceFixture; 2]) -> T) -> BTreeSet<(T, bool)> {
    let outcome = |seed| {
        let gate = Gate::new(seed);
        let mut fixtures = ["G0", "G1"].map(|name| DeviceFixture::new(gate.device(name).shared()));
        (schedule(&gate, &mut fixtures), !gate.races().is_empty())
    };
    (0..50).map(outcome).collect()
}

#[test]
fn missing_waits_change_results_and_are_reported_as_races() {
    // G1 copies the value that G0 has doubled, and G0 then doubles it again. `raw` is the wait of the copy for the first
    // doubling (read after write), `war` is the wait of the second doubling for the copy (write after read).
    let run = |raw: bool, war: bool| {
        outcomes(move |_, [a, b]| {
            a.upload(1.0);
            a.run();
            let doubled = a.queue.mark();
            b.copy(a, Some(&doubled).filter(|_| raw));
            let copied = b.queue.mark();
            if war {
                a.queue.wait(&copied).unwrap();
            }
            a.run();
            let end = a.queue.mark();
            let value = b.value().unwrap() as u32;
            end.wait(None).unwrap();
            value
        })
    };
    assert_eq!(run(true, true), BTreeSet::from([(2, false)]));
    assert_eq!(run(true, false), BTreeSet::from([(2, true), (4, true)]), "without the wait before the second write");
    assert!(
        run(false, true).is_superset(&BTreeSet::from([(0, true), (1, true), (2, true)])),
        "without the copy's wait"
    );
}

#[test]
fn races_are_reported_even_if_the_result_is_right() {
    // A wait of the host orders later submissions after the point it waited for, but not after later points. With
    // `after_upload` the host waits for the point after the upload; otherwise the upload races with the copy.
    let run = |after_upload: bool| {
        outcomes(move |_, [a, b]| {
            a.run();
            let early = a.queue.mark();
            a.upload(3.0);
            let late = a.queue.mark();
            (if after_upload { late } else { early }).wait(None).unwrap();
            b.copy(a, None);
            let bytes = b.value().unwrap() as u32;
            a.queue.mark().wait(None).unwrap();
            bytes
        })
    };
    assert_eq!(run(true), BTreeSet::from([(3, false)]));
    assert_eq!(run(false), BTreeSet::from([(0, true), (3, true)]));
    // Two reads are no race, and neither are accesses to disjoint bytes of one buffer.
    let apart = outcomes(|_, [a, b]| {
        let mut other_queue = a.with_another_queue();
        b.copy(a, None);
        other_queue.value().unwrap();
        let (low, high) = (a.buffer.region(0, 32).unwrap(), a.buffer.region(32, 32).unwrap());
        b.queue.mark().wait(None).unwrap();
        a.queue.fill(low, 1).unwrap();
        other_queue.queue.fill(high, 1).unwrap();
        a.queue.mark().wait(None).and_then(|()| other_queue.queue.mark().wait(None)).unwrap();
    });
    assert_eq!(apart, BTreeSet::from([((), false)]));
}

#[test]
fn all_orders_that_the_waits_allow_occur() {
    let orders = |wait: bool| -> BTreeSet<_> {
        let order = |gate: &Arc<Gate>, [a, b]: &mut [DeviceFixture; 2]| {
            for _ in 0..2 {
                a.run();
            }
            let done = a.queue.mark();
            if wait {
                b.queue.wait(&done).unwrap();
            }
            for _ in 0..2 {
                b.run();
            }
            let all = [done, b.queue.mark()];
            assert!(gate.order().is_empty(), "work ran before the host waited");
            all.iter().for_each(|point| point.wait(None).unwrap());
            gate.order()
        };
        outcomes(order).into_iter().map(|(order, _)| order).collect()
    };
    assert_eq!(orders(false).len(), 6);
    assert_eq!(orders(true), BTreeSet::from([vec![0, 0, 1, 1, 1]]));
}

#[test]
fn a_deadlock_is_an_error() {
    let [mut a, mut b] = ["G0", "G1"].map({
        let gate = Gate::new(1);
        move |name| DeviceFixture::new(gate.device(name).shared())
    });
    let released = Timeline::new();
    a.queue.wait(&TimelinePoint::new(&released, 1)).unwrap();
    let held_up = a.queue.mark();
    b.copy(&a, Some(&held_up));
    let error = b.value().unwrap_err();
    let heads = "queue 0 (G0) waits for a point of another device; queue 1 (G1) waits for point 1 of queue 0, which has reached 0";
    assert!(error.to_string().ends_with(heads), "{error}");
    // The error is sticky on the queue that the host waited for. The blocked queue can continue once its point is reached.
    assert_eq!(b.value(), Err(error));
    a.upload(5.0);
    released.advance(1);
    assert_eq!(a.value(), Ok(5.0));
}

#[test]
fn failures_are_sticky_and_propagate_through_points() {
    let gate = Gate::new(2);
    let [mut a, mut b, mut c] = ["G0", "G1", "G2"].map(|name| DeviceFixture::new(gate.device(name).shared()));
    let mut builder = Builder::new();
    let (x, bias) = (builder.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), builder.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
    let ids = builder.leaf(DType::I32, [1, 1, 1, 1]).unwrap();
    builder.node(Binary::AddId, &[Some(x), Some(bias), Some(ids)]).unwrap();
    let graph = Arc::new(builder.build());
    let memory = a.device.alloc(graph.slot_sizes()[0] as u64, &budget()).unwrap();
    a.queue.fill(memory.whole(), 0xfe).unwrap(); // ids that name no expert
    let filled = a.queue.mark();
    let failing = a.device.prepare(graph).unwrap();
    a.queue.run(&failing, &Arc::from([memory.whole()])).unwrap();
    b.queue.wait(&a.queue.mark()).unwrap();
    b.run();
    let expected = |e: &DeviceError| matches!(e, DeviceError::Data { op: OpCode::AddId, .. });
    assert!(expected(&b.queue.mark().wait(None).unwrap_err()));
    assert!(expected(&a.queue.mark().wait(None).unwrap_err()));
    assert!(expected(&a.queue.fill(memory.whole(), 0).unwrap_err()));
    assert_eq!(filled.wait(None), Ok(()));
    // A wait for a point of a dropped queue fails.
    c.run();
    let lost = c.queue.mark();
    drop(c);
    let mut d = DeviceFixture::new(gate.device("G3").shared());
    d.queue.wait(&lost).unwrap();
    assert_eq!(d.value(), Err(DeviceError::Ended));
}

#[test]
fn gated_devices_do_not_copy_across_domains() {
    let gate = Gate::new(3);
    let mut near = DeviceFixture::new(gate.device("G0").shared());
    let far = DeviceFixture::new(gate.device("G1").with_info(|info| info.domain = Domain::named("far")).shared());
    assert_eq!(near.queue.copy_from(far.buffer.whole(), near.buffer.whole(), None), Ok(CopyOutcome::Unreachable));
    assert_eq!(near.queue.mark().wait(None), Ok(()));
    assert!(gate.order().is_empty());
}
