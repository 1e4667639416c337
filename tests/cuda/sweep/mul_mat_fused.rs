//! Cases of products that share their columns: one conversion, one launch for several products, products with their GLU, and norms and
//! attention that write quantised columns.

use super::Sweep;
use super::mul_mat::{activations, blocks, packs};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::{MulMat, NO_EXPERT};
use fanout::ops::norm::Norm;
use fanout::ops::unary::Unary;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, Q4_0, Q4_K, Q6_K, Q8_0};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};

const SQUARE: Unary = Unary::Sqr;
const SWIGLU: Glu = Glu { kind: GluKind::Swiglu, swapped: false };

/// Bound of the NMSE of f32 products.
const BOUND: f64 = 1e-11;

/// Most columns of fused products of packed weights.
const MAX_FUSED: usize = 2;

/// Most columns of fused products of F16 and BF16.
const MAX_FUSED_HALVES: usize = 8;

/// Launches for each packed weight: one before the program, and one that unpacks it when the memory is compared.
const REPACKS: u64 = 2;

pub fn run(sweep: &Sweep) {
    for t in blocks().filter(|&t| packs(t)) {
        for n in [1, 2] {
            attention_products(sweep, [t; 3], 1024, n);
            gated_products(sweep, t, 1024, n, GluKind::Swiglu, 1);
        }
        gated_experts(sweep, t, 1024);
        // As few columns as the fused kernel has. Pieces of the quantised result have 128 rows in groups of 32; the last one is not whole.
        let shape = if t.block_len() == 256 { [512, 512] } else { [1024, 288] };
        swiglu_with_product(sweep, t, shape, 2);
        // The code that quantises depends on the length of the blocks only.
        if [Q8_0, Q4_K].contains(&t) {
            swiglu_with_product(sweep, t, shape, 1);
            experts_with_product(sweep, t, shape);
        }
    }
    // Rows that are long enough for several warps to share them.
    for t in [Q4_0, Q6_K] {
        for n in [1, 2] {
            attention_products(sweep, [t; 3], 4096, n);
            gated_products(sweep, t, 4096, n, GluKind::Swiglu, 1);
        }
        gated_experts(sweep, t, 4096);
    }
    // More columns share a conversion, but no launch.
    for t in [Q4_K, Q8_0] {
        attention_products(sweep, [t; 3], 1024, 3);
        gated_products(sweep, t, 1024, 3, GluKind::Swiglu, 3);
    }
    for t in [F16, BF16] {
        for (k, n) in [(1024, 1), (104, 2), (264, 5), (1024, MAX_FUSED_HALVES), (104, MAX_FUSED_HALVES + 1)] {
            attention_products(sweep, [t; 3], k, n);
            gated_products(sweep, t, k, n, GluKind::Swiglu, 1);
        }
    }
    attention_products(sweep, [Q4_K, Q6_K, Q4_K], 1024, 1);
    attention_products(sweep, [Q4_K, Q8_0, Q6_K], 1024, 1);
    // Only the products are one launch.
    gated_products(sweep, Q4_K, 1024, 1, GluKind::Reglu, 2);
    gated_parts_in_rows(sweep);
    overwritten_columns(sweep);
    for t in [Q8_0, Q4_K] {
        for (k, n) in [(1024, 1), (512, 2), (4096, 1), (8448, 2)] {
            norm_with_product(sweep, t, [k, n], 0);
        }
        // Residual, weights and bias.
        for more in [1, 2, 3] {
            norm_with_product(sweep, t, [1024, 2], more);
        }
        for (dv, n, batches) in [(128, 1, 1), (256, 2, 1), (128, 1, 2)] {
            for sinks in [false, true] {
                attention_with_product(sweep, t, [dv, n, batches], sinks);
            }
        }
    }
    // A block normalises several rows: in registers of 4 elements each, and of 16.
    for (k, n) in [(128, 1), (128, 2), (96, 11), (512, 515)] {
        norm_with_product(sweep, Q8_0, [k, n], 0);
        norm_with_product(sweep, Q8_0, [k, n], 3);
    }
}

/// Weights that are packed, of `m` rows.
fn weights(case: &mut Case, t: DType, [k, m]: [usize; 2], seed: u64) -> TensorId {
    case.leaf(t, [k, m, 1, 1], &normal(seed, k * m))
}

