//! Simulated time of kernels that take the time of their bytes: makespan, busy times, and number of waits.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use super::support::{GraphExec, Kernels, add, address, context, emulator, graph, ok};
use cudaemu::test::SimulatedTime;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};

/// A kernel takes 10 µs, and 1 µs per 1000 bytes of its device's memory or 2000 bytes of another device's.
const RATES: &str = "CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=10\nCUDAEMU_KERNEL_GBPS=1\nCUDAEMU_PEER_GBPS=2\n";
/// Elements of each buffer: `add` reads and writes 4000 bytes and takes 18 µs.
const COUNT: usize = 1000;
const ADD: f64 = 18.0;

/// What a test needs on one device.
struct OneDevice {
    context: Arc<CudaContext>,
    kernels: Kernels,
    streams: [Arc<CudaStream>; 2],
    data: [CudaSlice<f32>; 2],
}

impl OneDevice {
    fn new(device: usize) -> Self {
        let context = context(device);
        let streams = [0; 2].map(|_| context.new_stream().unwrap());
        let data = streams.each_ref().map(|stream| stream.alloc_zeros(COUNT).unwrap());
        Self { kernels: Kernels::load(&context), context, streams, data }
    }

    /// Adds 1 to a stream's buffer, in that stream.
    fn add(&mut self, stream: usize) {
        add(&self.streams[stream], &self.kernels, &mut self.data[stream], 1.0);
    }
}

/// Makes a stream of the second device wait for the first stream of the first one.
fn wait_for_first(devices: &[OneDevice; 2]) {
    let event = devices[0].streams[0].record_event(None).unwrap();
    devices[1].streams[0].wait(&event).unwrap();
}

/// Work of a test, and the simulated time that it takes.
struct Case {
    name: &'static str,
    work: fn(&mut [OneDevice; 2]),
    makespan_us: f64,
    busy_us: [f64; 2],
    host_waits: u64,
}

