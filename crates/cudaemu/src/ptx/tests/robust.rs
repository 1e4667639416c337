//! Robustness of the parser: real files parse; damaged files give an error quickly, and nothing panics.

use super::kernel_files;
use crate::ptx::parse;
use std::time::{Duration, Instant};

/// A file that uses every construct of the grammar.
const SAMPLE: &str = include_str!("sample.ptx");

#[test]
fn the_test_kernels_parse() {
    for (name, text) in kernel_files() {
        if let Err(error) = parse(&text) {
            panic!("{name}: {error}");
        }
    }
    let sample = parse(SAMPLE).unwrap();
    assert_eq!((sample.functions.len(), sample.variables.len()), (8, 12));
}

#[test]
fn a_truncated_text_is_parsed_or_rejected_near_its_end() {
    for end in 0..SAMPLE.len() {
        let text = &SAMPLE[..end];
        if let Err(error) = parse(text) {
            let lines = text.split('\n').count() as u32;
            assert!(error.line <= lines, "cut at {end}: {error}");
            // A missing part is reported at the end of the file; an unterminated comment or string is reported where it begins.
            let begins = ["*/", "\""].iter().any(|mark| error.message.starts_with(&format!("expected `{mark}`")));
            let blank = text.trim_end_matches(|c: char| c.is_whitespace());
            assert!(begins || error.line as usize + 6 >= blank.split('\n').count(), "cut at {end}: {error}");
        }
    }
}

#[test]
fn mutated_texts_never_panic() {
    let mut random = fastrand::Rng::with_seed(4);
    let pieces: Vec<_> =
        "{ } ( ) [ ] < > , ; : = + - | @ ! . \" /* */ // % $ _ :: 0x 0f 0d3FF0 4294967296 18446744073709551616 \
        -1 1e999 .reg .b32 .param .align .v4 .global \u{e9} \0 call WARP_SZ"
            .split(' ')
            .chain(["\n"])
            .collect();
    let start = Instant::now();
    for _ in 0..20_000 {
        let mut text = SAMPLE.as_bytes().to_vec();
        for _ in 0..random.usize(1..6) {
            let at = random.usize(..text.len());
            let piece = pieces[random.usize(..pieces.len())].as_bytes();
            match random.u8(..4) {
                0 => text[at] = random.u8(1..),
                1 => _ = text.splice(at..at, piece.iter().copied()),
                2 => _ = text.drain(at..(at + random.usize(1..40)).min(text.len())),
                _ => {
                    let from = random.usize(..text.len());
                    let copy = text[from..(from + random.usize(1..80)).min(text.len())].to_vec();
                    text.splice(at..at, copy);
                }
            }
        }
        let text = String::from_utf8_lossy(&text);
        if let Err(error) = parse(&text) {
            assert!(error.line as usize <= text.split('\n').count() && !error.message.is_empty(), "{error}");
        }
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn hostile_texts_are_parsed_or_rejected_in_linear_time() {
    let head = ".version 8.0\n.target sm_80\n";
    let n = 200_000;
    let body = |inside: String| format!("{head}.entry e() {{\n{inside}\nret;\n}}");
    let cases = [
        ("blocks", body("{".repeat(n)), false),
        ("parentheses", body(format!("mov.u32 %r1, {}", "(".repeat(n))), false),
        ("minus", body(format!("mov.u32 %r1, {}1;", "-".repeat(n))), false),
        ("braces of an initialiser", format!("{head}.global .b8 x[1] = {}", "{".repeat(n)), false),
        ("dimensions", format!("{head}.global .b8 x{};", "[1]".repeat(n)), false),
        ("digits", body(format!("mov.u32 %r1, {};", "1".repeat(n))), false),
        ("digits of a float", body(format!("mov.f64 %r1, {}.0;", "1".repeat(n))), true),
        ("a long name", body(format!("mov.u32 {}, 1;", "a".repeat(n))), true),
        ("a long opcode", body(format!("mov{} %r1, 1;", ".u32".repeat(n))), true),
        ("comments", format!("{head}{}", "/**/".repeat(n)), true),
        ("quotes", format!("{head}{}", "\"".repeat(n)), false),
        ("a long line", format!("{head}{}?", "/* a long line */ ".repeat(n)), false),
        ("labels", body("a:".repeat(n)), true),
        ("section", format!("{head}.section .debug_info {}", "{".repeat(n)), false),
    ];
    for (what, text, good) in cases {
        let start = Instant::now();
        let result = parse(&text);
        assert!(start.elapsed() < Duration::from_secs(5), "{what}: {:?}", start.elapsed());
        assert_eq!(result.is_ok(), good, "{what}: {:?}", result.err().map(|error| error.message));
        if let Err(error) = result {
            assert!(error.quote.len() <= 400 && error.message.len() <= 400, "{what}");
        }
    }
}