fn weights_of_experts(case: &mut Case, t: DType, [k, m]: [usize; 2], experts: usize, seed: u64) -> TensorId {
    case.leaf(t, [k, m, experts, 1], &normal(seed, k * m * experts))
}

/// Products for queries, values and keys in llama.cpp's order, with a node between that reads the queries. The types are those of
/// queries, values and keys.
#[track_caller]
fn attention_products(sweep: &Sweep, types: [DType; 3], k: usize, n: usize) {
    let rows = [128, 64, 82];
    let mut case = Case::new();
    let x = case.leaf(F32, [k, n, 1, 1], &activations(types[0], 1, k * n));
    let a: Vec<_> = (0..3).map(|i| weights(&mut case, types[i], [k, rows[i]], 2 + i as u64)).collect();
    let q = case.b.node(MulMat::PLAIN, &[Some(a[0]), Some(x)]).unwrap();
    let other = case.b.node(SQUARE, &[Some(q)]).unwrap();
    let v = case.b.node(MulMat::PLAIN, &[Some(a[1]), Some(x)]).unwrap();
    let k = case.b.node(MulMat::PLAIN, &[Some(a[2]), Some(x)]).unwrap();
    let case = case.build();
    let what = format!("{n} columns of products of {types:?}");
    sweep.check(&case, &[q, other, v, k], BOUND, &what);
    if !types[0].is_block() {
        return; // the launches depend on the GPU: tests/cuda/fused_products.rs counts them
    }
    let products = match types {
        [a, b, c] if a == b && b == c && n <= MAX_FUSED => 1,
        [a, _, c] if a == c && n <= MAX_FUSED => 2,
        _ => 3,
    };
    let conversions = if types.contains(&Q8_0) && types[0].block_len() == 256 { 2 } else { 1 };
    sweep.check_launches(3 * REPACKS + conversions + products + 1, &what, || case.run(&sweep.gpu));
}

/// The graph of two products and a GLU, and its result.
fn gated(case: &mut Case, product: MulMat, [gate, up]: [TensorId; 2], rest: &[TensorId], glu: Glu) -> TensorId {
    let mut of = |weights| {
        let srcs: Vec<_> = [weights].iter().chain(rest).copied().map(Some).collect();
        let result = case.b.node(product, &srcs).unwrap();
        case.b.set_use_count(result, 1).unwrap();
        result
    };
    let (gate, up) = (of(gate), of(up));
    case.b.node(glu, &[Some(gate), Some(up)]).unwrap()
}

#[track_caller]
fn gated_products(sweep: &Sweep, t: DType, k: usize, n: usize, kind: GluKind, launches: u64) {
    let m = 80;
    let mut case = Case::new();
    let x = case.leaf(F32, [k, n, 1, 1], &activations(t, 1, k * n));
    let a = [2, 3].map(|seed| weights(&mut case, t, [k, m], seed));
    let dst = gated(&mut case, MulMat::PLAIN, a, &[x], Glu { kind, ..SWIGLU });
    let case = case.build();
    let what = format!("{n} columns of {kind:?} of products of {t}");
    sweep.check(&case, &[dst], BOUND, &what);
    if t.is_block() {
        sweep.check_launches(2 * REPACKS + 1 + launches, &what, || case.run(&sweep.gpu));
    }
}

/// Weights of which one is not packed: the products run one by one.
fn gated_parts_in_rows(sweep: &Sweep) {
    let (t, k, m) = (Q4_K, 1024, 80);
    let mut case = Case::new();
    let x = case.leaf(F32, [k, 1, 1, 1], &activations(t, 1, k));
    let gate = weights(&mut case, t, [k, m], 2);
    let all = case.leaf(t, [k, 2 * m, 1, 1], &normal(3, 2 * k * m));
    let row = t.row_bytes(k).unwrap();
    let nb = [t.block_bytes(), 2 * row, 2 * row * m, 2 * row * m];
    let up = case.b.view(all, TensorDesc::strided(t, [k, m, 1, 1], nb).unwrap(), 0).unwrap();
    let dst = gated(&mut case, MulMat::PLAIN, [gate, up], &[x], SWIGLU);
    sweep.check(&case.build(), &[dst], BOUND, "a gate with packed weights, the other operand with weights in rows");
}