const CASES: &[Case] = &[
    Case { name: "nothing", work: |_| {}, makespan_us: 0.0, busy_us: [0.0; 2], host_waits: 0 },
    Case {
        name: "kernels of one stream add up",
        work: |[a, _]| (0..3).for_each(|_| a.add(0)),
        makespan_us: 3.0 * ADD,
        busy_us: [3.0 * ADD, 0.0],
        host_waits: 0,
    },
    Case {
        name: "bytes count in sectors of 32, and once in a launch",
        work: |[a, _]| {
            let mut data = a.data[0].slice_mut(1..2);
            let mut launch = a.streams[0].launch_builder(&a.kernels.add);
            use cudarc::driver::{LaunchConfig, PushKernelArg};
            launch.arg(&mut data).arg(&1.0f32).arg(&1u32);
            // SAFETY: the arguments match the kernel's parameters, and the buffer has one element.
            unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
        },
        makespan_us: 10.064,
        busy_us: [10.064, 0.0],
        host_waits: 0,
    },
    Case {
        name: "two streams of a device take turns",
        work: |[a, _]| (0..4).for_each(|i| a.add(i % 2)),
        makespan_us: 4.0 * ADD,
        busy_us: [4.0 * ADD, 0.0],
        host_waits: 0,
    },
    Case {
        name: "two devices overlap",
        work: |[a, b]| {
            a.add(0);
            b.add(0);
            b.add(1);
        },
        makespan_us: 2.0 * ADD,
        busy_us: [ADD, 2.0 * ADD],
        host_waits: 0,
    },
    Case {
        name: "an event joins two devices",
        work: |devices| {
            devices[0].add(0);
            wait_for_first(devices);
            devices[1].add(0);
        },
        makespan_us: 2.0 * ADD,
        busy_us: [ADD; 2],
        host_waits: 0,
    },
    Case {
        name: "a peer copy takes the time of its bytes, after the kernel before it and before the one behind it",
        work: |devices| {
            devices[0].add(0);
            let [a, b] = devices;
            b.streams[0].memcpy_dtod(&a.data[0], &mut b.data[0]).unwrap();
            b.add(0);
        },
        makespan_us: 2.0 * ADD + 2.0,
        busy_us: [ADD; 2],
        host_waits: 0,
    },
    Case {
        name: "a kernel reads memory of another device at the rate between devices",
        work: |[a, b]| a.kernels.sum(&a.streams[0], &mut a.data[0], &b.data[0]),
        makespan_us: ADD + 2.0,
        busy_us: [ADD + 2.0, 0.0],
        host_waits: 0,
    },
    Case {
        name: "a graph of two branches runs twice",
        work: |[a, _]| {
            let graph = graph();
            for data in &a.data {
                a.kernels.add_node(graph, (address(data, &a.streams[0]), 1.0, COUNT as u32), &[]);
            }
            let exec = GraphExec::new(graph);
            exec.launch(&a.streams[0]);
            exec.launch(&a.streams[0]);
        },
        makespan_us: 4.0 * ADD,
        busy_us: [4.0 * ADD, 0.0],
        host_waits: 0,
    },
    Case {
        name: "work after a synchronisation starts after it, on any device",
        work: |[a, b]| {
            a.add(0);
            a.streams[0].synchronize().unwrap();
            b.add(0);
            b.context.synchronize().unwrap();
        },
        makespan_us: 2.0 * ADD,
        busy_us: [ADD; 2],
        host_waits: 2,
    },
    Case {
        name: "so does work after a copy to pageable memory",
        work: |[a, b]| {
            a.add(0);
            a.streams[0].memcpy_dtoh(&a.data[0], &mut [0.0; COUNT]).unwrap();
            b.add(0);
        },
        makespan_us: 2.0 * ADD,
        busy_us: [ADD; 2],
        host_waits: 1,
    },
    Case {
        name: "so does work after a query that succeeds, and all queries before it count as one wait",
        work: |[a, b]| {
            a.add(0);
            let event = a.streams[0].record_event(None).unwrap();
            while !event.is_complete() {}
            b.add(0);
        },
        makespan_us: 2.0 * ADD,
        busy_us: [ADD; 2],
        host_waits: 1,
    },
    Case {
        name: "a failed query waits for nothing",
        work: |[a, b]| {
            a.add(0);
            assert!(!a.streams[0].record_event(None).unwrap().is_complete());
            b.add(0);
        },
        makespan_us: 1.0 + ADD,
        busy_us: [ADD; 2],
        host_waits: 0,
    },
];

