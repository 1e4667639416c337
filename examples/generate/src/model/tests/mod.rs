//! Graphs of tiny random models, run whole on one CPU device, against the same models in f64.
#![allow(clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod oracle;

use super::*;
use crate::hyper::{Arch, Experts};
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, Queue, Source};
use fanout::ops::rope::Rope;
use fanout::sched::Storage;
use std::sync::Arc;

const ARCHS: [Arch; 4] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Qwen3Moe];

/// A model with random weights on a device of its own.
struct Toy {
    hyper: Hyper,
    tensors: HashMap<String, (TensorDesc, Vec<f32>)>,
    device: Arc<dyn Device>,
    account: Arc<Account>,
}

impl Toy {
    fn new(arch: Arch) -> Toy {
        let (width, heads, kv_heads, dim) = (24, 6, 2, 8);
        let moe = arch == Arch::Qwen3Moe;
        let hyper = Hyper {
            arch,
            layers: 3,
            width,
            heads,
            kv_heads,
            head_width: dim,
            ff: 40,
            vocab: 50,
            context: 512,
            rms_epsilon: 1e-5,
            rope: Rope::new(arch.rope_mode(), dim as u32),
            experts: moe.then_some(Experts { count: 5, used: 2, ff: 12 }),
        };
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 30).unwrap();
        let mut toy = Toy { hyper, tensors: HashMap::new(), device, account: Account::new(1 << 30) };
        toy.add("token_embd.weight", &[width, 50]);
        toy.add("output.weight", &[width, 50]);
        toy.add("output_norm.weight", &[width]);
        for i in 0..3 {
            let mut add = |stem: &str, ne: &[usize]| toy.add(&format!("blk.{i}.{stem}"), ne);
            add("attn_norm.weight", &[width]);
            add("ffn_norm.weight", &[width]);
            add("attn_output.weight", &[heads * dim, width]);
            for (stem, rows) in [("attn_q", heads * dim), ("attn_k", kv_heads * dim), ("attn_v", kv_heads * dim)] {
                add(&format!("{stem}.weight"), &[width, rows]);
                if arch == Arch::Qwen2 {
                    add(&format!("{stem}.bias"), &[rows]);
                }
            }
            if matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe) {
                add("attn_q_norm.weight", &[dim]);
                add("attn_k_norm.weight", &[dim]);
            }
            if moe {
                add("ffn_gate_inp.weight", &[width, 5]);
                add("ffn_gate_exps.weight", &[width, 12, 5]);
                add("ffn_up_exps.weight", &[width, 12, 5]);
                add("ffn_down_exps.weight", &[12, width, 5]);
            } else {
                add("ffn_gate.weight", &[width, 40]);
                add("ffn_up.weight", &[width, 40]);
                add("ffn_down.weight", &[40, width]);
            }
        }
        toy
    }

    fn add(&mut self, name: &str, ne: &[usize]) {
        let mut full = [1; DIMS];
        full[..ne.len()].copy_from_slice(ne);
        let desc = TensorDesc::contiguous(DType::F32, full).unwrap();
        let mut rng = fastrand::Rng::with_seed(self.tensors.len() as u64);
        // Norms and divisors around 1, matrices such that a row's product is about 1.
        let (mean, spread) = if ne.len() == 1 { (1.0, 0.2) } else { (0.0, 3.0 / (ne[0] as f32).sqrt()) };
        let values = (0..desc.elements()).map(|_| mean + spread * (rng.f32() - 0.5)).collect();
        self.tensors.insert(name.to_owned(), (desc, values));
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn values(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    fn memory(&self, queue: &mut dyn Queue, bytes: &[u8]) -> Buffer {
        let buffer = self.device.alloc(bytes.len() as u64, &self.account).unwrap();
        queue.upload(buffer.whole(), None, Source::Borrowed(bytes)).unwrap();
        buffer
    }

    /// With an empty cache.
    fn load(&self, dtype: DType, flash_attn: bool) -> Loaded<'_> {
        let mut queue = self.device.queue(&self.account).unwrap();
        let mut stored = |desc: &TensorDesc, bytes: &[u8]| Stored {
            desc: *desc,
            device: 0,
            region: Some(self.memory(&mut *queue, bytes).whole()),
        };
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let weights = self.tensors.iter().map(|(name, (desc, v))| (name.clone(), stored(desc, &bytes(v)))).collect();
        let cache_options = CacheOptions { context: 512, dtype, flash_attn };
        let (keys, values) = (cache_options.keys(&self.hyper).unwrap(), cache_options.values(&self.hyper).unwrap());
        let mut zeros = |desc: &TensorDesc| stored(desc, &vec![0; desc.extent()]);
        let cache = (0..3).map(|_| LayerCache { keys: zeros(&keys), values: zeros(&values) }).collect();
        Loaded { toy: self, queue, model: Model { hyper: self.hyper.clone(), weights, cache, cache_options } }
    }
}