#[track_caller]
fn gated_experts(sweep: &Sweep, t: DType, k: usize) {
    let (m, experts) = (32, 3);
    for (used, tokens, nb) in [(2, 1, 1), (3, 2, 1), (2, 2, 2)] {
        let mut case = Case::new();
        let x = case.leaf(F32, [k, nb, tokens, 1], &activations(t, 1, k * nb * tokens));
        let a = [2, 3].map(|seed| weights_of_experts(&mut case, t, [k, m], experts, seed));
        let list: Vec<_> = (0..(used * tokens) as i64).map(|slot| (slot * slot + slot) % 3).collect();
        let ids = case.indices(I32, [used, tokens, 1, 1], &list);
        let dst = gated(&mut case, MulMat::BY_ID, a, &[x, ids], SWIGLU);
        let case = case.build();
        let what = format!("SWIGLU of {used} experts of {t} for {tokens} tokens");
        sweep.check(&case, &[dst], BOUND, &what);
        sweep.check_launches(2 * REPACKS + 1 + 1, &what, || case.run(&sweep.gpu));
    }
}

/// A node writes the columns between two products: they are converted again.
fn overwritten_columns(sweep: &Sweep) {
    let (t, k, m) = (Q4_K, 1024, 64);
    let mut case = Case::new();
    let x = case.leaf(F32, [k, 1, 1, 1], &activations(t, 1, k));
    let a = [2, 3].map(|seed| weights(&mut case, t, [k, m], seed));
    let before = case.b.node(MulMat::PLAIN, &[Some(a[0]), Some(x)]).unwrap();
    let onto = case.b.view(x, TensorDesc::contiguous(F32, [k, 1, 1, 1]).unwrap(), 0).unwrap();
    case.b.node_into(Unary::Scale { scale: -1.0, bias: 0.0 }, &[Some(x)], onto).unwrap();
    let after = case.b.node(MulMat::PLAIN, &[Some(a[1]), Some(x)]).unwrap();
    let case = case.build();
    sweep.check(&case, &[before, after], BOUND, "columns that are overwritten");
    sweep.check_launches(2 * REPACKS + 2 + 3, "columns that are overwritten", || case.run(&sweep.gpu));
}

/// A SWIGLU of two products writes the quantised columns of a third one.
#[track_caller]
fn swiglu_with_product(sweep: &Sweep, t: DType, [k, m]: [usize; 2], n: usize) {
    let what = format!("{n} columns of SWIGLU of {m} rows for {t}");
    let swiglu = |case: &mut Case| {
        let x = case.leaf(F32, [k, n, 1, 1], &activations(t, 1, k * n));
        let a = [2, 3].map(|seed| weights(case, t, [k, m], seed));
        gated(case, MulMat::PLAIN, a, &[x], SWIGLU)
    };
    quantized_result(sweep, [m, n, 1, 1], 2 * REPACKS + 2, &what, swiglu, |case, h| product_of(case, t, m, h));
}

/// As `swiglu_with_product`, for experts.
#[track_caller]
fn experts_with_product(sweep: &Sweep, t: DType, [k, m]: [usize; 2]) {
    let experts = 3;
    for (used, tokens, list) in [(2, 1, vec![2, 0]), (3, 2, vec![0, 2, 1, 1, NO_EXPERT, 0])] {
        let what = format!("SWIGLU of {m} rows of {used} experts for {tokens} tokens, for {t}");
        let swiglu = |case: &mut Case| {
            let x = case.leaf(F32, [k, 1, tokens, 1], &activations(t, 1, k * tokens));
            let a = [2, 3].map(|seed| weights_of_experts(case, t, [k, m], experts, seed));
            let ids = case.indices(I32, [used, tokens, 1, 1], &list);
            gated(case, MulMat::BY_ID, a, &[x, ids], SWIGLU)
        };
        quantized_result(sweep, [m, used, tokens, 1], 2 * REPACKS + 2, &what, swiglu, |case, h| {
            let a = weights_of_experts(case, t, [m, packed_rows(t, m)], experts, 4);
            let ids = case.indices(I32, [used, tokens, 1, 1], &list);
            case.b.node(MulMat::BY_ID, &[Some(a), Some(h), Some(ids)]).unwrap()
        });
    }
}

