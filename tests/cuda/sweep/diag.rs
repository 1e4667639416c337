//! Cases of DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO and TRI.

use super::Sweep;
use fanout::ops::diag::{Diag, Triangle};
use fanout::tensor::DType::F32;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Rows longer and shorter than a block of threads; masks in place too.
pub fn run(sweep: &Sweep) {
    for n in [1, 3, 65, 300] {
        check(sweep, Diag::Diag, [n, 1, 3, 2]);
        for kind in Triangle::ALL {
            check(sweep, Diag::Tri(kind), [n, n, 2, 2]);
        }
        for n_past in [0, 1, 7] {
            check(sweep, Diag::MaskInf { n_past }, [n, 5, 3, 2]);
            check(sweep, Diag::MaskZero { n_past }, [n, 5, 3, 2]);
        }
    }
    let mut case = Case::new();
    let x = case.leaf(F32, [70, 9, 2, 1], &normal(4, 70 * 9 * 2));
    let onto = case.b.view(x, fanout::tensor::TensorDesc::contiguous(F32, [70, 9, 2, 1]).unwrap(), 0).unwrap();
    case.b.node_into(Diag::MaskInf { n_past: 3 }, &[Some(x)], onto).unwrap();
    sweep.check_bytes(&case.build(), &[onto], "in place");
}

#[track_caller]
fn check(sweep: &Sweep, op: Diag, ne: [usize; 4]) {
    let mut case = Case::new();
    let x = case.leaf(F32, ne, &normal(3, ne.iter().product()));
    let y = case.b.node(op, &[Some(x)]).unwrap();
    sweep.check_bytes(&case.build(), &[y], &format!("{op:?} {ne:?}"));
}
