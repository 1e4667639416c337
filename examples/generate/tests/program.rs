//! Runs the built program as a process.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::path::Path;
use std::process::Command;

use fanout::gguf::Writer;
use fanout::tensor::DType;
use fanout_testing::wrong_uses::{check, create_files, document, other_servers, rows};

/// This test also makes `cargo test` build the program, which scripts then run without building it (`FANOUT_BUILT`).
#[test]
fn help_names_the_options() {
    let output = Command::new(env!("CARGO_BIN_EXE_generate")).arg("--help").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("--tokens"), "{text}");
}

/// A model of one layer, whose weights are 0, with a vocabulary of five tokens.
fn model() -> Writer {
    const WIDTH: u64 = 32;
    let tokens = ["<unk>", "<s>", "</s>", "▁", "x"];
    let vocab = tokens.len() as u64;
    let mut writer = Writer::new()
        .text("general.architecture", "llama")
        .int("llama.block_count", 1)
        .int("llama.embedding_length", WIDTH as u32)
        .int("llama.attention.head_count", 1)
        .int("llama.attention.head_count_kv", 1)
        .int("llama.feed_forward_length", WIDTH as u32)
        .int("llama.context_length", 512)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .floats("tokenizer.ggml.scores", &[0.0; 5])
        .ints("tokenizer.ggml.token_type", &[2, 3, 3, 1, 1])
        .tensor("token_embd.weight", &[WIDTH, vocab], DType::F32)
        .tensor("output.weight", &[WIDTH, vocab], DType::F32);
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        writer = writer.tensor(&format!("{name}.weight"), &[WIDTH], DType::F32);
    }
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        writer = writer.tensor(&format!("blk.0.{name}.weight"), &[WIDTH, WIDTH], DType::F32);
    }
    writer
}

#[test]
fn every_message_is_that_of_the_document() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong-uses");
    create_files(&folder);
    let whole = model().to_bytes().unwrap();
    let mamba = Writer::new().text("general.architecture", "mamba").to_bytes().unwrap();
    let refusing = "{{ raise_exception('no \u{1b}[1msystem prompt') }}";
    for (name, content) in [
        ("model.gguf", &whole[..]),
        ("cut.gguf", &whole[..60]),
        ("mamba.gguf", &mamba),
        ("open.jinja", b"{% for message in messages %}{{ message.content }"),
        ("refusing.jinja", refusing.as_bytes()),
        // In the place of a CUDA driver, so that one of this machine is not found.
        ("no-driver/libcuda.so", b"no library"),
        ("no-driver/libcuda.so.1", b"no library"),
    ] {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }
    // The model itself is right.
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    let output = program.args(["model.gguf", "-p", "x", "-n", "1", "-d", "CPU"]).current_dir(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = rows(&document(), "generate");
    assert!(rows.len() >= 30, "{} rows", rows.len());
    check(&rows, &folder, &other_servers(), |_| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
        program.env("LD_LIBRARY_PATH", folder.join("no-driver")).env_remove("RUST_LOG");
        program
    });
}
