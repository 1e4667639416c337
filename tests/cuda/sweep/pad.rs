//! Cases of PAD, PAD_REFLECT_1D and ROLL.

use super::Sweep;
use fanout::ops::pad::Pad;
use fanout::tensor::DType::F32;
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Rows longer and shorter than a block of threads, padding on each side of each dimension, strided sources.
pub fn run(sweep: &Sweep) {
    for (ne, before, after) in [
        ([5, 3, 2, 2], [1, 0, 2, 1], [0, 4, 1, 1]),
        ([300, 7, 1, 1], [3, 0, 0, 0], [500, 1, 0, 0]),
        ([7, 5, 3, 1], [-2, -1, 0, 1], [1, 2, -1, 0]),
        ([1, 1, 1, 1], [0; 4], [0; 4]),
    ] {
        for circular in [false, true] {
            check(sweep, Pad::Pad { before, after, circular }, ne);
        }
    }
    for (n, before, after) in [(2, 1, 1), (300, 299, 7), (9, 0, 8)] {
        check(sweep, Pad::Reflect { before, after }, [n, 3, 2, 1]);
    }
    for (ne, shifts) in [([7, 5, 3, 2], [3, -2, 1, -1]), ([513, 2, 1, 1], [-512, 1, 0, 0]), ([1, 1, 1, 1], [0; 4])] {
        check(sweep, Pad::Roll { shifts }, ne);
    }
    // Every second element of columns that are stored as rows.
    let mut case = Case::new();
    let memory = case.leaf(F32, [400, 1, 1, 1], &normal(5, 400));
    let desc = TensorDesc::strided(F32, [5, 12, 3, 1], [96, 8, 480, 1440]).unwrap();
    let x = case.b.view(memory, desc, 0).unwrap();
    let pad = Pad::Pad { before: [1, 2, 0, 0], after: [0, 0, 1, 1], circular: false };
    let y = case.b.node(pad, &[Some(x)]).unwrap();
    sweep.check_bytes(&case.build(), &[y], "a permuted source");
}

#[track_caller]
fn check(sweep: &Sweep, op: Pad, ne: [usize; 4]) {
    let mut case = Case::new();
    let x = case.leaf(F32, ne, &normal(4, ne.iter().product()));
    let y = case.b.node(op, &[Some(x)]).unwrap();
    sweep.check_bytes(&case.build(), &[y], &format!("{op:?} {ne:?}"));
}
