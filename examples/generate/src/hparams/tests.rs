//! Tests of hyperparameters: defaults, overrides, and one row per value that is refused.

use super::*;
use fanout::gguf::{Gguf, Writer};
use fanout::ops::rope::RopeMode;
use std::num::NonZeroU32;

fn sample(arch: Arch) -> Writer {
    let key = |key: &str| format!("{arch}.{key}");
    Writer::new()
        .text("general.architecture", arch.name())
        .int(&key("block_count"), 2)
        .int(&key("embedding_length"), 256)
        .int(&key("attention.head_count"), 8)
        .int(&key("feed_forward_length"), 512)
        .int(&key("context_length"), 4096)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .texts("tokenizer.ggml.tokens", &["a", "b", "c"])
}

fn read(file: &Writer) -> Result<HParams, KeyError> {
    HParams::read(&Gguf::parse(&file.to_bytes().unwrap()).unwrap().metadata)
}

#[test]
fn missing_optional_keys_have_defaults() {
    for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
        let hparams = read(&sample(arch)).unwrap();
        let rope = Rope { n_ctx_orig: 4096, ..Rope::new(arch.spec().rope_mode, 32) };
        let expected = HParams {
            arch,
            layers: 2,
            width: 256,
            heads: 8,
            kv_heads: 8,
            head_width: 32,
            ff: 512,
            experts: None,
            vocab: 3,
            context: 4096,
            rms_epsilon: 1e-5,
            rope,
            rope_factors: arch.spec().rope_factors,
            variant: Variant::LLAMA,
        };
        assert_eq!(hparams, expected);
    }
    assert_eq!(Arch::Llama.spec().rope_mode, RopeMode::Normal);
    assert_eq!(Arch::Qwen3Moe.spec().rope_mode, RopeMode::Neox);
}

#[test]
fn optional_keys_override_the_defaults() {
    let file = sample(Arch::Qwen3Moe)
        .int("qwen3moe.attention.head_count_kv", 2)
        .int("qwen3moe.attention.key_length", 64)
        .int("qwen3moe.attention.value_length", 64)
        .int("qwen3moe.rope.dimension_count", 64)
        .float("qwen3moe.rope.freq_base", 1e6)
        .text("qwen3moe.rope.scaling.type", "linear")
        .float("qwen3moe.rope.scaling.factor", 4.0)
        .int("qwen3moe.expert_count", 8)
        .int("qwen3moe.expert_used_count", 2)
        .int("qwen3moe.vocab_size", 3);
    let hparams = read(&file).unwrap();
    assert_eq!((hparams.kv_heads, hparams.head_width, hparams.kv_width()), (2, 64, 128));
    assert_eq!(hparams.experts, Some(Experts { count: 8, used: 2, ff: 256 }));
    assert_eq!((hparams.rope.n_dims, hparams.rope.freq_base, hparams.rope.freq_scale), (64, 1e6, 0.25));
    let hparams = read(&file.clone().int("qwen3moe.expert_feed_forward_length", 768)).unwrap();
    assert_eq!(hparams.experts, Some(Experts { count: 8, used: 2, ff: 768 }));
    let hparams = read(&file.text("qwen3moe.rope.scaling.type", "none")).unwrap();
    assert_eq!(hparams.rope.freq_scale, 1.0);
    let hparams = read(&sample(Arch::Llama).float("llama.rope.scale_linear", 2.0)).unwrap();
    assert_eq!(hparams.rope.freq_scale, 0.5);
}

#[test]
fn each_missing_key_is_named() {
    for key in ["block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"]
        .into_iter()
        .chain(["attention.layer_norm_rms_epsilon"])
    {
        let key = format!("llama.{key}");
        assert_eq!(read(&sample(Arch::Llama).without(&key).unwrap()), Err(KeyError::Missing { key }));
    }
    for key in ["general.architecture", "tokenizer.ggml.tokens"] {
        assert_eq!(read(&sample(Arch::Llama).without(key).unwrap()), Err(KeyError::Missing { key: key.to_owned() }));
    }
    let key = "qwen3moe.expert_count".to_owned();
    assert_eq!(read(&sample(Arch::Qwen3Moe)), Err(KeyError::Missing { key }));
}