/// A norm writes the quantised columns of a product. `more` is the number of fused nodes besides it: a MUL by weights, an ADD of a bias,
/// and the ADD of the residual before it.
#[track_caller]
fn norm_with_product(sweep: &Sweep, t: DType, [k, n]: [usize; 2], more: usize) {
    let what = format!("{n} columns of a norm of {k} values and {more} other nodes for {t}");
    let norm = |case: &mut Case| {
        let mut h = case.leaf(F32, [k, n, 1, 1], &normal(1, k * n));
        if more == 3 {
            let residual = case.leaf(F32, [k, n, 1, 1], &normal(2, k * n));
            h = case.b.node(Binary::Add, &[Some(h), Some(residual)]).unwrap();
        }
        h = case.b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(h)]).unwrap();
        for (op, seed) in [(Binary::Mul, 5), (Binary::Add, 6)].into_iter().take(more) {
            case.b.set_use_count(h, 1).unwrap();
            let other = case.leaf(F32, [k, 1, 1, 1], &normal(seed, k));
            h = case.b.node(op, &[Some(h), Some(other)]).unwrap();
        }
        h
    };
    quantized_result(sweep, [k, n, 1, 1], 1, &what, norm, |case, h| product_of(case, t, k, h));
}

/// Attention with split-K: merging the parts writes the quantised columns of a product.
#[track_caller]
fn attention_with_product(sweep: &Sweep, t: DType, [dv, n, batches]: [usize; 3], sinks: bool) {
    let (heads, kv_heads, positions) = (4, 2, 512);
    let what = format!("{n} columns of {batches} batches of attention with {dv} channels for {t}, sinks {sinks}");
    let columns = [heads * dv, n * batches, 1, 1];
    let attention = |case: &mut Case| {
        let q = case.leaf(F32, [dv, n, heads, batches], &normal(1, dv * n * heads * batches));
        let ne = [dv, positions, kv_heads, batches];
        let [k, v] = [2, 3].map(|seed| case.leaf(F16, ne, &normal(seed, ne.iter().product())));
        let sinks = sinks.then(|| case.leaf(F32, [heads, 1, 1, 1], &normal(5, heads)));
        let op = FlashAttn { scale: 0.1, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
        let result = case.b.node(op, &[Some(q), Some(k), Some(v), None, sinks]).unwrap();
        case.b.view(result, TensorDesc::contiguous(F32, columns).unwrap(), 0).unwrap()
    };
    quantized_result(sweep, columns, 2, &what, attention, |case, h| product_of(case, t, heads * dv, h));
}

/// As many rows of `k` elements as are packed.
fn packed_rows(t: DType, k: usize) -> usize {
    (16usize << 10).div_ceil(t.row_bytes(k).unwrap()).next_multiple_of(16)
}

/// The product of weights and `h`.
fn product_of(case: &mut Case, t: DType, k: usize, h: TensorId) -> TensorId {
    let a = weights(case, t, [k, packed_rows(t, k)], 4);
    case.b.node(MulMat::PLAIN, &[Some(a), Some(h)]).unwrap()
}

/// A node writes the quantised columns of a product, with the same bytes as the conversion of its result. `result` adds the node, of
/// `launches` launches, and returns its result of shape `ne`; `product` adds the product that reads it.
#[track_caller]
fn quantized_result(
    sweep: &Sweep,
    ne: [usize; 4],
    launches: u64,
    what: &str,
    result: impl Fn(&mut Case) -> TensorId,
    product: impl Fn(&mut Case, TensorId) -> TensorId,
) {
    let graph = |values: Option<&[f32]>| -> (BuiltCase, [TensorId; 2]) {
        let mut case = Case::new();
        let h = match values {
            None => result(&mut case),
            Some(values) => case.leaf(F32, ne, values),
        };
        let dst = product(&mut case, h);
        (case.build(), [h, dst])
    };
    let (fused, [h, dst]) = graph(None);
    sweep.check(&fused, &[h], BOUND, what);
    // More columns are fused only without tensor cores.
    let run = |case: &BuiltCase, launches| {
        let run = || case.run(&sweep.gpu);
        if ne[1] <= MAX_FUSED { sweep.check_launches(launches, what, run) } else { run() }
    };
    let got = run(&fused, REPACKS + launches + 1);
    let values: Vec<f32> = got.values(h).into_iter().map(|v| v as f32).collect();
    let (single, [_, alone]) = graph(Some(&values));
    let want = run(&single, REPACKS + 2);
    assert!(got.bytes(dst) == want.bytes(alone), "{what}: the bytes differ from those of a separate conversion");
}
