//! DUP, CPY and CONT: copies between layouts, shapes and types on every device, and the shape rules.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::copy::CopyOp;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::quant::{dequantiser, quantiser};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

const COPIES: [CopyOp; 3] = [CopyOp::Dup, CopyOp::Cpy, CopyOp::Cont];

/// A leaf of any type and layout with random bytes.
fn random_leaf(case: &mut Case, desc: TensorDesc) -> TensorId {
    let mut rng = fastrand::Rng::with_seed(desc.extent() as u64);
    let bytes = (0..desc.extent()).map(|_| rng.u8(..)).collect();
    let memory = case.raw(DType::I8, [desc.extent(), 1, 1, 1], bytes);
    case.b.view(memory, desc, 0).unwrap()
}

/// A layout in which dimension `order[0]` is the densest, then `order[1]` and so on, with `gap` unused blocks after each of
/// its rows.
fn permuted(dtype: DType, ne: [usize; 4], order: [usize; 4], gap: usize) -> TensorDesc {
    let blocks = [ne[0] / dtype.block_len(), ne[1], ne[2], ne[3]];
    let (mut nb, mut step) = ([0; 4], dtype.block_bytes());
    for (k, d) in order.into_iter().enumerate() {
        nb[d] = step;
        step *= blocks[d];
        if k == 0 {
            step += gap * dtype.block_bytes();
        }
    }
    TensorDesc::strided(dtype, ne, nb).unwrap()
}

#[test]
fn equal_types_are_copied_bytewise() {
    for &dtype in DType::ALL {
        let ne = [3 * dtype.block_len(), 5, 2, 3];
        for (order, gap) in [([0, 1, 2, 3], 0), ([0, 2, 1, 3], 1), ([1, 0, 2, 3], 0), ([3, 2, 1, 0], 2)] {
            for (copy, to) in COPIES.into_iter().zip([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1]]) {
                let mut case = Case::new();
                let src = random_leaf(&mut case, permuted(dtype, ne, order, gap));
                let dst = random_leaf(&mut case, permuted(dtype, ne, to, 1));
                case.b.node_into(copy, &[Some(src)], dst).unwrap();
                let case = case.build();
                for on in devices() {
                    assert!(
                        case.run(on).bytes(dst) == case.bytes(src),
                        "{dtype} {order:?} {gap} {copy:?} {to:?} {}",
                        on.name
                    );
                }
            }
        }
    }
}

/// Enough elements for many tiles and all workers, with odd edges.
#[test]
fn large_copies_cover_all_elements() {
    let shapes = [[1, 1, 1, 1], [30_001, 1, 1, 1], [130, 131, 2, 1], [1, 300, 70, 1], [7, 500, 1, 9]];
    for ne in shapes {
        for dtype in [DType::F32, DType::I64, DType::I8] {
            for order in [[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3], [3, 1, 2, 0]] {
                let mut case = Case::new();
                let src = random_leaf(&mut case, permuted(dtype, ne, order, 0));
                let dst = case.b.node(CopyOp::Cont, &[Some(src)]).unwrap();
                let case = case.build();
                for on in devices() {
                    assert!(case.run(on).bytes(dst) == case.bytes(src), "{ne:?} {dtype} {order:?} {}", on.name);
                }
            }
        }
    }
}

/// As many matrices as exceed the blocks of a grid in y and z (65,535) at 8 matrices a block.
#[test]
fn copies_of_many_matrices_cover_all() {
    let ne = [1, 1, 524_290, 1];
    for to in [DType::F32, DType::F16] {
        let mut case = Case::new();
        let src = case.leaf_with_desc(permuted(DType::F32, ne, [0, 1, 2, 3], 1), &normal(14, 524_290));
        let dst = case.b.node_with_output(CopyOp::Cpy, &[Some(src)], OutputSpec { dtype: to, ne }).unwrap();
        let case = case.build();
        let (want, tolerance) = (case.values(src), if to == DType::F32 { 0.0 } else { rounding(to) });
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, tolerance, 0.0, &format!("{to} {}", on.name));
        }
    }
}

