use crate::devices::devices;
use fanout::ops::topk_mask::TopkMask;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;
use fastrand::Rng;

const NEG_INFINITY: f64 = f64::NEG_INFINITY;

/// The optional sources of a case.
#[derive(Clone, Copy, Debug, Default)]
struct Optional {
    /// Whether there are scores.
    score: bool,
    /// Cells of a block.
    blocks: Option<usize>,
    /// Length of the rows of extra cells.
    extra: Option<usize>,
}

/// The values of the sources, each with its shape; indices as numbers.
struct Values<'a> {
    mask: (&'a [f64], [usize; 4]),
    top_k: &'a [i64],
    score: Option<&'a [f32]>,
    blocks: Option<(&'a [i64], usize)>,
    extra: Option<&'a [i64]>,
}

/// For each cell of the result, asks whether it is kept: by the definition of the op, not by its kernel.
fn oracle(values: &Values<'_>, n_pick: usize, ne: [usize; 4]) -> Vec<f64> {
    let [n_kv, ..] = ne;
    let rows = ne[1..].iter().product::<usize>();
    let of_row = |all: &[i64], r: usize| all[all.len() / rows * r..all.len() / rows * (r + 1)].to_vec();
    let (mask, m) = values.mask;
    (0..n_kv * rows)
        .map(|i| {
            let ([c, i1, i2, i3], r) = (index(ne, i), i / n_kv);
            let live = |p: &i64| {
                let inside = (0..n_pick as i64).contains(p);
                inside && values.score.is_none_or(|score| score[r * n_pick + *p as usize] > f32::NEG_INFINITY)
            };
            let holds = |p: i64| match values.blocks {
                Some((cells, n_blk)) => cells[p as usize * n_blk..][..n_blk].contains(&(c as i64)),
                None => p == c as i64,
            };
            let picked = of_row(values.top_k, r).into_iter().filter(live).any(holds);
            let kept = picked || values.extra.is_some_and(|extra| of_row(extra, r).contains(&(c as i64)));
            if kept { mask[at(m, [c, i1 % m[1], i2 % m[2], i3 % m[3]])] } else { NEG_INFINITY }
        })
        .collect()
}

/// `n` indices, mostly below `bound`, some of them far outside.
fn indices(rng: &mut Rng, n: usize, bound: usize) -> Vec<i64> {
    let odd = [-1, -2, i64::from(i32::MIN), i64::from(i32::MAX), bound as i64];
    (0..n).map(|_| if rng.u8(..6) == 0 { odd[rng.usize(..odd.len())] } else { rng.i64(..bound as i64) }).collect()
}

#[test]
fn kept_cells_have_the_masks_value() {
    let shapes = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([7, 3, 1, 1], [7, 1, 1, 1]),
        ([33, 4, 6, 2], [33, 2, 3, 1]),
        ([300, 5, 2, 3], [300, 5, 1, 3]),
        ([2500, 2, 1, 1], [2500, 2, 1, 1]),
    ];
    let options = [
        Optional::default(),
        Optional { score: true, ..Default::default() },
        Optional { blocks: Some(3), ..Default::default() },
        Optional { extra: Some(2), ..Default::default() },
        Optional { score: true, blocks: Some(5), extra: Some(300) },
    ];
    let mut rng = Rng::with_seed(1);
    for (ne, m) in shapes {
        for optional in options {
            for dtype in [DType::F16, DType::F32] {
                let rows = |n| [n, ne[1], ne[2], ne[3]];
                let outer = ne[1] * ne[2] * ne[3];
                let n_top = rng.usize(1..300);
                // The score or the blocks determine it: fewer or more than there are cells.
                let n_pick =
                    if optional.score || optional.blocks.is_some() { rng.usize(1..2 * ne[0] + 2) } else { ne[0] };
                let top_k = indices(&mut rng, n_top * outer, n_pick);
                let mut score = normal(2, n_pick * outer);
                for s in score.iter_mut() {
                    let odd = [f32::NEG_INFINITY, f32::NAN, f32::MIN, f32::INFINITY, -f32::NAN];
                    if rng.u8(..3) == 0 {
                        *s = odd[rng.usize(..odd.len())];
                    }
                }
                let blocks = optional.blocks.map(|n_blk| (indices(&mut rng, n_blk * n_pick, ne[0]), n_blk));
                let extra = optional.extra.map(|n| indices(&mut rng, n * outer, ne[0]));
                let mut masked = normal(3, m.iter().product());
                masked.iter_mut().step_by(5).for_each(|v| *v = f32::NEG_INFINITY);

                let mut case = Case::new();
                let mask = case.leaf(dtype, m, &masked);
                let picks = case.indices(DType::I32, rows(n_top), &top_k);
                let scores = optional.score.then(|| case.leaf(DType::F32, rows(n_pick), &score));
                let cells = blocks.as_ref().map(|(b, n)| case.indices(DType::I32, [*n, n_pick, 1, 1], b));
                let more = extra.as_ref().map(|e| case.indices(DType::I32, rows(e.len() / outer), e));
                let dst = case.b.node(TopkMask, &[Some(mask), Some(picks), scores, cells, more]).unwrap();
                let case = case.build();
                let values = Values {
                    mask: (&case.values(mask), m),
                    top_k: &top_k,
                    score: optional.score.then_some(&*score),
                    blocks: blocks.as_ref().map(|(b, n)| (&**b, *n)),
                    extra: extra.as_deref(),
                };
                let want = oracle(&values, n_pick, ne);
                for on in devices() {
                    assert_eq!(case.run(on).values(dst), want, "{ne:?} {optional:?} {dtype} {}", on.name);
                }
            }
        }
    }
}

