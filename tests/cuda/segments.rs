//! Segments: a program is one graph launch per slice of estimated time.

use crate::fixture::{CudaFixture, INCREMENT, chain, long_node, read, test_deadline, whole_buffer};
use fanout::device::DeviceError;

/// Launches of 1.3 us that fill a slice of 2 ms.
const LAUNCHES_PER_SLICE: u64 = 1538;

#[test]
fn a_program_is_one_graph_launch_per_slice() {
    let slice = LAUNCHES_PER_SLICE as usize;
    for (name, graph, launches, segments) in [
        ("one slice", chain(16, &vec![INCREMENT; slice]), LAUNCHES_PER_SLICE, 1),
        ("one launch more", chain(16, &vec![INCREMENT; slice + 1]), LAUNCHES_PER_SLICE + 1, 2),
        ("a long node", long_node(), 3, 3),
    ] {
        // With so many multiprocessors, one block has little of the bandwidth.
        let fixture = CudaFixture::new("CUDAEMU_SMS=1024");
        let (program, buffer, mut queue) =
            (fixture.program(0, &graph), fixture.buffer(0, graph.slot_sizes()[0] as u64), fixture.queue(0));
        let bindings = whole_buffer(&buffer);
        for replayed in 0..3 {
            queue.run(&program, &bindings).unwrap();
            let calls = ["cuLaunchKernel", "cuGraphLaunch"].map(|call| fixture.driver_calls(call));
            assert_eq!(calls, [launches, replayed * segments], "{name}");
        }
        if launches > 3 {
            assert_eq!(read(&mut *queue, &buffer.whole(), 16), Ok(vec![3.0 * launches as f32; 16]), "{name}");
        }
        queue.mark().wait(test_deadline()).unwrap();
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn an_abort_ends_a_submission_between_segments() {
    const SEGMENTS: u64 = 3;
    let mut fixture = CudaFixture::new("");
    let launches = (SEGMENTS * LAUNCHES_PER_SLICE) as usize;
    let (program, buffer, mut queue) =
        (fixture.program(0, &chain(16, &vec![INCREMENT; launches])), fixture.buffer(0, 256), fixture.queue(0));
    let (aborter, bindings) = (queue.aborter().unwrap(), whole_buffer(&buffer));
    (0..2).for_each(|_| queue.run(&program, &bindings).unwrap());
    let ran = std::thread::scope(|scope| {
        let run = scope.spawn(|| queue.run(&program, &bindings));
        while fixture.driver_calls("cuGraphLaunch") == SEGMENTS {
            std::thread::yield_now();
        }
        aborter.abort();
        run.join().unwrap()
    });
    let replays = fixture.driver_calls("cuGraphLaunch");
    assert!(ran == Err(DeviceError::Ended) || replays == 2 * SEGMENTS, "{ran:?} after {replays} replays");
    assert_eq!(queue.mark().wait(test_deadline()), Err(DeviceError::Ended));
    drop((queue, program, bindings, buffer));
    assert!(fixture.drop_devices(), "a context was not released in time");
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
}
