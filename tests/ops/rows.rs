//! GET_ROWS and SET_ROWS: results of every device, invalid row indices, and the shape rules.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::rows::Rows;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::quant::{dequantiser, quantiser};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

/// Types that SET_ROWS can write.
fn writable() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|&t| t == DType::I32 || quantiser(t).is_some())
}

/// `n` random row indices below `below`.
fn random_indices(seed: u64, n: usize, below: usize) -> Vec<i64> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.i64(0..below as i64)).collect()
}

#[test]
fn get_rows_gathers_rows_of_every_type() {
    for dtype in DType::ALL.iter().copied().filter(|&t| t == DType::I32 || dequantiser(t).is_some()) {
        let n = 2 * dtype.block_len() + if dtype.is_block() { 0 } else { 1500 };
        let (rows, [k, a2, a3]) = (7, [5, 3, 2]);
        let mut case = Case::new();
        let table = case.leaf(dtype, [n, rows, a2, a3], &normal(1, n * rows * a2 * a3));
        let list = random_indices(2, k * a2 * a3, rows);
        let ids = case.indices(DType::I32, [k, a2, a3, 1], &list);
        let dst = case.b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
        let case = case.build();
        let values = case.values(table);
        let want: Vec<f64> = (0..n * list.len())
            .map(|e| {
                let [i0, _, j, l] = index([n, k, a2, a3], e);
                values[at([n, rows, a2, a3], [i0, list[e / n] as usize, j, l])]
            })
            .collect();
        for on in devices() {
            let outcome = case.run(on);
            assert_close(&outcome.values(dst), &want, 0.0, 0.0, &format!("{dtype} {}", on.name));
            let out = case.graph.tensor(dst).unwrap().desc.dtype();
            assert_eq!(out, if dtype == DType::I32 { DType::I32 } else { DType::F32 });
        }
    }
}

/// A padded table, transposed ids, a destination with gaps; enough rows for all workers.
#[test]
fn get_rows_supports_strided_operands() {
    let (n, rows, k, a2) = (33, 40, 700, 3);
    let strided = |dtype, ne, nb| TensorDesc::strided(dtype, ne, nb).unwrap();
    let mut case = Case::new();
    let table =
        case.leaf_with_desc(strided(DType::F32, [n, rows, a2, 1], [4, 140, 6000, 18_000]), &normal(3, n * rows * a2));
    let list: Vec<f32> = random_indices(4, k * a2, rows).into_iter().map(|v| v as f32).collect();
    let ids = case.leaf_with_desc(strided(DType::I32, [k, a2, 1, 1], [12, 4, 8400, 8400]), &list);
    let dst = case.b.leaf_with_desc(strided(DType::F32, [n, k, a2, 1], [4, 136, 96_000, 288_000])).unwrap();
    case.b.node_into(Rows::GetRows, &[Some(table), Some(ids)], dst).unwrap();
    let case = case.build();
    let values = case.values(table);
    let want: Vec<f64> =
        (0..n * k * a2).map(|e| values[at([n, rows, a2, 1], [e % n, list[e / n] as usize, e / n / k, 0])]).collect();
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 0.0, 0.0, on.name);
    }
}

/// More rows than a grid has blocks in y and z (65,535).
#[test]
fn rows_may_exceed_the_grid() {
    let (rows, count) = (9, 70_000);
    for (dtype, n) in [(DType::F32, 1), (DType::Q8_0, 32)] {
        let list = random_indices(15, count, rows);
        let mut case = Case::new();
        let table = case.leaf(dtype, [n, rows, 1, 1], &normal(16, n * rows));
        let ids = case.indices(DType::I32, [count, 1, 1, 1], &list);
        let dst = case.b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
        let case = case.build();
        let values = case.values(table);
        let want: Vec<f64> = list.iter().flat_map(|&id| &values[id as usize * n..][..n]).copied().collect();
        for on in devices() {
            assert!(case.run(on).values(dst) == want, "{dtype} {}", on.name);
        }
    }
    let set = SetRowsCase {
        dst: DType::F16,
        src: DType::F32,
        ids: DType::I64,
        b: [1, 70_000, 1, 1],
        rows: 80_000,
        lists: [1, 1],
    };
    set.run(&random_indices(17, 70_000, 80_000));
}

/// Types and shapes of a SET_ROWS; the names are those of [`Rows::SetRows`].
struct SetRowsCase {
    dst: DType,
    src: DType,
    ids: DType,
    /// Shape of b: `[n, r, b2, b3]`.
    b: [usize; 4],
    /// Rows of each matrix of the destination.
    rows: usize,
    /// Numbers of lists of ids: `[c1, c2]`.
    lists: [usize; 2],
}

