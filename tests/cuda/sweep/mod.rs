//! Sweep: every variant of every kernel over many shapes, compared with the CPU in exact mode, on an emulated GPU of each PTX
//! target. The sweep fails if no case launches some entry of kernels/ptx. Each file has the cases of one op family.
//!
//! With FANOUT_TEST_GPU=1, the sweep runs on the first GPU of this machine, with each target that it can execute. There, the
//! checks that need the emulator's counters are left out, and each family prints what it compared (`tally`).

mod assign;
mod backward;
mod binary;
mod concat;
mod conv;
mod conv_gemm;
mod copy;
mod diag;
mod dsv4;
mod flash_attn;
mod glu;
mod im2col;
mod layouts;
mod linear_attn;
mod moe;
mod mul_mat;
mod mul_mat_fused;
mod mul_mat_gemm;
mod mul_mat_id;
mod norm;
mod out_prod;
mod pad;
mod pool;
mod reduce;
mod rope;
mod rope_cache;
mod rows;
mod sequence;
mod softmax;
mod solve_tri;
mod sort;
mod ssm;
mod tally;
mod topk_mask;
mod unary;
mod upscale;

use cudaemu::test::Session;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice, Gpu};
use fanout::graph::TensorId;
use fanout_testing::compare::nmse;
use fanout_testing::op_case::{BuiltCase, Subject};
use fanout_testing::real_gpu;
use std::any::Any;
use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use tally::{Tally, TimeIsUp};

type Family = (&'static str, fn(&Sweep));

/// The lowest target with matrix products on tensor cores, before which some kernels are launched that convert columns.
const MIN_MMA: u32 = 80;

/// The op families, with the function that runs their cases.
const FAMILIES: &[Family] = &[
    ("assign", assign::run),
    ("backward", backward::run),
    ("binary", binary::run),
    ("concat", concat::run),
    ("conv", conv::run),
    ("copy", copy::run),
    ("diag", diag::run),
    ("dsv4", dsv4::run),
    ("flash_attn", flash_attn::run),
    ("glu", glu::run),
    ("im2col", im2col::run),
    ("linear_attn", linear_attn::run),
    ("mul_mat", mul_mat::run),
    ("norm", norm::run),
    ("out_prod", out_prod::run),
    ("pad", pad::run),
    ("pool", pool::run),
    ("reduce", reduce::run),
    ("rope", rope::run),
    ("rows", rows::run),
    ("sequence", sequence::run),
    ("softmax", softmax::run),
    ("solve_tri", solve_tri::run),
    ("sort", sort::run),
    ("ssm", ssm::run),
    ("topk_mask", topk_mask::run),
    ("unary", unary::run),
    ("upscale", upscale::run),
];

/// The devices of a sweep. The emulator is the last field, because it must be dropped last.
pub struct Sweep {
    cpu: Subject,
    gpu: Subject,
    tally: Tally,
    /// Whether products use tensor cores.
    has_mma: bool,
    /// None on a real GPU, and where graphs run twice: launches are not checked.
    emulator: Option<Session>,
}

impl Sweep {
    fn new(gpu: &Gpu, tally: Tally, emulator: Option<Session>) -> Sweep {
        let has_mma = gpu.capability >= MIN_MMA;
        let gpu = CudaDevice::new("CUDA0", gpu, 4 << 30).unwrap();
        let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, 4 << 30).unwrap();
        let is_programmatic = gpu.gpu().capability >= PROGRAMMATIC;
        let gpu = Subject::new("GPU", gpu, true);
        let gpu = if is_programmatic { gpu.that_replays() } else { gpu };
        Sweep { cpu: Subject::new("CPU", cpu, false), gpu, tally, has_mma, emulator }
    }

    /// Runs a graph on both devices. The results `dsts` must agree within the NMSE `bound`, and no other memory may be written.
    #[track_caller]
    pub fn check(&self, case: &BuiltCase, dsts: &[TensorId], bound: f64, what: &str) {
        if !self.tally.begin(what) {
            return;
        }
        let (want, got) = (case.run(&self.cpu), case.run(&self.gpu));
        for &dst in dsts {
            self.tally.compare(nmse(&got.values(dst), &want.values(dst)), bound, what);
        }
    }

    /// As [`Sweep::check`], but results must agree bit for bit.
    #[track_caller]
    pub fn check_bytes(&self, case: &BuiltCase, dsts: &[TensorId], what: &str) {
        if !self.tally.begin(what) {
            return;
        }
        let (want, got) = (case.run(&self.cpu), case.run(&self.gpu));
        for &dst in dsts {
            self.tally.compare_bytes(got.bytes(dst) == want.bytes(dst), what);
        }
    }

    /// Calls `run`, which must launch `expected` kernels. Only the emulator counts launches.
    #[track_caller]
    pub fn check_launches<T>(&self, expected: u64, what: &str, run: impl FnOnce() -> T) -> T {
        let Some(emulator) = &self.emulator else {
            self.tally.skip_launches();
            return run();
        };
        let before = launches(emulator);
        let result = run();
        assert_eq!(launches(emulator) - before, expected, "{what}: launches");
        result
    }
}

