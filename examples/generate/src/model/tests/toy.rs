//! Toy models for tests: tiny, with random weights, in memory or as a GGUF file.

use crate::hparams::{Arch, ExpertUse, Experts, HParams, Positions, Temperature, Variant};
use fanout::gguf::{Gguf, Writer};
use fanout::ops::glu::GluKind;
use fanout::ops::rope::Rope;
use fanout::tensor::{DIMS, DType, TensorDesc};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// Number of tokens in the vocabulary of every toy model.
const VOCAB: usize = 50;

/// All architectures.
pub(crate) const ARCHS: [Arch; 10] = Arch::ALL;

/// A model with random weights.
pub(crate) struct ToyModel {
    pub(crate) hparams: HParams,
    pub(crate) tensors: BTreeMap<String, (TensorDesc, Vec<f32>)>,
}

impl ToyModel {
    pub(crate) fn new(arch: Arch) -> ToyModel {
        // SmolLM3 has another fourth block.
        let layers = if arch == Arch::SmolLm3 { 4 } else { 3 };
        let (width, heads, kv_heads, head_width, ff) = (24, 6, 2, 8, 40);
        let (experts, expert_ff) = (5, 12);
        let spec = arch.spec();
        let moe = spec.experts == ExpertUse::Always;
        let hparams = HParams {
            arch,
            layers,
            width,
            heads,
            kv_heads,
            head_width,
            ff,
            vocab: VOCAB,
            context: 512,
            rms_epsilon: 1e-5,
            rope: Rope { n_ctx_orig: ORIGINAL, ..Rope::new(spec.rope_mode, head_width as u32) },
            rope_factors: spec.rope_factors,
            experts: moe.then_some(Experts { count: experts, used: 2, ff: expert_ff }),
            variant: variant(arch, layers),
        };
        let mut toy = ToyModel { hparams, tensors: BTreeMap::new() };
        toy.add("token_embd.weight", &[width, VOCAB]);
        toy.add("output.weight", &[width, VOCAB]);
        toy.add("output_norm.weight", &[width]);
        for i in 0..layers {
            let mut add = |stem: &str, ne: &[usize]| toy.add(&format!("blk.{i}.{stem}"), ne);
            add("attn_norm.weight", &[width]);
            add(spec.ffn_norm, &[width]);
            add("attn_output.weight", &[heads * head_width, width]);
            for (stem, rows) in
                [("attn_q", heads * head_width), ("attn_k", kv_heads * head_width), ("attn_v", kv_heads * head_width)]
            {
                add(&format!("{stem}.weight"), &[width, rows]);
                if matches!(arch, Arch::Qwen2 | Arch::GptOss) {
                    add(&format!("{stem}.bias"), &[rows]);
                }
            }
            if spec.result_norms {
                add("post_attention_norm.weight", &[width]);
                add("post_ffw_norm.weight", &[width]);
            }
            if spec.head_norms {
                add("attn_q_norm.weight", &[head_width]);
                add("attn_k_norm.weight", &[head_width]);
            }
            if spec.sinks {
                add("attn_sinks.weight", &[heads]);
                add("attn_output.bias", &[width]);
                add("ffn_gate_inp.bias", &[experts]);
                add("ffn_gate_exps.bias", &[expert_ff, experts]);
                add("ffn_up_exps.bias", &[expert_ff, experts]);
                add("ffn_down_exps.bias", &[width, experts]);
            }
            if moe {
                add("ffn_gate_inp.weight", &[width, experts]);
                add("ffn_gate_exps.weight", &[width, expert_ff, experts]);
                add("ffn_up_exps.weight", &[width, expert_ff, experts]);
                add("ffn_down_exps.weight", &[expert_ff, width, experts]);
            } else {
                add("ffn_gate.weight", &[width, ff]);
                add("ffn_up.weight", &[width, ff]);
                add("ffn_down.weight", &[ff, width]);
            }
        }
        toy
    }

