//! Plausible nodes for every op, as a peer would send them: most of them are valid, and all kinds of valid.

mod drafts;

use fanout::graph::SlotOffset;
use fanout::graph::validate::UntrustedTensor;
use fanout::ops::OpCode;
use fanout::tensor::{Capability, DType, TensorDesc};
use fastrand::Rng;

use DType::{BF16, F16, F32, I32, I64};

/// Bytes of each buffer of a large case, whose nodes are large enough to be shared by workers, and of the others. Whole
/// pages, so that what is read past the end of one may fault.
const LARGE: usize = 256 << 10;
const SMALL: usize = 64 << 10;

/// Buffers of a case.
pub(crate) const SLOTS: usize = 2;

const FLAG_COMPUTE: i32 = 16;

/// A peer's graph.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// Bytes of each slot.
    pub(crate) size: usize,
    pub(crate) listed: Vec<u64>,
    pub(crate) records: Vec<UntrustedTensor>,
    /// Records that hold indices, and how many things there are to index.
    pub(crate) indices: Vec<(usize, usize)>,
}

impl std::fmt::Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "nodes {:?}", self.listed)?;
        for t in &self.records {
            let (op, dtype) = (OpCode::from_wire(t.op), DType::from_wire(t.dtype));
            writeln!(f, "{} {op:?} {dtype:?} {:?}/{:?} {:?} {:?} {:?}", t.id, t.ne, t.nb, t.srcs, t.place, t.params)?;
        }
        Ok(())
    }
}

pub(crate) struct Maker<'r> {
    pub(crate) rng: &'r mut Rng,
    script: Script,
    /// The first free byte of each slot.
    free: [usize; SLOTS],
}

/// A node in the making: the destination and what it reads.
struct Draft {
    dtype: DType,
    ne: [usize; 4],
    srcs: Vec<Option<usize>>,
    params: [i32; 16],
    /// The source that names the destination's own memory.
    onto: Option<usize>,
    packed: bool,
}

impl Draft {
    fn new(dtype: DType, ne: [usize; 4], srcs: &[usize]) -> Draft {
        let srcs = srcs.iter().map(|&s| Some(s)).collect();
        Draft { dtype, ne, srcs, params: [0; 16], onto: None, packed: false }
    }
}

