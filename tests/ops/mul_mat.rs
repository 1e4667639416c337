//! MUL_MAT and MUL_MAT_ID: results of every device against the formula in f64, invalid expert ids, parameters and shape rules.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::mul_mat::{MulMat, MulMatHint, NO_EXPERT, Precision};
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::ops::{Op, OpCode, OpFamily, OpParams};
use fanout::tensor::DType::{self, BF16, F16, F32, MXFP4, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};
use fanout_testing::compare::nmse;
use fanout_testing::inputs::{at, encode_row, index, normal};
use fanout_testing::op_case::{BuiltCase, Case, Subject};

/// The plain float types.
fn floats() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|t| t.is_float())
}

/// The quantised types that convert to f32, also those with blocks of a single element.
fn blocks() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::Decode).filter(|t| !t.is_float())
}

/// MUL_MAT by its formula.
fn oracle(a: &[f64], an: [usize; 4], b: &[f64], bn: [usize; 4]) -> Vec<f64> {
    let dn = [an[1], bn[1], bn[2], bn[3]];
    (0..dn.iter().product())
        .map(|i| {
            let [m, n, i2, i3] = index(dn, i);
            let x = at(an, [0, m, i2 / (bn[2] / an[2]), i3 / (bn[3] / an[3])]);
            let y = at(bn, [0, n, i2, i3]);
            (0..an[0]).map(|k| a[x + k] * b[y + k]).sum()
        })
        .collect()
}

/// Largest NMSE of a device: f32 rounding. Devices in fast mode also round the activations, to the type that their kernels
/// multiply by weights of type `a`.
fn bound(on: &Subject, a: DType) -> f64 {
    match a {
        _ if !on.fast => 1e-10,
        DType::F16 => 3e-7,
        DType::BF16 => 2e-5,
        _ if a.is_block() => 1e-4,
        _ => 1e-10,
    }
}

#[track_caller]
fn check(case: &BuiltCase, dst: TensorId, want: &[f64], a: DType, what: &str) {
    for on in devices() {
        let error = nmse(&case.run(on).values(dst), want);
        // The test data of types without a quantiser are random bits: of a few sums, each may cancel.
        let cancels = on.fast && a.is_block() && !a.can(Capability::Convert);
        let bound = if cancels { if want.len() < 64 { 0.1 } else { 1e-3 } } else { bound(on, a) };
        assert!(error <= bound, "{what}, {a}, {}: NMSE {error:e}", on.name);
    }
}

/// Multiplies contiguous sources of these types and shapes on all devices and checks the products.
#[track_caller]
fn check_contiguous(ta: DType, an: [usize; 4], tb: DType, bn: [usize; 4]) {
    let mut case = Case::new();
    let a = case.leaf(ta, an, &normal(11, an.iter().product()));
    let b = case.leaf(tb, bn, &normal(12, bn.iter().product()));
    let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    let case = case.build();
    let want = oracle(&case.values(a), an, &case.values(b), bn);
    check(&case, dst, &want, ta, &format!("{an:?} {tb} {bn:?}"));
}

/// Columns in the type in which ggml multiplies: their codes are used as they are.
#[test]
fn columns_of_the_partner_type_match_the_oracle() {
    for t in blocks().filter(|t| t.is_block()) {
        for (m, n) in [(21, 1), (5, 3), (33, 17)] {
            check_contiguous(t, [512, m, 1, 1], t.partner(), [512, n, 1, 1]);
        }
        // More than a piece of packing, and part of a second one.
        check_contiguous(t, [1280, 16, 1, 1], t.partner(), [1280, 6, 1, 1]);
    }
}

/// Another quantised type than the partner of a is refused.
#[test]
fn columns_of_other_quantised_types_are_unsupported() {
    use DType::{IQ2_XXS, Q4_0, Q4_1, Q4_K, Q8_0, Q8_1, Q8_K};
    for (ta, tb) in [(Q4_0, Q8_1), (Q4_1, Q8_0), (Q4_K, Q8_0), (Q4_0, Q4_0), (F32, Q8_0), (IQ2_XXS, Q8_0), (Q8_0, Q8_K)]
    {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf(ta, [256, 4, 1, 1]).unwrap(), case.b.leaf(tb, [256, 2, 1, 1]).unwrap());
        case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        let case = case.build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{ta} {tb} {}", on.name);
        }
    }
}