#[test]
fn each_contradiction_is_named() {
    let llama = || sample(Arch::Llama);
    let moe = || sample(Arch::Qwen3Moe).int("qwen3moe.expert_count", 4);
    let cases = [
        (
            llama().text("general.architecture", "mamba"),
            "general.architecture: expected one of llama, mistral3, qwen2, qwen3, qwen3moe, gemma3, gpt-oss, granite, phi3, smollm3, \
             the architectures this program runs, found \"mamba\"",
        ),
        (llama().int("llama.block_count", 0), "llama.block_count: expected a number above 0, found 0"),
        (
            llama().int("llama.attention.head_count_kv", 3),
            "expected a divisor of llama.attention.head_count, 8, found 3",
        ),
        (
            llama().ints("llama.attention.head_count", &[8, 4]),
            "llama.attention.head_count: expected the same number in all blocks: others are not supported, found 8 in block 0 \
             and 4 in block 1",
        ),
        (
            llama().ints("llama.attention.head_count_kv", &[8, 0]),
            "llama.attention.head_count_kv: expected the same number in all blocks",
        ),
        (
            llama().ints("llama.attention.head_count_kv", &[0, 0]),
            "llama.attention.head_count_kv: expected a number above 0, found 0",
        ),
        (
            llama().ints("llama.feed_forward_length", &[512]),
            "llama.feed_forward_length: expected a number for each of 2 blocks, found 1",
        ),
        (
            llama().floats("llama.feed_forward_length", &[512.0, 512.0]),
            "llama.feed_forward_length: expected an array of whole numbers from 0 to 4294967295, found 2 values",
        ),
        (
            moe().ints("qwen3moe.expert_used_count", &[2, 3]),
            "qwen3moe.expert_used_count: expected the same number in all blocks: others are not supported, found 2 in block 0",
        ),
        (llama().int("llama.attention.head_count", 7), "expected a divisor of llama.embedding_length, 256, found 7"),
        (llama().int("llama.attention.key_length", 64), "llama.attention.value_length: expected 64, the length"),
        (llama().int("llama.rope.dimension_count", 16), "llama.rope.dimension_count: expected an even number and"),
        (llama().text("llama.rope.scaling.type", "su"), "expected none, linear, yarn or longrope, found \"su\""),
        (llama().float("llama.rope.scaling.factor", -1.0), "rope.scaling.factor: expected a number above 0, found -1"),
        (llama().float("llama.rope.freq_base", f32::NAN), "llama.rope.freq_base: expected a finite number, found NaN"),
        (llama().text("tokenizer.ggml.tokens", "x"), "tokenizer.ggml.tokens: expected an array of tokens, found \"x\""),
        (sample(Arch::Qwen2).int("qwen2.expert_count", 8), "expected no experts in this architecture, found 8"),
        (moe().int("qwen3moe.expert_used_count", 5), "expert_used_count: expected at most the 4 experts, found 5"),
    ];
    for (file, expected) in cases {
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\n{expected}");
    }
}

#[test]
fn equal_numbers_of_all_blocks_are_one_number() {
    let file = sample(Arch::Qwen3Moe).int("qwen3moe.expert_count", 8).int("qwen3moe.expert_used_count", 2);
    let with = |key: &str, number: u32| file.clone().int(&format!("qwen3moe.{key}"), number);
    let each = |key: &str, number: i32| file.clone().ints(&format!("qwen3moe.{key}"), &[number; 2]);
    for (key, number) in [
        ("attention.head_count", 16),
        ("attention.head_count_kv", 2),
        ("feed_forward_length", 128),
        ("expert_feed_forward_length", 64),
        ("expert_used_count", 4),
    ] {
        let hparams = read(&each(key, number)).unwrap();
        assert_eq!(hparams, read(&with(key, number as u32)).unwrap(), "{key}");
        assert_ne!(hparams, read(&file).unwrap(), "{key}");
    }
}

