//! Layers of decoders with their nodes in llama.cpp's order: kernel launches for each token, and results.

use crate::fixture::{CudaFixture, test_deadline};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, MemoryBudget, Queue, Region, UploadSource};
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::Op;
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::reduce::Reduce;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, I64, Q4_K, Q6_K, Q8_0};
use fanout::tensor::TensorDesc;
use fanout::tensor::quant::dequantiser;
use fanout_testing::compare::nmse;
use fanout_testing::transformer::{encode, noise};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

const WIDTH: usize = 1024;
const HEAD: usize = 128;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const CONTEXT: usize = 256;
const EXPERTS: usize = 8;
const USED: usize = 4;

/// Both devices round the columns of products to 8 bits. Where a value next to a rounding boundary differs in its last bit, so does a
/// code, and with it every later result.
const MAX_NMSE: f64 = 1e-6;

/// A layer under construction.
struct Layer {
    b: Builder,
    /// The leaves with values other than zeros.
    values: Vec<(TensorId, Vec<u8>)>,
    /// The results that are neither elided nor overwritten.
    results: Vec<(&'static str, TensorId)>,
    /// Whether the product of values lies where that of queries was, and the rotated keys where the norm was: the allocator of llama.cpp
    /// does this without in-place ROPE.
    shares_memory: bool,
    /// Whether a vector is added to queries, keys and values, in place.
    biased: bool,
}

impl Layer {
    fn new(shares_memory: bool) -> Layer {
        Layer { b: Builder::new(), values: Vec::new(), results: Vec::new(), shares_memory, biased: false }
    }

    fn leaf(&mut self, dtype: DType, ne: [usize; 4]) -> TensorId {
        let id = self.b.leaf(dtype, ne).unwrap();
        if dtype != I32 && dtype != I64 {
            let values = noise(self.values.len() as u64, ne.iter().product());
            self.values.push((id, encode(dtype, &values)));
        }
        id
    }

