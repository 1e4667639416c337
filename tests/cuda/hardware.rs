//! What real hardware does and an ideal GPU does not: devices that are lost, kernels that never end, streams that share connections,
//! allocations that synchronise, peer copies that write wrong bytes. The emulator's README describes each
//! (crates/cudaemu/README.md, "What real hardware does").

use crate::fixture::{
    COSTLY, CudaFixture, DOUBLE, INCREMENT, MEMORY, chain, floats, read, test_deadline, upload, whole_buffer,
};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice, CudaOptions};
use fanout::device::{
    Buffer, CopyOutcome, Device, DeviceError, MemoryBudget, Program, Queue, Timeline, TimelinePoint, UploadSource,
};
use fanout::sched::{Options, Scheduler, TaskBuilder};
use fanout::tensor::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Floats of a buffer.
const N: usize = 64;

/// A session that decodes: a program, its buffer, and the number of runs so far.
struct Decoder {
    queue: Box<dyn Queue>,
    program: Program,
    buffer: Buffer,
    runs: u32,
}

impl Decoder {
    fn new(fixture: &CudaFixture, device: usize) -> Decoder {
        let graph = chain(N, &[INCREMENT; 4]);
        Decoder {
            queue: fixture.queue(device),
            program: fixture.program(device, &graph),
            buffer: fixture.buffer(device, graph.slot_sizes()[0] as u64),
            runs: 0,
        }
    }

    /// Uploads, runs the program twice and reads the result.
    fn token(&mut self) -> Result<f32, DeviceError> {
        let whole = self.buffer.whole();
        upload(&mut *self.queue, &whole, &[1.0])?;
        for _ in 0..2 {
            self.queue.run(&self.program, &whole_buffer(&self.buffer))?;
            self.runs += 1;
        }
        read(&mut *self.queue, &whole, 1).map(|values| values[0])
    }
}

/// How a session meets the loss of its device: with a call that it makes or has made when a kernel has failed.
type Meet = fn(&CudaFixture, &mut Decoder) -> Result<(), DeviceError>;

/// Fails with the error of the first call that does.
fn until_failed(mut call: impl FnMut() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
    for _ in 0..100_000 {
        call()?;
        std::thread::yield_now();
    }
    Ok(())
}

/// Ten calls that meet the loss.
const MEETINGS: [(&str, Meet); 10] = [
    ("a wait for a point", |_, decoder| decoder.queue.mark().wait(test_deadline())),
    ("a download", |_, decoder| decoder.queue.download(decoder.buffer.whole())?.wait(test_deadline()).map(drop)),
    ("a fill", |_, decoder| until_failed(|| decoder.queue.fill(decoder.buffer.whole(), 0))),
    ("an upload", |_, decoder| {
        let bytes = vec![0; decoder.buffer.bytes() as usize];
        until_failed(|| decoder.queue.upload(decoder.buffer.whole(), None, UploadSource::Borrowed(&bytes)))
    }),
    ("a run", |_, decoder| {
        let bindings = whole_buffer(&decoder.buffer);
        until_failed(|| decoder.queue.run(&decoder.program, &bindings))
    }),
    ("a copy", |_, decoder| {
        let [from, to] = [0, 8].map(|at| decoder.buffer.region(at, 8).unwrap());
        until_failed(|| decoder.queue.copy_from(from.clone(), to.clone(), None).map(drop))
    }),
    ("a copy to another device", |fixture, decoder| {
        let (to, after) = (fixture.buffer(1, decoder.buffer.bytes()), decoder.queue.mark());
        let mut queue = fixture.queue(1);
        assert_eq!(queue.copy_from(decoder.buffer.whole(), to.whole(), Some(&after))?, CopyOutcome::Submitted);
        queue.mark().wait(test_deadline())
    }),
    ("a held command", |fixture, decoder| {
        let (gate, mut queue) = (Timeline::new(), fixture.queue(0));
        queue.wait(&TimelinePoint::new(&gate, 1))?;
        queue.run(&decoder.program, &whole_buffer(&decoder.buffer))?;
        let point = queue.mark();
        gate.advance(1);
        until_failed(|| point.poll().map(drop).and_then(|()| decoder.queue.mark().poll().map(drop)))
    }),
    ("an allocation", |fixture, _| until_failed(|| fixture.devices[0].alloc(64, &fixture.budget).map(drop))),
    ("a new queue", |fixture, _| until_failed(|| fixture.devices[0].queue(&fixture.budget).map(drop))),
];