/// Number of kernel launches since the start of an emulator session.
fn launches(emulator: &Session) -> u64 {
    let counts = emulator.counts_json();
    let number = |rest: &str| rest.split([',', '}']).next()?.trim().parse::<u64>().ok();
    counts.split("\"launches\":").skip(1).filter_map(number).sum()
}

/// The families of a run: all, or the one that FANOUT_TEST_FAMILY names.
fn selected_families() -> Vec<Family> {
    let only = std::env::var("FANOUT_TEST_FAMILY").ok();
    let selected = FAMILIES.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name));
    let selected: Vec<_> = selected.copied().collect();
    assert!(!selected.is_empty(), "FANOUT_TEST_FAMILY={} names no family with kernels", only.unwrap_or_default());
    selected
}

/// The folder of the PTX files.
const PTX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx");

/// Names of all entries in the PTX files for a target.
fn entries(target: u32) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in fs::read_dir(PTX).unwrap() {
        let path = file.unwrap().path();
        if path.to_string_lossy().ends_with(&format!(".sm_{target}.ptx")) {
            let text = fs::read_to_string(path).unwrap();
            let names = text.split(".visible .entry ").skip(1).filter_map(|entry| entry.split('(').next());
            found.extend(names.map(str::to_owned));
        }
    }
    found
}

/// FAMILIES lists exactly the families that have CUDA kernels.
#[test]
fn every_family_on_cuda_has_cases() {
    let ours: BTreeSet<_> = FAMILIES.iter().map(|&(stem, _)| stem).collect();
    let table: BTreeSet<_> = fanout::ops::FAMILIES.iter().filter(|row| row.cuda).map(|row| row.stem).collect();
    assert_eq!(ours, table);
}

/// Ops of training, and windows and relative positions of SAM, which ggml-cuda has no kernels for either, run on the CPU behind a
/// GPU. All other ops of the protocol stay on it, apart from types and sizes that a kernel rejects.
#[test]
fn only_training_and_windows_leave_the_gpu() {
    let protocol = fanout::ops::FAMILIES.iter().filter(|row| row.codes.iter().all(|code| code.is_in_protocol()));
    let lacking = protocol.flat_map(|row| row.codes.iter().filter(|&&code| !row.has_cuda(code)));
    let lacking: Vec<_> = lacking.map(|code| code.name()).collect();
    let expected = "IM2COL_BACK POOL_2D_BACK WIN_PART WIN_UNPART GET_REL_POS ADD_REL_POS SILU_BACK RMS_NORM_BACK SOFT_MAX_BACK \
                    GET_ROWS_BACK CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD";
    assert_eq!(lacking, expected.split(' ').collect::<Vec<_>>());
}

