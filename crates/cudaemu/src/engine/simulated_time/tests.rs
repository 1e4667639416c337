//! Tests of the timeline without streams: entries, threads, order.

use super::*;

const US: Picos = 1_000_000;

const RATES: SimulatedRates = SimulatedRates {
    kernel_us: Some(10.0),
    kernel_gbps: None,
    launch_us: Some(2.0),
    copy_us: None,
    host_gbps: Some(20.0),
    peer_gbps: Some(50.0),
    device_gbps: Some(1000.0),
    kernels_at_once: 1,
    alloc_sync_us: None,
    compile_ms: None,
};

/// Kernels take 10 µs, and 1 µs per 100,000 bytes.
const BY_BYTES: SimulatedRates = SimulatedRates { kernel_gbps: Some(100.0), launch_us: None, ..RATES };

fn me() -> ThreadId {
    std::thread::current().id()
}

fn other_thread() -> ThreadId {
    std::thread::spawn(|| std::thread::current().id()).join().unwrap()
}

/// Submits on the other side of the clocks: the end of an operation that nothing precedes but `after`.
fn end(time: &mut Timeline, cost: OpCost, after: &[EntryId]) -> Picos {
    let entry = time.submit(cost, me(), after.to_vec());
    time.end(entry).unwrap()
}

fn bytes(device: u64) -> MovedBytes {
    MovedBytes { device, ..MovedBytes::default() }
}

#[test]
fn operations_take_the_time_of_their_rates() {
    for (cost, took, with_fixed_part) in [
        (OpCost::Nothing, 0, 0),
        (OpCost::Kernel(0), 10, 10),
        (OpCost::ToDevice(0, 1_000_000), 50, 53),
        (OpCost::ToHost(0, 2_000_000), 100, 103),
        (OpCost::Peer(0, 1, 1_000_000), 20, 23),
        (OpCost::Within(0, 1_000_000), 1, 4),
        (OpCost::ToDevice(0, 0), 0, 3),
    ] {
        assert_eq!(end(&mut Timeline::new(RATES), cost, &[]), took * US, "{cost:?}");
        let fixed = SimulatedRates { copy_us: Some(3.0), ..RATES };
        assert_eq!(end(&mut Timeline::new(fixed), cost, &[]), with_fixed_part * US, "{cost:?}");
    }
    let mut off = Timeline::new(SimulatedRates::default());
    assert!(!off.is_enabled() && Timeline::new(RATES).is_enabled());
    off.launch(me());
    off.wait(me(), vec![EntryId(7)]);
    assert_eq!(off.submit(OpCost::Kernel(0), me(), vec![EntryId(7)]), EntryId(0));
    assert_eq!((off.ends.len(), off.unresolved.len(), off.totals(0).host_waits), (0, 0, 1));
}

#[test]
fn kernels_and_both_copy_directions_overlap() {
    let mut time = Timeline::new(RATES);
    // Two streams, each: 50 µs to the device, kernel, 50 µs back. Copies in the same direction serialise.
    let mut last = [EntryId(0); 2];
    for (cost, ends) in [
        (OpCost::ToDevice(0, 1_000_000), [50, 100]),
        (OpCost::Kernel(0), [60, 110]),
        (OpCost::ToHost(0, 1_000_000), [110, 160]),
    ] {
        last = last.map(|last| time.submit(cost, me(), vec![last]));
        assert_eq!(last.map(|entry| time.end(entry)), ends.map(|us| Some(us * US)), "{cost:?}");
    }
    // Another device has its own resources.
    assert_eq!(end(&mut time, OpCost::Kernel(1), &[]), 10 * US);
    for (from, to, us) in [(0, 1, 20), (1, 0, 20), (0, 1, 40)] {
        assert_eq!(end(&mut time, OpCost::Peer(from, to, 1_000_000), &[]), us * US);
    }
    let SimulatedTime { makespan, busy, host_waits } = time.totals(3);
    assert_eq!((makespan, busy, host_waits), (160 * US, vec![20 * US, 10 * US, 0], 0));
}

#[test]
fn a_kernel_takes_its_fixed_time_and_the_time_of_its_bytes() {
    for (moved, us) in [
        (MovedBytes::default(), 10),
        (bytes(500_000), 15),
        (MovedBytes { peer: 500_000, ..MovedBytes::default() }, 20),
        (MovedBytes { host: 500_000, ..MovedBytes::default() }, 35),
        (MovedBytes { device: 500_000, peer: 500_000, host: 500_000 }, 50),
    ] {
        let mut time = Timeline::new(BY_BYTES);
        let kernel = time.submit(OpCost::Kernel(0), me(), Vec::new());
        assert_eq!(time.end(kernel), None);
        time.executed(kernel, moved);
        assert_eq!(time.end(kernel), Some(us * US), "{moved:?}");
        // Executed again, without bytes: no change.
        time.executed(kernel, MovedBytes::default());
        assert_eq!(time.totals(1).busy, [us * US]);
    }
}

