//! Turns: sessions that share a GPU submit programs segment by segment; a session that is alone waits for nothing.

use crate::fixture::{
    COSTLY, CudaFixture, DOUBLE, INCREMENT, chain, long_node, long_node_before, read, test_deadline, upload,
    whole_buffer,
};
use fanout::device::{Buffer, Device, DeviceError, MemoryBudget, Queue, Timeline, TimelinePoint};
use fanout::graph::{Builder, Graph};
use fanout::ops::norm::Norm;
use fanout::tensor::DType;
use std::sync::Arc;
use std::time::Duration;

/// See [`long_node`].
const SETTINGS: &str = "CUDAEMU_SMS=1024";

/// Segments of [`long_node`].
const SEGMENTS: u64 = 3;

/// A session with a queue and a buffer.
struct Session {
    budget: Arc<MemoryBudget>,
    queue: Box<dyn Queue>,
    buffer: Buffer,
}

impl Session {
    fn new(fixture: &CudaFixture, bytes: u64) -> Session {
        let budget = MemoryBudget::for_client(1 << 30);
        let queue = fixture.devices[0].queue(&budget).unwrap();
        Session { queue, buffer: fixture.devices[0].alloc(bytes, &budget).unwrap(), budget }
    }

    fn run(&mut self, fixture: &CudaFixture, graph: &Arc<Graph>) -> Result<(), DeviceError> {
        self.queue.run(&fixture.program(0, graph), &whole_buffer(&self.buffer))
    }
}

/// Settings for [`HungGpu`].
const HANG: &str = "CUDAEMU_DEVICES=2\nCUDAEMU_HANG_AT=1@1";

/// A kernel on the second device that ends when this is dropped. That device is lost then.
struct HungGpu<'a> {
    fixture: &'a CudaFixture,
    /// Behind the kernel.
    point: TimelinePoint,
    _queue: Box<dyn Queue>,
}

impl HungGpu<'_> {
    fn new(fixture: &CudaFixture) -> HungGpu<'_> {
        let mut queue = fixture.queue(1);
        queue.run(&fixture.program(1, &chain(16, &[DOUBLE])), &whole_buffer(&fixture.buffer(1, 256))).unwrap();
        HungGpu { point: queue.mark(), _queue: queue, fixture }
    }

    /// A session whose stream on the first device waits for the kernel: all others are not alone.
    fn busy_session(&self) -> Session {
        let mut session = Session::new(self.fixture, 256);
        session.queue.wait(&self.point).unwrap();
        session.run(self.fixture, &chain(16, &[DOUBLE])).unwrap();
        session
    }
}

impl Drop for HungGpu<'_> {
    fn drop(&mut self) {
        self.fixture.emulator.end_hung_launches();
    }
}

fn end(mut fixture: CudaFixture, sessions: impl IntoIterator<Item = Session>) {
    sessions.into_iter().for_each(drop);
    assert!(fixture.drop_devices(), "a context was not released in time");
}

#[test]
fn a_session_that_is_alone_waits_for_nothing() {
    let fixture = CudaFixture::new(SETTINGS);
    let graph = long_node();
    let (program, bytes) = (fixture.program(0, &graph), graph.slot_sizes()[0] as u64);
    let mut session = Session::new(&fixture, bytes);
    // Queues of one session do not take turns.
    let mut second = fixture.devices[0].queue(&session.budget).unwrap();
    let gate = Timeline::new();
    let buffers = [session.buffer.clone(), fixture.devices[0].alloc(bytes, &session.budget).unwrap()];
    session.queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    let waits = || {
        ["cuStreamQuery", "cuEventQuery", "cuEventRecord", "cuStreamSynchronize"].map(|call| fixture.driver_calls(call))
    };
    let before = waits();
    for _ in 0..3 {
        for (queue, buffer) in [&mut session.queue, &mut second].into_iter().zip(&buffers) {
            queue.run(&program, &whole_buffer(buffer)).unwrap();
        }
    }
    assert_eq!(waits(), before);
    // The queue that waits holds its programs back; the other one has submitted all segments.
    assert_eq!(fixture.driver_calls("cuGraphLaunch"), 2 * SEGMENTS);
    assert_eq!(session.budget.device_time(), Duration::ZERO);
    gate.advance(1);
    session.queue.mark().wait(test_deadline()).unwrap();
    second.mark().wait(test_deadline()).unwrap();
    drop((second, program, buffers));
    end(fixture, [session]);
}

