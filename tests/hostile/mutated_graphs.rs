//! Runs generated and mutated graphs on all devices: a graph that passes validation must run or fail with an expected error,
//! write only to its destinations, and have the same result on each device.
//!
//! More cases: `HOSTILE_CASES=100000 HOSTILE_SEED=7 cargo test --release --test hostile`. `HOSTILE_REPORT=1` prints the
//! outcomes per op.

use crate::env_number;
use crate::fuzz_generator::{FuzzGenerator, FuzzGraph, SLOTS};
use crate::mutation::mutate;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Device, DeviceError, MemoryBudget, UploadSource};
use fanout::fallback::Fallback;
use fanout::graph::validate::{OpSet, import_untrusted};
use fanout::graph::{Graph, Tensor};
use fanout::ops::OpCode;
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper limit of the run of a case; a case that exceeds it hangs.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Limit of the multiplications of a case: mutated shapes can result in valid products that take too long for a test.
const MAX_MULTIPLICATIONS: usize = 1 << 24;

/// Elements of a window for [`count_multiplications`]: windows are mostly smaller.
const MAX_WINDOW: usize = 1 << 10;

/// Numbers of cases of an op by outcome.
#[derive(Clone, Copy, Debug, Default)]
struct OutcomeCounts {
    /// Rejected by validation.
    rejected: usize,
    /// Not supported by the device.
    unsupported: usize,
    /// Failed because of their data: an index out of range.
    invalid_data: usize,
    /// Succeeded.
    succeeded: usize,
}

pub(crate) fn ops() -> Vec<OpCode> {
    OpCode::ALL.iter().copied().filter(|op| op.stem().is_some_and(|stem| stem != "view")).collect()
}

#[test]
fn the_generator_supports_every_op() {
    let (ops, mut rng) = (ops(), Rng::with_seed(1));
    for &op in &ops {
        let generated = FuzzGenerator::generate(&mut rng, op, &ops);
        assert_eq!(generated.records.last().map(|record| record.op), Some(op.to_wire()));
    }
}

#[test]
fn validated_graphs_run_and_write_only_their_destinations() {
    let (ops, devices) = (ops(), TestDevices::new());
    let (cases, seed) = (env_number("HOSTILE_CASES", 46 * ops.len() as u64), env_number("HOSTILE_SEED", 1));
    let mut counts: BTreeMap<OpCode, OutcomeCounts> = BTreeMap::new();
    for case in 0..cases {
        // Each case has its own seed, so that it can be repeated alone.
        let seed = seed << 32 | case;
        let mut rng = Rng::with_seed(seed);
        let op = ops[case as usize % ops.len()];
        let mut generated = FuzzGenerator::generate(&mut rng, op, &ops);
        for _ in 0..[0, 0, 0, 1, 1, 2, 3][rng.usize(..7)] {
            mutate(&mut generated, &mut rng);
        }
        let count = counts.entry(op).or_default();
        let graph = match import_untrusted(
            &generated.listed,
            &generated.records,
            vec![generated.size; SLOTS],
            OpSet::Extension,
        ) {
            Ok(graph) => Arc::new(graph),
            Err(e) => {
                assert!(!e.to_string().is_empty());
                count.rejected += 1;
                continue;
            }
        };
        let memory = CaseMemory::new(&graph, &generated, &mut rng);
        devices.run_and_compare(&graph, &memory, count, &|why| panic!("seed {seed:#x}: {why}\n{generated}"));
    }
    if std::env::var_os("HOSTILE_REPORT").is_some() {
        for (op, count) in &counts {
            println!("{op:16} {count:?}");
        }
    }
    // OPT_STEP_ADAMW has five operands, of which three may overlap no other: few of its nodes are valid.
    let wanted = cases as usize / ops.len() / 15;
    for op in ops {
        let count = counts[&op];
        assert!(count.succeeded >= wanted && count.rejected >= wanted, "{op}: too few cases of one outcome: {count:?}");
    }
}

