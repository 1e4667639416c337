//! Cases of the norms, alone and fused with the binary ops that follow.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::Op;
use fanout::ops::binary::Binary;
use fanout::ops::norm::Norm;
use fanout::ops::unary::Unary;
use fanout::tensor::{DType::F32, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};
use std::num::NonZeroU32;

const ROWS: [Norm; 3] = [Norm::Norm { eps: 1e-5 }, Norm::RmsNorm { eps: 1e-6 }, Norm::L2Norm { eps: 1e-12 }];

/// Rows kept by a warp or a block, with few and many threads, and longer rows; with and without 16-byte accesses; groups that
/// are rows, contiguous, or neither; all fusions.
pub fn run(sweep: &Sweep) {
    for ne in [
        // A warp per row, a block per row, the maximum row; row lengths that are not multiples of an access.
        [1, 3, 1, 1],
        [64, 9, 3, 2],
        [100, 3, 2, 1],
        [1021, 3, 1, 1],
        [4096, 2, 1, 1],
        [8192, 1, 1, 1],
        // More values per thread: many rows, or long rows.
        [36, 520, 1, 1],
        [23, 20, 13, 2],
        [520, 513, 1, 1],
        [8196, 2, 1, 1],
        [16_384, 1, 1, 1],
        [9001, 2, 1, 1],
        // Rows that are split into pieces.
        [16_388, 2, 1, 1],
        [40_001, 1, 2, 1],
    ] {
        for op in ROWS {
            check_case(sweep, op, TensorDesc::contiguous(F32, ne).unwrap(), 0);
        }
    }
    // An address and strides that are not multiples of 16; every second element; permuted rows.
    let desc = |ne, nb| TensorDesc::strided(F32, ne, nb).unwrap();
    for op in ROWS {
        check_case(sweep, op, desc([64, 3, 1, 1], [4, 256, 768, 768]), 4);
        check_case(sweep, op, desc([64, 3, 2, 1], [4, 260, 1024, 2048]), 0);
        check_case(sweep, op, desc([64, 3, 2, 2], [4, 512, 256, 1536]), 0);
        check_case(sweep, op, desc([50, 3, 1, 1], [8, 400, 1200, 1200]), 0);
        check_case(sweep, op, desc([16_400, 2, 1, 1], [8, 4, 131_200, 131_200]), 0);
    }
    for (ne, groups) in
        [([7, 5, 6, 3], 3), ([16, 16, 64, 2], 32), ([8, 6, 7, 2], 3), ([150, 120, 4, 2], 2), ([33, 31, 50, 1], 2)]
    {
        let op = Norm::GroupNorm { groups: NonZeroU32::new(groups).unwrap(), eps: 1e-6 };
        check_case(sweep, op, TensorDesc::contiguous(F32, ne).unwrap(), 0);
        let row = 4 * ne[0] + 16;
        let plane = row * ne[1];
        check_case(sweep, op, desc(ne, [4, row, plane, plane * ne[2]]), 0);
    }
    for op in [ROWS[0], ROWS[1]] {
        for ne in [[128, 5, 3, 2], [100, 20, 14, 2], [4096, 3, 1, 1], [12_288, 2, 1, 1], [51, 7, 1, 1]] {
            for around in 1..8 {
                fused(sweep, op, ne, [around & 1 != 0, around & 2 != 0, around & 4 != 0]);
            }
        }
    }
}

/// A norm between two tensors of a layout, and in place.
#[track_caller]
fn check_case(sweep: &Sweep, op: Norm, desc: TensorDesc, offset: usize) {
    let mut case = Case::new();
    let values: Vec<f32> = normal(5, desc.elements() + 4).iter().map(|v| v * 2.0 + 1.0).collect();
    let x = if offset == 0 {
        case.leaf_with_desc(desc, &values[4..])
    } else {
        let room = case.leaf(F32, [values.len(), 1, 1, 1], &values);
        case.b.view(room, desc, offset).unwrap()
    };
    let y = case.b.node(op, &[Some(x)]).unwrap();
    let onto = case.b.leaf_with_desc(desc).unwrap();
    case.b.node_into(op, &[Some(x)], onto).unwrap();
    let again = case.b.view(x, desc, 0).unwrap();
    case.b.node_into(op, &[Some(x)], again).unwrap();
    sweep.check(&case.build(), &[y, onto, again], 1e-12, &format!("{op:?} {desc:?} at {offset}"));
}

