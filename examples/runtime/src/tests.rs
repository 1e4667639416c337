//! A random llama gives the same tokens on every list of devices.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use super::*;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::gguf::Writer;
use fanout::rpc::server::{Config, Server};

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

/// The file of a llama with two layers of 64 channels, four heads and two of keys and values.
fn model(folder: &std::path::Path) -> ModelFile {
    let ints =
        [("block_count", 2), ("embedding_length", 64), ("attention.head_count", 4), ("attention.head_count_kv", 2)];
    let file = ints.iter().fold(Writer::new(), |file, (key, value)| file.int(&format!("llama.{key}"), *value));
    let mut seed = 1u32;
    let mut random = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut tensor = |file: Writer, name: &str, ne: &[u64]| {
        let values: Vec<f32> = (0..ne.iter().product()).map(|_| if ne.len() == 1 { 1.0 } else { random() }).collect();
        file.tensor_with_data(&format!("{name}.weight"), ne, DType::F32, bytes_of(&values).to_vec())
    };
    let file = tensor(file, "token_embd", &[64, 50]);
    let mut file = tensor(file, "output_norm", &[64]);
    for layer in 0..2 {
        let matrices = [("attn_q", 64, 64), ("attn_k", 64, 32), ("attn_v", 64, 32), ("attn_output", 64, 64)];
        let matrices = matrices.into_iter().chain([("ffn_gate", 64, 96), ("ffn_up", 64, 96), ("ffn_down", 96, 64)]);
        for (name, k, rows) in matrices {
            file = tensor(file, &format!("blk.{layer}.{name}"), &[k, rows]);
        }
        for name in ["attn_norm", "ffn_norm"] {
            file = tensor(file, &format!("blk.{layer}.{name}"), &[64]);
        }
    }
    let path = folder.join("model.gguf");
    std::fs::write(&path, file.to_bytes().unwrap()).unwrap();
    ModelFile::open(path).unwrap()
}

fn tokens(file: &ModelFile, devices: &str, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    generate(file, devices, prompt, |token| {
        tokens.push(token);
        tokens.len() < count
    })
    .unwrap();
    tokens
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    for tokens in [0, CONTEXT + 1] {
        let error = generate(&file, "CPU", &vec![1; tokens], |_| true).unwrap_err().to_string();
        assert_eq!(error, format!("a prompt of {tokens} tokens: 1 to {CONTEXT} fit"));
    }
}

#[test]
fn all_devices_give_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    let alone = tokens(&file, "CPU", &PROMPT, 12);
    assert!(alone.len() == 12 && alone.iter().any(|&token| token != alone[0]), "{alone:?}");
    // The cache holds what a longer prompt computes.
    let longer: Vec<u32> = PROMPT.iter().chain(&alone[..7]).copied().collect();
    assert_eq!(tokens(&file, "CPU", &longer, 5), alone[7..]);
    assert_eq!(tokens(&file, "CPU,CPU", &PROMPT, 12), alone);

    let start = |_| {
        let device = CpuDevice::new("CPU", 1, MathMode::Fast, 64 << 20).unwrap();
        let server = Server::bind("127.0.0.1", 0, vec![device], Config::default()).unwrap();
        let (address, handle) = (server.local_addr().to_string(), server.handle());
        (address, handle, std::thread::spawn(move || server.run()))
    };
    let [first, second] = [0, 1].map(start);
    assert_eq!(tokens(&file, &format!("{},{}", first.0, second.0), &PROMPT, 12), alone);
    for (_, handle, thread) in [first, second] {
        handle.shutdown();
        thread.join().unwrap();
    }
}
