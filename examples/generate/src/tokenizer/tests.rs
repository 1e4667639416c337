//! Tokenizer tests: the same token ids as llama.cpp for the same vocabularies, and decoding that never splits a character.

use super::*;
use fanout::gguf::{Gguf, Writer};

fn tokenizer(file: &Writer) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::read(&Gguf::parse(&file.to_bytes().unwrap()).unwrap().metadata)
}

const SPM_WORDS: [&str; 26] = [
    "▁", "t", "h", "e", "a", "o", "n", "▁t", "he", "▁the", "th", "▁th", "in", "i", "▁a", "an", "▁▁", "on", "é", "▁o",
    "ne", "▁one", "aa", "aaa", "<sep>", "nn",
];

/// A SentencePiece vocabulary: three special tokens, the 256 bytes, then words with shuffled scores; `<sep>` is user-defined.
fn spm() -> Writer {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(SPM_WORDS.map(str::to_owned));
    let kind = |(id, text): (usize, &String)| match id {
        0 => 2,
        1 | 2 => 3,
        3..259 => 6,
        _ if text == "<sep>" => 4,
        _ => 1,
    };
    let kinds: Vec<i32> = tokens.iter().enumerate().map(kind).collect();
    let mut scores = vec![0.0; 259];
    scores.extend((0..SPM_WORDS.len()).map(|i| -((i * 7 % SPM_WORDS.len()) as f32)));
    Writer::new()
        .text(key::MODEL, "llama")
        .texts(key::TOKENS, &tokens)
        .floats(key::SCORES, &scores)
        .ints(key::TYPES, &kinds)
        .int(key::BOS, 1)
        .int(key::EOS, 2)
        .int(key::UNK, 0)
}

const MERGES: [&str; 21] = [
    "h e", "Ġ t", "Ġt he", "i n", "i s", "' s", "1 2", "12 3", "3 4", "Ġ Ġ", "ĠĠ Ġ", "Ċ Ċ", "l l", "Ã ©", "Ġ a", "! !",
    "t he", "Ġ w", "o r", "Ġw or", "l d",
];

/// A byte-level BPE vocabulary: one token per byte value, the results of the merges, a word that no merge produces, and special
/// tokens.
fn bpe(pre: &str) -> Writer {
    bpe_with(pre, &[("<|endoftext|>", 3), ("<|im_end|>", 3), ("<tool>", 4)]).int(key::BOS, 278).int(key::EOS, 279)
}

/// As [`bpe`], with these special tokens and their types from id 278 on, and without keys that name any of them.
fn bpe_with(pre: &str, special: &[(&str, i32)]) -> Writer {
    let is_itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = '\u{100}'..;
    let character = |b: u8| if is_itself(b) { Some(char::from(b)) } else { others.next() };
    let mut tokens: Vec<String> = (0..=255).filter_map(character).map(String::from).collect();
    assert_eq!((tokens.len(), &*tokens[32]), (256, "Ġ"));
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    tokens.push("Ġworld".to_owned());
    let mut kinds = vec![1; tokens.len()];
    tokens.extend(special.iter().map(|&(text, _)| text.to_owned()));
    kinds.extend(special.iter().map(|&(_, kind)| kind));
    Writer::new()
        .text(key::MODEL, "gpt2")
        .text(key::PRE, pre)
        .texts(key::TOKENS, &tokens)
        .ints(key::TYPES, &kinds)
        .texts(key::MERGES, &MERGES)
}

fn check(tokenizer: &Tokenizer, cases: &[(&str, &[u32])]) {
    for (text, expected) in cases {
        assert_eq!(tokenizer.encode(text).unwrap(), *expected, "{text:?}");
    }
}

