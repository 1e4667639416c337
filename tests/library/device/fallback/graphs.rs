//! Random graphs, partitioned at random nodes: they compute the same as on the CPU alone, and change no other byte.

use super::super::{MEMORY, test_deadline};
use super::pair;
use fanout::device::{Device, MemoryBudget, UploadSource};
use fanout::graph::validate::{OpSet, UntrustedTensor, import_untrusted};
use fanout::graph::{Graph, SlotOffset};
use fanout::ops::binary::Binary;
use fanout::ops::norm::Norm;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::ops::{Op, OpCode};
use fanout::tensor::DType;
use fanout_testing::recording_device::RecordingDevice;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of each slot.
const SLOT: usize = 2048;

/// A location for 8 rows of 8 floats.
#[derive(Clone, Copy, PartialEq, Debug)]
struct TensorArea {
    slot: u32,
    offset: usize,
    /// In bytes.
    row_stride: usize,
}

impl TensorArea {
    /// In each slot: the two column halves of a matrix with padded rows; contiguous rows, which overlap with each other and are
    /// not all aligned; and a matrix over the same halves.
    fn all() -> Vec<TensorArea> {
        let of = |slot| {
            [(0, 80), (32, 80), (640, 32), (900, 32), (1028, 32), (1344, 32), (1600, 32)]
                .map(|(offset, row_stride)| TensorArea { slot, offset, row_stride })
        };
        [of(0), of(1)].concat()
    }

    fn span(self) -> Range<usize> {
        self.offset..self.offset + 7 * self.row_stride + 32
    }

    fn overlaps(self, other: TensorArea) -> bool {
        let (a, b) = (self.span(), other.span());
        self.slot == other.slot && a.start < b.end && b.start < a.end
    }

    /// The byte ranges of its elements.
    fn bytes(self) -> impl Iterator<Item = usize> {
        (0..8).flat_map(move |row| (0..32).map(move |i| self.offset + row * self.row_stride + i))
    }
}

/// A graph under construction.
struct RandomGraph {
    records: Vec<UntrustedTensor>,
    /// Area of each record, and whether a node writes it.
    areas: Vec<Option<(TensorArea, bool)>>,
    listed: Vec<u64>,
}

impl RandomGraph {
    fn record(&mut self, op: Option<&Op>, area: TensorArea, srcs: &[u64]) -> u64 {
        let id = self.records.len() as u64 + 1;
        let mut all = [0; 10];
        all[..srcs.len()].copy_from_slice(srcs);
        let row_stride = area.row_stride as u32;
        self.records.push(UntrustedTensor {
            id,
            dtype: DType::F32 as u32,
            ne: [8, 8, 1, 1],
            nb: [4, row_stride, 8 * row_stride, 8 * row_stride],
            op: op.map_or(OpCode::None, |op| op.code()) as u32,
            params: op.map_or([0; 16], |op| op.encode().0),
            flags: 16,
            srcs: all,
            use_count: 0,
            place: Some(SlotOffset { slot: area.slot, offset: area.offset }),
        });
        self.areas.push(Some((area, op.is_some())));
        id
    }

    /// The tensor to read in an area: the last tensor written there if it had the same area, else a new leaf.
    fn tensor_to_read(&mut self, area: TensorArea) -> u64 {
        let last = self.areas.iter().rposition(|a| a.is_some_and(|(a, written)| written && a.overlaps(area)));
        match last.filter(|&last| self.areas[last].is_some_and(|(a, _)| a == area)) {
            Some(last) => last as u64 + 1,
            None => self.record(None, area, &[]),
        }
    }

    fn graph(&self) -> Option<Graph> {
        import_untrusted(&self.listed, &self.records, vec![SLOT; 2], OpSet::Protocol).ok()
    }

    /// Adds a node, unless the graph would become invalid.
    fn node(&mut self, op: &Op, from: &[TensorArea], ids: Option<u64>, dst: TensorArea) {
        let before = (self.records.len(), self.listed.len());
        let mut srcs: Vec<u64> = from.iter().map(|&area| self.tensor_to_read(area)).collect();
        if let Some(ids) = ids {
            srcs.push(ids);
            srcs.push(self.tensor_to_read(dst));
        }
        let id = self.record(Some(op), dst, &srcs);
        self.listed.push(id);
        if self.graph().is_none() {
            self.records.truncate(before.0);
            self.areas.truncate(before.0);
            self.listed.truncate(before.1);
        }
    }

    /// Sets the use counts of some results. A device need not store a result whose readers are all known, so its bytes are not
    /// compared. Returns which bytes of the slots are.
    fn set_use_counts(&mut self, rng: &mut fastrand::Rng) -> [Vec<bool>; 2] {
        let mut compared = [vec![true; SLOT], vec![true; SLOT]];
        for &node in &self.listed {
            let at = node as usize - 1;
            let Some((area, _)) = self.areas[at] else { continue };
            let later = self.records[at + 1..].iter().zip(&self.areas[at + 1..]);
            let reads = self.records.iter().flat_map(|r| r.srcs).filter(|&src| src == node).count();
            // The count may be set only if no other tensor accesses the memory and the node writes all of its rows.
            let overlapped = later.filter(|(_, a)| a.is_some_and(|(a, _)| a != area && a.overlaps(area))).count() > 0;
            let written_in_place =
                self.records.iter().any(|r| r.op == OpCode::SetRows as u32 && (r.srcs[2] == node || r.id == node));
            let known = reads > 0 && !overlapped && !written_in_place && rng.bool();
            if known {
                self.records[at].use_count = reads as i32;
            }
            for byte in area.bytes() {
                compared[area.slot as usize][byte] = !known;
            }
        }
        compared
    }
}