/// The devices on which each case runs.
struct TestDevices {
    devices: Vec<(&'static str, Arc<dyn Device>)>,
}

/// Index of the emulated GPU. It reports an invalid memory access as a failure of the device.
const GPU: usize = 4;

/// Contents of the buffers before a run, and the bytes that the run may change.
pub(crate) struct CaseMemory {
    before: Vec<Vec<u8>>,
    writable: Vec<Vec<bool>>,
    /// Whether the sources have values between -1 and 1, so that the results of different kernels can be compared.
    pub(crate) plausible: bool,
}

impl CaseMemory {
    pub(crate) fn new(graph: &Graph, generated: &FuzzGraph, rng: &mut Rng) -> CaseMemory {
        let (mut before, mut writable) =
            (vec![vec![0; generated.size]; SLOTS], vec![vec![false; generated.size]; SLOTS]);
        before.iter_mut().for_each(|bytes| rng.fill(bytes));
        let sane = rng.bool();
        if sane {
            for tensor in graph.tensors() {
                fill_plausible(&mut before, tensor, rng);
            }
        }
        for &(record, bound) in &generated.indices {
            // After mutations several records may share the memory: an index in range for one of them can be out of range for
            // another.
            let record = &generated.records[record];
            let dtype = DType::from_wire(record.dtype);
            let tensor = graph.tensors().iter().find(|t| t.place == record.place && Some(t.desc.dtype()) == dtype);
            if let Some(tensor) = tensor
                && rng.u8(..4) > 0
            {
                each_block(tensor, |slot, at| {
                    let index = rng.u64(..bound.max(1) as u64).to_le_bytes();
                    let size = tensor.desc.dtype().block_bytes().min(8);
                    before[slot][at..at + size].copy_from_slice(&index[..size]);
                });
            }
        }
        for node in graph.nodes() {
            let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i)).filter_map(|(_, id)| *id);
            for id in updated.chain([node.dst]) {
                let tensor = graph.tensor(id).expect("a destination");
                each_block(tensor, |slot, at| writable[slot][at..at + tensor.desc.dtype().block_bytes()].fill(true));
            }
        }
        CaseMemory { before, writable, plausible: sane }
    }

    /// Slot and offset of a byte outside of the destinations that has changed.
    pub(crate) fn unexpected_write(&self, after: &[Vec<u8>]) -> Option<(usize, usize)> {
        const CHUNK_BYTES: usize = 1024;
        for (slot, (before, after)) in self.before.iter().zip(after).enumerate() {
            for (piece, (was, is)) in before.chunks(CHUNK_BYTES).zip(after.chunks(CHUNK_BYTES)).enumerate() {
                // Compares whole chunks first: most are equal.
                let changed =
                    || (0..was.len()).find(|&k| was[k] != is[k] && !self.writable[slot][piece * CHUNK_BYTES + k]);
                if was != is
                    && let Some(k) = changed()
                {
                    return Some((slot, piece * CHUNK_BYTES + k));
                }
            }
        }
        None
    }
}

/// Fills a tensor with values between -1 and 1 if its type has a quantiser. Integers and other types keep their random bytes.
fn fill_plausible(memory: &mut [Vec<u8>], tensor: &Tensor, rng: &mut Rng) {
    let dtype = tensor.desc.dtype();
    let mut values = vec![0.0; dtype.block_len()];
    let quantise = quantiser(dtype).filter(|_| !matches!(dtype, DType::I32 | DType::I64));
    let Some(quantise) = quantise else { return };
    each_block(tensor, |slot, at| {
        values.fill_with(|| rng.f32() * 2.0 - 1.0);
        quantise(&values, &mut memory[slot][at..at + dtype.block_bytes()]);
    });
}

/// Calls `each` with slot and offset of each block of a placed tensor.
pub(crate) fn each_block(tensor: &Tensor, mut each: impl FnMut(usize, usize)) {
    let (ne, nb) = (tensor.desc.ne(), tensor.desc.nb());
    let Some(place) = tensor.place else { return };
    for i3 in 0..ne[3] {
        for i2 in 0..ne[2] {
            for i1 in 0..ne[1] {
                for i0 in 0..ne[0] / tensor.desc.dtype().block_len() {
                    let at = place.offset + i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                    each(place.slot as usize, at);
                }
            }
        }
    }
}

impl TestDevices {
    fn new() -> TestDevices {
        let device =
            |threads, path| CpuDevice::new("CPU", threads, path, 64 << 20).expect("a device") as Arc<dyn Device>;
        cudaemu::test::load().expect("the emulator is built with the tests");
        let gpu = CudaDevice::new("CUDA0", &cuda::detect().expect("a GPU")[0], 64 << 20).expect("a device");
        TestDevices {
            devices: vec![
                ("exact, 1 thread", device(1, MathMode::Exact)),
                ("exact, 3 threads", device(3, MathMode::Exact)),
                ("fast, 1 thread", device(1, MathMode::Fast)),
                ("fast, 3 threads", device(3, MathMode::Fast)),
                ("CUDA, with the CPU for the rest", Fallback::new(gpu, device(1, MathMode::Exact))),
            ],
        }
    }

