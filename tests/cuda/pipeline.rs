//! Pipeline of two GPUs with several micro-batches in flight: activations are copied between devices, ordered only by events.

use crate::fixture::{
    COSTLY, CudaFixture, DOUBLE, INCREMENT, chain, floats, read, test_deadline, upload, whole_buffer,
};
use fanout::device::{Buffer, CopyOutcome, Device, DeviceError, Program, Queue, TimelinePoint};
use fanout::ops::unary::Unary;

/// Floats per activation.
const N: usize = 300;
/// Bytes per slot: more than an activation, so that slots do not touch.
const SLOT: u64 = 2048;
const BATCHES: usize = 12;
/// Micro-batches in flight.
const DEPTH: usize = 4;

const FIRST: [Unary; 2] = [DOUBLE, INCREMENT];
const SECOND: [Unary; 2] = [INCREMENT, DOUBLE];

struct Stages {
    programs: [Program; 2],
    /// For each device: a slot for each micro-batch in flight.
    slots: [Vec<Buffer>; 2],
    results: Buffer,
    // Last field: dropping the fixture ends the emulator session.
    fixture: CudaFixture,
}

impl Stages {
    fn new(settings: &str) -> Stages {
        let fixture = CudaFixture::new(&format!("CUDAEMU_DEVICES=2\n{settings}"));
        let programs = [fixture.program(0, &chain(N, &FIRST)), fixture.program(1, &chain(N, &SECOND))];
        let slots = [0, 1].map(|device| (0..DEPTH).map(|_| fixture.buffer(device, SLOT)).collect());
        let results = fixture.buffer(1, SLOT * BATCHES as u64);
        Stages { programs, slots, results, fixture }
    }

    /// Submits all micro-batches. `write_after_read`: the first device waits for the copy out of a slot before it overwrites
    /// the slot; `read_after_write`: the copy waits for the kernel that produces its source.
    fn submit(&self, queues: &mut [Box<dyn Queue>; 2], write_after_read: bool, read_after_write: bool) {
        let mut copied: Vec<Option<TimelinePoint>> = vec![None; DEPTH];
        let [first, second] = queues;
        for batch in 0..BATCHES {
            let slot = batch % DEPTH;
            let (here, there) = (&self.slots[0][slot], &self.slots[1][slot]);
            if let Some(point) = copied[slot].take().filter(|_| write_after_read) {
                first.wait(&point).unwrap();
            }
            upload(&mut **first, &here.whole(), &input(batch)).unwrap();
            first.run(&self.programs[0], &whole_buffer(here)).unwrap();
            let produced = first.mark();
            let after = read_after_write.then_some(&produced);
            assert_eq!(second.copy_from(here.whole(), there.whole(), after), Ok(CopyOutcome::Submitted));
            copied[slot] = Some(second.mark());
            second.run(&self.programs[1], &whole_buffer(there)).unwrap();
            let result = self.results.region(SLOT * batch as u64, SLOT).unwrap();
            assert_eq!(second.copy_from(there.whole(), result, None), Ok(CopyOutcome::Submitted));
        }
    }

    fn results(&self, queue: &mut dyn Queue) -> Vec<Vec<f32>> {
        let bytes = queue.download(self.results.whole()).unwrap().wait(test_deadline()).unwrap();
        bytes.chunks(SLOT as usize).map(|slot| floats(&slot[..4 * N])).collect()
    }

    /// Runs all micro-batches. Returns whether every result is correct.
    fn run(&self, write_after_read: bool, read_after_write: bool) -> bool {
        let mut queues = [self.fixture.queue(0), self.fixture.queue(1)];
        self.submit(&mut queues, write_after_read, read_after_write);
        let got = self.results(&mut *queues[1]);
        (0..BATCHES).all(|batch| got[batch] == wanted(batch))
    }
}

fn input(batch: usize) -> Vec<f32> {
    (0..N).map(|i| (batch * 1000 + i) as f32).collect()
}

fn wanted(batch: usize) -> Vec<f32> {
    input(batch).into_iter().map(|x| (x * 2.0 + 1.0 + 1.0) * 2.0).collect()
}

/// Emulator settings: devices with peer access, and devices without.
const LINKS: [&str; 2] = ["CUDAEMU_PEERS=all", "CUDAEMU_PEERS=none"];

#[test]
fn no_order_of_the_streams_changes_a_result() {
    for links in LINKS {
        for seed in 0..100 {
            let stages = Stages::new(&format!("{links}\nCUDAEMU_SEED={seed}"));
            assert!(stages.run(true, true), "{links}, seed {seed}");
            assert_eq!(stages.fixture.emulator.reports(), Vec::<String>::new(), "{links}, seed {seed}");
        }
    }
}

/// Checks the test above: without one of the two waits, some seed gives a wrong result.
#[test]
fn a_missing_wait_changes_a_result() {
    for (write_after_read, read_after_write) in [(false, true), (true, false)] {
        let shows = |seed| !Stages::new(&format!("CUDAEMU_SEED={seed}")).run(write_after_read, read_after_write);
        assert!((0..100).any(shows), "write after read {write_after_read}, read after write {read_after_write}");
    }
}