/// A fused norm in one launch must give the same bytes as its nodes one by one.
#[track_caller]
fn fused(sweep: &Sweep, op: Norm, ne: [usize; 4], [add, mul, plus]: [bool; 3]) {
    if plus && !mul {
        return;
    }
    // Operands: one row for all, one per row, or a few that repeat.
    for repeated in [[ne[0], 1, 1, 1], ne, [ne[0], ne[1], 1, ne[3]]] {
        let what = format!("{op:?} {ne:?} add {add} mul {mul} plus {plus} by {repeated:?}");
        let (case, dsts) = neighbours(op, ne, repeated, [add, mul, plus], true);
        sweep.check(&case, &dsts, 1e-12, &what);
        let got = sweep.check_launches(1, &what, || case.run(&sweep.gpu));
        // Prevent fusion: a node between reads the norm's destination, and intermediate results are not declared dead.
        let (single, alone) = neighbours(op, ne, repeated, [add, mul, plus], false);
        let nodes = 1 + 2 * u64::from(add) + u64::from(mul) + u64::from(plus);
        let want = sweep.check_launches(nodes, &format!("{what}, not fused"), || single.run(&sweep.gpu));
        for (dst, alone) in dsts.into_iter().zip(alone) {
            assert!(got.bytes(dst) == want.bytes(alone), "{what}: the bytes differ from those without fusion");
        }
        if !mul {
            break;
        }
    }
}

/// The graph of a norm with its neighbours, and its results: the sum and the final node.
fn neighbours(
    op: Norm,
    ne: [usize; 4],
    repeated: [usize; 4],
    [add, mul, plus]: [bool; 3],
    passed_on: bool,
) -> (BuiltCase, Vec<TensorId>) {
    let mut case = Case::new();
    let leaf = |case: &mut Case, seed, ne: [usize; 4]| case.leaf(F32, ne, &normal(seed, ne.iter().product()));
    let (a, b) = (leaf(&mut case, 1, ne), leaf(&mut case, 2, ne));
    let (w, bias) = (leaf(&mut case, 3, repeated), leaf(&mut case, 4, repeated));
    // Memory of the norm's result that a node before it reads, so that the norm cannot move ahead to the sum.
    let blocked = (add && !passed_on).then(|| leaf(&mut case, 5, ne));
    let mut dsts = Vec::new();
    let mut node = |op: Op, srcs: &[TensorId], only, onto: Option<TensorId>| {
        let srcs: Vec<_> = srcs.iter().copied().map(Some).collect();
        let dst = match onto {
            Some(onto) => case.b.view(onto, TensorDesc::contiguous(F32, ne).unwrap(), 0).unwrap(),
            None => case.b.leaf(F32, ne).unwrap(),
        };
        let dst = case.b.node_into(op, &srcs, dst).unwrap();
        if only && passed_on {
            case.b.set_use_count(dst, 1).unwrap();
        }
        if !only {
            dsts.push(dst);
        }
        dst
    };
    let x = if add { node(Binary::Add.into(), &[a, b], false, None) } else { a };
    if let Some(blocked) = blocked {
        node(Unary::Sqr.into(), &[blocked], true, None);
    }
    let y = node(op.into(), &[x], mul, blocked);
    let y = if mul { node(Binary::Mul.into(), &[y, w], plus, None) } else { y };
    if plus {
        node(Binary::Add.into(), &[y, bias], false, None);
    }
    (case.build(), dsts)
}
