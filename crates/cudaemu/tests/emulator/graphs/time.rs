//! Simulated time: event times with configured rates.

use std::sync::Arc;

use super::support::{GraphExec, Kernels, add, address, context, emulator, graph, launch};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

const RATES: &str =
    "CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10\nCUDAEMU_PEER_GBPS=20\nCUDAEMU_DEVICE_GBPS=1000\n";

fn record(stream: &Arc<CudaStream>) -> CudaEvent {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap()
}

/// Microseconds between two events, rounded to a nanosecond.
fn elapsed_us(start: &CudaEvent, end: &CudaEvent) -> f64 {
    (f64::from(start.elapsed_ms(end).unwrap()) * 1e6).round() / 1e3
}

/// Duration in microseconds of `count` concurrent streams that each copy 1 MB to the device, compute, and copy 1 MB back.
fn pipeline_us(context: &Arc<CudaContext>, count: usize) -> f64 {
    let kernels = Kernels::load(context);
    let host = vec![1.0f32; 250_000];
    let main = context.new_stream().unwrap();
    let streams: Vec<_> = (0..count).map(|_| context.new_stream().unwrap()).collect();
    let mut buffers: Vec<_> = streams.iter().map(|stream| stream.alloc_zeros::<f32>(250_000).unwrap()).collect();
    context.synchronize().unwrap();
    let start = record(&main);
    for (stream, data) in streams.iter().zip(&mut buffers) {
        stream.wait(&start).unwrap();
        stream.memcpy_htod(&host, data).unwrap();
    }
    for (stream, data) in streams.iter().zip(&mut buffers) {
        launch(stream, &kernels.add, data, 1.0, 32);
    }
    let mut outs: Vec<Vec<f32>> = vec![vec![0.0; 250_000]; count];
    for ((stream, data), out) in streams.iter().zip(&buffers).zip(&mut outs) {
        stream.memcpy_dtoh(data, out).unwrap();
        main.wait(&stream.record_event(None).unwrap()).unwrap();
    }
    let end = record(&main);
    main.synchronize().unwrap();
    elapsed_us(&start, &end)
}

#[test]
fn copies_and_kernels_of_two_streams_overlap() {
    for seed in 0..10 {
        let emulator = emulator(&format!("{RATES}CUDAEMU_SEED={seed}"));
        {
            let context = context(0);
            assert_eq!(pipeline_us(&context, 1), 300.0, "seed {seed}");
            // In: 0–100 and 100–200; kernels 100–200 and 200–300; out 200–300 and, because the call waits, 300–400.
            assert_eq!(pipeline_us(&context, 2), 400.0, "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn kernels_of_one_device_take_turns_and_those_of_two_overlap() {
    for (settings, devices, expected) in
        [("", [0, 0], 200.0), ("", [0, 1], 100.0), ("CUDAEMU_KERNELS_AT_ONCE=2", [0, 0], 100.0)]
    {
        let emulator = emulator(&format!("{RATES}{settings}"));
        {
            let contexts = devices.map(context);
            let streams = contexts.each_ref().map(|context| context.new_stream().unwrap());
            let kernels = contexts.each_ref().map(Kernels::load);
            let mut data = streams.each_ref().map(|stream| stream.alloc_zeros::<f32>(1).unwrap());
            contexts.iter().for_each(|context| context.synchronize().unwrap());
            let start = record(&streams[0]);
            for i in 0..2 {
                add(&streams[i], &kernels[i], &mut data[i], 1.0);
            }
            let other = streams[1].record_event(None).unwrap();
            streams[0].wait(&other).unwrap();
            let end = record(&streams[0]);
            streams[0].synchronize().unwrap();
            assert_eq!(elapsed_us(&start, &end), expected, "{settings} {devices:?}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn a_graph_launch_costs_the_launch_time_once() {
    let emulator = emulator("CUDAEMU_KERNEL_US=1\nCUDAEMU_LAUNCH_US=5");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.alloc_zeros::<f32>(32).unwrap();
        let time = |work: &mut dyn FnMut()| {
            stream.synchronize().unwrap();
            let start = record(&stream);
            work();
            let end = record(&stream);
            stream.synchronize().unwrap();
            elapsed_us(&start, &end)
        };
        // The thread launches every 5 µs; the last kernel begins at 50.
        assert_eq!(time(&mut || (0..10).for_each(|_| add(&stream, &kernels, &mut data, 1.0))), 51.0);
        let (graph, data_at) = (graph(), address(&data, &stream));
        let mut last = Vec::new();
        for _ in 0..10 {
            last = vec![kernels.add_node(graph, (data_at, 1.0, 32), &last)];
        }
        let exec = GraphExec::new(graph);
        assert_eq!(time(&mut || exec.launch(&stream)), 15.0);
        assert_eq!(time(&mut || (0..2).for_each(|_| exec.launch(&stream))), 25.0);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn without_rates_time_is_real() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.alloc_zeros::<f32>(32).unwrap();
        let start = record(&stream);
        add(&stream, &kernels, &mut data, 1.0);
        let end = record(&stream);
        stream.synchronize().unwrap();
        assert!(start.elapsed_ms(&end).unwrap() > 0.0);
        assert!(end.elapsed_ms(&start).unwrap() < 0.0);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}