/// Runs each case under several seeds, all in one driver: each begins where the one before it ended.
#[test]
fn makespan_busy_times_and_waits_follow_from_bytes_and_dependencies() {
    for seed in 0..8 {
        let emulator = emulator(&format!("{RATES}CUDAEMU_SEED={seed}"));
        {
            let mut devices = [0, 1].map(OneDevice::new);
            devices[0].context.bind_to_thread().unwrap();
            // SAFETY: the context is alive.
            ok(unsafe { sys::cuCtxEnablePeerAccess(devices[1].context.cu_ctx(), 0) });
            for case in CASES {
                emulator.restart_simulated_time();
                (case.work)(&mut devices);
                let expected = SimulatedTime {
                    makespan_us: case.makespan_us,
                    busy_us: case.busy_us.to_vec(),
                    host_waits: case.host_waits,
                };
                assert_eq!(emulator.simulated_time(), expected, "{}, seed {seed}", case.name);
                // Reading the time changes nothing.
                assert_eq!(emulator.simulated_time(), expected, "{}, seed {seed}", case.name);
            }
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

/// Lets threads submit in a given order.
struct Turns {
    order: Vec<usize>,
    next: Mutex<usize>,
    changed: Condvar,
}

impl Turns {
    /// Runs a step when it is this thread's turn.
    fn step<R>(&self, thread: usize, step: impl FnOnce() -> R) -> R {
        let next = self.next.lock().unwrap();
        let mut next = self.changed.wait_while(next, |next| self.order[*next] != thread).unwrap();
        let result = step();
        *next += 1;
        self.changed.notify_all();
        result
    }
}

/// A random order of the steps of two threads. Each has rounds of two steps; the second step of a round needs the first one of
/// the other thread.
fn random_order(rounds: usize, random: &mut fastrand::Rng) -> Vec<usize> {
    let mut done = [0; 2];
    let mut order = Vec::new();
    while order.len() < 4 * rounds {
        let thread = random.usize(..2);
        let ready = done[thread] < 2 * rounds && (done[thread] % 2 == 0 || done[1 - thread] >= done[thread]);
        if ready {
            done[thread] += 1;
            order.push(thread);
        }
    }
    order.push(2);
    order
}

/// Two threads, one per device: in each round both add, one of them twice, and wait for the other's event. The times are the
/// same for each order in which the threads submit, and each seed of the order of execution.
#[test]
fn times_do_not_depend_on_the_order_in_which_threads_submit() {
    const ROUNDS: usize = 5;
    for seed in 0..20 {
        let emulator = emulator(&format!("{RATES}CUDAEMU_SEED={seed}"));
        {
            let mut devices = [0, 1].map(OneDevice::new);
            let order = random_order(ROUNDS, &mut fastrand::Rng::with_seed(seed));
            let turns = Turns { order, next: Mutex::new(0), changed: Condvar::new() };
            let events = [const { Mutex::new(Vec::new()) }; 2];
            emulator.restart_simulated_time();
            thread::scope(|scope| {
                for (index, device) in devices.iter_mut().enumerate() {
                    let (turns, events) = (&turns, &events);
                    scope.spawn(move || {
                        for round in 0..ROUNDS {
                            turns.step(index, || {
                                (0..1 + (index + round) % 2).for_each(|_| device.add(0));
                                events[index].lock().unwrap().push(device.streams[0].record_event(None).unwrap());
                            });
                            turns.step(index, || {
                                let events = events[1 - index].lock().unwrap();
                                device.streams[0].wait(&events[round]).unwrap();
                            });
                        }
                        device.streams[0].synchronize().unwrap();
                    });
                }
            });
            let busy_us = [7.0 * ADD, 8.0 * ADD].to_vec();
            let expected = SimulatedTime { makespan_us: 2.0 * ADD * ROUNDS as f64, busy_us, host_waits: 2 };
            assert_eq!(emulator.simulated_time(), expected, "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

/// A stream waits for a value that the program writes when another stream's event is reached: the kernel behind that wait has
/// no duration yet, although it was submitted first.
#[test]
fn a_query_does_not_wait_for_a_kernel_that_waits_for_the_program() {
    for seed in 0..8 {
        let emulator = emulator(&format!("{RATES}CUDAEMU_SEED={seed}"));
        {
            let mut device = OneDevice::new(0);
            let [blocked, free] = device.streams.clone();
            let flag = blocked.alloc_zeros::<u32>(1).unwrap();
            let address = cudarc::driver::DevicePtr::device_ptr(&flag, &blocked).0;
            emulator.restart_simulated_time();
            // SAFETY: the flag outlives the operations.
            ok(unsafe { sys::cuStreamWaitValue32_v2(blocked.cu_stream(), address, 1, 0) });
            device.add(0);
            device.add(1);
            let event = free.record_event(None).unwrap();
            while !event.is_complete() {}
            // SAFETY: as above.
            ok(unsafe { sys::cuStreamWriteValue32_v2(free.cu_stream(), address, 1, 0) });
            let expected = SimulatedTime { makespan_us: 2.0 * ADD, busy_us: vec![2.0 * ADD, 0.0], host_waits: 1 };
            assert_eq!(emulator.simulated_time(), expected, "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn without_rates_only_waits_are_counted() {
    let emulator = emulator("");
    {
        let mut device = OneDevice::new(0);
        emulator.restart_simulated_time();
        device.add(0);
        device.streams[0].synchronize().unwrap();
        let expected = SimulatedTime { makespan_us: 0.0, busy_us: vec![0.0], host_waits: 1 };
        assert_eq!(emulator.simulated_time(), expected);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}