/// The kept cells are copied: a NaN keeps its bits. Sources and destination with strides of their own.
#[test]
fn strided_operands_and_bits() {
    let (ne, mut rng) = ([6, 4, 2, 1], Rng::with_seed(4));
    let bytes: Vec<u8> = [0x7e01u16, 0xfdff, 0x8000, 1, 0x7c00, 0xfc00].map(u16::to_le_bytes).concat();
    let mut case = Case::new();
    let mask = case.raw(DType::F16, [6, 1, 1, 1], bytes.clone());
    let wide = indices(&mut rng, 2 * 8 * 5, 6);
    let picks = case.indices(DType::I32, [5, 8, 2, 1], &wide);
    // The first three of every second entry of each row, of the rows in another order.
    let desc = TensorDesc::strided(DType::I32, [3, 4, 2, 1], [8, 40, 20, 320]).unwrap();
    let picks = case.b.view(picks, desc, 0).unwrap();
    let dst = case.b.leaf_with_desc(TensorDesc::strided(DType::F16, ne, [2, 40, 16, 160]).unwrap()).unwrap();
    case.b.node_into(TopkMask, &[Some(mask), Some(picks)], dst).unwrap();
    let case = case.build();
    let of = |i: usize, i1: usize, i2: usize| wide[2 * i + 10 * i1 + 5 * i2];
    let want: Vec<u8> = (0..48)
        .flat_map(|k| {
            let [c, i1, i2, _] = index(ne, k);
            let kept = (0..3).any(|i| of(i, i1, i2) == c as i64);
            if kept { [bytes[2 * c], bytes[2 * c + 1]] } else { 0xfc00u16.to_le_bytes() }
        })
        .collect();
    for on in devices() {
        assert_eq!(case.run(on).bytes(dst), want, "{}", on.name);
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    assert_eq!(Op::decode(OpCode::TopKMask, &OpParams::default()).unwrap(), Some(TopkMask.into()));
    let valid = [[6, 2, 1, 1], [3, 4, 2, 1], [5, 4, 2, 1], [2, 5, 1, 1], [1, 4, 2, 1]];
    let types = [DType::F16, DType::I32, DType::F32, DType::I32, DType::I32];
    let build = |types: [DType; 5], shapes: [[usize; 4]; 5], count: usize| {
        let mut case = Case::new();
        let srcs: Vec<_> =
            types.iter().zip(shapes).take(count).map(|(&t, ne)| Some(case.b.leaf(t, ne).unwrap())).collect();
        case.b.node(TopkMask, &srcs).map(|_| case)
    };
    let built = |types, shapes, count| build(types, shapes, count).is_ok();
    for count in 2..=5 {
        assert!(built(types, valid, count), "{count} sources");
    }
    assert!(!built(types, valid, 1), "no picks");
    for (source, shape, what) in [
        (0, [6, 3, 1, 1], "the mask's rows do not repeat"),
        (2, [5, 2, 1, 1], "fewer rows of scores"),
        (2, [4, 4, 2, 1], "another number of blocks than of scores"),
        (3, [2, 5, 2, 1], "blocks are a matrix"),
        (4, [1, 4, 1, 1], "fewer rows of extra cells"),
    ] {
        let mut shapes = valid;
        shapes[source] = shape;
        assert!(!built(types, shapes, 5), "{what}");
    }
    for source in [1, 3, 4] {
        let mut types = types;
        types[source] = DType::I64;
        assert!(!built(types, valid, 5), "indices of source {source} are I32");
    }
    // Whether the device supports another type is not a matter of the shape rule.
    for (source, dtype) in [(0, DType::BF16), (0, DType::I32), (2, DType::F16)] {
        let mut types = types;
        types[source] = dtype;
        let case = build(types, valid, 5).unwrap().build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{source} {dtype} {}", on.name);
        }
    }
}
