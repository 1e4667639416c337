//! End-to-end tests of tiny random models: file, placement, loading and logits, on one device and on several.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use super::*;
use crate::hparams::{Arch, HParams};
use crate::load;
use crate::model::CacheOptions;
use crate::model::tests::oracle;
use crate::model::tests::toy::{ARCHS, ToyModel, assert_close, prompt};
use crate::placement::Placement;
use crate::progress::Progress;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::gguf::Gguf;
use fanout::sched::ObservedNode;
use fanout::sched::sampling::Sampling;
use fanout::sched::tensor_group::TensorGroup;
use fanout::tensor::{DType, TensorDesc};
use fanout::weights::Weights;
use std::ops::ControlFlow;

/// Devices and options that a toy model runs with.
#[derive(Clone, Copy, Debug)]
struct TestConfig {
    devices: usize,
    shares: Option<&'static [f32]>,
    /// By tensor group: the shares of its devices. Empty: each device is a group.
    groups: &'static [&'static [f32]],
    cache: DType,
    ubatch: usize,
    depth: usize,
    flash_attn: bool,
    /// Cells of a KV cache.
    cells: usize,
    /// Groups of sequences, and the most sequences of each.
    sequence_groups: usize,
    sequences: usize,
    sampling: Sampling,
    /// What an engine does before that of the test, with the same weights and caches.
    before: Option<fn(Engine)>,
    /// Memory of each device in bytes.
    memory: u64,
}

const PLAIN: TestConfig = TestConfig {
    devices: 1,
    shares: None,
    groups: &[],
    cache: DType::F32,
    ubatch: 512,
    depth: 1,
    flash_attn: false,
    cells: 512,
    sequence_groups: 1,
    sequences: 1,
    sampling: Sampling::GREEDY,
    before: None,
    memory: 1 << 30,
};

impl TestConfig {
    fn groups(&self) -> Vec<TensorGroup> {
        let mut next = 0..;
        let mut group =
            |shares: &[f32]| TensorGroup::new(next.by_ref().take(shares.len()).collect(), shares.to_vec()).unwrap();
        if self.groups.is_empty() {
            return (0..self.devices).map(|_| group(&[1.0])).collect();
        }
        self.groups.iter().map(|shares| group(shares)).collect()
    }
}

fn devices(config: TestConfig) -> Vec<Arc<dyn Device>> {
    let device = |i| CpuDevice::new(&format!("CPU{i}"), 1, MathMode::Exact, config.memory).unwrap() as Arc<dyn Device>;
    (0..config.devices).map(device).collect()
}

/// Starts an engine; returns it (or the error) with its devices.
fn start(toy: &ToyModel, config: TestConfig) -> (anyhow::Result<Engine>, Vec<Arc<dyn Device>>) {
    let file = toy.gguf_bytes();
    let gguf = Gguf::parse(&file).unwrap();
    let hparams = HParams::read(&gguf.metadata).unwrap();
    let describe =
        |info: &fanout::gguf::TensorInfo| (info.name.clone(), TensorDesc::contiguous(info.dtype, info.ne).unwrap());
    let tensors: Vec<_> = gguf.tensors.iter().map(describe).collect();
    let cache = CacheOptions {
        groups: config.sequence_groups,
        cells: config.cells,
        dtype: config.cache,
        flash_attn: config.flash_attn,
    };
    let devices = devices(config);
    let groups = config.groups();
    let free = |group: &TensorGroup| group.devices().iter().map(|&d| devices[d].memory().unwrap().free).sum();
    let free: Vec<u64> = groups.iter().map(free).collect();
    let placement = Placement::new(&tensors, &hparams, &cache, &free, config.shares).unwrap();
    let engine = || {
        let mut model = load::model_without_memory(&hparams, cache, config.sampling, &placement, &groups)?;
        let split = split_model(&model, groups)?;
        let options = EngineOptions { ubatch: config.ubatch, depth: config.depth, sequences: config.sequences };
        check_memory((&model, &split), &devices, options)?;
        let budget = MemoryBudget::new(u64::MAX);
        let weights = Weights::of_bytes(&[&file], &gguf.tensors);
        let loaded = load::load(&mut model, &weights, (&placement, &split), &devices, &budget, Progress::Hidden);
        let loaded = loaded.into_iter().collect::<Result<Vec<_>, _>>()?;
        let parts = placement.weights.iter().flat_map(|placed| split.parts(&placed.name).unwrap());
        let bytes: usize = parts.map(|part| part.desc.extent()).sum();
        assert_eq!(loaded.iter().map(|loaded| loaded.bytes).sum::<u64>(), bytes as u64);
        if let Some(use_engine) = config.before {
            use_engine(Engine::new((model.clone(), split.clone()), &devices, &budget, options)?);
            load::forget_cells(&mut model);
            let loaded = load::load(&mut model, &weights, (&placement, &split), &devices, &budget, Progress::Hidden);
            assert!(loaded.into_iter().all(|stats| stats.unwrap().bytes == 0), "the weights are still there");
        }
        Ok(Engine::new((model, split), &devices, &budget, options)?)
    };
    (engine(), devices)
}