    /// Runs a graph on all devices, and compares outcomes, results and unchanged bytes. Calls `wrong` for each error.
    fn run_and_compare(
        &self,
        graph: &Arc<Graph>,
        memory: &CaseMemory,
        count: &mut OutcomeCounts,
        wrong: &dyn Fn(&str),
    ) {
        if count_multiplications(graph) > MAX_MULTIPLICATIONS {
            return;
        }
        check_no_overlap(graph, wrong);
        let mut outcomes = Vec::new();
        for (name, device) in &self.devices {
            let (outcome, after) = run(device, graph, memory);
            match &outcome {
                Ok(())
                | Err(DeviceError::Data { .. } | DeviceError::Unsupported(_) | DeviceError::OutOfMemory { .. }) => {}
                Err(e) => wrong(&format!("{name}: {e}")),
            }
            if let Some((slot, at)) = memory.unexpected_write(&after) {
                wrong(&format!("{name}: byte {at} of slot {slot} belongs to no destination, and has changed"));
            }
            outcomes.push((outcome, after));
        }
        let kind = |o: &Result<(), DeviceError>| o.as_ref().map_err(std::mem::discriminant).copied();
        for (other, (name, _)) in outcomes.iter().zip(&self.devices).skip(1) {
            if kind(&other.0) != kind(&outcomes[0].0) {
                wrong(&format!("{name}: {:?}, exact with 1 thread: {:?}", other.0, outcomes[0].0));
            }
        }
        match &outcomes[0].0 {
            Ok(()) => count.succeeded += 1,
            Err(DeviceError::Unsupported(_)) => count.unsupported += 1,
            Err(_) => count.invalid_data += 1,
        }
        if outcomes[0].0.is_ok() {
            for pair in [[0, 1], [2, 3]] {
                if outcomes[pair[0]].1 != outcomes[pair[1]].1 {
                    wrong(&format!("{}: the result differs from that with 1 thread", self.devices[pair[1]].0));
                }
            }
            if let ([_], true) = (graph.nodes(), memory.plausible) {
                check_accuracy(graph, &outcomes[0].1, &outcomes[2].1, wrong);
                check_accuracy(graph, &outcomes[0].1, &outcomes[GPU].1, wrong);
            }
        }
    }
}

/// Compares the results of vector kernels with those of the exact ones, if the destination has enough f32 values.
fn check_accuracy(graph: &Graph, exact: &[Vec<u8>], fast: &[Vec<u8>], wrong: &dyn Fn(&str)) {
    if let Some(nmse) = nmse_if_comparable(graph, 0, 0.0, [exact, fast])
        && nmse > 1e-2
    {
        wrong(&format!("the NMSE of the fast kernels is {nmse}, expected at most 0.01"));
    }
}

/// The NMSE of the results of node `index`, if its destination has enough f32 values, and those of `exact` are finite and have at least
/// the mean square `least`.
pub(crate) fn nmse_if_comparable(
    graph: &Graph,
    index: usize,
    least: f64,
    [exact, other]: [&[Vec<u8>]; 2],
) -> Option<f64> {
    let dst = graph.tensor(graph.nodes()[index].dst).expect("a destination");
    if dst.desc.dtype() != DType::F32 || dst.desc.elements() < 64 {
        return None;
    }
    let (mut error, mut power) = (0.0, 0.0);
    each_block(dst, |slot, at| {
        let value = |m: &[Vec<u8>]| f64::from(f32::from_le_bytes(std::array::from_fn(|k| m[slot][at + k])));
        let (x, y) = (value(exact), value(other));
        error += (x - y) * (x - y);
        power += x * x;
    });
    let comparable = power.is_finite() && power >= least * dst.desc.elements() as f64;
    comparable.then(|| if error > 0.0 { error / power } else { 0.0 })
}