#[test]
fn copies_between_different_shapes_keep_the_element_order() {
    use DType::{F32, Q4_0, Q8_0};
    let cases = [
        (F32, [6, 4, 1, 1], [8, 3, 1, 1]),
        (F32, [6, 35, 2, 1], [2, 7, 3, 10]),
        (F32, [5, 7, 11, 13], [13, 11, 7, 5]),
        (F32, [64, 3, 70, 1], [192, 70, 1, 1]),
        (F32, [6, 10, 15, 7], [4, 9, 25, 7]),
        (F32, [9000, 5, 1, 1], [15_000, 3, 1, 1]),
        (Q8_0, [64, 6, 1, 1], [96, 4, 1, 1]),
        (Q4_0, [96, 5, 2, 1], [160, 6, 1, 1]),
    ];
    for (dtype, from, to) in cases {
        for (i, order) in [[0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 2, 3], [3, 2, 1, 0]].into_iter().enumerate() {
            for gap in [0, 1] {
                let mut case = Case::new();
                let src = random_leaf(&mut case, permuted(dtype, from, order, gap));
                let packed = case.b.node_with_output(CopyOp::Cont, &[Some(src)], OutputSpec { dtype, ne: to }).unwrap();
                let desc = permuted(dtype, to, [[0, 2, 1, 3], [1, 0, 2, 3]][i % 2], gap);
                let target = random_leaf(&mut case, desc);
                let dst = case.b.view(target, desc, 0).unwrap();
                case.b.node_into(CopyOp::Cpy, &[Some(src), Some(target)], dst).unwrap();
                let case = case.build();
                for on in devices() {
                    let outcome = case.run(on);
                    let what = format!("{dtype} {from:?} {to:?} {order:?} {gap} {}", on.name);
                    assert!(outcome.bytes(packed) == case.bytes(src), "packed {what}");
                    assert!(outcome.bytes(dst) == case.bytes(src), "strided {what}");
                }
            }
        }
    }
}

#[test]
fn floats_and_integers_convert() {
    use DType::{BF16, F16, F32, I32};
    let ne = [37, 70, 3, 1];
    let values: Vec<f32> = normal(1, 37 * 70 * 3).into_iter().map(|v| 1000.0 * v).collect();
    for from in [F32, F16, BF16, I32] {
        for to in [F32, F16, BF16, I32] {
            if from == I32 && (to == F16 || to == BF16) {
                continue;
            }
            for (order, dst_ne) in
                [([0, 1, 2, 3], [35, 111, 2, 1]), ([1, 0, 2, 3], ne), ([0, 2, 1, 3], [37, 210, 1, 1])]
            {
                let mut case = Case::new();
                let src = case.leaf_with_desc(permuted(from, ne, order, 1), &values);
                let dst =
                    case.b.node_with_output(CopyOp::Cpy, &[Some(src)], OutputSpec { dtype: to, ne: dst_ne }).unwrap();
                let case = case.build();
                let mut want = case.values(src);
                if to == I32 {
                    want.iter_mut().for_each(|v| *v = v.trunc());
                }
                let tolerance = if from == to || to == I32 || to == F32 { 0.0 } else { rounding(to) };
                for on in devices() {
                    let what = format!("{from} {to} {order:?} {dst_ne:?} {}", on.name);
                    assert_close(&case.run(on).values(dst), &want, tolerance, 0.0, &what);
                }
            }
        }
    }
}