struct Loaded<'a> {
    toy: &'a Toy,
    queue: Box<dyn Queue>,
    model: Model,
}

impl Loaded<'_> {
    /// The logits of a batch, token by token.
    fn run(&mut self, batch: Batch<'_>, outputs: Outputs) -> Vec<Vec<f32>> {
        let tokens = batch.tokens.len();
        let seen = self.model.cache_options.seen(batch.start + tokens).unwrap();
        let graph = self.model.graph(Shape { tokens, seen, outputs }).unwrap();
        let task = graph.task;
        let Inputs { tokens, positions, rows, mask } = graph.inputs;
        let mask_bytes = batch.mask(seen, self.model.cache_options.flash_attn);
        let written =
            [(tokens, batch.tokens()), (positions, batch.positions()), (rows, batch.rows()), (mask, mask_bytes)];
        let slot = |id| task.span(id).unwrap().0;
        let bindings = task.storage().iter().enumerate().map(|(at, storage)| match storage {
            Storage::Stored { region, .. } => region.clone().unwrap(),
            Storage::Input => {
                let (_, bytes) = written.iter().find(|(id, _)| slot(*id) as usize == at).unwrap();
                self.toy.memory(&mut *self.queue, bytes).whole()
            }
            Storage::Computed => {
                self.toy.device.alloc(task.graph().slots()[at] as u64, &self.toy.account).unwrap().whole()
            }
        });
        let bindings: Arc<[Region]> = bindings.collect();
        let program = self.toy.device.prepare(Arc::clone(task.graph())).unwrap();
        self.queue.run(&program, &bindings).unwrap();
        let Some(logits) = graph.logits else { return Vec::new() };
        let bytes = self.queue.download(bindings[slot(logits) as usize].clone()).unwrap().wait(None).unwrap();
        let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        values.chunks(self.toy.hyper.vocab).map(<[f32]>::to_vec).collect()
    }

    /// The logits of every token of a sequence that comes in batches of these sizes.
    fn sequence(&mut self, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let mut sizes = sizes.iter().cycle();
        while all.len() < tokens.len() {
            let start = all.len();
            let end = (start + sizes.next().unwrap()).min(tokens.len());
            all.extend(self.run(Batch { tokens: &tokens[start..end], start }, Outputs::All));
        }
        all
    }
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 17 + 3) % 50).collect()
}

#[track_caller]
fn close(got: &[Vec<f32>], want: &[Vec<f64>], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let pairs = || got.iter().flatten().zip(want.iter().flatten());
    let error: f64 = pairs().map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    let nmse = error / want.iter().flatten().map(|w| w * w).sum::<f64>();
    assert!(nmse <= bound, "{what}: NMSE {nmse:e}");
}

#[test]
fn every_architecture_gives_the_logits_of_its_definition() {
    for arch in ARCHS {
        let toy = Toy::new(arch);
        let tokens = prompt(13);
        let want = oracle::logits(&toy, &tokens);
        for flash_attn in [false, true] {
            for sizes in [&[13][..], &[4], &[1], &[5, 1, 2]] {
                let got = toy.load(DType::F32, flash_attn).sequence(&tokens, sizes);
                close(&got, &want, 1e-10, &format!("{arch:?}, flash attention {flash_attn}, batches of {sizes:?}"));
            }
        }
    }
}

