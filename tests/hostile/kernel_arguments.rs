//! Fuzz test of the CUDA kernels' arguments: single nodes of every op with CUDA kernels, of every type, whose parameters, counts,
//! strides and offsets a peer chose. On the emulated GPU, which faults at misaligned addresses and outside of allocations, a node runs
//! with the result of the CPU, or is [`DeviceError::Unsupported`]. A fault would end the sessions of all clients of a server.
//!
//! `HOSTILE_NODES=1000000 HOSTILE_SEED=7 cargo test --release --test hostile kernel_arguments` runs more nodes, `HOSTILE_REPORT=1`
//! prints the outcomes per op.

use crate::env_number;
use crate::fuzz_generator::{FuzzGenerator, SLOTS};
use crate::mutated_graphs::{CaseMemory, count_multiplications, each_block, nmse_if_comparable, ops, run};
use crate::mutation::{mutate, mutate_parameter};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Device, DeviceError, Unsupported};
use fanout::graph::Graph;
use fanout::graph::validate::{OpSet, import_untrusted};
use fanout::ops::{FAMILIES, OpCode};
use fanout::tensor::DType;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Nodes that run without HOSTILE_NODES.
const NODES: u64 = 20_000;

/// Most blocks that a node reads and writes, and most multiplications: the emulator runs some ten million instructions a second.
const MAX_MULTIPLICATIONS: usize = 1 << 16;

/// Ops whose results are copies of their sources' elements, converted or not: they must be equal, except for sign and payload of NaNs. The
/// CPU keeps those of a NaN that it multiplies by a code (GET_ROWS of blocks whose scale is one), a GPU does not.
const EXACT: [OpCode; 11] = [
    OpCode::Dup,
    OpCode::Cont,
    OpCode::GetRows,
    OpCode::Set,
    OpCode::Concat,
    OpCode::Repeat,
    OpCode::Pad,
    OpCode::PadReflect1d,
    OpCode::Roll,
    OpCode::Diag,
    OpCode::Tri,
];

#[derive(Clone, Copy, Debug, Default)]
struct Outcomes {
    rejected: usize,
    unsupported: usize,
    invalid_data: usize,
    equal: usize,
}

/// The emulated GPU.
pub(crate) fn gpu() -> Arc<dyn Device> {
    cudaemu::test::load().expect("the emulator is built with the tests");
    CudaDevice::new("CUDA0", &cuda::detect().expect("a GPU")[0], 64 << 20).expect("a device")
}

/// The reference.
pub(crate) fn exact_cpu() -> Arc<dyn Device> {
    CpuDevice::new("CPU", 1, MathMode::Exact, 64 << 20).expect("a device")
}

/// What a device returned for a graph, and the bytes of its slots afterwards.
type RunResult = (Result<(), DeviceError>, Vec<Vec<u8>>);

/// Runs a graph on the GPU, and if the GPU supports it, on the CPU. Calls `wrong` for a fault, for a write outside of the
/// destinations, and, with `compares`, for outcomes of different kinds.
pub(crate) fn run_on_both(
    graph: &Arc<Graph>,
    memory: &CaseMemory,
    [gpu, cpu]: &[Arc<dyn Device>; 2],
    compares: bool,
    wrong: &dyn Fn(&str),
) -> Option<[RunResult; 2]> {
    let (on_gpu, got) = run(gpu, graph, memory);
    match &on_gpu {
        Err(DeviceError::Unsupported(unsupported)) => {
            if breaks_a_rule_of_select(unsupported) {
                wrong(&format!("the GPU: {unsupported}"));
            }
            return None;
        }
        Ok(()) | Err(DeviceError::Data { .. } | DeviceError::OutOfMemory { .. }) => {}
        Err(e) => wrong(&format!("the GPU: {e}")),
    }
    if let Some((slot, at)) = memory.unexpected_write(&got) {
        wrong(&format!("the GPU: byte {at} of slot {slot} belongs to no destination, and has changed"));
    }
    let (on_cpu, want) = run(cpu, graph, memory);
    let kind = |o: &Result<(), DeviceError>| o.as_ref().map_err(std::mem::discriminant).copied();
    if compares && kind(&on_gpu) != kind(&on_cpu) {
        wrong(&format!("the GPU: {on_gpu:?}, the CPU: {on_cpu:?}"));
    }
    Some([(on_gpu, got), (on_cpu, want)])
}

