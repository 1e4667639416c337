//! Cases of the reductions: sums, means, ARGMAX, CUMSUM and COUNT_EQUAL.

use super::Sweep;
use fanout::device::Support;
use fanout::ops::reduce::Reduce;
use fanout::ops::{NodeView, Op, Sources};
use fanout::tensor::DType::{BF16, F16, F32, I32};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Rows reduced by a warp, by a block, and in pieces; with and without 16-byte accesses; sums of each type, contiguous and
/// strided.
pub fn run(sweep: &Sweep) {
    for ne in [
        [1, 1, 1, 1],
        [5, 9, 2, 3],
        [64, 11, 3, 1],
        [1021, 3, 2, 1],
        [1024, 3, 1, 1],
        [5000, 4, 1, 1],
        [32_768, 2, 1, 1],
        [70_001, 1, 1, 1],
    ] {
        rows(sweep, TensorDesc::contiguous(F32, ne).unwrap(), 0);
    }
    let desc = |ne, nb| TensorDesc::strided(F32, ne, nb).unwrap();
    rows(sweep, desc([64, 3, 1, 1], [4, 256, 768, 768]), 4);
    rows(sweep, desc([64, 3, 2, 1], [4, 512, 256, 1536]), 0);
    rows(sweep, desc([50, 3, 5, 2], [8, 400, 1200, 6000]), 0);
    rows(sweep, desc([20_000, 2, 1, 1], [8, 4, 160_000, 160_000]), 0);
    extremes(sweep);
    count_equal(sweep);
    for from in [F32, F16, BF16] {
        for n in [1, 7, 1000, 4099, 70_000] {
            for offset in [0, 1] {
                sum(sweep, from, n, offset);
            }
        }
        let size = from.block_bytes();
        let gaps = TensorDesc::strided(from, [20, 5, 3, 2], [2 * size, 50 * size, 300 * size, 900 * size]).unwrap();
        let mut case = Case::new();
        let x = case.leaf_with_desc(gaps, &quarters(3, 600));
        let y = case.b.node(Reduce::Sum, &[Some(x)]).unwrap();
        sweep.check_bytes(&case.build(), &[y], &format!("SUM of strided {from}"));
    }
}

/// Fewer and more elements than a block counts, some of them equal; tensors of different layouts.
fn count_equal(sweep: &Sweep) {
    for (ne, gap) in [([1, 1, 1, 1], 0), ([70, 9, 2, 3], 8), ([20_001, 2, 1, 1], 0)] {
        let n = ne.iter().product::<usize>();
        let mut case = Case::new();
        let [x, y] = [(5, gap), (7, 0)].map(|(modulus, gap)| {
            let row = 4 * ne[0] + gap;
            let desc = TensorDesc::strided(I32, ne, [4, row, row * ne[1], row * ne[1] * ne[2]]).unwrap();
            let values: Vec<i64> =
                (0..(n + ne[1] * ne[2] * ne[3] * gap / 4) as i64).map(|i| i * i % modulus - 2).collect();
            let memory = case.indices(I32, [values.len(), 1, 1, 1], &values);
            case.b.view(memory, desc, 0).unwrap()
        });
        let count = case.b.node(Reduce::CountEqual, &[Some(x), Some(y)]).unwrap();
        sweep.check_bytes(&case.build(), &[count], &format!("COUNT_EQUAL of {ne:?}"));
    }
}

/// Support queries for shapes that are too large to run here, and for empty rows, which no graph has.
fn extremes(sweep: &Sweep) {
    for (op, from, to) in [
        (Reduce::SumRows, [0, 5, 1, 1], [1, 5, 1, 1]),
        (Reduce::Mean, [0, 5, 1, 1], [1, 5, 1, 1]),
        (Reduce::Sum, [1 << 31, 1, 1, 1], [1; 4]),
    ] {
        let [x, y] = [from, to].map(|ne| TensorDesc::contiguous(F32, ne).unwrap());
        let op = Op::from(op);
        let node = NodeView { op: &op, dst: &y, srcs: Sources::new(op.code(), &[Some(&x)]), aligned: true };
        assert_eq!(sweep.gpu.device.support(node), Support::Yes, "{op:?} of {from:?}");
    }
}

/// Few distinct values: the maximum occurs several times, and sums are exact in any order.
fn quarters(seed: u64, n: usize) -> Vec<f32> {
    normal(seed, n).iter().map(|v| (v * 4.0).round() / 4.0).collect()
}

#[track_caller]
fn rows(sweep: &Sweep, desc: TensorDesc, offset: usize) {
    let mut case = Case::new();
    let values = quarters(8, desc.elements() + 4);
    let x = if offset == 0 {
        case.leaf_with_desc(desc, &values[4..])
    } else {
        let room = case.leaf(F32, [values.len(), 1, 1, 1], &values);
        case.b.view(room, desc, offset).unwrap()
    };
    let [n0, n1, n2, n3] = desc.ne();
    let mut dsts = Vec::new();
    for op in [Reduce::SumRows, Reduce::Mean, Reduce::Cumsum] {
        dsts.push(case.b.node(op, &[Some(x)]).unwrap());
        // A strided destination.
        let n0 = if op == Reduce::Cumsum { n0 } else { 1 };
        let row = 4 * n0 + 8;
        let gaps = TensorDesc::strided(F32, [n0, n1, n2, n3], [4, row, row * n1, row * n1 * n2]).unwrap();
        let onto = case.b.leaf_with_desc(gaps).unwrap();
        dsts.push(case.b.node_into(op, &[Some(x)], onto).unwrap());
    }
    if n2 * n3 == 1 {
        dsts.push(case.b.node(Reduce::Argmax, &[Some(x)]).unwrap());
        let gaps = TensorDesc::strided(I32, [n1, 1, 1, 1], [12, 12 * n1, 12 * n1, 12 * n1]).unwrap();
        let onto = case.b.leaf_with_desc(gaps).unwrap();
        dsts.push(case.b.node_into(Reduce::Argmax, &[Some(x)], onto).unwrap());
    }
    sweep.check_bytes(&case.build(), &dsts, &format!("rows of {desc:?} at {offset}"));
}

/// SUM of all elements but the first `offset`.
#[track_caller]
fn sum(sweep: &Sweep, from: DType, n: usize, offset: usize) {
    let mut case = Case::new();
    let values = quarters(9, n + offset);
    let room = case.leaf(from, [n + offset, 1, 1, 1], &values);
    let x = TensorDesc::contiguous(from, [n, 1, 1, 1]).unwrap();
    let x = case.b.view(room, x, offset * from.block_bytes()).unwrap();
    let y = case.b.node(Reduce::Sum, &[Some(x)]).unwrap();
    sweep.check_bytes(&case.build(), &[y], &format!("SUM of {n} {from} from {offset} on"));
}
