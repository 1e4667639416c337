//! Small tasks that models do not have, but callers may build.

use super::{LoadedModel, Model, compare, devices, encode, group, noise};
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::concat::Concat;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::reduce::Reduce;
use fanout::ops::rows::Rows;
use fanout::ops::sequence::Sequence;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::ops::unary::Unary;
use fanout::sched::TaskBuilder;
use fanout::sched::tensor_group::{Distribution, TensorSplit, TensorSplitError};
use fanout::tensor::{DType, TensorDesc};

/// A task of one input X `[32, 4]` and what `build` makes of it.
fn small_task(build: &dyn Fn(&mut TaskBuilder, TensorId) -> TensorId) -> Model {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [32, 4, 1, 1]).unwrap();
    let logits = build(&mut b, x);
    b.output(logits).unwrap();
    let inputs = vec![(x, encode(DType::F32, &noise(3, 128)))];
    Model { task: b.build().unwrap(), inputs, logits }
}

fn weight(b: &mut TaskBuilder, name: &str, group: usize, dtype: DType, ne: [usize; 4]) -> TensorId {
    b.stored(name, TensorDesc::contiguous(dtype, ne).unwrap(), group, None).unwrap()
}

fn product(b: &mut TaskBuilder, w: TensorId, x: TensorId) -> TensorId {
    b.node(MulMat::PLAIN, &[Some(w), Some(x)]).unwrap()
}