/// An engine on one device, for groups of sequences of up to 512 positions together.
pub(crate) fn engine_of_groups(toy: &ToyModel, sequence_groups: usize, sequences: usize) -> Engine {
    start(toy, TestConfig { sequence_groups, sequences, ..PLAIN }).0.unwrap()
}

/// Appends tokens and reads the logits, from which the token must have been taken.
fn append(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let sampled = engine.append(tokens, 0.5, &|_| ()).unwrap();
    let logits = engine.logits(0).unwrap().pop().unwrap();
    assert_eq!((sampled.token, sampled.probability), (best(&logits), 1.0));
    logits
}

/// The token with the largest logit; of equal ones, the lowest.
fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// Logits of the prompt's last token, and of each token after the prompt.
fn sequence(engine: &mut Engine, tokens: &[u32], prompt: usize) -> Vec<Vec<f32>> {
    let mut all = vec![append(engine, &tokens[..prompt])];
    all.extend(tokens[prompt..].iter().map(|&token| append(engine, &[token])));
    all
}

#[test]
fn logits_do_not_depend_on_placement_batching_or_depth() {
    let tokens = prompt(17);
    for arch in ARCHS {
        let toy = ToyModel::new(arch);
        let want = oracle::logits(&toy, &tokens).split_off(13);
        let two = TestConfig { devices: 2, ubatch: 4, ..PLAIN };
        for config in [
            PLAIN,
            TestConfig { ubatch: 5, depth: 2, flash_attn: true, ..PLAIN },
            two,
            TestConfig { depth: 4, ..two },
            TestConfig { depth: 3, ubatch: 1, shares: Some(&[2.0, 1.0]), flash_attn: true, ..two },
            TestConfig { devices: 5, depth: 4, ..two },
        ] {
            let mut engine = start(&toy, config).0.unwrap();
            assert_close(&sequence(&mut engine, &tokens, 14), &want, 1e-10, &format!("{arch}, {config:?}"));
            assert_eq!(engine.length(), 17);
        }
    }
}

#[test]
fn logits_do_not_depend_on_tensor_groups() {
    let tokens = prompt(17);
    for arch in ARCHS {
        let toy = ToyModel::new(arch);
        let want = oracle::logits(&toy, &tokens).split_off(13);
        let two = TestConfig { devices: 2, groups: &[&[1.0, 1.0]], ..PLAIN };
        for config in [
            two,
            TestConfig { flash_attn: true, ..two },
            TestConfig { groups: &[&[3.0, 1.0]], ubatch: 4, flash_attn: true, ..two },
            TestConfig { devices: 3, groups: &[&[1.0, 1.0, 1.0]], ..two },
            TestConfig { devices: 3, groups: &[&[1.0, 1.0], &[1.0]], depth: 2, ubatch: 4, ..two },
            TestConfig {
                devices: 4,
                groups: &[&[1.0, 1.0], &[1.0, 1.0]],
                depth: 4,
                ubatch: 4,
                flash_attn: true,
                ..two
            },
        ] {
            let mut engine = start(&toy, config).0.unwrap();
            let logits = sequence(&mut engine, &tokens, 14);
            assert_close(&logits, &want, 1e-10, &format!("{arch}, {config:?}"));
            let mut again = start(&toy, config).0.unwrap();
            assert_eq!(sequence(&mut again, &tokens, 14), logits, "{arch}, {config:?}: the bits of another run");
        }
    }
}

