//! Generator of graphs as a peer might send them: one to three nodes of any ops, with random types, shapes, strides and
//! parameters. Most of them are valid.

mod drafts;
mod groups;
mod image_drafts;
mod index_drafts;
mod recurrent_drafts;
mod training_drafts;

use fanout::graph::SlotOffset;
use fanout::graph::validate::UntrustedTensor;
use fanout::ops::OpCode;
use fanout::tensor::{Capability, DType, TensorDesc};
use fastrand::Rng;
pub(crate) use groups::GroupKind;

use DType::{BF16, F16, F32, I32, I64};

/// Size of each buffer in bytes, in a large case (with nodes large enough for several worker threads) and in a small case.
/// Multiples of the page size, so that a read past the end of a buffer may fault.
const LARGE: usize = 256 << 10;
const SMALL: usize = 64 << 10;

/// Number of buffers of a case.
pub(crate) const SLOTS: usize = 2;

const FLAG_COMPUTE: i32 = 16;

/// A generated graph, in the form of a peer's unvalidated records.
#[derive(Clone, Debug)]
pub(crate) struct FuzzGraph {
    /// Size of each buffer in bytes.
    pub(crate) size: usize,
    /// Ids of the nodes.
    pub(crate) listed: Vec<u64>,
    pub(crate) records: Vec<UntrustedTensor>,
    /// Tensors of indices: index of the record, and the exclusive upper bound of valid values.
    pub(crate) indices: Vec<(usize, usize)>,
}

impl std::fmt::Display for FuzzGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "nodes {:?}", self.listed)?;
        for t in &self.records {
            let (op, dtype) = (OpCode::from_wire(t.op), DType::from_wire(t.dtype));
            writeln!(f, "{} {op:?} {dtype:?} {:?}/{:?} {:?} {:?} {:?}", t.id, t.ne, t.nb, t.srcs, t.place, t.params)?;
        }
        Ok(())
    }
}

pub(crate) struct FuzzGenerator<'r> {
    pub(crate) rng: &'r mut Rng,
    graph: FuzzGraph,
    /// First free byte of each buffer.
    free: [usize; SLOTS],
}

/// A node before its destination has a record: type and shape of the destination, sources and parameters.
struct NodeDraft {
    dtype: DType,
    ne: [usize; 4],
    srcs: Vec<Option<usize>>,
    params: [i32; 16],
    /// The source that shares its memory with the destination, for ops such as CPY and SET_ROWS.
    in_place_source: Option<usize>,
    /// Whether the destination must be contiguous.
    packed: bool,
}

impl NodeDraft {
    fn new(dtype: DType, ne: [usize; 4], srcs: &[usize]) -> NodeDraft {
        let srcs = srcs.iter().map(|&s| Some(s)).collect();
        NodeDraft { dtype, ne, srcs, params: [0; 16], in_place_source: None, packed: false }
    }
}

impl<'r> FuzzGenerator<'r> {
    fn new(rng: &'r mut Rng, size: usize) -> Self {
        let graph = FuzzGraph { size, listed: Vec::new(), records: Vec::new(), indices: Vec::new() };
        FuzzGenerator { rng, graph, free: [0; SLOTS] }
    }

    /// Generates a graph of one small node.
    pub(crate) fn generate_node(rng: &'r mut Rng, op: OpCode) -> FuzzGraph {
        let mut maker = FuzzGenerator::new(rng, SMALL);
        maker.add_node(op);
        maker.graph
    }

    /// Generates a graph of one to three nodes, of which the last is `op`.
    pub(crate) fn generate(rng: &'r mut Rng, op: OpCode, others: &[OpCode]) -> FuzzGraph {
        let size = if rng.u8(..4) == 0 { LARGE } else { SMALL };
        let mut maker = FuzzGenerator::new(rng, size);
        for _ in 0..[0, 0, 0, 1, 2][maker.rng.usize(..5)] {
            let other = others[maker.rng.usize(..others.len())];
            maker.add_node(other);
        }
        maker.add_node(op);
        maker.graph
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.rng.usize(..n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.usize(..of.len())]
    }