/// Whether the check of accesses has rejected a node that the rules of its op's `select` should have rejected. Only the regions of SET and
/// ACC have no rule but that check.
fn breaks_a_rule_of_select(unsupported: &Unsupported) -> bool {
    !matches!(unsupported.op, OpCode::Set | OpCode::Acc) && unsupported.reason.contains("would access")
}

#[test]
fn hostile_kernel_arguments_never_fault() {
    let devices = [gpu(), exact_cpu()];
    let on_cuda: Vec<_> = ops()
        .into_iter()
        .filter(|&op| FAMILIES.iter().any(|row| row.codes.contains(&op) && row.has_cuda(op)))
        .collect();
    let (nodes, seed) = (env_number("HOSTILE_NODES", NODES), env_number("HOSTILE_SEED", 1));
    let mut outcomes: BTreeMap<OpCode, Outcomes> = BTreeMap::new();
    let (mut ran, mut case) = (0, 0);
    while ran < nodes {
        case += 1;
        // Each case has its own seed, so that it can be repeated alone.
        let seed = seed << 40 | case;
        let mut rng = Rng::with_seed(seed);
        let op = on_cuda[case as usize % on_cuda.len()];
        let mut generated = FuzzGenerator::generate_node(&mut rng, op);
        for _ in 0..rng.usize(..4) {
            if rng.bool() { mutate_parameter(&mut generated, &mut rng) } else { mutate(&mut generated, &mut rng) }
        }
        let outcome = outcomes.entry(op).or_default();
        let sizes = vec![generated.size; SLOTS];
        let Ok(graph) = import_untrusted(&generated.listed, &generated.records, sizes, OpSet::Extension) else {
            outcome.rejected += 1;
            continue;
        };
        if graph.nodes().is_empty() || count_multiplications(&graph) > MAX_MULTIPLICATIONS {
            continue;
        }
        ran += 1;
        let graph = Arc::new(graph);
        let memory = CaseMemory::new(&graph, &generated, &mut rng);
        compare(&graph, &memory, &devices, outcome, &|why| panic!("seed {seed:#x}: {why}\n{generated}"));
    }
    if std::env::var_os("HOSTILE_REPORT").is_some() {
        for (op, outcome) in &outcomes {
            println!("{op:16} {outcome:?}");
        }
    }
    for op in on_cuda {
        let outcome = outcomes[&op];
        assert!(outcome.equal as u64 >= nodes / 2000, "{op}: too few nodes ran: {outcome:?}");
    }
}

/// Runs a node on the GPU, and if the GPU supports it, on the CPU. Calls `wrong` for each error.
fn compare(
    graph: &Arc<Graph>,
    memory: &CaseMemory,
    devices: &[Arc<dyn Device>; 2],
    outcomes: &mut Outcomes,
    wrong: &dyn Fn(&str),
) {
    let Some([(on_gpu, got), (on_cpu, want)]) = run_on_both(graph, memory, devices, true, wrong) else {
        outcomes.unsupported += 1;
        return;
    };
    if on_gpu.is_err() || on_cpu.is_err() {
        outcomes.invalid_data += 1;
        return;
    }
    outcomes.equal += 1;
    let [node] = graph.nodes() else { return };
    if EXACT.contains(&node.op.code()) {
        let dst = graph.tensor(node.dst).expect("a destination");
        let dtype = dst.desc.dtype();
        let size = dtype.block_bytes();
        each_block(dst, |slot, at| {
            let [got, want] = [&got, &want].map(|of| &of[slot][at..at + size]);
            if got != want && !(is_nan(dtype, got) && is_nan(dtype, want)) {
                wrong(&format!("byte {at} of slot {slot} differs from the CPU's"));
            }
        });
    } else if memory.plausible
        && let Some(nmse) = nmse_if_comparable(graph, 0, 0.0, [&want, &got])
        && nmse > 1e-2
    {
        wrong(&format!("the NMSE of the GPU is {nmse}, expected at most 0.01"));
    }
}

/// Whether the bytes of an element are a NaN.
fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).is_nan(),
        (DType::F16, &[a, b]) => u16::from_le_bytes([a, b]) & 0x7fff > 0x7c00,
        (DType::BF16, &[a, b]) => u16::from_le_bytes([a, b]) & 0x7fff > 0x7f80,
        _ => false,
    }
}