#[test]
fn conversion_to_integers_saturates() {
    let mut case = Case::new();
    let src = case.leaf(DType::F32, [5, 1, 1, 1], &[f32::NAN, f32::INFINITY, -1e30, -0.9, 1.9]);
    let dst =
        case.b.node_with_output(CopyOp::Cpy, &[Some(src)], OutputSpec { dtype: DType::I32, ne: [5, 1, 1, 1] }).unwrap();
    let case = case.build();
    for on in devices() {
        let want = [0.0, f64::from(i32::MAX), f64::from(i32::MIN), 0.0, 1.0];
        assert_eq!(case.run(on).values(dst), want, "{}", on.name);
    }
}

/// For all layouts and shapes of source and destination, the result has the blocks of the contiguous values in order.
#[test]
fn blocks_convert_from_and_to_floats() {
    for &dtype in DType::ALL.iter().filter(|t| t.is_block() || !t.is_float() && dequantiser(**t).is_some()) {
        let n = dtype.block_len();
        let ne = [2 * n, 3, 5, 1];
        let values = normal(2, 30 * n);
        let layouts = [
            (ne, ne, [0, 1, 2, 3]),
            (ne, ne, [1, 2, 0, 3]),
            (ne, [6 * n, 5, 1, 1], [0, 2, 1, 3]),
            ([6 * n, 5, 1, 1], ne, [0, 1, 2, 3]),
            ([3 * n, 10, 1, 1], ne, [0, 1, 2, 3]),
        ];
        for (k, (from, to, order)) in layouts.into_iter().enumerate() {
            for float in [DType::F32, [DType::F16, DType::BF16][k % 2]] {
                let what = format!("{dtype} {float} {from:?} {to:?} {order:?}");
                if let Some(quantise) = quantiser(dtype) {
                    let mut case = Case::new();
                    let src = case.leaf_with_desc(permuted(float, from, order, 1), &values);
                    let dst = case.b.node_with_output(CopyOp::Cpy, &[Some(src)], OutputSpec { dtype, ne: to }).unwrap();
                    let case = case.build();
                    let packed: Vec<f32> = case.values(src).iter().map(|&v| v as f32).collect();
                    let mut want = vec![0; 30 * dtype.block_bytes()];
                    quantise(&packed, &mut want);
                    for on in devices() {
                        assert!(case.run(on).bytes(dst) == want, "to {what} {}", on.name);
                    }
                }
                if dequantiser(dtype).is_some() {
                    let mut case = Case::new();
                    let src = case.leaf_with_desc(permuted(dtype, from, order, 1), &values);
                    let dst = case
                        .b
                        .node_with_output(CopyOp::Cpy, &[Some(src)], OutputSpec { dtype: float, ne: to })
                        .unwrap();
                    let case = case.build();
                    let tolerance = if float == DType::F32 { 0.0 } else { rounding(float) };
                    for on in devices() {
                        let got = case.run(on).values(dst);
                        assert_close(&got, &case.values(src), tolerance, 1e-7, &format!("from {what} {}", on.name));
                    }
                }
            }
        }
    }
}

#[test]
fn contiguous_floats_need_no_whole_blocks_in_a_row() {
    let values = normal(3, 192);
    let mut case = Case::new();
    let floats = case.leaf(DType::F32, [48, 4, 1, 1], &values);
    let blocks = case
        .b
        .node_with_output(CopyOp::Cpy, &[Some(floats)], OutputSpec { dtype: DType::F16, ne: [12, 16, 1, 1] })
        .unwrap();
    let q = case
        .b
        .node_with_output(CopyOp::Cpy, &[Some(blocks)], OutputSpec { dtype: DType::Q8_0, ne: [64, 3, 1, 1] })
        .unwrap();
    let back =
        case.b.node_with_output(CopyOp::Cpy, &[Some(q)], OutputSpec { dtype: DType::F32, ne: [48, 4, 1, 1] }).unwrap();
    let case = case.build();
    let want: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
    for on in devices() {
        assert_close(&case.run(on).values(back), &want, 0.0, 0.03, on.name);
    }
}