    /// A random dimension, mostly small, often odd.
    fn dim(&mut self) -> usize {
        self.pick(&[1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
    }

    /// A random row length that is valid for all of these types.
    fn row(&mut self, types: &[DType]) -> usize {
        let block = types.iter().map(|t| t.block_len()).max().unwrap_or(1);
        let n: usize = self
            .pick(&[1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 96, 100, 255, 256, 257, 768, 1024, 1025, 2050, 4100]);
        n.div_ceil(block).min(if block > 1 { 2048 / block } else { n }) * block
    }

    fn shape(&mut self, types: &[DType]) -> [usize; 4] {
        if self.one_in(3)
            && let Some(known) = (0..self.graph.records.len()).last()
        {
            let ne = self.graph.records[known].ne.map(|n| n as usize);
            if types.iter().all(|t| ne[0].is_multiple_of(t.block_len())) && !ne.contains(&0) {
                return ne;
            }
        }
        let ne = [self.row(types), self.dim(), self.dim(), self.dim()];
        self.limit_elements(ne, 3000)
    }

    /// Halves outer dimensions until the shape has at most `most` elements (16 times as many in a large case), or one row.
    fn limit_elements(&mut self, mut ne: [usize; 4], most: usize) -> [usize; 4] {
        let most = most * self.graph.size / SMALL * self.graph.size / SMALL;
        while ne.iter().product::<usize>() > most && ne[1..].iter().any(|&n| n > 1) {
            let d = self.rng.usize(1..4);
            ne[d] = (ne[d] / 2).max(1);
        }
        ne
    }

    fn float_type(&mut self) -> DType {
        self.pick(&[F32, F32, F32, F32, F16, BF16])
    }

    fn any_type(&mut self) -> DType {
        self.pick(DType::ALL)
    }

    /// A random type of weights and caches.
    fn weight_type(&mut self) -> DType {
        // The common types are in the list twice.
        let types: Vec<_> =
            [F32, F16, DType::Q8_0].into_iter().chain(DType::with_capability(Capability::Decode)).collect();
        self.pick(&types)
    }

    fn divisor(&mut self, n: usize) -> usize {
        let all: Vec<_> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
        if self.rng.bool() { n } else { self.pick(&all) }
    }

    /// Random strides in bytes, fastest dimension first: packed, padded, or with permuted dimensions in memory.
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

    /// Index of a record of this type and shape: of a new one, or of an existing one.
    fn tensor(&mut self, dtype: DType, ne: [usize; 4]) -> usize {
        self.layout(dtype, ne, false)
    }

    fn layout(&mut self, dtype: DType, ne: [usize; 4], packed: bool) -> usize {
        let fits = |t: &UntrustedTensor| t.dtype == dtype.to_wire() && t.ne.map(|n| n as usize) == ne;
        if self.rng.bool()
            && let Some(found) = self.graph.records.iter().rposition(fits)
        {
            return found;
        }
        let dense_rows = !self.one_in(5);
        let nb = self.strides(dtype, ne, packed, dense_rows);
        let extent = TensorDesc::strided(dtype, ne, nb).map_or(1 << 20, |t| t.extent());
        let place = self.place_tensor(extent);
        self.add_record(dtype, ne, nb, place)
    }

    /// A location for `extent` bytes with a random alignment, in free memory if there is enough, else anywhere.
    fn place_tensor(&mut self, extent: usize) -> SlotOffset {
        let align = self.pick(&[64, 64, 64, 64, 4, 2, 1]);
        let slot = self.rng.usize(..SLOTS);
        if self.one_in(8) && self.free[slot] + extent <= self.graph.size {
            // At the end of the buffer, so that a read past the tensor leaves the buffer.
            let offset = self.graph.size - extent;
            self.free[slot] = self.graph.size;
            return SlotOffset { slot: slot as u32, offset };
        }
        for slot in [slot, (slot + 1) % SLOTS] {
            let offset =
                self.free[slot].next_multiple_of(align) + if align < 64 { self.rng.usize(..2) * align } else { 0 };
            if offset + extent <= self.graph.size {
                self.free[slot] = offset + extent;
                return SlotOffset { slot: slot as u32, offset };
            }
        }
        SlotOffset { slot: slot as u32, offset: self.rng.usize(..self.graph.size) }
    }

    fn add_record(&mut self, dtype: DType, ne: [usize; 4], nb: [usize; 4], place: SlotOffset) -> usize {
        let id = self.graph.records.len() as u64 + 1;
        self.graph.records.push(UntrustedTensor {
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

    /// Index of a record of indices below `bound`.
    fn index_tensor(&mut self, dtype: DType, ne: [usize; 4], bound: usize) -> usize {
        let id = self.tensor(dtype, ne);
        self.graph.indices.push((id, bound));
        id
    }

    /// A float parameter, as bits: mostly `sane`, sometimes an extreme value.
    fn float_param(&mut self, sane: f32) -> i32 {
        let odd = [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40, -0.0];
        let value = if self.one_in(6) { self.pick(&odd) } else { sane };
        value.to_bits() as i32
    }

    fn add_node(&mut self, op: OpCode) {
        let draft = self.draft(op);
        let same = |t: &UntrustedTensor| t.dtype == draft.dtype.to_wire() && t.ne.map(|n| n as usize) == draft.ne;
        let fitting: Vec<_> = draft.srcs.iter().flatten().copied().filter(|&s| same(&self.graph.records[s])).collect();
        let dst = if let Some(onto) = draft.in_place_source {
            let target = self.graph.records[onto].clone();
            self.add_record(
                draft.dtype,
                draft.ne,
                target.nb.map(|n| n as usize),
                target.place.unwrap_or_else(default_offset),
            )
        } else if !fitting.is_empty() && self.one_in(3) {
            let source = self.pick(&fitting);
            let target = self.graph.records[source].clone();
            self.add_record(
                draft.dtype,
                draft.ne,
                target.nb.map(|n| n as usize),
                target.place.unwrap_or_else(default_offset),
            )
        } else {
            let nb =
                self.strides(draft.dtype, draft.ne, draft.packed || self.graph.records.len().is_multiple_of(2), true);
            let extent = TensorDesc::strided(draft.dtype, draft.ne, nb).map_or(1 << 20, |t| t.extent());
            let place = self.place_tensor(extent);
            self.add_record(draft.dtype, draft.ne, nb, place)
        };
        let node = &mut self.graph.records[dst];
        (node.op, node.flags, node.params) = (op.to_wire(), FLAG_COMPUTE, draft.params);
        for (slot, src) in node.srcs.iter_mut().zip(&draft.srcs) {
            *slot = src.map_or(0, |s| s as u64 + 1);
        }
        self.graph.listed.push(dst as u64 + 1);
    }
}

fn default_offset() -> SlotOffset {
    SlotOffset { slot: 0, offset: 0 }
}
