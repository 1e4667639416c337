//! Tasks run on a group of CPU devices and on one device: the results must agree.

mod small_tasks;

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::Unary;
use fanout::sched::tensor_group::{Distribution, TensorGroup, TensorSplit, TensorSplitError};
use fanout::sched::{Options, Scheduler, Storage, Task, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A transformer of two blocks, for tests.
#[derive(Clone, Copy)]
struct Shape {
    width: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    ff: usize,
    vocab: usize,
    tokens: usize,
    context: usize,
    weight: DType,
    cache: DType,
    flash: bool,
    tied: bool,
    bias: bool,
}

const SMALL: Shape = Shape {
    width: 96,
    heads: 8,
    kv_heads: 4,
    head: 32,
    ff: 192,
    vocab: 80,
    tokens: 3,
    context: 8,
    weight: DType::F32,
    cache: DType::F32,
    flash: true,
    tied: false,
    bias: false,
};

struct Model {
    task: Task,
    inputs: Vec<(TensorId, Vec<u8>)>,
    logits: TensorId,
}

/// Pseudo-random numbers from -1 to 1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn seed_of(name: &str) -> u64 {
    name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(131).wrapping_add(u64::from(byte)))
}

/// The bytes of a stored tensor: caches are zero.
fn stored_bytes(name: &str, desc: &TensorDesc) -> Vec<u8> {
    if name.starts_with("cache") {
        return vec![0; desc.extent()];
    }
    let scale = 1.5 / (desc.ne()[0] as f32).sqrt();
    let values: Vec<f32> = noise(seed_of(name), desc.elements()).iter().map(|x| x * scale).collect();
    encode(desc.dtype(), &values)
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
    fanout::tensor::quant::quantiser(dtype).unwrap()(values, &mut bytes);
    bytes
}

