//! Tasks run on a group of CPU devices and on one device: the results must agree.

mod small_tasks;

use fanout::ops::unary::Unary;
use fanout::sched::TaskBuilder;
use fanout::sched::tensor_group::{Distribution, TensorGroup, TensorSplit, TensorSplitError};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::transformer::{LoadedModel, Model, SMALL, Shape, devices, encode, group, model, noise};

/// Runs a model on groups. Returns the logits of two runs, and the split.
fn run(
    model: &Model,
    groups: Vec<TensorGroup>,
    small: usize,
    options: impl FnOnce(TensorSplit) -> TensorSplit,
) -> (Vec<f32>, TensorSplit) {
    let count = groups.iter().flat_map(|group| group.devices()).max().unwrap() + 1;
    let mut loaded = LoadedModel::with_split(model, devices(count), groups, small, options);
    let results = [loaded.run().unwrap(), loaded.run().unwrap()];
    assert_eq!(results[0], results[1], "two runs");
    (results[0].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(), loaded.split)
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let sum = |f: &dyn Fn(usize) -> f64| (0..want.len()).map(f).sum::<f64>();
    let error = sum(&|i| f64::from(got[i] - want[i]).powi(2));
    error / sum(&|i| f64::from(want[i]).powi(2))
}

/// Compares a task on groups, with collective nodes and with copied collectives, with the same task on one device. `make` gets the
/// group of each block.
fn compare(
    make: &dyn Fn(&[usize]) -> Model,
    blocks: &[usize],
    groups: Vec<TensorGroup>,
    small: usize,
    bound: f64,
) -> TensorSplit {
    let (want, _) = run(&make(&vec![0; blocks.len()]), vec![group(0..1, &[1.0])], small, |split| split);
    let (got, split) = run(&make(blocks), groups.clone(), small, |split| split);
    let (copied, _) = run(&make(blocks), groups.clone(), small, |split| split.with_copied_collectives(true));
    assert_eq!(got, copied, "collective nodes, and copies with additions");
    let (scattered, _) = run(&make(blocks), groups.clone(), small, |split| split.with_scattered_sums(0));
    assert_eq!(got, scattered, "sums of pieces that are gathered");
    for scatter_bytes in [0, usize::MAX] {
        let options = |split: TensorSplit| split.with_bf16_sums(true).with_scattered_sums(scatter_bytes);
        let (rounded, _) = run(&make(blocks), groups.clone(), small, options);
        let error = nmse(&rounded, &want);
        assert!(error <= bound.max(1e-4), "sums of BF16: NMSE {error:e}");
    }
    let error = nmse(&got, &want);
    assert!(error <= bound, "NMSE {error:e}");
    split
}

/// Compares a transformer.
fn check(shape: Shape, blocks: &[usize], groups: Vec<TensorGroup>, small: usize) -> TensorSplit {
    let bound = if shape.weight == DType::F32 && shape.cache == DType::F32 { 1e-10 } else { 1e-4 };
    compare(&|blocks| model(shape, blocks), blocks, groups, small, bound)
}

#[test]
fn a_transformer_gives_the_same_logits_on_a_group() {
    for flash in [true, false] {
        for (ranks, shares) in [(2, vec![1.0, 1.0]), (2, vec![3.0, 1.0]), (3, vec![1.0; 3]), (4, vec![1.0; 4])] {
            for bias in [false, true] {
                let shape = Shape { flash, bias, ..SMALL };
                let split = check(shape, &[0, 0], vec![group(0..ranks, &shares)], 0);
                let axis = |name: &str| match split.distribution(name).unwrap() {
                    Distribution::Split { axis, .. } => Some(*axis),
                    Distribution::Mirrored => None,
                };
                for (name, want) in [
                    ("q.0", Some(1)),
                    ("k.1", Some(1)),
                    ("attn_out.0", Some(0)),
                    ("down.1", Some(0)),
                    ("gate.0", Some(1)),
                    ("cache_k.0", Some(0)),
                    ("cache_v.0", Some(if flash { 0 } else { 1 })),
                    ("attn_norm.0", None),
                    ("embedding", None),
                    ("output", Some(1)),
                ] {
                    assert_eq!(axis(name), want, "{name} over {ranks} ranks");
                }
            }
        }
    }
}