/// A device that is lost ends in the same way wherever that happens: all its sessions get an error that names the cause and what was
/// running, it refuses new work at once, and the other device goes on.
#[test]
fn a_lost_device_ends_in_the_documented_way() {
    let kinds = [
        ("address", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("ecc", "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("launch", "CUDA_ERROR_LAUNCH_FAILED"),
        ("lost", "CUDA_ERROR_UNKNOWN"),
    ];
    // In single launches, and in a graph.
    let places = [3, 11].into_iter().flat_map(|launch| MEETINGS.map(|meeting| (launch, meeting)));
    for ((launch, (meeting, meet)), (kind, name)) in places.zip(kinds.into_iter().cycle()) {
        let case = format!("{meeting} after launch {launch}, {kind}");
        let settings = format!("CUDAEMU_DEVICES=2\nCUDAEMU_SEED={launch}\nCUDAEMU_FAULT_AT={launch}:{kind}");
        let mut fixture = CudaFixture::new(&settings);
        let [mut decoder, mut bystander, mut other] = [0, 0, 1].map(|device| Decoder::new(&fixture, device));
        let device = Arc::clone(&fixture.devices[0]);
        assert_eq!(device.lost(), None, "{case}");
        if launch > 8 {
            assert_eq!(decoder.token(), Ok(9.0), "{case}");
        }
        let bindings = whole_buffer(&decoder.buffer);
        let ran = decoder.queue.run(&decoder.program, &bindings);
        let error = ran.and_then(|()| meet(&fixture, &mut decoder)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, DeviceError::Lost { .. }), "{case}: {text}");
        for part in ["CUDA0 is lost", name, "unary_packed", "of 4 of a graph"] {
            assert!(text.contains(part), "{case}: {text:?} lacks {part:?}");
        }
        assert_eq!(device.lost(), Some(error.clone()), "{case}");
        let lost = |result: Result<(), DeviceError>| assert_eq!(result, Err(error.clone()), "{case}");
        lost(bystander.token().map(drop));
        lost(decoder.queue.mark().wait(test_deadline()));
        lost(device.alloc(64, &fixture.budget).map(drop));
        lost(device.queue(&fixture.budget).map(drop));
        lost(device.prepare(chain(N, &[DOUBLE])).map(drop));
        lost(device.memory().map(drop));
        assert_eq!(other.token(), Ok(9.0), "{case}: the other device goes on");
        drop((decoder, bystander, other, device, bindings));
        assert!(fixture.drop_devices(), "{case}: a context was not released in time");
        assert_eq!(fixture.budget.used(), 0, "{case}");
    }
}

/// Ends hung launches when a test ends or fails. Declared after everything whose drop would wait for them.
struct EndHungLaunches<'a>(&'a CudaFixture);

impl Drop for EndHungLaunches<'_> {
    fn drop(&mut self) {
        self.0.emulator.end_hung_launches();
    }
}