/// Caches that are rounded: the ranks round the same numbers, so that the logits are close to one device's.
#[test]
fn rounded_caches_give_close_logits_on_tensor_groups() {
    let tokens = prompt(17);
    for arch in ARCHS {
        let toy = ToyModel::new(arch);
        for (cache, flash_attn) in [(DType::F16, false), (DType::F16, true)] {
            let one = TestConfig { cache, flash_attn, ..PLAIN };
            let want = sequence_f64(&mut start(&toy, one).0.unwrap(), &tokens, 14);
            let two = TestConfig { devices: 2, groups: &[&[1.0, 1.0]], ..one };
            let got = sequence(&mut start(&toy, two).0.unwrap(), &tokens, 14);
            assert_close(&got, &want, 1e-6, &format!("{arch}, {two:?}"));
        }
    }
}

#[test]
fn shared_tensors_are_loaded_on_every_device_that_needs_them() {
    let mut toy = ToyModel::new(Arch::Llama);
    toy.tensors.remove("output.weight");
    toy.add("rope_freqs.weight", &[4]);
    let tokens = prompt(9);
    let want = oracle::logits(&toy, &tokens).split_off(7);
    let config = TestConfig { devices: 2, depth: 2, ..PLAIN };
    let mut engine = start(&toy, config).0.unwrap();
    assert_close(&sequence(&mut engine, &tokens, 8), &want, 1e-10, "tied");
    // The devices exchange one tensor per run: the hidden state between the blocks.
    assert_eq!(engine.graph_stats().map(|graph| (graph.splits, graph.copies)), [(2, 1); 2]);
}

#[test]
fn micro_batches_of_a_long_prompt_share_graphs() {
    let toy = ToyModel::new(Arch::Qwen3);
    let tokens = prompt(300);
    let want = oracle::logits(&toy, &tokens).split_off(299);
    let mut engine = start(&toy, TestConfig { devices: 2, depth: 4, ubatch: 32, ..PLAIN }).0.unwrap();
    assert_close(&sequence(&mut engine, &tokens, 300), &want, 1e-10, "300 tokens");
    // One graph for 256 positions, one for 300, and one for the last micro-batch.
    assert_eq!(engine.ready_graphs(), 3);
}

#[test]
fn a_replay_gives_the_same_bits() {
    let toy = ToyModel::new(Arch::Llama);
    let tokens = prompt(300);
    for config in [PLAIN, TestConfig { devices: 2, depth: 4, ubatch: 8, ..PLAIN }] {
        let mut engine = start(&toy, config).0.unwrap();
        let want = sequence(&mut engine, &tokens, 20);
        let mut again = start(&toy, config).0.unwrap();
        again.replay(&tokens[..20]).unwrap();
        tokens[20..299].iter().for_each(|&token| again.replay(&[token]).unwrap());
        assert_eq!(append(&mut again, &tokens[299..]), want[280], "{config:?}");
    }
}

#[test]
fn a_warm_up_plans_the_graphs_and_changes_no_logits() {
    let toy = ToyModel::new(Arch::Llama);
    let tokens = prompt(20);
    let config = TestConfig { devices: 2, depth: 2, ..PLAIN };
    let want = sequence(&mut start(&toy, config).0.unwrap(), &tokens, 15);
    let mut warm = start(&toy, config).0.unwrap();
    warm.warm_up(&tokens[..15]).unwrap();
    let planned = warm.ready_graphs();
    assert_eq!((warm.length(), planned), (0, 2));
    assert_eq!(sequence(&mut warm, &tokens, 15), want);
    assert_eq!(warm.ready_graphs(), planned);
}

