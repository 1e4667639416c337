use super::backend::{Found, Open, Request, cpu};
use super::*;

/// What a machine without a usable driver says.
const NO_DRIVER: &str = "no driver; install one";

/// Number of each GPU of a made-up driver, and why it cannot be used; or why there are none.
type Numbered = Result<Vec<(usize, Option<&'static str>)>, String>;

/// A made-up backend: its stem and its GPUs.
struct Gpus(&'static str, Numbered);

impl Backend for Gpus {
    fn stem(&self) -> &'static str {
        self.0
    }

    fn enumerate(&self) -> Vec<Found> {
        let found = |&(number, unusable): &(usize, Option<&str>)| Found {
            name: format!("{}{number}", self.0),
            description: "a stub".to_owned(),
            kind: DeviceKind::Gpu,
            number: Some(number),
            unusable: unusable.map(str::to_owned),
            opener: Arc::new(Stub),
        };
        self.1.iter().flatten().map(found).collect()
    }

    fn missing(&self) -> Option<String> {
        self.1.as_ref().err().cloned()
    }
}

/// A GPU that opens as a CPU device.
#[derive(Debug)]
struct Stub;

impl Open for Stub {
    fn free(&self) -> Result<u64, DeviceError> {
        Ok(1 << 30)
    }

    fn open(&self, request: &Request<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        cpu::Cpu.open(request)
    }
}

/// A machine with these GPUs, and its processors.
fn machine(gpus: Numbered) -> Registry {
    Registry::of(vec![Box::new(Gpus("CUDA", gpus)), Box::new(cpu::Cpu)])
}

/// A machine with two kinds of GPUs. The CPU is not the last backend: nothing may rely on that.
fn two_kinds(first: Numbered, second: Numbered) -> Registry {
    Registry::of(vec![Box::new(Gpus("CUDA", first)), Box::new(cpu::Cpu), Box::new(Gpus("Metal", second))])
}

fn cpu_only() -> Registry {
    machine(Err(NO_DRIVER.to_owned()))
}

fn small() -> Options {
    Options { threads: Some(1), memory: vec![1 << 20], ..Options::default() }
}

fn names(registry: &Registry, list: &str) -> Result<Vec<String>, String> {
    let opened = registry.open(list, &small()).map_err(|e| e.to_string())?;
    Ok(opened.iter().map(|device| device.info().name.clone()).collect())
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
}

#[test]
fn without_a_gpu_its_number_says_what_is_missing() {
    let registry = cpu_only();
    for (list, name) in [("0", "0"), ("CPU,1", "1"), ("cuda0", "cuda0"), ("CUDA17", "CUDA17")] {
        assert_eq!(names(&registry, list), Err(format!("no device {name:?}: {NO_DRIVER}; there are: CPU")), "{list:?}");
    }
    let (list, notes) = registry.default_list();
    assert_eq!((&*list, notes), ("CPU", vec![format!("no GPU, the CPU is used: {NO_DRIVER}")]));
    assert_eq!(registry.no_gpu(), Some(NO_DRIVER));
}

#[test]
fn a_second_kind_of_gpus_replaces_a_missing_first() {
    let registry = two_kinds(Err(NO_DRIVER.to_owned()), Ok(vec![(0, None), (1, None)]));
    assert_eq!(registry.no_gpu(), None);
    assert_eq!(registry.default_list(), ("Metal0,Metal1".to_owned(), vec![]));
    assert_eq!(names(&registry, "1,metal0"), Ok(vec!["Metal1".to_owned(), "Metal0".to_owned()]));
    let known = "there are: CPU, Metal0, Metal1";
    assert_eq!(names(&registry, "CUDA0"), Err(format!("no device \"CUDA0\": {NO_DRIVER}; {known}")));
    assert_eq!(names(&registry, "2"), Err(format!("no device \"2\"; {known}")));
    assert_eq!(names(&registry, "Metal2"), Err(format!("no device \"Metal2\"; {known}")));
}

#[test]
fn a_missing_second_kind_of_gpus_hides_no_first() {
    let registry = two_kinds(Ok(vec![(0, None)]), Err("no framework".to_owned()));
    assert_eq!(registry.no_gpu(), None);
    assert_eq!(registry.default_list(), ("CUDA0".to_owned(), vec![]));
    let want = "no device \"metal0\": no framework; there are: CUDA0, CPU";
    assert_eq!(names(&registry, "metal0"), Err(want.to_owned()));
    assert_eq!(names(&registry, "7"), Err("no device \"7\"; there are: CUDA0, CPU".to_owned()));
}

#[test]
fn without_gpus_of_two_kinds_both_reasons_are_told() {
    let registry = two_kinds(Err(NO_DRIVER.to_owned()), Err("no framework".to_owned()));
    let both = format!("{NO_DRIVER}; no framework");
    assert_eq!(registry.no_gpu(), Some(&*both));
    assert_eq!(registry.default_list(), ("CPU".to_owned(), vec![format!("no GPU, the CPU is used: {both}")]));
    assert_eq!(registry.best().name, "CPU");
    assert_eq!(names(&registry, "0"), Err(format!("no device \"0\": {both}; there are: CPU")));
    assert_eq!(names(&registry, "Metal0"), Err("no device \"Metal0\": no framework; there are: CPU".to_owned()));
    // A GPU that cannot be used is one nevertheless.
    let unusable = two_kinds(Ok(vec![(0, Some("old"))]), Err("no framework".to_owned()));
    assert_eq!(unusable.no_gpu(), None);
    let note = "no GPU, the CPU is used: CUDA0 is left out: old; no framework";
    assert_eq!(unusable.default_list(), ("CPU".to_owned(), vec![note.to_owned()]));
}

#[test]
fn a_number_names_a_gpu_of_the_first_kind() {
    let registry = two_kinds(Ok(vec![(0, None)]), Ok(vec![(0, None), (1, None)]));
    assert_eq!(names(&registry, "0,Metal0"), Ok(vec!["CUDA0".to_owned(), "Metal0".to_owned()]));
    let known = "there are: CUDA0, CPU, Metal0, Metal1";
    assert_eq!(names(&registry, "1"), Err(format!("no device \"1\"; {known}")));
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_says_so() {
    let error = names(&Registry::detect(), "0").unwrap_err();
    assert!(error.contains("built without CUDA"), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn each_missing_thing_is_told() {
    use crate::cuda::NoCuda;
    for why in [NoCuda::NoDriver, NoCuda::Old(11040), NoCuda::NoDevice, NoCuda::Start("broken".to_owned())] {
        let registry = machine(Err(why.to_string()));
        assert_eq!(names(&registry, "0"), Err(format!("no device \"0\": {why}; there are: CPU")));
        assert_eq!(registry.no_gpu(), Some(&*why.to_string()));
    }
}

#[test]
fn a_gpu_without_kernels_is_shown_and_refused() {
    let why = "Old has compute capability 7.0, and 7.5 or later is needed";
    let registry = machine(Ok(vec![(0, Some(why)), (1, None)]));
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
    assert_eq!(machine(Ok(vec![(0, Some(why))])).best().name, "CPU");
    let note = format!("no GPU, the CPU is used: CUDA0 is left out: {why}");
    assert_eq!(machine(Ok(vec![(0, Some(why))])).default_list(), ("CPU".to_owned(), vec![note]));
}

#[cfg(not(feature = "client"))]
#[test]
fn a_build_without_the_client_knows_no_servers() {
    let error = names(&cpu_only(), "localhost:50052").unwrap_err();
    assert_eq!(error, "no device \"localhost:50052\"; there are: CPU");
}

fn totals(registry: &Registry, list: &str, memory: &[u64]) -> Result<Vec<u64>, String> {
    let opened = registry.open(list, &small().with_memory(memory.to_vec())).map_err(|e| e.to_string())?;
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
}