/// Two streams of one device with kernels of 11 to 14 µs, and a join of both: the ends are the same for each order of
/// execution.
#[test]
fn times_do_not_depend_on_the_order_of_execution() {
    for seed in 0..20 {
        let mut random = crate::engine::ScheduleRng::new(seed);
        let mut time = Timeline::new(BY_BYTES);
        let mut queues = [0; 2].map(|_| VecDeque::new());
        let mut last = [EntryId(0); 2];
        for kernel in 0..4 {
            let stream = kernel % 2;
            last[stream] = time.submit(OpCost::Kernel(0), me(), vec![last[stream]]);
            queues[stream].push_back((last[stream], bytes(100_000 * (kernel as u64 + 1))));
        }
        let both = time.join(last.to_vec());
        let copy = time.submit(OpCost::ToHost(0, 20_000), me(), vec![both]);
        assert_eq!([both, copy].map(|entry| time.end(entry)), [None; 2]);
        while let Some((entry, moved)) = {
            let ready: Vec<usize> = (0..2).filter(|&stream| !queues[stream].is_empty()).collect();
            if ready.is_empty() { None } else { queues[ready[random.choose(ready.len())]].pop_front() }
        } {
            time.executed(entry, moved);
        }
        // 11 + 12 + 13 + 14 µs in turns.
        let ends = [last[0], last[1], both, copy].map(|entry| time.end(entry));
        assert_eq!(ends, [36, 50, 50, 51].map(|us| Some(us * US)), "seed {seed}");
        assert!(time.unresolved.is_empty());
    }
}

/// The first kernel waits for the host, which waits for the second one's time.
#[test]
fn executed_operations_resolve_ahead_of_one_that_is_not() {
    let mut time = Timeline::new(BY_BYTES);
    let [first, second] = [0; 2].map(|_| time.submit(OpCost::Kernel(0), me(), Vec::new()));
    let after_first = time.submit(OpCost::Kernel(1), me(), vec![first]);
    time.executed(second, bytes(0));
    assert_eq!((time.end(second), time.poll(me(), &[second])), (None, false));
    time.resolve_executed();
    assert_eq!((time.end(first), time.end(second)), (None, Some(10 * US)));
    while !time.poll(me(), &[second]) {}
    assert_eq!(time.end(time.clock(me())), Some(10 * US));
    // Work without a resource resolves at once.
    let record = time.submit(OpCost::Nothing, me(), vec![second]);
    assert_eq!(time.end(record), Some(10 * US));
    // The first kernel was submitted before the thread waited, but its slot is taken.
    time.executed(after_first, bytes(0));
    time.executed(first, bytes(0));
    assert_eq!([first, after_first].map(|entry| time.end(entry)), [Some(20 * US), Some(30 * US)]);
    assert!(time.unresolved.is_empty());
}

#[test]
fn each_thread_has_its_own_clock() {
    let mut time = Timeline::new(RATES);
    let other = other_thread();
    let mut clocks = |change: &dyn Fn(&mut Timeline)| {
        change(&mut time);
        [me(), other].map(|thread| time.end(time.clock(thread)).unwrap() / US)
    };
    assert_eq!(clocks(&|time| time.launch(me())), [2, 0]);
    assert_eq!(clocks(&|time| time.launch(me())), [4, 0]);
    let wait = |us: Picos| {
        move |time: &mut Timeline| {
            let point = time.append_known(us * US);
            time.wait(me(), vec![point]);
        }
    };
    assert_eq!(clocks(&wait(3)), [4, 0]);
    assert_eq!(clocks(&wait(30)), [30, 0]);
    assert_eq!(clocks(&Timeline::restart), [30, 30]);
    assert_eq!(clocks(&|time| time.launch(other)), [30, 32]);
}

#[test]
fn a_restart_measures_from_the_end_of_all_earlier_work() {
    let mut time = Timeline::new(SimulatedRates { launch_us: None, ..RATES });
    let kernel = time.submit(OpCost::Kernel(0), me(), Vec::new());
    time.wait(me(), vec![kernel]);
    for _ in 0..2 {
        time.restart();
        assert_eq!(time.totals(1), SimulatedTime { makespan: 0, busy: vec![0], host_waits: 0 });
        let other = other_thread();
        time.submit(OpCost::Kernel(1), other, Vec::new());
        time.wait(other, vec![kernel]);
        assert_eq!(time.totals(2), SimulatedTime { makespan: 10 * US, busy: vec![0, 10 * US], host_waits: 1 });
    }
    assert_eq!(time.end(time.start), Some(20 * US));
}

/// A point that ends later is not reached yet; each query advances the clock by twice as much as the one before.
#[test]
fn each_failed_query_doubles_the_time_it_takes() {
    let mut time = Timeline::new(RATES);
    let now = |time: &Timeline| time.end(time.clock(me())).unwrap() / US;
    let [soon, late] = [20, 50].map(|us| time.append_known(us * US));
    assert!(time.poll(me(), &[]));
    let mut clocks = Vec::new();
    while !time.poll(me(), &[soon]) {
        clocks.push(now(&time));
    }
    assert_eq!((clocks, now(&time)), (vec![1, 3, 7, 15], 20));
    // With other calls in between, every query takes only the first query's time.
    for _ in 0..3 {
        time.reset_polling(me());
        assert!(!time.poll(me(), &[soon, late]));
    }
    assert_eq!(now(&time), 23);
    assert!(time.poll(me(), &[soon]) && now(&time) == 23);
    // Only the series of queries that waited counts.
    assert_eq!(time.totals(0).host_waits, 1);
}