#[test]
fn sentencepiece_gives_the_token_ids_of_llama_cpp() {
    let with_space: [(&str, &[u32]); 14] = [
        ("", &[1]),
        (" ", &[1, 275]),
        ("the one", &[1, 268, 280]),
        ("  the  one", &[1, 275, 268, 259, 280]),
        ("hello thé\n", &[1, 259, 267, 111, 111, 264, 270, 277, 13]),
        ("théatre ☃", &[1, 270, 277, 263, 260, 117, 262, 259, 229, 155, 134]),
        ("<s>the</s>one", &[1, 1, 268, 2, 280]),
        ("a<sep> the<sep>", &[1, 273, 283, 275, 260, 267, 283]),
        ("aaaaa naan", &[1, 273, 282, 263, 259, 265, 263, 274]),
        ("▁the", &[1, 275, 260, 267]),
        ("<unk> the", &[1, 0, 275, 260, 267]),
        ("<0x41>", &[1, 259, 63, 51, 123, 55, 52, 65]),
        ("🦀 the", &[1, 259, 243, 162, 169, 131, 268]),
        ("nnne one then", &[1, 259, 284, 279, 280, 268, 265]),
    ];
    check(&tokenizer(&spm()).unwrap(), &with_space);

    let without: [(&str, &[u32]); 8] = [
        ("", &[1]),
        (" ", &[1, 259]),
        ("the one", &[1, 260, 267, 280]),
        ("  the  one", &[1, 275, 260, 267, 259, 280]),
        ("<s>the</s>one", &[1, 1, 260, 267, 2, 264, 279]),
        ("a<sep> the<sep>", &[1, 263, 283, 268, 283]),
        ("aaaaa naan", &[1, 282, 281, 259, 265, 263, 274]),
        ("<0x41>", &[1, 63, 51, 123, 55, 52, 65]),
    ];
    check(&tokenizer(&spm().flag(key::ADD_SPACE, false)).unwrap(), &without);

    let end_only: [(&str, &[u32]); 3] = [("", &[2]), (" ", &[275, 2]), ("the one", &[268, 280, 2])];
    check(&tokenizer(&spm().flag(key::ADD_BOS, false).flag(key::ADD_EOS, true)).unwrap(), &end_only);
}

#[test]
fn byte_level_bpe_gives_the_token_ids_of_llama_cpp() {
    let gpt2: [(&str, &[u32]); 14] = [
        ("", &[]),
        (" ", &[32]),
        ("the world's in 12345", &[272, 275, 276, 261, 32, 259, 32, 263, 52, 53]),
        ("  the   world", &[32, 258, 265, 275, 276]),
        ("he'S he's HE'LL", &[256, 39, 83, 32, 256, 261, 32, 72, 69, 39, 76, 76]),
        ("a\n\n b \r\n\tc", &[97, 267, 32, 98, 32, 13, 10, 9, 99]),
        ("café ☃!!! 🦀", &[99, 97, 102, 269, 32, 226, 152, 131, 271, 33, 32, 240, 159, 166, 128]),
        ("<|endoftext|>the<|im_end|>", &[278, 272, 279]),
        ("the <tool> in<tool>", &[272, 32, 280, 32, 259, 280]),
        ("12 34 world", &[262, 32, 264, 275, 276]),
        (" \n \n x", &[32, 10, 32, 10, 32, 120]),
        ("it is12isn't", &[105, 116, 32, 260, 262, 260, 110, 39, 116]),
        ("日本語 the 123abc", &[230, 151, 165, 230, 156, 172, 232, 170, 158, 258, 32, 263, 97, 98, 99]),
        ("world world", &[119, 274, 276, 275, 276]),
    ];
    check(&tokenizer(&bpe("gpt-2")).unwrap(), &gpt2);

    // llama-bpe: words that are in the vocabulary become one token, and texts start with a begin-of-text token.
    let llama3: [(&str, &[u32]); 6] = [
        ("", &[278]),
        ("the world's in 12345", &[278, 272, 277, 261, 32, 259, 32, 263, 52, 53]),
        ("he'S he's HE'LL", &[278, 256, 39, 83, 32, 256, 261, 32, 72, 69, 39, 76, 76]),
        ("<|endoftext|>the<|im_end|>", &[278, 278, 272, 279]),
        ("it is12isn't", &[278, 105, 116, 32, 260, 262, 260, 110, 39, 116]),
        ("world world", &[278, 119, 274, 276, 277]),
    ];
    check(&tokenizer(&bpe("llama-bpe")).unwrap(), &llama3);

    // qwen2: each digit is a word of its own.
    let qwen2: [(&str, &[u32]); 5] = [
        ("the world's in 12345", &[272, 275, 276, 261, 32, 259, 32, 49, 50, 51, 52, 53]),
        ("12 34 world", &[49, 50, 32, 51, 52, 275, 276]),
        ("it is12isn't", &[105, 116, 32, 260, 49, 50, 260, 110, 39, 116]),
        ("日本語 the 123abc", &[230, 151, 165, 230, 156, 172, 232, 170, 158, 258, 32, 49, 50, 51, 97, 98, 99]),
        ("a\n\n b \r\n\tc", &[97, 267, 32, 98, 32, 13, 10, 9, 99]),
    ];
    check(&tokenizer(&bpe("qwen2")).unwrap(), &qwen2);
}