/// Row lengths: 1, 3 and 9 blocks of a block type; a short, an odd and a long row of a float type.
fn lengths(dtype: DType) -> [usize; 3] {
    if dtype.is_block() { [1, 3, 9].map(|blocks| blocks * dtype.block_len()) } else { [1, 37, 300] }
}

#[test]
fn every_type_and_row_length_matches_the_oracle() {
    for t in floats().chain(blocks()) {
        for k in lengths(t) {
            for (m, n) in [(1, 1), (5, 1), (67, 2), (3, 3), (64, 4), (5, 5), (67, 17)] {
                check_contiguous(t, [k, m, 1, 1], F32, [k, n, 1, 1]);
            }
        }
    }
}

#[test]
fn many_columns_match_the_oracle() {
    for t in floats().chain(blocks()) {
        for (k, m, n) in [(256, 67, 8), (512, 40, 64), (256, 9, 130)] {
            check_contiguous(t, [k, m, 1, 1], F32, [k, n, 1, 1]);
        }
    }
    // More columns than a unit of work of the CPU takes (512).
    check_contiguous(Q4_K, [256, 70, 1, 1], F32, [256, 1030, 1, 1]);
    check_contiguous(F16, [130, 35, 1, 1], F32, [130, 530, 1, 1]);
    // Rows longer than the 1024 elements of a column that are packed at once, with a short last piece.
    check_contiguous(Q4_0, [2080, 20, 1, 1], F32, [2080, 9, 1, 1]);
    check_contiguous(F16, [1100, 20, 1, 1], F32, [1100, 13, 1, 1]);
    check_contiguous(Q8_0, [8224, 17, 1, 1], F32, [8224, 7, 1, 1]);
    // Rows of floats longer than a cache block (256 elements of F32, 512 of F16 and BF16), with a short last block. The number
    // of panels is odd, although kernels take two panels at once.
    check_contiguous(F16, [1101, 330, 1, 1], F32, [1101, 61, 1, 1]);
    check_contiguous(F32, [777, 97, 1, 1], F32, [777, 50, 1, 1]);
    check_contiguous(BF16, [1030, 80, 1, 1], F32, [1030, 97, 1, 1]);
    // Short rows: a unit of work covers more of them.
    check_contiguous(F16, [64, 300, 2, 1], F32, [64, 7, 6, 1]);
}

/// Weights large enough to be repacked into panels of sixteen rows, with an odd number of panels.
#[test]
fn repacked_weights_match_the_oracle() {
    for t in floats().chain(blocks()) {
        for (k, n) in [(256, 1), (512, 3), (768, 9)] {
            let rows = (64 << 10) / t.row_bytes(k).unwrap();
            check_contiguous(t, [k, rows / 32 * 32 + 48, 1, 1], F32, [k, n, 1, 1]);
        }
    }
    // Several planes of `b` share a plane of `a`.
    check_contiguous(Q5_0, [96, 336, 3, 1], F32, [96, 2, 6, 1]);
    check_contiguous(BF16, [70, 336, 2, 1], F32, [70, 7, 2, 1]);
}

