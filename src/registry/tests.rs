use super::backend::{DeviceOpener, OpenRequest, cpu};
use super::*;

/// The reason of a backend without a usable driver.
const NO_DRIVER: &str = "no driver; install one";

/// The GPUs of a stub driver, each with its number and, if it is unusable, the reason; or the reason why there are none.
type StubGpus = Result<Vec<(usize, Option<&'static str>)>, String>;

/// A stub backend with these GPUs.
fn stub(name_prefix: &'static str, gpus: StubGpus) -> Backend {
    let entry = |(number, unusable): (usize, Option<&str>)| DeviceEntry {
        name: format!("{name_prefix}{number}"),
        description: "a stub".to_owned(),
        kind: DeviceKind::Gpu,
        unusable: unusable.map(str::to_owned),
        origin: DeviceOrigin::Local { number: Some(number), opener: Arc::new(StubOpener) },
    };
    Backend { name_prefix, devices: gpus.map(|gpus| gpus.into_iter().map(entry).collect()) }
}

/// A GPU that opens as a CPU device.
#[derive(Debug)]
struct StubOpener;

impl DeviceOpener for StubOpener {
    fn free_memory(&self) -> Result<u64, DeviceError> {
        Ok(1 << 30)
    }

    fn total(&self) -> Option<u64> {
        Some(1 << 30)
    }

    fn open(&self, request: &OpenRequest<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        cpu::Cpu.open(request)
    }
}

/// A machine with these GPUs, and its processors.
fn machine(gpus: StubGpus) -> Registry {
    Registry::of(vec![stub("CUDA", gpus), cpu::detect()])
}

/// A machine with two GPU backends. The CPU is not the last backend, so that no code relies on that.
fn two_kinds(first: StubGpus, second: StubGpus) -> Registry {
    Registry::of(vec![stub("CUDA", first), cpu::detect(), stub("Metal", second)])
}

fn cpu_only() -> Registry {
    machine(Err(NO_DRIVER.to_owned()))
}

fn small_options() -> Options {
    Options { threads: Some(1), memory: vec![1 << 20], ..Options::default() }
}

fn opened_names(registry: &Registry, list: &str) -> Result<Vec<String>, String> {
    let opened = registry.open(list, &small_options()).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.info().name.clone()).collect())
}

#[test]
fn the_cpu_is_opened_by_name() {
    for list in ["CPU", "cpu", " Cpu "] {
        assert_eq!(opened_names(&cpu_only(), list), Ok(vec!["CPU".to_owned()]), "{list:?}");
    }
    assert_eq!(opened_names(&cpu_only(), "CPU,cpu"), Ok(vec!["CPU0".to_owned(), "CPU1".to_owned()]));
}

#[test]
fn an_unknown_name_lists_the_available_devices() {
    for name in ["-1", "CUDA", "CPU0", "GPU0"] {
        assert_eq!(opened_names(&cpu_only(), name), Err(format!("no device {name:?}; available: CPU")));
    }
    for list in ["", "CPU,"] {
        let hint = "a name is empty: the list has a comma too many, or is empty";
        assert_eq!(opened_names(&cpu_only(), list), Err(format!("no device \"\"; available: CPU; {hint}")), "{list:?}");
    }
}

#[test]
fn a_gpu_number_without_gpus_reports_the_missing_driver() {
    let registry = cpu_only();
    for (list, name) in [("0", "0"), ("CPU,1", "1"), ("cuda0", "cuda0"), ("CUDA17", "CUDA17")] {
        assert_eq!(
            opened_names(&registry, list),
            Err(format!("no device {name:?}: {NO_DRIVER}; available: CPU")),
            "{list:?}"
        );
    }
    let (list, notes) = registry.default_list();
    assert_eq!((&*list, notes), ("CPU", vec![format!("no GPU, the CPU is used: {NO_DRIVER}")]));
    assert_eq!(registry.no_gpu_reason(), Some(NO_DRIVER));
}