    fn node(&mut self, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        self.b.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    /// A node whose result has one reader.
    fn inner(&mut self, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        let id = self.node(op, srcs);
        self.b.set_use_count(id, 1).unwrap();
        id
    }

    fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> TensorId {
        self.b.view(of, desc, offset).unwrap()
    }

    fn reshaped(&mut self, of: TensorId, ne: [usize; 4]) -> TensorId {
        self.view(of, TensorDesc::contiguous(F32, ne).unwrap(), 0)
    }

    fn linear(&mut self, t: DType, [k, m]: [usize; 2], x: TensorId) -> TensorId {
        let w = self.leaf(t, [k, m, 1, 1]);
        self.node(MulMat::PLAIN, &[w, x])
    }

    /// A product of queries, keys or values, where `onto` is if there is one.
    fn projection(&mut self, t: DType, [k, m]: [usize; 2], x: TensorId, onto: Option<TensorId>) -> TensorId {
        let memory = onto.unwrap_or_else(|| self.leaf(F32, [m, 1, 1, 1]));
        let [product, sum] = [(); 2].map(|()| self.reshaped(memory, [m, 1, 1, 1]));
        let w = self.leaf(t, [k, m, 1, 1]);
        let product = self.b.node_into(MulMat::PLAIN, &[Some(w), Some(x)], product).unwrap();
        if !self.biased {
            return product;
        }
        let bias = self.leaf(F32, [m, 1, 1, 1]);
        self.b.set_use_count(product, 1).unwrap();
        self.b.node_into(Binary::Add, &[Some(product), Some(bias)], sum).unwrap()
    }

    fn norm(&mut self, x: TensorId, n: usize) -> TensorId {
        let h = self.inner(Norm::RmsNorm { eps: 1e-5 }, &[x]);
        let w = self.leaf(F32, [n, 1, 1, 1]);
        self.node(Binary::Mul, &[h, w])
    }

    /// The residual addition that ends the layer before, norm, attention and the product behind it. Returns the residual and the
    /// result. `types` are those of the weights, and of the weights of the values.
    fn attention(&mut self, types: [DType; 2], head_norms: bool) -> [TensorId; 2] {
        let kv_width = HEAD * KV_HEADS;
        let (before, result) = (self.leaf(F32, [WIDTH, 1, 1, 1]), self.leaf(F32, [WIDTH, 1, 1, 1]));
        let x = self.node(Binary::Add, &[result, before]);
        let positions = self.leaf(I32, [1, 1, 1, 1]);
        let rows = [self.leaf(I64, [1, 1, 1, 1]), self.leaf(I64, [1, 1, 1, 1])];
        let h = self.norm(x, WIDTH);
        let rotated = |layer: &mut Layer, x, heads, onto: Option<TensorId>| {
            layer.b.set_use_count(x, 1).unwrap();
            let mut x = layer.reshaped(x, [HEAD, heads, 1, 1]);
            layer.b.set_use_count(x, 1).unwrap();
            if head_norms {
                x = layer.norm(x, HEAD);
                layer.b.set_use_count(x, 1).unwrap();
            }
            // In place, or where another tensor was.
            let onto = layer.reshaped(onto.unwrap_or(x), [HEAD, heads, 1, 1]);
            layer.b.node_into(Rope::new(RopeMode::Neox, HEAD as u32), &[Some(x), Some(positions)], onto).unwrap()
        };
        let product = self.projection(types[0], [WIDTH, HEAD * HEADS], h, None);
        let onto = self.shares_memory.then(|| self.leaf(F32, [HEAD * HEADS, 1, 1, 1]));
        let q = rotated(self, product, HEADS, onto);
        self.results.extend([("residual", x), ("queries", q)]);
        if !self.shares_memory {
            self.results.push(("norm", h));
        }
        let v = self.projection(types[1], [WIDTH, kv_width], h, self.shares_memory.then_some(product));
        self.b.set_use_count(v, 1).unwrap();
        let k = self.projection(types[0], [WIDTH, kv_width], h, None);
        let k = rotated(self, k, KV_HEADS, self.shares_memory.then_some(h));
        self.b.set_use_count(k, 1).unwrap();
        let k = self.reshaped(k, [kv_width, 1, 1, 1]);
        self.b.set_use_count(k, 1).unwrap();
        let cached: Vec<_> = [k, v]
            .into_iter()
            .zip(rows)
            .map(|(new, rows)| {
                let cache = self.leaf(F16, [kv_width, CONTEXT, 1, 1]);
                let into = self.view(cache, TensorDesc::contiguous(F16, [kv_width, CONTEXT, 1, 1]).unwrap(), 0);
                self.b.node_into(Rows::SetRows, &[Some(new), Some(rows), Some(cache)], into).unwrap();
                let written = self.view(cache, TensorDesc::contiguous(F16, [kv_width, 1, 1, 1]).unwrap(), 0);
                self.results.push(("row of a cache", written));
                let nb = [2, 2 * kv_width, 2 * HEAD, 2 * kv_width * CONTEXT];
                self.view(cache, TensorDesc::strided(F16, [HEAD, CONTEXT, KV_HEADS, 1], nb).unwrap(), 0)
            })
            .collect();
        let nb = [4, 4 * HEAD * HEADS, 4 * HEAD, 4 * HEAD * HEADS];
        let q = self.view(q, TensorDesc::strided(F32, [HEAD, 1, HEADS, 1], nb).unwrap(), 0);
        let mask = self.leaf(F16, [CONTEXT, 1, 1, 1]);
        let op = FlashAttn { scale: 0.1, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
        let attended = self.node(op, &[q, cached[0], cached[1], mask]);
        let attended = self.reshaped(attended, [HEAD * HEADS, 1, 1, 1]);
        let result = self.linear(types[0], [HEAD * HEADS, WIDTH], attended);
        self.results.extend([("attention", attended), ("product of attention", result)]);
        [x, result]
    }

    /// The graph of a llama layer.
    fn llama(types: [DType; 2], shares_memory: bool) -> Layer {
        Layer::new(shares_memory).with_llama_nodes(types)
    }

    /// The graph of a qwen2 layer.
    fn qwen2(types: [DType; 2], shares_memory: bool) -> Layer {
        Layer { biased: true, ..Layer::new(shares_memory) }.with_llama_nodes(types)
    }

    fn with_llama_nodes(self, types: [DType; 2]) -> Layer {
        let (mut layer, ff) = (self, 2048);
        let [x, attended] = layer.attention(types, false);
        let x = layer.node(Binary::Add, &[attended, x]);
        let h = layer.norm(x, WIDTH);
        let [gate, up] = [(); 2].map(|()| layer.linear(types[0], [WIDTH, ff], h));
        [gate, up].into_iter().for_each(|id| layer.b.set_use_count(id, 1).unwrap());
        let gated = layer.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up]);
        let result = layer.linear(types[0], [ff, WIDTH], gated);
        layer.results.extend([("second residual", x), ("second norm", h), ("SWIGLU", gated), ("result", result)]);
        layer
    }