fn model(shape: Shape, groups: &[usize]) -> Model {
    let Shape { width, heads, kv_heads, head, ff, vocab, tokens, context, .. } = shape;
    let mut b = TaskBuilder::new();
    let contiguous = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let stored = |b: &mut TaskBuilder, name: String, group: usize, dtype: DType, ne: [usize; 4]| {
        b.stored(name, contiguous(dtype, ne), group, None).unwrap()
    };
    let ids = b.input("ids", DType::I32, [tokens, 1, 1, 1]).unwrap();
    let positions = b.input("positions", DType::I32, [tokens, 1, 1, 1]).unwrap();
    let rows = b.input("rows", DType::I64, [tokens, 1, 1, 1]).unwrap();
    let mask_type = if shape.flash { DType::F16 } else { DType::F32 };
    let mask = b.input("mask", mask_type, [context, tokens, 1, 1]).unwrap();
    let table = stored(&mut b, "embedding".to_owned(), groups[0], DType::F32, [width, vocab, 1, 1]);
    let mut x = b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
    for (block, &group) in groups.iter().enumerate() {
        let weight = |b: &mut TaskBuilder, name: &str, dtype: DType, ne: [usize; 4]| {
            stored(b, format!("{name}.{block}"), group, dtype, ne)
        };
        let matrix = |k, n| [k, n, 1, 1];
        let norm = |b: &mut TaskBuilder, x, w| {
            let y = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
            b.node(Binary::Mul, &[Some(y), Some(w)]).unwrap()
        };
        let linear = |b: &mut TaskBuilder, name: &str, x, k: usize, n: usize| {
            let w = weight(b, name, shape.weight, matrix(k, n));
            let y = b.node(MulMat::PLAIN, &[Some(w), Some(x)]).unwrap();
            if !shape.bias {
                return y;
            }
            let bias = weight(b, &format!("{name}_bias"), DType::F32, matrix(n, 1));
            b.node(Binary::Add, &[Some(y), Some(bias)]).unwrap()
        };
        let w = stored(&mut b, format!("attn_norm.{block}"), group, DType::F32, [width, 1, 1, 1]);
        let h = norm(&mut b, x, w);
        let q = linear(&mut b, "q", h, width, heads * head);
        let k = linear(&mut b, "k", h, width, kv_heads * head);
        let v = linear(&mut b, "v", h, width, kv_heads * head);
        let rope = Rope::new(RopeMode::Neox, head as u32);
        let heads_of = |b: &mut TaskBuilder, x, count: usize| {
            let x = b.reshape(x, [head, count, tokens, 1]).unwrap();
            b.node(rope, &[Some(x), Some(positions)]).unwrap()
        };
        let q = heads_of(&mut b, q, heads);
        let k = heads_of(&mut b, k, kv_heads);
        let k = b.reshape(k, [head * kv_heads, tokens, 1, 1]).unwrap();
        let kv = head * kv_heads;
        let keys = stored(&mut b, format!("cache_k.{block}"), group, shape.cache, [kv, context, 1, 1]);
        b.node_onto(Rows::SetRows, &[Some(k), Some(rows), Some(keys)], keys).unwrap();
        let (block_bytes, block_len) = (shape.cache.block_bytes(), shape.cache.block_len());
        let (row, of_head) = (kv / block_len * block_bytes, head / block_len * block_bytes);
        let view =
            TensorDesc::strided(shape.cache, [head, context, kv_heads, 1], [block_bytes, row, of_head, row]).unwrap();
        let k_view = b.view(keys, view, 0).unwrap();
        let q = b.permute(q, [0, 2, 1, 3]).unwrap();
        let scale = (head as f32).sqrt().recip();
        let attended = if shape.flash {
            let values = stored(&mut b, format!("cache_v.{block}"), group, shape.cache, [kv, context, 1, 1]);
            b.node_onto(Rows::SetRows, &[Some(v), Some(rows), Some(values)], values).unwrap();
            let v_view = b.view(values, view, 0).unwrap();
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let y = b.node(op, &[Some(q), Some(k_view), Some(v_view), Some(mask)]).unwrap();
            b.reshape(y, [heads * head, tokens, 1, 1]).unwrap()
        } else {
            // Values are stored transposed: one row per channel.
            let values = stored(&mut b, format!("cache_v.{block}"), group, shape.cache, [context, kv, 1, 1]);
            let element = shape.cache.block_bytes();
            let each = TensorDesc::strided(DType::F32, [1, tokens, kv, 1], [4, 4 * kv, 4, 4 * kv * tokens]);
            let each = b.view(v, each.unwrap(), 0).unwrap();
            let columns = [element, element, element * context, element * context * kv];
            let columns = TensorDesc::strided(shape.cache, [1, context, kv, 1], columns);
            let columns = b.view(values, columns.unwrap(), 0).unwrap();
            b.node_onto(Rows::SetRows, &[Some(each), Some(rows), Some(columns)], columns).unwrap();
            let nb = [element, element * context, element * context * head, element * context * kv];
            let v_view = TensorDesc::strided(shape.cache, [context, head, kv_heads, 1], nb);
            let v_view = b.view(values, v_view.unwrap(), 0).unwrap();
            let scores = b.node(MulMat::PLAIN, &[Some(k_view), Some(q)]).unwrap();
            let shares = b.node(SoftMax { scale, max_bias: 0.0 }, &[Some(scores), Some(mask)]).unwrap();
            let y = b.node(MulMat::PLAIN, &[Some(v_view), Some(shares)]).unwrap();
            let y = b.permute(y, [0, 2, 1, 3]).unwrap();
            let flat = OutputSpec { dtype: DType::F32, ne: [heads * head, tokens, 1, 1] };
            b.node_as(CopyOp::Cont, &[Some(y)], flat).unwrap()
        };
        let y = linear(&mut b, "attn_out", attended, heads * head, width);
        x = b.node(Binary::Add, &[Some(y), Some(x)]).unwrap();
        let w = stored(&mut b, format!("ffn_norm.{block}"), group, DType::F32, [width, 1, 1, 1]);
        let h = norm(&mut b, x, w);
        let gate = linear(&mut b, "gate", h, width, ff);
        let up = linear(&mut b, "up", h, width, ff);
        let y = b.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[Some(gate), Some(up)]).unwrap();
        let y = linear(&mut b, "down", y, ff, width);
        x = b.node(Binary::Add, &[Some(y), Some(x)]).unwrap();
    }
    let last = *groups.last().unwrap();
    let x = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let output = match shape.tied {
        true => table,
        false => stored(&mut b, "output".to_owned(), last, shape.weight, [width, vocab, 1, 1]),
    };
    let logits = b.node(MulMat::PLAIN, &[Some(output), Some(x)]).unwrap();
    b.output(logits).unwrap();
    let numbers = |f: &dyn Fn(usize) -> i64| (0..tokens).map(f).collect::<Vec<_>>();
    let i32s = |list: Vec<i64>| list.iter().flat_map(|n| (*n as i32).to_le_bytes()).collect::<Vec<u8>>();
    let seen = |token: usize, at: usize| if at <= token { 0.0 } else { f32::NEG_INFINITY };
    let hidden: Vec<f32> = (0..tokens).flat_map(|token| (0..context).map(move |at| seen(token, at))).collect();
    let inputs = vec![
        (ids, i32s(numbers(&|i| (i * 7 % vocab) as i64))),
        (positions, i32s(numbers(&|i| i as i64))),
        (rows, numbers(&|i| i as i64).iter().flat_map(|n| n.to_le_bytes()).collect()),
        (mask, encode(mask_type, &hidden)),
    ];
    Model { task: b.build().unwrap(), inputs, logits }
}