    pub(crate) fn add(&mut self, name: &str, ne: &[usize]) {
        let mut full = [1; DIMS];
        full[..ne.len()].copy_from_slice(ne);
        let desc = TensorDesc::contiguous(DType::F32, full).unwrap();
        let mut rng = fastrand::Rng::with_seed(self.tensors.len() as u64);
        // Vectors (norms, biases, and the frequency factors that some tests add) are around 1; matrices are scaled so that
        // activations stay around 1.
        let (mean, spread) = if ne.len() == 1 { (1.0, 0.2) } else { (0.0, 3.0 / (ne[0] as f32).sqrt()) };
        let values = (0..desc.elements()).map(|_| mean + spread * (rng.f32() - 0.5)).collect();
        self.tensors.insert(name.to_owned(), (desc, values));
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(crate) fn values(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    /// The model as the bytes of a GGUF file.
    pub(crate) fn gguf_bytes(&self) -> Vec<u8> {
        let HParams { arch, layers, width, heads, kv_heads, head_width, ff, vocab, context, rms_epsilon, .. } =
            self.hparams;
        let key = |key: &str| format!("{arch}.{key}");
        let pieces: Vec<String> = (0..vocab).map(|i| format!("piece{i}")).collect();
        let mut writer = Writer::new()
            .text("general.architecture", arch.name())
            .int(&key("block_count"), layers as u32)
            .int(&key("embedding_length"), width as u32)
            .int(&key("attention.head_count"), heads as u32)
            .int(&key("attention.head_count_kv"), kv_heads as u32)
            .int(&key("attention.key_length"), head_width as u32)
            .int(&key("attention.value_length"), head_width as u32)
            .int(&key("feed_forward_length"), ff as u32)
            .int(&key("context_length"), context as u32)
            .float(&key("attention.layer_norm_rms_epsilon"), rms_epsilon)
            .texts("tokenizer.ggml.tokens", &pieces);
        writer = writer.int(&key("rope.scaling.original_context_length"), ORIGINAL as u32);
        if let Positions::Windows { rope, .. } = &self.hparams.variant.positions {
            writer = writer
                .int(&key("attention.sliding_window"), WINDOW)
                .int(&key("attention.sliding_window_pattern"), 2)
                .float(&key("rope.freq_base_swa"), rope.freq_base);
        }
        if let Some(Temperature { scale, .. }) = self.hparams.variant.temperature {
            writer = writer.float(&key("attention.temperature_scale"), scale);
        }
        if arch == Arch::Granite {
            let Variant { embedding_scale, residual_scale, logit_scale, .. } = self.hparams.variant;
            writer = writer
                .float(&key("embedding_scale"), embedding_scale)
                .float(&key("residual_scale"), residual_scale)
                .float(&key("attention.scale"), self.hparams.attention_scale())
                .float(&key("logit_scale"), logit_scale.recip());
        }
        if let Some(experts) = &self.hparams.experts {
            writer = writer
                .int(&key("expert_count"), experts.count as u32)
                .int(&key("expert_used_count"), experts.used as u32)
                .int(&key("expert_feed_forward_length"), experts.ff as u32);
        }
        for (name, (desc, _)) in &self.tensors {
            writer = writer.tensor(name, &desc.ne().map(|n| n as u64), desc.dtype());
        }
        let mut bytes = writer.to_bytes().unwrap();
        for info in Gguf::parse(&bytes.clone()).unwrap().tensors {
            let values = self.values(&info.name).iter().flat_map(|v| v.to_le_bytes());
            bytes[info.bytes].copy_from_slice(&values.collect::<Vec<u8>>());
        }
        bytes
    }
}

/// The positions of a sliding window: fewer than the tests' prompts have.
const WINDOW: u32 = 3;

/// The context before its extension: fewer positions than the tests' prompts have.
const ORIGINAL: i32 = 4;

/// What an architecture computes beyond a llama, as [`ToyModel::gguf_bytes`] writes it.
fn variant(arch: Arch, layers: usize) -> Variant {
    let plain = Variant::LLAMA;
    let windows = |freq_base| Positions::Windows {
        width: NonZeroU32::new(WINDOW).unwrap(),
        local: (0..layers).map(|block| block % 2 == 0).collect(),
        rope: Rope { freq_base, n_ctx_orig: ORIGINAL, ..Rope::new(arch.spec().rope_mode, 8) },
    };
    match arch {
        Arch::Gemma3 => {
            Variant { embedding_scale: 24f32.sqrt(), gate: GluKind::Geglu, positions: windows(100.0), ..plain }
        }
        Arch::GptOss => {
            Variant { gate: GluKind::SwigluOai { alpha: 1.702, limit: 7.0 }, positions: windows(10000.0), ..plain }
        }
        Arch::Granite => Variant {
            embedding_scale: 1.5,
            residual_scale: 0.5,
            attention_scale: Some(0.25),
            logit_scale: 0.25,
            ..plain
        },
        Arch::Mistral3 => Variant { temperature: Some(Temperature { scale: 0.5, step: ORIGINAL as f32 }), ..plain },
        Arch::SmolLm3 => Variant { positions: Positions::UnrotatedEvery(4), ..plain },
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe | Arch::Phi3 => plain,
    }
}

/// A fixed pseudo-random sequence of `n` tokens.
pub(crate) fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 17 + 3) % VOCAB as u32).collect()
}

/// Asserts that the NMSE (normalised mean square error) of logits is at most `bound`.
#[track_caller]
pub(crate) fn assert_close(got: &[Vec<f32>], want: &[Vec<f64>], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let pairs = || got.iter().flatten().zip(want.iter().flatten());
    let error: f64 = pairs().map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    let nmse = error / want.iter().flatten().map(|w| w * w).sum::<f64>();
    assert!(nmse <= bound, "{what}: NMSE {nmse:e}");
}
