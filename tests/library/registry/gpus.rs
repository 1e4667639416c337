//! Emulated GPUs in lists of devices: names, shares of memory, and error messages on machines without a usable GPU.

use super::{M, emulated, small, until};
use fanout::cuda::{self, CudaDevice, CudaUnavailable};
use fanout::device::{DeviceKind, MemoryBudget};
use fanout::registry::Registry;

/// Upper limit on the GPU memory that is left for uses other than buffers.
const GPU_MARGIN: u64 = 512 << 20;

fn names(registry: &Registry, list: &str) -> Result<Vec<String>, String> {
    let opened = registry.open(list, &small()).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.info().name.clone()).collect())
}

#[test]
fn an_unknown_name_lists_the_available_devices() {
    emulated("CUDAEMU_DEVICES=2", |registry| {
        for name in ["2", "CUDA2", "00", "CUDA00", "GPU", "+1"] {
            assert_eq!(names(&registry, name), Err(format!("no device {name:?}; available: CUDA0, CUDA1, CPU")));
        }
    });
}

#[test]
fn the_error_names_why_no_gpu_is_usable() {
    for (settings, want) in [
        ("CUDAEMU_DRIVER_VERSION=11.4", CudaUnavailable::DriverTooOld(11040)),
        ("CUDAEMU_DEVICES=0", CudaUnavailable::NoDevice),
    ] {
        emulated(settings, |registry| assert_eq!(registry.no_gpu_reason(), Some(&*want.to_string()), "{settings}"));
    }
}

#[test]
fn gpus_are_opened_by_number_or_name_as_separate_devices() {
    let settings = "CUDAEMU_DEVICES=2\nCUDAEMU_NAME=First,Second\nCUDAEMU_CAPABILITY=8.0,9.0\nCUDAEMU_MEMORY=4G,2G\nCUDAEMU_PCI=0000:17:00,0001:2a:00";
    emulated(settings, |registry| {
        let described: Vec<_> = registry.entries().iter().map(|e| (&*e.name, &*e.description)).collect();
        assert_eq!(described[0], ("CUDA0", "First, 4096 MiB, PCI 0000:17:00.0, capability 8.0, 108 multiprocessors"));
        assert_eq!(described[1], ("CUDA1", "Second, 2048 MiB, PCI 0001:2a:00.0, capability 9.0, 132 multiprocessors"));
        assert_eq!((described.len(), described[2].0), (3, "CPU"));
        assert_eq!(registry.no_gpu_reason(), None);
        assert_eq!(registry.default_list(), ("CUDA0,CUDA1".to_owned(), vec![]));
        for (list, want) in [
            ("0,1", &["CUDA0", "CUDA1"][..]),
            ("1", &["CUDA1"]),
            ("cuda1, CPU ,Cuda0", &["CUDA1", "CPU", "CUDA0"]),
            ("0,CUDA0", &["CUDA0.0", "CUDA0.1"]),
            ("0,1,0,CPU,CPU", &["CUDA0.0", "CUDA1", "CUDA0.1", "CPU0", "CPU1"]),
        ] {
            assert_eq!(names(&registry, list), Ok(want.iter().map(|&n| n.to_owned()).collect()), "{list:?}");
        }
        let opened = registry.open("1,CPU", &small()).unwrap();
        let kinds: Vec<_> = opened.iter().map(|device| device.info().kind).collect();
        assert_eq!(kinds, [DeviceKind::Gpu, DeviceKind::Cpu]);
        assert!(opened[0].info().description.starts_with("Second"));
    });
}

#[test]
fn a_gpu_without_kernels_is_refused() {
    emulated("CUDAEMU_NAME=Old", |_| {
        let mut gpu = cuda::detect().unwrap().remove(0);
        gpu.capability = 70;
        let why = "Old has compute capability 7.0, but 7.5 or later is required";
        assert_eq!(gpu.check_supported(), Err(why.to_owned()));
        let error = CudaDevice::new("CUDA0", &gpu, M).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    });
}

fn totals(registry: &Registry, list: &str, memory: &[u64]) -> Result<Vec<u64>, String> {
    let opened = registry.open(list, &small().with_memory(memory.to_vec())).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.memory().unwrap().total).collect())
}

#[test]
fn memory_sizes_apply_to_each_device_or_to_all() {
    emulated("CUDAEMU_DEVICES=2\nCUDAEMU_MEMORY=64M,32G", |registry| {
        assert_eq!(totals(&registry, "0,CPU,0", &[5 * M, 6 * M, 7 * M]), Ok(vec![5 * M, 6 * M, 7 * M]));
        // One sixteenth of the free memory is left unused, but at most the margin.
        let free = cuda::detect().unwrap()[1].memory;
        assert_eq!(totals(&registry, "1,0", &[]), Ok(vec![free - GPU_MARGIN, 60 * M]));
        assert_eq!(totals(&registry, "0,0", &[]), Ok(vec![30 * M; 2]));
        // Limits that the GPU can never reach are refused, also together.
        for (list, memory) in [("0", vec![65 * M]), ("0,0", vec![1 << 40]), ("0,1,0", vec![32 * M, 1 << 30, 33 * M])] {
            let error = registry.open(list, &small().with_memory(memory)).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains("more than its 64 MiB of memory")), "{error:?}");
        }
        let both = registry.open("0,0", &small().with_memory(vec![32 * M])).unwrap();
        let memory = || both.iter().map(|device| device.memory().unwrap()).collect::<Vec<_>>();
        assert_eq!(memory()[0].total, 32 * M);
        let budget = MemoryBudget::new(1 << 40);
        let held = both[0].alloc(30 * M, &budget).unwrap();
        assert!(memory()[0].free <= 2 * M, "{:?}", memory());
        assert!(both[0].alloc(30 * M, &budget).is_err(), "beyond the limit of the device");
        let other = both[1].alloc(30 * M, &budget).unwrap();
        assert!(memory().iter().all(|of| of.free <= 4 * M), "both devices share one GPU: {:?}", memory());
        drop((held, other));
        // Memory is freed in the order of a stream.
        until(|| memory()[1].free == 32 * M);
    });
}
