//! Sampling on CPU devices: the tokens of one device and of tensor groups against a reference in f64, and the bytes that ranks copy.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget};
use fanout::ops::concat::Concat;
use fanout::ops::copy::CopyOp;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::{OpCode, OutputSpec};
use fanout::sched::TaskBuilder;
use fanout::sched::sampling::{LogitsLayout, Sampling, SamplingError, add_sampler};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::sampling::{BELOW_ONE, HostLogits, Reference, Settings, UNIFORM, logits};
use fanout_testing::transformer::{LoadedModel, Model, devices, encode, group, noise};
use std::sync::Arc;

const LAYOUTS: [LogitsLayout; 2] = [LogitsLayout::Whole, LogitsLayout::SplitByVocabulary];

fn sampler(mode: MathMode, shape: [usize; 2], settings: &Settings, layout: LogitsLayout) -> HostLogits {
    let device = CpuDevice::new("CPU", 1, mode, 1 << 28).unwrap() as Arc<dyn Device>;
    HostLogits::new(device, &MemoryBudget::new(1 << 28), shape, settings, layout)
}

/// The settings by number in [`Settings::ALL`] that are tried with many tokens.
const LARGE: [usize; 6] = [0, 2, 4, 6, 7, 10];

#[test]
fn tokens_are_those_of_the_reference() {
    let all: Vec<usize> = (0..Settings::ALL.len()).collect();
    let cases: [(usize, &[usize], usize); 10] = [
        (1, &all, 1),
        (2, &all, 3),
        (7, &all, 3),
        (256, &all, 3),
        (257, &all, 1),
        (300, &all, 3),
        (1999, &all, 3),
        (4096, &all, 3),
        (32_000, &LARGE, 3),
        (32_003, &LARGE, 1),
    ];
    let (mut clear, mut draws) = (0, 0);
    for (tokens, numbers, sequences) in cases {
        for &number in numbers {
            let settings = &Settings::ALL[number];
            // Each kind of logits comes up in some sequence.
            let rows: Vec<Vec<f32>> =
                (0..sequences).map(|s| logits((number + tokens + 2 * s) % 6, tokens, s as u64 + 3)).collect();
            let references: Vec<Reference> = rows.iter().map(|row| Reference::new(row, settings)).collect();
            for (layout, mode) in LAYOUTS.into_iter().zip([MathMode::Fast, MathMode::Exact]) {
                let mut sampler = sampler(mode, [tokens, sequences], settings, layout);
                for run in 0..UNIFORM.len() {
                    let uniform: Vec<f32> = (0..sequences).map(|s| UNIFORM[(run + s) % UNIFORM.len()]).collect();
                    let drawn = sampler.run(&rows.concat(), &uniform);
                    assert_eq!(drawn.len(), sequences);
                    for (s, drawn) in drawn.into_iter().enumerate() {
                        let what = format!("{tokens} tokens, {settings:?}, {layout:?}, sequence {s}");
                        clear += usize::from(references[s].check(uniform[s], drawn, &what));
                        draws += 1;
                    }
                }
            }
        }
    }
    assert!(clear * 3 > draws * 2, "{clear} of {draws} draws were compared");
}

