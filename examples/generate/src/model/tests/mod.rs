//! Compares graphs of tiny random models, run on one CPU device, with the same models in f64.
#![allow(clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

pub(crate) mod oracle;
pub(crate) mod toy;

use super::*;
use crate::hparams::Arch;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget, UploadSource};
use fanout::sched::batching::{BatchOutput, SequenceGroup, TokenBatch};
use fanout::sched::tensor_group::{TensorGroup, TensorSplit};
use fanout::sched::{Options, Scheduler};
use std::sync::Arc;
use toy::{ARCHS, ToyModel, assert_close, prompt};

/// A toy model on one device, with an empty KV cache.
struct Loaded {
    scheduler: Scheduler,
    model: Model,
}

impl Loaded {
    fn new(toy: &ToyModel, dtype: DType, flash_attn: bool) -> Loaded {
        let budget = MemoryBudget::new(1 << 30);
        let device: Arc<dyn Device> = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 30).unwrap();
        let mut queue = device.queue(&budget).unwrap();
        let mut stored = |desc: &TensorDesc, values: &[f32]| {
            let memory = device.alloc(desc.extent() as u64, &budget).unwrap();
            if !values.is_empty() {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                queue.upload(memory.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
            }
            StoredTensor { desc: *desc, group: 0, regions: vec![Some(memory.whole())] }
        };
        let weights = toy.tensors.iter().map(|(name, (desc, values))| (name.clone(), stored(desc, values))).collect();
        let cache_options = CacheOptions { groups: 1, cells: 512, dtype, flash_attn };
        let blocks = vec![0; toy.hparams.layers];
        let empty = |desc, group| StoredTensor { desc, group, regions: vec![None] };
        let mut cache = SequenceCache::new(&toy.hparams, &cache_options, &blocks, &empty).unwrap();
        cache.tensors_mut().for_each(|(_, tensor)| *tensor = stored(&tensor.desc, &[]));
        queue.mark().wait(None).unwrap();
        let scheduler = Scheduler::new(vec![device], Options::default(), &budget).unwrap();
        Loaded {
            scheduler,
            model: Model {
                hparams: toy.hparams.clone(),
                weights,
                caches: vec![cache],
                cache_options,
                sampling: Sampling::GREEDY,
            },
        }
    }

    /// Runs a batch of consecutive tokens of one sequence; returns one row of logits for each of the last `outputs` tokens.
    fn run(&mut self, tokens: &[u32], start: usize, outputs: usize) -> Vec<Vec<f32>> {
        let (count, end) = (tokens.len(), start + tokens.len());
        let positions: Vec<u32> = (start as u32..end as u32).collect();
        let mut group = SequenceGroup::new(1, 1, 1);
        let sequence = group.join(&[0], 1).unwrap();
        let output = |index| BatchOutput { index, sequence, position: start + index };
        let batch = TokenBatch {
            tokens: tokens.to_vec(),
            tags: vec![1; count],
            cells: positions.clone(),
            positions,
            outputs: (count - outputs..count).map(output).collect(),
            seen: end,
            waiting: 0,
        };
        let shape = GraphShape { tokens: count, cells: self.model.cache_options.padded_cells(end), outputs };
        let ModelGraph { task, inputs, results } = self.model.graph(shape).unwrap();
        let split = TensorSplit::new(&task, vec![TensorGroup::new(vec![0], vec![1.0]).unwrap()]).unwrap();
        let region = |name: &str, rank: usize| self.model.stored(name, 0)?.regions[rank].clone();
        let task = split.apply(&task, self.scheduler.devices(), &region).unwrap();
        let mut prepared = self.scheduler.build(task.task()).unwrap();
        let bytes = inputs.of(&batch, &batch.outputs, &|_| 0.5);
        let inputs: Vec<_> = bytes.iter().map(|(id, bytes)| (task.input(*id).unwrap(), &**bytes)).collect();
        self.scheduler.run(&mut prepared, &inputs).unwrap();
        let Some(Results { logits, .. }) = results else { return Vec::new() };
        let logits = task.output(logits).unwrap()[0].tensor;
        let bytes = self.scheduler.read(&prepared, logits).unwrap().wait(None).unwrap();
        let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        values.chunks(self.model.hparams.vocab).map(<[f32]>::to_vec).collect()
    }

    /// The logits of every token of a sequence, run in batches of `sizes` (repeated cyclically).
    fn sequence(&mut self, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let mut sizes = sizes.iter().cycle();
        while all.len() < tokens.len() {
            let start = all.len();
            let end = (start + sizes.next().unwrap()).min(tokens.len());
            all.extend(self.run(&tokens[start..end], start, end - start));
        }
        all
    }
}

#[test]
fn every_architecture_matches_the_f64_oracle() {
    for arch in ARCHS {
        let toy = ToyModel::new(arch);
        let tokens = prompt(13);
        let want = oracle::logits(&toy, &tokens);
        for flash_attn in [false, true] {
            for sizes in [&[13][..], &[4], &[1], &[5, 1, 2]] {
                let got = Loaded::new(&toy, DType::F32, flash_attn).sequence(&tokens, sizes);
                assert_close(
                    &got,
                    &want,
                    1e-10,
                    &format!("{arch:?}, flash attention {flash_attn}, batches of {sizes:?}"),
                );
            }
        }
    }
}

