use super::backend::cuda::GPU_MARGIN;
use super::*;
use crate::cuda;

fn cpu_only() -> Registry {
    Registry::of(Err(NoCuda::NoDriver))
}

fn small() -> Options {
    Options { threads: Some(1), memory: vec![1 << 20], ..Options::default() }
}

fn names(registry: &Registry, list: &str) -> Result<Vec<String>, String> {
    let opened = registry.open(list, &small()).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.info().name.clone()).collect())
}

/// Runs a test on emulated GPUs.
fn emulated(settings: &str, test: impl FnOnce(Registry)) {
    let emulator = cudaemu::test::start(settings).unwrap();
    test(Registry::detect());
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn the_cpu_is_opened_by_name() {
    for list in ["CPU", "cpu", " Cpu "] {
        assert_eq!(names(&cpu_only(), list), Ok(vec!["CPU".to_owned()]), "{list:?}");
    }
    assert_eq!(names(&cpu_only(), "CPU,cpu"), Ok(vec!["CPU0".to_owned(), "CPU1".to_owned()]));
}

#[test]
fn a_bad_name_lists_what_there_is() {
    for (list, name) in [("", ""), ("CPU,", ""), ("-1", "-1"), ("CUDA", "CUDA"), ("CPU0", "CPU0"), ("GPU0", "GPU0")] {
        assert_eq!(names(&cpu_only(), list), Err(format!("no device {name:?}; there are: CPU")), "{list:?}");
    }
    emulated("CUDAEMU_DEVICES=2", |registry| {
        for name in ["2", "CUDA2", "00", "CUDA00", "GPU", "+1"] {
            assert_eq!(names(&registry, name), Err(format!("no device {name:?}; there are: CUDA0, CUDA1, CPU")));
        }
    });
}

#[test]
fn without_a_gpu_its_number_says_what_is_missing() {
    for why in [NoCuda::NoDriver, NoCuda::Old(11040), NoCuda::NoDevice, NoCuda::Start("broken".to_owned())] {
        let registry = Registry::of(Err(why.clone()));
        for (list, name) in [("0", "0"), ("CPU,1", "1"), ("cuda0", "cuda0"), ("CUDA17", "CUDA17")] {
            assert_eq!(names(&registry, list), Err(format!("no device {name:?}: {why}; there are: CPU")), "{list:?}");
        }
        let (list, notes) = registry.default_list();
        assert_eq!((&*list, notes), ("CPU", vec![format!("no GPU, the CPU is used: {why}")]));
        assert_eq!(registry.no_gpu(), Some(&why));
    }
}

#[test]
fn drivers_without_a_usable_gpu_say_why() {
    for (settings, want) in
        [("CUDAEMU_DRIVER_VERSION=11.4", NoCuda::Old(11040)), ("CUDAEMU_DEVICES=0", NoCuda::NoDevice)]
    {
        emulated(settings, |registry| assert_eq!(registry.no_gpu(), Some(&want), "{settings}"));
    }
}

#[test]
fn gpus_are_opened_by_number_or_name_each_a_device_of_its_own() {
    let settings = "CUDAEMU_DEVICES=2\nCUDAEMU_NAME=First,Second\nCUDAEMU_CAPABILITY=8.0,9.0\nCUDAEMU_MEMORY=4G,2G\nCUDAEMU_PCI=0000:17:00,0001:2a:00";
    emulated(settings, |registry| {
        let described: Vec<_> = registry.entries().iter().map(|e| (&*e.name, &*e.description)).collect();
        assert_eq!(described[0], ("CUDA0", "First, 4096 MiB, PCI 0000:17:00.0, capability 8.0, 108 multiprocessors"));
        assert_eq!(described[1], ("CUDA1", "Second, 2048 MiB, PCI 0001:2a:00.0, capability 9.0, 132 multiprocessors"));
        assert_eq!((described.len(), described[2].0), (3, "CPU"));
        assert_eq!(registry.no_gpu(), None);
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
fn a_gpu_without_kernels_is_shown_and_refused() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=2\nCUDAEMU_NAME=Old,New").unwrap();
    let mut gpus = cuda::detect().unwrap();
    gpus[0].capability = 70;
    let registry = Registry::of(Ok(gpus.clone()));
    let why = "Old has compute capability 7.0, and 7.5 or later is needed";
    assert_eq!(registry.entries()[0].unusable.as_deref(), Some(why));
    for list in ["0", "cuda0", "1,0"] {
        let want = format!("CUDA0 cannot be used: {why}; there are: CUDA1, CPU");
        assert_eq!(names(&registry, list), Err(want), "{list:?}");
    }
    assert_eq!(registry.default_list(), ("CUDA1".to_owned(), vec![format!("CUDA0 is left out: {why}")]));
    assert_eq!(names(&registry, "1"), Ok(vec!["CUDA1".to_owned()]));
    assert_eq!(registry.best().name, "CUDA1");
    let alone = registry.entries()[0].open(&small()).map_err(|e| e.to_string());
    assert_eq!(alone.err(), Some(format!("CUDA0 cannot be used: {why}")));
    gpus.truncate(1);
    assert_eq!(Registry::of(Ok(gpus.clone())).best().name, "CPU");
    let note = format!("no GPU, the CPU is used: CUDA0 is left out: {why}");
    assert_eq!(Registry::of(Ok(gpus)).default_list(), ("CPU".to_owned(), vec![note]));
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

fn totals(registry: &Registry, list: &str, memory: &[u64]) -> Result<Vec<u64>, String> {
    let options = Options { threads: Some(1), memory: memory.to_vec(), ..Options::default() };
    let opened = registry.open(list, &options).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.memory().unwrap().total).collect())
}

#[test]
fn memory_is_given_for_each_or_for_all() {
    const M: u64 = 1 << 20;
    let registry = cpu_only();
    assert_eq!(totals(&registry, "CPU,CPU", &[5 * M]), Ok(vec![5 * M; 2]));
    assert_eq!(totals(&registry, "CPU,CPU", &[5 * M, 6 * M]), Ok(vec![5 * M, 6 * M]));
    let wrong = "2 sizes of memory for 3 devices: give one for each of them, or a single one for all";
    assert_eq!(totals(&registry, "CPU,CPU,CPU", &[M, M]), Err(wrong.to_owned()));
    let shared = |list| totals(&registry, list, &[]).unwrap()[0];
    assert!(shared("CPU,CPU,CPU,CPU") < shared("CPU") / 2);
    emulated("CUDAEMU_DEVICES=2\nCUDAEMU_MEMORY=64M,32G", |registry| {
        assert_eq!(totals(&registry, "0,CPU,0", &[5 * M, 6 * M, 7 * M]), Ok(vec![5 * M, 6 * M, 7 * M]));
        // A sixteenth is kept back, and of a large GPU no more than the margin.
        let free = cuda::detect().unwrap()[1].memory;
        assert_eq!(totals(&registry, "1,0", &[]), Ok(vec![free - GPU_MARGIN, 60 * M]));
        assert_eq!(totals(&registry, "0,0", &[]), Ok(vec![30 * M; 2]));
        // More than there is can be asked for, but not had.
        let both = registry.open("0,0", &Options { memory: vec![1 << 40], ..small() }).unwrap();
        let memory = || both.iter().map(|device| device.memory().unwrap()).collect::<Vec<_>>();
        assert_eq!(memory()[0].total, 64 * M);
        let account = crate::device::Account::new(1 << 40);
        let held = both[0].alloc(40 * M, &account).unwrap();
        assert!(memory().iter().all(|of| of.free <= 24 * M), "one GPU under both: {:?}", memory());
        assert!(both[1].alloc(40 * M, &account).is_err());
        drop(held);
        assert_eq!(memory()[1].free, 64 * M);
    });
}
