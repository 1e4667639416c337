//! Sweep: every variant of every kernel over many shapes, compared with the CPU in exact mode, on an emulated GPU of each PTX
//! target. The sweep fails if no case launches some entry of kernels/ptx. Each file has the cases of one op family.

mod assign;
mod binary;
mod concat;
mod copy;
mod diag;
mod flash_attn;
mod glu;
mod linear_attn;
mod mul_mat;
mod norm;
mod pad;
mod reduce;
mod rope;
mod rows;
mod sequence;
mod softmax;
mod sort;
mod ssm;
mod unary;

use cudaemu::test::Session;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice};
use fanout::graph::TensorId;
use fanout_testing::compare::nmse;
use fanout_testing::op_case::{BuiltCase, Subject};
use std::collections::BTreeSet;
use std::fs;

type Family = (&'static str, fn(&Sweep));

/// The op families, with the function that runs their cases.
const FAMILIES: &[Family] = &[
    ("assign", assign::run),
    ("binary", binary::run),
    ("concat", concat::run),
    ("copy", copy::run),
    ("diag", diag::run),
    ("flash_attn", flash_attn::run),
    ("glu", glu::run),
    ("linear_attn", linear_attn::run),
    ("mul_mat", mul_mat::run),
    ("norm", norm::run),
    ("pad", pad::run),
    ("reduce", reduce::run),
    ("rope", rope::run),
    ("rows", rows::run),
    ("sequence", sequence::run),
    ("softmax", softmax::run),
    ("sort", sort::run),
    ("ssm", ssm::run),
    ("unary", unary::run),
];

/// The devices of a sweep. The emulator is the last field, because it must be dropped last.
pub struct Sweep {
    cpu: Subject,
    gpu: Subject,
    emulator: Session,
}

impl Sweep {
    /// Runs a graph on both devices. The results `dsts` must agree within the NMSE `bound`, and no other memory may be written.
    #[track_caller]
    pub fn check(&self, case: &BuiltCase, dsts: &[TensorId], bound: f64, what: &str) {
        let (want, got) = (case.run(&self.cpu), case.run(&self.gpu));
        for &dst in dsts {
            let error = nmse(&got.values(dst), &want.values(dst));
            assert!(error <= bound, "{what}: the NMSE to the CPU is {error:e}, allowed is {bound:e}");
        }
    }

    /// As [`Sweep::check`], but results must agree bit for bit.
    #[track_caller]
    pub fn check_bytes(&self, case: &BuiltCase, dsts: &[TensorId], what: &str) {
        let (want, got) = (case.run(&self.cpu), case.run(&self.gpu));
        for &dst in dsts {
            assert!(got.bytes(dst) == want.bytes(dst), "{what}: the bytes differ from the CPU's");
        }
    }

    /// Number of kernel launches since the start.
    fn launches(&self) -> u64 {
        let counts = self.emulator.counts_json();
        let number = |rest: &str| rest.split([',', '}']).next()?.trim().parse::<u64>().ok();
        counts.split("\"launches\":").skip(1).filter_map(number).sum()
    }
}

/// Names of all entries in the PTX files for a target.
fn entries(target: u32) -> BTreeSet<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx");
    let mut found = BTreeSet::new();
    for file in fs::read_dir(folder).unwrap() {
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

fn sweep(target: u32) {
    let wanted = entries(target);
    if wanted.is_empty() {
        return;
    }
    let settings = format!("CUDAEMU_CAPABILITY={}.{}\nCUDAEMU_COUNTS=on", target / 10, target % 10);
    let emulator = cudaemu::test::start(&settings).unwrap();
    let emulator = {
        let gpus = cuda::detect().unwrap();
        let gpu = CudaDevice::new("CUDA0", &gpus[0], 4 << 30).unwrap();
        let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, 4 << 30).unwrap();
        let sweep = Sweep { cpu: Subject::new("CPU", cpu, false), gpu: Subject::new("GPU", gpu, true), emulator };
        // FANOUT_TEST_FAMILY selects one family during development; then not all entries are launched.
        let only = std::env::var("FANOUT_TEST_FAMILY").ok();
        for (_, run) in FAMILIES.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
            run(&sweep);
        }
        let counts = sweep.emulator.counts_json();
        let missing: Vec<_> = wanted.iter().filter(|name| !counts.contains(&format!("\"{name}\""))).collect();
        assert!(only.is_some() || missing.is_empty(), "no case launches {missing:?} for capability {target}");
        sweep.emulator
    };
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn every_variant_on_capability_7_5() {
    sweep(75);
}

#[test]
fn every_variant_on_capability_8_0() {
    sweep(80);
}

#[test]
fn every_variant_on_capability_9_0() {
    sweep(90);
}