    /// The graph of a qwen3moe layer.
    fn qwen3moe(t: DType, shares_memory: bool) -> Layer {
        let (mut layer, ff) = (Layer::new(shares_memory), 256);
        let [x, attended] = layer.attention([t, t], true);
        let x = layer.node(Binary::Add, &[attended, x]);
        let h = layer.norm(x, WIDTH);
        let logits = layer.linear(F32, [WIDTH, EXPERTS], h);
        let p = layer.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[logits]);
        let sorted = layer.node(Sort::Argsort { descending: true }, &[p]);
        let nb = [4, 4 * EXPERTS, 4 * EXPERTS, 4 * EXPERTS];
        let ids = layer.view(sorted, TensorDesc::strided(I32, [USED, 1, 1, 1], nb).unwrap(), 0);
        let table = layer.reshaped(p, [1, EXPERTS, 1, 1]);
        let w = layer.node(Rows::GetRows, &[table, ids]);
        let w = layer.reshaped(w, [USED, 1, 1, 1]);
        let sum = layer.node(Reduce::SumRows, &[w]);
        let w = layer.node(Binary::Div, &[w, sum]);
        let w = layer.reshaped(w, [1, USED, 1, 1]);
        let h = layer.reshaped(h, [WIDTH, 1, 1, 1]);
        let experts = |layer: &mut Layer, [k, m]: [usize; 2], x| {
            let a = layer.leaf(t, [k, m, EXPERTS, 1]);
            layer.node(MulMat::BY_ID, &[a, x, ids])
        };
        let [gate, up] = [(); 2].map(|()| experts(&mut layer, [WIDTH, ff], h));
        [gate, up].into_iter().for_each(|id| layer.b.set_use_count(id, 1).unwrap());
        let gated = layer.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up]);
        let down = experts(&mut layer, [ff, WIDTH], gated);
        let weighted = layer.node(Binary::Mul, &[down, w]);
        layer.b.set_use_count(weighted, USED as u32).unwrap();
        let parts: Vec<_> = (0..USED)
            .map(|e| {
                let nb = [4, 4 * WIDTH * USED, 4 * WIDTH * USED, 4 * WIDTH * USED];
                let part = TensorDesc::strided(F32, [WIDTH, 1, 1, 1], nb).unwrap();
                let part = layer.view(weighted, part, 4 * WIDTH * e);
                layer.b.set_use_count(part, 1).unwrap();
                part
            })
            .collect();
        let mut sum = parts[0];
        for &part in &parts[1..] {
            sum = layer.inner(Binary::Add, &[sum, part]);
        }
        layer.results.extend([("second residual", x), ("second norm", h), ("logits", logits), ("probabilities", p)]);
        layer.results.extend([("weights", w), ("SWIGLU", gated), ("experts", down), ("result", sum)]);
        layer
    }

    fn build(mut self) -> BuiltLayer {
        let graph = Arc::new(std::mem::take(&mut self.b).build());
        BuiltLayer { graph, values: self.values, results: self.results }
    }
}

/// A finished layer.
struct BuiltLayer {
    graph: Arc<Graph>,
    values: Vec<(TensorId, Vec<u8>)>,
    results: Vec<(&'static str, TensorId)>,
}

impl BuiltLayer {
    /// A tensor's bytes in the memory of the graph.
    fn region(&self, of: &Buffer, id: TensorId) -> Region {
        let tensor = self.graph.tensor(id).unwrap();
        of.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
    }

    fn upload(&self, queue: &mut dyn Queue, buffer: &Buffer) {
        queue.fill(buffer.whole(), 0).unwrap();
        for (id, bytes) in &self.values {
            queue.upload(self.region(buffer, *id), None, UploadSource::Borrowed(bytes)).unwrap();
        }
    }

    /// The values of the results.
    fn download(&self, queue: &mut dyn Queue, buffer: &Buffer) -> Vec<Vec<f64>> {
        let values = |&(_, id): &(_, TensorId)| {
            let desc = self.graph.tensor(id).unwrap().desc;
            let bytes = queue.download(self.region(buffer, id)).unwrap().wait(test_deadline()).unwrap();
            let mut values = vec![0.0; desc.elements()];
            dequantiser(desc.dtype()).unwrap()(&bytes, &mut values);
            values.into_iter().map(f64::from).collect()
        };
        self.results.iter().map(values).collect()
    }

