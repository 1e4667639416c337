//! Plausible nodes for every op, as a peer would send them: most of them are valid, and all kinds of valid.

use fanout::graph::Place;
use fanout::graph::validate::ForeignTensor;
use fanout::ops::OpCode;
use fanout::tensor::{DType, TensorDesc};
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
    pub(crate) records: Vec<ForeignTensor>,
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
        use DType::{IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
        self.pick(&[
            F32, F32, F16, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4,
        ])
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
        let fits = |t: &ForeignTensor| t.dtype == dtype.to_wire() && t.ne.map(|n| n as usize) == ne;
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
    fn place(&mut self, extent: usize) -> Place {
        let align = self.pick(&[64, 64, 64, 64, 4, 2, 1]);
        let slot = self.rng.usize(..SLOTS);
        if self.one_in(8) && self.free[slot] + extent <= self.script.size {
            // Nothing behind it.
            let offset = self.script.size - extent;
            self.free[slot] = self.script.size;
            return Place { slot: slot as u32, offset };
        }
        for slot in [slot, (slot + 1) % SLOTS] {
            let offset =
                self.free[slot].next_multiple_of(align) + if align < 64 { self.rng.usize(..2) * align } else { 0 };
            if offset + extent <= self.script.size {
                self.free[slot] = offset + extent;
                return Place { slot: slot as u32, offset };
            }
        }
        Place { slot: slot as u32, offset: self.rng.usize(..self.script.size) }
    }

    fn record(&mut self, dtype: DType, ne: [usize; 4], nb: [usize; 4], place: Place) -> usize {
        let id = self.script.records.len() as u64 + 1;
        self.script.records.push(ForeignTensor {
            id,
            dtype: dtype.to_wire(),
            ne: ne.map(|n| n as u32),
            nb: nb.map(|n| n as u32),
            op: 0,
            params: [0; 16],
            flags: 0,
            srcs: [0; 10],
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
        let same = |t: &ForeignTensor| t.dtype == draft.dtype.to_wire() && t.ne.map(|n| n as usize) == draft.ne;
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

    fn draft(&mut self, op: OpCode) -> Draft {
        match op {
            OpCode::Add | OpCode::Sub | OpCode::Mul | OpCode::Div => self.binary(),
            OpCode::AddId => self.add_id(),
            OpCode::Glu => self.glu(),
            OpCode::Sum | OpCode::SumRows | OpCode::Mean | OpCode::Argmax => self.reduction(op),
            OpCode::Norm | OpCode::RmsNorm | OpCode::L2Norm => {
                let ne = self.shape(&[F32]);
                let mut draft = Draft::new(F32, ne, &[self.tensor(F32, ne)]);
                draft.params[0] = self.number(1e-5);
                draft
            }
            OpCode::Dup | OpCode::Cpy | OpCode::Cont => self.copy(op),
            OpCode::GetRows => self.get_rows(),
            OpCode::SetRows => self.set_rows(),
            OpCode::Concat => self.concat(),
            OpCode::Repeat => self.repeat(),
            OpCode::Argsort | OpCode::TopK => self.sort(op),
            OpCode::MulMat => self.mul_mat(),
            OpCode::MulMatId => self.mul_mat_id(),
            OpCode::Rope => self.rope(),
            OpCode::SoftMax => self.softmax(),
            OpCode::FlashAttnExt => self.flash_attn(),
            _ => self.unary(op),
        }
    }

    fn binary(&mut self) -> Draft {
        let types = [self.float(), self.float(), self.float()];
        let ne = self.shape(&types);
        let bne = ne.map(|n| self.divisor(n));
        let (a, b) = (self.tensor(types[0], ne), self.tensor(types[1], bne));
        Draft::new(types[2], ne, &[a, b])
    }

    fn add_id(&mut self) -> Draft {
        let (n, used, tokens, experts) = (self.row(&[F32]).min(1500), self.dim().min(8), self.dim().min(8), self.dim());
        let ne = self.shrunk([n, used, tokens, 1], 3000);
        let (a, b) = (self.tensor(F32, ne), self.tensor(F32, [n, experts, 1, 1]));
        let ids = self.ids(I32, [ne[1], ne[2], 1, 1], experts);
        Draft::new(F32, ne, &[a, b, ids])
    }

    fn unary(&mut self, op: OpCode) -> Draft {
        let types = [self.float(), self.float()];
        let ne = self.shape(&types);
        let mut draft = Draft::new(types[1], ne, &[self.tensor(types[0], ne)]);
        if op == OpCode::Unary {
            draft.params[0] = self.rng.i32(0..22);
            for k in 1..5 {
                draft.params[k] = self.number(0.5);
            }
        } else {
            (draft.params[0], draft.params[1]) = (self.number(0.25), self.number(2.0));
        }
        draft
    }

    fn glu(&mut self) -> Draft {
        let types = [self.float(), self.float(), self.float()];
        let ne = self.shape(&types);
        let mut draft = if self.rng.bool() {
            let (a, b) = (self.tensor(types[0], ne), self.tensor(types[1], ne));
            Draft::new(types[2], ne, &[a, b])
        } else {
            let wide = [2 * ne[0] + self.rng.usize(..8) / 7, ne[1], ne[2], ne[3]];
            Draft::new(types[2], ne, &[self.tensor(types[0], wide)])
        };
        draft.params[0] = self.rng.i32(0..7);
        draft.params[1] = i32::from(draft.srcs.len() == 1 && self.rng.bool());
        (draft.params[2], draft.params[3]) = (self.number(1.7), self.number(7.0));
        draft
    }

    fn reduction(&mut self, op: OpCode) -> Draft {
        let dtype = if op == OpCode::Sum { self.float() } else { F32 };
        let mut ne = self.shape(&[dtype]);
        if op == OpCode::Argmax {
            (ne[2], ne[3]) = (1, 1);
        }
        let x = self.tensor(dtype, ne);
        match op {
            OpCode::Sum => Draft::new(dtype, [1; 4], &[x]),
            OpCode::Argmax => Draft::new(I32, [ne[1], 1, 1, 1], &[x]),
            _ => Draft::new(F32, [1, ne[1], ne[2], ne[3]], &[x]),
        }
    }

    fn copy(&mut self, op: OpCode) -> Draft {
        let (from, to) = if op != OpCode::Cpy {
            let dtype = self.any_type();
            (dtype, dtype)
        } else {
            match self.rng.usize(..4) {
                0 => (self.weight(), self.float()),
                1 => (self.float(), self.weight()),
                2 => (self.any_type(), self.any_type()),
                _ => self.pick(&[(F32, I32), (I32, F32), (F16, I32), (I32, I32), (BF16, F16)]),
            }
        };
        let ne = self.shape(&[from, to]);
        let mut other = ne;
        if op != OpCode::Dup && self.one_in(3) {
            other = match self.rng.usize(..4) {
                0 => [ne.iter().product(), 1, 1, 1],
                1 => [ne[0] * ne[1], ne[2], 1, ne[3]],
                2 => [ne[0], ne[1] * ne[2] * ne[3], 1, 1],
                _ => [ne[1], ne[0], ne[3], ne[2]],
            };
        }
        let src = self.tensor(from, ne);
        let mut draft = Draft::new(to, other, &[src]);
        if op == OpCode::Cpy && self.rng.bool() {
            let target = self.tensor(to, other);
            draft.srcs.push(Some(target));
            draft.onto = Some(target);
        }
        draft
    }

    fn get_rows(&mut self) -> Draft {
        let dtype = if self.one_in(6) { I32 } else { self.weight() };
        let (n, rows, k) = (self.row(&[dtype]), self.dim(), self.dim());
        let ne = [n, rows, self.dim().min(4), self.dim().min(3)];
        let ne = self.shrunk(ne, 6000);
        let (table, ids) = (self.tensor(dtype, ne), self.ids(I32, [k, ne[2], ne[3], 1], ne[1]));
        Draft::new(if dtype == I32 { I32 } else { F32 }, [ne[0], k, ne[2], ne[3]], &[table, ids])
    }

    fn set_rows(&mut self) -> Draft {
        let (from, to) = (self.pick(&[F32, F32, F16]), self.weight());
        let n = if self.one_in(4) && !to.is_block() { 1 } else { self.row(&[to]) };
        let ne = [n, self.dim(), self.dim().min(4), self.dim().min(3)];
        let ne = self.shrunk(ne, 6000);
        let r = self.dim().min(9);
        let b = self.tensor(from, [ne[0], r, ne[2], ne[3]]);
        let (c1, c2) = (self.divisor(ne[2]), self.divisor(ne[3]));
        let dtype = self.pick(&[I64, I32]);
        let ids = self.ids(dtype, [r, c1, c2, 1], ne[1]);
        let target = self.tensor(to, ne);
        let mut draft = Draft::new(to, ne, &[b, ids, target]);
        draft.onto = Some(target);
        draft
    }

    fn concat(&mut self) -> Draft {
        let dtype = self.any_type();
        let (a, d) = (self.shape(&[dtype]), self.rng.usize(..4));
        let (mut b, mut ne) = (a, a);
        b[d] = if d == 0 { self.row(&[dtype]) } else { self.dim() };
        if self.one_in(10) {
            b[d] = 0;
        }
        ne[d] += b[d];
        let (a, b) = (self.tensor(dtype, a), self.tensor(dtype, b));
        let mut draft = Draft::new(dtype, ne, &[a, b]);
        draft.params[0] = d as i32;
        draft
    }

    fn repeat(&mut self) -> Draft {
        let dtype = self.any_type();
        let a = self.shape(&[dtype]);
        let a = self.shrunk(a, 800);
        let ne = a.map(|n| n * self.rng.usize(1..3));
        Draft::new(dtype, ne, &[self.tensor(dtype, a)])
    }

    fn sort(&mut self, op: OpCode) -> Draft {
        let mut ne = self.shape(&[F32]);
        let x = self.tensor(F32, ne);
        if op == OpCode::TopK {
            ne[0] = self.rng.usize(1..=ne[0]);
        }
        let mut draft = Draft::new(I32, ne, &[x]);
        draft.params[0] = self.rng.i32(0..2);
        draft
    }

    fn precision(&mut self) -> i32 {
        self.pick(&[0, 0, 0, 10, 15, 20, 30, 40])
    }

    fn mul_mat(&mut self) -> Draft {
        let dtype = self.weight();
        let k = self.row(&[dtype]);
        let plane = |m: &mut Self| [m.dim().min(3), m.dim().min(2)];
        let [a2, a3] = plane(self);
        let [r2, r3] = plane(self);
        let m = self.pick(&[1, 2, 3, 15, 16, 17, 33, 70]);
        let n = self.pick(&[1, 1, 2, 3, 8, 9, 12, 17, 40]);
        let an = self.shrunk([k, m, a2, a3], 16_000);
        let mut bn = self.shrunk([k, n, r2, r3], 6000);
        (bn[2], bn[3]) = (bn[2] * an[2], bn[3] * an[3]);
        let other = if self.one_in(5) { self.float() } else { F32 };
        let (a, b) = (self.tensor(dtype, an), self.tensor(other, bn));
        let mut draft = Draft::new(F32, [an[1], bn[1], bn[2], bn[3]], &[a, b]);
        (draft.params[0], draft.params[1], draft.params[3]) = (self.precision(), self.rng.i32(0..2), self.precision());
        draft
    }

    fn mul_mat_id(&mut self) -> Draft {
        let dtype = self.weight();
        let k = self.row(&[dtype]).min(1024);
        let m = self.pick(&[1, 2, 5, 16, 17, 33]);
        let (experts, nb, per) = (self.dim(), self.dim().min(3), self.dim().min(4));
        let tokens = self.pick(&[1, 1, 2, 5, 19]);
        let an = self.shrunk([k, m, experts, 1], 16_000);
        let bn = self.shrunk([k, nb, tokens, 1], 6000);
        let (a, b) = (self.tensor(dtype, an), self.tensor(F32, bn));
        let used = bn[1] * per;
        let ids = self.ids(I32, [used, bn[2], 1, 1], an[2]);
        let mut draft = Draft::new(F32, [an[1], used, bn[2], 1], &[a, b, ids]);
        draft.params[0] = self.precision();
        draft
    }

    fn rope(&mut self) -> Draft {
        let dtype = self.pick(&[F32, F32, F16]);
        let mode = self.pick(&[0, 2, 8, 24, 40]);
        let ne = [self.pick(&[2, 4, 6, 64, 66, 128, 258]), self.dim(), self.dim(), self.dim().min(2)];
        let ne = self.shrunk(ne, 3000);
        let positions = self.ids(I32, [if mode >= 8 { 4 * ne[2] } else { ne[2] }, 1, 1, 1], 5000);
        let mut srcs = vec![self.tensor(dtype, ne), positions];
        let dims = if mode == 24 { ne[0] / 2 } else { 2 * self.rng.usize(1..=ne[0] / 2) };
        if self.rng.bool() {
            let pairs = if mode == 24 { dims } else { dims / 2 };
            let factors = pairs + self.rng.usize(..3);
            srcs.push(self.tensor(F32, [factors, 1, 1, 1]));
        }
        let mut draft = Draft::new(dtype, ne, &srcs);
        let offset = if mode == 24 { 0 } else { 2 * self.rng.usize(..=(ne[0] - dims.min(ne[0])) / 2) };
        draft.params[1] = dims as i32;
        draft.params[2] = mode;
        draft.params[4] = self.pick(&[0, 4096, -1, i32::MAX, i32::MIN]);
        for (k, sane) in [(5, 10000.0), (6, 1.0), (7, 0.0), (8, 1.0), (9, 32.0), (10, 1.0)] {
            draft.params[k] = self.number(sane);
        }
        let mut left = ne[0];
        for k in 11..15 {
            let n = self.rng.usize(..=left / 2);
            left -= n;
            draft.params[k] = n as i32;
        }
        draft.params[15] = offset as i32;
        draft
    }

    fn softmax(&mut self) -> Draft {
        let ne = self.shape(&[F32]);
        let mut draft = Draft::new(F32, ne, &[self.layout(F32, ne, true)]);
        draft.packed = true;
        draft.params[0] = self.number(0.125);
        let mask = self.rng.bool().then(|| {
            let dtype = self.pick(&[F16, F32]);
            let ne = [ne[0], ne[1] + self.rng.usize(..3) / 2, self.divisor(ne[2]), self.divisor(ne[3])];
            self.layout(dtype, ne, true)
        });
        if mask.is_some() && self.rng.bool() {
            draft.params[1] = self.number(8.0);
        }
        let sinks = self.one_in(3).then(|| self.tensor(F32, [ne[2], 1, 1, 1]));
        draft.srcs.extend([mask, sinks]);
        draft
    }

    fn flash_attn(&mut self) -> Draft {
        let (tk, tv) = (self.weight(), self.weight());
        let width =
            |m: &mut Self, t: DType| if t.is_block() { t.block_len() } else { m.pick(&[1, 3, 8, 16, 40, 64, 65]) };
        let (dk, dv) = (width(self, tk), width(self, tv));
        let (kv_heads, batches) = (self.pick(&[1, 1, 2]), self.pick(&[1, 1, 2]));
        let heads = kv_heads * self.pick(&[1, 2, 3, 4, 8]);
        let tokens = self.pick(&[1, 1, 2, 5, 17]);
        let q = self.shrunk([dk, tokens, heads, batches], 5000);
        let (heads, batches) = (q[2], q[3]);
        let kv_heads = if heads.is_multiple_of(kv_heads) { kv_heads } else { 1 };
        let positions = self.pick(&[1, 2, 63, 64, 65, 100, 600]).min(9000 / (dk.max(dv) * kv_heads * batches)).max(1);
        let v_heads = if self.one_in(5) { 1 } else { kv_heads };
        let mut srcs = vec![
            Some(self.tensor(F32, q)),
            Some(self.tensor(tk, [dk, positions, kv_heads, batches])),
            Some(self.tensor(tv, [dv, positions, v_heads, batches])),
        ];
        let mask = self.rng.bool().then(|| {
            let ne = [positions, q[1] + self.rng.usize(..3) / 2, self.divisor(heads), self.divisor(batches)];
            self.layout(F16, ne, true)
        });
        let sinks = self.one_in(3).then(|| self.tensor(F32, [heads, 1, 1, 1]));
        srcs.extend([mask, sinks]);
        let mut draft = Draft::new(F32, [dv, heads, q[1], batches], &[]);
        (draft.srcs, draft.packed) = (srcs, true);
        draft.params[0] = self.number(0.125);
        if mask.is_some() && self.one_in(3) {
            draft.params[1] = self.number(8.0);
        }
        if self.one_in(3) {
            draft.params[2] = self.number(30.0);
        }
        draft.params[3] = self.pick(&[0, 10]);
        draft
    }
}

fn nowhere() -> Place {
    Place { slot: 0, offset: 0 }
}