impl Maker<'_> {
    /// A graph of one to three nodes, the last of which is `op`.
    pub(crate) fn script(rng: &mut Rng, op: OpCode, others: &[OpCode]) -> Script {
        let size = if rng.u8(..4) == 0 { LARGE } else { SMALL };
        let script = Script { size, listed: Vec::new(), records: Vec::new(), indices: Vec::new() };
        let mut maker = Maker { rng, script, free: [0; SLOTS] };
        for _ in 0..[0, 0, 0, 1, 2][maker.rng.usize(..5)] {
            let other = others[maker.rng.usize(..others.len())];
            maker.node(other);
        }
        maker.node(op);
        maker.script
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.rng.usize(..n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.usize(..of.len())]
    }

    /// A count, mostly small, often odd.
    fn dim(&mut self) -> usize {
        self.pick(&[1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
    }

    /// A row length for these types.
    fn row(&mut self, types: &[DType]) -> usize {
        let block = types.iter().map(|t| t.block_len()).max().unwrap_or(1);
        let n: usize = self
            .pick(&[1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 96, 100, 255, 256, 257, 768, 1024, 1025, 2050, 4100]);
        n.div_ceil(block).min(if block > 1 { 2048 / block } else { n }) * block
    }

    fn shape(&mut self, types: &[DType]) -> [usize; 4] {
        if self.one_in(3)
            && let Some(known) = (0..self.script.records.len()).last()
        {
            let ne = self.script.records[known].ne.map(|n| n as usize);
            if types.iter().all(|t| ne[0].is_multiple_of(t.block_len())) && !ne.contains(&0) {
                return ne;
            }
        }
        let ne = [self.row(types), self.dim(), self.dim(), self.dim()];
        self.shrunk(ne, 3000)
    }

    /// The shape with its outer counts cut until it has at most `most` elements (many more in a large case), if one row
    /// has.
    fn shrunk(&mut self, mut ne: [usize; 4], most: usize) -> [usize; 4] {
        let most = most * self.script.size / SMALL * self.script.size / SMALL;
        while ne.iter().product::<usize>() > most && ne[1..].iter().any(|&n| n > 1) {
            let d = self.rng.usize(1..4);
            ne[d] = (ne[d] / 2).max(1);
        }
        ne
    }

    fn float(&mut self) -> DType {
        self.pick(&[F32, F32, F32, F32, F16, BF16])
    }

    fn any_type(&mut self) -> DType {
        self.pick(DType::ALL)
    }

    /// A type that weights and caches come in.
    fn weight(&mut self) -> DType {
        // The usual ones twice.
        let types: Vec<_> =
            [F32, F16, DType::Q8_0].into_iter().chain(DType::with_capability(Capability::Convert)).collect();
        self.pick(&types)
    }

    fn divisor(&mut self, n: usize) -> usize {
        let all: Vec<_> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
        if self.rng.bool() { n } else { self.pick(&all) }
    }

    /// Byte strides of a tensor: packed, padded, or with its outer dimensions in another order in memory.
    fn strides(&mut self, dtype: DType, ne: [usize; 4], packed: bool, dense_rows: bool) -> [usize; 4] {
        let mut order = [0, 1, 2, 3];
        let kind = if packed { 0 } else { self.rng.usize(..6) };
        match kind {
            3 => self.rng.shuffle(&mut order[1..]),
            4 if !dense_rows => self.rng.shuffle(&mut order),
            _ => {}
        }
        let (mut nb, mut next) = ([0; 4], dtype.block_bytes());
        let counts = [ne[0] / dtype.block_len(), ne[1], ne[2], ne[3]];
        for d in order {
            nb[d] = next;
            next *= counts[d];
            if kind == 5 && (d > 0 || !dense_rows) {
                next += self.pick(&[0, 1, 4, 60]);
            }
        }
        nb
    }

    /// A new tensor, or one that is there already and fits.
    fn tensor(&mut self, dtype: DType, ne: [usize; 4]) -> usize {
        self.layout(dtype, ne, false)
    }

    fn layout(&mut self, dtype: DType, ne: [usize; 4], packed: bool) -> usize {
        let fits = |t: &UntrustedTensor| t.dtype == dtype.to_wire() && t.ne.map(|n| n as usize) == ne;
        if self.rng.bool()
            && let Some(found) = self.script.records.iter().rposition(fits)
        {
            return found;
        }
        let dense_rows = !self.one_in(5);
        let nb = self.strides(dtype, ne, packed, dense_rows);
        let extent = TensorDesc::strided(dtype, ne, nb).map_or(1 << 20, |t| t.extent());
        let place = self.place(extent);
        self.record(dtype, ne, nb, place)
    }

    /// Where `extent` bytes are free, at any alignment; somewhere when they are free nowhere.
    fn place(&mut self, extent: usize) -> SlotOffset {
        let align = self.pick(&[64, 64, 64, 64, 4, 2, 1]);
        let slot = self.rng.usize(..SLOTS);
        if self.one_in(8) && self.free[slot] + extent <= self.script.size {
            // Nothing behind it.
            let offset = self.script.size - extent;
            self.free[slot] = self.script.size;
            return SlotOffset { slot: slot as u32, offset };
        }
        for slot in [slot, (slot + 1) % SLOTS] {
            let offset =
                self.free[slot].next_multiple_of(align) + if align < 64 { self.rng.usize(..2) * align } else { 0 };
            if offset + extent <= self.script.size {
                self.free[slot] = offset + extent;
                return SlotOffset { slot: slot as u32, offset };
            }
        }
        SlotOffset { slot: slot as u32, offset: self.rng.usize(..self.script.size) }
    }

    fn record(&mut self, dtype: DType, ne: [usize; 4], nb: [usize; 4], place: SlotOffset) -> usize {
        let id = self.script.records.len() as u64 + 1;
        self.script.records.push(UntrustedTensor {
            id,
            dtype: dtype.to_wire(),
            ne: ne.map(|n| n as u32),
            nb: nb.map(|n| n as u32),
            op: 0,
            params: [0; 16],
            flags: 0,
            srcs: [0; 10],
            use_count: 0,
            place: Some(place),
        });
        id as usize - 1
    }

    /// Indices of one of `bound` things.
    fn ids(&mut self, dtype: DType, ne: [usize; 4], bound: usize) -> usize {
        let id = self.tensor(dtype, ne);
        self.script.indices.push((id, bound));
        id
    }

    /// A parameter: mostly sane, sometimes anything.
    fn number(&mut self, sane: f32) -> i32 {
        let odd = [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40, -0.0];
        let value = if self.one_in(6) { self.pick(&odd) } else { sane };
        value.to_bits() as i32
    }

    fn node(&mut self, op: OpCode) {
        let draft = self.draft(op);
        let same = |t: &UntrustedTensor| t.dtype == draft.dtype.to_wire() && t.ne.map(|n| n as usize) == draft.ne;
        let fitting: Vec<_> = draft.srcs.iter().flatten().copied().filter(|&s| same(&self.script.records[s])).collect();
        let dst = if let Some(onto) = draft.onto {
            let target = self.script.records[onto].clone();
            self.record(draft.dtype, draft.ne, target.nb.map(|n| n as usize), target.place.unwrap_or_else(nowhere))
        } else if !fitting.is_empty() && self.one_in(3) {
            let source = self.pick(&fitting);
            let target = self.script.records[source].clone();
            self.record(draft.dtype, draft.ne, target.nb.map(|n| n as usize), target.place.unwrap_or_else(nowhere))
        } else {
            let nb =
                self.strides(draft.dtype, draft.ne, draft.packed || self.script.records.len().is_multiple_of(2), true);
            let extent = TensorDesc::strided(draft.dtype, draft.ne, nb).map_or(1 << 20, |t| t.extent());
            let place = self.place(extent);
            self.record(draft.dtype, draft.ne, nb, place)
        };
        let node = &mut self.script.records[dst];
        (node.op, node.flags, node.params) = (op.to_wire(), FLAG_COMPUTE, draft.params);
        for (slot, src) in node.srcs.iter_mut().zip(&draft.srcs) {
            *slot = src.map_or(0, |s| s as u64 + 1);
        }
        self.script.listed.push(dst as u64 + 1);
    }
}

fn nowhere() -> SlotOffset {
    SlotOffset { slot: 0, offset: 0 }
}
