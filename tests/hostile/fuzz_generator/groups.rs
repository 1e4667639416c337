//! Generators of groups of nodes that a GPU runs as fused kernels, or in which a launch also writes quantised columns for a product
//! behind it.

use super::*;

/// Size of each buffer in bytes: weights of 16 KiB and more are packed.
const GROUP: usize = 256 << 10;

/// A group of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GroupKind {
    /// ADD of the residual, a norm, MUL by weights, ADD of a bias, and a product.
    Norm,
    /// ROPE of queries and keys, SET_ROWS of keys and values; or of keys alone.
    RopeCache,
    /// Up to three products of the same columns, with or without biases.
    Products,
    /// Two products, their SWIGLU, and a product of that.
    GatedProduct,
    /// As `GatedProduct`, with experts.
    GatedExperts,
    /// Attention, and a product of its result.
    Attention,
    /// The router of a mixture of experts.
    Route,
    /// The weighted sum of the experts.
    ExpertSum,
}

impl GroupKind {
    pub(crate) const ALL: [GroupKind; 8] = [
        GroupKind::Norm,
        GroupKind::RopeCache,
        GroupKind::Products,
        GroupKind::GatedProduct,
        GroupKind::GatedExperts,
        GroupKind::Attention,
        GroupKind::Route,
        GroupKind::ExpertSum,
    ];
}

impl<'r> FuzzGenerator<'r> {
    /// Generates a graph of one group.
    pub(crate) fn generate_group(rng: &'r mut Rng, kind: GroupKind) -> FuzzGraph {
        let mut maker = FuzzGenerator::new(rng, GROUP);
        match kind {
            GroupKind::Norm => maker.norm_group(),
            GroupKind::RopeCache => maker.rope_group(),
            GroupKind::Products => maker.products_group(),
            GroupKind::GatedProduct => maker.gated_group(),
            GroupKind::GatedExperts => maker.gated_experts_group(),
            GroupKind::Attention => maker.attention_group(),
            GroupKind::Route => maker.route_group(),
            GroupKind::ExpertSum => maker.expert_sum_group(),
        }
        maker.graph
    }

    /// A new record: contiguous and aligned, or one time in eight with other strides and any offset.
    fn fresh(&mut self, dtype: DType, ne: [usize; 4]) -> usize {
        let plain = !self.one_in(8);
        let dense_rows = plain || !self.one_in(4);
        let nb = self.strides(dtype, ne, plain, dense_rows);
        let extent = TensorDesc::strided(dtype, ne, nb).map_or(1 << 20, |t| t.extent());
        let place = if plain { self.aligned_place(extent) } else { self.place_tensor(extent) };
        self.add_record(dtype, ne, nb, place)
    }

    /// The next place at a multiple of 64 bytes in the buffer with more free memory.
    fn aligned_place(&mut self, extent: usize) -> SlotOffset {
        let slot = (0..SLOTS).min_by_key(|&slot| self.free[slot]).unwrap_or(0);
        let offset = self.free[slot].next_multiple_of(64);
        self.free[slot] = offset + extent;
        SlotOffset { slot: slot as u32, offset }
    }

    /// A new record of indices below `bound`.
    fn fresh_indices(&mut self, dtype: DType, ne: [usize; 4], bound: usize) -> usize {
        let id = self.fresh(dtype, ne);
        self.graph.indices.push((id, bound));
        id
    }

    /// Makes a record a node.
    fn compute(&mut self, at: usize, op: OpCode, srcs: &[usize], params: &[(usize, i32)]) {
        let node = &mut self.graph.records[at];
        (node.op, node.flags) = (op.to_wire(), FLAG_COMPUTE);
        params.iter().for_each(|&(word, value)| node.params[word] = value);
        node.srcs.iter_mut().zip(srcs).for_each(|(slot, &src)| *slot = src as u64 + 1);
        srcs.iter().for_each(|&src| self.graph.records[src].use_count += 1);
        self.graph.listed.push(at as u64 + 1);
    }

    fn node(&mut self, op: OpCode, ne: [usize; 4], srcs: &[usize], params: &[(usize, i32)]) -> usize {
        let at = self.fresh(F32, ne);
        self.compute(at, op, srcs, params);
        at
    }