fn random(rng: &mut fastrand::Rng) -> RandomGraph {
    let mut random_graph = RandomGraph { records: Vec::new(), areas: Vec::new(), listed: Vec::new() };
    // Row indices: two lists at the end of slot 1.
    for list in 0..2 {
        let id = random_graph.record(None, TensorArea { slot: 1, offset: 1920 + 64 * list, row_stride: 64 }, &[]);
        let record = &mut random_graph.records[id as usize - 1];
        (record.dtype, record.ne, record.nb) = (DType::I64 as u32, [8, 1, 1, 1], [8, 64, 64, 64]);
        random_graph.areas[id as usize - 1] = None;
    }
    let areas = TensorArea::all();
    for _ in 0..rng.usize(1..14) {
        let any = |rng: &mut fastrand::Rng| areas[rng.usize(..areas.len())];
        let (a, b, dst) = (any(rng), any(rng), any(rng));
        match rng.usize(..8) {
            0 | 1 => random_graph.node(&Binary::Add.into(), &[a, b], None, if rng.bool() { dst } else { a }),
            2 => random_graph.node(&Binary::Mul.into(), &[a, b], None, dst),
            3 => random_graph.node(&Binary::Sub.into(), &[a, b], None, dst),
            4 => random_graph.node(
                &Unary::Scale { scale: 0.5, bias: 0.25 }.into(),
                &[a],
                None,
                if rng.bool() { dst } else { a },
            ),
            5 => random_graph.node(&Unary::Clamp { min: -1.5, max: 1.5 }.into(), &[a], None, dst),
            6 => random_graph.node(&Norm::RmsNorm { eps: 1e-5 }.into(), &[a], None, dst),
            _ => random_graph.node(&Rows::SetRows.into(), &[a], Some(rng.u64(1..3)), dst),
        }
    }
    random_graph
}

/// The contents of both slots after a run.
fn run_on(device: &dyn Device, graph: &Arc<Graph>, memory: &[Vec<u8>; 2]) -> [Vec<u8>; 2] {
    let budget = MemoryBudget::new(MEMORY);
    let program = device.prepare(Arc::clone(graph)).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    let buffers = [0, 1].map(|_| device.alloc(SLOT as u64, &budget).unwrap());
    for (buffer, bytes) in buffers.iter().zip(memory) {
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(bytes)).unwrap();
    }
    let bindings = buffers.each_ref().map(|buffer| buffer.whole());
    queue.run(&program, &Arc::from(bindings)).unwrap();
    buffers.map(|buffer| queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap())
}

fn memory(rng: &mut fastrand::Rng) -> [Vec<u8>; 2] {
    let mut slots =
        [0, 1].map(|_| (0..SLOT / 4).flat_map(|_| (rng.f32() * 4.0 - 2.0).to_le_bytes()).collect::<Vec<u8>>());
    for list in 0..2 {
        for i in 0..8 {
            let at = 1920 + 64 * list + 8 * i;
            slots[1][at..at + 8].copy_from_slice(&rng.i64(0..8).to_le_bytes());
        }
    }
    slots
}

#[test]
fn partitioned_graphs_compute_the_same_as_the_cpu_alone() {
    let ops = [OpCode::Add, OpCode::Mul, OpCode::Sub, OpCode::Scale, OpCode::Clamp, OpCode::RmsNorm, OpCode::SetRows];
    let alone = RecordingDevice::new("GPU", MEMORY, &[]);
    let (mut nodes, mut away, mut left_out) = (0, 0, 0);
    for seed in 0..150 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut random_graph = random(&mut rng);
        let compared =
            if seed % 2 == 0 { [0, 1].map(|_| vec![true; SLOT]) } else { random_graph.set_use_counts(&mut rng) };
        let Some(graph) = random_graph.graph().filter(|graph| !graph.nodes().is_empty()) else { continue };
        let (graph, memory) = (Arc::new(graph), memory(&mut rng));
        let want = run_on(&*alone, &graph, &memory);
        // Refused ops: all, none, that of the first node, that of the last node, and random sets.
        let op = |at: usize| graph.nodes()[at].op.code();
        let any = |rng: &mut fastrand::Rng| ops.into_iter().filter(|_| rng.bool()).collect::<Vec<_>>();
        let last = graph.nodes().len() - 1;
        for refused in [ops.to_vec(), vec![], vec![op(0)], vec![op(last)], any(&mut rng), any(&mut rng)] {
            let pair = pair(&refused);
            let got = run_on(&*pair.device, &graph, &memory);
            for (slot, (got, want)) in got.iter().zip(&want).enumerate() {
                let differs = (0..SLOT).find(|&i| got[i] != want[i] && compared[slot][i]);
                assert_eq!(differs, None, "seed {seed}, {refused:?} refused, slot {slot}: {graph:#?}");
            }
            let ran: u64 = pair.device.secondary_counts().iter().map(|&(_, n)| n).sum();
            let refusals = graph.nodes().iter().filter(|node| refused.contains(&node.op.code())).count();
            assert_eq!(ran, refusals as u64, "seed {seed}");
            (nodes, away) = (nodes + graph.nodes().len(), away + refusals);
        }
        left_out += compared.iter().flatten().filter(|&&compared| !compared).count();
    }
    assert!(
        nodes > 4000 && away > 1500 && left_out > 5000,
        "only {nodes} nodes, {away} on the secondary device, {left_out} bytes not compared"
    );
}
