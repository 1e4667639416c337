//! Naming, registering and opening devices: the machine's, with emulated GPUs, and a device implemented in this test.
mod foreign;
mod gpus;
mod minimal_device;
mod offload;

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Caps, Device, DeviceKind, MemoryBudget};
use fanout::fallback::Fallback;
use fanout::registry::{Options, Registry};
use minimal_device::MinimalDevice;
use std::sync::Arc;
use std::time::{Duration, Instant};

const M: u64 = 1 << 20;

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn test_deadline() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// Polls until a condition holds.
fn until(mut holds: impl FnMut() -> bool) {
    let deadline = test_deadline().unwrap();
    while !holds() {
        assert!(Instant::now() < deadline, "the condition does not hold in time");
        std::thread::yield_now();
    }
}

/// Options for devices with 1 MiB of memory, and CPU devices with one thread.
fn small() -> Options {
    Options::default().with_threads(Some(1)).with_memory(vec![M])
}

/// Runs a test on emulated GPUs.
fn emulated(settings: &str, test: impl FnOnce(Registry)) {
    let emulator = cudaemu::test::start(settings).unwrap();
    test(Registry::detect());
    assert!(emulator.wait_contexts_released(Duration::from_secs(20)), "a context is still held");
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

fn with_minimal(mut registry: Registry) -> Registry {
    registry.register(MinimalDevice::new("Minimal")).unwrap();
    registry
}

#[test]
fn devices_are_found_by_name_kind_and_index() {
    emulated("CUDAEMU_DEVICES=2\nCUDAEMU_NAME=First,Second", |registry| {
        let registry = with_minimal(registry);
        let all: Vec<_> = registry.entries().iter().map(|entry| (&*entry.name, entry.kind)).collect();
        let (cpu, gpu) = (DeviceKind::Cpu, DeviceKind::Gpu);
        assert_eq!(all, [("CUDA0", gpu), ("CUDA1", gpu), ("CPU", cpu), ("Minimal", gpu)]);
        for (name, want) in [
            ("CUDA1", Some("CUDA1")),
            ("cuda0", Some("CUDA0")),
            ("1", Some("CUDA1")),
            ("cpu", Some("CPU")),
            ("MINIMAL", Some("Minimal")),
            ("2", None),
            ("CPU0", None),
            ("", None),
        ] {
            assert_eq!(registry.by_name(name).map(|entry| &*entry.name), want, "{name:?}");
        }
        for (kind, want) in [(gpu, &["CUDA0", "CUDA1", "Minimal"][..]), (cpu, &["CPU"])] {
            let names: Vec<_> = registry.by_kind(kind).map(|entry| &*entry.name).collect();
            assert_eq!(names, want, "{kind:?}");
        }
        assert_eq!(registry.entries()[3].description, "computes on the polling thread");
        assert_eq!(registry.default_list(), ("CUDA0,CUDA1,Minimal".to_owned(), vec![]));
    });
}

#[test]
fn the_best_device_is_the_gpu_with_most_free_memory() {
    for (settings, want) in [
        ("CUDAEMU_DEVICES=0", "CPU"),
        ("CUDAEMU_DRIVER_VERSION=11.4", "CPU"),
        ("CUDAEMU_DEVICES=1", "CUDA0"),
        ("CUDAEMU_DEVICES=3\nCUDAEMU_MEMORY=64M,96M,96M", "CUDA1"),
    ] {
        emulated(settings, |registry| assert_eq!(registry.best().name, want, "{settings}"));
    }
    emulated("CUDAEMU_DEVICES=2\nCUDAEMU_MEMORY=64M,48M", |registry| {
        let budget = MemoryBudget::new(M << 10);
        let bare = small().with_fallback(false).with_memory(vec![]);
        let first = registry.best().open(&bare).unwrap();
        assert_eq!(first.info().name, "CUDA0");
        let held = first.alloc(40 * M, &budget).unwrap();
        assert_eq!(registry.best().name, "CUDA1", "CUDA0 has less free memory now");
        assert!(registry.entries()[0].free_memory().unwrap() <= 24 * M);
        drop(held);
        // Memory is freed in the order of a stream.
        until(|| registry.best().name == "CUDA0");
    });
    emulated("CUDAEMU_DEVICES=0", |registry| {
        assert!(registry.best().free_memory().unwrap() > 0);
        assert_eq!(with_minimal(registry).best().name, "Minimal");
    });
}

#[test]
fn a_device_is_registered_only_under_a_free_name() {
    emulated("CUDAEMU_DEVICES=1", |registry| {
        let mut registry = with_minimal(registry);
        let taken = |name| format!("device {name:?} cannot be registered: the name is in use");
        let own = |name| {
            format!("device {name:?} cannot be registered: the name is reserved for this machine's processors and GPUs")
        };
        for name in ["Minimal", "minimal", "CPU", "cuda0"] {
            assert_eq!(registry.register(MinimalDevice::new(name)).map_err(|e| e.to_string()), Err(taken(name)));
        }
        for name in ["0", "17", "CPU0", "cuda1", "CUDA0.1", "CUDA", "1.5"] {
            assert_eq!(registry.register(MinimalDevice::new(name)).map_err(|e| e.to_string()), Err(own(name)));
        }
        for (name, reason) in [("", "at least one"), (" A", "no space around"), ("A,B", "a comma separates")] {
            let e = registry.register(MinimalDevice::new(name)).unwrap_err().to_string();
            assert!(e.contains(reason), "{name:?}: {e}");
        }
        for name in ["Minimal2", "CPUs", "node7:50052/CUDA0", "my minimal"] {
            registry.register(MinimalDevice::new(name)).unwrap();
            assert_eq!(registry.open(name, &small()).unwrap()[0].info().name, name);
        }
        assert_eq!(registry.entries().len(), 7);
    });
}

#[test]
fn lists_mix_registered_and_local_devices() {
    emulated("CUDAEMU_DEVICES=1\nCUDAEMU_MEMORY=64M", |registry| {
        let registry = with_minimal(registry);
        let open = |list: &str, memory: &[u64]| {
            let opened = registry.open(list, &small().with_memory(memory.to_vec()));
            let names = |of: Vec<Arc<dyn Device>>| of.iter().map(|d| d.info().name.clone()).collect::<Vec<_>>();
            opened.map(names).map_err(|e| e.to_string())
        };
        let names = |names: &[&str]| Ok(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(open("minimal", &[]), names(&["Minimal"]));
        assert_eq!(open("CPU, Minimal ,CPU,0", &[M]), names(&["CPU0", "Minimal", "CPU1", "CUDA0"]));
        let twice =
            "Minimal is in the list more than once; a registered device or a device of a server can be used only once";
        assert_eq!(open("Minimal,CPU,minimal", &[M]), Err(twice.to_owned()));
        let unknown = "no device \"Minimals\"; available: CUDA0, CPU, Minimal";
        assert_eq!(open("CPU,Minimals", &[M]), Err(unknown.to_owned()));
        let sizes = "2 memory sizes for 3 devices: give one size for each device, or one for all";
        assert_eq!(open("CPU,Minimal,0", &[M, M]), Err(sizes.to_owned()));
        // Memory sizes apply to local devices only.
        let opened = registry.open("Minimal,CPU", &small().with_memory(vec![M / 2, M / 4])).unwrap();
        let totals: Vec<_> = opened.iter().map(|device| device.memory().unwrap().total).collect();
        assert_eq!(totals, [M, M / 4]);
    });
}

#[test]
fn devices_report_capabilities_and_features() {
    let features = |device: &dyn Device| {
        let features = device.features().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(features.iter().all(|text| !text.ends_with(' ') && !text.contains('\n')), "{features:?}");
        features
    };
    // Whether the device has pinned memory, and whether it imports memory of the host.
    let (cpu, cuda, minimal) = ([false, true], [true, false], [false, false]);
    let settings =
        "CUDAEMU_DEVICES=2\nCUDAEMU_CAPABILITY=7.5,9.0\nCUDAEMU_PCI=0000:17:00,0001:2a:00\nCUDAEMU_DRIVER_VERSION=12.4";
    emulated(settings, |registry| {
        let registry = with_minimal(registry);
        for (list, caps, want) in [
            ("CPU", cpu, &["threads: 1", "path: fast", "products: "][..]),
            ("CUDA0", cuda, &["capability: 7.5", "ptx: sm_75", "driver: CUDA 12.4", "pci: 0000:17:00.0"]),
            ("CUDA1", cuda, &["capability: 9.0", "ptx: sm_75 sm_80", "driver: CUDA 12.4", "pci: 0001:2a:00.0"]),
            ("Minimal", minimal, &["kernels: 13"]),
        ] {
            for fallback in [false, true] {
                let device = registry.by_name(list).unwrap().open(&small().with_fallback(fallback)).unwrap();
                let had = features(&*device);
                assert_eq!(device.info().caps, Caps::default().with_asynchronous(true).with_events(true), "{list}");
                assert_eq!([device.pinned_memory().is_some(), device.import_host().is_some()], caps, "{list}");
                assert!(had.iter().zip(want).all(|(had, want)| had.starts_with(want)), "{list}: {had:?}");
                let second = had.contains(&"fallback: CPU".to_owned());
                assert_eq!(second, fallback && device.info().kind != DeviceKind::Cpu, "{list}: {had:?}");
            }
        }
    });
    let exact = CpuDevice::new("Reference", 2, MathMode::Exact, M).unwrap();
    assert_eq!(features(&*exact)[..2], ["threads: 2", "path: exact"]);
    let both = Fallback::new(MinimalDevice::new("Minimal"), exact);
    assert_eq!(features(&*both), ["kernels: 13", "fallback: Reference"]);
}