    /// A contiguous view of a record from byte `offset` on, with `nb1` bytes between rows.
    fn view(&mut self, of: usize, ne: [usize; 4], nb1: Option<usize>, offset: usize) -> usize {
        let record = self.graph.records[of].clone();
        let dtype = DType::from_wire(record.dtype).unwrap_or(F32);
        let row = nb1.unwrap_or(ne[0] * dtype.block_bytes());
        let nb = [dtype.block_bytes(), row, row * ne[1], row * ne[1] * ne[2]];
        let place =
            record.place.map_or(default_offset(), |place| SlotOffset { offset: place.offset + offset, ..place });
        let at = self.add_record(dtype, ne, nb, place);
        self.graph.records[at].op = OpCode::View.to_wire();
        self.graph.records[at].srcs[0] = of as u64 + 1;
        self.graph.records[of].use_count += 1;
        at
    }

    /// SET_ROWS into a new cache of `row` elements per row.
    fn set_rows_of(&mut self, rows: usize, row: usize, tokens: usize) {
        let (cache_type, id_type) = (self.pick(&[F32, F32, F16, BF16]), self.pick(&[I64, I32]));
        let cache_rows = tokens + self.rng.usize(1..5);
        let ids = self.fresh_indices(id_type, [tokens, 1, 1, 1], cache_rows);
        let cache = self.fresh(cache_type, [row, cache_rows, 1, 1]);
        let target = self.graph.records[cache].clone();
        let place = target.place.unwrap_or_else(default_offset);
        let at = self.add_record(cache_type, [row, cache_rows, 1, 1], target.nb.map(|n| n as usize), place);
        self.compute(at, OpCode::SetRows, &[rows, ids, cache], &[]);
    }

    /// Type and row length of weights with fused kernels, and rows enough for a packed weight.
    fn packable_weights(&mut self) -> (DType, usize, usize) {
        let mut types: Vec<_> = DType::with_capability(Capability::Cuda).filter(|t| t.is_block()).collect();
        types.extend([F16, BF16]);
        let dtype = self.pick(&types);
        let k = if dtype.is_block() {
            dtype.block_len().max(self.pick(&[64, 128, 256]))
        } else {
            self.pick(&[32, 96, 200])
        };
        let rows = (17 << 10) / dtype.row_bytes(k).unwrap_or(1).max(1);
        // Groups of packed rows have up to 16 rows; SWIGLU results are columns of blocks.
        (dtype, k, if dtype.is_block() { rows.next_multiple_of(dtype.block_len().max(16)).min(512) } else { 48 })
    }

    fn product(&mut self, weights: usize, columns: usize) -> usize {
        let [a, b] = [weights, columns].map(|id| self.graph.records[id].ne.map(|n| n as usize));
        self.node(OpCode::MulMat, [a[1], b[1], b[2], b[3]], &[weights, columns], &[])
    }

    /// A product of packable weights with a column or two, if blocks fit the columns.
    fn product_behind(&mut self, columns: usize, k: usize) {
        let types: Vec<_> = DType::with_capability(Capability::Cuda)
            .filter(|t| t.is_block() && k.is_multiple_of(t.block_len()))
            .collect();
        if types.is_empty() {
            return;
        }
        let dtype = self.pick(&types);
        let rows = (17usize << 10).div_ceil(dtype.row_bytes(k).unwrap_or(1)).next_multiple_of(16);
        let weights = self.fresh(dtype, [k, rows.min(256), 1, 1]);
        self.product(weights, columns);
    }

    fn norm_group(&mut self) {
        let n = self.pick(&[4, 33, 64, 256, 256, 512, 1024]);
        let ne = [n, self.pick(&[1, 1, 2, 3, 5]), self.pick(&[1, 1, 2]), 1];
        let mut x = self.fresh(F32, ne);
        if self.rng.bool() {
            let b = self.fresh(F32, ne);
            x = self.node(OpCode::Add, ne, &[x, b], &[]);
        }
        let (op, eps) = (self.pick(&[OpCode::RmsNorm, OpCode::Norm]), self.float_param(1e-5));
        let mut y = self.node(op, ne, &[x], &[(0, eps)]);
        for op in [OpCode::Mul, OpCode::Add].into_iter().take(self.rng.usize(1..3)) {
            let rows = if self.one_in(4) { self.divisor(ne[1]) } else { 1 };
            let w = self.fresh(F32, [n, rows, 1, 1]);
            y = self.node(op, ne, &[y, w], &[]);
        }
        if self.rng.bool() {
            self.product_behind(y, n);
        }
    }

