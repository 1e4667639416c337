//! Cases of MUL_MAT_ID with so many tokens that all columns of an expert are multiplied at a time.

use super::Sweep;
use super::mul_mat::{activations, blocks, packable, packs};
use fanout::device::DeviceError;
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::{MulMat, NO_EXPERT, Precision};
use fanout::tensor::DType::{self, BF16, F16, F32, I32, IQ4_XS, Q4_0, Q4_K, Q8_0};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};

/// The bound of the NMSE: of products of codes, of halves, and of weights rounded to F16.
fn bound(t: DType, sizes: &Sizes) -> f64 {
    let uses_codes = packs(t) && (sizes.used * sizes.tokens <= 64 * sizes.experts || sizes.round == Precision::F32);
    match t {
        _ if t.is_float() => 1e-11,
        _ if uses_codes => 1e-12,
        _ => 1e-6,
    }
}

/// Launches for each packed weight: one before the program, and one that unpacks it when the memory is compared.
const REPACKS: u64 = 2;

/// Launches of a product: the table of columns, their conversion, and the product.
const LAUNCHES: u64 = 3;

pub(super) fn run(sweep: &Sweep) {
    for t in blocks().filter(|&t| packs(t)) {
        let sizes = Sizes { m: packable(t, 3 * t.block_len().max(128)), ..Sizes::default() };
        // 3, 10, 32 and 70 slots for each expert: one width of groups after the other, then the GEMM.
        for tokens in [6, 20, 64, 140] {
            check(sweep, t, &Sizes { tokens, ..sizes }, random, "random experts");
        }
        // Columns that must not be rounded to halves.
        check(sweep, t, &Sizes { tokens: 140, round: Precision::F32, ..sizes }, random, "random experts");
        // Parts of k, whose number is not that of the blocks.
        check(sweep, t, &Sizes { m: packable(t, 5 * 256), ..sizes }, random, "long rows");
    }
    for t in blocks().filter(|&t| !packs(t)).chain([F16, BF16]) {
        // Two tiles of rows; 10 and 70 slots for each expert.
        let sizes = Sizes { m: [256, 133], ..Sizes::default() };
        for tokens in [20, 140] {
            check(sweep, t, &Sizes { tokens, ..sizes }, random, "random experts");
        }
    }
    // The GEMM with groups that have no expert; short rows, and rows at any even address; few rows and long ones, whose k is split.
    for (t, m) in [(Q4_0, packable(Q4_0, 512)), (Q4_K, packable(Q4_K, 512)), (IQ4_XS, [256, 40]), (BF16, [40, 133])] {
        let sizes = Sizes { m, tokens: 140, ..Sizes::default() };
        let some = |slot, experts| if slot % 5 == 2 { NO_EXPERT } else { random(slot, experts) };
        check(sweep, t, &sizes, some, "some slots without an expert");
        check(
            sweep,
            t,
            &Sizes { rows: 2, ..sizes },
            |slot, _| if slot < 150 { NO_EXPERT } else { 1 },
            "no expert, and one",
        );
        out_of_range(sweep, t, &sizes);
    }
    for m in [[257, 5], [8, 3], [2080, 20]] {
        check(sweep, F16, &Sizes { m, tokens: 30, ..Sizes::default() }, random, "rows of F16");
    }
    for t in [F16, Q4_0, Q4_K, Q8_0] {
        let sizes = Sizes { m: packable(t, 512), ..Sizes::default() };
        let tokens = 41;
        for (used, rows) in [(1, 1), (3, 3), (4, 2), (8, 1)] {
            check(sweep, t, &Sizes { used, rows, tokens, experts: 9, ..sizes }, random, "rows of b");
        }
        check(sweep, t, &Sizes { tokens, ..sizes }, |_, _| 2, "one expert of all");
        check(sweep, t, &Sizes { tokens, experts: 1, ..sizes }, |_, _| 0, "one expert");
        check(sweep, t, &Sizes { tokens, experts: 8, ..sizes }, |slot, _| slot % 2 * 7, "experts without slots");
        check(sweep, t, &Sizes { tokens, ..sizes }, |_, _| NO_EXPERT, "no expert");
        let some = |slot, experts| if slot % 5 == 2 { NO_EXPERT } else { random(slot, experts) };
        check(sweep, t, &Sizes { tokens, ..sizes }, some, "some slots without an expert");
        check(sweep, t, &Sizes { tokens, id_gap: 3, ..sizes }, random, "ids with gaps");
        out_of_range(sweep, t, &Sizes { tokens, ..sizes });
        layer(sweep, t);
    }
    // As many experts, and as many slots, as the kernel sorts; and one more.
    let tiny = Sizes { m: [32, 8], experts: 512, used: 1, tokens: 1200, ..Sizes::default() };
    check(sweep, Q4_0, &tiny, random, "many experts");
    launches(sweep, &Sizes { experts: 513, tokens: 1200, ..tiny }, 2);
    let most = Sizes { experts: 128, used: 8, tokens: 8192, ..tiny };
    check(sweep, Q4_0, &most, random, "many slots");
    check(sweep, Q4_0, &most, |_, _| 77, "many slots of one expert");
    launches(sweep, &Sizes { used: 1, tokens: 65_536, ..most }, LAUNCHES);
    launches(sweep, &Sizes { used: 1, tokens: 65_537, ..most }, 2);
    launches(sweep, &Sizes { used: 64, tokens: 16, ..most }, LAUNCHES);
    launches(sweep, &Sizes { used: 65, tokens: 16, ..most }, 2);
    // As many slots as the vector kernel multiplies, and one more.
    let few = Sizes { experts: 120, used: 3, tokens: 80, ..tiny };
    launches(sweep, &few, 2);
    launches(sweep, &Sizes { tokens: 81, ..few }, LAUNCHES);
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Columns and rows of the weights of an expert.
    m: [usize; 2],
    experts: usize,
    used: usize,
    tokens: usize,
    /// Rows of b for each token.
    rows: usize,
    /// Ids of a token that are not used.
    id_gap: usize,
    round: Precision,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { m: [0; 2], experts: 4, used: 2, tokens: 64, rows: 1, id_gap: 0, round: Precision::Any }
    }
}

