//! Graphs cut anywhere compute what the CPU alone computes, and leave every other byte as it is.

use super::super::{MEMORY, soon};
use super::pair;
use fanout::device::{Account, Device, Source};
use fanout::graph::validate::{UntrustedTensor, import_untrusted};
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

/// A place for 8 rows of 8 floats.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Area {
    slot: u32,
    offset: usize,
    /// From row to row.
    step: usize,
}

impl Area {
    /// Two halves of the columns of a matrix with padded rows, packed rows (which overlap, and not all at multiples of
    /// the alignment) and a matrix of the same halves, in each of the slots.
    fn all() -> Vec<Area> {
        let of =
            |slot| {
                [(0, 80), (32, 80), (640, 32), (900, 32), (1028, 32), (1344, 32), (1600, 32)]
                    .map(|(offset, step)| Area { slot, offset, step })
            };
        [of(0), of(1)].concat()
    }

    fn span(self) -> Range<usize> {
        self.offset..self.offset + 7 * self.step + 32
    }

    fn meets(self, other: Area) -> bool {
        let (a, b) = (self.span(), other.span());
        self.slot == other.slot && a.start < b.end && b.start < a.end
    }

    /// Its elements' bytes.
    fn bytes(self) -> impl Iterator<Item = usize> {
        (0..8).flat_map(move |row| (0..32).map(move |i| self.offset + row * self.step + i))
    }
}

/// A graph in the making.
struct Making {
    records: Vec<UntrustedTensor>,
    /// Area of each record, and whether a node writes it.
    areas: Vec<Option<(Area, bool)>>,
    listed: Vec<u64>,
}

impl Making {
    fn record(&mut self, op: Option<&Op>, area: Area, srcs: &[u64]) -> u64 {
        let id = self.records.len() as u64 + 1;
        let mut all = [0; 10];
        all[..srcs.len()].copy_from_slice(srcs);
        let step = area.step as u32;
        self.records.push(UntrustedTensor {
            id,
            dtype: DType::F32 as u32,
            ne: [8, 8, 1, 1],
            nb: [4, step, 8 * step, 8 * step],
            op: op.map_or(OpCode::None, Op::code) as u32,
            params: op.map_or([0; 16], |op| op.encode().0),
            flags: 16,
            srcs: all,
            use_count: 0,
            place: Some(SlotOffset { slot: area.slot, offset: area.offset }),
        });
        self.areas.push(Some((area, op.is_some())));
        id
    }

    /// The tensor to read in an area: what was written there last, if it was that very area; else a new leaf.
    fn reading(&mut self, area: Area) -> u64 {
        let last = self.areas.iter().rposition(|a| a.is_some_and(|(a, written)| written && a.meets(area)));
        match last.filter(|&last| self.areas[last].is_some_and(|(a, _)| a == area)) {
            Some(last) => last as u64 + 1,
            None => self.record(None, area, &[]),
        }
    }

    fn graph(&self) -> Option<Graph> {
        import_untrusted(&self.listed, &self.records, vec![SLOT; 2]).ok()
    }

    /// Adds a node, unless the graph is none then.
    fn node(&mut self, op: &Op, from: &[Area], ids: Option<u64>, dst: Area) {
        let before = (self.records.len(), self.listed.len());
        let mut srcs: Vec<u64> = from.iter().map(|&area| self.reading(area)).collect();
        if let Some(ids) = ids {
            srcs.push(ids);
            srcs.push(self.reading(dst));
        }
        let id = self.record(Some(op), dst, &srcs);
        self.listed.push(id);
        if self.graph().is_none() {
            self.records.truncate(before.0);
            self.areas.truncate(before.0);
            self.listed.truncate(before.1);
        }
    }

    /// Tells of some results how often they are read; which bytes of the slots then matter.
    fn tell_uses(&mut self, rng: &mut fastrand::Rng) -> [Vec<bool>; 2] {
        let mut matter = [vec![true; SLOT], vec![true; SLOT]];
        for &node in &self.listed {
            let at = node as usize - 1;
            let Some((area, _)) = self.areas[at] else { continue };
            let later = self.records[at + 1..].iter().zip(&self.areas[at + 1..]);
            let reads = self.records.iter().flat_map(|r| r.srcs).filter(|&src| src == node).count();
            // Nobody looks at its memory in another way, also not at rows that it leaves as they are.
            let aside = later.filter(|(_, a)| a.is_some_and(|(a, _)| a != area && a.meets(area))).count() > 0;
            let onto =
                self.records.iter().any(|r| r.op == OpCode::SetRows as u32 && (r.srcs[2] == node || r.id == node));
            let known = reads > 0 && !aside && !onto && rng.bool();
            if known {
                self.records[at].use_count = reads as i32;
            }
            for byte in area.bytes() {
                matter[area.slot as usize][byte] = !known;
            }
        }
        matter
    }
}