/// A kernel that never ends fails the sessions of its device after the device timeout, while another device goes on. Nothing that
/// is dropped then waits for the kernel.
#[test]
fn a_kernel_that_never_ends_is_noticed() {
    let options = CudaOptions { device_timeout: Duration::from_secs(1), ..CudaOptions::default() };
    // A launch, a launch within a graph, and one of a second session.
    for launch in [1, 7, 11] {
        let fixture = CudaFixture::with_options(&format!("CUDAEMU_DEVICES=2\nCUDAEMU_HANG_AT={launch}"), options);
        let end = EndHungLaunches(&fixture);
        let [mut first, mut second, mut other] = [0, 0, 1].map(|device| Decoder::new(&fixture, device));
        // A session of the other device that has work held back.
        let (gate, mut held) = (Timeline::new(), Decoder::new(&fixture, 1));
        held.queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        held.queue.fill(held.buffer.whole(), 0).unwrap();
        let began = Instant::now();
        let failed = std::thread::scope(|scope| {
            let until_lost = |decoder: &mut Decoder| {
                loop {
                    if let Err(e) = decoder.token() {
                        return e;
                    }
                }
            };
            let hangs = [&mut first, &mut second].map(|decoder| scope.spawn(move || until_lost(decoder)));
            while !hangs.iter().all(|hangs| hangs.is_finished()) {
                assert_eq!(other.token(), Ok(9.0), "{launch}");
            }
            let [first, second] = hangs.map(|hangs| hangs.join().unwrap());
            assert_eq!(first, second, "{launch}");
            first
        });
        // The device timeout, and far less than its default: a loaded machine takes long for the first tokens.
        assert!((1..20).contains(&began.elapsed().as_secs()), "{launch}: {:?}", began.elapsed());
        assert_eq!(held.queue.mark().poll(), Ok(false), "{launch}");
        gate.advance(1);
        assert_eq!(held.token(), Ok(9.0), "{launch}");
        drop(held);
        let text = failed.to_string();
        assert!(matches!(failed, DeviceError::Lost { .. }), "{launch}: {text}");
        for part in ["no progress for 1 s (the device timeout)", "running", "unary_packed"] {
            assert!(text.contains(part), "{launch}: {text}");
        }
        for decoder in [&mut first, &mut second] {
            assert_eq!(decoder.token(), Err(failed.clone()), "{launch}");
        }
        assert_eq!(fixture.devices[0].memory().map(drop), Err(failed.clone()), "{launch}");
        drop((first, second));
        assert_eq!(other.token(), Ok(9.0), "{launch}");
        assert_eq!(fixture.emulator.hung_launches(), 1, "{launch}: nothing waited for it");
        drop((other, end));
        // The context of the lost device lives until its process ends, so nothing more can be checked.
        std::mem::forget(fixture.devices[0].clone());
    }
}

/// A launch that ends, but long after the device timeout, also where it runs within the query of the thread that waits for it, as it does
/// on the emulated GPU.
#[test]
fn a_launch_beyond_the_device_timeout_is_noticed() {
    let options = CudaOptions { device_timeout: Duration::from_millis(100), ..CudaOptions::default() };
    let fixture = CudaFixture::with_options("CUDAEMU_THREADS=1", options);
    // About a second on one thread of the emulator.
    let graph = chain(1 << 20, &[COSTLY]);
    let (program, mut queue) = (fixture.program(0, &graph), fixture.queue(0));
    let buffer = fixture.buffer(0, graph.slot_sizes()[0] as u64);
    queue.run(&program, &whole_buffer(&buffer)).unwrap();
    let text = queue.mark().wait(test_deadline()).unwrap_err().to_string();
    assert!(text.contains("no progress for 0.1 s (the device timeout)"), "{text}");
    // As in the test above: the context of the lost device lives on.
    std::mem::forget(fixture.devices[0].clone());
}

#[test]
fn a_launch_check_names_the_kernel() {
    let options = CudaOptions { launch_check: true, ..CudaOptions::default() };
    for launch in [1, 3, 6] {
        let fixture = CudaFixture::with_options(&format!("CUDAEMU_FAULT_AT={launch}"), options);
        let mut decoder = Decoder::new(&fixture, 0);
        let text = decoder.token().unwrap_err().to_string();
        let number = (launch - 1) % 4 + 1;
        let want = format!("launch {number} of 4 of a graph");
        assert!(text.contains("running: kernel unary_packed") && text.ends_with(&want), "{text}: not {want}");
        assert_eq!(fixture.driver_calls("cuGraphLaunch"), 0);
    }
}

/// Seeds of the tests below: 50, or `FANOUT_HARDWARE_SEEDS`.
fn seeds() -> std::ops::Range<u64> {
    0..std::env::var("FANOUT_HARDWARE_SEEDS").map_or(50, |text| text.parse().expect("a number"))
}

/// Settings in which streams share so many connections, and calls of the driver take time and synchronise.
fn real_hardware(seed: u64, connections: u64) -> String {
    format!(
        "CUDAEMU_DEVICES=2\nCUDAEMU_SEED={seed}\nCUDAEMU_CONNECTIONS={connections}\nCUDAEMU_PEERS={}\nCUDAEMU_ALLOC_SYNC_US=100\n\
         CUDAEMU_COMPILE_MS=30\nCUDAEMU_KERNEL_US=10\nCUDAEMU_POISON=on",
        if seed.is_multiple_of(3) { "none" } else { "all" },
    )
}