/// An expert for a slot.
fn random(slot: i64, experts: i64) -> i64 {
    let hash = (slot as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((hash >> 40) % experts as u64) as i64
}

fn build(t: DType, sizes: &Sizes, expert: impl Fn(i64, i64) -> i64) -> (BuiltCase, TensorId) {
    let &Sizes { m: [k, m], experts, used, tokens, rows, id_gap, round } = sizes;
    let mut case = Case::new();
    let a = case.leaf(t, [k, m, experts, 1], &normal(31, k * m * experts));
    let b = case.leaf(F32, [k, rows, tokens, 1], &activations(t, 32, k * rows * tokens));
    // Ids in gaps are out of range.
    let all = used + id_gap;
    let list = (0..all * tokens).map(|i| match i % all {
        e if e < used => expert((i / all * used + e) as i64, experts as i64),
        _ => experts as i64,
    });
    let ids = case.indices(I32, [all, tokens, 1, 1], &list.collect::<Vec<_>>());
    let desc = TensorDesc::strided(I32, [used, tokens, 1, 1], [4, 4 * all, 4 * all * tokens, 4 * all * tokens]);
    let ids = case.b.view(ids, desc.unwrap(), 0).unwrap();
    let dst = case.b.node(MulMat { round, ..MulMat::BY_ID }, &[Some(a), Some(b), Some(ids)]).unwrap();
    (case.build(), dst)
}

#[track_caller]
fn check(sweep: &Sweep, t: DType, sizes: &Sizes, expert: impl Fn(i64, i64) -> i64, what: &str) {
    let (case, dst) = build(t, sizes, expert);
    sweep.check(&case, &[dst], bound(t, sizes), &format!("{t}, {what}, {sizes:?}"));
}

/// The launches of a product of Q4_0 on a GPU with tensor cores.
#[track_caller]
fn launches(sweep: &Sweep, sizes: &Sizes, expected: u64) {
    if sweep.has_mma {
        let (case, _) = build(Q4_0, sizes, random);
        sweep.check_launches(REPACKS + expected, &format!("{sizes:?}"), || case.run(&sweep.gpu));
    }
}

#[track_caller]
fn out_of_range(sweep: &Sweep, t: DType, sizes: &Sizes) {
    for bad in [sizes.experts as i64, -2] {
        let (case, _) = build(t, sizes, |slot, experts| if slot == 50 { bad } else { random(slot, experts) });
        let error = case.try_run(&sweep.gpu).err();
        assert!(matches!(error, Some(DeviceError::Data { op: OpCode::MulMatId, .. })), "{t}, expert {bad}: {error:?}");
    }
}

/// The products of a layer for a prompt. Gate and up share the table and the columns.
#[track_caller]
fn layer(sweep: &Sweep, t: DType) {
    let (k, ff, experts, used, tokens) = (512, 256, 5, 2, 80);
    let mut case = Case::new();
    // Small enough for scales in F16 behind the GLU.
    let columns: Vec<_> = activations(t, 33, k * tokens).into_iter().map(|v| v / 64.0).collect();
    let x = case.leaf(F32, [k, 1, tokens, 1], &columns);
    let list: Vec<_> = (0..(used * tokens) as i64).map(|slot| random(slot, experts as i64)).collect();
    let ids = case.indices(I32, [used, tokens, 1, 1], &list);
    let mut product = |[k, m]: [usize; 2], x, seed| {
        let a = case.leaf(t, [k, m, experts, 1], &normal(seed, k * m * experts));
        case.b.node(MulMat::BY_ID, &[Some(a), Some(x), Some(ids)]).unwrap()
    };
    let [gate, up] = [34, 35].map(|seed| product([k, ff], x, seed));
    let glu = Glu { kind: GluKind::Swiglu, swapped: false };
    let hidden = case.b.node(glu, &[Some(gate), Some(up)]).unwrap();
    let a = case.leaf(t, [ff, k, experts, 1], &normal(36, k * ff * experts));
    let dst = case.b.node(MulMat::BY_ID, &[Some(a), Some(hidden), Some(ids)]).unwrap();
    [gate, up].into_iter().for_each(|id| case.b.set_use_count(id, 1).unwrap());
    let (case, what) = (case.build(), format!("{t}, gate, up and down for {tokens} tokens"));
    sweep.check(&case, &[hidden], if t.is_float() { 1e-11 } else { 1e-12 }, &what);
    // The CPU does not round these columns to 8 bits.
    sweep.check(&case, &[dst], 5e-4, &what);
    if sweep.has_mma {
        let products = LAUNCHES + 1 + 1 + LAUNCHES;
        let repacks = if t.is_block() { 3 * REPACKS } else { 0 };
        sweep.check_launches(repacks + products, &what, || case.run(&sweep.gpu));
    }
}