/// Consecutive products with the same right-hand side reuse its packed columns, until it is written or packed differently.
#[test]
fn packed_columns_are_reused_only_while_they_are_valid() {
    let ([k, m, n], mut case) = ([256, 20, 40], Case::new());
    let mut leaf = |t, seed| case.leaf(t, [k, m, 1, 1], &normal(seed, k * m));
    let (a, b, c) = (leaf(Q8_0, 1), leaf(Q8_0, 2), leaf(Q4_K, 3));
    let y = case.leaf(F32, [k, n, 1, 1], &normal(4, k * n));
    let product = |case: &mut Case, a, y| (a, case.b.node(MulMat::PLAIN, &[Some(a), Some(y)]).unwrap());
    let before = [a, b, c, b].map(|a| product(&mut case, a, y));
    let negated = case.b.view(y, TensorDesc::contiguous(F32, [k, n, 1, 1]).unwrap(), 0).unwrap();
    case.b.node_into(Unary::Kind(UnaryKind::Neg), &[Some(y)], negated).unwrap();
    let after = [b, a, c].map(|a| product(&mut case, a, negated));
    let case = case.build();
    let (values, bn) = (case.values(y), [k, n, 1, 1]);
    let negated_values: Vec<f64> = values.iter().map(|y| -y).collect();
    for (results, y) in [(&before[..], &values), (&after[..], &negated_values)] {
        for &(a, dst) in results {
            let weights = case.graph.tensor(a).unwrap().desc.dtype();
            let want = oracle(&case.values(a), [k, m, 1, 1], y, bn);
            check(&case, dst, &want, weights, "consecutive products of one source");
        }
    }
}

#[test]
fn every_pair_of_float_types_matches_the_oracle() {
    for ta in floats() {
        for tb in floats() {
            for n in [1, 6, 19] {
                check_contiguous(ta, [70, 13, 1, 1], tb, [70, n, 1, 1]);
            }
        }
    }
}

/// Consecutive planes of `b` share a plane of `a`.
#[test]
fn broadcast_planes_match_the_oracle() {
    for t in [F32, F16, Q4_0, Q8_0] {
        for (planes_a, planes_b) in [([2, 1], [6, 1]), ([2, 3], [4, 6]), ([1, 1], [3, 2])] {
            for n in [1, 4] {
                check_contiguous(t, [64, 10, planes_a[0], planes_a[1]], F32, [64, n, planes_b[0], planes_b[1]]);
            }
        }
    }
}

/// Rows without elements: the sums are 0, as in ggml.
#[test]
fn products_of_empty_rows_are_zeros() {
    for t in [F32, F16, Q4_0, Q4_K] {
        for n in [1, 40] {
            let mut case = Case::new();
            let (a, b) = (case.leaf(t, [0, 5, 1, 1], &[]), case.leaf(F32, [0, n, 2, 1], &[]));
            let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
            let case = case.build();
            for on in devices() {
                assert_eq!(case.run(on).values(dst), vec![0.0; 10 * n], "{t} {n} {}", on.name);
            }
        }
    }
}

/// As [`products_of_empty_rows_are_zeros`], with experts.
#[test]
fn products_of_empty_rows_of_experts_are_zeros() {
    for t in [F32, F16, Q4_0, Q4_K] {
        for (rows, tokens) in [(1, 1), (2, 9)] {
            let mut case = Case::new();
            let (a, b) = (case.leaf(t, [0, 5, 3, 1], &[]), case.leaf(F32, [0, rows, tokens, 1], &[]));
            let ids = case.indices(DType::I32, [2, tokens, 1, 1], &vec![2; 2 * tokens]);
            let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
            let case = case.build();
            for on in devices() {
                assert_eq!(case.run(on).values(dst), vec![0.0; 10 * tokens], "{t} {rows} {tokens} {}", on.name);
            }
        }
    }
}

/// More planes than a block has threads (1,024), with a plane of a for each, and with one for all.
#[test]
fn many_planes_match_the_oracle() {
    for t in [F16, BF16, Q8_0] {
        for n in [1, 9] {
            check_contiguous(t, [32, 3, 33, 32], F32, [32, n, 33, 32]);
            check_contiguous(t, [32, 3, 1, 1], F32, [32, n, 33, 32]);
        }
    }
}

/// A leaf with these strides.
fn strided(case: &mut Case, dtype: DType, ne: [usize; 4], nb: [usize; 4], seed: u64) -> TensorId {
    case.leaf_with_desc(TensorDesc::strided(dtype, ne, nb).unwrap(), &normal(seed, ne.iter().product()))
}