#[test]
fn numbers_name_gpus_of_the_first_backend_with_gpus() {
    let registry = two_kinds(Err(NO_DRIVER.to_owned()), Ok(vec![(0, None), (1, None)]));
    assert_eq!(registry.no_gpu_reason(), None);
    assert_eq!(registry.default_list(), ("Metal0,Metal1".to_owned(), vec![]));
    assert_eq!(opened_names(&registry, "1,metal0"), Ok(vec!["Metal1".to_owned(), "Metal0".to_owned()]));
    let known = "available: CPU, Metal0, Metal1";
    assert_eq!(opened_names(&registry, "CUDA0"), Err(format!("no device \"CUDA0\": {NO_DRIVER}; {known}")));
    assert_eq!(opened_names(&registry, "2"), Err(format!("no device \"2\"; {known}")));
    assert_eq!(opened_names(&registry, "Metal2"), Err(format!("no device \"Metal2\"; {known}")));
}

#[test]
fn a_backend_without_gpus_does_not_hide_others() {
    let registry = two_kinds(Ok(vec![(0, None)]), Err("no framework".to_owned()));
    assert_eq!(registry.no_gpu_reason(), None);
    assert_eq!(registry.default_list(), ("CUDA0".to_owned(), vec![]));
    let want = "no device \"metal0\": no framework; available: CUDA0, CPU";
    assert_eq!(opened_names(&registry, "metal0"), Err(want.to_owned()));
    assert_eq!(opened_names(&registry, "7"), Err("no device \"7\"; available: CUDA0, CPU".to_owned()));
}

#[test]
fn without_gpus_the_reasons_of_all_backends_are_reported() {
    let registry = two_kinds(Err(NO_DRIVER.to_owned()), Err("no framework".to_owned()));
    let both = format!("{NO_DRIVER}; no framework");
    assert_eq!(registry.no_gpu_reason(), Some(&*both));
    assert_eq!(registry.default_list(), ("CPU".to_owned(), vec![format!("no GPU, the CPU is used: {both}")]));
    assert_eq!(registry.best().name, "CPU");
    assert_eq!(opened_names(&registry, "0"), Err(format!("no device \"0\": {both}; available: CPU")));
    assert_eq!(opened_names(&registry, "Metal0"), Err("no device \"Metal0\": no framework; available: CPU".to_owned()));
    // An unusable GPU counts as a GPU.
    let unusable = two_kinds(Ok(vec![(0, Some("old"))]), Err("no framework".to_owned()));
    assert_eq!(unusable.no_gpu_reason(), None);
    let note = "no GPU, the CPU is used: CUDA0 is left out: old; no framework";
    assert_eq!(unusable.default_list(), ("CPU".to_owned(), vec![note.to_owned()]));
}

