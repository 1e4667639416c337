//! Cases of ACC and SET.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::assign::Assign;
use fanout::tensor::DType::{F32, I32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Regions in each dimension; b permuted; a whole tensor; in place.
pub fn run(sweep: &Sweep) {
    let ne = [300, 6, 3, 2];
    let nb = [1200, 7200, 21_600];
    for (b, nb, offset) in [
        ([300, 6, 3, 2], nb, 0),
        ([1, 1, 1, 1], [0; 3], 4),
        ([280, 3, 2, 1], nb, 4 * 20 + 1200),
        ([9, 5, 1, 1], [400, 0, 0], 44),
    ] {
        for accumulate in [false, true] {
            let op = Assign { accumulate, nb, offset, in_place: false };
            let mut case = Case::new();
            let (x, y) = (normal(1, ne.iter().product()), normal(2, b.iter().product()));
            let (a, b) = (case.leaf(F32, ne, &x), case.leaf(F32, b, &y));
            let dst = case.b.node(op, &[Some(a), Some(b)]).unwrap();
            sweep.check_bytes(&case.build(), &[dst], &format!("{op:?}"));
        }
    }
    let mut case = Case::new();
    let a = case.indices(I32, [70, 1, 1, 1], &(0..70).collect::<Vec<_>>());
    let b = case.indices(I32, [3, 5, 1, 1], &(100..115).collect::<Vec<_>>());
    let columns = TensorDesc::strided(I32, [5, 3, 1, 1], [12, 4, 60, 60]).unwrap();
    let b = case.b.view(b, columns, 0).unwrap();
    let op = Assign { accumulate: false, nb: [40, 0, 0], offset: 8, in_place: false };
    let dst = case.b.node(op, &[Some(a), Some(b)]).unwrap();
    sweep.check_bytes(&case.build(), &[dst], "a permuted b");
    in_place(sweep);
}

fn in_place(sweep: &Sweep) {
    let mut case = Case::new();
    let (a, b) = (case.leaf(F32, [64, 5, 1, 1], &normal(3, 320)), case.leaf(F32, [7, 2, 1, 1], &normal(4, 14)));
    let onto: TensorId = case.b.view(a, TensorDesc::contiguous(F32, [64, 5, 1, 1]).unwrap(), 0).unwrap();
    let op = Assign { accumulate: true, nb: [256, 0, 0], offset: 256, in_place: true };
    case.b.node_into(op, &[Some(a), Some(b)], onto).unwrap();
    sweep.check_bytes(&case.build(), &[onto], "in place");
}