/// The rotation by YaRN, as llama.cpp computes it from the file's keys.
#[test]
fn yarn_scales_the_rotation() {
    let with = |factor: f32| {
        let file =
            sample(Arch::Qwen2).text("qwen2.rope.scaling.type", "yarn").float("qwen2.rope.scaling.factor", factor);
        read(&file.int("qwen2.rope.scaling.original_context_length", 1024)).unwrap().rope
    };
    let rope = with(4.0);
    assert_eq!((rope.n_ctx_orig, rope.freq_scale, rope.ext_factor, rope.attn_factor), (1024, 0.25, 1.0, 1.0));
    assert_eq!((rope.beta_fast, rope.beta_slow), (32.0, 1.0));
    assert_eq!(with(0.5).attn_factor, 1.0 / (1.0 + 0.1 * 0.5f32.ln()));
    let file = sample(Arch::Mistral3).text("mistral3.rope.scaling.type", "yarn");
    let file = file.float("mistral3.rope.scaling.factor", 16.0).float("mistral3.rope.scaling.yarn_log_multiplier", 1.0);
    let rope = read(&file.float("mistral3.rope.scaling.yarn_beta_fast", 4.0)).unwrap().rope;
    assert_eq!((rope.beta_fast, rope.attn_factor), (4.0, 1.0 / (1.0 + 0.1 * 16f32.ln())));
}

/// LongRoPE has other factors beyond the original context.
#[test]
fn the_context_chooses_the_factors_of_the_rotation() {
    let names = |file: &Writer| {
        let hparams = read(file).unwrap();
        [1024, 1025].map(|context| hparams.rope_factors_name(context))
    };
    let phi3 = sample(Arch::Phi3).int("phi3.rope.scaling.original_context_length", 1024);
    let chosen = [Some("rope_factors_short.weight"), Some("rope_factors_long.weight")];
    assert_eq!(names(&phi3), chosen);
    let llama = sample(Arch::Llama).int("llama.rope.scaling.original_context_length", 1024);
    assert_eq!(names(&llama), [Some("rope_freqs.weight"); 2]);
    assert_eq!(names(&llama.text("llama.rope.scaling.type", "longrope")), chosen);
    assert_eq!(names(&sample(Arch::Qwen3)), [None; 2]);
}

/// What the keys of one architecture alone change.
#[test]
fn architectures_have_their_own_keys() {
    let window = sample(Arch::Gemma3).int("gemma3.attention.sliding_window", 8);
    let hparams =
        read(&window.clone().int("gemma3.block_count", 7).float("gemma3.final_logit_softcapping", 30.0)).unwrap();
    let windows: Vec<_> = (0..7).map(|block| hparams.block_window(block).map(NonZeroU32::get)).collect();
    assert_eq!(windows, [Some(8), Some(8), Some(8), Some(8), Some(8), None, Some(8)]);
    assert_eq!((hparams.variant.embedding_scale, hparams.variant.logit_cap), (16.0, Some(30.0)));
    let file = window.int("gemma3.attention.sliding_window_pattern", 2).float("gemma3.rope.freq_base", 1e6);
    let hparams = read(&file.float("gemma3.rope.scaling.factor", 8.0)).unwrap();
    let ropes = [0, 1].map(|block| hparams.block_rope(block).map(|rope| (rope.freq_base, rope.freq_scale)));
    assert_eq!(ropes, [Some((1e4, 1.0)), Some((1e6, 0.125))]);

    let granite = sample(Arch::Granite).float("granite.logit_scale", 4.0).float("granite.attention.scale", 0.5);
    let hparams = read(&granite.clone().float("granite.residual_scale", 0.25)).unwrap();
    assert_eq!((hparams.variant.logit_scale, hparams.variant.residual_scale), (0.25, 0.25));
    assert_eq!((hparams.attention_scale(), hparams.variant.embedding_scale), (0.5, 1.0));
    let hparams = read(&granite.flag("granite.rope.scaling.finetuned", false)).unwrap();
    assert_eq!(hparams.block_rope(0), None);
    assert!(read(&sample(Arch::Granite)).unwrap_err().to_string().contains("granite.logit_scale"));

    let hparams = read(&sample(Arch::SmolLm3).int("smollm3.block_count", 5)).unwrap();
    assert_eq!([0, 2, 3, 4].map(|block| hparams.block_rope(block).is_some()), [true, true, false, true]);
    let mixtral = sample(Arch::Llama).int("llama.expert_count", 4).int("llama.expert_used_count", 2);
    assert_eq!(read(&mixtral).unwrap().experts, Some(Experts { count: 4, used: 2, ff: 512 }));
    let mistral3 = sample(Arch::Mistral3).float("mistral3.attention.temperature_scale", 0.1);
    let temperature = Some(Temperature { scale: 0.1, step: 4096.0 });
    assert_eq!(read(&mistral3).unwrap().variant.temperature, temperature);
    let phi3 = sample(Arch::Phi3).int("phi3.rope.dimension_count", 24).int("phi3.attention.sliding_window", 4);
    let hparams = read(&phi3).unwrap();
    assert_eq!((hparams.rope.n_dims, hparams.block_window(0)), (24, None));
}

