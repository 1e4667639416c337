//! Programmatic dependent launch: which graphs have programmatic edges, and that their kernels wait.

use crate::fixture::{COSTLY, CudaFixture, DOUBLE, INCREMENT, chain, read, upload, whole_buffer};
use fanout::cuda::CudaOptions;
use fanout::device::Device;
use fanout::ops::unary::Unary;
use fanout::tensor::DType;
use fanout_testing::transformer::{LoadedModel, SMALL, Shape, group, model};
use std::sync::Arc;

const OPS: [Unary; 5] = [INCREMENT, DOUBLE, COSTLY, DOUBLE, INCREMENT];

/// What a device did: graphs with edges added by the driver's function for edge data, and kernels launched through programmatic
/// edges.
type Counts = [u64; 2];

/// Runs the ops three times on each of so many buffers. The last two runs replay a graph.
fn run(settings: &str, options: CudaOptions, buffers: usize) -> (Vec<Vec<f32>>, Counts) {
    let fixture = CudaFixture::with_options(settings, options);
    let program = fixture.program(0, &chain(16, &OPS));
    let mut queue = fixture.queue(0);
    let input: Vec<f32> = (0..16).map(|i| i as f32 / 16.0).collect();
    let buffers: Vec<_> = (0..buffers).map(|_| fixture.buffer(0, 256)).collect();
    let mut results = Vec::new();
    for buffer in &buffers {
        upload(&mut *queue, &buffer.whole(), &input).unwrap();
        (0..3).for_each(|_| queue.run(&program, &whole_buffer(buffer)).unwrap());
        results.push(read(&mut *queue, &buffer.whole(), 16).unwrap());
    }
    // The checker reports a kernel that has a programmatic edge and does not wait.
    assert_eq!(fixture.emulator.reports(), Vec::<String>::new(), "{settings}");
    (results, [fixture.driver_calls("cuGraphAddDependencies_v2"), fixture.emulator.programmatic_launches()])
}

#[test]
fn graphs_have_programmatic_edges_where_gpu_driver_and_options_allow() {
    let on = CudaOptions::default();
    let edges = OPS.len() as u64 - 1;
    let (want, plain) = run("CUDAEMU_CAPABILITY=8.0", on, 1);
    assert_eq!(plain, [0, 0]);
    for (name, settings, options, counts) in [
        ("capability 9.0", "", on, [1, 2 * edges]),
        ("the first driver with edge data", "\nCUDAEMU_DRIVER_VERSION=12.3", on, [1, 2 * edges]),
        ("a driver without edge data", "\nCUDAEMU_DRIVER_VERSION=12.2", on, [0, 0]),
        ("off", "", CudaOptions { programmatic_launch: false, ..on }, [0, 0]),
        ("no graphs", "", CudaOptions { launch_check: true, ..on }, [0, 0]),
    ] {
        let (results, found) = run(&format!("CUDAEMU_CAPABILITY=9.0{settings}"), options, 1);
        assert_eq!(found, counts, "{name}");
        assert_eq!(results, want, "{name}");
    }
}

/// A driver that refuses such an edge is asked once: its other graphs have plain edges from the start.
#[test]
fn graphs_have_plain_edges_after_the_driver_refuses_programmatic_ones() {
    let (want, _) = run("CUDAEMU_CAPABILITY=8.0", CudaOptions::default(), 3);
    let settings = "CUDAEMU_CAPABILITY=9.0\nCUDAEMU_PROGRAMMATIC_EDGES=off";
    let (results, counts) = run(settings, CudaOptions::default(), 3);
    assert_eq!(counts, [1, 0]);
    assert_eq!(results, want);
}

/// A program keeps graphs of 8 sets of addresses; further sets change the oldest graphs, which keep their edges.
#[test]
fn graphs_of_other_addresses_keep_their_programmatic_edges() {
    const BUFFERS: usize = 10;
    let (want, _) = run("CUDAEMU_CAPABILITY=8.0", CudaOptions::default(), BUFFERS);
    let (results, counts) = run("CUDAEMU_CAPABILITY=9.0", CudaOptions::default(), BUFFERS);
    assert_eq!(counts, [8, (2 * BUFFERS * (OPS.len() - 1)) as u64]);
    assert_eq!(results, want);
}

/// A driver that refuses to change kernels behind such edges: the graph is built again, with plain edges, as all later ones.
#[test]
fn graphs_have_plain_edges_after_the_driver_refuses_to_change_kernels() {
    const BUFFERS: usize = 10;
    let (want, _) = run("CUDAEMU_CAPABILITY=8.0", CudaOptions::default(), BUFFERS);
    let settings = "CUDAEMU_CAPABILITY=9.0\nCUDAEMU_PROGRAMMATIC_EDGES=fixed";
    let (results, counts) = run(settings, CudaOptions::default(), BUFFERS);
    assert_eq!(counts, [8, (2 * 8 * (OPS.len() - 1)) as u64]);
    assert_eq!(results, want);
}

#[test]
fn a_device_says_whether_it_launches_ahead() {
    for (capability, text) in [("8.0", "programmatic launch: off"), ("9.0", "programmatic launch: on")] {
        let fixture = CudaFixture::new(&format!("CUDAEMU_CAPABILITY={capability}"));
        let features: Vec<_> = fixture.devices[0].features().iter().map(ToString::to_string).collect();
        assert!(features.contains(&text.to_owned()), "{features:?}");
    }
}

#[test]
fn a_model_has_the_same_logits_and_every_module_loads() {
    let model = model(Shape { weight: DType::Q8_0, cache: DType::F16, flash: true, ..SMALL }, &[0]);
    let run = |programmatic_launch| {
        let options = CudaOptions { programmatic_launch, ..CudaOptions::default() };
        let fixture = CudaFixture::with_options("CUDAEMU_CAPABILITY=9.0", options);
        let device = Arc::clone(&fixture.devices[0]);
        let mut loaded = LoadedModel::new(&model, vec![device as Arc<dyn Device>], vec![group(0..1, &[1.0])], 0, false);
        let logits = [(); 3].map(|()| loaded.run().unwrap());
        drop(loaded);
        fixture.devices[0].load_modules().unwrap();
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
        (logits, fixture.emulator.programmatic_launches())
    };
    let ((want, none), (logits, launches)) = (run(false), run(true));
    assert_eq!(logits, want);
    assert!(none == 0 && launches > 20, "{none} and {launches} launches through programmatic edges");
}