/// KV caches and heads as attention permutes them: nb2 < nb1, rows with gaps, rows of blocks at odd addresses.
#[test]
fn permuted_and_padded_sources_match_the_oracle() {
    let (heads, kv, d) = (2, 40, 32);
    for (t, n) in [F32, F16, BF16, Q4_0, Q8_0].into_iter().flat_map(|t| [1, 3, 9].map(|n| (t, n))) {
        let row = t.row_bytes(d).unwrap();
        for nb in [
            [t.block_bytes(), heads * row, row, kv * heads * row],
            [t.block_bytes(), heads * row + 7, row + 3, 9999],
            [t.block_bytes(), row + 1, kv * (row + 1) + 5, 0],
        ] {
            let (an, bn) = ([d, kv, heads, 1], [d, n, 2 * heads, 1]);
            let mut case = Case::new();
            let a = strided(&mut case, t, an, nb, 21);
            let b = strided(&mut case, F32, bn, [4, 8 * heads * d, 4 * d, 8 * heads * d * n], 22);
            let bytes = case.b.leaf(DType::I8, [9999, 1, 1, 1]).unwrap();
            let desc = TensorDesc::contiguous(F32, [kv, n, 2 * heads, 1]).unwrap();
            let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
            // A second destination, at an odd address.
            let odd = (desc.extent() < 9000).then(|| case.b.view(bytes, desc, 1).unwrap());
            if let Some(odd) = odd {
                case.b.node_into(MulMat::PLAIN, &[Some(a), Some(b)], odd).unwrap();
            }
            let case = case.build();
            let want = oracle(&case.values(a), an, &case.values(b), bn);
            for dst in [Some(dst), odd].into_iter().flatten() {
                check(&case, dst, &want, t, &format!("{nb:?} x {n}"));
            }
        }
    }
}

/// Blocks at an odd address, through a view of bytes.
#[test]
fn weights_at_odd_addresses_match_the_oracle() {
    for t in blocks() {
        let an = [512, 9, 1, 1];
        let mut case = Case::new();
        let desc = TensorDesc::contiguous(t, an).unwrap();
        let values = normal(31, 512 * 9);
        let mut bytes = vec![0; desc.extent()];
        encode_row(t, &values, &mut bytes);
        bytes.insert(0, 0xee);
        let raw = case.raw(DType::I8, [bytes.len(), 1, 1, 1], bytes);
        let a = case.b.view(raw, desc, 1).unwrap();
        let (one, many) =
            (case.leaf(F32, [512, 1, 1, 1], &normal(32, 512)), case.leaf(F32, [512, 11, 1, 1], &normal(33, 512 * 11)));
        let nodes = [one, many].map(|b| (b, case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap()));
        let case = case.build();
        for (b, dst) in nodes {
            let bn = case.graph.tensor(b).unwrap().desc.ne();
            check(&case, dst, &oracle(&case.values(a), an, &case.values(b), bn), t, "at an odd address");
        }
    }
}

/// MUL_MAT_ID by its formula.
fn routed_oracle(a: &[f64], an: [usize; 4], b: &[f64], bn: [usize; 4], ids: &[i64], used: usize) -> Vec<f64> {
    let dn = [an[1], used, bn[2], 1];
    (0..dn.iter().product())
        .map(|i| {
            let [m, e, t, _] = index(dn, i);
            let Ok(expert) = usize::try_from(ids[t * used + e]) else { return 0.0 };
            let x = at(an, [0, m, expert, 0]);
            let y = at(bn, [0, e % bn[1], t, 0]);
            (0..an[0]).map(|k| a[x + k] * b[y + k]).sum()
        })
        .collect()
}