#[test]
fn sessions_that_share_a_gpu_run_in_turns_and_pay_for_them() {
    const RUNS: u64 = 3;
    let fixture = CudaFixture::new(&format!("{SETTINGS}\n{HANG}"));
    let graph = long_node();
    let bytes = graph.slot_sizes()[0] as u64;
    let hung = HungGpu::new(&fixture);
    let busy = hung.busy_session();
    let mut sessions = [Session::new(&fixture, bytes), Session::new(&fixture, bytes)];
    let program = fixture.program(0, &graph);
    std::thread::scope(|scope| {
        for session in &mut sessions {
            let program = &program;
            scope.spawn(move || {
                for _ in 0..RUNS {
                    session.queue.run(program, &whole_buffer(&session.buffer)).unwrap();
                }
                session.queue.mark().wait(test_deadline()).unwrap();
            });
        }
    });
    // The two later runs replay.
    assert_eq!(fixture.driver_calls("cuGraphLaunch"), 2 * (RUNS - 1) * SEGMENTS);
    for session in &sessions {
        assert!(session.budget.device_time() > Duration::ZERO);
    }
    assert_eq!(busy.budget.device_time(), Duration::ZERO, "it was alone");
    drop((hung, program));
    end(fixture, sessions.into_iter().chain([busy]));
}

/// A held run on new addresses gives way after each segment. When it goes on, it must not use the graphs of the addresses that it
/// replaces for other segments.
#[test]
fn a_run_on_new_addresses_goes_on_after_it_gave_way() {
    /// More than a program keeps graphs for.
    const SETS: usize = 9;
    let fixture = CudaFixture::new(&format!("{SETTINGS}\n{HANG}"));
    // Its segments have different numbers of launches.
    let graph = long_node_before(2);
    let bytes = graph.slot_sizes()[0] as u64;
    let programs = [fixture.program(0, &graph), fixture.program(0, &graph)];
    let hung = HungGpu::new(&fixture);
    let busy = hung.busy_session();
    let mut sessions: Vec<_> = programs.iter().map(|_| Session::new(&fixture, bytes)).collect();
    let gate = Timeline::new();
    for set in 1..=SETS as u64 {
        for (session, program) in sessions.iter_mut().zip(&programs) {
            session.buffer = fixture.devices[0].alloc(bytes, &session.budget).unwrap();
            // Both are held, and contend for the device's thread.
            session.queue.wait(&TimelinePoint::new(&gate, set)).unwrap();
            for _ in 0..if set < SETS as u64 { 2 } else { 1 } {
                session.queue.run(program, &whole_buffer(&session.buffer)).unwrap();
            }
        }
        gate.advance(set);
        for session in &mut sessions {
            assert_eq!(session.queue.mark().wait(test_deadline()), Ok(()), "set {set}");
        }
    }
    drop((hung, programs));
    end(fixture, sessions.into_iter().chain([busy]));
}

/// A stream that waits for another queue has no turn, so other sessions go on.
#[test]
fn a_stream_that_waits_for_another_queue_holds_no_turn() {
    let fixture = CudaFixture::new(HANG);
    let graph = chain(16, &[INCREMENT; 4]);
    let hung = HungGpu::new(&fixture);
    let mut busy = hung.busy_session();
    let (mut waits, mut goes_on) = (Session::new(&fixture, 256), Session::new(&fixture, 256));
    upload(&mut *goes_on.queue, &goes_on.buffer.whole(), &[1.0]).unwrap();
    waits.queue.wait(&busy.queue.mark()).unwrap();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| waits.run(&fixture, &graph));
        (0..3).for_each(|_| goes_on.run(&fixture, &graph).unwrap());
        assert_eq!(read(&mut *goes_on.queue, &goes_on.buffer.whole(), 1), Ok(vec![13.0]));
        drop(hung);
        // The second device is lost, and what waits for it fails.
        let _ = run.join().unwrap();
    });
    assert!(waits.queue.mark().wait(test_deadline()).is_err());
    end(fixture, [busy, waits, goes_on]);
}