/// A pipeline over GPUs and a CPU, whose points a stream cannot wait for: no order of the work is a deadlock.
#[test]
fn pipelines_over_gpus_and_cpus_do_not_deadlock() {
    const RUNS: usize = 8;
    for seed in seeds() {
        let fixture = CudaFixture::new(&real_hardware(seed, 1 + seed % 8));
        let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap();
        let [first, second] = [0, 1].map(|i| Arc::clone(&fixture.devices[i]) as Arc<dyn Device>);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [N, 1, 1, 1]).unwrap();
        let mut y = x;
        // Devices 0 and 2 are the GPUs.
        for stage in [0, 1, 2, 0, 2, 1, 0] {
            y = b.node(INCREMENT, &[Some(y)]).unwrap();
            b.pin(stage).unwrap();
        }
        b.output(y).unwrap();
        let task = Arc::new(b.build().unwrap());
        let depth = [1, 2, 4][seed as usize % 3];
        let options = Options::default().with_depth(depth);
        let mut scheduler = Scheduler::new(vec![first, cpu, second], options, &fixture.budget).unwrap();
        let mut prepared = scheduler.build(&task).unwrap();
        let mut reads = Vec::new();
        for run in 0..RUNS {
            scheduler.submit(&mut prepared, &[(x, bytemuck::cast_slice(&[run as f32; N]))]).unwrap();
            reads.push(scheduler.read(&prepared, y).unwrap());
        }
        for (run, read) in reads.into_iter().enumerate() {
            let got = floats(&read.wait(test_deadline()).unwrap());
            assert_eq!(got, [run as f32 + 7.0; N], "seed {seed}, depth {depth}, run {run}");
        }
        drop((scheduler, prepared));
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "seed {seed}");
    }
}

/// Queues that wait for host points and for each other, with a single connection: what is held back reaches no stream, so nothing is
/// in front of the work that it waits for.
#[test]
fn queues_that_share_a_connection_do_not_deadlock() {
    for seed in seeds() {
        let fixture = CudaFixture::new(&real_hardware(seed, 1));
        let mut rng = fastrand::Rng::with_seed(seed);
        let gates = [(); 4].map(|()| Timeline::new());
        let mut queues: Vec<_> = (0..6).map(|i| fixture.queue(i % 2)).collect();
        let buffers: Vec<_> = (0..6).map(|i| fixture.buffer(i % 2, 256)).collect();
        let mut points: Vec<TimelinePoint> = gates.iter().map(|gate| TimelinePoint::new(gate, 1)).collect();
        for step in 0..40u8 {
            let i = rng.usize(..queues.len());
            if rng.bool() {
                let point = &points[rng.usize(..points.len())];
                queues[i].wait(point).unwrap();
            }
            match rng.u8(..3) {
                0 => queues[i].fill(buffers[i].whole(), step).unwrap(),
                1 => {
                    let bytes = vec![step; 256];
                    queues[i].upload(buffers[i].whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
                }
                _ => {
                    let from = rng.usize(..queues.len());
                    let after = queues[from].mark();
                    let copied = queues[i].copy_from(buffers[from].whole(), buffers[i].whole(), Some(&after));
                    assert_eq!(copied, Ok(CopyOutcome::Submitted), "seed {seed}");
                }
            }
            points.push(queues[i].mark());
        }
        let mut order = [0, 1, 2, 3];
        rng.shuffle(&mut order);
        for gate in order {
            gates[gate].advance(1);
        }
        for (i, queue) in queues.iter_mut().enumerate() {
            assert_eq!(queue.mark().wait(test_deadline()), Ok(()), "seed {seed}, queue {i}");
        }
        drop((queues, points));
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "seed {seed}");
    }
}

