//! Generators of nodes whose elements are moved or chosen by their indices: regions, sequences, diagonals, paddings.

use super::*;

impl FuzzGenerator<'_> {
    /// SET or ACC. The region is mostly inside of dst.
    pub(super) fn assign(&mut self, op: OpCode) -> NodeDraft {
        let dtype = if op == OpCode::Acc { F32 } else { self.pick(&[F32, F32, I32, F16, I64]) };
        let ne = self.shape(&[dtype]);
        let size = dtype.block_bytes() as i32;
        let nb = [ne[0], ne[0] * ne[1], ne[0] * ne[1] * ne[2]].map(|n| n as i32 * size);
        let bne = ne.map(|n| self.rng.usize(1..=n));
        let (a, b) = (self.layout(dtype, ne, true), self.tensor(dtype, bne));
        let mut draft = NodeDraft::new(dtype, ne, &[a, b]);
        draft.packed = true;
        for (d, stride) in nb.into_iter().enumerate() {
            draft.params[d] = if self.one_in(6) { self.pick(&[0, size, 1, -1, i32::MIN, i32::MAX]) } else { stride };
        }
        let last: i32 = (0..4).map(|d| (ne[d] - bne[d]) as i32 * if d == 0 { size } else { nb[d - 1] }).sum();
        draft.params[3] = if self.one_in(6) { self.pick(&[1, last + 1, -1, i32::MAX]) } else { last };
        draft.params[4] = i32::from(self.rng.bool());
        draft.in_place_source = Some(a).filter(|_| self.rng.bool());
        draft
    }

    pub(super) fn arange(&mut self) -> NodeDraft {
        let (n, odd) = (self.row(&[F32]), self.one_in(5));
        let (start, step) = (self.rng.i32(-9..9) as f32, self.pick(&[0.25, 1.0, 3.0]));
        let mut draft = NodeDraft::new(F32, [n, 1, 1, 1], &[]);
        draft.params[0] = start.to_bits() as i32;
        draft.params[1] = (start + step * n as f32).to_bits() as i32;
        draft.params[2] = if odd { self.float_param(0.0) } else { step.to_bits() as i32 };
        draft
    }

    pub(super) fn timestep_embedding(&mut self) -> NodeDraft {
        let (dim, n) = (self.row(&[F32]), self.dim());
        let mut draft = NodeDraft::new(F32, [dim, n, 1, 1], &[]);
        draft.srcs.push(Some(self.tensor(F32, [n, 1, 1, 1])));
        draft.params[0] = if self.one_in(8) { self.pick(&[0, -1, i32::MAX, i32::MIN]) } else { dim as i32 };
        draft.params[1] = self.pick(&[10_000, 1, 0, -5, i32::MAX, i32::MIN]);
        draft
    }

    pub(super) fn diag(&mut self, op: OpCode) -> NodeDraft {
        let dtype = self.float_type();
        let mut ne = self.shape(&[dtype]);
        if op == OpCode::Diag || op == OpCode::Tri {
            ne[0] = ne[0].min(70);
            ne[1] = ne[0];
            (ne[2], ne[3]) = (ne[2].min(3), ne[3].min(2));
        }
        let from = if op == OpCode::Diag { [ne[0], 1, ne[2], ne[3]] } else { ne };
        let x = self.layout(dtype, from, op == OpCode::Tri);
        let mut draft = NodeDraft::new(dtype, ne, &[x]);
        draft.params[0] = if op == OpCode::Tri && !self.one_in(8) {
            self.pick(&[0, 1, 2, 3])
        } else {
            self.pick(&[0, 0, 1, 2, 3, 7, 1000, i32::MAX, -1, i32::MIN])
        };
        draft
    }

    pub(super) fn pad(&mut self) -> NodeDraft {
        let dtype = self.float_type();
        let ne = self.shape(&[dtype]);
        let ne = self.limit_elements(ne, 600);
        let (mut out, mut params) = (ne, [0; 16]);
        for d in 0..4 {
            for side in 0..2 {
                let most = out[d].min(5) as i32;
                let odd = self.one_in(40);
                let by = if odd { self.pick(&[i32::MIN, i32::MAX, -5000]) } else { self.rng.i32(1 - most..=most) };
                params[2 * d + side] = by;
                out[d] = out[d].saturating_add_signed(if odd { 0 } else { by as isize });
            }
        }
        let mut draft = NodeDraft::new(dtype, out, &[self.tensor(dtype, ne)]);
        (draft.params, draft.params[8]) = (params, i32::from(self.rng.bool()));
        draft
    }

    pub(super) fn pad_reflect_1d(&mut self) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let ne = self.limit_elements(ne, 1000);
        let [before, after] = [0, 1].map(|_| self.rng.usize(..ne[0]));
        let x = self.layout(F32, ne, true);
        let mut draft = NodeDraft::new(F32, [ne[0] + before + after, ne[1], ne[2], ne[3]], &[x]);
        (draft.params[0], draft.params[1]) = (before as i32, after as i32);
        if self.one_in(10) {
            draft.params[self.rng.usize(..2)] = self.pick(&[-1, ne[0] as i32, i32::MAX, i32::MIN]);
        }
        draft
    }

    pub(super) fn roll(&mut self) -> NodeDraft {
        let dtype = self.pick(&[F32, F32, F16, I32, I64]);
        let ne = self.shape(&[dtype]);
        let mut draft = NodeDraft::new(dtype, ne, &[self.tensor(dtype, ne)]);
        for d in 0..4 {
            let n = ne[d] as i32;
            draft.params[d] =
                if self.one_in(20) { self.pick(&[n, -n, i32::MIN, i32::MAX]) } else { self.rng.i32(1 - n..n) };
        }
        draft
    }
}
