//! Modules: compiled once, in parallel and ahead of the first token, and charged to the device's memory.

use crate::fixture::{CudaFixture, DOUBLE, MEMORY, chain, test_deadline};
use fanout::cuda::{self, CudaDevice, CudaOptions};
use fanout::device::{Device, DeviceError, MemoryBudget, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::norm::Norm;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::transformer::{LoadedModel, SMALL, Shape, group, model};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// A graph with the ops of several modules.
fn mixed() -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [64, 4, 1, 1]).unwrap();
    let y = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let z = b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[Some(y)]).unwrap();
    b.node(DOUBLE, &[Some(z)]).unwrap();
    Arc::new(b.build())
}

/// Programs that are prepared at the same time share the compilation of each module.
#[test]
fn a_module_is_compiled_once() {
    const THREADS: usize = 4;
    let fixture = CudaFixture::new("");
    let before = fixture.emulator.compilations();
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                together.wait();
                fixture.program(0, &mixed());
            });
        }
    });
    assert_eq!(fixture.emulator.compilations() - before, 3, "norm, softmax, unary");
    fixture.program(0, &chain(64, &[DOUBLE]));
    assert_eq!(fixture.emulator.compilations() - before, 3);
}

#[test]
fn modules_are_charged_to_the_memory_of_their_device() {
    let fixture = CudaFixture::new("");
    let free = || fixture.devices[0].memory().unwrap().free;
    let before = free();
    let held = fixture.buffer(0, before - 1024);
    let refused = fixture.devices[0].prepare(mixed()).err();
    assert!(matches!(refused, Some(DeviceError::OutOfMemory { .. })), "{refused:?}");
    drop(held);
    let _program = fixture.program(0, &mixed());
    let charged = before - free();
    assert!((16 << 10..4 << 20).contains(&charged), "{charged} bytes for three modules");
    let _same = fixture.program(0, &mixed());
    assert_eq!(before - free(), charged);
}

/// A device that compiles ahead. It is dropped before the emulator's session.
fn with_precompiling_device(test: impl FnOnce(&Arc<CudaDevice>, &cudaemu::test::Session)) {
    let emulator = cudaemu::test::start("").unwrap();
    let options = CudaOptions { precompile: true, ..CudaOptions::default() };
    let gpu = &cuda::detect().unwrap()[0];
    let device = CudaDevice::with_options("CUDA0", gpu, |_| MEMORY, options).unwrap();
    test(&device, &emulator);
    drop(device);
    assert!(emulator.wait_contexts_released(Duration::from_secs(20)), "a thread holds the context");
}

/// On a cold cache, a model whose types of weights have arrived needs no module that is not compiled.
#[test]
fn the_first_token_compiles_nothing() {
    use DType::{F16, Q4_0, Q8_0};
    for (weight, cache, flash) in [(Q8_0, F16, true), (Q4_0, F16, false), (F16, F16, true), (Q4_0, Q8_0, true)] {
        with_precompiling_device(|device, emulator| {
            let compiled = || emulator.compilations();
            assert_eq!(compiled(), 0, "a device that nobody uses compiles nothing");
            let budget = MemoryBudget::new(MEMORY);
            let mut queue = device.queue(&budget).unwrap();
            // The tables of the norms and of the embeddings, and the matrices. No client uploads its cache.
            for dtype in [DType::F32, weight] {
                let desc = TensorDesc::contiguous(dtype, [32, 1, 1, 1]).unwrap();
                let buffer = device.alloc(desc.extent() as u64, &budget).unwrap();
                let bytes = vec![0; desc.extent()];
                queue.upload(buffer.whole(), Some(&desc), UploadSource::Borrowed(&bytes)).unwrap();
            }
            queue.mark().wait(test_deadline()).unwrap();
            let until = Instant::now() + Duration::from_secs(300);
            while device.pending_modules() > 0 {
                assert!(Instant::now() < until, "the modules are not compiled");
                std::thread::yield_now();
            }
            let before = compiled();
            assert!(before > 0);
            let model = model(Shape { weight, cache, flash, ..SMALL }, &[0]);
            let devices = vec![Arc::clone(device) as Arc<dyn Device>];
            let mut loaded = LoadedModel::new(&model, devices, vec![group(0..1, &[1.0])], 0, false);
            loaded.run().unwrap();
            assert_eq!(compiled(), before, "{weight}, cache {cache}, flash attention {flash}");
        });
    }
}

#[test]
fn a_dropped_device_stops_to_compile() {
    with_precompiling_device(|device, _| drop(device.alloc(64, &MemoryBudget::new(64)).unwrap()));
}
