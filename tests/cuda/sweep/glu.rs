//! Cases of GLU.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::glu::{Glu, GluKind};
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

const TYPES: [DType; 3] = [F32, F16, BF16];

const KINDS: [GluKind; 8] = [
    GluKind::Reglu,
    GluKind::Geglu,
    GluKind::Swiglu,
    GluKind::SwigluOai { alpha: 1.702, limit: 1.25 },
    GluKind::GegluErf,
    GluKind::GegluQuick,
    GluKind::SwigluClamp { limit: 0.75 },
    GluKind::SwigluClamp { limit: -0.5 },
];

/// One source and two sources of every kind; all types; row lengths that are multiples of vectors and thread blocks, and row
/// lengths that are not.
pub fn run(sweep: &Sweep) {
    for kind in KINDS {
        for dtype in TYPES {
            for n in [1, 40, 1021, 2304] {
                two_sources(sweep, Glu { kind, swapped: false }, [dtype; 3], [n, 3, 2, 1]);
                for swapped in [false, true] {
                    one_source(sweep, Glu { kind, swapped }, [dtype; 2], 2 * n);
                }
            }
        }
    }
    // Odd rows: the last element belongs to neither half.
    one_source(sweep, Glu { kind: GluKind::Swiglu, swapped: false }, [F32, F32], 257);
    for a in TYPES {
        for b in TYPES {
            let glu = Glu { kind: GluKind::Swiglu, swapped: false };
            one_source(sweep, Glu { swapped: true, ..glu }, [a, b], 64);
            for d in TYPES {
                two_sources(sweep, glu, [a, b, d], [40, 3, 2, 2]);
            }
        }
    }
    layouts(sweep);
}

#[track_caller]
fn check(sweep: &Sweep, case: Case, dst: TensorId, dtype: DType, what: &str) {
    // Limit of the NMSE. In f16 and BF16, a value next to a rounding boundary may round to the other side.
    let bound = if dtype == F32 { 1e-12 } else { 1e-6 };
    sweep.check(&case.build(), &[dst], bound, what);
}

#[track_caller]
fn two_sources(sweep: &Sweep, glu: Glu, [a, b, d]: [DType; 3], ne: [usize; 4]) {
    let (mut case, n) = (Case::new(), ne.iter().product());
    let (x, g) = (case.leaf(a, ne, &normal(1, n)), case.leaf(b, ne, &normal(2, n)));
    let y = case.b.node_with_output(glu, &[Some(x), Some(g)], OutputSpec { dtype: d, ne }).unwrap();
    check(sweep, case, y, d, &format!("{glu:?} {a} {b} {d} {ne:?}"));
}

#[track_caller]
fn one_source(sweep: &Sweep, glu: Glu, [a, d]: [DType; 2], n: usize) {
    let mut case = Case::new();
    let x = case.leaf(a, [n, 3, 1, 1], &normal(3, 3 * n));
    let y = case.b.node_with_output(glu, &[Some(x)], OutputSpec { dtype: d, ne: [n / 2, 3, 1, 1] }).unwrap();
    check(sweep, case, y, d, &format!("{glu:?} {a} {d} of rows of {n}"));
}

/// Padded rows, permuted dimensions, and elements that are not adjacent.
fn layouts(sweep: &Sweep) {
    let glu = Glu { kind: GluKind::Geglu, swapped: false };
    for dtype in TYPES {
        let size = dtype.block_bytes();
        // `strides` are in elements. The last dimension has one index, so its stride is not used.
        let desc = |n: usize, strides: [usize; 3]| {
            TensorDesc::strided(
                dtype,
                [n, 6, 3, 1],
                [strides[0] * size, strides[1] * size, strides[2] * size, 4000 * size],
            )
            .unwrap()
        };
        let (padded, permuted, not_adjacent) =
            (desc(40, [1, 48, 320]), desc(40, [1, 120, 40]), desc(40, [3, 120, 720]));
        for (x, g) in [(padded, permuted), (permuted, padded), (not_adjacent, padded)] {
            let mut case = Case::new();
            let mut leaf = |t: TensorDesc, seed| case.leaf_with_desc(t, &normal(seed, t.elements()));
            let srcs = [Some(leaf(x, 4)), Some(leaf(g, 5))];
            let y = case.b.node(glu, &srcs).unwrap();
            check(sweep, case, y, dtype, &format!("{dtype} {x:?} {g:?}"));
        }
        for x in [desc(80, [1, 88, 600]), desc(80, [2, 160, 960])] {
            let mut case = Case::new();
            let a = case.leaf_with_desc(x, &normal(6, x.elements()));
            let y = case.b.node(glu, &[Some(a)]).unwrap();
            check(sweep, case, y, dtype, &format!("{dtype} {x:?}"));
        }
    }
}
