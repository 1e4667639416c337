//! The smallest runtime: reads a GGUF file of a llama, and continues a text on any list of devices. docs/runtime.md explains it.
//!
//! ```text
//! runtime MODEL.gguf "The capital of France is" [CPU | CPU,CPU | 0,1 | HOST:PORT,HOST:PORT]
//! ```

use fanout::device::{Device, MemoryBudget, Region, TensorMemory};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::registry::{self, Registry};
use fanout::sched::{Options, PreparedPlan, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc, bytes_of};
use fanout::weights::{LoadOptions, LoadedWeight, ModelFile};
use generate::tokenizer::{DecodeStream, Tokenizer};
use half::f16;
use std::collections::HashMap;
use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Tokens of the text: cells of the KV cache.
const CONTEXT: usize = 256;

struct Llama {
    scheduler: Scheduler,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    epsilon: f32,
    rope: Rope,
    weights: HashMap<String, LoadedWeight>,
    /// Keys and values by layer: `[kv_heads * head_width, CONTEXT]`.
    caches: Vec<[Region; 2]>,
}

/// A plan for a number of tokens, its inputs and its result.
struct LlamaPlan {
    prepared: PreparedPlan,
    tokens: TensorId,
    positions: TensorId,
    cells: TensorId,
    mask: TensorId,
    logits: TensorId,
    vocab: usize,
}

impl Llama {
    /// Reads the metadata, spreads the layers over the devices, and loads the weights there.
    fn load(file: &ModelFile, devices: Vec<Arc<dyn Device>>) -> Outcome<Llama> {
        let metadata = file.parse_gguf()?.metadata;
        let int = |key: &str| -> Outcome<usize> {
            Ok(metadata.int(&format!("llama.{key}"))?.ok_or_else(|| format!("no llama.{key}: not a llama"))? as usize)
        };
        let (layers, heads, kv_heads) =
            (int("block_count")?, int("attention.head_count")?, int("attention.head_count_kv")?);
        let head_width = int("embedding_length")? / heads.max(1);
        let mut rope = Rope::new(RopeMode::Normal, head_width as u32);
        rope.freq_base = metadata.float("llama.rope.freq_base")?.unwrap_or(rope.freq_base);
        let epsilon = metadata.float("llama.attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5);

        // What this program does not compute would give a wrong text.
        let is_unknown = |name: &str| name.contains("rope_freqs") || name.ends_with(".bias");
        let weights = file.weights()?;
        let unknown = weights.iter().find(|weight| is_unknown(weight.name())).map(|weight| weight.name());
        if metadata.get("llama.rope.scaling.type").is_some() || unknown.is_some() {
            return Err(format!("not implemented: {}", unknown.unwrap_or("llama.rope.scaling")).into());
        }

        let device_of = |layer: usize| layer * devices.len() / layers.max(1);
        let place = |name: &str| match name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()) {
            Some(layer) => Some(device_of(layer)),
            None => Some(if name == "token_embd.weight" { 0 } else { devices.len() - 1 }),
        };
        let budget = MemoryBudget::new(u64::MAX); // each device has a limit of its own
        let weights = weights.load(&devices, place, &budget, &LoadOptions::default())?;
        let desc = TensorDesc::contiguous(DType::F16, [kv_heads * head_width, CONTEXT])?;
        let cache = |layer| {
            let memory = TensorMemory::new(&*devices[device_of(layer)], [desc; 2], &budget)?;
            Ok([memory.regions()[0].clone(), memory.regions()[1].clone()])
        };
        let caches = (0..layers).map(cache).collect::<Outcome<_>>()?;
        let scheduler = Scheduler::new(devices, Options::default(), &budget)?;
        Ok(Llama { scheduler, layers, heads, kv_heads, head_width, epsilon, rope, weights, caches })
    }