/// Graphs that models do not have, but callers may build.
#[test]
fn unusual_graphs_give_the_same_results() {
    let f32 = DType::F32;
    let rows = |b: &mut TaskBuilder, name: &str, x: TensorId| {
        let w = weight(b, name, 0, f32, [32, 48, 1, 1]);
        product(b, w, x)
    };
    type Build<'a> = &'a dyn Fn(&mut TaskBuilder, TensorId) -> TensorId;
    let cases: [(&str, Build<'_>); 10] = [
        ("a stored tensor that is written, read as a whole, and written again", &|b, x| {
            let y = rows(b, "w", x);
            let cache = weight(b, "cache", 0, f32, [48, 4, 1, 1]);
            let first = b.node_onto(CopyOp::Cpy, &[Some(y), Some(cache)], cache).unwrap();
            let sorted = b.node(Sort::Argsort { descending: false }, &[Some(first)]).unwrap();
            let twice = b.node(Unary::Scale { scale: 2.0, bias: 1.0 }, &[Some(y)]).unwrap();
            let second = b.node_onto(CopyOp::Cpy, &[Some(twice), Some(cache)], cache).unwrap();
            let sum = b.node(Reduce::SumRows, &[Some(second)]).unwrap();
            let sorted =
                b.node_as(CopyOp::Cpy, &[Some(sorted), None], OutputSpec { dtype: f32, ne: [48, 4, 1, 1] }).unwrap();
            b.node(Binary::Add, &[Some(sorted), Some(sum)]).unwrap()
        }),
        ("a view whose rows go on in the next row", &|b, x| {
            let y = rows(b, "w", x);
            let desc = TensorDesc::strided(f32, [40, 3, 1, 1], [4, 192, 576, 576]).unwrap();
            let view = b.view(y, desc, 64).unwrap();
            b.node(CopyOp::Cont, &[Some(view)]).unwrap()
        }),
        ("the two halves of one product", &|b, x| {
            let y = rows(b, "w", x);
            let half = TensorDesc::strided(f32, [24, 4, 1, 1], [4, 192, 768, 768]).unwrap();
            let (gate, up) = (b.view(y, half, 0).unwrap(), b.view(y, half, 96).unwrap());
            let gate = b.node(CopyOp::Cont, &[Some(gate)]).unwrap();
            let up = b.node(CopyOp::Cont, &[Some(up)]).unwrap();
            b.node(Binary::Mul, &[Some(gate), Some(up)]).unwrap()
        }),
        ("a computed tensor that two nodes write", &|b, x| {
            let y = rows(b, "w", x);
            let all = b.node(Unary::Sqr, &[Some(y)]).unwrap();
            let part = TensorDesc::strided(f32, [48, 2, 1, 1], [4, 192, 384, 384]).unwrap();
            let part = b.view(all, part, 192).unwrap();
            let other = b.node(Unary::Scale { scale: 3.0, bias: 0.5 }, &[Some(part)]).unwrap();
            b.node_onto(CopyOp::Cpy, &[Some(other), Some(part)], part).unwrap();
            b.node(Unary::Scale { scale: 1.0, bias: 2.0 }, &[Some(all)]).unwrap()
        }),
        ("partial sums that are used whole, twice", &|b, x| {
            let y = rows(b, "up", x);
            let down = weight(b, "down", 0, f32, [48, 32, 1, 1]);
            let sums = product(b, down, y);
            let square = b.node(Unary::Sqr, &[Some(sums)]).unwrap();
            let scaled = b.node(Unary::Scale { scale: 0.5, bias: 0.0 }, &[Some(sums)]).unwrap();
            b.node(Binary::Sub, &[Some(scaled), Some(square)]).unwrap()
        }),
        ("a table that is multiplied before rows of it are looked up", &|b, x| {
            let w = weight(b, "w", 0, DType::Q4_0, [32, 48, 1, 1]);
            let y = product(b, w, x);
            let ids = b.node(Sort::Argsort { descending: true }, &[Some(y)]).unwrap();
            let ids = b.view(ids, TensorDesc::contiguous(DType::I32, [48, 1, 1, 1]).unwrap(), 0).unwrap();
            b.node(Rows::GetRows, &[Some(w), Some(ids)]).unwrap()
        }),
        ("a cache that is rotated in place", &|b, x| {
            let y = rows(b, "w", x);
            let cache = weight(b, "cache", 0, f32, [48, 4, 1, 1]);
            b.node_onto(CopyOp::Cpy, &[Some(y), Some(cache)], cache).unwrap();
            let all = b.desc(cache).unwrap();
            let view = b.view(cache, all, 0).unwrap();
            let done = b.node_onto(Unary::Scale { scale: 2.0, bias: 0.0 }, &[Some(view)], cache).unwrap();
            b.node(Unary::Sqr, &[Some(done)]).unwrap()
        }),
        ("a softmax over blocks, whose stored mask has a row for each block", &|b, x| {
            let y = rows(b, "w", x);
            let y = b.reshape(y, [6, 8, 4, 1]).unwrap();
            let mask = weight(b, "mask", 0, f32, [6, 8, 1, 1]);
            b.node(SoftMax { scale: 2.0, max_bias: 0.0 }, &[Some(y), Some(mask)]).unwrap()
        }),
        ("a softmax over blocks with a mask that is split as they are", &|b, x| {
            let [y, mask] = ["w", "other"].map(|name| {
                let product = rows(b, name, x);
                b.reshape(product, [6, 8, 4, 1]).unwrap()
            });
            b.node(SoftMax { scale: 2.0, max_bias: 0.0 }, &[Some(y), Some(mask)]).unwrap()
        }),
        ("two products, joined along the dimension in which they are split", &|b, x| {
            let [y, z] = ["w", "other"].map(|name| rows(b, name, x));
            let both = b.node(Concat::Concat { dim: 0 }, &[Some(y), Some(z)]).unwrap();
            b.node(Reduce::Cumsum, &[Some(both)]).unwrap()
        }),
    ];
    for (what, build) in cases {
        for ranks in [2, 3] {
            eprintln!("{what}, {ranks} ranks");
            compare(&|_| small_task(build), &[], vec![group(0..ranks, &vec![1.0; ranks])], 0, 1e-10);
        }
    }
}

/// Blocks of rows, as samplers have them: ops that treat each row alone need no collective.
#[test]
fn ops_on_blocks_of_a_split_product_are_local() {
    let make = |_: &[usize]| {
        small_task(&|b, x| {
            let w = weight(b, "w", 0, DType::F32, [32, 48, 1, 1]);
            let y = product(b, w, x);
            let rows = b.reshape(y, [6, 8, 4, 1]).unwrap();
            let soft = b.node(SoftMax { scale: 2.0, max_bias: 0.0 }, &[Some(rows)]).unwrap();
            let sums = b.node(Reduce::Cumsum, &[Some(soft)]).unwrap();
            let best = OutputSpec { dtype: DType::I32, ne: [1, 8, 4, 1] };
            let best = b.node_as(Sort::TopK, &[Some(rows)], best).unwrap();
            let order = b.node(Sort::Argsort { descending: true }, &[Some(rows)]).unwrap();
            let tables = b.reshape(sums, [1, 6, 8, 4]).unwrap();
            let mut all = sums;
            for ids in [best, order] {
                let found = b.node(Rows::GetRows, &[Some(tables), Some(ids)]).unwrap();
                let ne = b.desc(ids).unwrap().ne();
                let found = b.reshape(found, ne).unwrap();
                all = b.node(Concat::Concat { dim: 0 }, &[Some(all), Some(found)]).unwrap();
            }
            all
        })
    };
    assert_local(&make);
}

/// A group of 2 and of 3 ranks computes the results of one device, without collectives.
fn assert_local(make: &dyn Fn(&[usize]) -> Model) {
    for ranks in [2, 3] {
        let groups = || vec![group(0..ranks, &vec![1.0; ranks])];
        compare(make, &[], groups(), 0, 1e-10);
        let model = make(&[]);
        let loaded = LoadedModel::new(&model, devices(ranks), groups(), 0, false);
        assert!(!loaded.has_collectives(), "{ranks} ranks");
    }
}

/// A table for each block of a product of one column: the blocks are dimension 3 of the tables, and dimension 2 of their lists of ids.
#[test]
fn rows_of_tables_along_dimension_3_are_local() {
    let make = |_: &[usize]| {
        small_task(&|b, x| {
            let column = b.view(x, TensorDesc::contiguous(DType::F32, [32, 1, 1, 1]).unwrap(), 0).unwrap();
            let w = weight(b, "w", 0, DType::F32, [32, 48, 1, 1]);
            let y = product(b, w, column);
            let blocks = b.reshape(y, [6, 1, 8, 1]).unwrap();
            let order = b.node(Sort::Argsort { descending: true }, &[Some(blocks)]).unwrap();
            let tables = b.reshape(y, [1, 6, 1, 8]).unwrap();
            b.node(Rows::GetRows, &[Some(tables), Some(order)]).unwrap()
        })
    };
    assert_local(&make);
}

/// A node without stored sources before those of the ranks, on the device of another group.
#[test]
fn nodes_of_other_groups_do_not_join_the_programs_of_ranks() {
    let make = |groups: &[usize]| {
        let of = |block: usize| groups[block];
        small_task(&|b, x| {
            let x = b.node(Unary::Sqr, &[Some(x)]).unwrap();
            let w = weight(b, "w", of(0), DType::F32, [32, 48, 1, 1]);
            let down = weight(b, "down", of(0), DType::F32, [48, 32, 1, 1]);
            let y = product(b, w, x);
            let y = product(b, down, y);
            let w = weight(b, "last", of(1), DType::F32, [32, 16, 1, 1]);
            product(b, w, y)
        })
    };
    for (groups, blocks) in [
        (vec![group(2..3, &[1.0]), group(0..2, &[1.0; 2])], [1, 0]),
        (vec![group(2..3, &[1.0]), group(0..2, &[1.0; 2])], [0, 1]),
        (vec![group(0..2, &[1.0; 2]), group(2..5, &[1.0; 3])], [1, 0]),
    ] {
        compare(&make, &blocks, groups, 0, 1e-10);
    }
    let shared = vec![group(0..2, &[1.0; 2]), group(1..3, &[1.0; 2])];
    assert!(matches!(TensorSplit::new(&make(&[0, 0]).task, shared), Err(TensorSplitError::Group(_))));
    let task = small_task(&|b, x| {
        let cache = weight(b, "cache", 0, DType::F32, [32, 4, 1, 1]);
        let written = b.node_onto(CopyOp::Cpy, &[Some(x), Some(cache)], cache).unwrap();
        b.pin(1).unwrap();
        b.node(Unary::Sqr, &[Some(written)]).unwrap()
    });
    let groups = vec![group(0..1, &[1.0]), group(1..3, &[1.0; 2])];
    let error = TensorSplit::new(&task.task, groups).unwrap_err();
    assert!(matches!(error, TensorSplitError::PinnedElsewhere { pin: 1, home: 0, .. }), "{error}");
}

/// Attention with ALiBi has no rule: keys and values become whole, also of types with blocks.
#[test]
fn attention_without_a_rule_is_mirrored() {
    let make = |_: &[usize]| {
        small_task(&|b, x| {
            let w = weight(b, "w", 0, DType::F32, [32, 128, 1, 1]);
            let y = product(b, w, x);
            let keys = weight(b, "cache", 0, DType::Q8_0, [128, 4, 1, 1]);
            let rows =
                b.node(Sequence::Arange { start: 0.0, stop: 4.0, step: 1.0 }, &fanout::graph::NO_SOURCES).unwrap();
            let rows = b
                .node_as(CopyOp::Cpy, &[Some(rows), None], OutputSpec { dtype: DType::I32, ne: [4, 1, 1, 1] })
                .unwrap();
            b.node_onto(Rows::SetRows, &[Some(y), Some(rows), Some(keys)], keys).unwrap();
            let heads = TensorDesc::strided(DType::Q8_0, [32, 4, 4, 1], [34, 136, 34, 544]).unwrap();
            let keys = b.view(keys, heads, 0).unwrap();
            let q = b.reshape(y, [32, 4, 4, 1]).unwrap();
            let q = b.permute(q, [0, 2, 1, 3]).unwrap();
            let op = FlashAttn { scale: 0.2, max_bias: 8.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let mask = weight(b, "mask", 0, DType::F16, [4, 4, 1, 1]);
            b.node(op, &[Some(q), Some(keys), Some(keys), Some(mask)]).unwrap()
        })
    };
    let split = compare(&make, &[], vec![group(0..2, &[1.0; 2])], 0, 1e-4);
    assert_eq!(split.distribution("cache"), Some(&Distribution::Mirrored));
}