/// Another session's allocations, frees, uploads and downloads, while a session decodes. None of these calls synchronises, so a
/// token takes at most one launch longer in simulated time.
#[test]
fn memory_of_other_sessions_does_not_delay_a_token() {
    const KERNEL_US: f64 = 100.0;
    const TOKENS: usize = 5;
    let settings = format!("CUDAEMU_KERNEL_US={KERNEL_US}\nCUDAEMU_HOST_GBPS=1000\nCUDAEMU_ALLOC_SYNC_US=1000");
    let times = [false, true].map(|is_shared| {
        let fixture = CudaFixture::new(&settings);
        let mut decoder = Decoder::new(&fixture, 0);
        let (mut other, budget) = (fixture.queue(0), MemoryBudget::new(MEMORY));
        let scratch = fixture.buffer(0, 8 << 20);
        // Creates graphs, streams, events and modules.
        (0..3).for_each(|_| assert_eq!(decoder.token(), Ok(9.0)));
        let synchronising = fixture.emulator.alloc_syncs();
        (0..TOKENS)
            .map(|_| {
                fixture.emulator.restart_simulated_time();
                decoder.queue.run(&decoder.program, &whole_buffer(&decoder.buffer)).unwrap();
                if is_shared {
                    // On another thread, whose clock is not the decoder's.
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            let memory = fixture.devices[0].alloc(4 << 20, &budget).unwrap();
                            other.upload(memory.whole(), None, UploadSource::Borrowed(&vec![3; 4 << 20])).unwrap();
                            let bytes = other.download(memory.whole()).unwrap();
                            drop(memory);
                            assert!(bytes.wait(test_deadline()).unwrap().iter().all(|&byte| byte == 3));
                            drop(other.download(scratch.whole()).unwrap());
                            drop(fixture.devices[0].queue(&budget).unwrap());
                        });
                    });
                }
                decoder.queue.run(&decoder.program, &whole_buffer(&decoder.buffer)).unwrap();
                let point = decoder.queue.mark();
                point.wait(test_deadline()).unwrap();
                assert_eq!(fixture.emulator.alloc_syncs(), synchronising, "a call waits for the GPU");
                fixture.emulator.simulated_time().makespan_us
            })
            .fold(0.0f64, f64::max)
    });
    assert!(times[1] - times[0] <= KERNEL_US, "{times:?} us of a token alone and beside another session");
}

