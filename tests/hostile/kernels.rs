//! Graphs of all ops from a seed, mutated: what passes validation must run, and touch nothing but its destinations.
//!
//! `HOSTILE_CASES=100000 HOSTILE_SEED=7 cargo test --release --test hostile` tries more of them.

use crate::maker::{Maker, SLOTS, Script};
use crate::mutate::mutate;
use crate::setting;
use fanout::cpu::{CpuDevice, Path};
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Account, Device, DeviceError, Source};
use fanout::fallback::Fallback;
use fanout::graph::validate::import_untrusted;
use fanout::graph::{Graph, Tensor};
use fanout::ops::OpCode;
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longer than any case takes; one that takes longer hangs.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Multiplications that a case may ask for: mutated shapes can make products that merely take long.
const MOST_WORK: usize = 1 << 24;

/// What became of an op's cases.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Refused by validation.
    refused: usize,
    /// Refused by the device.
    unsupported: usize,
    /// Ended by their own data: an index out of range.
    data: usize,
    ran: usize,
}

fn ops() -> Vec<OpCode> {
    OpCode::ALL.iter().copied().filter(|op| op.stem().is_some_and(|stem| stem != "view")).collect()
}

#[test]
fn every_op_has_a_draft() {
    let (ops, mut rng) = (ops(), Rng::with_seed(1));
    for &op in &ops {
        let script = Maker::script(&mut rng, op, &ops);
        assert_eq!(script.records.last().map(|record| record.op), Some(op.to_wire()));
    }
}

#[test]
fn graphs_that_pass_the_door_run_and_touch_nothing_else() {
    let (cases, seed) = (setting("HOSTILE_CASES", 2_000), setting("HOSTILE_SEED", 1));
    let (ops, bench) = (ops(), Bench::new());
    let mut counts: BTreeMap<OpCode, Count> = BTreeMap::new();
    for case in 0..cases {
        // Each case has a seed of its own, so that one can be repeated alone.
        let seed = seed << 32 | case;
        let mut rng = Rng::with_seed(seed);
        let op = ops[case as usize % ops.len()];
        let mut script = Maker::script(&mut rng, op, &ops);
        for _ in 0..[0, 0, 0, 1, 1, 2, 3][rng.usize(..7)] {
            mutate(&mut script, &mut rng);
        }
        let count = counts.entry(op).or_default();
        let graph = match import_untrusted(&script.listed, &script.records, vec![script.size; SLOTS]) {
            Ok(graph) => Arc::new(graph),
            Err(e) => {
                assert!(!e.to_string().is_empty());
                count.refused += 1;
                continue;
            }
        };
        let memory = Memory::new(&graph, &script, &mut rng);
        bench.judge(&graph, &memory, count, &|why| panic!("seed {seed:#x}: {why}\n{script}"));
    }
    if std::env::var_os("HOSTILE_REPORT").is_some() {
        for (op, count) in &counts {
            println!("{op:16} {count:?}");
        }
    }
    for op in ops {
        let count = counts[&op];
        let wanted = cases as usize * 40 / 12_000;
        assert!(count.ran >= wanted && count.refused >= wanted, "{op}: a one-sided test: {count:?}");
    }
}

/// The devices that every case runs on.
struct Bench {
    devices: Vec<(&'static str, Arc<dyn Device>)>,
}

/// The position of the emulated GPU, which reports every access that it should not make as a failure of the device.
const GPU: usize = 4;

/// What the buffers hold before a run, and which bytes a run may change.
struct Memory {
    before: Vec<Vec<u8>>,
    writable: Vec<Vec<bool>>,
    /// Whether sources hold numbers of a sane size.
    sane: bool,
}

impl Memory {
    fn new(graph: &Graph, script: &Script, rng: &mut Rng) -> Memory {
        let (mut before, mut writable) = (vec![vec![0; script.size]; SLOTS], vec![vec![false; script.size]; SLOTS]);
        before.iter_mut().for_each(|bytes| rng.fill(bytes));
        let sane = rng.bool();
        if sane {
            for tensor in graph.tensors() {
                fill_sane(&mut before, tensor, rng);
            }
        }
        for &(record, bound) in &script.indices {
            // Mutated records are as good as any: what is in range for one of them need not be for another.
            let record = &script.records[record];
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
            let dst = graph.tensor(node.dst).expect("a destination");
            each_block(dst, |slot, at| writable[slot][at..at + dst.desc.dtype().block_bytes()].fill(true));
        }
        Memory { before, writable, sane }
    }