/// While micro-batches are submitted, the host makes no blocking driver call, allocates nothing, and launches kernels only in
/// graphs.
#[test]
fn the_host_does_not_block_between_micro_batches() {
    for links in LINKS {
        let stages = Stages::new(links);
        let mut queues = [stages.fixture.queue(0), stages.fixture.queue(1)];
        // The first round creates events, streams and graphs.
        for _ in 0..2 {
            stages.submit(&mut queues, true, true);
            queues[1].mark().wait(test_deadline()).unwrap();
        }
        let forbidden_calls = || {
            let blocking =
                ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"];
            let not_repeated = [
                "cuMemAlloc_v2",
                "cuMemFree_v2",
                "cuMemAllocFromPoolAsync",
                "cuMemHostAlloc",
                "cuMemFreeHost",
                "cuLaunchKernel",
            ];
            blocking
                .into_iter()
                .chain(not_repeated)
                .map(|name| (name, stages.fixture.driver_calls(name)))
                .collect::<Vec<_>>()
        };
        let (before, graphs) = (forbidden_calls(), stages.fixture.driver_calls("cuGraphLaunch"));
        stages.submit(&mut queues, true, true);
        assert_eq!(forbidden_calls(), before, "{links}");
        assert_eq!(
            stages.fixture.driver_calls("cuGraphLaunch") - graphs,
            2 * BATCHES as u64,
            "{links}: one launch per stage"
        );
        let peers = stages.fixture.driver_calls("cuMemcpyPeerAsync");
        assert_eq!(peers > 0, links == LINKS[0], "{links}: {peers} peer copies");
        assert_eq!(stages.results(&mut *queues[1])[BATCHES - 1], wanted(BATCHES - 1));
    }
}

/// A host-staged copy that is larger than its staging slots.
#[test]
fn a_staged_copy_larger_than_its_staging_slots_is_complete() {
    for seed in 0..5 {
        let fixture = CudaFixture::new(&format!("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none\nCUDAEMU_SEED={seed}"));
        let n = (3 << 20) + 12;
        let (from, to) = (fixture.buffer(0, n), fixture.buffer(1, n));
        let (mut first, mut second) = (fixture.queue(0), fixture.queue(1));
        let values: Vec<f32> = (0..n / 4).map(|i| i as f32).collect();
        upload(&mut *first, &from.whole(), &values).unwrap();
        let ready = first.mark();
        assert_eq!(second.copy_from(from.whole(), to.whole(), Some(&ready)), Ok(CopyOutcome::Submitted));
        let read_out = second.mark();
        first.wait(&read_out).unwrap();
        first.fill(from.whole(), 0).unwrap();
        assert!(read(&mut *second, &to.whole(), values.len()) == Ok(values), "seed {seed}");
    }
}

/// Equal work on two devices takes at most 55 % of the simulated time of the same work on one device.
#[test]
fn two_devices_work_at_the_same_time() {
    let makespan = |devices: [usize; 2]| -> Result<f64, DeviceError> {
        let fixture =
            CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10\nCUDAEMU_LAUNCH_US=1");
        let mut work = devices.map(|device| {
            (fixture.program(device, &chain(N, &[COSTLY; 10])), fixture.buffer(device, SLOT), fixture.queue(device))
        });
        for _ in 0..10 {
            for (program, buffer, queue) in &mut work {
                upload(&mut **queue, &buffer.whole(), &input(0))?;
                queue.run(program, &whole_buffer(buffer))?;
            }
        }
        let points = work.each_mut().map(|(_, _, queue)| queue.mark());
        points.iter().try_for_each(|point| point.wait(test_deadline()))?;
        drop(work);
        Ok(fixture.simulated_us())
    };
    let (serial, parallel) = (makespan([0, 0]).unwrap(), makespan([0, 1]).unwrap());
    assert!(serial >= 20_000.0, "{serial} us for 200 kernels of 100 us");
    assert!(parallel <= 0.55 * serial, "{parallel} us on two devices, {serial} us on one");
}

/// A device's description has its name, memory, PCI address, compute capability and number of multiprocessors.
#[test]
fn device_descriptions_contain_the_configured_properties() {
    let fixture = CudaFixture::new(
        "CUDAEMU_DEVICES=2\nCUDAEMU_NAME=Alpha,Beta\nCUDAEMU_CAPABILITY=8.0,9.0\nCUDAEMU_MEMORY=1G,2G",
    );
    let descriptions: Vec<_> = fixture.devices.iter().map(|device| device.info().description.clone()).collect();
    assert_eq!(
        descriptions,
        [
            "Alpha, 1024 MiB, PCI 0000:01:00.0, capability 8.0, 108 multiprocessors",
            "Beta, 2048 MiB, PCI 0000:02:00.0, capability 9.0, 132 multiprocessors"
        ]
    );
}