/// The thread that submits a program behind a wait is the one that ends the wait later.
#[test]
fn a_program_behind_a_wait_of_its_own_thread_is_submitted() {
    let fixture = CudaFixture::new(&format!("{SETTINGS}\n{HANG}"));
    let hung = HungGpu::new(&fixture);
    let (busy, graph) = (hung.busy_session(), long_node());
    let mut session = Session::new(&fixture, graph.slot_sizes()[0] as u64);
    let own = Timeline::new();
    session.queue.wait(&TimelinePoint::new(&own, 1)).unwrap();
    session.run(&fixture, &graph).unwrap();
    let point = session.queue.mark();
    assert_eq!(point.poll(), Ok(false));
    own.advance(1);
    point.wait(test_deadline()).unwrap();
    drop((point, hung));
    end(fixture, [busy, session]);
}

#[test]
fn an_abort_ends_a_program_that_waits() {
    let fixture = CudaFixture::new(HANG);
    let hung = HungGpu::new(&fixture);
    let (busy, graph) = (hung.busy_session(), chain(16, &[COSTLY]));
    let mut session = Session::new(&fixture, 256);
    session.queue.wait(&hung.point).unwrap();
    let aborter = session.queue.aborter().unwrap();
    std::thread::scope(|scope| {
        let queries = fixture.driver_calls("cuEventQuery");
        let run = scope.spawn(|| session.run(&fixture, &graph));
        while fixture.driver_calls("cuEventQuery") == queries {
            std::thread::yield_now();
        }
        aborter.abort();
        assert_eq!(run.join().unwrap(), Err(DeviceError::Ended));
    });
    assert_eq!(session.run(&fixture, &graph), Err(DeviceError::Ended));
    // Other sessions go on.
    let mut other = Session::new(&fixture, 256);
    other.run(&fixture, &graph).unwrap();
    other.queue.mark().wait(test_deadline()).unwrap();
    let point = session.queue.mark();
    assert_eq!(point.poll(), Ok(false), "the stream is not done");
    drop(hung);
    assert!(point.wait(test_deadline()).is_err());
    drop(point);
    end(fixture, [busy, session, other]);
}

/// A fault fails the context. All sessions that have or wait for a turn get the error.
#[test]
fn a_failed_context_ends_all_waits() {
    let fixture = CudaFixture::new("CUDAEMU_MAX_INSTRUCTIONS=10K");
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [1 << 20, 1, 1, 1]).unwrap();
    b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let endless = Arc::new(b.build());
    let light = chain(16, &[DOUBLE]);
    let mut bad = Session::new(&fixture, endless.slot_sizes()[0] as u64);
    let mut others: Vec<_> = (0..3).map(|_| Session::new(&fixture, 256)).collect();
    std::thread::scope(|scope| {
        for other in &mut others {
            let (fixture, light) = (&fixture, &light);
            scope.spawn(move || {
                // The device may be lost by now.
                let Ok(program) = fixture.devices[0].prepare(Arc::clone(light)) else { return };
                let bindings = whole_buffer(&other.buffer);
                while other.queue.run(&program, &bindings).is_ok() {}
            });
        }
        // Alone, it is submitted before it fails.
        let _ = bad.run(&fixture, &endless);
        assert!(matches!(bad.queue.mark().wait(test_deadline()), Err(DeviceError::Lost { .. })));
    });
    for other in &mut others {
        assert!(matches!(other.queue.mark().wait(test_deadline()), Err(DeviceError::Lost { .. })));
    }
}