/// A thousand numbers at equal distances draw each token as often as its probability says.
#[test]
fn frequencies_are_the_probabilities() {
    const DRAWS: usize = 1000;
    let row = [0.1f32.ln(), 0.5f32.ln(), 0.4f32.ln(), f32::NEG_INFINITY];
    let squares = 0.01 + 0.25 + 0.16;
    let settings = |temperature, top_k, top_p| Settings { temperature, top_k, top_p, min_p: 0.0 };
    let cases = [
        (settings(1.0, 0, 1.0), [0.1, 0.5, 0.4, 0.0]),
        (settings(0.5, 0, 1.0), [0.01 / squares, 0.25 / squares, 0.16 / squares, 0.0]),
        (settings(1.0, 0, 0.85), [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
        // The temperature is applied after top-p, and top-p after top-k.
        (settings(0.5, 0, 0.85), [0.0, 0.25 / 0.41, 0.16 / 0.41, 0.0]),
        (settings(1.0, 2, 0.55), [0.0, 1.0, 0.0, 0.0]),
        (settings(1.0, 2, 1.0), [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
        (settings(1.0, 0, 0.0), [0.0, 1.0, 0.0, 0.0]),
        (Settings { min_p: 0.7, ..settings(1.0, 0, 1.0) }, [0.0, 5.0 / 9.0, 4.0 / 9.0, 0.0]),
        (Settings { min_p: 0.7, ..settings(0.5, 3, 0.99) }, [0.0, 0.25 / 0.41, 0.16 / 0.41, 0.0]),
        (Settings { min_p: 1.0, ..settings(1.0, 0, 1.0) }, [0.0, 1.0, 0.0, 0.0]),
    ];
    let uniform: Vec<f32> = (0..DRAWS).map(|i| (i as f32 + 0.5) / DRAWS as f32).collect();
    for (settings, want) in cases {
        for layout in LAYOUTS {
            let mut sampler = sampler(MathMode::Fast, [row.len(), DRAWS], &settings, layout);
            let mut counts = [0.0; 4];
            for (token, _) in sampler.run(&row.repeat(DRAWS), &uniform) {
                counts[token as usize] += 1.0;
            }
            for (count, want) in counts.iter().zip(want) {
                assert!((count - want * DRAWS as f64).abs() < 1.5, "{settings:?}, {layout:?}: {counts:?}");
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_lowest_id() {
    let with = |tokens: usize, largest: &[usize]| {
        (0..tokens).map(|i| if largest.contains(&i) { 2.0 } else { -1.0 }).collect::<Vec<f32>>()
    };
    let settings = |temperature, top_k, top_p| Settings { temperature, top_k, top_p, min_p: 0.0 };
    // Logits, settings, and the tokens of the least, the middle and the largest number.
    let cases: [(Vec<f32>, Settings, [i32; 3]); 6] = [
        (with(256, &[71, 70, 200]), settings(0.0, 0, 1.0), [70; 3]),
        (with(256, &[64, 255]), settings(0.0, 0, 1.0), [64; 3]),
        (vec![-7.0; 7], settings(0.0, 0, 1.0), [0; 3]),
        (with(256, &[9, 80, 200]), settings(1.0, 2, 1.0), [9, 80, 80]),
        (vec![0.5; 4], settings(1.0, 0, 0.5), [0, 1, 1]),
        (vec![0.5; 300], settings(1.0, 3, 1.0), [0, 1, 2]),
    ];
    for (row, settings, want) in cases {
        for layout in LAYOUTS {
            let mut sampler = sampler(MathMode::Fast, [row.len(), 3], &settings, layout);
            let drawn = sampler.run(&row.repeat(3), &[0.0, 0.5, BELOW_ONE]);
            assert_eq!([0, 1, 2].map(|s| drawn[s].0), want, "{settings:?}, {layout:?}");
        }
    }
}

/// NaN and plus infinity anywhere, also among minus infinities, and minus infinity everywhere: NaN, for that sequence only.
#[test]
fn invalid_logits_give_nan() {
    const LOW: f32 = f32::NEG_INFINITY;
    for tokens in [1, 7, 300] {
        let valid = logits(0, tokens, 5);
        let mut invalid = vec![vec![LOW; tokens], vec![f32::NAN; tokens]];
        for at in [0, tokens / 2, tokens - 1] {
            for value in [f32::NAN, -f32::NAN, f32::INFINITY] {
                for base in [valid.clone(), vec![LOW; tokens], vec![f32::MIN; tokens]] {
                    let mut row = base;
                    row[at] = value;
                    invalid.push(row);
                }
            }
        }
        for settings in &Settings::ALL {
            let reference = Reference::new(&valid, settings);
            for layout in LAYOUTS {
                let mut sampler = sampler(MathMode::Fast, [tokens, 3], settings, layout);
                for row in &invalid {
                    let drawn = sampler.run(&[&valid[..], row, &valid].concat(), &[0.3; 3]);
                    assert!(drawn[1].1.is_nan(), "{:?}, {settings:?}, {layout:?}, {tokens} tokens", drawn[1]);
                    reference.check(0.3, drawn[0], "before");
                    reference.check(0.3, drawn[2], "behind");
                }
            }
        }
    }
}

/// A node costs time on every device, however small it is: a sampler has few, greedy sampling fewer than random sampling, and more
/// sequences add none. A split vocabulary has some for each of its blocks.
#[test]
fn samplers_have_few_nodes() {
    const MAX_NODES: usize = 72;
    const MAX_GREEDY_NODES: usize = 24;
    for settings in &Settings::ALL {
        for layout in LAYOUTS {
            let nodes = |shape| sampler(MathMode::Fast, shape, settings, layout).nodes;
            let most = if settings.temperature == 0.0 { MAX_GREEDY_NODES } else { MAX_NODES };
            for tokens in [32_000, 128_000] {
                let one = nodes([tokens, 1]);
                assert!(one <= most, "{one} nodes: {tokens} tokens, {settings:?}, {layout:?}");
                assert_eq!(nodes([tokens, 5]), one, "5 sequences, {tokens} tokens, {settings:?}, {layout:?}");
            }
        }
    }
}

#[test]
fn invalid_settings_and_logits_are_refused() {
    for temperature in [-1.0, 1e-9, f32::INFINITY, f32::NAN] {
        assert!(matches!(Sampling::new(temperature, None, 1.0), Err(SamplingError::Temperature(_))));
    }
    for top_p in [-0.1, 1.1, f32::NAN] {
        assert!(matches!(Sampling::new(1.0, None, top_p), Err(SamplingError::TopP(_))));
    }
    for min_p in [-0.1, 1.1, f32::NAN] {
        assert!(matches!(Sampling::GREEDY.with_min_p(min_p), Err(SamplingError::MinP(_))));
    }
    assert_eq!(Sampling::new(0.0, None, 1.0), Ok(Sampling::GREEDY));
    for (dtype, ne) in [(DType::F16, [8, 2, 1, 1]), (DType::F32, [8, 2, 2, 1]), (DType::F32, [(1 << 24) + 1, 1, 1, 1])]
    {
        let mut b = TaskBuilder::new();
        let logits = b.input("logits", dtype, ne).unwrap();
        assert!(add_sampler(&mut b, logits, &Sampling::GREEDY, LogitsLayout::Whole).is_err(), "{dtype} {ne:?}");
    }
}

/// Columns of the weight whose product is the logits.
const WIDTH: usize = 16;

/// A task whose result is the logits, or tokens and probabilities: `[2, sequences]`.
fn product(tokens: usize, sampler: Option<(&Settings, LogitsLayout)>) -> Model {
    let sequences = UNIFORM.len();
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [WIDTH, sequences, 1, 1]).unwrap();
    let desc = TensorDesc::contiguous(DType::F32, [WIDTH, tokens, 1, 1]).unwrap();
    let weight = b.stored("output", desc, 0, None).unwrap();
    let logits = b.node(MulMat::PLAIN, &[Some(weight), Some(x)]).unwrap();
    let values: Vec<f32> = noise(8, WIDTH * sequences).iter().map(|x| 4.0 * x).collect();
    let mut inputs = vec![(x, encode(DType::F32, &values))];
    let mut result = logits;
    if let Some((settings, layout)) = sampler {
        let sampled = add_sampler(&mut b, logits, &settings.sampling(), layout).unwrap();
        inputs.extend(sampled.uniform.map(|id| (id, encode(DType::F32, &UNIFORM))));
        let out = OutputSpec { dtype: DType::F32, ne: [1, sequences, 1, 1] };
        let tokens = b.node_as(CopyOp::Cpy, &[Some(sampled.tokens)], out).unwrap();
        let probabilities = b.reshape(sampled.probabilities, out.ne).unwrap();
        result = b.node(Concat::Concat { dim: 0 }, &[Some(tokens), Some(probabilities)]).unwrap();
    }
    b.output(result).unwrap();
    Model { task: b.build().unwrap(), inputs, logits: result }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A vocabulary split over ranks gives the tokens of one device, and ranks exchange a few numbers per block.
#[test]
fn ranks_agree_and_exchange_little() {
    let groups: [&[f32]; 4] = [&[1.0; 2], &[3.0, 1.0], &[1.0; 3], &[1.0, 2.0, 1.0]];
    for tokens in [7, 256, 1500, 1999, 4096, 32_000] {
        let plain = product(tokens, None);
        let logits = floats(&LoadedModel::new(&plain, devices(1), vec![group(0..1, &[1.0])], 0, false).run().unwrap());
        let numbers: &[usize] = if tokens < 32_000 { &[0, 1, 5, 7] } else { &[1] };
        for settings in numbers.iter().map(|&number| &Settings::ALL[number]) {
            let references: Vec<_> = logits.chunks(tokens).map(|row| Reference::new(row, settings)).collect();
            for (shares, copied) in groups.into_iter().flat_map(|shares| [(shares, false), (shares, true)]) {
                for layout in LAYOUTS {
                    let model = product(tokens, Some((settings, layout)));
                    let ranks = vec![group(0..shares.len(), shares)];
                    let mut loaded = LoadedModel::new(&model, devices(shares.len()), ranks, 0, copied);
                    let drawn = floats(&loaded.run().unwrap());
                    for ((s, drawn), reference) in drawn.chunks(2).enumerate().zip(&references) {
                        let what = format!("{tokens} tokens, {settings:?}, {layout:?}, {shares:?}, sequence {s}");
                        reference.check(UNIFORM[s], (drawn[0] as i32, drawn[1]), &what);
                    }
                    let is_by_block =
                        settings.top_p == 1.0 && settings.top_k == 0 && settings.min_p == 0.0 && tokens >= 4096;
                    if !copied || !is_by_block {
                        continue;
                    }
                    // At most three numbers of each block, of up to 256 blocks.
                    let bytes = loaded.scheduler.transfer_counts().copied.iter().copied().max().unwrap();
                    let few = (4 * 3 * UNIFORM.len() * if tokens == 4096 { 64 } else { 256 }) as u64;
                    assert_eq!(bytes <= few, layout == LogitsLayout::SplitByVocabulary, "{bytes} of {few} bytes");
                }
            }
        }
    }
}

/// Sampled graphs have only ops of ggml's protocol.
#[test]
fn samplers_run_on_servers_of_ggml() {
    for settings in &Settings::ALL {
        for layout in LAYOUTS {
            let task = product(4096, Some((settings, layout))).task;
            let codes: Vec<OpCode> = task.graph().nodes().iter().map(|node| node.op.code()).collect();
            assert!(codes.iter().all(|code| code.is_in_protocol()), "{codes:?}");
        }
    }
}