fn random(rng: &mut fastrand::Rng) -> Making {
    let mut making = Making { records: Vec::new(), areas: Vec::new(), listed: Vec::new() };
    // Row numbers: two lists behind everything else in slot 1.
    for list in 0..2 {
        let id = making.record(None, Area { slot: 1, offset: 1920 + 64 * list, step: 64 }, &[]);
        let record = &mut making.records[id as usize - 1];
        (record.dtype, record.ne, record.nb) = (DType::I64 as u32, [8, 1, 1, 1], [8, 64, 64, 64]);
        making.areas[id as usize - 1] = None;
    }
    let areas = Area::all();
    for _ in 0..rng.usize(1..14) {
        let any = |rng: &mut fastrand::Rng| areas[rng.usize(..areas.len())];
        let (a, b, dst) = (any(rng), any(rng), any(rng));
        match rng.usize(..8) {
            0 | 1 => making.node(&Binary::Add.into(), &[a, b], None, if rng.bool() { dst } else { a }),
            2 => making.node(&Binary::Mul.into(), &[a, b], None, dst),
            3 => making.node(&Binary::Sub.into(), &[a, b], None, dst),
            4 => making.node(
                &Unary::Scale { scale: 0.5, bias: 0.25 }.into(),
                &[a],
                None,
                if rng.bool() { dst } else { a },
            ),
            5 => making.node(&Unary::Clamp { min: -1.5, max: 1.5 }.into(), &[a], None, dst),
            6 => making.node(&Norm::RmsNorm { eps: 1e-5 }.into(), &[a], None, dst),
            _ => making.node(&Rows::SetRows.into(), &[a], Some(rng.u64(1..3)), dst),
        }
    }
    making
}

/// Both slots after a run.
fn outcome(device: &dyn Device, graph: &Arc<Graph>, memory: &[Vec<u8>; 2]) -> [Vec<u8>; 2] {
    let account = Account::new(MEMORY);
    let program = device.prepare(Arc::clone(graph)).unwrap();
    let mut queue = device.queue(&account).unwrap();
    let buffers = [0, 1].map(|_| device.alloc(SLOT as u64, &account).unwrap());
    for (buffer, bytes) in buffers.iter().zip(memory) {
        queue.upload(buffer.whole(), None, Source::Borrowed(bytes)).unwrap();
    }
    let bindings = buffers.each_ref().map(|buffer| buffer.whole());
    queue.run(&program, &Arc::from(bindings)).unwrap();
    buffers.map(|buffer| queue.download(buffer.whole()).unwrap().wait(soon()).unwrap())
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
fn as_the_cpu_alone() {
    let ops = [OpCode::Add, OpCode::Mul, OpCode::Sub, OpCode::Scale, OpCode::Clamp, OpCode::RmsNorm, OpCode::SetRows];
    let alone = RecordingDevice::new("GPU", MEMORY, &[]);
    let (mut nodes, mut away, mut left_out) = (0, 0, 0);
    for seed in 0..150 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut making = random(&mut rng);
        let matter = if seed % 2 == 0 { [0, 1].map(|_| vec![true; SLOT]) } else { making.tell_uses(&mut rng) };
        let Some(graph) = making.graph().filter(|graph| !graph.nodes().is_empty()) else { continue };
        let (graph, memory) = (Arc::new(graph), memory(&mut rng));
        let want = outcome(&*alone, &graph, &memory);
        // All, none, the first node's, the last one's, and any.
        let op = |at: usize| graph.nodes()[at].op.code();
        let any = |rng: &mut fastrand::Rng| ops.into_iter().filter(|_| rng.bool()).collect::<Vec<_>>();
        let last = graph.nodes().len() - 1;
        for refused in [ops.to_vec(), vec![], vec![op(0)], vec![op(last)], any(&mut rng), any(&mut rng)] {
            let pair = pair(&refused);
            let got = outcome(&*pair.device, &graph, &memory);
            for (slot, (got, want)) in got.iter().zip(&want).enumerate() {
                let differs = (0..SLOT).find(|&i| got[i] != want[i] && matter[slot][i]);
                assert_eq!(differs, None, "seed {seed}, {refused:?} refused, slot {slot}: {graph:#?}");
            }
            let ran: u64 = pair.device.counts().iter().map(|&(_, n)| n).sum();
            let refusals = graph.nodes().iter().filter(|node| refused.contains(&node.op.code())).count();
            assert_eq!(ran, refusals as u64, "seed {seed}");
            (nodes, away) = (nodes + graph.nodes().len(), away + refusals);
        }
        left_out += matter.iter().flatten().filter(|&&matters| !matters).count();
    }
    assert!(nodes > 4000 && away > 1500 && left_out > 5000, "{nodes} nodes, {away} away, {left_out} bytes left out");
}