    fn rope_group(&mut self) {
        let (d, tokens) = (self.pick(&[6, 32, 64, 64, 128]), self.pick(&[1, 1, 2, 5]));
        let heads = [self.pick(&[1, 2, 4, 7]), self.pick(&[1, 2, 3])];
        let (with_queries, with_norms) = (!self.one_in(4), self.one_in(3));
        let positions = self.fresh_indices(I32, [tokens, 1, 1, 1], 5000);
        let dims = if self.one_in(3) { d / 2 / 2 * 2 } else { d } as i32;
        let mut params = vec![(1, dims), (2, self.pick(&[0, 2]))];
        for (k, sane) in [(5, 10000.0), (6, 1.0), (7, 0.0), (8, 1.0), (9, 32.0), (10, 1.0)] {
            params.push((k, self.float_param(sane)));
        }
        let factors = (!with_norms && self.one_in(3)).then(|| self.fresh(F32, [dims as usize / 2, 1, 1, 1]));
        let eps = self.float_param(1e-5);
        let rotate = |maker: &mut Self, heads: usize| {
            let ne = [d, heads, tokens, 1];
            let mut x = maker.fresh(F32, ne);
            if with_norms {
                x = maker.node(OpCode::RmsNorm, ne, &[x], &[(0, eps)]);
                let w = maker.fresh(F32, [d, 1, 1, 1]);
                x = maker.node(OpCode::Mul, ne, &[x, w], &[]);
            }
            let srcs: Vec<_> = [x, positions].into_iter().chain(factors).collect();
            maker.node(OpCode::Rope, ne, &srcs, &params)
        };
        if with_queries {
            rotate(self, heads[0]);
        }
        let k = rotate(self, heads[1]);
        let row = d * heads[1];
        let rows = self.view(k, [row, tokens, 1, 1], None, 0);
        self.set_rows_of(rows, row, tokens);
        if self.rng.bool() {
            let n = self.pick(&[row, 40, 64]);
            let v = self.fresh(F32, [n, tokens, 1, 1]);
            self.set_rows_of(v, n, tokens);
        }
    }

    fn products_group(&mut self) {
        let (dtype, k, m) = self.packable_weights();
        let n = self.pick(&[1, 1, 2, 3]);
        let columns = self.fresh(F32, [k, n, 1, 1]);
        let biased = self.rng.bool();
        for _ in 0..self.rng.usize(1..4) {
            let rows = if self.one_in(3) { m.div_ceil(2).next_multiple_of(16) } else { m };
            let weights = self.fresh(dtype, [k, rows, 1, 1]);
            let product = self.product(weights, columns);
            if biased {
                let ne = self.graph.records[product].ne.map(|n| n as usize);
                let bias = self.fresh(F32, [ne[0], 1, 1, 1]);
                self.node(OpCode::Add, ne, &[product, bias], &[]);
            }
        }
    }

    fn gated_group(&mut self) {
        let (dtype, k, m) = self.packable_weights();
        let n = self.pick(&[1, 1, 2, 3]);
        let columns = self.fresh(F32, [k, n, 1, 1]);
        let [gate, up] = [0, 1].map(|_| {
            let weights = self.fresh(dtype, [k, m, 1, 1]);
            self.product(weights, columns)
        });
        let ne = self.graph.records[gate].ne.map(|n| n as usize);
        let kind = if self.one_in(6) { self.rng.i32(0..3) } else { 2 };
        let gated = self.node(OpCode::Glu, ne, &[gate, up], &[(0, kind)]);
        self.product_behind(gated, m);
    }

