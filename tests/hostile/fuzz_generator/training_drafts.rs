//! Generators of the nodes of training: gradients, outer products, losses, steps of optimisers.

use super::*;

impl FuzzGenerator<'_> {
    /// A gradient and another tensor of the same shape.
    pub(super) fn row_gradient(&mut self, op: OpCode) -> NodeDraft {
        let dtype = if op == OpCode::SiluBack { self.pick(&[F32, F32, F16]) } else { F32 };
        let (ne, packed) = (self.shape(&[dtype]), op == OpCode::SoftMaxBack);
        let (dy, x) = (self.layout(dtype, ne, packed), self.layout(dtype, ne, packed));
        let mut draft = NodeDraft::new(dtype, ne, &[dy, x]);
        draft.packed = packed;
        draft.params[0] = self.float_param(0.01);
        draft.params[1] = if self.one_in(10) { self.float_param(8.0) } else { 0 };
        draft
    }

    pub(super) fn repeat_back(&mut self) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let out = ne.map(|n| self.divisor(n));
        NodeDraft::new(F32, out, &[self.tensor(F32, ne)])
    }

    pub(super) fn get_rows_back(&mut self) -> NodeDraft {
        let (dtype, k, rows) = (self.pick(&[F32, F32, F16]), self.dim(), self.dim());
        let n = self.row(&[dtype]);
        let (dy, ids) = (self.tensor(dtype, [n, k, 1, 1]), self.index_tensor(I32, [k, 1, 1, 1], rows));
        NodeDraft::new(F32, [n, rows, 1, 1], &[dy, ids])
    }

    pub(super) fn out_prod(&mut self) -> NodeDraft {
        let dtype = self.weight_type();
        let (n, m, k) = (self.row(&[dtype]), self.pick(&[1, 2, 3, 5, 17, 65, 70]), self.dim());
        let (a2, a3) = (self.dim().min(3), self.dim().min(2));
        let an = self.limit_elements([n, k, a2, a3], 6000);
        let [r2, r3] = [0, 1].map(|_| self.dim().min(2));
        let bn = [m, an[1], an[2] * r2, an[3] * r3];
        let (a, b) = (self.tensor(dtype, an), self.tensor(F32, bn));
        NodeDraft::new(F32, [an[0], m, bn[2], bn[3]], &[a, b])
    }

    pub(super) fn cross_entropy_loss(&mut self) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let (x, t) = (self.tensor(F32, ne), self.tensor(F32, ne));
        NodeDraft::new(F32, [1; 4], &[x, t])
    }

    pub(super) fn cross_entropy_loss_back(&mut self) -> NodeDraft {
        let ne = self.shape(&[F32]);
        let (g, x, t) = (self.tensor(F32, [1; 4]), self.layout(F32, ne, true), self.layout(F32, ne, true));
        let mut draft = NodeDraft::new(F32, ne, &[g, x, t]);
        draft.packed = true;
        draft
    }

    pub(super) fn opt_step(&mut self, op: OpCode) -> NodeDraft {
        let (tensors, constants) = if op == OpCode::OptStepAdamw { (4, 7) } else { (2, 2) };
        let ne = self.shape(&[F32]);
        let ne = self.limit_elements(ne, 1000);
        let mut srcs: Vec<_> = (0..tensors).map(|_| self.tensor(F32, ne)).collect();
        let w = srcs[0];
        srcs.push(self.tensor(F32, [constants, 1, 1, 1]));
        let mut draft = NodeDraft::new(F32, ne, &srcs);
        draft.in_place_source = Some(w).filter(|_| !self.one_in(4));
        draft
    }
}