#[test]
fn numbers_do_not_reach_gpus_of_later_backends() {
    let registry = two_kinds(Ok(vec![(0, None)]), Ok(vec![(0, None), (1, None)]));
    assert_eq!(opened_names(&registry, "0,Metal0"), Ok(vec!["CUDA0".to_owned(), "Metal0".to_owned()]));
    let known = "available: CUDA0, CPU, Metal0, Metal1";
    assert_eq!(opened_names(&registry, "1"), Err(format!("no device \"1\"; {known}")));
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_reports_that() {
    let error = opened_names(&Registry::detect(), "0").unwrap_err();
    assert!(error.contains("built without CUDA"), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn each_reason_for_missing_gpus_is_reported() {
    use crate::cuda::CudaUnavailable;
    for why in [
        CudaUnavailable::NoDriver,
        CudaUnavailable::DriverTooOld(11040),
        CudaUnavailable::NoDevice,
        CudaUnavailable::InitFailed("broken".to_owned()),
    ] {
        let registry = machine(Err(why.to_string()));
        assert_eq!(opened_names(&registry, "0"), Err(format!("no device \"0\": {why}; available: CPU")));
        assert_eq!(registry.no_gpu_reason(), Some(&*why.to_string()));
    }
}

#[test]
fn a_gpu_without_kernels_is_listed_but_not_opened() {
    let why = "Old has compute capability 7.0, but 7.5 or later is required";
    let registry = machine(Ok(vec![(0, Some(why)), (1, None)]));
    assert_eq!(registry.entries()[0].unusable.as_deref(), Some(why));
    for list in ["0", "cuda0", "1,0"] {
        let want = format!("CUDA0 cannot be used: {why}; available: CUDA1, CPU");
        assert_eq!(opened_names(&registry, list), Err(want), "{list:?}");
    }
    assert_eq!(registry.default_list(), ("CUDA1".to_owned(), vec![format!("CUDA0 is left out: {why}")]));
    assert_eq!(opened_names(&registry, "1"), Ok(vec!["CUDA1".to_owned()]));
    assert_eq!(registry.best().name, "CUDA1");
    let alone = registry.entries()[0].open(&small_options()).map_err(|e| e.to_string());
    assert_eq!(alone.err(), Some(format!("CUDA0 cannot be used: {why}")));
    assert_eq!(machine(Ok(vec![(0, Some(why))])).best().name, "CPU");
    let note = format!("no GPU, the CPU is used: CUDA0 is left out: {why}");
    assert_eq!(machine(Ok(vec![(0, Some(why))])).default_list(), ("CPU".to_owned(), vec![note]));
}

#[cfg(not(feature = "client"))]
#[test]
fn a_build_without_the_client_opens_no_servers() {
    let error = opened_names(&cpu_only(), "localhost:50052").unwrap_err();
    assert_eq!(error, "no device \"localhost:50052\"; available: CPU");
}

fn totals(registry: &Registry, list: &str, memory: &[u64]) -> Result<Vec<u64>, String> {
    let opened = registry.open(list, &small_options().with_memory(memory.to_vec())).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.memory().unwrap().total).collect())
}

#[test]
fn memory_sizes_apply_to_each_device_or_to_all() {
    const M: u64 = 1 << 20;
    let registry = cpu_only();
    assert_eq!(totals(&registry, "CPU,CPU", &[5 * M]), Ok(vec![5 * M; 2]));
    assert_eq!(totals(&registry, "CPU,CPU", &[5 * M, 6 * M]), Ok(vec![5 * M, 6 * M]));
    let wrong = "2 memory sizes for 3 devices: give one size for each device, or one for all";
    assert_eq!(totals(&registry, "CPU,CPU,CPU", &[M, M]), Err(wrong.to_owned()));
    let shared = |list| totals(&registry, list, &[]).unwrap()[0];
    assert!(shared("CPU,CPU,CPU,CPU") < shared("CPU") / 2);
}

#[test]
fn memory_limits_beyond_the_device_are_refused() {
    // Each stub GPU has 1 GiB.
    let registry = machine(Ok(vec![(0, None), (1, None)]));
    let open = |list: &str, memory: &[u64]| {
        let options = Options { threads: Some(1), memory: memory.to_vec(), fallback: false, ..Options::default() };
        registry.open(list, &options).map(|devices| devices.len()).map_err(|e| e.to_string())
    };
    const MIB: u64 = 1 << 20;
    for (list, memory, want) in [
        ("0", vec![1024 * MIB], Ok(1)),
        ("0,0", vec![512 * MIB], Ok(2)),
        ("0,1", vec![1024 * MIB], Ok(2)),
        ("0,1,0", vec![512 * MIB, 1024 * MIB, 512 * MIB], Ok(3)),
        (
            "0",
            vec![1025 * MIB],
            Err("CUDA0: the limits of 1 device on it are 1025 MiB together, more than its 1 GiB of"),
        ),
        ("0", vec![1024 * MIB + 1], Err("CUDA0: the limits of 1 device on it are 1.0 GiB together, more than its")),
        ("0,0", vec![513 * MIB], Err("CUDA0: the limits of 2 devices on it are 1026 MiB together, more than its")),
        (
            "0,1,0",
            vec![512 * MIB, 512 * MIB, 513 * MIB],
            Err("CUDA0: the limits of 2 devices on it are 1025 MiB together"),
        ),
        // The sum saturates instead of wrapping around.
        ("0,0", vec![u64::MAX], Err("CUDA0: the limits of 2 devices on it are 16777216.0 TiB together")),
    ] {
        match (open(list, &memory), want) {
            (Err(error), Err(start)) => assert!(error.starts_with(start), "{list} {memory:?}: {error}"),
            (opened, want) => assert_eq!(opened, want.map_err(str::to_owned), "{list} {memory:?}"),
        }
    }
}