#[test]
fn a_model_that_does_not_fit_fails_before_anything_is_allocated() {
    let (error, devices) = start(&ToyModel::new(Arch::Llama), TestConfig { devices: 2, memory: 80 << 10, ..PLAIN });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("CPU0") && error.contains("CPU1") && error.contains("free"), "{error}");
    for device in devices {
        let memory = device.memory().unwrap();
        assert_eq!(memory.free, memory.total);
    }
}

#[test]
fn empty_and_too_long_batches_are_rejected() {
    let mut engine = start(&ToyModel::new(Arch::Llama), PLAIN).0.unwrap();
    assert!(matches!(engine.append(&[], 0.5, &|_| ()), Err(EngineError::NoTokens)));
    let error = engine.append(&prompt(513), 0.5, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("context of 512"), "{error}");
    assert_eq!(engine.length(), 0);
    append(&mut engine, &[1]);
}

#[test]
fn a_comparison_reports_every_node_and_does_not_change_the_sequence() {
    let toy = ToyModel::new(Arch::Qwen3Moe);
    let tokens = prompt(9);
    let config = TestConfig { devices: 3, groups: &[&[1.0, 1.0], &[1.0]], ubatch: 4, ..PLAIN };
    let mut engine = start(&toy, config).0.unwrap();
    engine.parts.split = engine.parts.split.clone().with_copied_collectives(true);
    let reference: Arc<dyn Device> = CpuDevice::new("reference", 1, MathMode::Exact, 1 << 30).unwrap();
    let mut names = Vec::new();
    let mut report = |seen: ObservedNode<'_>, here: &[u8], there: &[u8]| {
        assert_eq!(here, there, "{}", seen.name);
        names.push(seen.name.to_owned());
        ControlFlow::Continue(())
    };
    engine.compare(&tokens, &reference, &MemoryBudget::new(1 << 30), &mut report).unwrap();
    assert_eq!(names.len(), engine.graph_stats()[1].nodes, "the nodes of all ranks");
    assert!(names.contains(&"blk.2.ffn_moe_down".to_owned()));
    let want = oracle::logits(&toy, &tokens).split_off(8);
    assert_close(&sequence(&mut engine, &tokens, 9), &want, 1e-10, "after the comparison");
}

/// However long the context and however large the vocabulary: neither masks are sent nor logits read.
#[test]
fn a_token_moves_few_bytes() {
    let toy = ToyModel::new(Arch::Llama);
    let mut engine = start(&toy, TestConfig { cells: 8192, flash_attn: true, ..PLAIN }).0.unwrap();
    engine.append(&prompt(300), 0.5, &|_| ()).unwrap();
    let sampled = engine.append(&[1], 0.5, &|_| ()).unwrap();
    let before = engine.transferred_bytes();
    engine.append(&[sampled.token], 0.5, &|_| ()).unwrap();
    // Two I32, two F32 and an I64.
    assert_eq!(engine.transferred_bytes()[0] - before[0], 24);
}