fn sweep(target: u32) {
    if real_gpu::requested() {
        return sweep_real_gpu(target);
    }
    let mut wanted = entries(target);
    assert!(!wanted.is_empty(), "no kernel has PTX for {target}");
    if target < MIN_MMA {
        let unused = ["mul_mat_quantize_tiles", "mul_mat_halves", "moe_tiles", "flash_attn_halves"];
        wanted.retain(|name| !unused.contains(&name.as_str()));
    }
    // Without CUDAEMU_COUNTS: the text of `counts_json` would have a number for each line of each kernel, and cases read it twice.
    let settings = format!("CUDAEMU_CAPABILITY={}.{}", target / 10, target % 10);
    let emulator = cudaemu::test::start(&settings).unwrap();
    let emulator = {
        let gpus = cuda::detect().unwrap();
        let sweep = Sweep::new(&gpus[0], Tally::strict(), Some(emulator));
        let families = selected_families();
        for (_, run) in &families {
            run(&sweep);
        }
        let emulator = sweep.emulator.unwrap();
        let counts = emulator.counts_json();
        let missing: Vec<_> = wanted.iter().filter(|name| !counts.contains(&format!("\"{name}\""))).collect();
        // One family alone does not launch all entries.
        let is_partial = families.len() < FAMILIES.len();
        assert!(is_partial || missing.is_empty(), "no case launches {missing:?} for capability {target}");
        emulator
    };
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// The sweep on the first GPU of this machine, as if it had the capability `target`: the device then selects the PTX and the
/// kernels of that target, which every later GPU executes. Prints a line of JSON per family.
fn sweep_real_gpu(target: u32) {
    // One target at a time, so that memory and time limits of a sweep do not depend on the others.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut gpu = cuda::detect().unwrap().swap_remove(0);
    if gpu.capability < target {
        println!("\nsweep of target {target} left out: the GPU has capability {}", gpu.capability);
        return;
    }
    gpu.capability = target;
    let ptx = format!("sm_{target}");
    let mut failed = Vec::new();
    for (family, run) in selected_families() {
        let tally = if target == PROGRAMMATIC { Tally::lenient().each(5) } else { Tally::lenient() };
        let sweep = Sweep::new(&gpu, tally, None);
        let features = sweep.gpu.device.features();
        if target != PROGRAMMATIC
            && !features.iter().any(|feature| feature.name == "ptx" && feature.value.split(' ').any(|name| name == ptx))
        {
            println!("\nsweep of target {target} left out: no kernel has PTX for it");
            return;
        }
        let ended = catch_unwind(AssertUnwindSafe(|| run(&sweep)));
        if let Some(panic) = ended.err().filter(|panic| !panic.is::<TimeIsUp>()) {
            sweep.tally.fail_by_panic(panic_message(&*panic));
        }
        println!("\n{}", sweep.tally.line(target, family));
        if sweep.tally.failures() > 0 {
            failed.push(family);
        }
    }
    assert!(failed.is_empty(), "target {target}: the GPU differs from the CPU in {failed:?}; see the lines of JSON");
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without text")
}

/// The lowest capability with programmatic dependent launch, which has no PTX of its own.
const PROGRAMMATIC: u32 = 90;

/// Each fifth case twice, on a device with programmatic dependent launch: the second run replays a graph with programmatic edges. Its
/// bytes must be those of the first run, which launches kernel by kernel, and the results those of the CPU.
#[test]
fn replayed_on_capability_9_0() {
    if real_gpu::requested() {
        return sweep_real_gpu(PROGRAMMATIC);
    }
    let emulator = cudaemu::test::start("CUDAEMU_CAPABILITY=9.0").unwrap();
    let sweep = Sweep::new(&cuda::detect().unwrap()[0], Tally::strict().each(5), None);
    selected_families().iter().for_each(|(_, run)| run(&sweep));
    drop(sweep);
    assert!(emulator.programmatic_launches() > 0);
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// Kernels that split positions over multiprocessors, on a GPU with one of them.
#[test]
fn long_parts_on_one_multiprocessor() {
    if real_gpu::requested() {
        return;
    }
    let emulator = cudaemu::test::start("CUDAEMU_CAPABILITY=8.0\nCUDAEMU_SMS=1").unwrap();
    let sweep = Sweep::new(&cuda::detect().unwrap()[0], Tally::strict(), None);
    flash_attn::check_long_parts(&sweep);
    drop(sweep);
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// Convolutions whose columns do not fit the scratch memory at a time, which depends on the number of multiprocessors.
#[test]
fn chunks_of_columns_on_few_multiprocessors() {
    if real_gpu::requested() {
        return;
    }
    for multiprocessors in [1, 2] {
        let settings = format!("CUDAEMU_CAPABILITY=8.0\nCUDAEMU_SMS={multiprocessors}");
        let emulator = cudaemu::test::start(&settings).unwrap();
        let emulator = {
            let sweep = Sweep::new(&cuda::detect().unwrap()[0], Tally::strict(), Some(emulator));
            conv_gemm::check_chunks(&sweep, multiprocessors);
            sweep.emulator.unwrap()
        };
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

/// Each target has its own test, so that they run at the same time.
const TARGETS: [u32; 2] = [75, 80];

#[test]
fn every_variant_on_capability_7_5() {
    sweep(TARGETS[0]);
}

#[test]
fn every_variant_on_capability_8_0() {
    sweep(TARGETS[1]);
}

/// A new PTX target needs a test above.
#[test]
fn every_target_is_swept() {
    let files = fs::read_dir(PTX).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let target = |file: String| Some(file.rsplit_once(".sm_")?.1.strip_suffix(".ptx")?.parse::<u32>().unwrap());
    assert_eq!(files.filter_map(target).collect::<BTreeSet<_>>(), BTreeSet::from(TARGETS));
}
