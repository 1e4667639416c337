//! Cases of the binary ops with broadcast, and of ADD_ID.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::NO_EXPERT;
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

const TYPES: [DType; 3] = [F32, F16, BF16];

/// Counts of a and b. Broadcasts: none, a row over rows, a single number, one number per row, one row per head, and repeats of
/// more than one element. Row lengths: multiples of a vector, of a block of threads, and neither.
const SHAPES: [([usize; 4], [usize; 4]); 13] = [
    ([1, 1, 1, 1], [1, 1, 1, 1]),
    ([1021, 3, 1, 1], [1021, 3, 1, 1]),
    ([2560, 5, 1, 1], [2560, 1, 1, 1]),
    ([4104, 3, 2, 1], [4104, 1, 2, 1]),
    ([16, 300, 2, 1], [16, 1, 1, 1]),
    ([2048, 3, 1, 1], [1, 1, 1, 1]),
    ([2056, 3, 2, 1], [1, 3, 2, 1]),
    ([96, 7, 5, 2], [96, 7, 1, 2]),
    ([96, 7, 5, 2], [1, 7, 1, 2]),
    ([1, 40, 3, 1], [1, 40, 1, 1]),
    ([48, 6, 4, 1], [16, 3, 2, 1]),
    ([12, 4, 6, 2], [4, 2, 3, 1]),
    ([33, 5, 3, 2], [33, 5, 1, 1]),
];

pub fn run(sweep: &Sweep) {
    for a in TYPES {
        for b in TYPES {
            for d in TYPES {
                for (k, (ane, bne)) in SHAPES.into_iter().enumerate() {
                    let op = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div][k % 4];
                    check_case(sweep, op, [a, b, d], ane, bne);
                }
            }
        }
        check_case(sweep, Binary::Div, [a; 3], [64, 3, 1, 1], [64, 3, 1, 1]);
        for b in TYPES {
            check_case(sweep, Binary::Add1, [a, b, a], [1021, 3, 2, 1], [1; 4]);
        }
    }
    // More rows than resident threads, so that each thread iterates over several rows.
    check_case(sweep, Binary::Mul, [F32; 3], [8, 280_000, 1, 1], [8, 1, 1, 1]);
    not_a_number(sweep);
    layouts(sweep);
    add_id(sweep);
}

/// A NaN among the numbers of one vector store.
fn not_a_number(sweep: &Sweep) {
    let mut values = normal(5, 64);
    values[13] = f32::NAN;
    let mut case = Case::new();
    let (x, y) = (case.leaf(F16, [64, 1, 1, 1], &values), case.leaf(F16, [64, 1, 1, 1], &normal(6, 64)));
    let dst = case.b.node(Binary::Add, &[Some(x), Some(y)]).unwrap();
    sweep.check_bytes(&case.build(), &[dst], "a NaN of F16");
}

#[track_caller]
fn check_case(sweep: &Sweep, op: Binary, [a, b, d]: [DType; 3], ane: [usize; 4], bne: [usize; 4]) {
    let mut case = Case::new();
    let x = case.leaf(a, ane, &normal(1, ane.iter().product()));
    let y = case.leaf(b, bne, &uniform(2, bne.iter().product(), 0.5, 2.0));
    let dst = case.b.node_with_output(op, &[Some(x), Some(y)], OutputSpec { dtype: d, ne: ane }).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{op:?} {a} {b} {d} {ane:?} {bne:?}"));
}

/// Layouts: sources at any offset, padded and permuted sources, a second source with strided elements, and in-place operation.
fn layouts(sweep: &Sweep) {
    for dtype in TYPES {
        let size = dtype.block_bytes();
        for offset in [0, 1, 4] {
            let ne = [40, 6, 3, 1];
            let desc = |nb: [usize; 3]| {
                TensorDesc::strided(dtype, ne, [nb[0] * size, nb[1] * size, nb[2] * size, 1000 * size]).unwrap()
            };
            let (packed, padded, permuted, stepped) =
                (desc([1, 40, 240]), desc([1, 44, 320]), desc([1, 120, 40]), desc([3, 120, 720]));
            for (a, b) in
                [(packed, packed), (padded, packed), (permuted, padded), (packed, permuted), (padded, stepped)]
            {
                let mut case = Case::new();
                let at = offset * size;
                let (x, y) = (view(&mut case, a, at, 3), view(&mut case, b, at, 4));
                let onto = case.b.node(Binary::Add, &[Some(x), Some(y)]).unwrap();
                let place = case.b.view(x, a, 0).unwrap();
                let first = case.b.node_into(Binary::Sub, &[Some(x), Some(y)], place).unwrap();
                sweep.check_bytes(&case.build(), &[onto, first], &format!("{dtype} at {offset}, {a:?} {b:?}"));
            }
        }
    }
}

fn view(case: &mut Case, desc: TensorDesc, at: usize, seed: u64) -> TensorId {
    let n = (at + desc.extent()).div_ceil(desc.dtype().block_bytes());
    let memory = case.leaf(desc.dtype(), [n, 1, 1, 1], &normal(seed, n));
    case.b.view(memory, desc, at).unwrap()
}

fn add_id(sweep: &Sweep) {
    for n in [1, 7, 64, 2050, 4096] {
        let (used, tokens, experts) = (3, 5, 4);
        let id = |k: usize| if k % 5 == 2 { NO_EXPERT } else { (k * 7 % experts) as i64 };
        let ids: Vec<i64> = (0..used * tokens).map(id).collect();
        let mut case = Case::new();
        let a = case.leaf(F32, [n, used, tokens, 1], &normal(7, n * used * tokens));
        let b = case.leaf(F32, [n, experts, 1, 1], &normal(8, n * experts));
        let i = case.indices(DType::I32, [used, tokens, 1, 1], &ids);
        let dst = case.b.node(Binary::AddId, &[Some(a), Some(b), Some(i)]).unwrap();
        sweep.check_bytes(&case.build(), &[dst], &format!("ADD_ID {n}"));
    }
}