#[test]
fn copy_onto_itself_changes_nothing() {
    for copy in COPIES {
        let mut case = Case::new();
        let src = random_leaf(&mut case, permuted(DType::Q4_0, [64, 300, 2, 1], [1, 0, 2, 3], 1));
        let dst = case.b.view(src, permuted(DType::Q4_0, [64, 300, 2, 1], [1, 0, 2, 3], 1), 0).unwrap();
        case.b.node_into(copy, &[Some(src)], dst).unwrap();
        let case = case.build();
        for on in devices() {
            assert!(case.run(on).bytes(dst) == case.bytes(src), "{copy:?} {}", on.name);
        }
    }
}

#[test]
fn broadcast_sources_are_expanded() {
    let mut case = Case::new();
    let desc = TensorDesc::strided(DType::F32, [4, 3, 5, 1], [0, 4, 12, 60]).unwrap();
    let memory = case.leaf(DType::F32, [60, 1, 1, 1], &normal(4, 60));
    let src = case.b.view(memory, desc, 0).unwrap();
    let dst = case.b.node(CopyOp::Cont, &[Some(src)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert!(case.run(on).bytes(dst) == case.bytes(src), "{}", on.name);
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    use DType::{F16, F32, IQ1_S, Q4_0, Q8_0};
    for code in [OpCode::Dup, OpCode::Cpy, OpCode::Cont] {
        let op = Op::decode(code, &OpParams::default()).unwrap().unwrap();
        assert_eq!((op.code(), op.encode()), (code, OpParams::default()));
    }
    let strided = |dtype, ne: [usize; 4], nb1| TensorDesc::strided(dtype, ne, [4, nb1, nb1 * ne[1], 1 << 20]).unwrap();
    let packed = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let refused = [
        (CopyOp::Dup, packed(F32, [6, 4, 1, 1]), packed(F32, [4, 6, 1, 1])),
        (CopyOp::Dup, packed(F32, [6, 4, 1, 1]), packed(F16, [6, 4, 1, 1])),
        (CopyOp::Cont, packed(F32, [6, 4, 1, 1]), packed(F16, [6, 4, 1, 1])),
        (CopyOp::Cont, packed(F32, [6, 4, 1, 1]), packed(F32, [6, 4, 2, 1])),
        (CopyOp::Cpy, packed(F32, [6, 4, 1, 1]), packed(F32, [5, 5, 1, 1])),
        (CopyOp::Cpy, strided(F32, [48, 4, 1, 1], 200), packed(Q8_0, [64, 3, 1, 1])),
        (CopyOp::Cpy, packed(Q8_0, [64, 3, 1, 1]), strided(F32, [48, 4, 1, 1], 200)),
    ];
    for (copy, src, dst) in refused {
        let mut case = Case::new();
        let (s, d) = (case.b.leaf_with_desc(src).unwrap(), case.b.leaf_with_desc(dst).unwrap());
        assert!(case.b.node_into(copy, &[Some(s)], d).is_err(), "{copy:?} {src:?} {dst:?}");
    }
    // A target that is not the destination.
    let mut case = Case::new();
    let (s, t) = (case.b.leaf(F32, [6, 4, 1, 1]).unwrap(), case.b.leaf(F32, [4, 6, 1, 1]).unwrap());
    assert!(
        case.b.node_with_output(CopyOp::Cpy, &[Some(s), Some(t)], OutputSpec { dtype: F32, ne: [6, 4, 1, 1] }).is_err()
    );
    // Whether a type has a conversion is not a matter of the shape rule: the device rejects it.
    let ne = [256, 1, 1, 1];
    for (from, to) in [(F32, IQ1_S), (Q4_0, Q8_0), (DType::I64, F32), (DType::I32, F16)] {
        let mut case = Case::new();
        let s = case.b.leaf(from, ne).unwrap();
        case.b.node_with_output(CopyOp::Cpy, &[Some(s)], OutputSpec { dtype: to, ne }).unwrap();
        let case = case.build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{from} {to} {}", on.name);
        }
    }
}