    /// Plans the graph of `n` tokens. Weights and caches decide on which device a node runs.
    fn plan(&mut self, n: usize) -> Outcome<LlamaPlan> {
        let mut b = TaskBuilder::new();
        let (tokens, positions) = (b.input("tokens", DType::I32, [n])?, b.input("positions", DType::I32, [n])?);
        let (cells, mask) = (b.input("cells", DType::I64, [n])?, b.input("mask", DType::F16, [CONTEXT, n])?);
        let embedding = self.weight(&mut b, "token_embd")?;
        let mut x = b.node(Rows::GetRows, &[embedding, tokens])?;
        for layer in 0..self.layers {
            let name = |rest| format!("blk.{layer}.{rest}");
            let heads = |heads| [self.head_width, heads, n];
            let cur = self.norm(&mut b, &name("attn_norm"), x)?;
            let q = self.product(&mut b, &name("attn_q"), cur)?;
            let k = self.product(&mut b, &name("attn_k"), cur)?;
            let v = self.product(&mut b, &name("attn_v"), cur)?;
            let (q, k) = (b.reshape(q, heads(self.heads))?, b.reshape(k, heads(self.kv_heads))?);
            let (q, k) = (b.node(self.rope, &[q, positions])?, b.node(self.rope, &[k, positions])?);
            let q = b.permute(q, [0, 2, 1, 3])?;
            let k = b.reshape(k, [self.head_width * self.kv_heads, n])?; // keys are cached rotated
            let k = self.update_cache(&mut b, (layer, 0), k, cells)?;
            let v = self.update_cache(&mut b, (layer, 1), v, cells)?;
            let scale = (self.head_width as f32).sqrt().recip();
            let attended = b.node(FlashAttn::new(scale), &[q, k, v, mask])?; // broadcasts heads of k and v
            let attended = b.reshape(attended, [self.head_width * self.heads, n])?;
            let attended = self.product(&mut b, &name("attn_output"), attended)?;
            x = b.node(Binary::Add, &[attended, x])?;
            let cur = self.norm(&mut b, &name("ffn_norm"), x)?;
            let [gate, up] = ["ffn_gate", "ffn_up"].map(|weight| self.product(&mut b, &name(weight), cur));
            let gated = b.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[gate?, up?])?;
            let down = self.product(&mut b, &name("ffn_down"), gated)?;
            x = b.node(Binary::Add, &[down, x])?;
        }
        let desc = b.desc(x)?; // the logits are those of the last token
        let last = b.view(x, TensorDesc::contiguous(DType::F32, [desc.ne()[0]])?, (n - 1) * desc.nb()[1])?;
        let last = self.norm(&mut b, "output_norm", last)?;
        let is_tied = !self.weights.contains_key("output.weight"); // to the embedding, which is in this graph already
        let output = if is_tied { embedding } else { self.weight(&mut b, "output")? };
        let logits = b.node(MulMat::PLAIN, &[output, last])?;
        b.output(logits)?;
        let vocab = b.desc(logits)?.elements();
        let prepared = self.scheduler.build(&Arc::new(b.build()?))?;
        Ok(LlamaPlan { prepared, tokens, positions, cells, mask, logits, vocab })
    }

    fn weight(&self, b: &mut TaskBuilder, name: &str) -> Outcome<TensorId> {
        let name = format!("{name}.weight");
        let LoadedWeight { desc, device, region } = self.weights.get(&name).ok_or(format!("no {name}"))?;
        Ok(b.stored(name, *desc, *device, Some(region.clone()))?)
    }

    fn product(&self, b: &mut TaskBuilder, name: &str, x: TensorId) -> Outcome<TensorId> {
        let weight = self.weight(b, name)?;
        Ok(b.node(MulMat::PLAIN, &[weight, x])?)
    }

    fn norm(&self, b: &mut TaskBuilder, name: &str, x: TensorId) -> Outcome<TensorId> {
        let (weight, x) = (self.weight(b, name)?, b.node(Norm::RmsNorm { eps: self.epsilon }, &[x])?);
        Ok(b.node(Binary::Mul, &[x, weight])?)
    }

    /// Writes rows to cells of a layer's keys (0) or values (1). Returns all cells, by head, for nodes that come later.
    fn update_cache(
        &self,
        b: &mut TaskBuilder,
        (layer, which): (usize, usize),
        rows: TensorId,
        cells: TensorId,
    ) -> Outcome<TensorId> {
        let device = self.weights[&format!("blk.{layer}.attn_k.weight")].device;
        let desc = TensorDesc::contiguous(DType::F16, [self.kv_heads * self.head_width, CONTEXT])?;
        let name = format!("{}.{layer}", ["keys", "values"][which]);
        let cache = b.stored(name, desc, device, Some(self.caches[layer][which].clone()))?;
        b.node_onto(Rows::SetRows, &[rows, cells, cache], cache)?;
        Ok(b.view(cache, desc.heads(self.head_width, CONTEXT)?, 0)?)
    }

    /// Runs tokens behind `past` ones. Returns the most likely next token.
    fn run(&mut self, plan: &mut LlamaPlan, tokens: &[u32], past: usize) -> Outcome<u32> {
        let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let cells: Vec<i64> = (past..past + tokens.len()).map(|cell| cell as i64).collect();
        let positions: Vec<i32> = cells.iter().map(|&cell| cell as i32).collect();
        let bias = |seen: bool| if seen { f16::ZERO } else { f16::NEG_INFINITY };
        let mask: Vec<f16> =
            cells.iter().flat_map(|&own| (0..CONTEXT as i64).map(move |cell| bias(cell <= own))).collect();
        let inputs = [
            (plan.tokens, bytes_of(&tokens)),
            (plan.positions, bytes_of(&positions)),
            (plan.cells, bytes_of(&cells)),
            (plan.mask, bytes_of(&mask)),
        ];
        self.scheduler.run(&mut plan.prepared, &inputs)?;
        let mut logits = vec![0f32; plan.vocab];
        self.scheduler.read(&plan.prepared, plan.logits)?.read_into(&mut logits, None)?;
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        Ok(best.map_or(0, |(token, _)| token as u32))
    }
}