/// The number of tokens is the length of the list, as in llama.cpp.
#[test]
fn another_vocab_size_than_the_number_of_tokens_is_a_warning() {
    let warnings = |file: &Writer| {
        let bytes = file.to_bytes().unwrap();
        read_with_warnings(&Gguf::parse(&bytes).unwrap().metadata).map(|(hparams, warnings)| (hparams.vocab, warnings))
    };
    let file = sample(Arch::Llama);
    assert_eq!(warnings(&file.clone().int("llama.vocab_size", 3)), Ok((3, vec![])));
    let warning = "llama.vocab_size is 4, but the file has 3 tokens: the model is run with 3".to_owned();
    assert_eq!(warnings(&file.clone().int("llama.vocab_size", 4)), Ok((3, vec![warning])));
    // Without a list it is the number of tokens.
    let without = file.without("tokenizer.ggml.tokens").unwrap();
    assert_eq!(warnings(&without.int("llama.vocab_size", 4)), Ok((4, vec![])));
}

/// Each row is refused by name: the key, a value that changes the logits, and how the message ends.
#[test]
fn keys_that_change_the_logits_and_are_not_implemented_are_refused() {
    type Set = fn(Writer, &str) -> Writer;
    let rows: &[(&str, Set, &str)] = &[
        (
            "attention.causal",
            |file, key| file.flag(key, false),
            "expected true: other values are not implemented, found false",
        ),
        ("attention.causal", |file, key| file.int(key, 0), "expected true: other values are not implemented, found 0"),
        (
            "attention.clamp_kqv",
            |file, key| file.float(key, 8.0),
            "expected 0: other values are not implemented, found 8",
        ),
        ("attention.max_alibi_bias", |file, key| file.float(key, 8.0), "found 8"),
        ("attention.scale", |file, key| file.float(key, 0.125), "found 0.125"),
        ("attention.scale", |file, key| file.float(key, f32::NAN), "found NaN"),
        (
            "attention.output_scale",
            |file, key| file.float(key, 0.5),
            "expected 0 or 1: other values are not implemented, found 0.5",
        ),
        ("attention.value_scale", |file, key| file.float(key, 0.5), "found 0.5"),
        ("attention.temperature_length", |file, key| file.int(key, 8192), "found 8192"),
        ("attention.temperature_scale", |file, key| file.float(key, 0.1), "found 0.1"),
        ("attention.sliding_window", |file, key| file.int(key, 4096), "found 4096"),
        ("attention.sliding_window", |file, key| file.ints(key, &[0, 4096]), "found 4096"),
        ("attention.rope_pattern", |file, key| file.ints(key, &[1, 0]), "expected 1 or true: other values are not"),
        ("attention.shared_kv_layers", |file, key| file.int(key, 1), "found 1"),
        ("attn_logit_softcapping", |file, key| file.float(key, 20.0), "expected 0 or 50: other values are not"),
        ("final_logit_softcapping", |file, key| file.float(key, 20.0), "expected 0 or 30: other values are not"),
        ("router_logit_softcapping", |file, key| file.float(key, 20.0), "found 20"),
        ("logit_scale", |file, key| file.float(key, 16.0), "found 16"),
        ("logit_scale", |file, key| file.text(key, "16"), "found \"16\""),
        ("residual_scale", |file, key| file.float(key, 0.25), "found 0.25"),
        ("embedding_scale", |file, key| file.float(key, 12.0), "found 12"),
        ("rope.scaling.alpha", |file, key| file.float(key, 1000.0), "found 1000"),
        ("hidden_activation", |file, key| file.text(key, "gelu"), "expected silu or swish: other values are not"),
        ("use_parallel_residual", |file, key| file.flag(key, true), "expected false: other values are not"),
        ("swin_norm", |file, key| file.flag(key, true), "found true"),
        ("swiglu_clamp_exp", |file, key| file.floats(key, &[0.0, 7.0]), "found 7"),
        (
            "expert_gating_func",
            |file, key| file.int(key, 2),
            "expected 0 or 1: other values are not implemented, found 2",
        ),
        ("expert_weights_scale", |file, key| file.float(key, 2.5), "found 2.5"),
        ("expert_group_count", |file, key| file.int(key, 8), "found 8"),
        ("expert_shared_count", |file, key| file.int(key, 1), "found 1"),
        ("leading_dense_block_count", |file, key| file.int(key, 1), "found 1"),
        ("moe_every_n_layers", |file, key| file.int(key, 2), "found 2"),
        ("nextn_predict_layers", |file, key| file.int(key, 1), "found 1"),
    ];
    for arch in Arch::ALL {
        for &(key, set, expected) in rows.iter().filter(|(key, ..)| !arch.spec().keys.contains(key)) {
            let key = format!("{arch}.{key}");
            let error = read(&set(sample(arch), &key)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key}: expected ")) && error.contains(expected), "{error}\n{expected}");
        }
    }
}