impl SetRowsCase {
    /// Sets rows of a cache with random content and compares with setting them one after the other, in order.
    fn run(&self, list: &[i64]) {
        let SetRowsCase { dst: dtype, src, ids, b: [n, r, b2, b3], rows, lists: [c1, c2] } = *self;
        let what = format!("{src} {dtype} {ids} {:?} {rows} {c1} {c2}", self.b);
        let mut case = Case::new();
        let b = case.leaf(src, self.b, &normal(5, n * r * b2 * b3).iter().map(|v| 100.0 * v).collect::<Vec<_>>());
        let i = case.indices(ids, [r, c1, c2, 1], list);
        let cache = case.leaf(dtype, [n, rows, b2, b3], &normal(6, n * rows * b2 * b3));
        let desc = TensorDesc::contiguous(dtype, [n, rows, b2, b3]).unwrap();
        let dst = case.b.view(cache, desc, 0).unwrap();
        case.b.node_into(Rows::SetRows, &[Some(b), Some(i), Some(cache)], dst).unwrap();
        let case = case.build();
        let (values, mut want, row) = (case.values(b), case.bytes(cache), desc.row_bytes());
        for plane in 0..b2 * b3 {
            for k in 0..r {
                let id = list[((plane / b2 % c2) * c1 + plane % b2 % c1) * r + k] as usize;
                let v: Vec<f32> = values[(plane * r + k) * n..][..n].iter().map(|&v| v as f32).collect();
                let to = &mut want[(plane * rows + id) * row..][..row];
                match quantiser(dtype) {
                    Some(quantise) => quantise(&v, to),
                    None => to.copy_from_slice(&v.iter().flat_map(|&v| (v as i32).to_le_bytes()).collect::<Vec<_>>()),
                }
            }
        }
        for on in devices() {
            assert!(case.run(on).bytes(dst) == want, "{what} {}", on.name);
        }
    }
}

#[test]
fn set_rows_scatters_rows_of_every_type() {
    for dst in writable() {
        for (src, ids) in [(DType::F32, DType::I64), (DType::F32, DType::I32), (DType::F16, DType::I64)] {
            let n = if dst.is_block() { dst.block_len() } else { 33 };
            SetRowsCase { dst, src, ids, b: [n, 4, 2, 1], rows: 6, lists: [1, 1] }.run(&[5, 0, 3, 1]);
        }
    }
}

#[test]
fn set_rows_broadcasts_ids() {
    for (n, dst) in [(1, DType::F8_E4M3), (1, DType::F16), (1100, DType::F16)] {
        for lists in [[1, 1], [2, 1], [4, 3], [1, 3], [4, 1]] {
            let list: Vec<i64> = (0..3 * lists[0] * lists[1]).map(|k| (k * 4 % 9) as i64).collect();
            let (src, ids) = (DType::F32, DType::I64);
            SetRowsCase { dst, src, ids, b: [n, 3, 4, 3], rows: 9, lists }.run(&list);
        }
    }
}

/// Duplicate ids: from one row to more than a worker's share, short and long rows, with all workers.
#[test]
fn last_of_duplicate_ids_wins() {
    for (n, r, rows) in [(1, 20_000, 300), (64, 600, 7), (2080, 40, 3), (4128, 10, 1)] {
        for dst in [DType::F16, DType::F32, DType::Q8_0] {
            if n % dst.block_len() == 0 {
                let set = SetRowsCase { dst, src: DType::F32, ids: DType::I64, b: [n, r, 1, 1], rows, lists: [1, 1] };
                set.run(&random_indices(7, r, rows));
            }
        }
    }
}

#[test]
fn set_rows_of_no_rows_changes_nothing() {
    let mut case = Case::new();
    let b = case.leaf(DType::F32, [8, 0, 2, 1], &[]);
    let ids = case.indices(DType::I64, [0, 1, 1, 1], &[]);
    let cache = case.leaf(DType::F16, [8, 4, 2, 1], &normal(8, 64));
    let desc = TensorDesc::contiguous(DType::F16, [8, 4, 2, 1]).unwrap();
    let dst = case.b.view(cache, desc, 0).unwrap();
    case.b.node_into(Rows::SetRows, &[Some(b), Some(ids), Some(cache)], dst).unwrap();
    let case = case.build();
    for on in devices() {
        assert_eq!(case.run(on).bytes(dst), case.bytes(cache), "{}", on.name);
    }
}