#[test]
fn a_rendered_chat_begins_with_one_begin_of_text_token() {
    let rendered = |file: Writer, text: &str| tokenizer(&file).unwrap().encode_rendered(text).unwrap();
    assert_eq!(rendered(spm(), "the one"), [1, 268, 280]);
    assert_eq!(rendered(spm(), "<s>the</s>one"), [1, 268, 2, 280]);
    let without = || spm().flag(key::ADD_BOS, false).flag(key::ADD_EOS, true);
    assert_eq!(rendered(without(), "the one"), [268, 280]);
    assert_eq!(rendered(without(), "<s>the one"), [1, 268, 280]);
    let special = tokenizer(&spm()).unwrap().special_tokens().clone();
    assert_eq!((&*special.bos, &*special.eos), ("<s>", "</s>"));
    assert_eq!(tokenizer(&bpe("qwen2").without(key::BOS).unwrap()).unwrap().special_tokens().bos, "");
}

#[test]
fn decoding_restores_the_text_and_never_splits_a_character() {
    let texts = ["the one", "thé ☃\n", "🦀🦀 naan ▁", "日本語"];
    for (file, expected_start) in [(spm(), " "), (bpe("gpt-2"), ""), (bpe("qwen2"), "")] {
        let tokenizer = tokenizer(&file).unwrap();
        for text in texts {
            let tokens = tokenizer.encode(text).unwrap();
            let mut stream = DecodeStream::new(&tokenizer);
            let parts: Vec<String> = tokens.iter().map(|&token| stream.push(token)).collect();
            assert_eq!(stream.finish(), "");
            // SentencePiece may add a space at the start, and decodes U+2581 as a space.
            let spaced = if expected_start.is_empty() { text.to_owned() } else { text.replace('▁', " ") };
            assert_eq!(parts.concat(), format!("{expected_start}{spaced}"));
            assert!(parts.iter().all(|part| !part.contains('\u{fffd}')));
        }
    }
}

#[test]
fn invalid_utf8_becomes_replacement_characters() {
    let tokenizer = tokenizer(&spm()).unwrap();
    let stream = |bytes: &[u8]| {
        let mut stream = DecodeStream::new(&tokenizer);
        let parts: Vec<_> = bytes.iter().map(|&b| stream.push(u32::from(b) + 3)).collect();
        (parts, stream.finish())
    };
    let mark = "\u{fffd}".to_owned();
    assert_eq!(stream(b"\xff"), (vec![mark.clone()], ""));
    assert_eq!(stream("é".as_bytes()), (vec![String::new(), "é".to_owned()], ""));
    assert_eq!(stream(b"\xc3A"), (vec![String::new(), mark.clone() + "A"], ""));
    assert_eq!(stream(b"\xf0\x9f\xa6"), (vec![String::new(); 3], "\u{fffd}"));
    assert_eq!(stream(b"\xc3\xc3\xa9"), (vec![String::new(), mark, "é".to_owned()], ""));
}

