//! Cost of scheduling: time to plan, and time and heap allocations of a repeated run, over no-op devices.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod counting_allocator;
mod model;

use fanout::sched::{Options, Plan, Scheduler};
use model::Model;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

const DEVICES: usize = 8;

fn scheduler(model: &Model, depth: usize) -> Scheduler {
    let options = Options::default().with_depth(depth);
    Scheduler::new(model.devices.clone(), options, &model.budget).unwrap()
}

fn median(n: usize, mut work: impl FnMut()) -> Duration {
    let time = |_| {
        let began = Instant::now();
        work();
        began.elapsed()
    };
    let mut times: Vec<_> = (0..n).map(time).collect();
    times.sort_unstable();
    times[n / 2]
}

#[test]
fn a_repeated_run_takes_less_than_50_us_and_allocates_nothing() {
    let model = model::model(DEVICES);
    let inputs = model.input_slices();
    for depth in [1, 4] {
        let mut scheduler = scheduler(&model, depth);
        let mut prepared = scheduler.build(&model.task).unwrap();
        assert_eq!(prepared.plan().splits(), DEVICES, "each device must run its layers as one split");
        // Warm-up: uses each ring copy, and fills the history of timeline points.
        (0..2 * depth + 2).for_each(|_| scheduler.run(&mut prepared, &inputs).unwrap());
        let count = counting_allocator::allocations(|| {
            (0..100).for_each(|_| scheduler.submit(&mut prepared, &inputs).unwrap())
        });
        assert_eq!(count, 0, "allocations of 100 runs submitted at depth {depth}");
        let count =
            counting_allocator::allocations(|| (0..100).for_each(|_| scheduler.run(&mut prepared, &inputs).unwrap()));
        assert_eq!(count, 0, "allocations of 100 runs at depth {depth}");
        let took = median(1001, || scheduler.run(&mut prepared, &inputs).unwrap());
        println!("a repeated run over {DEVICES} devices at depth {depth}: {took:?}");
        // The limit applies only to optimised builds.
        assert!(
            cfg!(debug_assertions) || took < Duration::from_micros(50),
            "a repeated run at depth {depth} took {took:?}"
        );
    }
}

#[test]
fn planning_1500_nodes_takes_less_than_5_ms() {
    let model = model::model(DEVICES);
    let nodes = model.task.graph().nodes().len();
    assert!((1450..=1550).contains(&nodes), "{nodes} nodes");
    println!("building a task of {nodes} nodes: {:?}", median(5, || drop(model::model(DEVICES))));
    for depth in [1, 4] {
        let options = Options::default().with_depth(depth);
        let took = median(21, || drop(Plan::new(Arc::clone(&model.task), &model.devices, &options).unwrap()));
        println!("planning {nodes} nodes over {DEVICES} devices at depth {depth}: {took:?}");
        // The limit applies only to optimised builds.
        assert!(cfg!(debug_assertions) || took < Duration::from_millis(5), "planning at depth {depth} took {took:?}");
    }
}
