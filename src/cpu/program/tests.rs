//! Runs that fail or pause; the barriers of a run.

mod barriers;
mod claims;
mod collectives;
mod pauses;

use super::*;
use crate::cpu::CpuDevice;
use crate::device::{Device, MemoryBudget, Program};
use crate::graph::Builder;
use crate::ops::norm::Norm;
use crate::tensor::DType;
use std::time::{Duration, Instant};

/// A graph of one node, large enough to be shared, whose kernel panics on one worker while the other workers wait at a
/// barrier.
fn faulty(worker: usize) -> (Arc<Graph>, CpuProgram) {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [64, 64, 1, 1]).unwrap();
    b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let graph = Arc::new(b.build());
    let code = CpuProgram::with_patterns(&graph, 2, &[], |_| {
        let kernel = Kernel::new(SMALL_PROGRAM_COST, move |work| {
            assert!(work.member.is_leader() != (worker == 0), "worker {worker} panics on purpose");
            work.sync();
        });
        Ok(kernel.with_syncs(1))
    });
    (graph, code.unwrap())
}

#[test]
fn panic_on_any_worker_fails_only_its_queue() {
    let device = CpuDevice::new("CPU", 2, MathMode::Exact, 1 << 20).unwrap();
    let budget = MemoryBudget::new(1 << 20);
    for worker in [0, 1] {
        let (graph, code) = faulty(worker);
        let program = Program::new(Arc::clone(&graph), Box::new(code));
        let buffer = device.alloc(1 << 16, &budget).unwrap();
        let (mut queue, until) = (device.queue(&budget).unwrap(), Instant::now() + Duration::from_secs(60));
        let failure = loop {
            // A worker that wakes too late for a run does not join it, so the panic may need several runs.
            let ran = queue.run(&program, &Arc::from([buffer.whole()]));
            let ran = ran.and_then(|()| queue.download(buffer.whole())?.wait(Some(until)).map(drop));
            if let Err(failure) = ran {
                break failure.to_string();
            }
            assert!(Instant::now() < until, "worker {worker} never joined a run");
        };
        assert!(failure.contains(&format!("RMS_NORM panicked: worker {worker} panics on purpose")), "{failure}");
        let mut other = device.queue(&budget).unwrap();
        other.fill(buffer.whole(), 7).unwrap();
        assert!(other.download(buffer.whole()).unwrap().wait(Some(until)).unwrap().iter().all(|&b| b == 7));
    }
}
