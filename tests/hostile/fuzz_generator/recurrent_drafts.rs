//! Generators of the nodes of recurrent models and of DeepSeek V4.

use super::*;

impl FuzzGenerator<'_> {
    /// Index of a record of F32 that is contiguous in most cases.
    fn packed(&mut self, ne: [usize; 4]) -> usize {
        let packed = !self.one_in(12);
        self.layout(F32, ne, packed)
    }

    /// A number of snapshots.
    fn snapshots(&mut self) -> i32 {
        self.pick(&[1, 1, 1, 2, 3, 7, 0, -1, i32::MAX, i32::MIN])
    }

    /// Halves the counts until their product is at most `most` (64 times as many in a large case).
    fn limit_counts<const N: usize>(&mut self, mut counts: [usize; N], most: usize) -> [usize; N] {
        let most = most * (self.graph.size / SMALL).pow(3);
        while counts.iter().product::<usize>() > most && counts.iter().any(|&n| n > 1) {
            let d = self.rng.usize(..N);
            counts[d] = (counts[d] / 2).max(1);
        }
        counts
    }

    pub(super) fn ssm_conv(&mut self) -> NodeDraft {
        let d_conv = self.pick(&[1, 2, 3, 4, 4, 4, 9, 70]);
        let tokens = self.pick(&[1, 1, 2, 5, 63, 64, 65, 140]);
        let channels = self.pick(&[1, 2, 7, 31, 64, 65, 130, 700]);
        let counts = [channels, tokens, self.dim().min(3)];
        let [channels, tokens, sequences] = self.limit_counts(counts, 2000);
        let x = self.packed([d_conv - 1 + tokens, channels, sequences, 1]);
        let w = self.packed([d_conv, channels, 1, 1]);
        NodeDraft::new(F32, [channels, tokens, sequences, 1], &[x, w])
    }

    pub(super) fn ssm_scan(&mut self) -> NodeDraft {
        let n = self.pick(&[1, 8, 15, 16, 16, 32, 64, 128]);
        let by_element = self.one_in(3);
        let hd = if by_element { 1 } else { self.dim() };
        let heads_per_group = self.dim();
        let sequences = self.dim().min(3);
        let counts = [n, hd, heads_per_group, self.dim().min(4), sequences + self.rng.usize(..3)];
        let [n, hd, heads_per_group, groups, slots] = self.limit_counts(counts, 3000);
        let (heads, tokens) = (heads_per_group * groups, self.pick(&[1, 1, 2, 5]));
        let states = self.packed([n, hd, heads, slots]);
        let x = self.packed([hd, heads, tokens, sequences]);
        let dt = self.packed([heads, tokens, sequences, 1]);
        let a = self.packed([if by_element { n } else { 1 }, heads, 1, 1]);
        let b = self.packed([n, groups, tokens, sequences]);
        let c = self.packed([n, groups, tokens, sequences]);
        let ids = self.index_tensor(I32, [sequences, 1, 1, 1], slots);
        let snapshots = if by_element { 1 } else { self.snapshots() };
        let outputs = hd * heads * tokens * sequences;
        let states_out = usize::try_from(snapshots).unwrap_or(1).clamp(1, 8) * n * hd * heads * sequences;
        let mut draft = NodeDraft::new(F32, [outputs + states_out, 1, 1, 1], &[states, x, dt, a, b, c, ids]);
        draft.params[0] = snapshots;
        draft.packed = true;
        draft
    }

    /// The size of a head, heads, tokens, sequences.
    fn head_counts(&mut self) -> [usize; 4] {
        let size = self.pick(&[1, 3, 8, 16, 31, 32, 33, 64, 64]);
        let tokens = self.pick(&[1, 1, 2, 3, 7]);
        let counts = [self.dim().min(4), tokens, self.dim().min(3)];
        let [heads, tokens, sequences] = self.limit_counts(counts, 5000 / (size * size) + 1);
        [size, heads, tokens, sequences]
    }

    pub(super) fn linear_attn(&mut self, op: OpCode) -> NodeDraft {
        let [size, heads, tokens, sequences] = self.head_counts();
        let ne = [size, heads, tokens * sequences, 1];
        let vectors = match op {
            OpCode::GatedLinearAttn => 4,
            OpCode::RwkvWkv6 => 5,
            _ => 6,
        };
        let mut srcs: Vec<_> = (0..vectors).map(|_| self.packed(ne)).collect();
        if op == OpCode::RwkvWkv6 {
            srcs[3] = self.packed([size, heads, 1, 1]);
        }
        srcs.push(self.packed([size * size * heads, sequences, 1, 1]));
        let mut draft = NodeDraft::new(F32, [size * heads, (tokens + size) * sequences, 1, 1], &srcs);
        draft.params[0] = self.float_param(0.25);
        draft.packed = true;
        draft
    }

    pub(super) fn delta_net(&mut self) -> NodeDraft {
        let [size, heads, tokens, sequences] = self.head_counts();
        let q = [size, self.divisor(heads), tokens, self.divisor(sequences)];
        let k = [size, self.dim().min(5), tokens, self.divisor(sequences)];
        let outer = [heads, tokens, sequences];
        let gates = self.pick(&[1, size]);
        let srcs = [
            self.tensor(F32, q),
            self.tensor(F32, k),
            self.tensor(F32, [size, heads, tokens, sequences]),
            self.packed([gates, outer[0], outer[1], outer[2]]),
            self.packed([1, outer[0], outer[1], outer[2]]),
            self.packed([size, size, heads, sequences]),
        ];
        let snapshots = self.snapshots();
        let blocks = usize::try_from(snapshots).unwrap_or(1).clamp(1, 8);
        let rows = tokens * sequences + blocks * size * sequences;
        let mut draft = NodeDraft::new(F32, [size * heads, rows, 1, 1], &srcs);
        draft.params[0] = snapshots;
        draft.packed = true;
        draft
    }

    pub(super) fn solve_tri(&mut self) -> NodeDraft {
        let n = self.pick(&[1, 2, 5, 16, 33, 64]);
        let k = self.pick(&[1, 3, 31, 32, 33, 64]);
        let counts = [self.dim().min(3), self.dim().min(3)];
        let [b2, b3] = self.limit_counts(counts, 4000 / (n * n.max(k)) + 1);
        let srcs = [self.packed([n, n, b2, b3]), self.packed([k, n, b2, b3])];
        let mut draft = NodeDraft::new(F32, [k, n, b2, b3], &srcs);
        draft.packed = true;
        draft
    }

    pub(super) fn lightning_indexer(&mut self) -> NodeDraft {
        let dtype = self.weight_type();
        let width = if dtype.is_block() { dtype.block_len() } else { self.pick(&[1, 3, 16, 40, 128]) };
        let counts = [self.dim(), self.pick(&[1, 1, 2, 5, 17]), self.dim().min(3)];
        let [heads, tokens, batches] = self.limit_counts(counts, 5000 / width + 1);
        let cells = self.pick(&[1, 5, 63, 64, 65, 130]).min(6000 / (width * batches)).max(1);
        let masks = self.divisor(batches);
        let srcs = [
            self.tensor(F32, [width, heads, tokens, batches]),
            self.tensor(dtype, [width, 1, cells, batches]),
            self.tensor(F32, [heads, tokens, 1, batches]),
            self.tensor(F16, [cells, tokens, 1, masks]),
        ];
        NodeDraft::new(F32, [cells, tokens, 1, batches], &srcs)
    }

    pub(super) fn hyper_connections(&mut self, op: OpCode) -> NodeDraft {
        let counts = [self.row(&[F32]), self.pick(&[4, 4, 4, 1, 3, 9]), self.dim()];
        let [width, streams, tokens] = self.limit_counts(counts, 3000);
        let mut draft = match op {
            OpCode::Dsv4HcComb => {
                let scale = 3 + self.rng.usize(..3) / 2;
                let srcs = [
                    self.tensor(F32, [24, tokens, 1, 1]),
                    self.tensor(F32, [scale, 1, 1, 1]),
                    self.tensor(F32, [24, 1, 1, 1]),
                ];
                NodeDraft::new(F32, [4, 4, tokens, 1], &srcs)
            }
            OpCode::Dsv4HcPre => {
                let gated = self.rng.bool();
                let weights = if gated { [width, streams, tokens, 1] } else { [streams, tokens, 1, 1] };
                let srcs = [self.tensor(F32, [width, streams, tokens, 1]), self.tensor(F32, weights)];
                let mut draft = NodeDraft::new(F32, [width, tokens, 1, 1], &srcs);
                draft.params[1] = i32::from(gated);
                draft
            }
            _ => {
                let mut srcs = vec![
                    self.tensor(F32, [width, tokens, 1, 1]),
                    self.tensor(F32, [width, streams, tokens, 1]),
                    self.tensor(F32, [streams, tokens, 1, 1]),
                ];
                if self.rng.bool() {
                    srcs.push(self.tensor(F32, [streams, streams, tokens, 1]));
                }
                NodeDraft::new(F32, [width, streams, tokens, 1], &srcs)
            }
        };
        draft.params[0] = self.float_param(1e-3);
        if op == OpCode::Dsv4HcComb {
            draft.params[1] = self.pick(&[1, 2, 20, 300, 0, -1]);
        }
        draft
    }
}