#[test]
fn a_cache_of_fewer_bits_costs_what_its_rounding_costs() {
    let toy = Toy::new(Arch::Llama);
    let tokens = prompt(9);
    let want = oracle::logits(&toy, &tokens);
    for (dtype, flash_attn, bound) in [(DType::F16, false, 1e-5), (DType::F16, true, 1e-5), (DType::BF16, false, 1e-3)]
    {
        let got = toy.load(dtype, flash_attn).sequence(&tokens, &[4]);
        close(&got, &want, bound, &format!("{dtype}, flash attention {flash_attn}"));
    }
}

#[test]
fn a_sequence_goes_on_beyond_the_first_padding() {
    let toy = Toy::new(Arch::Qwen3);
    let tokens = prompt(PAD + 5);
    let want = oracle::logits(&toy, &tokens);
    let got = toy.load(DType::F32, false).sequence(&tokens, &[100]);
    close(&got, &want, 1e-10, "two graphs");
}

#[test]
fn outputs_are_those_that_are_wanted() {
    for arch in ARCHS {
        let toy = Toy::new(arch);
        let tokens = prompt(8);
        let all = toy.load(DType::F32, false).sequence(&tokens, &[8]);
        let mut loaded = toy.load(DType::F32, false);
        assert!(loaded.run(Batch { tokens: &tokens[..5], start: 0 }, Outputs::None).is_empty());
        let last = loaded.run(Batch { tokens: &tokens[5..], start: 5 }, Outputs::Last);
        let want = vec![all[7].iter().map(|&v| f64::from(v)).collect()];
        close(&last, &want, 1e-12, &format!("{arch:?}"));
    }
}

#[test]
fn tied_embeddings_and_frequency_factors_are_used_where_they_are() {
    let mut toy = Toy::new(Arch::Llama);
    toy.tensors.remove("output.weight");
    toy.add("rope_freqs.weight", &[4]);
    let tokens = prompt(6);
    let want = oracle::logits(&toy, &tokens);
    close(&toy.load(DType::F32, false).sequence(&tokens, &[6]), &want, 1e-10, "tied");
}

#[test]
fn what_does_not_fit_is_named() {
    let toy = Toy::new(Arch::Llama);
    let shape = Shape { tokens: 1, seen: PAD, outputs: Outputs::Last };
    let graph = |change: &dyn Fn(&mut Model)| {
        let mut model = toy.load(DType::F32, false).model;
        change(&mut model);
        model.graph(shape).unwrap_err().to_string()
    };
    let missing = graph(&|model| drop(model.weights.remove("blk.1.ffn_up.weight")));
    assert!(missing.contains("blk.1.ffn_up.weight"), "{missing}");
    let wrong = graph(&|model| model.hyper.ff = 41);
    assert!(wrong.contains("blk.0.ffn_gate.weight") && wrong.contains("[24, 41, 1, 1]"), "{wrong}");

    let options = CacheOptions { context: 512, dtype: DType::Q8_0, flash_attn: false };
    let mut hyper = toy.hyper.clone();
    assert!(options.keys(&hyper).unwrap_err().to_string().contains("blocks"));
    hyper.head_width = 32;
    options.keys(&hyper).unwrap();
    assert!(options.values(&hyper).unwrap_err().to_string().contains("--flash-attn"));
    assert_eq!(options.seen(257).unwrap(), 512);
    assert!(options.seen(513).unwrap_err().to_string().contains("--ctx"));
}

#[test]
fn nodes_are_called_as_in_llama_cpp() {
    let toy = Toy::new(Arch::Llama);
    let graph =
        toy.load(DType::F32, false).model.graph(Shape { tokens: 2, seen: PAD, outputs: Outputs::Last }).unwrap();
    let names: Vec<_> = graph.task.graph().nodes().iter().map(|node| graph.task.name(node.dst)).collect();
    assert_eq!(names[..3], ["inp_embd", "blk.0.norm", "blk.0.attn_norm"]);
    assert_eq!(names[names.len() - 4..], ["blk.2.l_out", "norm", "result_norm", "result_output"]);
    assert!(names.iter().all(|name| !name.is_empty()));
}