#[test]
fn mul_mat_id_matches_the_oracle() {
    let (experts, used) = (7, 4);
    let plain = blocks().filter(|t| !t.is_block());
    for t in [F32, F16, Q4_0, Q8_0, MXFP4, Q4_K, Q6_K].into_iter().chain(plain) {
        for (rows, tokens) in [(1, 1), (used, 1), (1, 3), (2, 33), (used, 40)] {
            let (an, bn) = ([256, 37, experts, 1], [256, rows, tokens, 1]);
            // Expert 2 is used by every token, experts 5 and 6 by none. Some tokens name an expert twice. -1 selects no expert.
            let id = |s: usize| match s % 4 {
                0 => 2,
                3 if s % 8 == 3 => NO_EXPERT,
                _ => (s * s % 6) as i64,
            };
            let ids: Vec<i64> = (0..used * tokens).map(id).collect();
            // The ids are a view of a wider tensor, like the first columns of an ARGSORT result.
            let wide: Vec<i64> =
                ids.chunks(used).flat_map(|row| row.iter().copied().chain([i64::from(i32::MIN); 3])).collect();
            let mut case = Case::new();
            let a = case.leaf(t, an, &normal(41, 256 * 37 * experts));
            let b = case.leaf(F32, bn, &normal(42, 256 * rows * tokens));
            let sorted = case.indices(DType::I32, [used + 3, tokens, 1, 1], &wide);
            let row = (used + 3) * 4;
            let chosen = TensorDesc::strided(DType::I32, [used, tokens, 1, 1], [4, row, row, row]).unwrap();
            let chosen = case.b.view(sorted, chosen, 0).unwrap();
            let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(chosen)]).unwrap();
            let case = case.build();
            let want = routed_oracle(&case.values(a), an, &case.values(b), bn, &ids, used);
            check(&case, dst, &want, t, &format!("{rows} rows, {tokens} tokens"));
        }
    }
}

/// A token that names one expert several times gets its row as often.
#[test]
fn duplicate_experts_match_the_oracle() {
    for t in [F32, F16, Q4_0, Q6_K, MXFP4] {
        for (rows, tokens) in [(1, 1), (3, 2), (1, 40)] {
            let (an, bn, used) = ([256, 37, 3, 1], [256, rows, tokens, 1], 3);
            let ids: Vec<i64> = (0..used * tokens).map(|s| if s < used { 1 } else { (s % 2) as i64 }).collect();
            let mut case = Case::new();
            let a = case.leaf(t, an, &normal(46, 256 * 111));
            let b = case.leaf(F32, bn, &normal(47, 256 * rows * tokens));
            let chosen = case.indices(DType::I32, [used, tokens, 1, 1], &ids);
            let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(chosen)]).unwrap();
            let case = case.build();
            let want = routed_oracle(&case.values(a), an, &case.values(b), bn, &ids, used);
            check(&case, dst, &want, t, &format!("{rows} rows, {tokens} tokens, equal ids"));
        }
    }
}

/// No row has an expert, or one has: the other rows are zeros, whatever b holds.
#[test]
fn rows_without_an_expert_are_zeros() {
    for (t, tokens) in [F32, F16, Q8_0].into_iter().flat_map(|t| [1, 2, 40].map(|tokens| (t, tokens))) {
        for routed in [0, 1] {
            let mut case = Case::new();
            let a = case.leaf(t, [32, 1100, 3, 1], &normal(45, 32 * 3300));
            let b = case.leaf(F32, [32, 1, tokens, 1], &vec![f32::NAN; 32 * tokens]);
            let ids: Vec<i64> = (0..2 * tokens).map(|s| if s < routed { 1 } else { NO_EXPERT }).collect();
            let ids = case.indices(DType::I32, [2, tokens, 1, 1], &ids);
            let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
            let case = case.build();
            for on in devices() {
                let got = case.run(on).values(dst);
                let (of_expert, zeros) = got.split_at(1100 * routed);
                assert!(of_expert.iter().all(|v| v.is_nan()), "{t} {tokens} {}", on.name);
                assert!(zeros.iter().all(|&v| v == 0.0), "{t} {tokens} {}", on.name);
            }
        }
    }
}

#[test]
fn unknown_experts_are_rejected() {
    for (t, bad) in [F32, Q4_0].into_iter().flat_map(|t| [-2, 4, i64::from(i32::MIN)].map(|bad| (t, bad))) {
        let mut case = Case::new();
        let a = case.leaf(t, [32, 300, 4, 1], &normal(43, 32 * 1200));
        let b = case.leaf(F32, [32, 1, 20, 1], &normal(44, 640));
        let ids: Vec<i64> = (0..40).map(|s| if s == 33 { bad } else { s % 4 }).collect();
        let ids = case.indices(DType::I32, [2, 20, 1, 1], &ids);
        case.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
        let case = case.build();
        for on in devices() {
            let error = case.try_run(on).err();
            assert!(on.reported_bad_data(&error, OpCode::MulMatId), "{bad}: {error:?}");
        }
    }
}

