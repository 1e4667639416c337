//! Pipelining in virtual time: with several runs in flight over a chain of devices, the makespan is that of an ideal pipeline.

use fanout::device::{Device, MemoryBudget};
use fanout::ops::unary::Unary;
use fanout::sched::{Options, Scheduler, TaskBuilder};
use fanout::tensor::DType;
use fanout_testing::delaying_device::{DelayingDevice, Ticks, VirtualTime};
use std::sync::Arc;

/// Time that each device takes for its part of a run.
const SERVICE_TICKS: Ticks = 1000;

/// The makespan of `runs` runs over a chain of `stages` devices, including a read of each result.
fn makespan(stages: usize, runs: usize, depth: usize) -> Ticks {
    let world = VirtualTime::new();
    let device = |i| DelayingDevice::new(&world, &format!("S{i}"), SERVICE_TICKS).with_time_per_byte(1).shared();
    let devices: Vec<Arc<dyn Device>> = (0..stages).map(device).collect();
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [1, 1, 1, 1]).unwrap();
    let mut last = x;
    for stage in 0..stages {
        last = b.node(Unary::Sqr, &[Some(last)]).unwrap();
        b.pin(stage).unwrap();
    }
    b.output(last).unwrap();
    let task = Arc::new(b.build().unwrap());
    let options = Options::default().with_depth(depth);
    let mut scheduler = Scheduler::new(devices, options, &MemoryBudget::new(1 << 30)).unwrap();
    let mut prepared = scheduler.build(&task).unwrap();
    let run = |_| {
        scheduler.submit(&mut prepared, &[(x, &[0; 4])]).unwrap();
        scheduler.read(&prepared, last).unwrap()
    };
    let results: Vec<_> = (0..runs).map(run).collect();
    results.into_iter().for_each(|result| assert_eq!(result.wait(None), Ok(vec![0; 4])));
    scheduler.synchronize(None).unwrap();
    let computed = runs as Ticks * SERVICE_TICKS;
    assert!(
        (0..stages).all(|stage| world.busy(stage).0 == computed),
        "each device must compute its part of each run exactly once"
    );
    world.makespan()
}

#[test]
fn runs_in_flight_take_at_most_5_percent_longer_than_an_ideal_pipeline() {
    for stages in 2..=8 {
        for runs in 2..=8 {
            let ideal = (runs + stages - 1) as Ticks * SERVICE_TICKS;
            let took = makespan(stages, runs, 4);
            assert!((ideal..=ideal + ideal / 20).contains(&took), "{stages} stages, {runs} runs: {took}, not {ideal}");
        }
    }
}

#[test]
fn runs_at_depth_1_are_serial() {
    for (stages, runs) in [(2, 2), (3, 8), (8, 3)] {
        let serial = (runs * stages) as Ticks * SERVICE_TICKS;
        let took = makespan(stages, runs, 1);
        assert!((serial..=serial + serial / 20).contains(&took), "{stages} stages, {runs} runs: {took}, not {serial}");
    }
}
