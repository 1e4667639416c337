//! Fuzz test of the arguments of fused kernels, of kernels for packed weights and of launches that quantise their result: groups of nodes
//! that the GPU runs as one kernel, with strides, offsets, counts and parameters that a peer chose. A group runs without a fault, writes
//! its destinations only, and has the CPU's results, or is [`DeviceError::Unsupported`].
//!
//! `HOSTILE_GROUPS=100000 HOSTILE_SEED=7 cargo test --release --test hostile fused_kernels` runs more groups.

use crate::env_number;
use crate::fuzz_generator::{FuzzGenerator, FuzzGraph, GroupKind, SLOTS};
use crate::kernel_arguments::{exact_cpu, gpu, run_on_both};
use crate::mutated_graphs::{CaseMemory, count_multiplications, nmse_if_comparable};
use crate::mutation::{mutate, mutate_parameter};
use fanout::device::Device;
use fanout::graph::Graph;
use fanout::graph::validate::{OpSet, UntrustedTensor, import_untrusted};
use fanout::ops::OpCode;
use fanout::tensor::{DType, TensorDesc};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Groups that run without HOSTILE_GROUPS.
const GROUPS: u64 = 1600;

/// Limit of the multiplications of a group, as for single nodes.
const MAX_MULTIPLICATIONS: usize = 1 << 20;

/// Least mean square of results that are compared. The scales of quantised columns are F16, so values that an extreme parameter made tiny
/// lose their digits, or vanish.
const LEAST_SQUARE: f64 = 1e-6;

/// Parts of names of kernels that the groups run, besides those that single nodes run.
const KERNELS: [&str; 8] = [
    "rope_set_rows",
    "rope_cache",
    "moe_route",
    "moe_sum",
    "mul_mat_pack\"",
    "mul_mat_packed_vec",
    "mul_mat_packed_id",
    "mul_mat_half",
];

#[derive(Clone, Copy, Debug, Default)]
struct Outcomes {
    rejected: usize,
    unsupported: usize,
    invalid_data: usize,
    ran: usize,
    compared: usize,
}

#[test]
fn hostile_groups_of_nodes_never_fault() {
    let emulator = cudaemu::test::load().expect("the emulator is built with the tests");
    let devices: [Arc<dyn Device>; 2] = [gpu(), exact_cpu()];
    let (groups, seed) = (env_number("HOSTILE_GROUPS", GROUPS), env_number("HOSTILE_SEED", 1));
    let mut outcomes: BTreeMap<GroupKind, Outcomes> = BTreeMap::new();
    for case in 0..groups {
        // Each case has its own seed, so that it can be repeated alone.
        let seed = seed << 40 | case;
        let mut rng = Rng::with_seed(seed);
        let kind = GroupKind::ALL[case as usize % GroupKind::ALL.len()];
        let mut generated = FuzzGenerator::generate_group(&mut rng, kind);
        for _ in 0..[0, 0, 1, 2][rng.usize(..4)] {
            if rng.bool() { mutate_parameter(&mut generated, &mut rng) } else { mutate(&mut generated, &mut rng) }
        }
        let outcome = outcomes.entry(kind).or_default();
        let sizes = vec![generated.size; SLOTS];
        let Ok(graph) = import_untrusted(&generated.listed, &generated.records, sizes, OpSet::Extension) else {
            outcome.rejected += 1;
            continue;
        };
        if graph.nodes().is_empty() || count_multiplications(&graph) > MAX_MULTIPLICATIONS {
            continue;
        }
        let graph = Arc::new(graph);
        let memory = CaseMemory::new(&graph, &generated, &mut rng);
        compare(&graph, &generated, &memory, &devices, outcome, &|why| {
            panic!("seed {seed:#x}, {kind:?}: {why}\n{generated}")
        });
    }
    if std::env::var_os("HOSTILE_REPORT").is_some() {
        for (kind, outcome) in &outcomes {
            println!("{kind:16?} {outcome:?}");
        }
    }
    for (kind, outcome) in outcomes {
        let few = groups as usize / GroupKind::ALL.len() / 10;
        assert!(outcome.compared >= few, "{kind:?}: too few groups were compared: {outcome:?}");
    }
    let counts = emulator.counts_json();
    for kernel in KERNELS {
        assert!(counts.contains(kernel), "no group has run {kernel}");
    }
}

fn compare(
    graph: &Arc<Graph>,
    generated: &FuzzGraph,
    memory: &CaseMemory,
    devices: &[Arc<dyn Device>; 2],
    outcomes: &mut Outcomes,
    wrong: &dyn Fn(&str),
) {
    // Elided results keep the old content of their memory, which another tensor there may show.
    let compares = have_own_memory(&generated.records);
    let Some([(on_gpu, got), (on_cpu, want)]) = run_on_both(graph, memory, devices, compares, wrong) else {
        outcomes.unsupported += 1;
        return;
    };
    if on_gpu.is_err() || on_cpu.is_err() {
        outcomes.invalid_data += 1;
        return;
    }
    outcomes.ran += 1;
    if !compares || !memory.plausible {
        return;
    }
    outcomes.compared += 1;
    for (index, node) in graph.nodes().iter().enumerate() {
        let is_elided = graph.tensor(node.dst).is_some_and(|dst| dst.use_count.is_some());
        if !is_elided
            && let Some(nmse) = nmse_if_comparable(graph, index, LEAST_SQUARE, [&want, &got])
            && nmse > 1e-2
        {
            wrong(&format!("node {index}: the NMSE of the GPU is {nmse}, expected at most 0.01"));
        }
    }
}

/// Whether no two tensors share bytes, except for views, and targets of SET_ROWS.
fn have_own_memory(records: &[UntrustedTensor]) -> bool {
    let by_id = |id: u64| records.iter().position(|t| t.id == id);
    // The record whose memory a record shows.
    let root = |mut at: usize| {
        for _ in 0..records.len() {
            let t = &records[at];
            let shown = match OpCode::from_wire(t.op) {
                Some(OpCode::View) => by_id(t.srcs[0]),
                Some(OpCode::SetRows) => by_id(t.srcs[2]),
                _ => None,
            };
            let Some(next) = shown else { break };
            at = next;
        }
        at
    };
    let bytes = |t: &UntrustedTensor| -> Option<(u32, Range<usize>)> {
        let (ne, nb) = (t.ne.map(|n| n as usize), t.nb.map(|n| n as usize));
        let desc = TensorDesc::strided(DType::from_wire(t.dtype)?, ne, nb).ok()?;
        let place = t.place?;
        Some((place.slot, place.offset..place.offset.checked_add(desc.extent())?))
    };
    let all: Option<Vec<_>> = records.iter().map(bytes).collect();
    all.is_some_and(|all| {
        (0..all.len()).all(|b| {
            let ((slot, bytes), of) = (&all[b], root(b));
            (0..b).all(|a| {
                let (other, range) = &all[a];
                slot != other || range.end <= bytes.start || bytes.end <= range.start || root(a) == of
            })
        })
    })
}
