//! Generators of a node per op: types, shapes, sources and parameters as a client might send them.

use super::*;

impl FuzzGenerator<'_> {
    /// Generates a node of `op`.
    ///
    /// # Panics
    /// If `op` has no generator here.
    pub(super) fn draft(&mut self, op: OpCode) -> NodeDraft {
        match op {
            OpCode::Add if self.one_in(4) => self.quantised_add(),
            OpCode::Add | OpCode::Sub | OpCode::Mul | OpCode::Div => self.binary(),
            OpCode::Add1 => self.add1(),
            OpCode::AddId => self.add_id(),
            OpCode::Glu => self.glu(),
            OpCode::Sum | OpCode::SumRows | OpCode::Cumsum | OpCode::Mean | OpCode::Argmax => self.reduction(op),
            OpCode::Norm | OpCode::RmsNorm | OpCode::GroupNorm | OpCode::L2Norm => self.norm(op),
            OpCode::Dup | OpCode::Cpy | OpCode::Cont => self.copy(op),
            OpCode::GetRows => self.get_rows(),
            OpCode::SetRows => self.set_rows(),
            OpCode::Concat => self.concat(),
            OpCode::Repeat => self.repeat(),
            OpCode::Argsort | OpCode::TopK => self.sort(op),
            OpCode::MulMat => self.mul_mat(),
            OpCode::MulMatId => self.mul_mat_id(),
            OpCode::Rope | OpCode::RopeBack => self.rope(),
            OpCode::CountEqual => self.count_equal(),
            OpCode::Acc | OpCode::Set => self.assign(op),
            OpCode::Arange => self.arange(),
            OpCode::TimestepEmbedding => self.timestep_embedding(),
            OpCode::Diag | OpCode::DiagMaskInf | OpCode::DiagMaskZero | OpCode::Tri => self.diag(op),
            OpCode::Pad => self.pad(),
            OpCode::PadReflect1d => self.pad_reflect_1d(),
            OpCode::Roll => self.roll(),
            OpCode::SiluBack | OpCode::RmsNormBack | OpCode::SoftMaxBack => self.row_gradient(op),
            OpCode::RepeatBack => self.repeat_back(),
            OpCode::GetRowsBack => self.get_rows_back(),
            OpCode::OutProd => self.out_prod(),
            OpCode::CrossEntropyLoss => self.cross_entropy_loss(),
            OpCode::CrossEntropyLossBack => self.cross_entropy_loss_back(),
            OpCode::OptStepAdamw | OpCode::OptStepSgd => self.opt_step(op),
            OpCode::Log | OpCode::Sin | OpCode::Cos | OpCode::LeakyRelu => self.unary(op),
            OpCode::SoftMax => self.softmax(),
            OpCode::FlashAttnExt => self.flash_attn(),
            OpCode::TopKMask => self.topk_mask(),
            OpCode::Im2col | OpCode::Im2colBack | OpCode::Im2col3d | OpCode::Col2im1d => self.im2col(op),
            OpCode::Conv2d | OpCode::Conv3d | OpCode::Conv2dDw => self.conv(op),
            OpCode::ConvTranspose1d | OpCode::ConvTranspose2d => self.conv_transpose(op),
            OpCode::Pool1d | OpCode::Pool2d | OpCode::Pool2dBack => self.pool(op),
            OpCode::Upscale => self.upscale(),
            OpCode::WinPart | OpCode::WinUnpart | OpCode::GetRelPos | OpCode::AddRelPos => self.window(op),
            OpCode::SsmConv => self.ssm_conv(),
            OpCode::SsmScan => self.ssm_scan(),
            OpCode::RwkvWkv6 | OpCode::RwkvWkv7 | OpCode::GatedLinearAttn => self.linear_attn(op),
            OpCode::GatedDeltaNet => self.delta_net(),
            OpCode::SolveTri => self.solve_tri(),
            OpCode::LightningIndexer => self.lightning_indexer(),
            OpCode::Dsv4HcComb | OpCode::Dsv4HcPre | OpCode::Dsv4HcPost => self.hyper_connections(op),
            OpCode::Sqr | OpCode::Sqrt | OpCode::Unary | OpCode::Scale | OpCode::Clamp | OpCode::Fill => self.unary(op),
            _ => panic!("no generator for {op}: add one in tests/hostile/fuzz_generator/drafts.rs"),
        }
    }

    pub(super) fn binary(&mut self) -> NodeDraft {
        let types = [self.float_type(), self.float_type(), self.float_type()];
        let ne = self.shape(&types);
        let bne = ne.map(|n| self.divisor(n));
        let (a, b) = (self.tensor(types[0], ne), self.tensor(types[1], bne));
        NodeDraft::new(types[2], ne, &[a, b])
    }

    pub(super) fn quantised_add(&mut self) -> NodeDraft {
        let types = [self.weight_type(), F32, self.weight_type()];
        let ne = self.shape(&types);
        let bne = [ne[0], self.divisor(ne[1]), self.divisor(ne[2]), self.divisor(ne[3])];
        let (a, b) = (self.tensor(types[0], ne), self.tensor(F32, bne));
        NodeDraft::new(types[2], ne, &[a, b])
    }

    pub(super) fn add1(&mut self) -> NodeDraft {
        let (ta, tb) = (self.weight_type(), self.pick(&[F32, F32, F16]));
        let ne = self.shape(&[ta]);
        let (a, b) = (self.tensor(ta, ne), self.tensor(tb, [1; 4]));
        NodeDraft::new(ta, ne, &[a, b])
    }

    pub(super) fn count_equal(&mut self) -> NodeDraft {
        let ne = self.shape(&[I32]);
        let (a, b) = (self.index_tensor(I32, ne, 3), self.index_tensor(I32, ne, 3));
        NodeDraft::new(I64, [1; 4], &[a, b])
    }

    pub(super) fn add_id(&mut self) -> NodeDraft {
        let (n, used, tokens, experts) = (self.row(&[F32]).min(1500), self.dim().min(8), self.dim().min(8), self.dim());
        let ne = self.limit_elements([n, used, tokens, 1], 3000);
        let (a, b) = (self.tensor(F32, ne), self.tensor(F32, [n, experts, 1, 1]));
        let ids = self.index_tensor(I32, [ne[1], ne[2], 1, 1], experts);
        NodeDraft::new(F32, ne, &[a, b, ids])
    }

    pub(super) fn unary(&mut self, op: OpCode) -> NodeDraft {
        let types = [self.float_type(), self.float_type()];
        let ne = self.shape(&types);
        let mut draft = NodeDraft::new(types[1], ne, &[self.tensor(types[0], ne)]);
        if op == OpCode::Unary {
            draft.params[0] = self.rng.i32(0..22);
            for k in 1..5 {
                draft.params[k] = self.float_param(0.5);
            }
        } else {
            (draft.params[0], draft.params[1]) = (self.float_param(0.25), self.float_param(2.0));
        }
        draft
    }

    pub(super) fn glu(&mut self) -> NodeDraft {
        let types = [self.float_type(), self.float_type(), self.float_type()];
        let ne = self.shape(&types);
        let mut draft = if self.rng.bool() {
            let (a, b) = (self.tensor(types[0], ne), self.tensor(types[1], ne));
            NodeDraft::new(types[2], ne, &[a, b])
        } else {
            let wide = [2 * ne[0] + self.rng.usize(..8) / 7, ne[1], ne[2], ne[3]];
            NodeDraft::new(types[2], ne, &[self.tensor(types[0], wide)])
        };
        draft.params[0] = self.rng.i32(0..7);
        draft.params[1] = i32::from(draft.srcs.len() == 1 && self.rng.bool());
        (draft.params[2], draft.params[3]) = (self.float_param(1.7), self.float_param(7.0));
        draft
    }

    pub(super) fn reduction(&mut self, op: OpCode) -> NodeDraft {
        let dtype = if op == OpCode::Sum { self.float_type() } else { F32 };
        let mut ne = self.shape(&[dtype]);
        if op == OpCode::Argmax {
            (ne[2], ne[3]) = (1, 1);
        }
        let x = self.tensor(dtype, ne);
        match op {
            OpCode::Sum => NodeDraft::new(dtype, [1; 4], &[x]),
            OpCode::Cumsum => NodeDraft::new(F32, ne, &[x]),
            OpCode::Argmax => NodeDraft::new(I32, [ne[1], 1, 1, 1], &[x]),
            _ => NodeDraft::new(F32, [1, ne[1], ne[2], ne[3]], &[x]),
        }
    }

    pub(super) fn norm(&mut self, op: OpCode) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let mut draft = NodeDraft::new(F32, ne, &[self.tensor(F32, ne)]);
        let eps = self.float_param(1e-5);
        if op == OpCode::GroupNorm {
            draft.params[0] = self.pick(&[1, 1, 2, 2, 3, 4, 32, ne[2] as i32, i32::MAX, 0, -1]);
            draft.params[1] = eps;
        } else {
            draft.params[0] = eps;
        }
        draft
    }

    pub(super) fn copy(&mut self, op: OpCode) -> NodeDraft {
        let (from, to) = if op != OpCode::Cpy {
            let dtype = self.any_type();
            (dtype, dtype)
        } else {
            match self.rng.usize(..4) {
                0 => (self.weight_type(), self.float_type()),
                1 => (self.float_type(), self.weight_type()),
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
        let mut draft = NodeDraft::new(to, other, &[src]);
        if op == OpCode::Cpy && self.rng.bool() {
            let target = self.tensor(to, other);
            draft.srcs.push(Some(target));
            draft.in_place_source = Some(target);
        }
        draft
    }

    pub(super) fn get_rows(&mut self) -> NodeDraft {
        let dtype = if self.one_in(6) { I32 } else { self.weight_type() };
        let (n, rows, k) = (self.row(&[dtype]), self.dim(), self.dim());
        let ne = [n, rows, self.dim().min(4), self.dim().min(3)];
        let ne = self.limit_elements(ne, 6000);
        let (table, ids) = (self.tensor(dtype, ne), self.index_tensor(I32, [k, ne[2], ne[3], 1], ne[1]));
        NodeDraft::new(if dtype == I32 { I32 } else { F32 }, [ne[0], k, ne[2], ne[3]], &[table, ids])
    }

    pub(super) fn set_rows(&mut self) -> NodeDraft {
        let (from, to) = (self.pick(&[F32, F32, F16]), self.weight_type());
        let n = if self.one_in(4) && !to.is_block() { 1 } else { self.row(&[to]) };
        let ne = [n, self.dim(), self.dim().min(4), self.dim().min(3)];
        let ne = self.limit_elements(ne, 6000);
        let r = self.dim().min(9);
        let b = self.tensor(from, [ne[0], r, ne[2], ne[3]]);
        let (c1, c2) = (self.divisor(ne[2]), self.divisor(ne[3]));
        let dtype = self.pick(&[I64, I32]);
        let ids = self.index_tensor(dtype, [r, c1, c2, 1], ne[1]);
        let target = self.tensor(to, ne);
        let mut draft = NodeDraft::new(to, ne, &[b, ids, target]);
        draft.in_place_source = Some(target);
        draft
    }

    pub(super) fn concat(&mut self) -> NodeDraft {
        let dtype = self.any_type();
        let (a, d) = (self.shape(&[dtype]), self.rng.usize(..4));
        let (mut b, mut ne) = (a, a);
        b[d] = if d == 0 { self.row(&[dtype]) } else { self.dim() };
        if self.one_in(10) {
            b[d] = 0;
        }
        ne[d] += b[d];
        let (a, b) = (self.tensor(dtype, a), self.tensor(dtype, b));
        let mut draft = NodeDraft::new(dtype, ne, &[a, b]);
        draft.params[0] = d as i32;
        draft
    }

    pub(super) fn repeat(&mut self) -> NodeDraft {
        let dtype = self.any_type();
        let a = self.shape(&[dtype]);
        let a = self.limit_elements(a, 800);
        let ne = a.map(|n| n * self.rng.usize(1..3));
        NodeDraft::new(dtype, ne, &[self.tensor(dtype, a)])
    }

    pub(super) fn sort(&mut self, op: OpCode) -> NodeDraft {
        let mut ne = self.shape(&[F32]);
        let x = self.tensor(F32, ne);
        if op == OpCode::TopK {
            ne[0] = self.rng.usize(1..=ne[0]);
        }
        let mut draft = NodeDraft::new(I32, ne, &[x]);
        draft.params[0] = self.rng.i32(0..2);
        draft
    }

    pub(super) fn precision(&mut self) -> i32 {
        self.pick(&[0, 0, 0, 10, 15, 20, 30, 40])
    }

    pub(super) fn mul_mat(&mut self) -> NodeDraft {
        let dtype = self.weight_type();
        let k = self.row(&[dtype]);
        let plane = |m: &mut Self| [m.dim().min(3), m.dim().min(2)];
        let [a2, a3] = plane(self);
        let [r2, r3] = plane(self);
        let m = self.pick(&[1, 2, 3, 15, 16, 17, 33, 70]);
        let n = self.pick(&[1, 1, 2, 3, 8, 9, 12, 17, 40]);
        let an = self.limit_elements([k, m, a2, a3], 16_000);
        let mut bn = self.limit_elements([k, n, r2, r3], 6000);
        (bn[2], bn[3]) = (bn[2] * an[2], bn[3] * an[3]);
        let other = if self.one_in(5) { self.float_type() } else { F32 };
        let (a, b) = (self.tensor(dtype, an), self.tensor(other, bn));
        let mut draft = NodeDraft::new(F32, [an[1], bn[1], bn[2], bn[3]], &[a, b]);
        (draft.params[0], draft.params[1], draft.params[3]) = (self.precision(), self.rng.i32(0..2), self.precision());
        draft
    }

    pub(super) fn mul_mat_id(&mut self) -> NodeDraft {
        let dtype = self.weight_type();
        let k = self.row(&[dtype]).min(1024);
        let m = self.pick(&[1, 2, 5, 16, 17, 33]);
        let (experts, nb, per) = (self.dim(), self.dim().min(3), self.dim().min(4));
        let tokens = self.pick(&[1, 1, 2, 5, 19]);
        let an = self.limit_elements([k, m, experts, 1], 16_000);
        let bn = self.limit_elements([k, nb, tokens, 1], 6000);
        let (a, b) = (self.tensor(dtype, an), self.tensor(F32, bn));
        let used = bn[1] * per;
        let ids = self.index_tensor(I32, [used, bn[2], 1, 1], an[2]);
        let mut draft = NodeDraft::new(F32, [an[1], used, bn[2], 1], &[a, b, ids]);
        draft.params[0] = self.precision();
        draft
    }

    pub(super) fn rope(&mut self) -> NodeDraft {
        let dtype = self.pick(&[F32, F32, F16]);
        let mode = self.pick(&[0, 2, 8, 24, 40]);
        let ne = [self.pick(&[2, 4, 6, 64, 66, 128, 258]), self.dim(), self.dim(), self.dim().min(2)];
        let ne = self.limit_elements(ne, 3000);
        let positions = self.index_tensor(I32, [if mode >= 8 { 4 * ne[2] } else { ne[2] }, 1, 1, 1], 5000);
        let mut srcs = vec![self.tensor(dtype, ne), positions];
        let dims = if mode == 24 { ne[0] / 2 } else { 2 * self.rng.usize(1..=ne[0] / 2) };
        if self.rng.bool() {
            let pairs = if mode == 24 { dims } else { dims / 2 };
            let factors = pairs + self.rng.usize(..3);
            srcs.push(self.tensor(F32, [factors, 1, 1, 1]));
        }
        let mut draft = NodeDraft::new(dtype, ne, &srcs);
        let offset = if mode == 24 { 0 } else { 2 * self.rng.usize(..=(ne[0] - dims.min(ne[0])) / 2) };
        draft.params[1] = dims as i32;
        draft.params[2] = mode;
        draft.params[4] = self.pick(&[0, 4096, -1, i32::MAX, i32::MIN]);
        for (k, sane) in [(5, 10000.0), (6, 1.0), (7, 0.0), (8, 1.0), (9, 32.0), (10, 1.0)] {
            draft.params[k] = self.float_param(sane);
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

    pub(super) fn softmax(&mut self) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let mut draft = NodeDraft::new(F32, ne, &[self.layout(F32, ne, true)]);
        draft.packed = true;
        draft.params[0] = self.float_param(0.125);
        let mask = self.rng.bool().then(|| {
            let dtype = self.pick(&[F16, F32]);
            let ne = [ne[0], ne[1] + self.rng.usize(..3) / 2, self.divisor(ne[2]), self.divisor(ne[3])];
            self.layout(dtype, ne, true)
        });
        if mask.is_some() && self.rng.bool() {
            draft.params[1] = self.float_param(8.0);
        }
        let sinks = self.one_in(3).then(|| self.tensor(F32, [ne[2], 1, 1, 1]));
        draft.srcs.extend([mask, sinks]);
        draft
    }

    pub(super) fn flash_attn(&mut self) -> NodeDraft {
        let (tk, tv) = (self.weight_type(), self.weight_type());
        let width =
            |m: &mut Self, t: DType| if t.is_block() { t.block_len() } else { m.pick(&[1, 3, 8, 16, 40, 64, 65]) };
        let (dk, dv) = (width(self, tk), width(self, tv));
        let (kv_heads, batches) = (self.pick(&[1, 1, 2]), self.pick(&[1, 1, 2]));
        let heads = kv_heads * self.pick(&[1, 2, 3, 4, 8]);
        let tokens = self.pick(&[1, 1, 2, 5, 17]);
        let q = self.limit_elements([dk, tokens, heads, batches], 5000);
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
        let mut draft = NodeDraft::new(F32, [dv, heads, q[1], batches], &[]);
        (draft.srcs, draft.packed) = (srcs, true);
        draft.params[0] = self.float_param(0.125);
        if mask.is_some() && self.one_in(3) {
            draft.params[1] = self.float_param(8.0);
        }
        if self.one_in(3) {
            draft.params[2] = self.float_param(30.0);
        }
        draft.params[3] = self.pick(&[0, 10]);
        draft
    }

    pub(super) fn topk_mask(&mut self) -> NodeDraft {
        let dtype = self.pick(&[F16, F32]);
        let ne = self.shape(&[dtype]);
        let rows = |n| [n, ne[1], ne[2], ne[3]];
        let mask = [ne[0], self.divisor(ne[1]), self.divisor(ne[2]), self.divisor(ne[3])];
        let blocks = self.rng.bool().then(|| [self.dim(), self.dim()]);
        let n_pick = blocks.map_or(ne[0], |[_, n_pick]| n_pick);
        // Often an index or two beyond the last one.
        let beyond = |m: &mut Self, n: usize| n + m.rng.usize(..3);
        let (bound, n_top) = (beyond(self, n_pick), self.dim());
        let mut srcs = vec![Some(self.tensor(dtype, mask)), Some(self.index_tensor(I32, rows(n_top), bound))];
        srcs.push(self.rng.bool().then(|| self.tensor(F32, rows(n_pick))));
        srcs.push(blocks.map(|[n_blk, n_pick]| {
            let bound = beyond(self, ne[0]);
            self.index_tensor(I32, [n_blk, n_pick, 1, 1], bound)
        }));
        srcs.push(self.rng.bool().then(|| {
            let (bound, n_extra) = (beyond(self, ne[0]), self.dim());
            self.index_tensor(I32, rows(n_extra), bound)
        }));
        let mut draft = NodeDraft::new(dtype, ne, &[]);
        draft.srcs = srcs;
        draft
    }
}