    fn gated_experts_group(&mut self) {
        let (dtype, k, m) = self.packable_weights();
        let (experts, used, tokens) = (self.pick(&[1, 2]), self.pick(&[1, 2]), self.pick(&[1, 1, 2]));
        let rows = self.pick(&[1, used]);
        let columns = self.fresh(F32, [k, rows, tokens, 1]);
        let ids = self.fresh_indices(I32, [used, tokens, 1, 1], experts);
        let m = m.min(128);
        let [gate, up] = [0, 1].map(|_| {
            let weights = self.fresh(dtype, [k, m, experts, 1]);
            self.node(OpCode::MulMatId, [m, used, tokens, 1], &[weights, columns, ids], &[])
        });
        let gated = self.node(OpCode::Glu, [m, used, tokens, 1], &[gate, up], &[(0, 2)]);
        let down = self.fresh(dtype, [m, 256, experts, 1]);
        if m.is_multiple_of(dtype.block_len()) {
            self.node(OpCode::MulMatId, [256, used, tokens, 1], &[down, gated, ids], &[]);
        }
    }

    fn attention_group(&mut self) {
        let (d, heads, tokens) = (self.pick(&[64, 128, 128]), self.pick(&[1, 2, 4]), self.pick(&[1, 1, 2]));
        let (dtype, positions) = (self.pick(&[F16, DType::Q8_0, BF16]), self.pick(&[40, 256, 400]));
        let q = self.fresh(F32, [d, tokens, heads, 1]);
        let [k, v] = [0, 1].map(|_| self.fresh(dtype, [d, positions, 1, 1]));
        let attention = self.fresh(F32, [d, heads, tokens, 1]);
        let (scale, precision) = (self.float_param(0.125), self.pick(&[0, 10]));
        self.compute(attention, OpCode::FlashAttnExt, &[q, k, v], &[(0, scale), (3, precision)]);
        let columns = self.view(attention, [d * heads, tokens, 1, 1], None, 0);
        self.product_behind(columns, d * heads);
    }

    fn route_group(&mut self) {
        let (experts, tokens) = (self.pick(&[2, 8, 16, 64, 100]), self.pick(&[1, 1, 2, 5, 9]));
        let used = self.rng.usize(1..=experts.min(8));
        let logits = self.fresh(F32, [experts, tokens, 1, 1]);
        let p = self.node(OpCode::SoftMax, [experts, tokens, 1, 1], &[logits], &[(0, 1f32.to_bits() as i32)]);
        let ids = self.fresh(I32, [experts, tokens, 1, 1]);
        self.compute(ids, OpCode::Argsort, &[p], &[(0, 1)]);
        let table = self.view(p, [1, experts, tokens, 1], None, 0);
        let list = self.view(ids, [used, tokens, 1, 1], Some(4 * experts), 0);
        let w = self.node(OpCode::GetRows, [1, used, tokens, 1], &[table, list], &[]);
        let rows = self.view(w, [used, tokens, 1, 1], None, 0);
        let mut sum = self.node(OpCode::SumRows, [1, tokens, 1, 1], &[rows], &[]);
        if self.rng.bool() {
            let bounds = [(0, self.float_param(6e-5)), (1, self.float_param(f32::INFINITY))];
            sum = self.node(OpCode::Clamp, [1, tokens, 1, 1], &[sum], &bounds);
        }
        self.node(OpCode::Div, [used, tokens, 1, 1], &[rows, sum], &[]);
    }

    fn expert_sum_group(&mut self) {
        let (n, used, tokens) = (self.pick(&[1, 33, 64, 300]), self.pick(&[2, 4, 6, 8]), self.pick(&[1, 1, 2, 5]));
        let (x, w) = (self.fresh(F32, [n, used, tokens, 1]), self.fresh(F32, [1, used, tokens, 1]));
        let product = self.node(OpCode::Mul, [n, used, tokens, 1], &[x, w], &[]);
        let parts: Vec<_> =
            (0..used).map(|k| self.view(product, [n, tokens, 1, 1], Some(4 * n * used), 4 * n * k)).collect();
        let mut sum = parts[0];
        for &part in &parts[1..] {
            sum = self.node(OpCode::Add, [n, tokens, 1, 1], &[sum, part], &[]);
        }
    }
}
