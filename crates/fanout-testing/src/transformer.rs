//! A small transformer, to run on groups of devices.

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
use fanout::sched::tensor_group::{OutputPart, RankTask, TensorGroup, TensorSplit};
use fanout::sched::{Options, PreparedPlan, SchedError, Scheduler, Storage, Task, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A transformer whose weights are pseudo-random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head: usize,
    /// Inner width of the feed-forward part.
    pub ff: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Tokens of a run.
    pub tokens: usize,
    /// Capacity of the cache in tokens.
    pub context: usize,
    /// Type of the weights.
    pub weight: DType,
    /// Type of the cache.
    pub cache: DType,
    /// Whether attention is one op.
    pub flash: bool,
    /// Whether the output is the table of embeddings.
    pub tied: bool,
    /// Whether products have a bias.
    pub bias: bool,
}

/// A small one.
pub const SMALL: Shape = Shape {
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

/// A task, its inputs, and the tensor with its result.
#[derive(Debug)]
pub struct Model {
    /// The task.
    pub task: Task,
    /// The bytes of its inputs.
    pub inputs: Vec<(TensorId, Vec<u8>)>,
    /// Its output.
    pub logits: TensorId,
}

/// Pseudo-random numbers from -1 to 1.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
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

/// The values in blocks of a type.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
    fanout::tensor::quant::quantiser(dtype).unwrap()(values, &mut bytes);
    bytes
}

/// The model, with the group of devices of each of its blocks.
pub fn model(shape: Shape, groups: &[usize]) -> Model {
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

/// Exact CPU devices of one thread each.
pub fn devices(count: usize) -> Vec<Arc<dyn Device>> {
    let device = |i| CpuDevice::new(&format!("CPU{i}"), 1, MathMode::Exact, 1 << 30).unwrap() as Arc<dyn Device>;
    (0..count).map(device).collect()
}

/// A group of devices with consecutive numbers.
pub fn group(devices: std::ops::Range<usize>, shares: &[f32]) -> TensorGroup {
    TensorGroup::new(devices.collect(), shares.to_vec()).unwrap()
}

/// A model that is loaded onto groups of devices.
pub struct LoadedModel<'a> {
    model: &'a Model,
    /// The scheduler of the devices.
    pub scheduler: Scheduler,
    plan: PreparedPlan,
    /// The task of all ranks.
    pub applied: RankTask,
    /// How the tensors are split.
    pub split: TensorSplit,
}

impl<'a> LoadedModel<'a> {
    /// Loads the parts of all stored tensors. Tensors of up to `small` bytes are mirrored. `copied`: collectives are copies and
    /// additions.
    pub fn new(
        model: &'a Model,
        devices: Vec<Arc<dyn Device>>,
        groups: Vec<TensorGroup>,
        small: usize,
        copied: bool,
    ) -> LoadedModel<'a> {
        LoadedModel::with_split(model, devices, groups, small, |split| split.with_copied_collectives(copied))
    }

    /// As [`LoadedModel::new`], with other options of the split.
    pub fn with_split(
        model: &'a Model,
        devices: Vec<Arc<dyn Device>>,
        groups: Vec<TensorGroup>,
        small: usize,
        options: impl FnOnce(TensorSplit) -> TensorSplit,
    ) -> LoadedModel<'a> {
        let budget = MemoryBudget::new(1 << 30);
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
        let split = options(split);
        let applied =
            split.apply(&model.task, &devices, &|name, rank| regions.get(&(name.to_owned(), rank)).cloned()).unwrap();
        let mut scheduler = Scheduler::new(devices, Options::default(), &budget).unwrap();
        let plan = scheduler.build(applied.task()).unwrap();
        LoadedModel { model, scheduler, plan, applied, split }
    }

    /// Whether the task of all ranks has collective nodes.
    pub fn has_collectives(&self) -> bool {
        self.applied.task().graph().nodes().iter().any(|node| !node.op.code().is_in_protocol())
    }

    /// The bytes of the logits of a run.
    pub fn run(&mut self) -> Result<Vec<u8>, SchedError> {
        let LoadedModel { model, scheduler, plan, applied, .. } = self;
        scheduler.run(plan, &inputs(model, applied))?;
        self.logits()
    }

    /// Submits a run.
    pub fn submit(&mut self) -> Result<(), SchedError> {
        let LoadedModel { model, scheduler, plan, applied, .. } = self;
        scheduler.submit(plan, &inputs(model, applied))
    }

    /// The bytes of the logits of the last run.
    pub fn logits(&mut self) -> Result<Vec<u8>, SchedError> {
        let LoadedModel { model, scheduler, plan, applied, .. } = self;
        let parts = applied.output(model.logits).unwrap().iter();
        let read = |part: &OutputPart| Ok(scheduler.read(plan, part.tensor)?.wait(None).unwrap());
        let parts = parts.map(read).collect::<Result<Vec<_>, SchedError>>()?;
        Ok(applied.join_output(model.logits, &parts).unwrap())
    }
}

fn inputs<'a>(model: &'a Model, applied: &RankTask) -> Vec<(TensorId, &'a [u8])> {
    model.inputs.iter().map(|(id, bytes)| (applied.input(*id).unwrap(), &**bytes)).collect()
}
