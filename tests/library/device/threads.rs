//! Changing the number of a device's threads, also while its queues run.

use super::{MEMORY, counting, device, floats, test_deadline, upload};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::noop::NoopDevice;
use fanout::device::{
    Device, DeviceError, DeviceKind, HostThreads, MemoryBudget, Program, Queue, Region, UploadSource,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::reduce::Reduce;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

#[test]
fn host_threads_is_present_only_on_devices_with_threads() {
    let cpu = device(2);
    for (requested, ok, then) in [(5, true, 5), (1, true, 1), (0, false, 1), (1, true, 1), (3, true, 3)] {
        assert_eq!(cpu.set_threads(requested).is_ok(), ok, "{requested} threads");
        assert_eq!(cpu.threads(), then);
    }
    assert!(matches!(cpu.set_threads(0), Err(DeviceError::Misuse(_))));
    let gpu = NoopDevice::new("GPU", DeviceKind::Gpu).shared();
    assert!(gpu.host_threads().is_none());
    // A fallback device has this capability if either of its devices has it.
    let behind = Fallback::new(Arc::clone(&gpu), Arc::clone(&cpu) as _);
    behind.host_threads().unwrap().set_threads(4).unwrap();
    assert_eq!(cpu.threads(), 4);
    let (first, second) = (device(1), device(1));
    Fallback::new(Arc::clone(&first) as _, Arc::clone(&second) as _).set_threads(2).unwrap();
    assert_eq!((first.threads(), second.threads()), (2, 2));
    assert!(Fallback::new(Arc::clone(&gpu), gpu).host_threads().is_none());
}

fn values(n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(3);
    (0..n).map(|_| rng.f32() - 0.5).collect()
}

/// A graph whose kernels use scratch memory per worker and shared scratch memory: softmax(a · b) with quantised weights.
fn graph_with_scratch() -> Arc<Graph> {
    let mut b = Builder::new();
    let (a, x) = (b.leaf(DType::Q4_K, [512, 512, 1, 1]).unwrap(), b.leaf(DType::F32, [512, 40, 1, 1]).unwrap());
    let y = b.node(MulMat::PLAIN, &[Some(a), Some(x)]).unwrap();
    b.node(SoftMax { scale: 0.1, max_bias: 0.0 }, &[Some(y)]).unwrap();
    Arc::new(b.build())
}

#[test]
fn programs_run_with_more_and_fewer_threads_than_at_preparation() {
    let graph = graph_with_scratch();
    for path in [MathMode::Exact, MathMode::Fast] {
        let (device, budget) = (CpuDevice::new("CPU", 2, path, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
        let mut queue = device.queue(&budget).unwrap();
        let region = |id| {
            let tensor = graph.tensor(id).unwrap();
            buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
        };
        let [a, x] = [0, 1].map(|i| region(graph.nodes()[0].srcs[i].unwrap()));
        let mut weights = vec![0; a.bytes() as usize];
        quantiser(DType::Q4_K).unwrap()(&values(512 * 512), &mut weights);
        queue.upload(a, None, UploadSource::Borrowed(&weights)).unwrap();
        let columns: Vec<u8> = values(512 * 40).iter().flat_map(|v| v.to_le_bytes()).collect();
        queue.upload(x, None, UploadSource::Borrowed(&columns)).unwrap();
        let result = region(graph.nodes()[1].dst);
        let run = |queue: &mut dyn Queue, threads: usize| {
            device.set_threads(threads).unwrap();
            queue.fill(result.clone(), 0xff).unwrap();
            queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
            queue.download(result.clone()).unwrap().wait(test_deadline()).unwrap()
        };
        let want = run(&mut *queue, 2);
        assert!(floats(&want).iter().all(|v| v.is_finite()), "{path:?}");
        for threads in [8, 1, 3, 16, 2] {
            assert!(run(&mut *queue, threads) == want, "{path:?}, {threads} threads");
        }
    }
}

/// Two queues run while a third thread changes the number of threads: every result is as with one thread.
#[test]
fn the_number_changes_while_queues_run() {
    let (device, budget, n, rounds) = (device(3), MemoryBudget::new(MEMORY), 40_000, 30);
    let over = AtomicBool::new(false);
    let graph = counting(n, 20);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        for start in [1.0, 1000.0] {
            let (tx, device, budget, graph, program) = (tx.clone(), &device, &budget, &graph, &program);
            scope.spawn(move || {
                let buffer = device.alloc(graph.slot_sizes()[0] as u64, budget).unwrap();
                let mut queue = device.queue(budget).unwrap();
                upload(&mut *queue, &buffer, &vec![1.0; graph.slot_sizes()[0] / 4]);
                upload(&mut *queue, &buffer, &vec![start; n]);
                runs(&mut *queue, program, &Arc::from([buffer.whole()]), rounds);
                let got =
                    queue.download(buffer.region(0, 4 * n as u64).unwrap()).unwrap().wait(test_deadline()).unwrap();
                let want = start + (rounds * graph.nodes().len()) as f32;
                tx.send(floats(&got).iter().all(|&v| v == want)).unwrap();
            });
        }
        let (device, over) = (&device, &over);
        scope.spawn(move || {
            let mut rng = fastrand::Rng::with_seed(1);
            while !over.load(Ordering::Relaxed) {
                device.set_threads(rng.usize(1..7)).unwrap();
            }
        });
        let results = [rx.recv().unwrap(), rx.recv().unwrap()];
        over.store(true, Ordering::Relaxed);
        assert_eq!(results, [true; 2]);
    });
    // The last value is in effect.
    device.set_threads(2).unwrap();
    assert_eq!(device.threads(), 2);
}

/// Runs the program on a thread of the device and inline; an inline program may continue on such a thread.
fn runs(queue: &mut dyn Queue, program: &Program, bindings: &Arc<[Region]>, rounds: usize) {
    for round in 0..rounds {
        if round % 3 == 0 {
            queue.run(program, bindings).unwrap();
        } else {
            queue.run_inline(program, bindings, std::time::Duration::from_micros(200)).unwrap();
        }
    }
}

/// Sums of `n` floats, `nodes` times, between two tensors. Each node is one row, so that one worker runs it.
fn sums(n: usize, nodes: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let ends = [b.leaf(DType::F32, [n, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [n, 1, 1, 1]).unwrap()];
    let desc = b.tensor(ends[0]).unwrap().desc;
    let mut last = ends[0];
    for node in 0..nodes {
        let onto = b.view(ends[(node + 1) % 2], desc, 0).unwrap();
        last = b.node_into(Reduce::Cumsum, &[Some(last)], onto).unwrap();
    }
    Arc::new(b.build())
}

/// A program of seconds ends its turn when another session has work, between steps that workers share and between steps that one
/// worker runs.
#[test]
fn programs_of_several_sessions_take_turns() {
    for (long, threads) in [(counting(1 << 20, 4000), 2), (sums(4 << 20, 500), 2), (sums(4 << 20, 500), 1)] {
        // The second program is large enough to need the same turns as the first one.
        let (device, short) = (device(threads), counting(1 << 20, 8));
        let queue_with = |graph: &Arc<Graph>| {
            let budget = MemoryBudget::new(MEMORY);
            let program = device.prepare(Arc::clone(graph)).unwrap();
            let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
            let mut queue = device.queue(&budget).unwrap();
            queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
            queue
        };
        let (mut first, mut second) = (queue_with(&long), queue_with(&short));
        let (first_done, second_done) = (first.mark(), second.mark());
        second_done.wait(test_deadline()).unwrap();
        assert_eq!(first_done.poll(), Ok(false), "{threads} threads");
        drop(first);
        assert_eq!(first_done.wait(test_deadline()), Err(DeviceError::Ended));
    }
}
