//! Toy models for tests: tiny, with random weights, in memory or as a GGUF file.

use crate::hparams::{Arch, Experts, HParams};
use fanout::gguf::{Gguf, Writer};
use fanout::ops::rope::Rope;
use fanout::tensor::{DIMS, DType, TensorDesc};
use std::collections::BTreeMap;

/// Number of tokens in the vocabulary of every toy model.
const VOCAB: usize = 50;

/// All architectures.
pub(crate) const ARCHS: [Arch; 4] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Qwen3Moe];

/// A model with random weights.
pub(crate) struct ToyModel {
    pub(crate) hparams: HParams,
    pub(crate) tensors: BTreeMap<String, (TensorDesc, Vec<f32>)>,
}

impl ToyModel {
    pub(crate) fn new(arch: Arch) -> ToyModel {
        let (layers, width, heads, kv_heads, head_width, ff) = (3, 24, 6, 2, 8, 40);
        let (experts, expert_ff) = (5, 12);
        let moe = arch == Arch::Qwen3Moe;
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
            rope: Rope::new(arch.rope_mode(), head_width as u32),
            experts: moe.then_some(Experts { count: experts, used: 2, ff: expert_ff }),
        };
        let mut toy = ToyModel { hparams, tensors: BTreeMap::new() };
        toy.add("token_embd.weight", &[width, VOCAB]);
        toy.add("output.weight", &[width, VOCAB]);
        toy.add("output_norm.weight", &[width]);
        for i in 0..layers {
            let mut add = |stem: &str, ne: &[usize]| toy.add(&format!("blk.{i}.{stem}"), ne);
            add("attn_norm.weight", &[width]);
            add("ffn_norm.weight", &[width]);
            add("attn_output.weight", &[heads * head_width, width]);
            for (stem, rows) in
                [("attn_q", heads * head_width), ("attn_k", kv_heads * head_width), ("attn_v", kv_heads * head_width)]
            {
                add(&format!("{stem}.weight"), &[width, rows]);
                if arch == Arch::Qwen2 {
                    add(&format!("{stem}.bias"), &[rows]);
                }
            }
            if matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe) {
                add("attn_q_norm.weight", &[head_width]);
                add("attn_k_norm.weight", &[head_width]);
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
