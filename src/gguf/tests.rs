//! Parsing of valid files, and of files that are truncated, damaged or invalid.

#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use super::*;
use crate::tensor::DType;

fn sample() -> Writer {
    Writer::new()
        .text("general.architecture", "llama")
        .int("llama.block_count", 2)
        .float("llama.epsilon", 1e-5)
        .flag("tokenizer.ggml.add_bos_token", true)
        .texts("tokenizer.ggml.tokens", &["<s>", "é", ""])
        .floats("tokenizer.ggml.scores", &[0.0, -1.5, 2.0])
        .ints("tokenizer.ggml.token_type", &[3, 1, 1])
        .tensor("blk.0.attn_q.weight", &[64, 3], DType::Q4_0)
        .tensor("output_norm.weight", &[5], DType::F32)
}

fn parse_error(bytes: &[u8]) -> GgufError {
    Gguf::parse(bytes).err().unwrap()
}

#[test]
fn values_and_tensors_are_read() {
    for version in [2u32, 3] {
        let mut bytes = sample().to_bytes_unchecked();
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.version, version);
        let metadata = &gguf.metadata;
        assert_eq!(metadata.text("general.architecture").unwrap(), Some("llama"));
        assert_eq!(metadata.int("llama.block_count").unwrap(), Some(2));
        assert_eq!(metadata.float("llama.epsilon").unwrap(), Some(1e-5));
        assert_eq!(metadata.flag("tokenizer.ggml.add_bos_token").unwrap(), Some(true));
        assert_eq!(metadata.texts("tokenizer.ggml.tokens").unwrap(), Some(vec!["<s>", "é", ""]));
        assert_eq!(metadata.floats("tokenizer.ggml.scores").unwrap(), Some(vec![0.0, -1.5, 2.0]));
        assert_eq!(metadata.ints("tokenizer.ggml.token_type").unwrap(), Some(vec![3, 1, 1]));
        assert_eq!(metadata.int("llama.nothing").unwrap(), None);
        assert_eq!(metadata.iter().count(), 7);

        let q = gguf.tensor("blk.0.attn_q.weight").unwrap();
        assert_eq!((q.dtype, q.ne, q.bytes.len()), (DType::Q4_0, [64, 3, 1, 1], 108));
        let norm = gguf.tensor("output_norm.weight").unwrap();
        assert_eq!((norm.dtype, norm.ne, norm.bytes.len()), (DType::F32, [5, 1, 1, 1], 20));
        assert_eq!((norm.bytes.start, norm.bytes.start % 32), (q.bytes.start + 128, 0));
        assert!(gguf.tensor("output.weight").is_none());
    }
}

#[test]
fn numbers_of_any_width_are_read() {
    /// A type's number, a value's bytes, and the value as read by `int` and by `float`.
    type Case<'a> = (u32, &'a [u8], Option<u32>, Option<f32>);
    let cases: [Case<'_>; 10] = [
        (0, &[200], Some(200), Some(200.0)),
        (1, &[200], None, Some(-56.0)),
        (2, &[1, 2], Some(513), Some(513.0)),
        (3, &[1, 2], Some(513), Some(513.0)),
        (4, &[255; 4], Some(u32::MAX), Some(u32::MAX as f32)),
        (5, &[255; 4], None, Some(-1.0)),
        (10, &[7, 0, 0, 0, 0, 0, 0, 0], Some(7), Some(7.0)),
        (11, &[255; 8], None, Some(-1.0)),
        (12, &1.5f64.to_le_bytes(), None, Some(1.5)),
        (12, &1e300f64.to_le_bytes(), None, None),
    ];
    for (kind, value, int, float) in cases {
        let bytes = Writer::new().entry("k", kind, value).to_bytes_unchecked();
        let metadata = Gguf::parse(&bytes).unwrap().metadata;
        assert_eq!(metadata.int("k").ok().flatten(), int, "type {kind}");
        assert_eq!(metadata.float("k").ok().flatten(), float, "type {kind}");
    }
}

#[test]
fn an_error_for_a_wrong_type_shows_the_value() {
    let bytes = sample().to_bytes_unchecked();
    let metadata = Gguf::parse(&bytes).unwrap().metadata;
    let error = metadata.int("general.architecture").unwrap_err().to_string();
    assert_eq!(error, "general.architecture: expected a whole number from 0 to 4294967295, found \"llama\"");
    let error = metadata.texts("tokenizer.ggml.token_type").unwrap_err().to_string();
    assert_eq!(error, "tokenizer.ggml.token_type: expected an array of texts, found 3 values of type I32");
    let error = required("llama.nothing", metadata.int("llama.nothing").unwrap()).unwrap_err().to_string();
    assert_eq!(error, "the file has no llama.nothing, which this model needs");
}