    /// Slot and offset of a byte that has changed and should not have.
    fn trespass(&self, after: &[Vec<u8>]) -> Option<(usize, usize)> {
        const PIECE: usize = 1024;
        for (slot, (before, after)) in self.before.iter().zip(after).enumerate() {
            for (piece, (was, is)) in before.chunks(PIECE).zip(after.chunks(PIECE)).enumerate() {
                // Most pieces are equal, and that is quickly seen.
                let changed = || (0..was.len()).find(|&k| was[k] != is[k] && !self.writable[slot][piece * PIECE + k]);
                if was != is
                    && let Some(k) = changed()
                {
                    return Some((slot, piece * PIECE + k));
                }
            }
        }
        None
    }
}

/// Values around 0 where the type has a quantiser; small integers; else whatever is there.
fn fill_sane(memory: &mut [Vec<u8>], tensor: &Tensor, rng: &mut Rng) {
    let dtype = tensor.desc.dtype();
    let mut values = vec![0.0; dtype.block_len()];
    let quantise = quantiser(dtype).filter(|_| !matches!(dtype, DType::I32 | DType::I64));
    let Some(quantise) = quantise else { return };
    each_block(tensor, |slot, at| {
        values.fill_with(|| rng.f32() * 2.0 - 1.0);
        quantise(&values, &mut memory[slot][at..at + dtype.block_bytes()]);
    });
}

/// Slot and first byte of every block of a placed tensor.
fn each_block(tensor: &Tensor, mut each: impl FnMut(usize, usize)) {
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

impl Bench {
    fn new() -> Bench {
        let device =
            |threads, path| CpuDevice::new("CPU", threads, path, 64 << 20).expect("a device") as Arc<dyn Device>;
        cudaemu::test::load().expect("the emulator is built with the tests");
        let gpu = CudaDevice::new("CUDA0", &cuda::detect().expect("a GPU")[0], 64 << 20).expect("a device");
        Bench {
            devices: vec![
                ("exact, 1 thread", device(1, Path::Exact)),
                ("exact, 3 threads", device(3, Path::Exact)),
                ("fast, 1 thread", device(1, Path::Fast)),
                ("fast, 3 threads", device(3, Path::Fast)),
                ("CUDA, with the CPU for the rest", Fallback::new(gpu, device(1, Path::Exact))),
            ],
        }
    }

    /// Runs a graph everywhere and compares what must be equal.
    fn judge(&self, graph: &Arc<Graph>, memory: &Memory, count: &mut Count, wrong: &dyn Fn(&str)) {
        if work(graph) > MOST_WORK {
            return;
        }
        disjoint(graph, wrong);
        let mut outcomes = Vec::new();
        for (name, device) in &self.devices {
            let (outcome, after) = run(device, graph, memory);
            match &outcome {
                Ok(())
                | Err(DeviceError::Data { .. } | DeviceError::Unsupported(_) | DeviceError::OutOfMemory { .. }) => {}
                Err(e) => wrong(&format!("{name}: {e}")),
            }
            if let Some((slot, at)) = memory.trespass(&after) {
                wrong(&format!("{name}: byte {at} of slot {slot} is no destination's and has changed"));
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
            Ok(()) => count.ran += 1,
            Err(DeviceError::Unsupported(_)) => count.unsupported += 1,
            Err(_) => count.data += 1,
        }
        if outcomes[0].0.is_ok() {
            for pair in [[0, 1], [2, 3]] {
                if outcomes[pair[0]].1 != outcomes[pair[1]].1 {
                    wrong(&format!("{}: other bytes than with 1 thread", self.devices[pair[1]].0));
                }
            }
            if let ([_], true) = (graph.nodes(), memory.sane) {
                agree(graph, &outcomes[0].1, &outcomes[2].1, wrong);
                agree(graph, &outcomes[0].1, &outcomes[GPU].1, wrong);
            }
        }
    }
}

/// An error without the name of the device that had it.
fn bare(e: DeviceError) -> DeviceError {
    if let DeviceError::On { source, .. } = e { bare(*source) } else { e }
}

/// That vector kernels compute what the exact ones do, where a destination's values are enough to tell.
fn agree(graph: &Graph, exact: &[Vec<u8>], fast: &[Vec<u8>], wrong: &dyn Fn(&str)) {
    let dst = graph.tensor(graph.nodes()[0].dst).expect("a destination");
    if dst.desc.dtype() != DType::F32 || dst.desc.elements() < 64 {
        return;
    }
    let (mut error, mut power) = (0.0, 0.0);
    each_block(dst, |slot, at| {
        let value = |m: &[Vec<u8>]| f64::from(f32::from_le_bytes(std::array::from_fn(|k| m[slot][at + k])));
        let (x, y) = (value(exact), value(fast));
        error += (x - y) * (x - y);
        power += x * x;
    });
    if power.is_finite() && error > 1e-2 * power {
        wrong(&format!("fast kernels are off by an NMSE of {}", error / power));
    }
}

/// An upper bound on multiplications.
fn work(graph: &Graph) -> usize {
    let of = |id| graph.tensor(id).map_or(0, |t| t.desc.elements());
    let nodes = graph.nodes().iter().map(|node| match node.op.code() {
        OpCode::MulMat | OpCode::MulMatId | OpCode::FlashAttnExt => {
            let rows = node
                .srcs
                .iter()
                .flatten()
                .map(|&id| graph.tensor(id).map_or(0, |t| t.desc.ne()[0].max(t.desc.ne()[1])));
            of(node.dst).saturating_mul(rows.max().unwrap_or(1))
        }
        _ => of(node.dst),
    });
    nodes.sum()
}

/// An independent proof of what validation promises: no byte of a destination is written twice by one node, and a
/// source shares none with it, unless it is the same tensor, block for block.
fn disjoint(graph: &Graph, wrong: &dyn Fn(&str)) {
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

/// Runs a graph on a device; what its memory holds then, however it ended.
fn run(device: &Arc<dyn Device>, graph: &Arc<Graph>, memory: &Memory) -> (Result<(), DeviceError>, Vec<Vec<u8>>) {
    let account = Account::new(64 << 20);
    let deadline = Some(Instant::now() + WATCHDOG);
    let buffers: Vec<_> =
        memory.before.iter().map(|b| device.alloc(b.len() as u64, &account).expect("memory")).collect();
    let queue = || device.queue(&account).expect("a queue");
    let mut first = queue();
    for (buffer, bytes) in buffers.iter().zip(&memory.before) {
        first.upload(buffer.whole(), None, Source::Borrowed(bytes)).expect("an upload");
    }
    first.mark().wait(deadline).expect("uploads");
    let bindings: Vec<_> = buffers.iter().map(|b| b.whole()).collect();
    let outcome = device.prepare(Arc::clone(graph)).and_then(|program| {
        first.run(&program, &Arc::from(bindings))?;
        first.mark().wait(deadline)
    });
    // A failure ends the queue that it happened on.
    let mut second = if outcome.is_ok() { first } else { queue() };
    let after = buffers.iter().map(|buffer| {
        let ticket = second.download(buffer.whole()).expect("a download");
        ticket.wait(deadline).expect("the memory's bytes")
    });
    let after = after.collect();
    (outcome.map_err(bare), after)
}