#[test]
fn errors_of_16_bit_caches_stay_within_their_rounding() {
    let toy = ToyModel::new(Arch::Llama);
    let tokens = prompt(9);
    let want = oracle::logits(&toy, &tokens);
    for (dtype, flash_attn, bound) in [(DType::F16, false, 1e-5), (DType::F16, true, 1e-5), (DType::BF16, false, 1e-3)]
    {
        let got = Loaded::new(&toy, dtype, flash_attn).sequence(&tokens, &[4]);
        assert_close(&got, &want, bound, &format!("{dtype}, flash attention {flash_attn}"));
    }
}

#[test]
fn a_sequence_continues_beyond_the_first_padded_length() {
    let toy = ToyModel::new(Arch::Qwen3);
    let tokens = prompt(KV_PAD + 5);
    let want = oracle::logits(&toy, &tokens);
    let got = Loaded::new(&toy, DType::F32, false).sequence(&tokens, &[100]);
    assert_close(&got, &want, 1e-10, "two graphs");
}

#[test]
fn only_requested_logits_are_computed() {
    for arch in ARCHS {
        let toy = ToyModel::new(arch);
        let tokens = prompt(8);
        let all = Loaded::new(&toy, DType::F32, false).sequence(&tokens, &[8]);
        let mut loaded = Loaded::new(&toy, DType::F32, false);
        assert!(loaded.run(&tokens[..5], 0, 0).is_empty());
        for outputs in [1, 2, 3] {
            let last = loaded.run(&tokens[5..], 5, outputs);
            let want: Vec<_> = all[8 - outputs..].iter().map(|row| row.iter().map(|&v| v.into()).collect()).collect();
            assert_close(&last, &want, 1e-12, &format!("{arch:?}"));
        }
    }
}

#[test]
fn tied_embeddings_and_frequency_factors_are_used_if_present() {
    let mut toy = ToyModel::new(Arch::Llama);
    toy.tensors.remove("output.weight");
    toy.add("rope_freqs.weight", &[4]);
    let tokens = prompt(6);
    let want = oracle::logits(&toy, &tokens);
    assert_close(&Loaded::new(&toy, DType::F32, false).sequence(&tokens, &[6]), &want, 1e-10, "tied");
}

#[test]
fn errors_name_the_tensor_or_option_at_fault() {
    let toy = ToyModel::new(Arch::Llama);
    let shape = GraphShape { tokens: 1, cells: KV_PAD, outputs: 1 };
    let graph = |change: &dyn Fn(&mut Model)| {
        let mut model = Loaded::new(&toy, DType::F32, false).model;
        change(&mut model);
        model.graph(shape).unwrap_err().to_string()
    };
    let missing = graph(&|model| drop(model.weights.remove("blk.1.ffn_up.weight")));
    assert!(missing.contains("blk.1.ffn_up.weight"), "{missing}");
    // Without the norm of its keys, a model of this architecture would write other text.
    let qwen3 = Loaded::new(&ToyModel::new(Arch::Qwen3), DType::F32, false).model;
    let mut model = qwen3.clone();
    model.weights.remove("blk.1.attn_k_norm.weight");
    let missing = model.graph(shape).unwrap_err().to_string();
    assert!(qwen3.graph(shape).is_ok() && missing.contains("blk.1.attn_k_norm.weight"), "{missing}");
    let wrong = graph(&|model| model.hparams.ff = 41);
    assert!(wrong.contains("blk.0.ffn_gate.weight") && wrong.contains("[24, 41, 1, 1]"), "{wrong}");

    let options = CacheOptions { groups: 1, cells: 512, dtype: DType::Q8_0, flash_attn: false };
    let mut hparams = toy.hparams.clone();
    assert!(options.keys(&hparams).unwrap_err().to_string().contains("blocks"));
    hparams.head_width = 32;
    options.keys(&hparams).unwrap();
    assert!(options.values(&hparams).unwrap_err().to_string().contains("--flash-attn"));
    assert_eq!([0, 256, 257, 512].map(|seen| options.padded_cells(seen)), [256, 256, 512, 512]);
}

#[test]
fn nodes_have_llama_cpp_names() {
    let toy = ToyModel::new(Arch::Llama);
    let graph =
        Loaded::new(&toy, DType::F32, false).model.graph(GraphShape { tokens: 2, cells: KV_PAD, outputs: 1 }).unwrap();
    let names: Vec<_> = graph.task.graph().nodes().iter().map(|node| graph.task.name(node.dst)).collect();
    assert_eq!(names[..5], ["inp_embd", "cell_tags", "cell_positions", "blk.0.norm", "blk.0.attn_norm"]);
    let head = names.iter().position(|&name| name == "result_output").unwrap();
    assert_eq!(names[head - 3..head], ["blk.2.l_out", "norm", "result_norm"]);
    assert!(names.iter().all(|name| !name.is_empty()));
}