#[test]
fn indices_out_of_range_are_rejected() {
    for bad in [-1, 6, i64::from(i32::MAX), i64::from(i32::MIN), i64::MAX, i64::MIN, 1 << 32] {
        for (op, ids) in [(Rows::GetRows, DType::I32), (Rows::SetRows, DType::I64), (Rows::SetRows, DType::I32)] {
            if ids == DType::I32 && i32::try_from(bad).is_err() {
                continue;
            }
            // One row, and enough rows to share.
            for k in [1, 5000] {
                let mut case = Case::new();
                let table = case.leaf(DType::F32, [8, 6, 1, 1], &normal(9, 48));
                let list: Vec<i64> = (0..k).map(|i| if i == k / 2 { bad } else { i % 6 }).collect();
                let i = case.indices(ids, [k as usize, 1, 1, 1], &list);
                let b = case.leaf(DType::F32, [8, k as usize, 1, 1], &normal(10, 8 * k as usize));
                match op {
                    Rows::GetRows => case.b.node(op, &[Some(table), Some(i)]).unwrap(),
                    Rows::SetRows => case.b.node(op, &[Some(b), Some(i), Some(table)]).unwrap(),
                };
                let case = case.build();
                for on in devices() {
                    let error = case.try_run(on).err();
                    let named = on.reported_bad_data(&error, Op::from(op).code());
                    assert!(named, "{op:?} {bad} {k} {}: {error:?}", on.name);
                }
            }
        }
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    use DType::{F16, F32, I16, I32, I64};
    for code in [OpCode::GetRows, OpCode::SetRows] {
        let op = Op::decode(code, &OpParams::default()).unwrap().unwrap();
        assert_eq!((op.code(), op.encode()), (code, OpParams::default()));
    }
    let get = |table: [usize; 4], ids: (DType, [usize; 4]), dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let srcs = [case.b.leaf(F32, table), case.b.leaf(ids.0, ids.1)].map(|id| Some(id.unwrap()));
        case.b.node_with_output(Rows::GetRows, &srcs, OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    assert!(get([8, 6, 2, 3], (I32, [4, 2, 3, 1]), (F32, [8, 4, 2, 3])));
    assert!(!get([8, 6, 2, 3], (I64, [4, 2, 3, 1]), (F32, [8, 4, 2, 3])), "ids of I64");
    assert!(!get([8, 6, 1, 3], (I32, [4, 2, 3, 1]), (F32, [8, 4, 2, 3])), "no broadcast");
    assert!(!get([8, 6, 3, 3], (I32, [4, 2, 3, 1]), (F32, [8, 4, 2, 3])), "more matrices than lists of ids");
    assert!(!get([8, 6, 2, 1], (I32, [4, 2, 1, 2]), (F32, [8, 4, 2, 1])), "four dimensions of ids");
    assert!(!get([8, 6, 2, 3], (I32, [4, 2, 3, 1]), (F16, [8, 4, 2, 3])), "dst is F32");
    assert!(!get([8, 6, 2, 3], (I32, [4, 2, 3, 1]), (F32, [8, 5, 2, 3])), "as many rows as ids");

    let set = |b: [usize; 4], ids: (DType, [usize; 4]), target: (DType, [usize; 4]), dst: [usize; 4]| {
        let mut case = Case::new();
        let leaf = |case: &mut Case, dtype, ne| -> TensorId { case.b.leaf(dtype, ne).unwrap() };
        let (b, ids) = (leaf(&mut case, F32, b), leaf(&mut case, ids.0, ids.1));
        let target = leaf(&mut case, target.0, target.1);
        let srcs = [Some(b), Some(ids), Some(target)];
        case.b.node_with_output(Rows::SetRows, &srcs, OutputSpec { dtype: F16, ne: dst }).is_ok()
    };
    let a = [8, 6, 4, 3];
    assert!(set([8, 5, 4, 3], (I64, [5, 2, 3, 1]), (F16, a), a));
    assert!(!set([8, 5, 4, 3], (F32, [5, 2, 3, 1]), (F16, a), a), "ids of F32");
    assert!(!set([7, 5, 4, 3], (I64, [5, 2, 3, 1]), (F16, a), a), "shorter rows");
    assert!(!set([8, 5, 2, 3], (I64, [5, 2, 3, 1]), (F16, a), a), "fewer matrices");
    assert!(
        !set([8, 5, 2, 1], (I64, [5, 1, 1, 1]), (F16, [8, 6, 1, 1]), [8, 6, 1, 1]),
        "more matrices than the target"
    );
    assert!(!set([8, 5, 4, 3], (I64, [4, 2, 3, 1]), (F16, a), a), "fewer ids than rows");
    assert!(!set([8, 5, 4, 3], (I64, [5, 3, 3, 1]), (F16, a), a), "4 is no multiple of 3");
    assert!(!set([8, 5, 4, 3], (I64, [5, 0, 3, 1]), (F16, a), a), "no list of ids");
    assert!(!set([8, 5, 4, 3], (I64, [5, 2, 1, 3]), (F16, a), a), "four dimensions of ids");
    assert!(!set([8, 5, 4, 3], (I64, [5, 2, 3, 1]), (F32, a), a), "another type than the target's");
    assert!(!set([8, 5, 4, 3], (I64, [5, 2, 3, 1]), (F16, [8, 7, 4, 3]), a), "another shape than the target's");

    // Whether a type has a conversion is not a matter of the shape rule: the device rejects it.
    let mut case = Case::new();
    let (table, ids) = (case.b.leaf(I16, [32, 6, 1, 1]).unwrap(), case.b.leaf(I32, [4, 1, 1, 1]).unwrap());
    assert!(dequantiser(I16).is_none());
    case.b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert!(case.try_run(on).is_err(), "{}", on.name);
    }
}