    /// The results of the CPU, which rounds the columns of products as the GPU does.
    fn on_cpu(&self) -> Vec<Vec<f64>> {
        let budget = MemoryBudget::new(1 << 30);
        let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
        let mut queue = cpu.queue(&budget).unwrap();
        let buffer = cpu.alloc(self.graph.slot_sizes()[0] as u64, &budget).unwrap();
        self.upload(&mut *queue, &buffer);
        let program = cpu.prepare(Arc::clone(&self.graph)).unwrap();
        queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        self.download(&mut *queue, &buffer)
    }

    /// The launches of a later run, by kernel, and the results behind it.
    fn on_gpu(&self) -> (BTreeMap<String, u64>, Vec<Vec<f64>>) {
        let fixture = CudaFixture::new("CUDAEMU_COUNTS=on");
        let buffer = fixture.buffer(0, self.graph.slot_sizes()[0] as u64);
        let mut queue = fixture.queue(0);
        self.upload(&mut *queue, &buffer);
        let bindings: Arc<[Region]> = Arc::from([buffer.whole()]);
        let program = fixture.program(0, &self.graph);
        let run = |queue: &mut dyn Queue| {
            queue.run(&program, &bindings).unwrap();
            queue.mark().wait(test_deadline()).unwrap();
            launches(&fixture)
        };
        // The first run packs the weights.
        let before = run(&mut *queue);
        let after = run(&mut *queue);
        let new = |(name, count): (String, u64)| {
            let count = count - before.get(&name).copied().unwrap_or(0);
            (count > 0).then_some((name, count))
        };
        let found = after.into_iter().filter_map(new).collect();
        let results = self.download(&mut *queue, &buffer);
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
        (found, results)
    }
}

/// The launches of each kernel since the start.
fn launches(fixture: &CudaFixture) -> BTreeMap<String, u64> {
    let counts: Value = serde_json::from_str(&fixture.emulator.counts_json()).unwrap();
    let kernels = counts["kernels"].as_object().unwrap();
    kernels.iter().map(|(name, kernel)| (name.clone(), kernel["launches"].as_u64().unwrap())).collect()
}

/// Layers with flash attention, one token. The results are those of the CPU.
#[test]
fn a_layer_of_a_decoder_has_few_launches() {
    for (name, layer, launches) in [
        ("llama, Q4_K", Layer::llama([Q4_K; 2], false), 9),
        ("llama, Q8_0", Layer::llama([Q8_0; 2], false), 9),
        ("llama, Q4_K, values Q6_K", Layer::llama([Q4_K, Q6_K], false), 10),
        ("llama, F16", Layer::llama([F16; 2], false), 9),
        ("llama, BF16, shared memory", Layer::llama([BF16; 2], true), 9),
        ("qwen2, BF16", Layer::qwen2([BF16; 2], false), 9),
        ("qwen2, Q8_0", Layer::qwen2([Q8_0; 2], false), 9),
        ("qwen2, Q8_0, shared memory", Layer::qwen2([Q8_0; 2], true), 9),
        ("qwen2, Q4_K, values Q6_K", Layer::qwen2([Q4_K, Q6_K], false), 10),
        ("qwen2, Q4_K, values Q6_K, shared memory", Layer::qwen2([Q4_K, Q6_K], true), 10),
        ("qwen3moe, Q4_K", Layer::qwen3moe(Q4_K, false), 12),
        ("llama, Q4_K, shared memory", Layer::llama([Q4_K; 2], true), 9),
        ("llama, Q4_K, values Q6_K, shared memory", Layer::llama([Q4_K, Q6_K], true), 10),
        ("qwen3moe, Q4_K, shared memory", Layer::qwen3moe(Q4_K, true), 12),
    ] {
        let layer = layer.build();
        let (found, results) = layer.on_gpu();
        let count: u64 = found.values().sum();
        assert_eq!(count, launches, "{name}: {found:?}");
        for (((result, _), got), want) in layer.results.iter().zip(results).zip(layer.on_cpu()) {
            let error = nmse(&got, &want);
            assert!(error <= MAX_NMSE, "{name}: {result} has an NMSE of {error:e}");
        }
    }
}