#[test]
fn control_tokens_decode_to_nothing_and_may_end_the_text() {
    let spm = tokenizer(&spm()).unwrap();
    assert_eq!(
        (spm.bytes(1), spm.bytes(2), spm.bytes(283), spm.bytes(999)),
        (&b""[..], &b""[..], &b"<sep>"[..], &b""[..])
    );
    assert_eq!(spm.vocab(), 285);
    assert!(spm.is_end(2) && !spm.is_end(1) && !spm.is_end(283));
    let bpe = tokenizer(&bpe("qwen2")).unwrap();
    assert_eq!((bpe.bytes(277), bpe.bytes(278), bpe.bytes(280)), (&b" world"[..], &b""[..], &b"<tool>"[..]));
    assert!(bpe.is_end(278) && bpe.is_end(279) && !bpe.is_end(280));
}

/// A token that ends a reply by its text does so with every type, is one token in a prompt, and is not printed. Each row has the
/// special tokens of a file with their types, and which of them end a reply and which are printed.
#[test]
fn tokens_end_a_reply_by_their_text_whatever_their_type() {
    type Row<'a> = (&'a [(&'a str, i32)], &'a [&'a str], &'a [&'a str]);
    let rows: &[Row<'_>] = &[
        (&[("<|im_start|>", 4), ("<|im_end|>", 4)], &["<|im_end|>"], &["<|im_start|>"]),
        (&[("<|im_end|>", 1), ("<|im_start|>", 3)], &["<|im_end|>"], &[]),
        (&[("<|im_end|>", 5), ("</s>", 6)], &["<|im_end|>", "</s>"], &[]),
        (&[("<|eot_id|>", 4), ("<|eom_id|>", 4)], &["<|eot_id|>", "<|eom_id|>"], &[]),
        (&[("<|endoftext|>", 4), ("<|end_of_text|>", 4)], &["<|endoftext|>", "<|end_of_text|>"], &[]),
        (&[("<EOT>", 4), ("_<EOT>", 4), ("[EOT]", 4)], &["<EOT>", "_<EOT>", "[EOT]"], &[]),
        (&[("[EOS]", 4), ("<eos>", 4), ("[e~[", 4)], &["[EOS]", "<eos>", "[e~["], &[]),
        (&[("<end_of_turn>", 4), ("<turn|>", 4)], &["<end_of_turn>", "<turn|>"], &[]),
        (
            &[("<end_of_utterance>", 4), ("<｜end▁of▁sentence｜>", 4)],
            &["<end_of_utterance>", "<｜end▁of▁sentence｜>"],
            &[],
        ),
        // Of Qwen 2.5 Coder.
        (
            &[("<|fim_prefix|>", 4), ("<|fim_pad|>", 4), ("<|repo_name|>", 4), ("<|file_sep|>", 4)],
            &["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
            &[],
        ),
        // Of gpt-oss.
        (&[("<|channel|>", 3), ("<|return|>", 3)], &["<|return|>"], &["<|channel|>"]),
        // Of tokens for padding, one has the role.
        (&[("<PAD>", 4), ("<|fim_pad|>", 4)], &["<|fim_pad|>"], &["<PAD>"]),
        (&[("[PAD]", 3), ("<reponame>", 3)], &["[PAD]", "<reponame>"], &[]),
        // `<|end|>` ends a message within a reply where other tokens end the reply.
        (&[("<|end|>", 3)], &["<|end|>"], &[]),
        (&[("<|end|>", 4), ("<|return|>", 4)], &["<|end|>", "<|return|>"], &[]),
        (&[("<|end|>", 4), ("<|call|>", 3)], &["<|end|>", "<|call|>"], &[]),
        (&[("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)], &["<|return|>", "<|call|>"], &["<|end|>"]),
        (&[("<|end|>", 3), ("<|return|>", 3), ("<|calls|>", 3)], &["<|return|>", "<|calls|>"], &["<|end|>"]),
        (&[("<|end|>", 3), ("<|flush|>", 3), ("<|calls|>", 3)], &["<|flush|>", "<|calls|>"], &["<|end|>"]),
        (&[("<|end|>", 3), ("<|flush|>", 3), ("<|return|>", 3)], &["<|end|>", "<|flush|>", "<|return|>"], &[]),
        // `</s>` is a word where another token ends the reply.
        (&[("</s>", 3), ("<|tool_response>", 4)], &["<|tool_response>"], &["</s>"]),
    ];
    for &(special, ends, printed) in rows {
        // The key does not undo a removal.
        for eos in [None, Some(278)] {
            let file = bpe_with("qwen2", special);
            let file = if let Some(eos) = eos { file.int(key::EOS, eos) } else { file };
            let tokenizer = tokenizer(&file).unwrap();
            for (id, &(text, _)) in (278..).zip(special) {
                let removed = text == "<|end|>" && !ends.contains(&text) || text == "</s>" && !ends.contains(&text);
                let is_end = ends.contains(&text) || eos == Some(id) && !removed;
                assert_eq!(tokenizer.is_end(id), is_end, "{text} of {special:?}, {eos:?}");
                let bytes = if printed.contains(&text) { text.as_bytes() } else { b"" };
                assert_eq!(tokenizer.bytes(id), bytes, "{text} of {special:?}");
                if text != "</s>" || ends.contains(&text) {
                    assert_eq!(
                        tokenizer.encode(&format!("in{text}in")).unwrap(),
                        [259, id, 259],
                        "{text} of {special:?}"
                    );
                }
            }
        }
    }
}

/// Keys name tokens that end a reply whatever their text and type; a key of padding takes the role from the texts.
#[test]
fn keys_name_tokens_that_end_a_reply() {
    let special = [("<a>", 4), ("<|fim_pad|>", 4), ("<|file_sep|>", 4)];
    let (a, pad, separator) = (278, 279, 280);
    for (key, ends) in [
        (key::EOS, vec![a, pad, separator]),
        (key::EOT, vec![a, pad, separator]),
        (key::EOM, vec![a, pad, separator]),
        ("tokenizer.ggml.fim_pad_token_id", vec![a, separator]),
        ("tokenizer.ggml.fim_rep_token_id", vec![a, pad, separator]),
        ("tokenizer.ggml.fim_sep_token_id", vec![a, pad]),
        ("tokenizer.ggml.fim_pre_token_id", vec![pad, separator]),
    ] {
        let tokenizer = tokenizer(&bpe_with("qwen2", &special).int(key, a)).unwrap();
        let found: Vec<u32> = (0..300).filter(|&id| tokenizer.is_end(id)).collect();
        assert_eq!(found, ends, "{key}");
    }
}

#[test]
fn errors_name_the_key_at_fault() {
    let cases = [
        (spm().without(key::MODEL).unwrap(), "the file has no tokenizer.ggml.model, which"),
        (spm().text(key::MODEL, "bert"), "tokenizer.ggml.model: expected llama, gpt2 or gemma4, the vocabularies this"),
        (spm().without(key::TOKENS).unwrap(), "the file has no tokenizer.ggml.tokens, which"),
        (spm().without(key::SCORES).unwrap(), "the file has no tokenizer.ggml.scores, which"),
        (spm().floats(key::SCORES, &[1.0]), "scores: expected one score for each of 285 tokens, found 1"),
        (spm().floats(key::SCORES, &[f32::NAN]), "scores: expected an array of finite floating-point numbers, found"),
        (spm().ints(key::TYPES, &[1]), "token_type: expected one type for each of 285 tokens, found 1"),
        (spm().ints(key::TYPES, &[1, 7]), "token_type: expected types from 1 to 6, found 7 for token 1"),
        (spm().ints(key::TYPES, &[6; 285]), "expected <0x00> to <0xFF> as bytes, found \"<unk>\" for token 0"),
        (spm().int(key::BOS, 285), "bos_token_id: expected the id of a token, below 285, found 285"),
        (bpe("mystery"), "tokenizer.ggml.pre: expected one of default, llama3, llama-v3, llama-bpe, falcon3, "),
        (bpe("gpt-2").without(key::MERGES).unwrap(), "the file has no tokenizer.ggml.merges, which"),
        (bpe("gpt-2").texts(key::MERGES, &["h e", "he"]), "merges: expected two tokens with a space between them"),
        (bpe("gpt-2").texts(key::MERGES, &[" "]), "with a space between them, found \" \" at 0"),
        (bpe("gpt-2").texts(key::MERGES, &["h "]), "with a space between them, found \"h \" at 0"),
        (
            bpe("glm4").without(key::BOS).unwrap().flag(key::ADD_BOS, true),
            "the file has no tokenizer.ggml.bos_token_id, which",
        ),
        (
            bpe("gpt-2").text(key::MODEL, "gemma4").flag(key::ADD_EOS, true).without(key::EOS).unwrap(),
            "the file has no tokenizer.ggml.eos_token_id, which",
        ),
    ];
    for (file, expected) in cases {
        let error = tokenizer(&file).err().map_or("no error".to_owned(), |e| e.to_string());
        assert!(error.contains(expected), "{error}\n{expected}");
    }
}

#[test]
fn special_tokens_are_cut_out_longest_first() {
    let file = bpe_with("gpt-2", &[("<a>", 4), ("<a><b>", 4), ("b><c", 4)]);
    let ids = |file: &Writer, text: &str| tokenizer(file).unwrap().encode(text).unwrap();
    assert_eq!(ids(&file, "<a><b><c>"), [279, 60, 99, 62], "the longest first");
    assert_eq!(ids(&file, "<b><c<a>"), [60, 280, 278]);
    assert_eq!(ids(&file, "<a> in<a>"), [278, 32, 259, 278]);
}

/// Phi-3's special tokens include the whitespace after them, but for three.
#[test]
fn special_tokens_of_phi_3_include_whitespace_after_them() {
    let special = [("<|endoftext|>", 3), ("<|user|>", 3)];
    let ids = |file: Writer, text: &str| tokenizer(&file).unwrap().encode(text).unwrap();
    let text = "<|user|> \n in<|endoftext|> in";
    assert_eq!(ids(bpe_with("gpt-2", &special), text), [279, 32, 10, 32, 259, 278, 32, 259]);
    let phi3 = bpe_with("gpt-2", &special).text(key::MODEL_NAME, "Phi-3 mini");
    assert_eq!(ids(phi3, text), [279, 259, 278, 32, 259]);
}

/// All vocabularies that `tests/interop/test_vocabularies.py` writes to the folder `FANOUT_VOCABULARIES`, with the texts and ids that
/// it prints. `scripts/interop.sh vocabularies` runs this.
#[test]
#[ignore = "needs vocabularies of llama.cpp's sources, and Python with llama.cpp"]
fn vocabularies_of_a_folder_have_the_token_ids_of_llama_cpp() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/interop/test_vocabularies.py");
    let mut command = std::process::Command::new(variable("FANOUT_PYTHON"));
    let output = command.args([script, "--encode", &variable("FANOUT_VOCABULARIES")]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (mut path, mut current) = (String::new(), None);
    let (mut files, mut same, mut wrong) = (0, 0, Vec::new());
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let row: serde_json::Value = serde_json::from_slice(line).unwrap();
        let (file, text) = (row["file"].as_str().unwrap(), row["text"].as_str().unwrap());
        if path != file {
            path = file.to_owned();
            files += 1;
            let bytes = std::fs::read(&path).unwrap();
            current = Some(Tokenizer::read(&Gguf::parse(&bytes).unwrap().metadata).map_err(|e| e.to_string()));
        }
        let ids: Vec<u64> = row["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let found = match current.as_ref().unwrap() {
            Ok(tokenizer) => tokenizer.encode(text).map_err(|e| e.to_string()),
            Err(e) => Err(e.clone()),
        };
        match found {
            Ok(found) if found.iter().map(|&id| u64::from(id)).eq(ids.iter().copied()) => same += 1,
            found => wrong.push(format!("{path}: {text:?}\n  llama.cpp {ids:?}\n  here      {found:?}")),
        }
    }
    println!("{same} texts have the same tokens, in {files} vocabularies");
    let shown = wrong.iter().take(30).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty() && same > 0, "{} differ:\n{shown}", wrong.len());
}