/// The defaults that llama.cpp writes into the files that it saves, and keys of what these architectures do not have.
#[test]
fn neutral_values_of_keys_that_are_not_implemented_are_accepted() {
    let zeros = [
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attention.scale",
        "attention.output_scale",
        "attention.value_scale",
        "attention.temperature_scale",
        "logit_scale",
        "residual_scale",
        "embedding_scale",
        "expert_weights_scale",
        "ssm.a_float_that_this_program_does_not_know",
    ];
    let counts = [
        "attention.sliding_window",
        "expert_gating_func",
        "expert_group_count",
        "expert_count",
        "expert_used_count",
        "nextn_predict_layers",
        "ssm.conv_kernel",
    ];
    let file = sample(Arch::Llama);
    let file = zeros.iter().fold(file, |file, key| file.float(&format!("llama.{key}"), 0.0));
    let file = counts.iter().fold(file, |file, key| file.int(&format!("llama.{key}"), 0));
    let file = file
        .flag("llama.attention.causal", true)
        .float("llama.attn_logit_softcapping", 50.0)
        .float("llama.final_logit_softcapping", 30.0)
        .float("llama.router_logit_softcapping", 30.0)
        .int("llama.attention.rope_pattern", 1)
        .ints("llama.attention.recurrent_layers", &[0, 0])
        .ints("llama.rope.dimension_sections", &[16, 24, 24, 0])
        .floats("llama.swiglu_clamp_exp", &[0.0, 0.0])
        .int("llama.pooling_type", 3)
        .float("llama.rope.scaling.yarn_ext_factor", -1.0)
        .float("llama.attention.layer_norm_epsilon", 1e-5)
        .flag("llama.expert_weights_norm", false)
        .float("llama.expert_group_scale", 0.05)
        .int("llama.token_shift_count", 2)
        .ints("llama.deepstack_mapping", &[-1, -1])
        .float("llama.kda.gate_lower_bound", f32::NEG_INFINITY)
        .text("llama.hidden_activation", "silu")
        .text("llama.tensor_data_layout", "Meta AI original pth")
        .int("qwen2.attention.sliding_window", 4096);
    let bytes = file.to_bytes().unwrap();
    let (hparams, warnings) = read_with_warnings(&Gguf::parse(&bytes).unwrap().metadata).unwrap();
    assert_eq!((Ok(hparams), warnings), (read(&sample(Arch::Llama)), vec![]));
    // Other keys are named.
    let bytes = file.int("llama.ssm.conv_kernel", 4).text("llama.another", "x").to_bytes().unwrap();
    let warnings = read_with_warnings(&Gguf::parse(&bytes).unwrap().metadata).unwrap().1;
    let expected =
        "this program does not know these keys of the file, and ignores them: llama.another, llama.ssm.conv_kernel";
    assert_eq!(warnings, [expected]);
}