/// Upper bound of the multiplications of a graph.
pub(crate) fn count_multiplications(graph: &Graph) -> usize {
    let of = |id| graph.tensor(id).map_or(0, |t| t.desc.elements());
    let nodes = graph.nodes().iter().map(|node| match node.op.code() {
        OpCode::MulMat | OpCode::MulMatId | OpCode::FlashAttnExt | OpCode::OutProd => {
            let rows = node
                .srcs
                .iter()
                .flatten()
                .map(|&id| graph.tensor(id).map_or(0, |t| t.desc.ne()[0].max(t.desc.ne()[1])));
            of(node.dst).saturating_mul(rows.max().unwrap_or(1))
        }
        // Each element of the destination or of a gradient is at most a sum over a kernel, a window or a whole plane.
        OpCode::Conv2d | OpCode::Conv3d | OpCode::Conv2dDw | OpCode::ConvTranspose1d | OpCode::ConvTranspose2d => {
            of(node.dst).saturating_mul(node.srcs[0].map_or(1, of))
        }
        OpCode::Pool1d | OpCode::Pool2d | OpCode::Pool2dBack | OpCode::Upscale => {
            let sources = node.srcs.iter().flatten();
            let planes = sources.map(|&id| graph.tensor(id).map_or(1, |t| t.desc.ne()[0] * t.desc.ne()[1]));
            let outputs = of(node.dst).max(node.srcs[0].map_or(0, of));
            outputs.saturating_mul(planes.max().unwrap_or(1).min(MAX_WINDOW))
        }
        _ => of(node.dst),
    });
    nodes.sum()
}

/// Checks independently what validation guarantees: a node writes no byte of its destination twice, and no source shares bytes
/// with the destination, unless the op allows it and both have the same blocks.
fn check_no_overlap(graph: &Graph, wrong: &dyn Fn(&str)) {
    for node in graph.nodes() {
        let dst = graph.tensor(node.dst).expect("a destination");
        let size = dst.desc.dtype().block_bytes();
        let mut written: Vec<_> = graph.slot_sizes().iter().map(|&n| vec![false; n]).collect();
        let mut blocks = Vec::new();
        each_block(dst, |slot, at| {
            for byte in &mut written[slot][at..at + size] {
                if std::mem::replace(byte, true) {
                    wrong(&format!("{}: the destination overlaps itself", node.op.code()));
                }
            }
            blocks.push((slot, at));
        });
        for (index, id) in node.srcs.iter().enumerate() {
            let Some(src) = id.and_then(|id| graph.tensor(id)) else { continue };
            if node.op.updates(index) {
                each_block(src, |slot, at| {
                    for byte in &mut written[slot][at..at + src.desc.dtype().block_bytes()] {
                        if std::mem::replace(byte, true) {
                            wrong(&format!(
                                "{}: source {index} shares bytes with what the node writes",
                                node.op.code()
                            ));
                        }
                    }
                });
                continue;
            }
            let (mut shared, mut others) = (false, Vec::new());
            each_block(src, |slot, at| {
                shared |= written[slot][at..at + src.desc.dtype().block_bytes()].contains(&true);
                others.push((slot, at));
            });
            let same = src.desc.dtype() == dst.desc.dtype() && blocks == others;
            let allowed = node.op.writes_onto(index) || (node.op.in_place(index) && same);
            if shared && !allowed {
                wrong(&format!("{}: source {index} shares bytes with the destination", node.op.code()));
            }
        }
    }
}

/// Runs a graph on a device. Returns the outcome, and the contents of the buffers afterwards, also after a failure.
pub(crate) fn run(
    device: &Arc<dyn Device>,
    graph: &Arc<Graph>,
    memory: &CaseMemory,
) -> (Result<(), DeviceError>, Vec<Vec<u8>>) {
    let budget = MemoryBudget::new(64 << 20);
    let deadline = Some(Instant::now() + WATCHDOG);
    let buffers: Vec<_> =
        memory.before.iter().map(|b| device.alloc(b.len() as u64, &budget).expect("memory")).collect();
    let mut first = device.queue(&budget).expect("a queue");
    for (buffer, bytes) in buffers.iter().zip(&memory.before) {
        first.upload(buffer.whole(), None, UploadSource::Borrowed(bytes)).expect("an upload");
    }
    first.mark().wait(deadline).expect("uploads");
    let bindings: Vec<_> = buffers.iter().map(|b| b.whole()).collect();
    let outcome = device.prepare(Arc::clone(graph)).and_then(|program| {
        first.run(&program, &Arc::from(bindings))?;
        first.mark().wait(deadline)
    });
    // A failed queue cannot be used any more, and a lost device has no other.
    let second = if outcome.is_ok() { Ok(first) } else { device.queue(&budget) };
    let Ok(mut second) = second else { return (outcome.map_err(|e| e.root().clone()), memory.before.clone()) };
    let after = buffers.iter().map(|buffer| {
        let read = second.download(buffer.whole()).expect("a download");
        read.wait(deadline).expect("the memory's bytes")
    });
    let after = after.collect();
    (outcome.map_err(|e| e.root().clone()), after)
}