/// An infinite or NaN activation changes its own column only.
#[test]
fn non_finite_activations_change_only_their_column() {
    for (t, bad) in [F32, Q4_0, Q8_0, Q6_K].into_iter().flat_map(|t| [f32::INFINITY, f32::NAN].map(|bad| (t, bad))) {
        for n in [2, 12] {
            let mut case = Case::new();
            let a = case.leaf(t, [256, 20, 1, 1], &normal(51, 256 * 20));
            let mut values = normal(52, 256 * n);
            values[256 + 100] = bad;
            let b = case.leaf(F32, [256, n, 1, 1], &values);
            let dst = case.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
            let case = case.build();
            for on in devices() {
                let got = case.run(on).values(dst);
                assert!(got[20..40].iter().all(|v| !v.is_finite()), "{t} {bad} {}", on.name);
                assert!(got[..20].iter().chain(&got[40..]).all(|v| v.is_finite()), "{t} {bad} {}", on.name);
            }
        }
    }
}

#[test]
fn parameters_round_trip_and_invalid_ones_are_rejected() {
    use Precision::{Any, Bf16, F16, F32, Q4, Q8};
    for (by_id, accumulate, hint, round) in [
        (false, Any, MulMatHint::None, Any),
        (false, F32, MulMatHint::Hadamard, Q8),
        (false, Bf16, MulMatHint::None, F16),
        (true, Q4, MulMatHint::None, Bf16),
    ] {
        let op = MulMat { by_id, accumulate, hint, round };
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op.into()));
    }
    // Words of op_params: 0 is the accumulation precision, 1 the hint, 3 the precision of b.
    for (code, word, value) in [
        (OpCode::MulMat, 0, 1),
        (OpCode::MulMat, 0, -10),
        (OpCode::MulMat, 1, 2),
        (OpCode::MulMatId, 1, 1), // the Hadamard hint is defined for MUL_MAT only
        (OpCode::MulMat, 3, 11),
    ] {
        let error = Op::decode(code, &OpParams::default().with_int(word, value)).unwrap_err();
        assert_eq!((error.op, error.word), (code, word));
    }
}

#[test]
fn mismatched_shapes_are_rejected() {
    let i32s = |ne| Some((DType::I32, ne));
    for (op, an, bn, ids) in [
        (MulMat::PLAIN, [8, 4, 1, 1], [9, 2, 1, 1], None),
        (MulMat::PLAIN, [8, 4, 2, 1], [8, 2, 3, 1], None),
        (MulMat::PLAIN, [8, 4, 1, 2], [8, 2, 1, 3], None),
        (MulMat::PLAIN, [8, 4, 0, 1], [8, 2, 1, 1], None),
        (MulMat::BY_ID, [8, 4, 3, 1], [8, 1, 5, 1], None),
        (MulMat::BY_ID, [8, 4, 3, 1], [8, 1, 5, 1], Some((F32, [2, 5, 1, 1]))),
        (MulMat::BY_ID, [8, 4, 3, 1], [8, 1, 5, 1], i32s([2, 4, 1, 1])),
        (MulMat::BY_ID, [8, 4, 3, 1], [8, 2, 5, 1], i32s([3, 5, 1, 1])),
        (MulMat::BY_ID, [8, 4, 3, 2], [8, 2, 5, 1], i32s([2, 5, 1, 1])),
        (MulMat::BY_ID, [8, 4, 3, 1], [8, 0, 5, 1], i32s([2, 5, 1, 1])),
    ] {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf(F32, an).unwrap(), case.b.leaf(F32, bn).unwrap());
        let ids = ids.map(|(t, ne)| case.b.leaf(t, ne).unwrap());
        let made = case.b.node(op, &[Some(a), Some(b), ids]);
        let refused = made.is_err();
        assert!(refused, "{op:?} {an:?} {bn:?}");
    }
}