/// Calls `show` with each token that follows the prompt, until it returns false or the context is full.
fn generate(file: &ModelFile, devices: &str, prompt: &[u32], mut show: impl FnMut(u32) -> bool) -> Outcome<()> {
    if prompt.is_empty() || prompt.len() > CONTEXT {
        return Err(format!("a prompt of {} tokens: 1 to {CONTEXT} fit", prompt.len()).into());
    }
    let devices = Registry::detect().open(devices, &registry::Options::default())?;
    let mut llama = Llama::load(file, devices)?;
    let (mut prefill, mut decode) = (llama.plan(prompt.len())?, llama.plan(1)?);
    let mut next = llama.run(&mut prefill, prompt, 0)?;
    for past in prompt.len()..CONTEXT {
        if !show(next) {
            break;
        }
        next = llama.run(&mut decode, &[next], past)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    if let Err(error) = run() {
        eprintln!("runtime: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn run() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, text, devices @ ..] = &args[..] else { return Err("usage: runtime MODEL.gguf TEXT [DEVICES]".into()) };
    let file = ModelFile::open(path)?;
    let tokenizer = Tokenizer::read(&file.parse_gguf()?.metadata)?;
    let mut decoded = DecodeStream::new(&tokenizer);
    generate(&file, devices.first().map_or("CPU", |list| list), &tokenizer.encode(text)?, |token| {
        let goes_on = !tokenizer.is_end(token);
        if goes_on {
            print!("{}", decoded.push(token));
        }
        io::stdout().flush().is_ok() && goes_on
    })?;
    println!("{}", decoded.finish());
    Ok(())
}

#[cfg(test)]
mod tests;