/// Copies random bytes from one device to another and back. Returns the number of peer copies.
fn copy_and_back(fixture: &CudaFixture, [one, other]: [usize; 2]) -> u64 {
    const BYTES: usize = 3 << 20;
    let [first, second, back] = [one, other, one].map(|device| fixture.buffer(device, BYTES as u64));
    let [mut at_first, mut at_second] = [fixture.queue(one), fixture.queue(other)];
    let mut bytes = vec![0; BYTES];
    fastrand::Rng::with_seed(3).fill(&mut bytes);
    let before = fixture.driver_calls("cuMemcpyPeerAsync");
    at_first.upload(first.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
    let uploaded = at_first.mark();
    assert_eq!(at_second.copy_from(first.whole(), second.whole(), Some(&uploaded)), Ok(CopyOutcome::Submitted));
    let arrived = at_second.mark();
    assert_eq!(at_first.copy_from(second.whole(), back.whole(), Some(&arrived)), Ok(CopyOutcome::Submitted));
    let got = at_first.download(back.whole()).unwrap().wait(test_deadline()).unwrap();
    assert!(got == bytes);
    fixture.driver_calls("cuMemcpyPeerAsync") - before
}

#[test]
fn peer_copies_that_write_wrong_bytes_are_replaced() {
    for (settings, copies) in [("", 2), ("CUDAEMU_PEER_CORRUPT=0-1", 0), ("CUDAEMU_PEERS=none", 0)] {
        let fixture = CudaFixture::new(&format!("CUDAEMU_DEVICES=2\n{settings}"));
        assert_eq!(copy_and_back(&fixture, [0, 1]), copies, "{settings}");
    }
}

/// Each device has a pool of its own, to which other GPUs need access.
#[test]
fn a_second_device_on_a_gpu_is_connected_too() {
    let mut fixture = CudaFixture::new("CUDAEMU_DEVICES=2");
    let connected = fixture.driver_calls("cuMemPoolSetAccess");
    fixture.devices.push(CudaDevice::new("CUDA0.1", &cuda::detect().unwrap()[0], MEMORY).unwrap());
    assert_eq!(fixture.driver_calls("cuMemPoolSetAccess"), 2 * connected);
    assert_eq!(copy_and_back(&fixture, [2, 1]), 2);
    assert_eq!(copy_and_back(&fixture, [0, 2]), 0, "of one GPU");
}

/// A program on more sets of addresses than it keeps graphs for changes the graphs of the oldest set.
#[test]
fn graphs_of_old_addresses_are_updated_in_place() {
    const SETS: usize = 12;
    let fixture = CudaFixture::new("");
    let graph = chain(N, &[INCREMENT; 5]);
    let (program, mut queue) = (fixture.program(0, &graph), fixture.queue(0));
    let buffers: Vec<_> = (0..SETS).map(|_| fixture.buffer(0, graph.slot_sizes()[0] as u64)).collect();
    for buffer in &buffers {
        (0..3).for_each(|_| queue.run(&program, &whole_buffer(buffer)).unwrap());
    }
    let calls =
        ["cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuStreamBeginCapture"];
    assert_eq!(calls.map(|call| fixture.driver_calls(call)), [8, 4 * 5, 2 * SETS as u64, 0]);
    for buffer in &buffers {
        assert_eq!(read(&mut *queue, &buffer.whole(), 1), Ok(vec![15.0]));
    }
}

/// Between the first and the last token of a decode, no call of the driver synchronises, allocates or compiles, and a replayed program
/// is one launch.
#[test]
fn a_token_is_one_launch_without_synchronisation() {
    const CALLS: [&str; 15] = [
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxSynchronize",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemAllocFromPoolAsync",
        "cuMemFreeAsync",
        "cuModuleLoadDataEx",
        "cuGraphInstantiateWithFlags",
        "cuStreamCreate",
        "cuLaunchKernel",
    ];
    let fixture = CudaFixture::new("");
    let mut decoder = Decoder::new(&fixture, 0);
    // Creates graphs and events.
    (0..3).for_each(|_| assert_eq!(decoder.token(), Ok(9.0)));
    let calls = || CALLS.map(|call| fixture.driver_calls(call));
    let (before, launches) = (calls(), fixture.driver_calls("cuGraphLaunch"));
    (0..5).for_each(|_| assert_eq!(decoder.token(), Ok(9.0)));
    assert_eq!(calls(), before, "{CALLS:?}");
    assert_eq!(fixture.driver_calls("cuGraphLaunch") - launches, 2 * 5);
}

/// A GPU without memory pools, as some virtual ones are: memory is freed by a thread of the device.
#[test]
fn a_gpu_without_pools_works() {
    let mut fixture = CudaFixture::new("CUDAEMU_POOLS=off");
    let mut decoder = Decoder::new(&fixture, 0);
    for _ in 0..3 {
        assert_eq!(decoder.token(), Ok(9.0));
        drop(fixture.buffer(0, 1 << 20));
    }
    assert_eq!(fixture.driver_calls("cuMemAllocFromPoolAsync"), 0);
    let budget = Arc::clone(&fixture.budget);
    drop(decoder);
    assert!(fixture.drop_devices(), "the context was not released in time");
    assert_eq!((fixture.driver_calls("cuMemFree_v2"), budget.used()), (fixture.driver_calls("cuMemAlloc_v2"), 0));
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}

/// A session whose stream waits for a GPU that hangs has held back a program on another GPU. The commands that others hold back there
/// go on.
#[test]
fn held_commands_do_not_wait_for_other_queues() {
    let fixture = CudaFixture::new("CUDAEMU_DEVICES=2\nCUDAEMU_HANG_AT=1@1");
    let end = EndHungLaunches(&fixture);
    let mut hung = Decoder::new(&fixture, 1);
    hung.queue.run(&hung.program, &whole_buffer(&hung.buffer)).unwrap();
    let (gate, on_hung) = (Timeline::new(), hung.queue.mark());
    let mut sessions = [(); 2].map(|()| {
        let budget = MemoryBudget::for_client(MEMORY);
        let mut decoder = Decoder::new(&fixture, 0);
        decoder.queue = fixture.devices[0].queue(&budget).unwrap();
        (decoder, budget)
    });
    sessions[0].0.queue.wait(&on_hung).unwrap();
    let points = sessions.each_mut().map(|(decoder, _)| {
        decoder.queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        (0..3).for_each(|_| decoder.queue.run(&decoder.program, &whole_buffer(&decoder.buffer)).unwrap());
        decoder.queue.mark()
    });
    gate.advance(1);
    points[1].wait(test_deadline()).unwrap();
    assert_eq!(points[0].poll(), Ok(false));
    drop(end);
    assert!(points[0].wait(test_deadline()).is_err());
}