/// A file that is truncated at any length is an error, and never a panic.
#[test]
fn truncation_at_every_length_is_an_error() {
    // Without the padding after the last tensor.
    let bytes = sample().to_bytes_unchecked();
    let end = Gguf::parse(&bytes).unwrap().tensors.iter().map(|tensor| tensor.bytes.end).max().unwrap();
    assert!(Gguf::parse(&bytes[..end]).is_ok());
    for length in 0..end {
        let error = parse_error(&bytes[..length]);
        let truncated = matches!(
            error.fault,
            GgufFault::Truncated { .. } | GgufFault::ImpossibleCount { .. } | GgufFault::OutOfFile { .. }
        );
        assert!(truncated && error.offset <= length, "{length} bytes: {error}");
    }
}

/// Random damage with a fixed seed: a damaged file is rejected, or its tensors are within the file and its metadata readable.
#[test]
fn damaged_files_are_rejected_or_harmless() {
    let whole = sample().to_bytes_unchecked();
    let mut rng = fastrand::Rng::with_seed(6);
    let mut rejected = 0;
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..bytes.len());
            bytes[at] = match rng.u8(..4) {
                0 => 0,
                1 => 255,
                2 => bytes[at] ^ (1 << rng.u8(..8)),
                _ => rng.u8(..),
            };
        }
        match Gguf::parse(&bytes) {
            Ok(gguf) => {
                assert!(gguf.tensors.iter().all(|tensor| bytes.get(tensor.bytes.clone()).is_some()));
                for (_, value) in gguf.metadata.iter() {
                    if let Value::Array(array) = value {
                        assert_eq!(array.values().count(), array.len());
                    }
                }
            }
            Err(error) => {
                rejected += 1;
                assert!(error.offset <= bytes.len() && !error.to_string().is_empty());
            }
        }
    }
    assert!(rejected > 1000, "only {rejected} damaged files were rejected");
}

/// `bytes` with the one occurrence of `old` replaced.
fn patched(mut bytes: Vec<u8>, old: &[u8], new: &[u8]) -> Vec<u8> {
    let at: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(old)).collect();
    assert_eq!(at.len(), 1, "{old:?} is at {at:?}");
    bytes.splice(at[0]..at[0] + old.len(), new.iter().copied());
    bytes
}