#[test]
fn fewer_heads_than_ranks_are_mirrored() {
    for flash in [true, false] {
        for (heads, kv_heads, ranks) in [(8, 1, 2), (8, 2, 4), (6, 2, 4), (6, 1, 3), (4, 2, 3)] {
            let shape = Shape { heads, kv_heads, flash, ..SMALL };
            // A single head could be split by channels, and gathered: small weights are not.
            let small = if kv_heads == 1 { usize::MAX } else { 0 };
            let split = check(shape, &[0], vec![group(0..ranks, &vec![1.0; ranks])], small);
            assert_eq!(split.distribution("k.0"), Some(&Distribution::Mirrored));
            assert_eq!(split.distribution("cache_k.0"), Some(&Distribution::Mirrored));
        }
    }
}

#[test]
fn tied_embeddings_groups_of_groups_and_types() {
    let two = || vec![group(0..2, &[1.0; 2]), group(2..4, &[1.0, 2.0])];
    check(Shape { tied: true, ..SMALL }, &[0, 0], vec![group(0..2, &[1.0; 2])], 0);
    check(SMALL, &[0, 1], two(), 0);
    check(Shape { tied: true, flash: false, ..SMALL }, &[0, 1, 0], two(), 0);
    check(Shape { weight: DType::Q4_0, cache: DType::Q8_0, ..SMALL }, &[0, 0], two(), 0);
    check(Shape { weight: DType::Q4_0, cache: DType::F16, flash: false, ..SMALL }, &[0, 0], two(), 0);
    check(SMALL, &[1, 0], vec![group(2..3, &[1.0]), group(0..2, &[1.0; 2])], 0);
    // Small weights are mirrored where their results would be gathered, but not otherwise.
    check(SMALL, &[0, 0], two(), usize::MAX);
}

/// Heads of 32 whose parts end within blocks of 256: the results are gathered.
#[test]
fn heads_that_cut_a_block_are_gathered() {
    let shape = Shape { width: 256, heads: 8, kv_heads: 4, ff: 1024, weight: DType::Q4_K, ..SMALL };
    for (ranks, attn_out) in [(2, 1), (4, 1)] {
        let split = check(shape, &[0], vec![group(0..ranks, &vec![1.0; ranks])], 0);
        let Some(Distribution::Split { axis, .. }) = split.distribution("attn_out.0") else { panic!("mirrored") };
        assert_eq!(*axis, attn_out, "8 heads of 32 are one block of 256");
        assert!(matches!(split.distribution("down.0"), Some(Distribution::Split { axis: 0, .. })));
    }
}

#[test]
fn wrong_groups_and_tasks_are_refused() {
    let task = model(SMALL, &[0, 0]).task;
    for (devices, shares) in
        [(vec![], vec![]), (vec![0, 0], vec![1.0; 2]), (vec![0], vec![0.0]), (vec![0, 1], vec![1.0])]
    {
        assert!(TensorGroup::new(devices, shares).is_err());
    }
    let groups = || vec![group(0..2, &[1.0; 2])];
    let elsewhere = model(SMALL, &[0, 1]).task;
    assert!(matches!(TensorSplit::new(&elsewhere, groups()), Err(TensorSplitError::UnknownGroup { group: 1, .. })));
    let split = TensorSplit::new(&task, groups()).unwrap();
    let other = model(Shape { ff: 256, ..SMALL }, &[0, 0]).task;
    let error = split.apply(&other, &devices(2), &|_, _| None).unwrap_err();
    assert!(matches!(&error, TensorSplitError::UnknownStored(name) if name.starts_with("gate")), "{error}");
    let mut b = TaskBuilder::new();
    let w = b.stored("", TensorDesc::contiguous(DType::F32, [8, 8, 1, 1]).unwrap(), 0, None).unwrap();
    b.node(Unary::Sqr, &[Some(w)]).unwrap();
    assert!(matches!(TensorSplit::new(&b.build().unwrap(), groups()), Err(TensorSplitError::StoredName(_))));
}
