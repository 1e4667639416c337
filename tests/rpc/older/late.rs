//! What a server of an older version says late: how a graph ended.

use super::front::{GEN0, V3_0};
use super::{Old, account, deadline, network};
use fanout::device::{DeviceError, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What was submitted before a graph is known to have failed fails with it, and what waits for that, and nothing else.
#[test]
fn nothing_is_reached_by_way_of_a_graph_that_failed() {
    for (version, dropped) in [(GEN0, false), (V3_0, false), (V3_0, true)] {
        let what = format!("{}, dropped: {dropped}", version.name);
        let old = Old::new(version);
        let device = old.device();
        let graph = Arc::new(network(&version).0);
        let regions = graph.slots().iter().map(|&n| device.alloc(n as u64, &account()).unwrap().whole());
        let bindings: Arc<[Region]> = regions.collect();
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let mut queues = [0; 4].map(|_| device.queue(&account()).unwrap());
        let gate = old.front.seen.gate.lock().unwrap();
        old.front.seen.status.store(255, Ordering::SeqCst);
        // The first three in a chain, the last by itself.
        let (mut reads, mut marks) = (Vec::new(), Vec::new());
        queues[0].run(&program, &bindings).unwrap();
        for (at, queue) in queues.iter_mut().enumerate() {
            if (1..3).contains(&at) {
                queue.wait(&marks[at - 1]).unwrap();
            }
            reads.push(queue.download(bindings[0].clone()).unwrap());
            marks.push(queue.mark());
        }
        if dropped {
            drop(queues);
            // The tickets are all that is left of the queues.
            marks.clear();
        }
        drop(gate);
        let told = |at: usize, outcome: Result<(), DeviceError>| match outcome {
            Ok(()) => assert_eq!(at, 3, "{what}"),
            Err(e) => assert!(at < 3 && e.to_string().contains("GRAPH_COMPUTE"), "{what}: queue {at}: {e}"),
        };
        reads.into_iter().enumerate().for_each(|(at, read)| told(at, read.wait(deadline()).map(drop)));
        marks.iter().enumerate().for_each(|(at, mark)| told(at, mark.wait(deadline())));
    }
}