fn devices(count: usize) -> Vec<Arc<dyn Device>> {
    let device = |i| CpuDevice::new(&format!("CPU{i}"), 1, MathMode::Exact, 1 << 30).unwrap() as Arc<dyn Device>;
    (0..count).map(device).collect()
}

fn group(devices: std::ops::Range<usize>, shares: &[f32]) -> TensorGroup {
    TensorGroup::new(devices.collect(), shares.to_vec()).unwrap()
}

/// Runs a model on groups. Returns the logits of two runs, and the split.
fn run(model: &Model, groups: Vec<TensorGroup>, small: usize, copied: bool) -> (Vec<f32>, TensorSplit) {
    let count = groups.iter().flat_map(|group| group.devices()).max().unwrap() + 1;
    let (devices, budget) = (devices(count), MemoryBudget::new(1 << 30));
    let split = TensorSplit::with_small_weights(&model.task, groups, small).unwrap();
    let mut regions = BTreeMap::new();
    for (slot, _) in (0..).zip(model.task.storage()).filter(|(_, s)| matches!(s, Storage::Stored { .. })) {
        let id = model.task.slot_tensor(slot).unwrap();
        let (name, whole) = (model.task.name(id).to_owned(), model.task.graph().tensor(id).unwrap().desc);
        let bytes = stored_bytes(&name, &whole);
        for (rank, part) in split.parts(&name).unwrap().iter().enumerate() {
            let device = &devices[part.device];
            let region = device.alloc(part.desc.extent() as u64, &budget).unwrap().whole();
            let mut slice = vec![0; part.desc.extent()];
            part.runs.reader(&bytes).unwrap().read(&mut slice).unwrap();
            let mut queue = device.queue(&budget).unwrap();
            queue.upload(region.clone(), Some(&part.desc), UploadSource::Borrowed(&slice)).unwrap();
            queue.mark().wait(None).unwrap();
            regions.insert((name.clone(), rank), region);
        }
    }
    let split = split.with_copied_collectives(copied);
    let applied =
        split.apply(&model.task, &devices, &|name, rank| regions.get(&(name.to_owned(), rank)).cloned()).unwrap();
    let mut scheduler = Scheduler::new(devices, Options::default(), &budget).unwrap();
    let mut plan = scheduler.build(applied.task()).unwrap();
    let inputs: Vec<_> = model.inputs.iter().map(|(id, bytes)| (applied.input(*id).unwrap(), &**bytes)).collect();
    let mut results = Vec::new();
    for _ in 0..2 {
        scheduler.run(&mut plan, &inputs).unwrap();
        let parts = applied.output(model.logits).unwrap().iter();
        let parts: Vec<Vec<u8>> =
            parts.map(|part| scheduler.read(&plan, part.tensor).unwrap().wait(None).unwrap()).collect();
        results.push(applied.join_output(model.logits, &parts).unwrap());
    }
    assert_eq!(results[0], results[1], "two runs");
    (results[0].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(), split)
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
    let (want, _) = run(&make(&vec![0; blocks.len()]), vec![group(0..1, &[1.0])], small, false);
    let (got, split) = run(&make(blocks), groups.clone(), small, false);
    let (copied, _) = run(&make(blocks), groups, small, true);
    assert_eq!(got, copied, "collective nodes, and copies with additions");
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