#[test]
fn errors_name_the_part_and_the_expected_value() {
    let file = sample();
    let bytes = file.to_bytes_unchecked();
    let norm = |dims: u32, ne: u64, dtype: u32| {
        let mut info = b"output_norm.weight".to_vec();
        info.extend(dims.to_le_bytes());
        info.extend(ne.to_le_bytes());
        info.extend(dtype.to_le_bytes());
        info
    };
    let good = norm(1, 5, 0);
    let with = |new: &[u8]| patched(bytes.clone(), &good, new);
    // A file and a part of its error; an empty text for a file that parses.
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GGML and more".to_vec(), "byte 0, magic number: expected the four bytes \"GGUF\", found [47, 47, 4d, 4c]"),
        (patched(bytes.clone(), b"GGUF\x03", b"GGUF\x01"), "byte 4, version: expected version 2 or 3, found 1"),
        (patched(bytes.clone(), b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"), "the file is big-endian"),
        (patched(bytes.clone(), b"GGUF\x03\0\0\0\x02", b"GGUF\x03\0\0\0\xff"), "number of tensors: 255 items where"),
        (
            file.clone().entry("k", 13, &[]).to_bytes_unchecked(),
            "metadata entry \"k\": expected a metadata type, 0 to 12, found 13",
        ),
        (file.clone().entry("k", 7, &[2]).to_bytes_unchecked(), "expected a boolean, 0 or 1, found 2"),
        (
            file.clone().entry("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).to_bytes_unchecked(),
            "expected UTF-8: invalid utf-8",
        ),
        (file.clone().array("k", 9, 1, &[0; 12]).to_bytes_unchecked(), "an array holds arrays"),
        (file.clone().array("k", 4, usize::MAX, &[]).to_bytes_unchecked(), "18446744073709551615 items where the rest"),
        (
            file.clone().int("general.alignment", 24).to_bytes_unchecked(),
            "expected a power of two as alignment, found 24",
        ),
        (
            file.clone().text("general.alignment", "x").to_bytes_unchecked(),
            "general.alignment: expected a whole number",
        ),
        (
            file.clone().int("split.count", 3).int("split.no", 1).to_bytes_unchecked(),
            "this is part 2 of 3 of a split model; join",
        ),
        (
            file.clone().tensor("output_norm.weight", &[1], DType::F32).to_bytes_unchecked(),
            "\"output_norm.weight\" occurs twice",
        ),
        (patched(bytes.clone(), b"llama.epsilon", b"llama.bpsilon"), ""),
        (
            patched(file.clone().int("llama.e", 1).int("llama.f", 1).to_bytes_unchecked(), b"llama.f", b"llama.e"),
            "\"llama.e\" occurs",
        ),
        (with(&norm(5, 5, 0)), "tensor \"output_norm.weight\": expected 1 to 4 dimensions, found 5"),
        (with(&norm(0, 5, 0)), "expected 1 to 4 dimensions, found 0"),
        (with(&norm(1, 0, 0)), "expected at least one element in dimension 0, found none"),
        (with(&norm(1, 5, 4)), "expected a tensor type, found 4, which is removed or unknown"),
        (with(&norm(1, 5, 2)), "a row of 5 elements is not a whole number of Q4_0 blocks of 32"),
        (with(&norm(1, u64::MAX, 0)), "spans more than 2^62 bytes"),
        (with(&norm(1, 500, 0)), "F32 [500, 1, 1, 1] takes 2000 bytes from byte"),
        (
            patched(bytes.clone(), &[&*good, &[128]].concat(), &[&*good, &[129]].concat()),
            "data at 129, expected a multiple",
        ),
    ];
    for (bytes, expected) in cases {
        match Gguf::parse(&bytes) {
            Ok(_) => assert_eq!(expected, "", "parsed"),
            Err(error) => assert!(!expected.is_empty() && error.to_string().contains(expected), "{error}\n{expected}"),
        }
    }
}

#[test]
fn a_file_without_tensors_needs_no_padding() {
    let bytes = Writer::new().int("k", 1).to_bytes_unchecked();
    assert!(Gguf::parse(&bytes).unwrap().tensors.is_empty());
}

/// `read_tensors` needs only the start of a file, of any length up to the limit.
#[test]
fn read_tensors_reads_only_the_start_of_a_file() {
    let pad = |bytes: usize| "x".repeat(bytes);
    for (size, readable) in [(0, true), (3 << 20, true), (20 << 20, true), (MAX_HEAD_BYTES as usize, false)] {
        let file = sample().text("padding", &pad(size)).int("split.count", 2).to_bytes_unchecked();
        let mut reads = std::io::Cursor::new(&file);
        match read_tensors(&mut reads, file.len() as u64) {
            Ok(tensors) => {
                // The same file without the key `split.count`, which `Gguf::parse` rejects.
                let without = sample().text("padding", &pad(size)).int("split.kount", 2).to_bytes_unchecked();
                assert!(readable && tensors == Gguf::parse(&without).unwrap().tensors, "{size}");
            }
            Err(e) => assert!(!readable && e.to_string().contains("takes more than"), "{size}: {e}"),
        }
    }
    // A file that was truncated or extended after its length was read.
    let file = sample().to_bytes_unchecked();
    for (bytes, len) in [(&file[..100], file.len()), (&file[..], 100)] {
        let error = read_tensors(bytes, len as u64).unwrap_err();
        assert!(matches!(&error, HeadError::Gguf(e) if e.ends_early()), "{error}");
    }
}

#[test]
fn counts_beyond_the_limits_are_rejected() {
    let mut file = Writer::new();
    for i in 0..=MAX_ENTRIES {
        file = file.entry(&i.to_string(), 0, &[0]);
    }
    let error = parse_error(&file.to_bytes_unchecked()).to_string();
    assert!(error.contains("number of metadata entries: 65537 items, and no model has more than 65536"), "{error}");
}

/// Keys, names and texts may be as long as the file; messages cut them.
#[test]
fn messages_about_long_texts_are_short() {
    let long = "\x7f".repeat(1 << 20);
    let other = format!("x{}", &long[1..]);
    let row = |dtype: u8| [33, 0, 0, 0, 0, 0, 0, 0, dtype, 0, 0, 0];
    let cases = [
        Writer::new().entry(&long, 7, &[2]).to_bytes_unchecked(),
        Writer::new().entry(&long, 13, &[]).to_bytes_unchecked(),
        Writer::new().entry(&long, 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).to_bytes_unchecked(),
        Writer::new().text("general.alignment", &long).to_bytes_unchecked(),
        Writer::new().tensor(&long, &[1, 1, 1, 1, 1], DType::F32).to_bytes_unchecked(),
        patched(Writer::new().tensor(&long, &[33], DType::F32).to_bytes_unchecked(), &row(0), &row(2)),
        Writer::new().tensor(&long, &[1], DType::F32).tensor(&long, &[1], DType::F32).to_bytes_unchecked(),
        patched(Writer::new().int(&long, 1).int(&other, 1).to_bytes_unchecked(), other.as_bytes(), long.as_bytes()),
    ];
    for (number, bytes) in cases.iter().enumerate() {
        let text = parse_error(bytes).to_string();
        assert!(text.len() < 1024, "{number}: {} bytes: {}", text.len(), &text[..100]);
    }
}