/// The replies of `prompts`, each of `limit` tokens, chosen by the largest logit: several sequences at a time.
fn decode_all(engine: &mut Engine, prompts: &[Vec<u32>], limit: usize) -> Vec<(Vec<u32>, Vec<Vec<f32>>)> {
    let uniform = |output: &BatchOutput| (output.position % 7) as f32 / 7.0;
    let mut all: Vec<(Vec<u32>, Vec<Vec<f32>>)> = vec![Default::default(); prompts.len()];
    let (mut next, mut running) = (0, std::collections::BTreeMap::new());
    loop {
        let mut submitted = 0;
        for group in 0..engine.groups() {
            let results = engine.finish(group).unwrap();
            let logits = if results.is_empty() { Vec::new() } else { engine.logits(group).unwrap() };
            for ((output, sampled), logits) in results.into_iter().zip(logits) {
                let number = running[&(group, output.sequence)];
                let best = sampled.token;
                let (tokens, rows): &mut (Vec<u32>, Vec<Vec<f32>>) = &mut all[number];
                tokens.push(best);
                rows.push(logits);
                let sequences = engine.sequences(group).unwrap();
                if tokens.len() == limit {
                    sequences.leave(output.sequence);
                    running.remove(&(group, output.sequence));
                } else {
                    sequences.push(output.sequence, best).unwrap();
                }
            }
            let most = engine.options().sequences;
            let sequences = engine.sequences(group).unwrap();
            if sequences.sequences() < most && next < prompts.len() {
                let positions = prompts[next].len() + limit - 1;
                running.insert((group, sequences.join(&prompts[next], positions).unwrap()), next);
                next += 1;
            }
            submitted += engine.start(group, &uniform).unwrap().tokens;
        }
        if submitted == 0 {
            assert!(running.is_empty() && next == prompts.len());
            return all;
        }
    }
}

/// Sequences that join and leave at different times, in one or more groups, on any placement: each has the tokens and, up to
/// rounding, the logits that it has alone. Their cells are reused, because there are more sequences than fit at a time.
#[test]
fn many_sequences_have_the_logits_that_each_has_alone() {
    const LIMIT: usize = 7;
    let prompts: Vec<Vec<u32>> = (0..9).map(|i| prompt(25)[i..i + 1 + (i * 5) % 16].to_vec()).collect();
    let two = TestConfig { devices: 2, sequences: 2, sequence_groups: 2, ..PLAIN };
    for (arch, config) in [
        (Arch::Llama, TestConfig { sequences: 3, ..PLAIN }),
        (Arch::Qwen3Moe, TestConfig { sequences: 3, flash_attn: true, ubatch: 4, ..PLAIN }),
        (Arch::Qwen3, TestConfig { ubatch: 5, ..two }),
        (Arch::Llama, TestConfig { flash_attn: true, ..two }),
        (Arch::Qwen2, TestConfig { devices: 3, groups: &[&[1.0, 1.0], &[1.0]], ..two }),
        (Arch::Llama, TestConfig { groups: &[&[3.0, 1.0]], flash_attn: true, ..two }),
    ] {
        let toy = ToyModel::new(arch);
        let got = decode_all(&mut start(&toy, config).0.unwrap(), &prompts, LIMIT);
        let alone = TestConfig { sequences: 1, sequence_groups: 1, ..config };
        for (number, (prompt, (tokens, rows))) in prompts.iter().zip(got).enumerate() {
            let mut engine = start(&toy, alone).0.unwrap();
            let sequence = [prompt, &tokens[..LIMIT - 1]].concat();
            let want = sequence_f64(&mut engine, &sequence, prompt.len());
            assert_close(&rows, &want, 1e-10, &format!("{arch}, {config:?}, sequence {number}"));
        }
    }
}

/// As after a loss: what an earlier engine has left in the caches, with the same tags, is not seen.
#[test]
fn a_new_engine_sees_no_cell_of_the_last_one() {
    let toy = ToyModel::new(Arch::Llama);
    let prompts: Vec<Vec<u32>> = (1..4).map(prompt).collect();
    let config = TestConfig { sequences: 3, ..PLAIN };
    let want = decode_all(&mut start(&toy, config).0.unwrap(), &prompts, 4);
    let used = |mut engine: Engine| {
        decode_all(&mut engine, &[prompt(20), prompt(9), prompt(30)], 9);
    };
    let again = TestConfig { before: Some(used), ..config };
    assert_eq!(decode_all(&mut start(&toy, again).0.unwrap(), &prompts, 4), want);
}

fn sequence_f64(engine: &mut Engine, tokens: &[u32], prompt: usize) -> Vec<Vec<f64>> {
    let rows = sequence(engine, tokens, prompt);
    rows.iter().map(|row| row.iter().map(|&x| x.into()).collect()).collect()
}
